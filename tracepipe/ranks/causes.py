"""What a rank did in the sections of a critical path: kernels and copies by name, and what the host did while
the GPU idled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from tracepipe.analyses.gpu_shares import communicates
from tracepipe.dataset.steps import is_loading, is_step
from tracepipe.event.intervals import Stretches
from tracepipe.kernel_names import short_kernel_name
from tracepipe.libraries import np, pl
from tracepipe.ranks.path import TRANSFERS, Section

COMPUTES, COPIES, LOADS, IDLES, MOVES = "computes", "copies", "loads data", "GPU idle", "transfers"
COMMUNICATES: Final = "communicates"
"""A kernel that moves data, but is not one that all wait for: a send, or one of another stream."""


def causes(
    path: Iterable[Section],
    kernels: dict[int, pl.DataFrame],
    copies: dict[int, pl.DataFrame],
    ranges: dict[int, pl.DataFrame],
) -> Iterator[tuple[Section, str, str, int]]:
    """For each section: what the rank did, the name of the kernel, copy, range or collective, and its ns.

    `kernels`, `copies` and `ranges` have those of the step by rank: `name`, `start_ns`, `end_ns`. Copies are
    those on GPUs, and ranges those that the program marked on its threads. A copy counts while no kernel
    runs. The GPU is idle while neither runs, as in the layer `steps`.
    """
    for section in path:
        if section.what == TRANSFERS:
            yield section, MOVES, section.collective, section.end_ns - section.start_ns
            continue
        every = Stretches(np.array([section.start_ns]), np.array([section.end_ns]))
        own = _within(kernels.get(section.rank), section)
        for name, ns in _shares(own, every).items():
            moves = communicates(short_kernel_name(name))
            yield section, COMMUNICATES if moves else COMPUTES, name, ns
        copied, ran = _within(copies.get(section.rank), section), _stretches(own)
        for name, ns in _shares(copied, _rest(ran, section)).items():
            yield section, COPIES, name, ns
        idle = _rest(ran.joined(_stretches(copied)), section)
        own = _within(ranges.get(section.rank), section)
        loading = own.filter(pl.col("name").map_elements(is_loading, pl.Boolean))
        loads_ns = _stretches(loading).overlap_ns(idle)
        if loads_ns:
            yield section, LOADS, str(loading["name"].mode().sort()[0]), loads_ns
        if idle.total_ns > loads_ns:
            yield section, IDLES, _longest(own, idle), idle.total_ns - loads_ns


def _within(frame: pl.DataFrame | None, section: Section) -> pl.DataFrame:
    """The rows that overlap a section, cut to it. By start, and what encloses another first."""
    if frame is None:
        return pl.DataFrame(schema={"name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64})
    inside = frame.filter(pl.col("start_ns") < section.end_ns, pl.col("end_ns") > section.start_ns)
    inside = inside.sort("start_ns", "end_ns", "name", descending=[False, True, False])
    return inside.with_columns(
        pl.col("start_ns").clip(section.start_ns, None), pl.col("end_ns").clip(None, section.end_ns)
    )


def _shares(work: pl.DataFrame, counted: Stretches) -> Counter[str]:
    """How long work of each name ran in the time that is counted, each ns for the work that began first."""
    start_ns, end_ns = work["start_ns"].to_numpy(), work["end_ns"].to_numpy()
    begun_ns = np.maximum(start_ns, np.concatenate((start_ns[:1], np.maximum.accumulate(end_ns)[:-1])))
    shares = Counter[str]()
    for name, ns in zip(work["name"], counted.covered_ns(begun_ns, end_ns).tolist(), strict=True):
        if ns > 0:
            shares[name] += ns
    return shares


def _stretches(rows: pl.DataFrame) -> Stretches:
    return Stretches(rows["start_ns"].to_numpy(), rows["end_ns"].to_numpy())


def _rest(busy: Stretches, section: Section) -> Stretches:
    """The rest of a section."""
    start_ns = np.concatenate(([section.start_ns], busy.end_ns))
    end_ns = np.concatenate((busy.start_ns, [section.end_ns]))
    return Stretches(start_ns, end_ns)


def _longest(ranges: pl.DataFrame, idle: Stretches) -> str:
    """The range, but for steps and what loads data, in which the GPU idled longest; else empty."""
    some = ranges.filter(
        ~pl.col("name").map_elements(lambda name: is_step(name) or is_loading(name), pl.Boolean)
    )
    if some.is_empty():
        return ""
    inside_ns = idle.covered_ns(some["start_ns"].to_numpy(), some["end_ns"].to_numpy())
    # Of those that last as long the innermost, which began last.
    at = len(inside_ns) - 1 - int(np.argmax(inside_ns[::-1]))
    return str(some["name"][at]) if inside_ns[at] else ""
