"""The single gaps of GPUs: when, between which work, what the CPU did in each, and the sums by cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from tracepipe.analyses.breakdown import HOOKED
from tracepipe.analyses.distribution import PERCENTS
from tracepipe.analyses.gpu_work import Idle, Work, outermost_rows
from tracepipe.analyses.host_states import STATES, USER, HostStates, Spent
from tracepipe.event.columns import NONE, Bools, Int64s, Ints, Rows
from tracepipe.event.intervals import pieces
from tracepipe.store.run import Run

BETWEEN, FIRST, LAST = range(3)
"""Where a gap is: between work, before the first work, after the last work."""


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

    def dur_ns(self, rows: Rows | int = slice(None)) -> Int64s:
        """The lengths of some gaps. Shape `(n,)`."""
        found: Int64s = self.end_ns[rows] - self.start_ns[rows]
        return found

    def select(self, rows: Ints) -> IdleGaps:
        """The gaps at some rows."""
        return IdleGaps(*(getattr(self, field.name)[rows] for field in fields(self)))

    def within(self, start_ns: Int64s, end_ns: Int64s) -> IdleGaps:
        """The parts of the gaps that are inside some spans, cut where a span ends. The spans are sorted, do
        not overlap, and have the shape `(spans,)`.
        """
        rows, start_ns, end_ns = pieces(start_ns, end_ns, self.start_ns, self.end_ns)
        return replace(self.select(rows), start_ns=start_ns, end_ns=end_ns)

    @classmethod
    def joined(cls, parts: Sequence[IdleGaps]) -> IdleGaps:
        """The gaps of several, in order. There is at least one."""
        return cls(*(np.concatenate([getattr(one, name.name) for one in parts]) for name in fields(cls)))

    def queued_ns(self, run: Run, rows: Ints) -> tuple[Int64s, Bools]:
        """How much of each of some gaps is after the return of the call for the following work, and whether
        that is known. Shapes `(n,)`.
        """
        calls, known = self.call[rows], (self.call[rows] != NONE) & ~self.by_order[rows]
        if not known.any():
            return np.zeros(len(calls), np.int64), known
        returned_ns = run.layer("userspace").rows(np.maximum(calls, 0), "end_ns").end_ns
        start_ns, end_ns = self.start_ns[rows], self.end_ns[rows]
        return np.where(known, end_ns - np.clip(returned_ns, start_ns, end_ns), 0), known


def gaps_of(run: Run, work: Work, idle: list[Idle]) -> IdleGaps:
    """Return the gaps of all GPUs, with the call that ended each."""
    columns: list[tuple[Any, ...]] = []
    for number, one in enumerate(idle):
        from_ns, until_ns = min(run.facts.start_ns, one.first_ns), max(run.facts.end_ns, one.last_ns)
        first, last, gaps = one.rows.start, one.rows.start + one.last, one.gaps
        # Each with the row of the work whose call ended it.
        if from_ns < one.first_ns:
            columns.append(([number], [FIRST], [from_ns], [one.first_ns], [NONE], [first], [first]))
        following = gaps.following + first
        same = np.full(len(following), number), np.full(len(following), BETWEEN)
        columns.append((*same, gaps.start_ns, gaps.end_ns, gaps.previous + first, following, following))
        if until_ns > one.last_ns:
            columns.append(([number], [LAST], [one.last_ns], [until_ns], [last], [NONE], [last]))
    gpu, where, start_ns, end_ns, previous, following, launched = (
        np.concatenate([np.asarray(one[at], np.int64) for one in columns] or [np.empty(0, np.int64)])
        for at in range(7)
    )
    call = outermost_rows(run, work.call[launched])
    by_order = work.by_order[launched]
    return IdleGaps(gpu, where, start_ns, end_ns, previous, following, call, by_order)


KEYS = ("state", "call", "syscall")
"""The columns that distinguish causes."""
WHERE = (BETWEEN, FIRST, LAST)
STATE_WORDS = {"other system calls": "system call"}
"""The texts of states whose names are not shown."""


def state_text(state: str, states: HostStates) -> str:
    """The text of a state. "user code" is only shown where all layers were recorded that it could
    be instead.
    """
    whole = {"ioctl", "off-CPU"} <= states.recorded
    if state == HOOKED:
        return states.hooked
    return "user or unrecorded" if state == USER and not whole else STATE_WORDS.get(state, state)


def in_words(states: HostStates, state: int, call: int, syscall: int) -> tuple[str, str | None, str | None]:
    """The texts of a state, a call and the system call inside it, from their numbers."""
    return STATES[state], states.name(call), states.name(syscall)


class Cause(NamedTuple):
    """A state of the CPU while a GPU was idle: the number of gaps between work that have it, the percentiles,
    the maximum and the sum of its time in them, and its time before the first work and after the last. `gpu`
    is as in `IdleGaps`.
    """

    gpu: int
    others: int
    """0, or of how many causes without a row it is the sum; these have no state."""
    state: str
    call: str | None
    gaps: int
    percentiles: list[int] | None
    longest_ns: int | None
    between_ns: int
    before_ns: int
    after_ns: int
    idle_ns: int
    """The time of all causes of the GPU between work."""


def causes_of(run: Run, gaps: IdleGaps, doing: Spent, states: HostStates, top: int) -> list[Cause]:
    """The `top` causes of each GPU with the most time, or all for 0, and the sum of the others. If only one
    is left, it has a row too.
    """
    between, before, after = (f"filter (place = {where})" for where in WHERE)
    shown = f"if({top} > 0 and {top} < causes - 1, {top}, causes)"
    rows = run.store.rows(
        f"""with sums as (
            select gpu, state, call, syscall, count(*) {between} as gaps,
                quantile_disc(dur_ns, {[percent / 100 for percent in PERCENTS]}) {between} as percentiles,
                max(dur_ns) {between} as longest_ns, coalesce(sum(dur_ns) {between}, 0) as between_ns,
                coalesce(sum(dur_ns) {before}, 0) as before_ns, coalesce(sum(dur_ns) {after}, 0) as after_ns
            from doing group by gpu, state, call, syscall),
        named as (
            select sums.*, (?::varchar[])[state + 1] as state_text, coalesce(c.text, s.text) as name
            from sums left join store.texts c on c.number = call
            left join store.texts s on s.number = syscall),
        ranked as (
            select *, count(*) over (partition by gpu) as causes, row_number() over (
                partition by gpu order by between_ns desc, before_ns + after_ns desc, state_text,
                coalesce(name, ''), state, call, syscall) as rank
            from named)
        select gpu, if(min(rank) > {shown}, count(*), 0), any_value(state_text), any_value(name),
            any_value(gaps), any_value(percentiles), any_value(longest_ns), sum(between_ns), sum(before_ns),
            sum(after_ns), sum(sum(between_ns)) over (partition by gpu)
        from ranked group by gpu, causes, least(rank, {shown} + 1) order by gpu, min(rank)""",
        [[state_text(state, states) for state in STATES]],
        doing={key: doing[key] for key in (*KEYS, "dur_ns")}
        | {"gpu": gaps.gpu[doing["gap"]], "place": gaps.where[doing["gap"]]},
    )
    return [Cause(*row) for row in rows]
