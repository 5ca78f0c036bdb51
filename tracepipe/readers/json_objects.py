"""Finds where the objects of a JSON array begin and end, by brackets and quotes alone.

    [ {"ph":"X", "ts":1.5}, {"ph":"C"}, ]
      └── object ────────┘  └── one ─┘

What is between the brackets is not examined. Parsing will show whether it is JSON. The native core does the
same in `objects.c`.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np

from tracepipe.event.columns import Int64s
from tracepipe.native import library

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|["{}\[\]]', re.DOTALL)
_BETWEEN = re.compile(rb"[\s,]*")
# Objects that are found at a time.
ROOM: Final = 1 << 11


class Objects(NamedTuple):
    """Objects of a text, by their first and last places, and where the search ended: after the last one, with
    its blanks and commas. `is_open`: an object begins there whose end is not in the text.
    """

    starts: Int64s
    ends: Int64s
    at: int
    is_open: bool


def objects(text: bytes, at: int) -> Objects:
    """The objects that follow each other from `at` on, at most ROOM."""
    core = library()
    if core is None:
        return _objects(text, at)
    starts, ends, done = np.empty(ROOM, np.int64), np.empty(ROOM, np.int64), np.array([at, 0], np.int64)
    count = core.tp_objects(text, len(text), done.ctypes.data, starts.ctypes.data, ends.ctypes.data, ROOM)
    return Objects(starts[:count], ends[:count], int(done[0]), bool(done[1]))


def _objects(text: bytes, at: int) -> Objects:
    starts: list[int] = []
    ends: list[int] = []
    is_open = False
    while len(starts) < ROOM:
        at = _after_blanks(text, at)
        if text[at : at + 1] != b"{":
            break
        end = object_end(text, at)
        if end < 0:
            is_open = True
            break
        starts.append(at)
        ends.append(end)
        at = end
    return Objects(np.array(starts, np.int64), np.array(ends, np.int64), at, is_open)


def _after_blanks(text: bytes, at: int) -> int:
    found = _BETWEEN.match(text, at)
    return found.end() if found else at


def object_end(text: bytes, at: int, stop: int = -1) -> int:
    """The end of the object or array that begins at `at`, -1 where it is not in the text, or not before
    `stop`.
    """
    depth = 0
    for token in _TOKENS.finditer(text, at, len(text) if stop < 0 else stop):
        first = text[token.start()]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 0:
                return token.end()
        elif token.end() == token.start() + 1:  # a string that is open
            return -1
    return -1
