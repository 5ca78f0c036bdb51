"""Rows of a timeline: slices and instants as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from typing import Any

from tracepipe.event.columns import Int64s
from tracepipe.present.writing.drawing import Glyphs, Part, Window, instants_line, level_line, spans_line
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.intervals import most_at_once
from tracepipe.reports.frames.libraries import np

LABEL_COLUMNS = 13


@dataclass(frozen=True, slots=True)
class Spans:
    """Some `rows` of columns of starts and ends, sorted by start; `names` returns the names of rows."""

    start_ns: Int64s
    end_ns: Int64s
    names: Callable[[Ints], list[str | None]]
    rows: Ints

    def part(self) -> Part:
        """Starts, ends, and the function for names."""
        return self.start_ns[self.rows], self.end_ns[self.rows], lambda places: self.names(self.rows[places])

    def __iter__(self) -> Iterator[tuple[int, int, str | None]]:
        columns = (column[self.rows].tolist() for column in (self.start_ns, self.end_ns))
        return zip(*columns, self.names(self.rows), strict=True)


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
        spans = [one.part() for one in self.spans]
        if self.level:
            line = level_line(window, spans, glyphs)
            label = f"{label} {glyphs.at_most}{self._most_at_once(window):,}"
        else:
            cells = spans_line(window, spans, glyphs)
            marks = instants_line(window, [one.part() for one in self.instants], glyphs.instant)
            line = "".join(mark if cell == " " else cell for cell, mark in zip(cells, marks, strict=True))
        return f"{label[: LABEL_COLUMNS - 1]:<{LABEL_COLUMNS}}{line}".rstrip()

    def _most_at_once(self, window: Window) -> int:
        """The most slices at one time."""
        none = np.zeros(0, np.int64)
        starts_ns = np.concatenate([none, *(one.start_ns[one.rows] for one in self.spans)])
        ends_ns = np.concatenate([none, *(one.end_ns[one.rows] for one in self.spans)])
        starts_ns = np.maximum(starts_ns, window.start_ns)
        lasts = (ends_ns > starts_ns) & (starts_ns < window.end_ns)
        return most_at_once(starts_ns[lasts], ends_ns[lasts])

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
