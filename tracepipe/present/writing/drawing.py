"""Draws rows of slices and instants with characters: a named bar where there is room, else a shade for how
much of a cell they cover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from operator import itemgetter
from typing import Any

from tracepipe.event.columns import Floats, Int64s, Ints, distinct
from tracepipe.event.intervals import most_at_once
from tracepipe.libraries import np

# The least number of cells of a slice that is drawn as a bar.
BAR_CELLS = 3
_ROWS_AT_ONCE = 1 << 12


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters of a drawing: ends and filling of a bar, shades from little cover to full, levels, an
    instant.
    """

    begin: str
    end: str
    fill: str
    shades: str
    bars: str
    instant: str
    at_most: str


UNICODE = Glyphs("├", "┤", "─", "░▒▓█", "▁▂▃▄▅▆▇█", "·", "≤")
ASCII = Glyphs("[", "]", "=", ".:+#", ".:-=+*%#", "'", "<=")


@dataclass(frozen=True, slots=True)
class Window:
    """The stretch of time that is drawn, and the number of its cells."""

    start_ns: int
    end_ns: int
    cells: int

    def cells_at(self, ts_ns: Int64s) -> Floats:
        """The positions of times in cells, with fractions, clipped to the window. Shapes `(n,)`."""
        at = (ts_ns - self.start_ns) * (self.cells / max(1, self.end_ns - self.start_ns))
        found: Floats = np.clip(at, 0, self.cells)
        return found

    def edges_ns(self) -> Floats:
        """The bounds of the cells in ns after the start, shape `(cells + 1,)`. Times since 1970 would not do,
        as floats of that size have steps of 256 ns.
        """
        return np.linspace(0, max(1, self.end_ns - self.start_ns), self.cells + 1)


@dataclass(frozen=True, slots=True)
class Spans:
    """Some `rows` of columns of starts and ends, sorted by start; `names` returns the names of rows."""

    start_ns: Int64s
    end_ns: Int64s
    names: Callable[[Ints], list[str | None]]
    rows: Ints

    def times_ns(self) -> tuple[Int64s, Int64s]:
        """Starts and ends."""
        return self.start_ns[self.rows], self.end_ns[self.rows]

    def __iter__(self) -> Iterator[tuple[int, int, str | None]]:
        # In parts: whoever takes the first few does not pay for all.
        for first in range(0, len(self.rows), _ROWS_AT_ONCE):
            some = self.rows[first : first + _ROWS_AT_ONCE]
            columns = (column[some].tolist() for column in (self.start_ns, self.end_ns))
            yield from zip(*columns, self.names(some), strict=True)


