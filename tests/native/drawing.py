"""What both writers are given: operations, events and warps, and a reader with the texts of arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np

from tests.native import buffers, inputs

NUMBERS = 6  # of rows, names and shapes that have texts; columns have one more
_KERNELS = 300  # more than names of warps are remembered of
_ARGS = 1


@contextmanager
def reader_of_texts(core: ctypes.CDLL, rng: Random) -> Iterator[int]:
    """A reader, which keeps the texts of arguments."""
    reader = core.tp_reader_new(rng.getrandbits(64))
    assert reader
    try:
        yield reader
    finally:
        core.tp_reader_free(reader)


def arguments(rng: Random) -> bytes:
    """Text of arguments, mostly of the native grammar."""
    text = inputs.cut(rng, inputs.compact(inputs.arguments(rng)))
    if rng.random() < 0.3:
        return inputs.mutated(rng, text)
    return inputs.hostile(rng) if rng.random() < 0.03 else text


def add_texts(core: ctypes.CDLL, reader: int, count: int, rng: Random) -> None:
    """As a reader keeps them: also those that are not of the native grammar, or are no JSON."""
    for number in range(core.tp_reader_count(reader, _ARGS), count):
        text = arguments(rng) or b"%d" % number
        assert core.tp_reader_number(reader, _ARGS, buffers.text(text), len(text)) >= 0


def drawn(rng: Random, count: int, events: int) -> list[Any]:
    """Columns of operations, the first being their order."""
    return [
        None if rng.random() < 0.3 else buffers.array(rng.sample(range(count), count)),
        buffers.array([rng.randrange(1, 5) for _ in range(count)], np.uint8),
        buffers.array([rng.randrange(4) for _ in range(count)], np.uint8),
        buffers.array([rng.randrange(NUMBERS + 1) for _ in range(count)], np.int32),
        buffers.array([rng.randrange(-1, NUMBERS + 1) for _ in range(count)], np.int32),
        buffers.array(
            [rng.randrange(events) if events and rng.random() < 0.8 else -1 for _ in range(count)], np.int32
        ),
        buffers.array([inputs.moment(rng) for _ in range(count)]),
        buffers.array([rng.choice((0, 0, 7, -7, (1 << 63) - 1, -(1 << 63))) for _ in range(count)]),
        buffers.array([rng.choice((0, 0, 8, -8)) for _ in range(count)]),
        buffers.array([rng.choice((0, 1, -1, (1 << 63) - 1, -(1 << 63))) for _ in range(count)]),
    ]


def given(rng: Random, events: int, args: int) -> list[Any]:
    """Columns of events."""
    return [
        buffers.array([rng.randrange(-1, NUMBERS + 1) for _ in range(events)], np.int32),
        buffers.array([rng.randrange(-1, args + 1) for _ in range(events)], np.int32),
        buffers.array([rng.choice((0, 5, (1 << 63) - 1, -(1 << 63), -1)) for _ in range(events)]),
        None
        if rng.random() < 0.3
        else buffers.array([rng.choice((-1, 0, (1 << 63) - 1)) for _ in range(events)]),
        None
        if rng.random() < 0.5
        else buffers.array([rng.randrange(-1, NUMBERS + 1) for _ in range(events)]),
    ]


def warps(rng: Random) -> tuple[list[Any], list[Any], Any, int]:
    """Columns of changes and of slices, the kernels, and how many changes there are."""
    count, slices = rng.randrange(40), rng.randrange(1, 20)
    unknown = (-1, -1, 0, 5, (1 << 63) - 1)
    kernels = [
        value
        for _ in range(_KERNELS)
        for value in (
            rng.randrange(NUMBERS + 1),
            rng.choice((0, 1, 32)),
            *rng.choice(((0, 0), (4, 2), (0, 3), (3, 0), (1, 1))),
        )
    ]
    changes = [
        buffers.array([inputs.moment(rng) for _ in range(count)]),
        buffers.array([rng.choice((-1, 0, 3, (1 << 63) - 1)) for _ in range(count)]),
        buffers.array([rng.getrandbits(rng.choice((4, 32, 63))) for _ in range(count)]),
        buffers.array([rng.randrange(slices) for _ in range(count)], np.int32),
        buffers.array([rng.choice((1, 1, 1, 2, 2, 2, 4, 4, 3)) for _ in range(count)], np.uint8),
    ]
    by_slice = [buffers.array([rng.choice((0, 1, 77, -1, inputs.number(rng) >> 2)) for _ in range(slices)])]
    by_slice += [buffers.array([rng.choice(unknown) for _ in range(slices)]) for _ in range(4)]
    by_slice += [
        buffers.array([rng.choice((0, 2, -2)) for _ in range(slices)]),
        buffers.array([rng.randrange(NUMBERS + 1) for _ in range(slices)], np.int32),
        buffers.array([rng.randrange(rng.choice((3, _KERNELS))) for _ in range(slices)], np.int32),
        buffers.array([rng.randrange(2) for _ in range(slices)], np.uint8),
    ]
    return changes, by_slice, buffers.array(kernels), count
