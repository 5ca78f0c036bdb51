"""Loads a library of tracepipe into a running process, only where the user names an engine.

enter(4242, library, "CHANNEL=…") → the library's entry was called, on a thread of its own

The process is stopped for less than a millisecond, and nothing is left in it but the library and some pages.
"""
