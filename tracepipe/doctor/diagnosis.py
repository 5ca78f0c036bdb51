"""The results of an examination, and the input of each of its areas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tracepipe.doctor.trials import Trials
from tracepipe.tracer.machine.facts import Machine

WORKS, LIMITED, FAILS, ABSENT = "works", "limited", "fails", "absent"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One row: `state` is works, limited, fails or absent. `fix` is what to do, "" for nothing."""

    area: str
    name: str
    state: str
    detail: str
    fix: str = ""


@dataclass(slots=True)
class Examination:
    """The input of an area: the machine, ways to try it, and what was found before."""

    machine: Machine
    trials: Trials
    found: list[Diagnosis] = field(default_factory=list)

    def of(self, area: str) -> list[Diagnosis]:
        """What was found in an area."""
        return [diagnosis for diagnosis in self.found if diagnosis.area == area]


Area = Callable[[Examination], Iterator[Diagnosis]]
