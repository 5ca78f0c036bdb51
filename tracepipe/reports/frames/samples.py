"""What can be compared between runs: lengths and times of every function, kernel, copy and block of warps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.libraries import pl
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
    on_gpu = pl.when(pl.col("gpu").is_not_null()).then(pl.lit(" (GPU)")).otherwise(pl.lit(""))
    columns = ("name", "kind", "start_ns", "dur_ns")
    frames = {
        CALL: run.some("userspace", *columns),
        SYSCALL: run.some("syscall", *columns),
        DRIVER: run.some("kernel", *columns),
        EVENT: run.some("scheduler", *columns).filter(pl.col("name") != RUNNING),
        KERNEL: run.some("gpu_kernel", *columns),
        COPY: run.some("transfer", *columns, "gpu").with_columns(pl.col("name") + on_gpu),
    }
    found: dict[Key, Sample] = {}
    for layer, frame in frames.items():
        known = frame.filter(pl.col("kind") != "no_begin").select("name", "start_ns", "dur_ns")
        for (name,), part in known.partition_by("name", as_dict=True, maintain_order=True).items():
            found[layer, str(name)] = _sample(part)
    for (name,), part in _skews(run).partition_by("name", as_dict=True, maintain_order=True).items():
        found[SKEW, str(name)] = _sample(part)
    return found


def _sample(part: pl.DataFrame) -> Sample:
    return Sample(part["start_ns"].to_numpy(), part["dur_ns"].drop_nulls().to_numpy())


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
