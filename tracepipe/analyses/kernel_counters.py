"""Hardware counters of the GPUs during kernels: the means of the samples inside each kernel."""

from __future__ import annotations

from tracepipe.event.columns import NONE
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


def kernel_counters(run: Run, top: int) -> tuple[Table, int]:
    """The `top` kernels with the most samples, or all for 0, and how many are left out."""
    layer, names = run.layer("gpu_kernel"), run.shapes.column("name")
    of_shape, first = number_rows(names)
    # By name: the launches that are long enough and the samples in them; the sums and the counts of values.
    counts, sums = np.zeros((len(first), 2), np.int64), np.zeros((len(first), 2, len(SERIES)))
    gpus = run.shapes.column("gpu", layer.shape)
    for gpu, samples in run.gpu_samples.items():
        is_there = (np.where(gpus == NONE, 0, gpus) == gpu) & layer.has_length
        rows = np.flatnonzero(is_there & is_long(layer.start_ns, layer.end_ns, samples))
        count, *inside = samples.inside(layer.start_ns[rows], layer.end_ns[rows])
        of = of_shape[layer.shape[rows]][count > 0]
        np.add.at(counts, of, np.stack([np.ones_like(count), count], 1)[count > 0])
        np.add.at(sums, of, np.stack(inside, 1)[count > 0])
    some = np.flatnonzero(counts[:, 1])
    order = some[np.argsort(-counts[some, 1], kind="stable")]
    shown = order[:top] if top > 0 else order
    scales = [_BYTES_A_GB if column.unit == "bytes_per_s" else 1 for column in _COLUMNS]
    table_rows = [
        (
            run.shapes.value("name", int(names[first[at]])),
            *counts[at].tolist(),
            *(
                total / count * scale if count else None
                for total, count, scale in zip(*sums[at].tolist(), scales, strict=True)
            ),
        )
        for at in shown.tolist()
    ]
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
    return Table("counters", title, columns, table_rows, note), len(order) - len(shown)
