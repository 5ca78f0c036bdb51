"""What the CPU did while GPUs were idle, summed by cause."""

from __future__ import annotations

from collections.abc import Callable
from heapq import nsmallest

from tracepipe.analyses.breakdown import HOOKED
from tracepipe.analyses.host_states import STATES, USER, HostStates, Spent
from tracepipe.analyses.idle_gaps import BETWEEN, FIRST, LAST, IdleGaps
from tracepipe.event.columns import Int64s
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import Grouped, equal, greatest
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import made, parts, taken, zeros
from tracepipe.reports.frames.text_order import in_text_order

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


class Causes:
    """What the CPU did while each GPU was idle: a number for each GPU, state and call. `gpu` has the GPU of
    each, shape `(causes,)`, and `sums_ns` its time, for each of WHERE.
    """

    def __init__(self, gaps: IdleGaps, doing: Spent, states: HostStates) -> None:
        count, self._doing, self._states = len(doing["gap"]), doing, states
        gpu_of = made(count, np.int32, lambda part: gaps.gpu[doing["gap"][part]])
        of, first = equal(gpu_of, *(doing[key] for key in KEYS))
        self.gpu, self._first = taken(gpu_of, first), first
        self._where = made(count, np.uint8, lambda part: gaps.where[doing["gap"][part]])
        self.sums_ns = {where: zeros(len(first), np.int64) for where in WHERE}
        for part in parts(count):
            for where, sums_ns in self.sums_ns.items():
                some = self._where[part] == where
                np.add.at(sums_ns, of[part][some], doing["dur_ns"][part][some])
        self._rows = Grouped(of, np.arange(count, dtype=np.int32))

    def words(self, number: int) -> tuple[str, str | None]:
        """The state and the call of a cause."""
        at = int(self._first[number])
        state, call, syscall = in_words(self._states, *(int(self._doing[key][at]) for key in KEYS))
        return state_text(state, self._states), call or syscall

    def lengths_ns(self, number: int) -> Int64s:
        """The time of a cause in each gap between work. Shape `(gaps,)`."""
        rows = self._rows.of(number)
        found: Int64s = self._doing["dur_ns"][rows[self._where[rows] == BETWEEN]]
        return found

    def in_all_ns(self, numbers: Ints | int) -> tuple[int, int, int]:
        """The total time of some causes between work, before the first work, and after the last."""
        between, before, after = (int(self.sums_ns[where][numbers].sum()) for where in WHERE)
        return between, before, after

    def outside_ns(self, numbers: Ints | int) -> Int64s:
        """The time of each of some causes before the first work and after the last. Shapes `(n,)`."""
        return self.sums_ns[FIRST][numbers] + self.sums_ns[LAST][numbers]

    def first(self, numbers: Ints, top: int) -> Ints:
        """The longest `top` of some causes, or all for 0, longest first. Shapes `(n,)`."""
        if top <= 0:
            between_ns = self.sums_ns[BETWEEN][numbers]
            return numbers[in_text_order(self._text_of(numbers), -between_ns, -self.outside_ns(numbers))]
        # Texts are only decoded for causes with equal times, as there may be a million causes.
        some = np.concatenate(greatest(self.sums_ns[BETWEEN], numbers, top)).tolist()
        return np.array(nsmallest(top, some, key=self._rank), np.int64)

    def _text_of(self, numbers: Ints) -> Callable[[int], str]:
        return lambda at: "\0".join(word or "" for word in self.words(int(numbers[at])))

    def _rank(self, number: int) -> tuple[int, int, str, str]:
        state, call = self.words(number)
        return -int(self.sums_ns[BETWEEN][number]), -int(self.outside_ns(number)), state, call or ""
