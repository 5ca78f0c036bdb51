"""The page of a job: its tables and pictures as one HTML file, or the pictures alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

from tracepipe.present.figures.picture import write_picture
from tracepipe.present.page.html_page import About, FigureGroup, Section, write_page
from tracepipe.ranks import pictures
from tracepipe.ranks.job import Job
from tracepipe.reports.report import Drawing, Result, Table
from tracepipe.units import counted, duration_text

ENDINGS: Final = (".html", ".png", ".svg")
NEEDS: Final = ("jinja2", "matplotlib")
_LOST: Final = ("lost", "not in the dataset")


def write(job: Job, result: Result, ending: str, out: BinaryIO) -> None:
    """Write the page of a job, or its pictures, to a stream.

    `result` is the report, and `ending` one of ENDINGS.
    """
    groups = [
        FigureGroup("time", "Ranks over time", pictures.by_time(job)),
        FigureGroup("collectives", "Ranks and collectives", pictures.by_collective(job)),
    ]
    if ending == ".html":
        sections = [_section(part) for part in result.parts]
        write_page(_about(job, result), "Ranks", sections, groups, out)
    else:
        write_picture([panel for group in groups for panel in group.panels], ending[1:], out)


def _section(part: Table | Drawing) -> Section:
    if isinstance(part, Table):
        return Section(part.name, part.title, Result("", [replace(part, title="")]))
    return Section(part.name, part.name, Result("", [part]))


def _about(job: Job, result: Result) -> About:
    alignment = job.alignment
    bounds = alignment["bound_ns"].drop_nulls()
    facts = [
        ("dataset", str(job.dataset.folder)),
        ("ranks", f"{len(job.ranks)} of {counted(job.ranks['host'].n_unique(), 'host|hosts')}"),
        ("steps", str(len(job.steps))),
    ]
    limits = [{"kind": "lost" if note.startswith(_LOST) else "note", "text": note} for note in result.notes]
    if len(bounds) > 1:
        within = duration_text(max(bounds))
        text = f"{len(bounds)} of {len(alignment)} clocks are on a common one, within {within}"
        limits.append({"kind": "clock", "text": text})
    return About(Path(job.dataset.folder).name, facts, limits)
