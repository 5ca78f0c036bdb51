"""Demangles C++ names with the C++ library of this machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1")


def demangled(name: str) -> str:
    """The demangled name; names that are not C++ names are unchanged, as are all without a C++ library."""
    demangle = _demangler()
    if demangle is None or not name.startswith("_Z"):
        return name
    status = ctypes.c_int()
    text = demangle(name.encode(errors="replace"), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        value = ctypes.cast(text, ctypes.c_char_p).value
        return value.decode(errors="replace") if value and not status.value else name
    finally:
        _free()(text)


@cache
def _demangler() -> Callable[..., Any] | None:
    for library in _LIBRARIES:
        try:
            function = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.restype = ctypes.c_void_p
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        return function
    return None


@cache
def _free() -> Callable[..., Any]:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free.restype = None
    return free
