"""Memory that the core is given: each buffer exactly as long as it says, so that a step beyond it is seen."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np


def text(data: bytes) -> Any:
    """Bytes as an argument, without the NUL that ends Python's."""
    array = np.frombuffer(data, np.uint8).copy()
    there = ctypes.cast(array.ctypes.data, ctypes.c_char_p)
    there.array = array  # type: ignore[attr-defined]  # lives as long
    return there


def array(values: Sequence[int], kind: Any = np.int64) -> Any:
    """A column of numbers."""
    return np.array(values, kind)


def view(structure: Any, *columns: Any) -> Any:
    """A structure of pointers to columns; None stands for a missing column."""
    made = structure(*(None if column is None else column.ctypes.data for column in columns))
    made.columns = columns  # live as long
    return ctypes.byref(made)


def taken(size: int, pointer: ctypes.c_void_p) -> bytes:
    """The bytes that a function handed out."""
    assert size >= 0
    return ctypes.string_at(pointer, size) if size else b""