def axis(window: Window, base_ns: int) -> str:
    """The axis above the cells: times after `base_ns` with their units, as many as fit."""
    line = [" "] * window.cells
    step = max(1, window.cells // max(1, window.cells // 16))
    length_ns = window.end_ns - window.start_ns
    free = 0
    for at in range(0, window.cells, step):
        ts_ns = window.start_ns - base_ns + length_ns * at // window.cells
        text = "|" + _time_text(ts_ns, length_ns * step // window.cells)
        if at >= free and at + len(text) <= window.cells:
            line[at : at + len(text)] = text
            free = at + len(text) + 1
    return "".join(line).rstrip()


def _time_text(ts_ns: int, step_ns: int) -> str:
    """A time rounded to a twentieth of a step, which is less than a cell."""
    if ts_ns == 0:
        return "0"
    size_ns = next((ns for ns in (10**9, 10**6, 10**3) if abs(ts_ns) >= ns), 1)
    digits = 0
    while digits < 9 and step_ns * 10**digits < size_ns * 20 and size_ns > 10**digits:
        digits += 1
    unit = {10**9: "s", 10**6: "ms", 10**3: "µs", 1: "ns"}[size_ns]
    return f"{ts_ns / size_ns:.{digits}f} {unit}"


def spans_line(window: Window, spans: Iterable[Spans], glyphs: Glyphs) -> str:
    """One row of slices that do not overlap."""
    cells = window.cells
    cover, change = np.zeros(cells + 1), np.zeros(cells + 2)
    touched = np.zeros(cells + 1, np.bool_)
    bars: dict[int, str] = {}
    for one in spans:
        begin, end = map(window.cells_at, one.times_ns())
        first, last = begin.astype(np.int64), end.astype(np.int64)
        touched[first] = True
        # A slice covers parts of its first and its last cell, and all cells between them.
        same = first == last
        np.add.at(cover, first[same], (end - begin)[same])
        np.add.at(cover, first[~same], (first + 1 - begin)[~same])
        np.add.at(cover, last[~same], (end - last)[~same])
        np.add.at(change, first[~same] + 1, 1)
        np.add.at(change, last[~same], -1)
        wide = np.flatnonzero(end - begin >= BAR_CELLS)
        for at, name in zip(wide.tolist(), one.names(one.rows[wide]), strict=True):
            left = int(begin[at])
            right = min(cells, max(left + 1, round(float(end[at]))))
            letters, text = right - left - 2, str(name)
            if len(text) > letters:
                text = text[: max(0, letters - 1)] + ("…" if letters > 0 else "")
            bar = [glyphs.begin, *text, *(glyphs.fill * (letters - len(text))), glyphs.end]
            bars |= enumerate(bar, left)
    whole = (cover[:cells] + np.cumsum(change)[:cells]).clip(0, 1)
    # A slice that is too short to cover anything is still drawn.
    shares = np.where(touched[:cells], np.maximum(whole, 1e-9), whole)
    line = [_shade(share, glyphs.shades) for share in shares]
    return "".join(bars.get(cell, shade) for cell, shade in enumerate(line))


def _shade(share: float, shades: str) -> str:
    return shades[min(len(shades) - 1, int(share * len(shades)))] if share > 0 else " "


def instants_line(window: Window, instants: Iterable[Spans], mark: str) -> str:
    """A row with a mark in each cell that has an instant."""
    line = [" "] * window.cells
    for one in instants:
        for at in distinct(np.minimum(window.cells_at(one.times_ns()[0]).astype(np.int64), window.cells - 1)):
            line[at] = mark
    return "".join(line)


def level_line(window: Window, spans: Iterable[Spans], glyphs: Glyphs) -> str:
    """The number of slices at a time, as a bar for the mean of each cell, relative to the highest."""
    edges = window.edges_ns()
    # The sum of the time of all slices before each edge.
    spent = np.zeros(len(edges))
    for one in spans:
        for ts_ns, sign in zip(one.times_ns(), (1, -1), strict=True):
            times = np.sort(ts_ns - window.start_ns)
            before = np.searchsorted(times, edges)
            sums = np.concatenate(([0.0], np.cumsum(times.astype(np.float64))))
            spent += sign * (before * edges - sums[before])
    level = np.diff(spent) / np.diff(edges)
    most = float(level.max(initial=0))
    # A tiny level is the rounding of a sum, not a slice.
    shares = np.where(level > most * 1e-9, level, 0) / (most or 1)
    return "".join(_shade(min(share, 1.0), glyphs.bars) for share in shares)


def steps_chart(
    window: Window, ts_ns: Int64s, values: Ints, most: float, rows: int, glyphs: Glyphs
) -> list[str]:
    """A value that changes in steps, as bars that are `rows` high from 0 to `most`. A cell shows its largest
    value.

    `ts_ns` are sorted integers of shape `(n,)`; before the first one the value is 0.
    """
    edges = np.floor(window.edges_ns()[:-1]).astype(np.int64) + window.start_ns
    held = np.searchsorted(ts_ns, edges, "right")
    level = np.zeros(window.cells)
    level[held > 0] = values[held[held > 0] - 1]
    inside = (ts_ns >= window.start_ns) & (ts_ns <= window.end_ns)
    cells = np.minimum(window.cells_at(ts_ns[inside]).astype(np.int64), window.cells - 1)
    np.maximum.at(level, cells, values[inside])
    steps = len(glyphs.bars)
    height = np.ceil(level / (most or 1) * rows * steps).astype(np.int64)
    return [
        "".join((" " + glyphs.bars)[part] for part in np.clip(height - row * steps, 0, steps))
        for row in reversed(range(rows))
    ]


LABEL_COLUMNS = 13


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
        if self.level:
            line, none = level_line(window, self.spans, glyphs), np.zeros(0, np.int64)
            times_ns = [(none, none), *(one.times_ns() for one in self.spans)]
            starts_ns, ends_ns = (np.concatenate(some) for some in zip(*times_ns, strict=True))
            starts_ns = np.maximum(starts_ns, window.start_ns)
            lasts = (ends_ns > starts_ns) & (starts_ns < window.end_ns)
            label = f"{label} {glyphs.at_most}{most_at_once(starts_ns[lasts], ends_ns[lasts]):,}"
        else:
            cells = spans_line(window, self.spans, glyphs)
            marks = instants_line(window, self.instants, glyphs.instant)
            line = "".join(mark if cell == " " else cell for cell, mark in zip(cells, marks, strict=True))
        return f"{label[: LABEL_COLUMNS - 1]:<{LABEL_COLUMNS}}{line}".rstrip()

    def as_json(self, base_ns: int) -> dict[str, Any]:
        """The slices and instants of the row as iterators, with times after the start of the run."""
        return {
            "row": self.label.strip(),
            "spans": (
                {"name": name, "start_ns": start_ns - base_ns, "dur_ns": end_ns - start_ns}
                for start_ns, end_ns, name in merge(*self.spans, key=itemgetter(0))
            ),
            "instants_ns": (ts_ns - base_ns for ts_ns, _, _ in merge(*self.instants, key=itemgetter(0))),
        }


@dataclass(slots=True)
class Group:
    """Rows under a title: a thread, a GPU, or the lost events."""

    title: str
    rows: list[Strip] = field(default_factory=list)
