"""Loads a library of tracepipe's into a process that runs already, where it was asked for by name.

enter(4242, library, "CHANNEL=…") → the library's entry was called, on a thread of its own

The process is stopped for less than a millisecond, and nothing is left in it but the library and some pages.
"""
