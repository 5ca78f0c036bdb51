"""The SM clocks find what their Python reference finds, whatever was read."""

from __future__ import annotations

import ctypes
from random import Random
from typing import Any

import numpy as np

from tests.support.warp_readings import Batch, LikelyGpu, hostile_batches, read
from tracepipe.clocks.sm_clock import HAS_CLOCKS, HAS_COUNTS, HAS_SLOT, NativeSmClocks, SmClocks


def sm_clocks_refine(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_sm_clocks_refine_all` over the batches of one GPU, likely or not, some at a time."""
    seed = rng.getrandbits(32)
    batches = LikelyGpu(seed).batches() if rng.random() < 0.5 else hostile_batches(seed)
    batches = [batch for batch in batches if 0 <= batch[0] < 1 << 63]
    reference, clocks, at = SmClocks(), NativeSmClocks(core), 0
    while at < len(batches):
        some = batches[at : at + rng.randrange(1, 5)]
        found = [reference.refine(*read(batch)) for batch in some]
        finer, entered, stayed = clocks.refine_all(*joined(some))
        assert finer.tolist() == [one is not None for one in found]
        best = [batch[1:3] if one is None else one for one, batch in zip(found, some, strict=True)]
        for column, parts in zip((entered, stayed), zip(*best, strict=True), strict=True):
            assert np.array_equal(column, np.concatenate(parts))
        at += len(some)


def joined(batches: list[Batch]) -> tuple[Any, ...]:
    """Batches as `refine_all` takes them."""
    columns: list[list[Any]] = [[] for _ in range(7)]
    has = []
    for _, *batch in batches:
        slots, counts = batch[3], batch[6]
        has.append(HAS_CLOCKS | HAS_SLOT * (slots is not None) | HAS_COUNTS * (counts is not None))
        for column, part in zip(columns, batch, strict=True):
            column.append(np.full(len(batch[0]), -1) if part is None else part)
    base_ns = np.array([batch[0] for batch in batches], np.int64)
    warps, exits = (np.array([len(batch[at]) for batch in batches], np.int64) for at in (1, 2))
    of_all = [np.concatenate([np.empty(0, np.int64), *parts]) for parts in columns]
    return base_ns, warps, exits, np.array(has, np.uint8), of_all
