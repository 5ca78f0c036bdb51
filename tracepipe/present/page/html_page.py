"""Writes a page of tables, findings and figures in one file: without scripts, other files or the network.

Its content comes from recordings that are not trusted. The template escapes all of it, and the page's content
security policy forbids a browser to run any script or load anything.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from tracepipe import __version__
from tracepipe.event.model import LAYERS
from tracepipe.libraries import jinja2
from tracepipe.present.figures.panel import Panel
from tracepipe.present.figures.picture import inline_svg
from tracepipe.present.writing.rendering import cell, lacks, shown, titles_of
from tracepipe.reports.report import Drawing, Result, Table
from tracepipe.store.run import Run
from tracepipe.store.store import Facts
from tracepipe.units import duration_text

_TEMPLATES = Path(__file__).parent
_PRE_COLUMNS = 120
# A table with more columns has smaller letters.
_NARROW_COLUMNS = 11
# The beginnings of lines that state that something is missing.
_LOST = ("lost", "left out", "skipped")


@dataclass(slots=True)
class Section:
    """The result of a report under a heading; `missing` is the reason why there is none."""

    name: str
    heading: str
    result: Result | None
    missing: str = ""


@dataclass(slots=True)
class FigureGroup:
    """Panels of one kind under a heading."""

    name: str
    heading: str
    panels: list[Panel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class About:
    """The head of a page: facts as pairs of name and text, and what is not as it should be.

    Each of `limits` has a text, and a kind: `lost`, `clock`, `note` or `none`.
    """

    subject: str
    facts: Sequence[tuple[str, str]]
    limits: Sequence[dict[str, str]]

    @classmethod
    def of(cls, run: Run) -> About:
        """The facts about one recording."""
        command = run.facts.header.command
        subject = str(PurePath(command[0] if command else run.facts.path).name)
        return cls(subject, list(_facts(run.facts)), list(_limits(run.facts)))


def write_page(
    about: About, title: str, sections: Sequence[Section], groups: Sequence[FigureGroup], out: BinaryIO
) -> None:
    """Write a page as HTML."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str and value != "\n" else value,
        keep_trailing_newline=True,
    )
    from markupsafe import Markup  # which jinja2 brings

    page = environment.get_template("page.html").stream(
        title=title,
        subject=about.subject,
        version=__version__,
        facts=about.facts,
        limits=about.limits,
        sections=[_section(section) for section in sections],
        groups=groups,
        svg=lambda panel: Markup(inline_svg(panel)),
        newline="\n",
    )
    page.dump(out, encoding="utf-8", errors="replace")


def _facts(facts: Facts) -> Iterable[tuple[str, str]]:
    header = facts.header
    yield "recording", f"{facts.path} ({facts.source})"
    if command := header.command:
        yield "command", shlex.join(str(word) for word in command)
    begun_ns = header.start_ns("realtime")
    if begun_ns is not None and 0 <= begun_ns < 1 << 62:
        begun = datetime.datetime.fromtimestamp(begun_ns // 10**9, datetime.timezone.utc)
        yield "recorded", f"{begun:%Y-%m-%d %H:%M:%S} UTC"
    if machine := [text for text in (header.host, header.kernel, header.machine) if text]:
        yield "machine", ", ".join(machine)
    if engine := header.engine:
        yield "engine", engine
    gpus = [about.get("name") for about in header.gpus]
    if gpus:
        yield "GPUs", ", ".join(str(name) for name in gpus if name)
    yield "length", duration_text(facts.end_ns - facts.start_ns)
    yield (
        "events",
        ", ".join(f"{facts.counts[layer]:,} {layer}" for layer in LAYERS if facts.counts[layer]) or "none",
    )
    yield "times", f"on the clock {facts.trace_clock}"


def _limits(facts: Facts) -> Iterable[dict[str, str]]:
    """The losses and the errors of clocks, losses first; also stated where there are none."""
    lines = list(lacks(facts))
    lost = [line for line in lines if line.startswith(_LOST)]
    if not facts.losses:
        yield {"kind": "none", "text": "no events are known to be lost"}
    yield from ({"kind": "lost", "text": line} for line in lost)
    if not facts.clocks:
        yield {"kind": "clock", "text": f"all times are on one clock, {facts.trace_clock}"}
    yield from ({"kind": "note", "text": line} for line in lines if line not in lost)


def _section(section: Section) -> dict[str, Any]:
    result = section.result or Result("")
    notes = [*result.notes, *[section.missing] * bool(section.missing)]
    parts = list(filter(None, map(_part, result.parts)))
    return {"name": section.name, "heading": section.heading, "parts": parts, "notes": notes}


def _part(part: Table | Drawing) -> dict[str, Any]:
    if isinstance(part, Table) and part.empty and not part.rows:
        return {"kind": "text", "lines": [part.empty]}
    if isinstance(part, Table):
        return _table(part)
    # Other drawings are shown as text, as their data has every single event.
    if part.name == "findings" and (data := part.lazily()):
        return {"kind": "findings", "title": "Findings", "findings": data}
    lines = list(part.draw(_PRE_COLUMNS, False))
    return {"kind": "text", "lines": lines} if lines else {}


def _table(table: Table) -> dict[str, Any]:
    columns = [
        {"title": column.title, "kind": "number" if column.unit else "text"} for column in table.columns
    ]
    texts = [at for at, column in enumerate(table.columns) if not column.unit]
    titles = titles_of(cell(row[at], "") for row in table.rows for at in texts)
    rows = []
    group: Any = None
    for row in table.rows:
        cells = [
            _cell(value, column.unit, kind["kind"], titles)
            for value, column, kind in zip(row, table.columns, columns, strict=True)
        ]
        if table.grouped and row[0] == group:
            cells[0] = {"kind": "text", "text": "", "exact": ""}
        group = row[0]
        rows.append(cells)
    size = "wide" if len(columns) > _NARROW_COLUMNS else ""
    shape = {"kind": "table", "title": table.title, "columns": columns, "rows": rows}
    return shape | {"note": table.note, "size": size}


_EXACT = {"ns": "ns", "change_ns": "ns", "at": "ns", "bytes": "bytes", "bytes_per_s": "bytes/s"}


def _cell(value: object, unit: str, kind: str, titles: dict[str, str]) -> dict[str, str]:
    """A cell: its text, and the exact number of a rounded one or the whole name of a shortened one."""
    text = whole = cell(value, unit)
    if not unit:
        text = titles.get(whole, whole)
    exact = whole if text != whole else ""
    if unit in _EXACT and value is not None:
        exact = f"{value:,.0f} {_EXACT[unit]}"
    return {"kind": kind, "text": text, "exact": exact}
