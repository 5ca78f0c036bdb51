"""The type of a finding, and the least differences that are reported."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from tracepipe.units import duration_text

FALSE_ALARM_RATE = 0.01
"""The chance that a recording without any effect gets a finding of one kind. It is divided among all kernels
of the recording, and within a kernel among all moduli, blocks, SMs and launches that are tried
(Bonferroni)."""

MIN_SHARE = 0.05
"""The least difference, as a share of the time that it lengthens. Two runs of one kernel differ by some
percent anyway: a smaller gain cannot be seen in the next measurement."""

MIN_SM_SHARE = 0.20
"""The same for whole SMs, which differ from each other: on an H200, the SMs that are far from a part of the
L2 cache are up to 12% slower with a uniform kernel that waits for memory."""

MIN_SAVED = 0.01
"""The least share of a launch that a fix could save, where that is known. Launches of one uniform kernel on
an H200 differ by as much: the longest of four is 0.8% longer than the shortest in the median kernel, and 2.7%
in one of four."""

MIN_EXIT_ONLY_NS = 100
"""The least difference where only exits are known: how long the kernel ran is not known then, and reading the
clock in every thread takes tens of nanoseconds by itself."""

MIN_CLOCK_STEPS = 2
"""The least difference, in steps of the clock: one step may be rounding."""


@dataclass(frozen=True)
class Saving:
    """The most that a fix could save: in the median of the launches concerned, and in all of them, in ns."""

    launch_ns: float
    run_ns: float
    share: float

    def __str__(self) -> str:
        launch, run = duration_text(self.launch_ns), duration_text(self.run_ns)
        return (
            f" A fix could save at most {launch} ({percent(self.share)}) of a launch, {run} of all recorded "
            "ones."
        )


@dataclass(frozen=True)
class Finding:
    """One effect that a kernel's warps show, with its numbers and a sentence.

    The keys of `numbers` contain the units. `p_value` is the chance of such evidence in a uniform kernel,
    already multiplied by the number of tries within the kernel; None where the effect was counted and nothing
    was inferred.
    """

    kind: str
    kernel: str
    evidence: str
    cause: str
    p_value: float | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    saves_share: float | None = None
    """The most that a fix could save, as a share of the launches' duration; None where that is not known."""
    grid: tuple[int, int, int] | None = None
    saves: Saving | None = None

    @property
    def sentence(self) -> str:
        return f"{self.evidence}. Usual cause: {self.cause}.{self.saves or ''}"

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "kernel": self.kernel,
            "grid": self.grid,
            **self.numbers,
            "saves_launch_ns": self.saves and self.saves.launch_ns,
            "saves_run_ns": self.saves and self.saves.run_ns,
            "p_value": self.p_value,
            "sentence": self.sentence,
        }


def percent(share: float) -> str:
    """A share as text: never 0% for a small share, nor 100% for nearly all."""
    if 0 < share < 0.01:
        return "under 1%"
    if 0.99 < share < 1:
        return "over 99%"
    return f"{share:.0%}"


def confidence(p_value: float) -> str:
    """A p value as a phrase."""
    return f"p < 1e-9, {CORRECTED}" if p_value < 1e-9 else f"p = {p_value:.1g}, {CORRECTED}"


CORRECTED = "corrected for all that was tried"


def listed(values: list[int], most: int = 6) -> str:
    """Numbers as a list of ranges, at most `most` of them: `0–7, 15, 31`."""
    spans: list[str] = []
    for _, run in groupby(enumerate(values), lambda one: one[1] - one[0]):
        numbers = [number for _, number in run]
        between = ", " if len(numbers) == 2 else "–"
        spans.append(f"{numbers[0]}{between}{numbers[-1]}" if len(numbers) > 1 else f"{numbers[0]}")
    return ", ".join(spans[:most]) + (f" and {len(spans) - most} more" if len(spans) > most else "")
