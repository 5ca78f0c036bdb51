"""Writes the timeline as text, for people and for the tests: every track, and on it every slice in order.

    process vec_add 4242
      thread vec_add 4242
        CUDA API
                 0 +     1234  cuInit  cpu=1 result=0  ←0 →1
               500              an instant

A line has the time in ns since the start of the trace, then the duration. A slice inside another is indented.
`→1` starts the flow 1 and `←1` is one of its next steps; `→e7` belongs to the flow 7 that events have. Tracks
are written when all of them are known.
"""

from __future__ import annotations

import marshal
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import BinaryIO, NamedTuple

from tracepipe.converters.writer import TraceInfo
from tracepipe.errors import OutputError
from tracepipe.event.model import FLOW_LIMIT
from tracepipe.event.ops import BEGIN, END
from tracepipe.layout.timeline import Drawn, Item, Track
from tracepipe.printable import json_text, printable
from tracepipe.units import counted

_CACHE_KB = 2048
Texts = dict[str, str | None]
"""Arguments as they are shown. The value is None for those that are not shown."""


class StoredItem(NamedTuple):
    """A slice with `depth` others around it, an instant or a value. `end_ns` is None without an end."""

    is_slice: bool
    ts_ns: int
    depth: int
    name: str
    args: Texts
    flows: tuple[int, ...]
    end_ns: int | None


class StoredItems:
    """Items of any number of tracks. Raises OutputError where there is no room for them."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        with _room():
            self._database.executescript(
                f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-{_CACHE_KB};"
                "PRAGMA temp_store=FILE; BEGIN;"
                "CREATE TABLE item (place INTEGER PRIMARY KEY, track, ts_ns, kind, stated);"
                "CREATE TABLE ended (place INTEGER PRIMARY KEY, ts_ns, stated);"
            )

    def add(self, items: Iterable[Item]) -> None:
        """Keep more items. Those of a track come after the ones that it has already."""
        rows = (
            (item.track.id, item.ts_ns, item.kind, marshal.dumps((str(item.name), _texts(item), item.flows)))
            for item in items
        )
        with _room():
            self._database.executemany(
                "INSERT INTO item (track, ts_ns, kind, stated) VALUES (?, ?, ?, ?)", rows
            )

    def sort(self) -> None:
        """Sort the items, after the last `add` and before the first `items_of`."""
        with _room():
            self._database.execute("CREATE INDEX by_time ON item (track, ts_ns, place)")

    def items_of(self, track: int) -> Iterator[StoredItem]:
        """The items of a track in the order of time, slices at their begins."""
        with _room():
            self._find_ends(track)
            rows = self._database.execute(
                "SELECT kind, item.ts_ns, item.stated, ended.ts_ns, ended.stated "
                "FROM item LEFT JOIN ended USING (place) WHERE track = ? ORDER BY item.ts_ns, place",
                (track,),
            )
            depth = 0
            for kind, ts_ns, stated, end_ns, stated_at_end in rows:
                if kind == END:
                    depth -= 1
                    continue
                name, args, flows = marshal.loads(stated)
                if stated_at_end is not None:
                    args |= marshal.loads(stated_at_end)[1]
                yield StoredItem(kind == BEGIN, ts_ns, depth, name, args, flows, end_ns)
                depth += kind == BEGIN
            self._database.execute("DELETE FROM ended")

    def _find_ends(self, track: int) -> None:
        """Put the ends of a track's slices at the places of their begins."""

        def ends() -> Iterator[tuple[int, int, int]]:
            opened: list[int] = []
            for place, kind, ts_ns in self._database.execute(
                "SELECT place, kind, ts_ns FROM item WHERE track = ? ORDER BY ts_ns, place", (track,)
            ):
                if kind == BEGIN:
                    opened.append(place)
                elif kind == END:
                    yield opened.pop(), ts_ns, place

        self._database.executemany("INSERT INTO ended SELECT ?, ?, stated FROM item WHERE place = ?", ends())


def _texts(item: Item) -> Texts:
    return {
        key: value if value is None or isinstance(value, str) else json_text(value)
        for key, value in (item.args or {}).items()
    }


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OutputError(
            f"the timeline cannot be kept in a temporary file: {error}",
            "Make room in the folder that SQLITE_TMPDIR names, or name another one.",
        ) from error


_TOTALS = ("track", "slice", "instant", "count")


def _flow_text(flow: int) -> str:
    """The number of a flow, with an `e` where events have it."""
    arrow, flow = "→" if flow < 0 else "←", abs(flow)
    return f" {arrow}e{flow & FLOW_LIMIT}" if flow > FLOW_LIMIT else f" {arrow}{flow}"


class TextWriter:
    """Keeps all operations in a temporary file, and renders them at the end."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._tracks: dict[int, Track] = {}
        self._items = StoredItems()
        self._children: dict[int | None, list[Track]] = {}
        self._counts: Counter[str] = Counter()

    def write(self, drawn: Drawn) -> None:
        """Keep what a batch draws."""
        self._tracks.update((track.id, track) for track in drawn.declared)
        self._items.add(drawn.items())

    def forget(self, *, shapes: bool) -> None:
        """Do nothing: what was kept has no numbers."""

    def finish(self) -> None:
        """Write the tree of tracks, and the counts of what is in it."""
        self._put(f"trace clock {self._info.trace_clock}, start {self._base_ns} ns")
        for track in self._tracks.values():
            self._children.setdefault(track.parent.id if track.parent else None, []).append(track)
        self._items.sort()
        for root in self._ordered(None):
            self._render(root, 0)
        self._put(", ".join(counted(self._counts[what], f"{what}|{what}s") for what in _TOTALS))

    def _put(self, line: str) -> None:
        self._out.write(line.encode("utf-8", "replace") + b"\n")

    def _render(self, track: Track, indent: int) -> None:
        kind = f"{track.kind} " if track.kind in ("process", "thread") else ""
        unit = f" [{track.unit}]" if track.unit else ""
        self._put(printable("  " * indent + kind + track.label() + unit))
        pad, is_counter, is_empty = "  " * (indent + 1), track.kind == "counter", True
        for item in self._items.items_of(track.id):
            is_empty = False
            if is_counter:
                self._counts["count"] += 1
                self._put(f"{pad}{item.ts_ns - self._base_ns:>12}  {item.name}")
            else:
                self._counts["slice" if item.is_slice else "instant"] += 1
                dur = "" if item.end_ns is None else f"+{item.end_ns - item.ts_ns:>9}"
                args = (f" {key}={text}" for key, text in item.args.items() if text is not None)
                line = f"{item.ts_ns - self._base_ns:>12} {dur:<10}  {'  ' * item.depth}{item.name}"
                self._put(pad + printable("".join((line, *args, *map(_flow_text, item.flows)))))
        self._counts["track"] += is_counter or not is_empty
        for child in self._ordered(track):
            self._render(child, indent + 1)

    def _ordered(self, parent: Track | None) -> list[Track]:
        children = self._children.get(parent.id if parent else None, [])
        return sorted(children, key=lambda track: track.order)
