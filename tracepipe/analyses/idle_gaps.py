"""The single gaps of GPUs: when, between which work, and what the CPU did in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Final

from tracepipe.analyses.gpu_work import Idle, Work, outermost_rows
from tracepipe.analyses.host_states import STATES, UNKNOWN, HostStates, Spent
from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.reports.frames.arrays import Ints, Rows
from tracepipe.reports.frames.grouping import Grouped, equal
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, made, parts, taken
from tracepipe.store.run import Run

BETWEEN, FIRST, LAST = range(3)
"""Where a gap is: between work, before the first work, after the last work."""
_DOING: Final = {"gap": "i4", "state": "u1", "call": "i4", "syscall": "i4", "dur_ns": "i8"}
_KINDS: Final = {
    "gpu": "i4", "where": "u1", "start_ns": "i8", "end_ns": "i8", "previous": "i4", "following": "i4",
    "call": "i4", "by_order": "?",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class IdleGaps:
    """The gaps of all GPUs, also before the first work and after the last, as columns of shape `(gaps,)`,
    sorted by GPU and start.

    `gpu` is an index into the GPUs that worked. `previous` and `following` are rows of work, NONE for none.
    `call` is the row of the outermost call that launched the following work (after the last work: that work
    itself), NONE where it is not known. `by_order` is as in `Work`.
    """

    gpu: Ints
    where: Ints
    start_ns: Int64s
    end_ns: Int64s
    previous: Ints
    following: Ints
    call: Ints
    by_order: Bools

    def __len__(self) -> int:
        return len(self.start_ns)

    def dur_ns(self, rows: Rows | int) -> Int64s:
        """The lengths of some gaps. Shape `(n,)`."""
        found: Int64s = self.end_ns[rows] - self.start_ns[rows]
        return found

    def total_ns(self) -> int:
        """The sum of all lengths."""
        return sum(int(self.dur_ns(part).sum()) for part in parts(len(self)))

    def take(self, rows: Ints) -> IdleGaps:
        """The gaps at some rows."""
        return IdleGaps(*(taken(getattr(self, field.name), rows) for field in fields(self)))

    def queued_ns(self, run: Run, rows: Ints) -> tuple[Int64s, Bools]:
        """How much of each of some gaps is after the return of the call for the following work, and whether
        that is known. Shapes `(n,)`.
        """
        calls, known = self.call[rows], (self.call[rows] != NONE) & ~self.by_order[rows]
        if not known.any():
            return np.zeros(len(calls), np.int64), known
        returned_ns = run.layer("userspace").end_ns[np.maximum(calls, 0)]
        start_ns, end_ns = self.start_ns[rows], self.end_ns[rows]
        return np.where(known, end_ns - np.clip(returned_ns, start_ns, end_ns), 0), known


def gaps_of(run: Run, work: Work, idle: list[Idle]) -> IdleGaps:
    """Return the gaps of all GPUs, with the call that ended each."""
    found: dict[str, Growing[Any]] = {name: Growing(kind) for name, kind in _KINDS.items() if name != "call"}
    launched = Growing(np.int32)
    for number, one in enumerate(idle):
        for values, of in _gaps(run, number, one):
            by_order = work.by_order[of]
            for name, column in found.items():
                column.extend(by_order if name == "by_order" else values[name], len(of))
            launched.extend(of, len(of))
    rows = launched.whole()
    call = outermost_rows(run, made(len(rows), np.int32, lambda part: work.call[rows[part]]))
    return IdleGaps(**{name: column.whole() for name, column in found.items()}, call=call)


def _gaps(run: Run, number: int, idle: Idle) -> Iterator[tuple[dict[str, int | Ints], Ints]]:
    """Yield the gaps of a GPU, a part at a time, and for each the row of the work whose call ended it."""
    first, gaps = idle.rows.start, idle.gaps
    begin_ns, end_ns = min(run.facts.start_ns, idle.first_ns), max(run.facts.end_ns, idle.last_ns)
    if begin_ns < idle.first_ns:
        yield _outside(number, FIRST, (begin_ns, idle.first_ns), (NONE, first)), np.array([first])
    for part in parts(len(gaps.start_ns)):
        following = gaps.following[part] + first
        values = {
            "gpu": number,
            "where": BETWEEN,
            "start_ns": gaps.start_ns[part],
            "end_ns": gaps.end_ns[part],
            "previous": gaps.previous[part] + first,
            "following": following,
        }
        yield values, following
    if end_ns > idle.last_ns:
        last = first + idle.last
        yield _outside(number, LAST, (idle.last_ns, end_ns), (last, NONE)), np.array([last])


def _outside(
    gpu: int, where: int, times_ns: tuple[int, int], between: tuple[int, int]
) -> dict[str, int | Ints]:
    """The gap before the first work, or after the last."""
    values = (gpu, where, *times_ns, *between)
    return dict(zip(("gpu", "where", "start_ns", "end_ns", "previous", "following"), values, strict=True))


def doing_in(run: Run, states: HostStates, gaps: IdleGaps) -> Spent:
    """What the thread that launched the following work did in each gap: the columns gap, and state, call,
    syscall and dur_ns as in `HostStates.of`.
    """
    found: dict[str, Growing[Any]] = {key: Growing(dtype) for key, dtype in _DOING.items()}
    shapes, calls = run.shapes, run.layer("userspace")
    every = np.arange(len(shapes), dtype=np.int32)
    of_shape, first = equal(shapes.column("pid", every), shapes.column("tid", every))
    unknown = {"state": STATES.index(UNKNOWN), "call": NONE, "syscall": NONE}
    threads, rows = Growing(np.int64), Growing(np.int32)
    for part in parts(len(gaps)):
        known = gaps.call[part] != NONE
        nobody = np.flatnonzero(~known) + part.start
        for key, column in found.items():
            values = {"gap": nobody, "dur_ns": gaps.dur_ns(nobody)} if key not in unknown else unknown
            column.extend(values[key], len(nobody))
        some = np.flatnonzero(known) + part.start
        # Gaps of several GPUs overlap each other, those of one do not.
        thread = of_shape[calls.shape[gaps.call[some]]]
        threads.extend(gaps.gpu[some] * np.int64(len(first)) + thread, len(some))
        rows.extend(some, len(some))
    for number, own in Grouped(threads.whole(), rows.whole()):
        shape = int(first[number % len(first)])
        start_ns, end_ns = taken(gaps.start_ns, own), taken(gaps.end_ns, own)
        for spent in states.of(shapes.ids_of(shape), start_ns, end_ns):
            spent["gap"] = own[spent["stretch"]]
            for key, column in found.items():
                column.extend(spent[key], len(spent["gap"]))
    return {key: column.whole() for key, column in found.items()}
