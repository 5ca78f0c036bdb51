"""Collects samples of the GPUs' hardware counters, and sums them over stretches of time."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracepipe.event.columns import Bools, Int64s, TraceColumns, distinct
from tracepipe.event.counters import (
    DRAM_READ,
    DRAM_READ_SHARE,
    DRAM_WRITE,
    DRAM_WRITE_SHARE,
    GPU_COUNTERS,
    SM_ACTIVE,
    SM_CLOCK,
    TENSOR_ACTIVE,
)
from tracepipe.event.model import COUNTS
from tracepipe.event.tables import Tables
from tracepipe.reports.frames.arrays import AnyArray, Floats, Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, empty, parts

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

SERIES = (SM_ACTIVE, TENSOR_ACTIVE, DRAM_READ, DRAM_READ_SHARE, DRAM_WRITE, DRAM_WRITE_SHARE, SM_CLOCK)
"""The counters that are kept, in the order of the columns."""
# The most GPUs whose samples are kept, as each needs separate files.
_GPUS_MAX = 256
# Larger values are ignored: no GPU has them in any unit, and sums of a billion of them would lose precision.
_VALUE_MAX = 1e15


class CounterTable:
    """The counter samples of a recording, on the trace clock. Call `add` for each batch, then `finish`."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._growing: dict[int, tuple[Growing[Any], ...]] = {}
        self.gpus: dict[int, GpuSamples] = {}
        """The samples of each GPU, after `finish`."""

    def add(self, events: TraceColumns) -> None:
        """Add the samples of a batch, whose shapes and arguments are numbers in the tables. Raises
        OutputError.
        """
        gpus: dict[int, list[int]] = {}
        for number in distinct(events.shape).tolist():
            shape = self._tables.shapes[number] if number >= 0 else None
            if shape is not None and shape.phase == COUNTS and shape.layer == shape.name == GPU_COUNTERS:
                gpus.setdefault(shape.gpu or 0, []).append(number)
        for gpu, shapes in gpus.items():
            # A sample is the mean over its interval, so one without a length has no meaning.
            rows = np.flatnonzero(np.isin(events.shape, shapes) & (events.dur_ns > 0))
            if len(rows) and (gpu in self._growing or len(self._growing) < _GPUS_MAX):
                self._take(gpu, events, rows)

    def _take(self, gpu: int, events: TraceColumns, rows: Ints) -> None:
        args = map(self._tables.args, events.args[rows].tolist())
        values = [[_number(one.get(series)) for series in SERIES] for one in args]
        if gpu not in self._growing:
            width = (len(SERIES),)
            self._growing[gpu] = Growing(np.int64), Growing(np.int64), Growing(np.float64, width)
        start_ns = events.ts_ns[rows]
        taken: tuple[ArrayLike, ...] = start_ns, start_ns + events.dur_ns[rows], values
        for column, more in zip(self._growing[gpu], taken, strict=True):
            column.extend(more, len(rows))

    def finish(self) -> None:
        """Make `gpus` of all samples. Nothing may be added afterwards."""
        for gpu, columns in sorted(self._growing.items()):
            self.gpus[gpu] = GpuSamples(*(column.whole() for column in columns))
        self._growing = {}


def _number(value: float | int | str | None) -> float:
    """A value of a sample; NaN where it is missing or invalid."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < _VALUE_MAX else math.nan


class GpuSamples:
    """The samples of one GPU, sorted by start, and their cumulative sums."""

    def __init__(self, start_ns: Int64s, end_ns: Int64s, values: Floats) -> None:
        if bool((np.diff(start_ns) < 0).any()):
            order = np.argsort(start_ns, kind="stable")
            start_ns, end_ns, values = start_ns[order], end_ns[order], values[order]
        self._start_ns, self._end_ns = start_ns, np.maximum.accumulate(end_ns)
        self.interval_ns = int(np.median(end_ns - start_ns))
        """The median length of a sample."""
        self._sums = _sums(np.nan_to_num, values)
        self._known = _sums(np.isfinite, values)

    def inside(self, start_ns: Int64s, end_ns: Int64s) -> tuple[Int64s, Floats, Floats]:
        """For each stretch the number of samples that are wholly inside it, shape `(n,)`; and for each of
        `SERIES` the sum and the number of their values, shapes `(n, series)`.
        """
        first = np.searchsorted(self._start_ns, start_ns, "left")
        last = np.maximum(np.searchsorted(self._end_ns, end_ns, "right"), first)
        return last - first, self._sums[last] - self._sums[first], self._known[last] - self._known[first]


def _sums(of: Callable[[AnyArray], AnyArray], values: Floats) -> Floats:
    """The cumulative sums of `of(values)`, shape `(rows + 1, series)`. Raises OutputError."""
    sums = empty(len(values) + 1, np.float64, values.shape[1:])
    sums[0] = 0
    for part in parts(len(values)):
        sums[part.start + 1 : part.stop + 1] = sums[part.start] + np.cumsum(of(values[part]), axis=0)
    return sums


def is_long(start_ns: Int64s, end_ns: Int64s, samples: GpuSamples) -> Bools:
    """Flags the stretches that are longer than two samples: at least one sample is wholly inside them. Shapes
    `(n,)`.
    """
    long: Bools = end_ns - start_ns > 2 * samples.interval_ns
    return long
