"""What can be compared between runs: lengths and times of every function, kernel and copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tracepipe.event.columns import Bools, Int64s
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.grouping import sorted_by
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run

CALL, KERNEL, COPY = "call", "GPU kernel", "copy"
SKEW, SPREAD, LATE = "warp skew", "warp spread", "late threads"
EXITS = (SKEW, SPREAD, LATE)
"""How far apart threads and warps leave, which is no time that the program takes."""
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
    **dict.fromkeys(EXITS, "gpu_warp"),
}
"""The layer of a recording that each comes from; of exits also `gpu_thread`."""
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
    got = run.facts.header.get("layers", {}).get("got", [])
    names = (LAYER_OF[layer], "gpu_thread") if layer in EXITS else (LAYER_OF[layer],)
    return any(run.facts.counts[name] or name in got for name in names)


def samples(run: Run) -> dict[Key, Sample]:
    """Every name of a run but its exits. A function called in another is in the time of both."""
    found: dict[Key, Sample] = {}
    for what, name in LAYER_OF.items():
        if what in EXITS:  # `findings` has those
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
