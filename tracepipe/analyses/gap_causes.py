"""What the CPU did while GPUs were idle, summed by cause."""

from __future__ import annotations

import numpy as np

from tracepipe.analyses.breakdown import HOOKED
from tracepipe.analyses.host_states import STATES, USER, HostStates, Spent
from tracepipe.analyses.idle_gaps import BETWEEN, FIRST, LAST, IdleGaps
from tracepipe.event.columns import Int64s, Ints
from tracepipe.event.groups import RowsByNumber, largest, number_rows, sums_by

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
        self._doing, self._states = doing, states
        gpu_of = gaps.gpu[doing["gap"]]
        of, self._first = number_rows(gpu_of, *(doing[key] for key in KEYS))
        self.gpu = gpu_of[self._first]
        self._where = gaps.where[doing["gap"]]
        self.sums_ns = {
            where: sums_by(of, np.where(self._where == where, doing["dur_ns"], 0), len(self._first))
            for where in WHERE
        }
        self._rows = RowsByNumber(of)

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

    def first(self, numbers: Ints, top: int) -> list[int]:
        """The longest `top` of some causes, or all for 0, longest first."""
        found: list[int] = numbers.tolist()
        if top > 0:
            # Texts are only decoded for causes with equal times, as there may be a million causes.
            found = np.concatenate(largest(self.sums_ns[BETWEEN], numbers, top)).tolist()
        return sorted(found, key=self._rank)[: top or None]

    def _rank(self, number: int) -> tuple[int, int, str, str]:
        state, call = self.words(number)
        return -int(self.sums_ns[BETWEEN][number]), -int(self.outside_ns(number)), state, call or ""
