"""Writes a page of tables, findings and figures in one file: without other files or the network.

Its content comes from recordings that are not trusted. The template escapes all of it, and the page's content
security policy forbids a browser to load anything, or to run any script but `page.js`, whose hash it has.
"""

from __future__ import annotations

import datetime
import re
import shlex
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
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
# Longer texts may be cut off on a narrow screen.
_LONG_TEXT = 16
# A table with more columns has smaller letters.
_NARROW_COLUMNS = 11
# The beginnings of lines that state that something is missing.
_LOST = ("lost", "left out", "skipped")


@dataclass(slots=True)
class Section:
    """The result of a report under a heading."""

    name: str
    heading: str
    result: Result


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


def write_page(about: About, title: str, blocks: Sequence[Section | FigureGroup], out: BinaryIO) -> None:
    """Write a page as HTML. Sections and groups in which nothing is shown are left out."""
    script = (_TEMPLATES / "page.js").read_text("utf-8")
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
        blocks=list(filter(None, map(_block, blocks))),
        script=Markup(script),
        script_hash=b64encode(sha256(script.encode()).digest()).decode(),
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


# Advice for the terminal at the end of a note: `10 more lines are not listed: --top 0 lists all`.
_ADVICE = re.compile(r"(: | \()--[a-z].*|^(Next: )?tracepipe .*", re.DOTALL)


def _block(block: Section | FigureGroup) -> dict[str, Any]:
    """What the template shows of a section or a group; empty where that is nothing."""
    about = {"name": block.name, "heading": block.heading}
    if isinstance(block, FigureGroup):
        drawn = any(panel.draw for panel in block.panels)
        return about | {"panels": block.panels, "parts": [], "notes": []} if drawn else {}
    parts = list(filter(None, map(_part, block.result.parts)))
    parts.sort(key=lambda part: part["kind"] != "sentences")
    notes = list(filter(None, (_ADVICE.sub("", note) for note in block.result.notes)))
    return about | {"panels": [], "parts": parts, "notes": notes} if parts else {}


def _part(part: Table | Drawing) -> dict[str, Any]:
    if isinstance(part, Table) and not len(part.rows):
        return {}
    if isinstance(part, Table) and len(part.columns) == 1 and not part.columns[0].title:
        lines = [str(row[0]) for row in part.rows if not _ADVICE.match(str(row[0]))]
        return {"kind": "sentences", "title": part.title, "lines": lines}
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
            cells[0] = {"kind": "text", "text": "", "exact": "", "number": ""}
        group = row[0]
        rows.append(cells)
    size = "wide" if len(columns) > _NARROW_COLUMNS else ""
    shape = {"kind": "table", "title": table.title, "columns": columns, "rows": rows}
    # Sorted by another column, the rows of a group would not be together.
    sorts = not table.grouped and len(rows) > 1
    return shape | {"note": table.note, "size": size, "sorts": sorts}


_EXACT = {"ns": "ns", "change_ns": "ns", "at": "ns", "bytes": "bytes", "bytes_per_s": "bytes/s"}


def _cell(value: object, unit: str, kind: str, titles: dict[str, str]) -> dict[str, str]:
    """A cell: its text, and the exact number of a rounded one or the whole name of a shortened one."""
    text = whole = cell(value, unit)
    if not unit:
        text = titles.get(whole, whole)
    exact = whole if text != whole or len(whole) > _LONG_TEXT else ""
    if unit in _EXACT and value is not None:
        exact = f"{value:,.0f} {_EXACT[unit]}"
    number = str(value) if unit and type(value) in (int, float) else ""
    return {"kind": kind, "text": text, "exact": exact, "number": number}
