"""A ring that two threads empty, as far as its records are whole."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from random import Random

import numpy as np

_RECORD_BYTES = 64


def ring(core: ctypes.CDLL, rng: Random) -> None:
    """What is taken, and what `tp_ring_follow` moves, is all before the first that is being written."""
    page, data_bytes = mmap.PAGESIZE, mmap.PAGESIZE << rng.randrange(4)
    map_fd, file = os.memfd_create("ring"), os.memfd_create("file")
    os.truncate(map_fd, 2 * page + 2 * data_bytes)
    with mmap.mmap(map_fd, 0) as memory:
        content, places = bytearray(rng.randbytes(data_bytes)), data_bytes // _RECORD_BYTES
        busy = {rng.randrange(places) for _ in range(rng.choice((0, 1, 5)))}
        for place in range(places):
            content[place * _RECORD_BYTES + 3] = 0x80 if place in busy else 0
        memory[2 * page :] = bytes(content) * 2
        position, count = rng.randrange(1 << 40) * _RECORD_BYTES, rng.randrange(places + 1)
        memory[:8] = memory[page : page + 8] = position.to_bytes(8, "little")
        there = core.tp_ring_new(map_fd, data_bytes, file)
        assert there
        memory[page : page + 8] = (position + count * _RECORD_BYTES).to_bytes(8, "little")
        assert core.tp_ring_made(there) == count * _RECORD_BYTES
        first = position // _RECORD_BYTES
        ready = next((at for at in range(count) if (first + at) % places in busy), count) * _RECORD_BYTES
        taken = _emptied(core, there, file, rng)
        assert core.tp_ring_left(there) == ready == len(taken)
        assert taken == bytes(content * 2)[position % data_bytes :][:ready]
        core.tp_ring_free(there)
    os.close(map_fd)
    os.close(file)


def _emptied(core: ctypes.CDLL, there: int, file: int, rng: Random) -> bytes:
    """All that can be taken, from the ring and from the file."""
    followers = [
        threading.Thread(target=core.tp_ring_follow, args=(there, 1000, 5000))
        for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    for follower in followers:
        follower.start()
    taken = b""
    while True:
        if moved := core.tp_ring_left(there) - len(taken):
            taken += os.pread(file, moved, len(taken))
            continue
        room = rng.choice((1, 5, 300)) * _RECORD_BYTES
        to = np.zeros(room, np.uint8)
        size = core.tp_ring_copy(there, len(taken), to.ctypes.data, room)
        if size == 0:
            break
        if size > 0 and core.tp_ring_leave(there, len(taken), size):
            taken += to[:size].tobytes()
    core.tp_ring_end(there)
    for follower in followers:
        follower.join()
    return taken
