"""Matching begins with ends: operations of any input fit their room, and each slice ends at most once."""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import numpy as np

from tests.native import buffers, inputs
from tracepipe.native.signatures import Events, Ops, Shapes, Starts

_IOCTL = 3
_BEGIN, _END = 1, 2
_KINDS = [np.uint8, np.uint8, np.int32, np.int32, np.int32, *[np.int64] * 5]
_LAUNCHES_MANY = 1 << 17  # twice what is remembered


def nest_events(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_nest_events` over some batches, each settled, and the end of the recording."""
    nest = core.tp_nest_new(_IOCTL)
    assert nest
    try:
        rows = rng.randrange(1, 8)
        for _ in range(rows):
            assert core.tp_nest_row(nest, -1, rng.randrange(2)) >= 0
        for row in range(rows):
            near, far = (rng.randrange(-1, rows) for _ in range(2))
            core.tp_nest_above(nest, row, near, far, rng.randrange(3))
        batches = [_batch(core, nest, rows, rng) for _ in range(rng.randrange(1, 4))]
        used = buffers.array([0] * 6, np.uint8)
        core.tp_nest_names(nest, used.ctypes.data)
        to = buffers.array([rng.randrange(6) for _ in range(6)], np.int32)
        core.tp_nest_rename(nest, to.ctypes.data)
        closed = [_closed(core, nest, row, rng) for row in range(rows)]
        _expect_one_end(batches + closed)
        assert core.tp_nest_most(nest, 0) == 0
        early = np.empty((core.tp_nest_count(nest, 6), 4), np.int64)
        assert core.tp_nest_early(nest, early.ctypes.data, len(early)) == len(early)
        for row in range(core.tp_nest_count(nest, 0)):
            assert -1 <= core.tp_nest_base(nest, row) < row or row < rows
        core.tp_nest_forget_rows(nest)
        assert core.tp_nest_count(nest, 0) == core.tp_nest_row(nest, -1, 0) == 0
        assert core.tp_nest_row(nest, -1, 1) == 1
        _batch(core, nest, 2, rng)
    finally:
        core.tp_nest_free(nest)


def _batch(core: ctypes.CDLL, nest: int, rows: int, rng: Random) -> list[np.ndarray]:
    shapes = rng.randrange(1, 12)
    # Mostly begins now and then, for rows that are full; else a mixture.
    phases = b"BBBBBBX" if rng.random() < 0.05 else b"BEIXBEstf"
    count = rng.randrange(60) if len(phases) != 7 else rng.randrange(3000)
    by_shape = (
        buffers.array([rng.randrange(rows) for _ in range(shapes)], np.int32),
        buffers.array([rng.randrange(6) for _ in range(shapes)], np.int32),
        buffers.array([rng.choice((-1, 0)) for _ in range(shapes)]),
        buffers.array([rng.choice(phases) for _ in range(shapes)], np.uint8),
        buffers.array([rng.randrange(2) for _ in range(shapes)], np.uint8),
        buffers.array([rng.randrange(2) for _ in range(shapes)], np.uint8),
    )
    if rng.random() < 0.005:
        count = _LAUNCHES_MANY
        times, launches = np.arange(count), np.random.default_rng(rng.getrandbits(32)).permutation(count)
        numbers = np.zeros(count, np.int32)
        by_shape[3][0], by_shape[5][0] = ord(rng.choice("BEX")), 1
    else:
        spread = rng.choice((5, 100, 10**9))
        moments = [inputs.moment(rng) // 10**9 * 10**9 + rng.randrange(spread) for _ in range(count)]
        moments = [inputs.within_64_bits(moment) for moment in moments]
        times = buffers.array(moments if rng.random() < 0.1 else sorted(moments))
        launches = buffers.array([_number(rng, 9) for _ in range(count)])
        numbers = buffers.array([rng.randrange(shapes) for _ in range(count)], np.int32)
    lengths = buffers.array([_number(rng, 40) >> 1 for _ in range(count)])
    bounds = None if rng.random() < 0.5 else buffers.array([rng.choice((0, 5, 2**62)) for _ in range(count)])
    most = core.tp_nest_most(nest, count)
    ops = [np.empty(most, kind) for kind in _KINDS]
    args = buffers.array([rng.randrange(-1, 3) for _ in range(count)], np.int32)
    events = buffers.view(Events, times, lengths, launches, bounds, numbers, args)
    view = buffers.view(Ops, *ops)
    middle = rng.randrange(count + 1)
    made = _nested(core, nest, (events, buffers.view(Shapes, *by_shape)), (0, middle), view, 0, rng)
    assert 0 <= made <= most
    special = buffers.array(numbers, np.int32)
    odd = [at for at in range(count) if rng.random() < 0.05]
    special[odd] = -2
    events = buffers.view(Events, times, lengths, launches, bounds, special, args)
    made = _nested(
        core, nest, (events, buffers.view(Shapes, *by_shape)), (middle, count), view, made, rng, odd
    )
    # An end of a flow may be of a slice that is there.
    drawn = np.append(numbers[:middle], special[middle:][special[middle:] >= 0]).astype(np.int32)
    ends = np.isin(np.asarray(by_shape[3])[drawn], list(b"stf")).sum() if len(drawn) else 0
    assert len(drawn) - ends <= made <= most
    ops = [column.copy() for column in ops]
    core.tp_nest_settle(nest, buffers.view(Ops, *ops), made)
    one = buffers.view(Ops, *ops)
    while made + 2 + core.tp_nest_most(nest, 0) <= most and rng.random() < 0.8:
        phase, ts, dur = rng.choice(b"BEIX"), inputs.moment(rng), rng.randrange(-1, 40)
        made = core.tp_nest_one(nest, rng.randrange(rows), phase, ts, dur, rng.randrange(6), -2, one, made)
        assert made >= 0
        overlap = core.tp_nest_overlap_row(
            nest, rng.randrange(rows), ts, inputs.within_64_bits(ts + abs(dur))
        )
        assert -1 <= overlap < core.tp_nest_count(nest, 0)
    # What is open is given no flow in these any more: they are of a batch that is gone.
    return [column[:made].copy() for column in ops]


def _nested(
    core: ctypes.CDLL,
    nest: int,
    given: tuple[Any, Any],
    part: tuple[int, int],
    view: Any,
    made: int,
    rng: Random,
    odd: list[int] | None = None,
) -> int:
    """Nest events, where some of those that are `odd` are batches of warps."""
    places = [at for at in odd or () if part[0] <= at < part[1] and rng.random() < 0.8]
    starts = (
        buffers.array(places),
        buffers.array([_number(rng, 9) for _ in places]),
        buffers.array([inputs.moment(rng) for _ in places]),
        buffers.array([rng.choice((0, 5, 2**62)) for _ in places]),
        buffers.array([rng.randrange(4) for _ in places], np.uint8),
        buffers.array([1] * len(places)),
    )
    warps = buffers.view(Starts, *starts)
    core.tp_nest_horizon(nest, inputs.moment(rng))
    done: int = core.tp_nest_events(nest, *given, warps, len(places), *part, view, made)
    assert not (starts[-1] % 2).any()
    return done


def _number(rng: Random, few: int) -> int:
    """One of few as a rule, else anything of 63 bits."""
    return inputs.within_64_bits(inputs.number(rng)) if rng.random() < 0.1 else rng.randrange(few)


def _closed(core: ctypes.CDLL, nest: int, row: int, rng: Random) -> list[np.ndarray]:
    most = core.tp_nest_most(nest, 0)
    ops = [np.empty(most, kind) for kind in _KINDS]
    made = core.tp_nest_close(nest, row, inputs.moment(rng), buffers.view(Ops, *ops), 0)
    assert 0 <= made <= most
    return [column[:made] for column in ops]


def _expect_one_end(batches: list[list[np.ndarray]]) -> None:
    """Spans are numbered in the order in which they begin; all end once in the end."""
    kind, span = (np.concatenate([columns[place] for columns in batches]) for place in (0, 8))
    begun, ended = span[kind == _BEGIN], span[kind == _END]
    assert (begun == np.arange(len(begun))).all()
    drawn = np.bincount(ended, minlength=len(begun)) if len(ended) else np.zeros(len(begun))
    assert drawn.max(initial=0) <= 1
