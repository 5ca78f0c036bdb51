"""Wakes threads that wait for a word of shared memory with futex(2), which Python does not provide."""

from __future__ import annotations

import ctypes
import mmap
import platform
from typing import Final

_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_WAKE: Final = 1
_ALL: Final = (1 << 31) - 1
_libc = ctypes.CDLL(None)


def wake_waiters(memory: mmap.mmap, at: int) -> None:
    """Wake all threads, of any process, that wait for the word at `at` to change."""
    word = ctypes.c_uint32.from_buffer(memory, at)
    _libc.syscall(
        ctypes.c_long(_NUMBERS[platform.machine()]),
        ctypes.byref(word),
        ctypes.c_int(_WAKE),
        ctypes.c_int(_ALL),
    )
