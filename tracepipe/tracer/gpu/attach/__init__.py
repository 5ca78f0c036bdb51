"""Loads a library of tracepipe into a running process, only where the user names an engine.

enter(4242, library, "CHANNEL=…") → the library's entry was called, on a new thread

The process is stopped for less than a millisecond. Only the library and some pages remain in it.
"""
