"""What a layout gives, made of plain items: for tests of what writes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.cores import new_tables
from tracepipe.event.columns import NONE, Row, TraceColumns, event_columns
from tracepipe.event.ops import COUNTER, NO_MARK, Op, OpColumns
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.layout.timeline import FIRST_EXTRA, Book, Drawn, Item, Track

# Of events that show nothing but their arguments.
PLAIN = Shape("userspace", "f", "I")


class Drawing:
    """One timeline. Items of a batch stay in the order in which they are given."""

    def __init__(self) -> None:
        self.book = Book(new_tables())
        self._rows: dict[int, int] = {}
        self._names: dict[str, int] = {}

    def drawn(
        self, items: Iterable[Item] = (), declared: Sequence[Track] = (), *, of_events: bool = True
    ) -> Drawn:
        """A batch of these. Arguments are those of events, whose texts are numbered, or dicts."""
        rows: list[Row] = []
        extras: list[Args] = []
        ops = []
        tables = self.book.tables
        for kind, track, ts_ns, name, args, flows in items:
            event = NONE
            if args and of_events:
                event = len(rows)
                rows.append((ts_ns, tables.number_of(PLAIN), tables.args_number(args), 0, 0, None, NONE))
            elif args:
                event = FIRST_EXTRA - len(extras)
                extras.append(args)
            flow, flow2 = (*flows, 0, 0)[:2]
            value = name if kind == COUNTER else NONE
            number = 0 if kind == COUNTER else self._name(name)
            ops.append((kind, self._row(track), ts_ns, number, event, NO_MARK, flow, flow2, value, NONE))
        return Drawn(self.book, list(declared), _columns(rows), *_in_form(ops), extras, [])

    def _row(self, track: Track) -> int:
        row = self._rows.get(track.id)
        if row is None:
            row = self._rows[track.id] = len(self.book.tracks)
            self.book.tracks.append(track)
        return row

    def _name(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self.book.names)
            self.book.names.append(name)
        return number


def _columns(rows: list[Row]) -> TraceColumns | None:
    if not rows:
        return None
    events = event_columns(rows)
    return TraceColumns(events.ts_ns, events.shape, events.args, events.dur_ns, events.launch)


def _in_form(ops: list[Op]) -> tuple[OpColumns, Any]:
    """Operations and their order."""
    columns = OpColumns()
    columns.add(*ops)
    return columns, np.arange(len(ops))


def item(
    kind: int, track: Track, ts_ns: int, name: Any = "", args: Args | None = None, flows: Any = ()
) -> Item:
    """One item."""
    return Item(kind, track, ts_ns, name, args, tuple(flows or ()))


def renamed(track: Track, name: str) -> Track:
    """A track with a new name, which is the same to those who know its number."""
    return replace(track, name=name)
