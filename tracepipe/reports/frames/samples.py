"""What can be compared between runs: lengths and times of every function, kernel and copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.grouping import sorted_by, starts_of
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.numbered import Numbered
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
Kind = tuple[str, str]
"""Layer, and what stands after the names of a part of it."""
KINDS: tuple[Kind, ...] = (*((what, "") for what in LAYER_OF), (COPY, " (GPU)"))
"""All of them: copies by the call, and by the GPU's own times, are two."""


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


@dataclass(frozen=True, slots=True)
class Named:
    """The samples of one kind in a run, a place in the columns for each name, so that a million take little.

    `numbers` are those of the names in `texts`, in their order. The times of the name at a place are those
    from one bound to the next.
    """

    texts: Numbered
    numbers: Int32s
    starts_ns: Int64s
    start_bounds: Int64s
    lengths_ns: Int64s
    length_bounds: Int64s

    def __len__(self) -> int:
        return len(self.numbers)

    def text(self, at: int) -> str:
        """The name at a place."""
        return self.texts[int(self.numbers[at])].decode("utf-8", "surrogatepass")

    def sample(self, at: int) -> Sample:
        """All of the name at a place."""
        starts = slice(*self.start_bounds[at : at + 2].tolist())
        lengths = slice(*self.length_bounds[at : at + 2].tolist())
        return Sample(self.starts_ns[starts], self.lengths_ns[lengths])

    def totals_ns(self) -> Int64s:
        """The lengths of each name together."""
        totals_ns = np.zeros(len(self), np.int64)
        for part in parts(len(self.lengths_ns)):
            of = np.searchsorted(self.length_bounds, np.arange(part.start, part.stop), "right") - 1
            np.add.at(totals_ns, of, self.lengths_ns[part])
        return totals_ns

    def places_of(self, other: Named) -> Int32s:
        """The place here of each name of another run, NONE where it is not here. Raises OutputError."""
        if not len(self):
            return np.full(len(other), NONE, np.int32)

        def places(part: slice) -> Any:
            numbers = [self.texts.find(other.texts[number]) for number in other.numbers[part].tolist()]
            at = np.minimum(np.searchsorted(self.numbers, numbers), len(self) - 1)
            return np.where(self.numbers[at] == numbers, at, NONE)

        of_other: Int32s = made(len(other), np.int32, places)
        return of_other


class Gathering:
    """Samples on their way into columns: what is of one name may come in several parts."""

    def __init__(self) -> None:
        self._texts, self._numbers = Numbered(), Growing(np.int32)
        self._starts_ns, self._lengths_ns = Growing(np.int64), Growing(np.int64)

    def add(self, name: str, starts_ns: Int64s, lengths_ns: Int64s) -> None:
        """Add some of a name. Raises OutputError."""
        number = self._texts.number(name.encode("utf-8", "surrogatepass"))
        for part in parts(len(starts_ns)):
            count = part.stop - part.start
            self._numbers.extend(number, count)
            self._starts_ns.extend(starts_ns[part], count)
            self._lengths_ns.extend(lengths_ns[part], count)

    def named(self) -> Named:
        """All that came, in the order of time under each name. No more is to be added. Raises OutputError."""
        self._texts.put_away()
        numbers, starts_ns = self._numbers.whole(), self._starts_ns.whole()
        order = np.lexsort((starts_ns, numbers)).astype(np.int32)
        ordered = taken(numbers, order)
        firsts = starts_of(ordered)
        bounds = np.append(firsts, len(order))
        starts_ns, lengths_ns = (taken(column, order) for column in (starts_ns, self._lengths_ns.whole()))
        return Named(self._texts, ordered[firsts], starts_ns, bounds, lengths_ns, bounds)


def no_names() -> Named:
    """What a run has of a kind that is not in it."""
    return Gathering().named()


def is_recorded(run: Run, layer: str) -> bool:
    """Whether a run has events of a layer, or says that it recorded it."""
    got = run.facts.header.get("layers", {}).get("got", [])
    names = (LAYER_OF[layer], "gpu_thread") if layer in EXITS else (LAYER_OF[layer],)
    return any(run.facts.counts[name] or name in got for name in names)


def samples(run: Run) -> dict[Kind, Named]:
    """Every name of a run but its exits. A function called in another is in the time of both."""
    found: dict[Kind, Named] = {}
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


def _by_name(run: Run, what: str, wanted: Bools) -> Named | None:
    """The samples of a layer's rows of the wanted shapes; None where there is no such row."""
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
    starts_ns = taken(layer.start_ns, ordered)
    timed = taken(ordered, flagged(len(ordered), lambda part: has_length[ordered[part]]))
    ends_ns = layer.end_ns
    lengths_ns = made(len(timed), np.int64, lambda part: ends_ns[timed[part]] - layer.start_ns[timed[part]])
    known = np.concatenate([[0], np.cumsum(has_length[ordered], dtype=np.int32)])
    length_bounds = made(len(bounds), np.int64, lambda part: known[bounds[part]])
    start_bounds = made(len(bounds), np.int64, lambda part: bounds[part])
    return Named(run.shapes.names, names, starts_ns, start_bounds, lengths_ns, length_bounds)
