"""Sorting, warps on their slots, and how many run."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from random import Random

import numpy as np

from tests.native import buffers, inputs

_DRAWN, _BESIDE, _OPEN = range(3)
_OUTER, _CROSSING = -1, -2


def _times(rng: Random, count: int) -> list[int]:
    spread = rng.choice((3, 1000, 1 << 40))
    return [inputs.moment(rng) if rng.random() < 0.02 else rng.randrange(spread) for _ in range(count)]


def order(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_order` is a stable sort."""
    count = rng.choice((0, 1, 2, rng.randrange(50), rng.randrange(5000)))
    keys = buffers.array(_times(rng, count))
    made = np.empty(count, np.int64)
    assert core.tp_order(keys.ctypes.data, count, made.ctypes.data) == 0
    assert (made == np.argsort(keys, kind="stable")).all()


def ranges_nest(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_ranges_nest`: each begin has its end, and what is in a range ends in it."""
    counts = [rng.randrange(rng.choice((1, 4, 100))) for _ in range(rng.randrange(5))]
    spread = rng.choice((8, 1000, 1 << 62))
    begins, lengths = [], []
    for count in counts:
        begins += sorted(rng.randrange(spread) for _ in range(count))
    lengths = [rng.randrange(rng.choice((4, spread))) for _ in begins]
    if begins and rng.random() < 0.1:
        lengths[-1] = (1 << 63) - 1
    columns = [buffers.array(one) for one in (counts, begins, lengths)]
    inside, steps = np.empty(len(begins), np.int32), np.empty(2 * len(begins), np.int64)
    pointers = (column.ctypes.data for column in (*columns, inside, steps))
    made = core.tp_ranges_nest(len(counts), *pointers)
    is_drawn = (inside != _CROSSING).tolist()
    assert sorted(steps[:made].tolist()) == [
        2 * at + end for at, one in enumerate(is_drawn) if one for end in (0, 1)
    ]
    around: list[int] = []
    for step in steps[:made].tolist():
        at = step >> 1
        if step & 1:
            assert around.pop() == at
        else:
            assert inside[at] == (around[-1] if around else _OUTER)
            around.append(at)
    for at, outer in enumerate(inside.tolist()):
        if outer >= 0:
            assert begins[outer] <= begins[at]
            assert begins[at] + lengths[at] <= begins[outer] + lengths[outer]


def warps_take(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_warps_take` over some batches: those that are drawn on a row do not overlap."""
    warps = core.tp_warps_new()
    assert warps
    taken: dict[int, list[tuple[int, int]]] = {}
    rows, base = 0, 0
    try:
        for _ in range(rng.randrange(1, 5)):
            rows += rng.randrange(4)
            base += rng.randrange(100)
            _take_one(core, warps, rows, base, taken, rng)
    finally:
        core.tp_warps_free(warps)
    for stays in taken.values():
        stays.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(stays))


def _take_one(
    core: ctypes.CDLL, warps: int, rows: int, base: int, taken: dict[int, list[tuple[int, int]]], rng: Random
) -> None:
    count = rng.randrange(40) if rng.random() < 0.97 else rng.randrange(4000)
    begins = sorted(base + rng.randrange(rng.choice((50, 5000))) for _ in range(count))
    if count and rng.random() < 0.05:
        begins[-1] = (1 << 63) - 1 - rng.randrange(3)
    stays = [
        rng.choice((-1, 0, 1, rng.randrange(60), (1 << 62) if rng.random() < 0.02 else 5)) for _ in begins
    ]
    wrong = rng.random() < 0.05
    places = [rng.randrange(-1, rows + 2) if wrong or not rows else rng.randrange(rows) for _ in begins]
    begin, stay, row = buffers.array(begins), buffers.array(stays), buffers.array(places, np.int32)
    fate = np.empty(count, np.uint8)
    first = rng.randrange(count + 1)
    sizes, bases = buffers.array([first, 0, count - first]), buffers.array([base] * 3)
    pointers = (column.ctypes.data for column in (sizes, bases, begin, stay, row, fate))
    done = core.tp_warps_take(warps, rows, len(sizes), *pointers)
    known = [at for at in range(count) if stays[at] >= 0]
    if all(0 <= places[at] < rows for at in known):
        assert done == 0
        for at in range(count):
            assert fate[at] in (_DRAWN, _BESIDE) if stays[at] >= 0 else fate[at] == _OPEN
    else:
        assert done < 0
        known = known[: next(n for n, at in enumerate(known) if not 0 <= places[at] < rows)]
    for at in known:
        if fate[at] == _DRAWN:
            end = min(begins[at] + stays[at], (1 << 63) - 1)
            taken.setdefault(places[at], []).append((begins[at], end))


def warps_running(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_warps_running`: the running sum after each time, in the last change of it."""
    count = rng.randrange(60)
    times = _times(rng, count)
    deltas = [rng.choice((-1, 1, 1, 127, -128)) for _ in times]
    before, started = rng.choice((0, 500, (1 << 63) - 1)), rng.randrange(1000)
    ts, delta = buffers.array(times), buffers.array(deltas, np.int8)
    made, value = np.empty(count, np.int64), np.full(count, -9, np.int64)
    running = ctypes.c_int64(started)
    columns = (ts.ctypes.data, delta.ctypes.data, before, made.ctypes.data, value.ctypes.data)
    done = core.tp_warps_running(count, *columns, ctypes.byref(running))
    assert done == sum(time < before for time in times)
    assert running.value == started + sum(d for time, d in zip(times, deltas, strict=True) if time < before)
    now = started
    for place in range(done):
        at = made[place]
        now += deltas[at]
        if value[place] >= 0 and (place + 1 == done or times[made[place + 1]] != times[at]):
            assert value[place] == now
