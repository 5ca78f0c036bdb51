"""The account of reading a recording, and its text: counts, losses, and what did not go as it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracepipe.event.model import LAYERS, Problem
from tracepipe.event.nesting import Outcomes
from tracepipe.units import agree, counted

# This many problems are kept with their text. All are counted.
PROBLEMS_KEPT = 20


@dataclass(slots=True, repr=False)
class Account:
    """The account of the recording `path` in the format `source`. `output` is the file of its timeline, if
    one was made. `counts` are the records by layer, where a warp counts as one. `losses` are the lost events
    by layer. `clocks` describes each clock that placed an event. `unplaced` are the events by clock that
    could not be placed. With several recordings, `parts` are the separate accounts, each with its `anchor`:
    how it was placed on the common clock.
    """

    path: str
    source: str
    counts: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    ambiguous: int = 0
    problems: list[Problem] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=Outcomes)
    unplaced: dict[str, int] = field(default_factory=dict)
    clocks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: str = ""
    parts: list[Account] = field(default_factory=list)
    anchor: dict[str, Any] | None = None

    def __repr__(self) -> str:
        of_layer = [f"{self.counts[layer]} {layer}" for layer in LAYERS if self.counts[layer]]
        stated = [", ".join(of_layer) or "no events"]
        stated += [counted(self.skipped, "line|lines skipped")] if self.skipped else []
        stated += [f"{self.ambiguous} unclear"] if self.ambiguous else []
        stated += [f"not placed: {count} on {clock}" for clock, count in self.unplaced.items()]
        stated += [f"lost: {count} {layer}" for layer, count in self.losses.items()]
        return f"<{type(self).__name__} of {self.path} ({self.source}): {'; '.join(stated)}>"

    @classmethod
    def of_all(cls, parts: list[Account]) -> Account:
        """The account of several recordings. That of a single one is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        whole = cls(", ".join(part.path for part in parts), f"{len(parts)} recordings", parts=parts)
        for part in parts:
            whole.counts += part.counts
            whole.losses += part.losses
            whole.skipped += part.skipped
            whole.ambiguous += part.ambiguous
            whole.problems += part.problems
        return whole

    def add(self, problem: Problem) -> None:
        """Count a problem, and keep its text if there are few."""
        self.skipped += problem.skipped
        self.ambiguous += not problem.skipped
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)

    def take_problems(self, before: Account) -> None:
        """Count what could not be used when the part of a recording was made of which this is the account."""
        self.skipped += before.skipped
        self.ambiguous += before.ambiguous
        self.problems = [*before.problems, *self.problems][:PROBLEMS_KEPT]
        self.unplaced = before.unplaced | self.unplaced
        self.notes = list(dict.fromkeys([*before.notes, *self.notes]))

    def remarks(self, meanings: Mapping[str, str]) -> Iterator[str]:
        """A line for each problem, kind of outcome and note. `meanings` has the text of each outcome."""
        for problem in self.problems:
            kind = "skipped" if problem.skipped else "unclear"
            yield f"{kind}: {problem.at(self.path)}"
        if (total := self.skipped + self.ambiguous) > PROBLEMS_KEPT:
            yield f"… and {total - PROBLEMS_KEPT} more: {counted(self.skipped, 'line|lines')} skipped in all"
        yield from self.outcome_lines(meanings)
        for note in self.notes:
            yield f"note: {note}"

    def missing_lines(self, what: str) -> Iterator[str]:
        """A line for each clock whose events could not be placed, which are `what`, and for each layer that
        lost events.
        """
        for clock, count in self.unplaced.items():
            yield (
                f"{what}: {counted(count, 'event|events')} on {clock}, which has no clock pairs; "
                f"--assume-offset {clock}=NS places {agree(count, 'it|them')}"
            )
        for layer, count in self.losses.items():
            yield f"{LOST}{count} {layer} {agree(count, 'event|events happened and was|were not recorded')}"

    def outcome_lines(self, meanings: Mapping[str, str]) -> Iterator[str]:
        """A line for each kind of outcome."""
        for name, meaning in meanings.items():
            if count := getattr(self.outcomes, name):
                yield f"note: {counted(count, meaning)}"


def fit_text(stated: Mapping[str, Any]) -> str:
    """The text of a clock's fit: pairs and drift."""
    drift = f"{stated['drift_ppm']:+.3f} ppm" if "drift_ppm" in stated else "unknown"
    return f"{counted(stated['pairs'], 'pair|pairs')}, drift {drift}"


# Readings of two host clocks may be this far apart when a program is interrupted between them.
SETTING_NS = 1_000_000
LOST = "lost: "
"""How a line about lost events begins."""
_OUTCOMES = {
    "unclosed": "call|calls had no end: drawn to the end and marked unclosed",
    "no_begin": "end|ends had no begin: drawn as an_instant|instants and marked no_begin",
    "overlaps": "slice|slices overlaps|overlap others on its|their track: drawn on an overlap track",
    "undrawn": "slice|slices overlaps|overlap too many others to be drawn",
    "beyond": "event|events is|are not drawn: there are too many threads, streams, GPUs or warps for a track "
    "each",
    "causality": "launch|launches whose kernel starts before the call by more than the clocks' bound",
}


def account_lines(account: Account) -> Iterator[str]:
    """The lines that a person should know about a conversion, the most important last."""
    for part in account.parts or [account]:
        yield from _of_one(part)
    if account.parts:
        yield from account.outcome_lines(_OUTCOMES)
        yield from (f"note: {note}" for note in account.notes)


def _of_one(account: Account) -> Iterator[str]:
    counts = ", ".join(f"{account.counts[layer]} {layer}" for layer in LAYERS if account.counts[layer])
    yield f"{account.path}: {account.source}, {counts or 'no events'}"
    yield from account.remarks(_OUTCOMES)
    for stated in account.clocks:
        if stated["method"] == "fit":
            yield f"clock {stated['clock']}: {fit_text(stated)}, within {stated['bound_ns']} ns"
        elif stated["method"] == "offset" and stated["bound_ns"] > SETTING_NS:
            yield f"clock {stated['clock']}: was set or slept while recording, within {stated['bound_ns']} ns"
        elif stated["method"] == "launches":
            by = counted(stated["launches"], "launch|launches")
            yield f"clock {stated['clock']}: placed by its {by}, within {stated['bound_ns']} ns"
        elif stated["method"] == "assumed":
            yield f"clock {stated['clock']}: placed by an assumed offset, error unknown"
    yield from account.missing_lines("not drawn")
    if account.anchor:
        yield f"placed: {account.path} by {anchor_text(account.anchor)}"


def anchor_text(stated: Mapping[str, Any]) -> str:
    """The text of how a recording was placed on the common clock, and how precisely."""
    within = f"within {stated['bound_ns']} ns" if "bound_ns" in stated else stated["bound"]
    drift = f", drift {stated['drift_ppm']:+.3f} ppm" if "drift_ppm" in stated else ""
    return f"{stated['by']}: {stated['offset_ns']:+d} ns{drift}, {within}"
