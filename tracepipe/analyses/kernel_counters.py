"""Hardware counters of the GPUs during kernels: the means of the samples inside each kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracepipe.event.columns import NONE, Floats, Ints
from tracepipe.event.groups import number_rows
from tracepipe.libraries import np
from tracepipe.reports.report import Column, Table
from tracepipe.store.run import Run
from tracepipe.store.samples import SERIES, is_long
from tracepipe.units import duration_text

_BYTES_A_GB = 1e9
_COLUMNS = (
    Column("sm_active_percent", "SM active", "percent"),
    Column("tensor_active_percent", "tensor", "percent"),
    Column("dram_read_bytes_per_s", "DRAM read", "bytes_per_s"),
    Column("dram_read_percent", "of peak", "percent"),
    Column("dram_write_bytes_per_s", "DRAM write", "bytes_per_s"),
    Column("dram_write_percent", "of peak", "percent"),
    Column("sm_clock_mhz", "SM MHz", "number"),
)
"""A column for each of SERIES."""


@dataclass(slots=True)
class _Counted:
    """By kernel name: the launches that are long enough and the samples in them, shapes `(names,)`; the sums
    and the counts of the values of SERIES, shapes `(names, series)`.
    """

    launches: Ints
    samples: Ints
    sums: Floats
    known: Floats

    def means(self, at: int) -> Iterator[float | None]:
        """The means of one name, in the units of the columns; None where no sample has a value."""
        for column, total, count in zip(_COLUMNS, self.sums[at], self.known[at], strict=True):
            scale = _BYTES_A_GB if column.unit == "bytes_per_s" else 1
            yield float(total / count) * scale if count else None


def kernel_counters(run: Run, top: int) -> tuple[Table, int]:
    """The `top` kernels with the most samples, or all for 0, and how many are left out."""
    every = np.arange(len(run.shapes), dtype=np.int32)
    names = run.shapes.column("name", every)
    of_shape, first = number_rows(names)
    counted = _counted(run, of_shape, len(first))
    some = np.flatnonzero(counted.samples)
    order = some[np.argsort(-counted.samples[some], kind="stable")]
    shown = order[:top] if top > 0 else order

    def row(at: int) -> tuple[Any, ...]:
        name = run.shapes.value("name", int(names[first[at]]))
        return name, int(counted.launches[at]), int(counted.samples[at]), *counted.means(at)

    columns = (
        Column("name", "kernel"),
        Column("launches", "launches", "count", spare=True),
        Column("samples", "samples", "count"),
        *_COLUMNS,
    )
    intervals = sorted({samples.interval_ns for samples in run.gpu_samples.values()})
    each = " or ".join(map(duration_text, intervals))
    note = (
        f"Means of the samples (one every {each}) inside launches that are longer than two samples. They "
        "count the whole GPU, including other kernels that ran at that time."
    )
    title = "Hardware counters during kernels"
    rows = [row(at) for at in shown.tolist()]
    return Table("counters", title, columns, rows, note), len(order) - len(shown)


def _counted(run: Run, of_shape: Ints, names: int) -> _Counted:
    layer = run.layer("gpu_kernel")
    found = _Counted(
        np.zeros(names, np.int32),
        np.zeros(names, np.int64),
        np.zeros((names, len(SERIES))),
        np.zeros((names, len(SERIES))),
    )
    gpus = run.shapes.column("gpu", layer.shape)
    for gpu, samples in run.gpu_samples.items():
        there = (np.where(gpus == NONE, 0, gpus) == gpu) & layer.has_length
        rows = np.flatnonzero(there & is_long(layer.start_ns, layer.end_ns, samples))
        count, sums, known = samples.inside(layer.start_ns[rows], layer.end_ns[rows])
        of = of_shape[layer.shape[rows]][count > 0]
        np.add.at(found.launches, of, 1)
        np.add.at(found.samples, of, count[count > 0])
        np.add.at(found.sums, of, sums[count > 0])
        np.add.at(found.known, of, known[count > 0])
    return found
