"""What can be compared between runs: lengths and times of every function, kernel and copy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.grouping import sorted_by
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import Growing, flagged, made, parts, taken, touched

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
        touched(self.lengths_ns.nbytes)
        return int(self.lengths_ns.sum())


def is_recorded(run: Run, layer: str) -> bool:
    """Whether a run has events of a layer, or says that it recorded it."""
    got = run.facts.header.get("layers", {}).get("got", [])
    names = (LAYER_OF[layer], "gpu_thread") if layer in EXITS else (LAYER_OF[layer],)
    return any(run.facts.counts[name] or name in got for name in names)


def samples(run: Run) -> dict[Key, Sample]:
    """Every name of a run but its exits. A function called in another is in the time of both."""
    found: dict[Key, Sample] = {}
    for what in LAYER_OF:
        if what in EXITS:  # `findings` has those
            continue
        wanted = np.ones(len(run.shapes), np.bool_)
        every = np.arange(len(run.shapes), dtype=np.int32)
        of_shape = run.shapes.column("name", every).astype(np.int64) * 2
        if what == EVENT:
            wanted = run.shapes.column("name", every) != run.shapes.number_of("name", RUNNING)
        if what == COPY:
            # A copy by the call, and one by the GPU's own times.
            of_shape += run.shapes.column("gpu", every) != NONE
        found |= _by_name(run, what, of_shape, wanted)
    return found


def _by_name(run: Run, what: str, of_shape: Int64s, wanted: Bools) -> dict[Key, Sample]:
    """The samples of a layer's rows of the wanted shapes, by the numbers of these: parts of two columns, so
    that a million names take little.
    """
    layer = run.layer(LAYER_OF[what])
    numbers, rows, is_call = Growing(np.int64), Growing(np.int32), layer.is_call
    for part in parts(len(layer)):
        some = np.flatnonzero(is_call[part] & wanted[layer.shape[part]]) + part.start
        numbers.extend(of_shape[layer.shape[some]], len(some))
        rows.extend(some, len(some))
    if not rows.count:
        return {}
    of, in_file = numbers.whole(), rows.whole()
    order, bounds = sorted_by(of)
    firsts = of[order[bounds[:-1]]].tolist()
    ordered = taken(in_file, order)
    del order
    has_length = layer.has_length
    starts_ns = taken(layer.start_ns, ordered)
    timed = taken(ordered, flagged(len(ordered), lambda part: has_length[ordered[part]]))
    ends_ns = layer.end_ns
    lengths_ns = made(len(timed), np.int64, lambda part: ends_ns[timed[part]] - layer.start_ns[timed[part]])
    known = np.concatenate([[0], np.cumsum(has_length[ordered], dtype=np.int32)])[bounds]
    ranges = zip(firsts, pairwise(bounds.tolist()), pairwise(known.tolist()), strict=True)
    value = run.shapes.value
    return {
        (what, value("name", number // 2) + (" (GPU)" if number % 2 else "")): Sample(
            starts_ns[first:last], lengths_ns[begin:end]
        )
        for number, (first, last), (begin, end) in ranges
    }
