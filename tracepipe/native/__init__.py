"""The inner loops in C, called through ctypes with buffers; everything they do is done in Python too.

`library()` is None where there is no compiled core, or where TRACEPIPE_PURE=1 asks for Python alone.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from tracepipe.native.signatures import declare

PURE = "TRACEPIPE_PURE"
NAME = "core.so"


@cache
def _loaded(path: str) -> ctypes.CDLL | None:
    try:
        return declare(ctypes.CDLL(path))
    except OSError:
        return None


def library() -> ctypes.CDLL | None:
    """The compiled core, or None."""
    if os.environ.get(PURE, "0") not in ("", "0"):
        return None
    return _loaded(str(Path(__file__).with_name(NAME)))
