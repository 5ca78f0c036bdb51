"""Keeps the items of tracks in a temporary file, and returns them track by track in the order of time.

SQLite makes the file, as it can sort more than fits into memory. The file is in $SQLITE_TMPDIR, $TMPDIR or
/var/tmp, and has no name.
"""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tracepipe.errors import OutputError
from tracepipe.event.ops import BEGIN, END
from tracepipe.layout.timeline import Item
from tracepipe.printable import json_text

_CACHE_KB = 2048
Texts = dict[str, str | None]
"""Arguments as they are shown. The value is None for those that are not shown."""


class KeptItem(NamedTuple):
    """A slice, an instant or a value of a counter. `depth` is the number of slices around it on its track.
    `end_ns` is None where there is no end.
    """

    is_slice: bool
    ts_ns: int
    depth: int
    name: str
    args: Texts
    flows: tuple[int, ...]
    end_ns: int | None


class KeptItems:
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
        rows = ((item.track.id, item.ts_ns, item.kind, _stated(item)) for item in items)
        with _room():
            self._database.executemany(
                "INSERT INTO item (track, ts_ns, kind, stated) VALUES (?, ?, ?, ?)", rows
            )

    def sort(self) -> None:
        """Sort the items, after the last `add` and before the first `of`."""
        with _room():
            self._database.execute("CREATE INDEX by_time ON item (track, ts_ns, place)")

    def of(self, track: int) -> Iterator[KeptItem]:
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
                yield KeptItem(kind == BEGIN, ts_ns, depth, name, args, flows, end_ns)
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


def _stated(item: Item) -> bytes:
    args = {
        key: value if value is None or isinstance(value, str) else json_text(value)
        for key, value in (item.args or {}).items()
    }
    return marshal.dumps((str(item.name), args, tuple(item.flows)))


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OutputError(
            f"the timeline cannot be kept in a temporary file: {error}",
            "Make room in the folder that SQLITE_TMPDIR names, or name another one.",
        ) from error
