"""Rows of a timeline: slices and instants as columns, which are read in parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import merge
from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.present.writing.drawing import Glyphs, Part, Window, instants_line, level_line, spans_line
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.intervals import most_at_once
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, parts

LABEL_COLUMNS = 13


@dataclass(frozen=True, slots=True)
class Spans:
    """Some `rows` of columns of starts and ends, sorted by start; `names` returns the names of rows."""

    start_ns: Int64s
    end_ns: Int64s
    names: Callable[[Ints], list[str | None]]
    rows: Ints

    def parts(self) -> Iterator[Part]:
        """Yield starts, ends and the function for names, a part at a time."""
        for part in parts(len(self.rows)):
            rows = self.rows[part]
            yield self.start_ns[rows], self.end_ns[rows], partial(self._names, rows)

    def _names(self, rows: Ints, places: Int64s) -> list[str | None]:
        return self.names(rows[places])

    def __iter__(self) -> Iterator[tuple[int, int, str | None]]:
        for start_ns, end_ns, names in self.parts():
            every = np.arange(len(start_ns))
            yield from zip(start_ns.tolist(), end_ns.tolist(), names(every), strict=True)


@dataclass(slots=True)
class Strip:
    """One row. With `level`, the number of slices at a time is drawn instead of the slices."""

    label: str
    spans: Sequence[Spans] = ()
    instants: Sequence[Spans] = ()
    level: bool = False

    def draw(self, window: Window, glyphs: Glyphs) -> str:
        """The label and the cells; a slice hides an instant in the same cell."""
        label = self.label
        spans = (part for one in self.spans for part in one.parts())
        if self.level:
            line = level_line(window, spans, glyphs)
            label = f"{label} {glyphs.at_most}{self._most_at_once(window):,}"
        else:
            cells = spans_line(window, spans, glyphs)
            instants = (part for one in self.instants for part in one.parts())
            marks = instants_line(window, instants, glyphs.instant)
            line = "".join(mark if cell == " " else cell for cell, mark in zip(cells, marks, strict=True))
        return f"{label[: LABEL_COLUMNS - 1]:<{LABEL_COLUMNS}}{line}".rstrip()

    def _most_at_once(self, window: Window) -> int:
        """The most slices at one time."""
        starts_ns, ends_ns = Growing(np.int64), Growing(np.int64)
        for one in self.spans:
            for start_ns, end_ns, _ in one.parts():
                start_ns = np.maximum(start_ns, window.start_ns)
                lasts = (end_ns > start_ns) & (start_ns < window.end_ns)
                starts_ns.extend(start_ns[lasts], int(np.count_nonzero(lasts)))
                ends_ns.extend(end_ns[lasts], int(np.count_nonzero(lasts)))
        return most_at_once(starts_ns.whole(), ends_ns.whole())

    def as_json(self, base_ns: int) -> dict[str, Any]:
        """The slices and instants of the row as iterators, with times after the start of the run."""
        return {
            "row": self.label.strip(),
            "spans": (
                {"name": name, "start_ns": start_ns - base_ns, "dur_ns": end_ns - start_ns}
                for start_ns, end_ns, name in merge(*self.spans, key=_start)
            ),
            "instants_ns": (start_ns - base_ns for start_ns, _, _ in merge(*self.instants, key=_start)),
        }


def _start(span: tuple[int, int, str | None]) -> int:
    return span[0]


@dataclass(slots=True)
class Group:
    """Rows under a title: a thread, a GPU, or the lost events."""

    title: str
    rows: list[Strip] = field(default_factory=list)
