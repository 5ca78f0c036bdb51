"""Bounds on changes between recordings of two sides, for programs that must not get slower.

    step<=+3%    B's steps may be 3% longer than A's      idle<=+2%    idle time may grow by 2% of a step of A
    wall<=+50ms  the recording may be 50 ms longer        copies<=-1ms copies must shrink by 1 ms

A recording is one observation: the median of its steps. The change between the sides is the median of the
differences of all pairs (Hodges and Lehmann), and its bounds are differences of that order which the rank sum
test does not reject. The test is exact: it assumes only that each recording could have been of either side if
these differ by a constant. Each bound holds with `1 - alpha`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, comb
from statistics import NormalDist
from typing import Final, Literal

from tracepipe.analyses.wall_time import PARTS, WallTime
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Floats
from tracepipe.libraries import np
from tracepipe.units import duration_ns

_OF_PARTS: Final = {
    "compute": "compute",
    "communication": "exposed communication",
    "copies": "copies",
    "idle": "idle",
}
QUANTITIES: Final = ("step", "wall", *_OF_PARTS)
_GATE: Final = re.compile(r"\s*(\w+)\s*<=\s*([+-])\s*(?:([0-9.]+)\s*%|(\S+))\s*")
_POWER: Final = 0.8
Answer = Literal["held", "broken", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Gate:
    """A bound on the change of a quantity, in percent of a step of A (of the recording, if it has none), or
    in ns.
    """

    text: str
    quantity: str
    percent: float | None
    ns: int = 0

    @classmethod
    def read(cls, text: str) -> Gate:
        """Raises TracepipeError."""
        found = _GATE.fullmatch(text)
        if found is None or found[1] not in QUANTITIES:
            raise TracepipeError(
                f"Not a gate: {text}", f"Write step<=+3% or step<=+2ms, with one of {', '.join(QUANTITIES)}."
            )
        quantity, sign, percent, length = found.groups()
        factor = -1 if sign == "-" else 1
        if percent is None and not length[-1].isalpha():
            raise TracepipeError(
                f"A bound without a unit: {text}",
                f"Write {quantity}<={sign}{length}% or {quantity}<={sign}{length}ms.",
            )
        if percent is None:
            return cls(text.strip(), quantity, None, factor * duration_ns(length))
        try:
            return cls(text.strip(), quantity, factor * float(percent))
        except ValueError:
            raise TracepipeError(f"Not a percentage: {percent}%", "Write one such as 3% or 0.5%.") from None


@dataclass(frozen=True, slots=True)
class Gated:
    """What the recordings say about a gate. Times in ns: the medians of A and of B, the change from A to B
    with its bounds, None where there are too few recordings for them, and the change that is allowed.

    `needed`: how many recordings of each side would tell, if they differ as much as these; None where that is
    not known, or these tell.
    """

    gate: Gate
    a_ns: float
    b_ns: float
    change_ns: float
    low_ns: float | None
    high_ns: float | None
    allowed_ns: float
    base_ns: float
    answer: Answer
    needed: int | None

    def percent(self, ns: float | None) -> float | None:
        """A change in percent of what the gate's percentages are of."""
        return 100 * ns / self.base_ns if ns is not None and self.base_ns else None


@cache
def _rank(count_a: int, count_b: int, alpha: float) -> int:
    """Which of the ordered differences of all pairs is a bound that holds with `1 - alpha`, from 1; 0: none
    does.

    That is the greatest number of which the rank sum test says that at most so many pairs are in order by
    chance with a probability of at most `alpha`.
    """
    # ways[u] counts the divisions with u pairs in order: the coefficients of a Gaussian binomial.
    ways = [1]
    for size in range(1, count_b + 1):
        factor = count_a + size
        longer = [*ways, *[0] * factor]
        for at in range(len(longer) - 1, factor - 1, -1):
            longer[at] -= longer[at - factor]
        for at in range(size, len(longer)):
            longer[at] += longer[at - size]
        ways = longer[: count_a * size + 1]
    every, below, rank = comb(count_a + count_b, count_a), 0, 0
    for count in ways:
        below += count
        if below > alpha * every:
            break
        rank += 1
    return rank


