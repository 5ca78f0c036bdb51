"""Reports what can be captured on this machine, why the rest cannot and how to fix it, and what converts.

    examine() → [Diagnosis("layers", "userspace", "works", "uprobes at once: …"), …]

Everything that a capture needs is really attempted, on functions that nobody calls, and undone.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from tracepipe.doctor import checks
from tracepipe.doctor.checks import ABSENT, FAILS, LIMITED, WORKS, Area, Diagnosis, Examination, State
from tracepipe.doctor.trials import Trials
from tracepipe.printable import json_schema, printable
from tracepipe.tracer.machine.facts import Machine, this_machine
from tracepipe.tracer.request import DEFAULT_LAYERS, Notify

__all__ = ["AREAS", "Diagnosis", "as_json", "can_capture", "examine"]

# Area → its examination, in the order of the report; each sees the earlier results.
AREAS: dict[str, Area] = {
    "machine": checks.machine,
    "methods": checks.methods,
    "layers": checks.layers,
    "cuda": checks.cuda,
    "gpu": checks.gpu,
    "convert": checks.convert,
}
_MARKS: dict[State, str] = {WORKS: "✓", LIMITED: "!", FAILS: "✗", ABSENT: "–"}
_ASCII_MARKS: dict[State, str] = {WORKS: "+", LIMITED: "!", FAILS: "x", ABSENT: "-"}
_COLOURS: dict[State, str] = {WORKS: "32", LIMITED: "33", FAILS: "31", ABSENT: "2"}  # SGR


def examine(
    machine: Machine | None = None,
    trials: Trials | None = None,
    areas: Mapping[str, Area] = AREAS,
    notify: Notify = lambda doing: None,
) -> list[Diagnosis]:
    """All diagnoses, area by area; `notify` gets each area's name first, and its slow steps."""
    examination = Examination(machine or this_machine(), trials or Trials(notify))
    for name, area in areas.items():
        notify(name)
        for diagnosis in area(examination):
            examination.found.append(diagnosis)
    return examination.found


def can_capture(diagnoses: list[Diagnosis]) -> bool:
    """Whether the default layers of a capture can be recorded by some method."""
    states = {diagnosis.name: diagnosis.state for diagnosis in diagnoses if diagnosis.area == "layers"}
    return all(states.get(layer) in (WORKS, LIMITED) for layer in DEFAULT_LAYERS)


def diagnosis_lines(
    diagnoses: list[Diagnosis], *, width: int = 0, colours: bool = False, ascii_only: bool = False
) -> Iterator[str]:
    """A row for each diagnosis, with how to fix it below, wrapped at `width` unless that is 0."""
    marks = _ASCII_MARKS if ascii_only else _MARKS
    areas = max((len(diagnosis.area) for diagnosis in diagnoses), default=0)
    names = max((len(diagnosis.name) for diagnosis in diagnoses), default=0)
    area, before, shown_fixes = "", "", set()
    for diagnosis in diagnoses:
        shown = diagnosis.area if diagnosis.area != area else ""
        area = diagnosis.area
        start = f"{shown.ljust(areas)}  "
        mark = marks[diagnosis.state]
        is_same = diagnosis.state == FAILS and diagnosis.detail == before
        detail = printable(f"{diagnosis.name.ljust(names)}  {'the same' if is_same else diagnosis.detail}")
        before = diagnosis.detail
        indent = " " * (areas + names + 6)
        # The columns of a line, and of its indent.
        left, after = width - len(start) - 2, len(indent) - len(start) - 2
        lines = [detail]
        if left >= after + 20:
            lines = textwrap.wrap(detail, left, subsequent_indent=" " * after, break_on_hyphens=False)
        first, *more = lines or [""]
        coloured = f"\x1b[{_COLOURS[diagnosis.state]}m{mark}\x1b[0m" if colours else mark
        yield f"{start}{coloured} {first}".rstrip()
        yield from (" " * (len(start) + 2) + line for line in more)
        if diagnosis.fix and diagnosis.fix not in shown_fixes:
            shown_fixes.add(diagnosis.fix)
            arrow = "->" if ascii_only else "→"
            yield f"{indent}{arrow} {diagnosis.fix}"


def as_json(diagnoses: list[Diagnosis]) -> dict[str, Any]:
    """`{"schema":…,"can_capture":…,"findings":[{"area":…,"name":…,"state":…,"detail":…,"fix":…},…]}`."""
    return {
        "schema": json_schema("doctor"),
        "can_capture": can_capture(diagnoses),
        "findings": [asdict(found) for found in diagnoses],
    }
