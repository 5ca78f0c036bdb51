"""The SM clocks find what their Python reference finds, whatever was read."""

from __future__ import annotations

import ctypes
from random import Random

import numpy as np

from tests.support.warp_readings import LikelyGpu, hostile_batches
from tracepipe.clocks.native_sm_clock import NativeSmClocks
from tracepipe.clocks.sm_clock import SmClocks


def sm_clocks_refine(core: ctypes.CDLL, rng: Random) -> None:
    """`tp_sm_clocks_refine` over the batches of one GPU, likely or not."""
    seed = rng.getrandbits(32)
    reference, clocks = SmClocks(), NativeSmClocks(core)
    for batch in LikelyGpu(seed).batches() if rng.random() < 0.5 else hostile_batches(seed):
        expected, found = reference.refine(*batch), clocks.refine(*batch)
        if expected is None or found is None:
            assert expected is found
        else:
            assert all(map(np.array_equal, expected, found))
