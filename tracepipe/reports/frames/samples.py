"""What can be compared between runs: lengths and times of every function, kernel, copy and block of warps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.grouping import sorted_by
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run

CALL, KERNEL, COPY, SKEW = "call", "GPU kernel", "copy", "warp skew"
SYSCALL, DRIVER, EVENT = "system call", "driver function", "scheduler"
DECIDED_BY_PROGRAM = (CALL, KERNEL, COPY)
"""What happens as often as the program says; the others also as chance has it."""
LAYER_OF = {
    CALL: "userspace",
    SYSCALL: "syscall",
    DRIVER: "kernel",
    EVENT: "scheduler",
    KERNEL: "gpu_kernel",
    COPY: "transfer",
    SKEW: "gpu_warp",
}
"""The layer of a recording that each comes from."""
Key = tuple[str, str]
"""Layer, one of the above, and name."""


@dataclass(frozen=True, slots=True)
class Sample:
    """All of one name in one run, in the order of time: numpy integers.

    `starts_ns` are of all, `lengths_ns` of those whose length is known.
    """

    starts_ns: Any
    lengths_ns: Any

    @property
    def total_ns(self) -> int:
        """The lengths together."""
        return int(self.lengths_ns.sum())


def is_recorded(run: Run, layer: str) -> bool:
    """Whether a run has events of a layer, or says that it recorded it."""
    name = LAYER_OF[layer]
    return bool(run.facts.counts[name]) or name in run.facts.header.get("layers", {}).get("got", [])


def samples(run: Run) -> dict[Key, Sample]:
    """Every name of a run. A function called in another is in the time of both."""
    found: dict[Key, Sample] = {}
    for what, name in LAYER_OF.items():
        if what == SKEW:
            skews = _skews(run)
            starts_ns, lengths_ns = (skews[column].to_numpy() for column in ("start_ns", "dur_ns"))
            names, of = _numbers(skews["name"].to_list())
            found |= _by_name(what, of, names.__getitem__, starts_ns, lengths_ns, np.ones(len(of), np.bool_))
            continue
        layer = run.layer(name)
        rows = layer.is_call
        if what == EVENT:
            rows &= ~run.has("name", RUNNING, layer)
        # A copy by the call, and one by the GPU's own times.
        of = run.shapes.column("name", layer.shape).astype(np.int64) * 2
        of += ~run.has("gpu", None, layer) if what == COPY else 0
        found |= _by_name(
            what,
            of[rows],
            lambda number: run.shapes.value("name", number // 2) + (" (GPU)" if number % 2 else ""),
            layer.start_ns[rows],
            (layer.end_ns - layer.start_ns)[rows],
            layer.has_length[rows],
        )
    return found


def _numbers(names: list[Any]) -> tuple[list[str], Int64s]:
    """Each name once, and the place of each there."""
    places: dict[str, int] = {}
    of = [places.setdefault(str(name), len(places)) for name in names]
    return list(places), np.array(of, np.int64)


def _by_name(
    what: str,
    of: Int64s,
    name: Callable[[int], str],
    starts_ns: Int64s,
    lengths_ns: Int64s,
    is_known: Bools,
) -> dict[Key, Sample]:
    """The samples of rows by their numbers: parts of two columns, so that a million names take little."""
    if not len(of):
        return {}
    order, bounds = sorted_by(of)
    starts_ns, is_known, numbers = starts_ns[order], is_known[order], of[order[bounds[:-1]]].tolist()
    lengths_ns = lengths_ns[order][is_known]
    known = np.concatenate([[0], np.cumsum(is_known)])[bounds]
    ranges = zip(numbers, pairwise(bounds.tolist()), pairwise(known.tolist()), strict=True)
    return {
        (what, name(number)): Sample(starts_ns[first:last], lengths_ns[begin:end])
        for number, (first, last), (begin, end) in ranges
    }


def _skews(run: Run) -> pl.DataFrame:
    """From the first warp's leaving to the last one's, of each block with several warps that all left."""
    keys = ("launch", "name", "gpu", "block_index")
    warps = run.warp_table.frame(*keys, "entry_ns", "last_exit_ns").filter(
        pl.col("block_index").is_not_null() & pl.col("launch").is_not_null()
    )
    left = pl.col("last_exit_ns")
    return (
        warps.group_by(*keys, maintain_order=True)
        .agg(
            pl.col("entry_ns").min().alias("start_ns"),
            (left.max() - left.min()).alias("dur_ns"),
            left.null_count().alias("inside"),
            pl.len().alias("warps"),
        )
        .filter((pl.col("inside") == 0) & (pl.col("warps") > 1))
        .sort("start_ns", "block_index")
    )
