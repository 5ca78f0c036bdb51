"""What a finding is, and from which size on a difference is one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tracepipe.units import duration_text

FALSE_ALARM_RATE = 0.01
"""The chance that a recording without any effect gets a finding of one kind: shared among all kernels of the
recording, and within a kernel among all moduli, blocks, SMs and launches that are tried (Bonferroni)."""

MIN_SHARE = 0.05
"""What a difference must be of the time it lengthens. Two runs of one kernel differ by some percent as they
are: what is gained by less than this cannot be seen in the next measurement."""

MIN_SM_SHARE = 0.10
"""The same for whole SMs, as they are not alike: on an H200 those far from a part of the L2 cache are
slower by some percent with any kernel that waits for memory."""

MIN_EXIT_ONLY_NS = 100
"""The least difference where only exits are known. Nothing says how long the kernel ran then, and reading the
clock in every thread takes tens of nanoseconds by itself."""

MIN_CLOCK_STEPS = 2
"""The least difference in steps of the clock: one step is rounding."""


@dataclass(frozen=True)
class Saving:
    """What could be saved at most: in the median launch concerned, and in all launches recorded (ns)."""

    launch_ns: float
    run_ns: float
    share: float

    def __str__(self) -> str:
        launch, run = duration_text(self.launch_ns), duration_text(self.run_ns)
        return f" Could save at most {launch} ({percent(self.share)}) of a launch, {run} of all recorded."


@dataclass(frozen=True)
class Finding:
    """One thing that a kernel's warps show, with its numbers and a sentence.

    `numbers` have their units in their names. `p_value` is the chance of such evidence in a uniform kernel,
    already multiplied by the number of tries within the kernel; None where it was counted and nothing had to
    be inferred.
    """

    kind: str
    kernel: str
    evidence: str
    cause: str
    p_value: float | None = None
    numbers: dict[str, Any] = field(default_factory=dict)
    saves_share: float | None = None
    """Of the duration of the launches concerned, what could be saved at most; None where it is not known."""
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
    """A share as people read it: never 0% for a little, nor 100% for nearly all."""
    if 0 < share < 0.01:
        return "under 1%"
    if 0.99 < share < 1:
        return "over 99%"
    return f"{share:.0%}"


def confidence(p_value: float) -> str:
    """How sure, for a sentence."""
    return f"p < 1e-9, {CORRECTED}" if p_value < 1e-9 else f"p = {p_value:.1g}, {CORRECTED}"


CORRECTED = "corrected for all that was tried"


def listed(values: list[int], most: int = 6) -> str:
    """Some of many numbers, in ranges: `0–7, 15, 31`."""
    spans: list[str] = []
    start = 0
    for at in range(1, len(values) + 1):
        if at == len(values) or values[at] != values[at - 1] + 1:
            first, last = values[start], values[at - 1]
            spans.append(f"{first}" if first == last else f"{first}{',' if last == first + 1 else '–'}{last}")
            start = at
    spans = [span.replace(",", ", ") for span in spans]
    return ", ".join(spans[:most]) + (f" and {len(spans) - most} more" if len(spans) > most else "")
