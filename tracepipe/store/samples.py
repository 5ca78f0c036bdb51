"""Samples of the GPUs' hardware counters, summed over stretches of time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.counters import (
    DRAM_READ,
    DRAM_READ_SHARE,
    DRAM_WRITE,
    DRAM_WRITE_SHARE,
    SM_ACTIVE,
    SM_CLOCK,
    TENSOR_ACTIVE,
)
from tracepipe.event.tables import Args

SERIES = (SM_ACTIVE, TENSOR_ACTIVE, DRAM_READ, DRAM_READ_SHARE, DRAM_WRITE, DRAM_WRITE_SHARE, SM_CLOCK)
"""The counters that are kept."""
# Larger values are ignored: no GPU has them in any unit, and sums of a billion of them would lose precision.
_VALUE_MAX = 1e15
_Floats = np.ndarray[Any, np.dtype[np.float64]]


def sample_values(args: Args) -> list[float]:
    """The values of a sample in the order of `SERIES`; NaN where one is missing or invalid."""
    found = (args.get(series) for series in SERIES)
    return [
        float(value) if isinstance(value, (int, float)) and abs(value) < _VALUE_MAX else math.nan
        for value in found
    ]


class GpuSamples:
    """The samples of one GPU, sorted by start. `values` has the shape `(samples, series)`."""

    def __init__(self, start_ns: Int64s, end_ns: Int64s, values: _Floats) -> None:
        order = np.argsort(start_ns, kind="stable")
        start_ns, end_ns, values = start_ns[order], end_ns[order], values[order]
        self._start_ns, self._end_ns = start_ns, np.maximum.accumulate(end_ns)
        self.interval_ns = int(np.median(end_ns - start_ns))
        """The median length of a sample."""
        self._sums = _sums(np.nan_to_num(values))
        self._known = _sums(np.isfinite(values))

    def inside(self, start_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, _Floats, _Floats]:
        """For each stretch the number of samples that are wholly inside it, shape `(n,)`; and for each of
        `SERIES` the sum and the number of their values, shapes `(n, series)`.
        """
        first = np.searchsorted(self._start_ns, start_ns, "left")
        last = np.maximum(np.searchsorted(self._end_ns, end_ns, "right"), first)
        return last - first, self._sums[last] - self._sums[first], self._known[last] - self._known[first]


def _sums(values: Any) -> _Floats:
    """The cumulative sums, shape `(rows + 1, series)`."""
    sums: _Floats = np.zeros((len(values) + 1, *values.shape[1:]))
    np.cumsum(values, axis=0, out=sums[1:])
    return sums


def is_long(start_ns: Int64s, end_ns: Int64s, samples: GpuSamples) -> Bools:
    """Flags the stretches that are longer than two samples: at least one sample is wholly inside them. Shapes
    `(n,)`.
    """
    long: Bools = end_ns - start_ns > 2 * samples.interval_ns
    return long