def least_recordings(alpha: float) -> int:
    """How many recordings of each side a bound needs at least."""
    count = 1
    while not _rank(count, count, alpha):
        count += 1
    return count


def values_of(gate: Gate, walls: Sequence[WallTime], names: Sequence[str]) -> tuple[Floats, Floats]:
    """The quantity of each recording in ns, and what its percentages are of. Raises TracepipeError for one
    that has no steps or no work of a GPU, where the gate needs them, and if no recording has communication.
    """
    of_steps = gate.quantity != "wall" and all(one.steps for one in walls)
    if gate.quantity == "step" and not of_steps:
        without = next(name for name, one in zip(names, walls, strict=True) if not one.steps)
        raise TracepipeError(
            f"{without} has no steps, which {gate.text} compares.",
            "Mark them with ranges such as `step 1`, or use wall in place of step.",
        )
    if gate.quantity in _OF_PARTS and not all(one.gpus for one in walls):
        without = next(name for name, one in zip(names, walls, strict=True) if not one.gpus)
        raise TracepipeError(
            f"{without} has no work of a GPU, which {gate.text} compares.", "Use step or wall instead."
        )
    if gate.quantity == "communication" and not any(one.has_communication for one in walls):
        raise TracepipeError(
            f"No recording has communication, which {gate.text} compares.", "Use step or wall instead."
        )
    whole = [one.median_step_ns if of_steps else one.wall_ns for one in walls]
    if gate.quantity not in _OF_PARTS:
        return np.array(whole, np.float64), np.array(whole, np.float64)
    part = PARTS.index(_OF_PARTS[gate.quantity])
    parts = [(one.median_parts_ns if of_steps else one.parts_ns)[part] for one in walls]
    return np.array(parts, np.float64), np.array(whole, np.float64)


def judge(gate: Gate, values: Floats, wholes: Floats, count_a: int, alpha: float, gates: int) -> Gated:
    """What the values of all recordings, those of A first, say about one of some gates: it is broken with a
    chance of at most `alpha` over all of them if its bound is kept, and held with at most `alpha` if not.
    """
    a, b = values[:count_a], values[count_a:]
    base_ns = float(np.median(wholes[:count_a]))
    allowed_ns = gate.ns if gate.percent is None else base_ns * gate.percent / 100
    differences = np.sort((b[None, :] - a[:, None]).ravel())
    for_low, for_high = _rank(len(a), len(b), alpha / gates), _rank(len(a), len(b), alpha)
    low_ns = float(differences[for_low - 1]) if for_low else None
    high_ns = float(differences[-for_high]) if for_high else None
    answer: Answer = "cannot tell"
    if low_ns is not None and low_ns > allowed_ns:
        answer = "broken"
    elif high_ns is not None and high_ns <= allowed_ns:
        answer = "held"
    change_ns = float(np.median(differences))
    needed = _needed(a, b, abs(change_ns - allowed_ns), alpha / gates) if answer == "cannot tell" else None
    medians = float(np.median(a)), float(np.median(b))
    return Gated(gate, *medians, change_ns, low_ns, high_ns, allowed_ns, base_ns, answer, needed)


def _needed(a: Floats, b: Floats, distance_ns: float, alpha: float) -> int | None:
    """How many recordings of each side tell a change that far from what is allowed, four times of five."""
    if min(len(a), len(b)) < 2:
        return least_recordings(alpha)
    squares = float(((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum())
    if not distance_ns:
        return None
    quantiles = NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(_POWER)
    # The rank sum test needs π/3 times the recordings of the test of means, where these are normal.
    count = 2 * squares / (len(a) + len(b) - 2) * (quantiles / distance_ns) ** 2 * np.pi / 3
    return max(ceil(count), least_recordings(alpha), min(len(a), len(b)) + 1)
