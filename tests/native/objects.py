"""Objects of an array: each is whole, they follow each other, and all of the text is looked at."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np

from tests.native import buffers

_BYTES = b'{{{}}}[]"",:\\ \n{}a'


def objects(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_objects`."""
    text = bytes(rng.choice(_BYTES) for _ in range(rng.randrange(200)))
    room = rng.randrange(1, 9)
    given, done = buffers.text(text), np.array([rng.randrange(len(text) + 1), 0], np.int64)
    starts, ends = np.empty(room, np.int64), np.empty(room, np.int64)
    first = int(done[0])
    count = core.tp_objects(given, len(text), done.ctypes.data, starts.ctypes.data, ends.ctypes.data, room)
    assert 0 <= count <= room
    assert first <= done[0] <= len(text)
    at = first
    for start, end in zip(starts[:count].tolist(), ends[:count].tolist(), strict=True):
        assert at <= start < end <= done[0]
        assert text[start : start + 1] == b"{"
        assert text[end - 1 : end] in (b"}", b"]")
        at = end
    if done[1]:
        assert text[int(done[0]) : int(done[0]) + 1] == b"{"
