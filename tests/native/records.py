"""Records of a capture that are needed, and how many there are."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np

_RECORD_BYTES, _KINDS = 64, 32


def _records(rng: Random, functions: int) -> bytes:
    """Records that begin and end calls, and others."""
    count = rng.choice((0, 1, 7, rng.randrange(3000)))
    words = np.zeros((count, _RECORD_BYTES // 8), np.uint64)
    content = words.view(np.uint8)
    if rng.random() < 0.1:
        return rng.randbytes(count * _RECORD_BYTES)
    words[:, 1] = [rng.randrange(rng.choice((10, 1 << 64))) for _ in range(count)]
    words.view(np.uint32)[:, 4] = [rng.randrange(rng.choice((3, 1000))) for _ in range(count)]
    words.view(np.uint32)[:, 6] = [rng.randrange(functions + 2) for _ in range(count)]
    content[:, 28] = [rng.choice((1, 3, rng.randrange(18))) for _ in range(count)]
    content[:, 32] = [rng.choice((0, 0x10, 0x20)) for _ in range(count)]
    return content.tobytes()


def sieve(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_records_needed` gives places in order, and `tp_records_count` no more than there are."""
    functions = rng.randrange(6)
    chunk = _records(rng, functions)
    count = len(chunk) // _RECORD_BYTES
    roles = bytes(rng.randrange(8) for _ in range(functions))
    limits = np.array([rng.choice((0, 5, (1 << 63) - 1)) for _ in range(functions)], np.int64).tobytes()
    syscalls = np.full(rng.randrange(600), 5, np.int64)
    kinds, places = rng.getrandbits(32), np.empty(count, np.int32)
    given = kinds, roles, limits, functions, syscalls.tobytes(), len(syscalls)
    made = core.tp_records_needed(chunk, count, *given, places.ctypes.data)
    assert 0 <= made <= count
    assert (np.diff(places[:made]) > 0).all()
    by_kind, by_function = np.zeros(_KINDS, np.int64), np.zeros(functions, np.int64)
    core.tp_records_count(chunk, count, functions, by_kind.ctypes.data, by_function.ctypes.data)
    assert by_kind.sum() <= count and by_function.sum() <= by_kind[[1, 3, 14]].sum()
