"""The figures by which runs are compared: counts and lengths of every function, kernel and copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import batches, sorted_by
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, empty, flagged, made, parts, taken
from tracepipe.store.numbered import Numbered
from tracepipe.store.run import Facts, Run

CALL, KERNEL, COPY = "call", "GPU kernel", "copy"
SKEW, SPREAD, LATE = "warp skew", "warp spread", "late threads"
EXITS = (SKEW, SPREAD, LATE)
"""The layers for how far apart threads and warps exit, which is not time that the program takes."""
SYSCALL, DRIVER, EVENT = "system call", "driver function", "scheduler"
DECIDED_BY_PROGRAM = (CALL, KERNEL, COPY)
"""The layers whose counts the program decides; those of the others also depend on chance."""
LAYER_OF = {
    CALL: "userspace",
    SYSCALL: "syscall",
    DRIVER: "kernel",
    EVENT: "scheduler",
    KERNEL: "gpu_kernel",
    COPY: "transfer",
    **dict.fromkeys(EXITS, "gpu_warp"),
}
"""The layer of records of each; exits are also from `gpu_thread`."""
Key = tuple[str, str]
"""Layer (one of the above) and name."""
Kind = tuple[str, str]
"""Layer, and a suffix of the names of a part of it."""
KINDS: tuple[Kind, ...] = (*((what, "") for what in LAYER_OF), (COPY, " (GPU)"))
"""All kinds: copies with the times of their calls, and copies with the GPU's times, are two kinds."""


MEASURES = ("count", "total_ns", "p50_ns", "p95_ns")
"""The figures of each name: count, sum of the lengths, median, and tail."""
# The least number of lengths that have a tail: 5% of fewer are hardly any.
TAIL_MIN = 100


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of a kind in one recording, as columns of shape `(names,)`: a million names take little
    memory.

    `numbers` are the sorted numbers of the names in `texts`. `values` has a column for each of `MEASURES`,
    with NaN where a figure is not known: medians without lengths, tails of fewer than `TAIL_MIN` lengths.
    """

    texts: Sequence[bytes] | Numbered
    numbers: Int32s
    values: dict[str, Any]


def _measured(
    texts: Sequence[bytes] | Numbered, numbers: Int32s, counts: Ints, lengths_ns: Int64s, bounds: Ints
) -> Measured:
    """The figures of names, each of which has the lengths from one bound to the next. Raises OutputError."""
    values = {name: empty(len(numbers), np.float64) for name in MEASURES}
    values["count"][:] = counts
    for some in batches(bounds):
        first, known = bounds[some.start], np.diff(bounds[some.start : some.stop + 1])
        here = lengths_ns[first : bounds[some.stop]]
        of = np.repeat(np.arange(len(known)), known) if len(known) > 1 else np.zeros(len(here), np.int8)
        values["total_ns"][some] = np.bincount(of, here, len(known))
        ordered = np.sort(here) if len(known) == 1 else here[np.lexsort((here, of))]
        for name, percent, least in (("p50_ns", 50, 1), ("p95_ns", 95, TAIL_MIN)):
            # The nearest rank: the least length that this share of the lengths does not exceed.
            at = bounds[some] - first + (known * percent + 99) // 100 - 1
            enough = known >= least
            values[name][some] = np.nan
            values[name][some][enough] = ordered[at[enough]]
    return Measured(texts, numbers, values)


class Gathering:
    """Collects lengths by name; the lengths of one name may be added in several parts."""

    def __init__(self) -> None:
        self._texts, self._numbers, self._lengths_ns = Numbered(), Growing(np.int32), Growing(np.int64)

    def add(self, name: str, lengths_ns: Ints) -> None:
        """Add lengths of a name, shape `(n,)`. Raises OutputError."""
        number = self._texts.number(name.encode("utf-8", "surrogatepass"))
        for part in parts(len(lengths_ns)):
            count = part.stop - part.start
            self._numbers.extend(number, count)
            self._lengths_ns.extend(lengths_ns[part], count)

    def measured(self) -> Measured:
        """Return the figures of all names. Nothing may be added afterwards. Raises OutputError."""
        numbers = self._numbers.whole()
        order, bounds = sorted_by(numbers)
        names = taken(numbers, order[bounds[:-1]])
        lengths_ns = taken(self._lengths_ns.whole(), order)
        return _measured(self._texts, names, np.diff(bounds), lengths_ns, bounds)


def is_recorded(facts: Facts, layer: str) -> bool:
    """Whether a recording has events of a layer, or states in its header that it recorded the layer."""
    got = facts.header.get("layers", {}).get("got", [])
    names = (LAYER_OF[layer], "gpu_thread") if layer in EXITS else (LAYER_OF[layer],)
    return any(facts.counts[name] or name in got for name in names)


def measures(run: Run) -> dict[Kind, Measured]:
    """Return the figures of all names of a run, without exits. A call inside another counts in both."""
    found: dict[Kind, Measured] = {}
    every = np.arange(len(run.shapes), dtype=np.int32)
    for kind in KINDS:
        what, after = kind
        wanted = np.ones(len(every), np.bool_)
        if what == EVENT:
            wanted = run.shapes.column("name", every) != run.shapes.number_of("name", RUNNING)
        if what == COPY:
            wanted = (run.shapes.column("gpu", every) != NONE) == bool(after)
        of = None if what in EXITS else _by_name(run, what, wanted)  # `findings` has exits
        if of is not None:
            found[kind] = of
    return found


def _by_name(run: Run, what: str, wanted: Bools) -> Measured | None:
    """The figures of a layer's rows with wanted shapes; None where there are no such rows."""
    layer = run.layer(LAYER_OF[what])
    numbers, rows, is_call = Growing(np.int32), Growing(np.int32), layer.is_call
    for part in parts(len(layer)):
        some = np.flatnonzero(is_call[part] & wanted[layer.shape[part]]) + part.start
        numbers.extend(run.shapes.column("name", layer.shape[some]), len(some))
        rows.extend(some, len(some))
    if not rows.count:
        return None
    of, in_file = numbers.whole(), rows.whole()
    order, bounds = sorted_by(of)
    names = taken(of, order[bounds[:-1]])
    ordered = taken(in_file, order)
    del order
    has_length = layer.has_length
    timed = taken(ordered, flagged(len(ordered), lambda part: has_length[ordered[part]]))
    ends_ns = layer.end_ns
    lengths_ns = made(len(timed), np.int64, lambda part: ends_ns[timed[part]] - layer.start_ns[timed[part]])
    known = np.concatenate([[0], np.cumsum(has_length[ordered], dtype=np.int32)])
    length_bounds = made(len(bounds), np.int64, lambda part: known[bounds[part]])
    return _measured(run.shapes.encoded, names, np.diff(bounds), lengths_ns, length_bounds)
