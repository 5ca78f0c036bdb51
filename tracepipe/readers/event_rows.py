"""Makes batches of the events of readers that are not text, in the order of time.

Ends of ranges wait here until their time comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tracepipe.event.columns import NONE, SPECIAL, Row, SourceBatch, event_columns, signed
from tracepipe.event.model import NAME_BYTES_MAX, TIME_LIMIT_NS, Problem, Record
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.warps import Warps

BATCH_ROWS: Final = 1 << 10
_BATCH_BYTES: Final = 1 << 19
# The most shapes whose numbers are remembered by the keys of a reader.
_SHAPES_MAX: Final = 1 << 13
# The most ends that wait. Ranges nest some dozen deep on some hundred threads.
ENDS_MAX: Final = 1 << 14
_NEVER_NS: Final = 1 << 63
# The most rows whose open ranges are remembered.
_ROWS_MAX: Final = 1 << 12


Values = tuple[Any, ...]
Place = tuple[str, int]
"""A place in an input without lines: for example a table and a row of it."""


Take = Callable[[Place, Values], None]
"""Takes the place of a row and its values."""


def named(at: Place) -> str:
    """A place as a problem's field."""
    table, row = at
    return f"{table} row {row}" if table and row != NONE else table


@dataclass(slots=True)
class EventRows:
    """Takes events one by one; `batches` yields them as batches. `base_ns` is added to each time.
    `longest_ns` is the longest possible duration.
    """

    tables: Tables
    base_ns: int = 0
    longest_ns: int = 366 * 86_400 * 10**9
    problems: list[Problem] = field(default_factory=list)
    _rows: list[Row] = field(default_factory=list)
    _others: list[Record | Warps] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _rounds: int = 0
    _ends: list[tuple[int, int, Shape, Args | None, Callable[[], None] | None]] = field(default_factory=list)
    _ended: int = 0
    _open: dict[Any, list[int]] = field(default_factory=dict)
    """By row: the ends of the open ranges."""

    def shape(self, key: object, make: Callable[..., Shape], *of: object) -> int:
        """The number of the shape that `make` returns for `of`. It is called once for each key."""
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _SHAPES_MAX:
                self._numbers.clear()
            number = self._numbers[key] = self.number_of(make(*of))
        return number

    def number_of(self, shape: Shape) -> int:
        """The number of a shape, whose texts are cut to the length that is kept."""
        return self.tables.number_of(cut(shape))

    def add(
        self,
        at: Place,
        ts_ns: int,
        shape: int,
        args: Args | None = None,
        dur_ns: int = 0,
        launch: int = 0,
        *,
        stack: int = NONE,
    ) -> None:
        """Add an event. `at` is its place in the input, for the problem if its time is impossible."""
        ts_ns += self.base_ns
        if not 0 <= ts_ns <= TIME_LIMIT_NS:
            stated = "is before the clock began" if ts_ns < 0 else "is beyond 146 years"
            self.say(at, f"its time, {ts_ns - self.base_ns} ns, {stated}", skipped=True)
            return
        number = self.tables.args_number(args) if args else NONE
        self._rows.append((ts_ns, shape, number, dur_ns, signed(launch), None, stack))

    def say(self, at: Place, text: str, *, skipped: bool = False) -> None:
        """Add a problem at a place; `skipped` if the event there is left out."""
        self.problems.append(Problem(0, named(at), text, skipped))

    def length(self, at: Place, start: int, end: object, args: Args) -> int:
        """The length of something. An impossible length is marked in `args`, with a problem."""
        if type(end) is not int:
            args["end"] = "not recorded"
            self.say(at, "has no end: it is kept without a length")
            return 0
        dur_ns = end - start
        if dur_ns < 0:
            args["ends_before_start_ns"] = -dur_ns
            self.say(at, f"ends {-dur_ns} ns before it starts: it is kept without a length")
            return 0
        if dur_ns > self.longest_ns:
            args["longer_than_recording"] = True
            self.say(at, f"lasts {dur_ns} ns, longer than the recording")
        return min(dur_ns, TIME_LIMIT_NS)

    def other(self, record: Record, ts_ns: int = NONE) -> None:
        """Add a record that is not an event: a loss, on the clock of the events, or a stack."""
        self._others.append(record)
        self._rows.append((ts_ns, SPECIAL, len(self._others) - 1, 0, 0, None, NONE))

    @property
    def has_room_for_ends(self) -> bool:
        """Whether a further range may wait for its end."""
        return len(self._ends) < ENDS_MAX

    def end_later(
        self, end_ns: int, shape: Shape, args: Args | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Add the end of a range when its time comes, and call `then` with it. The range that began last ends
        first.
        """
        self._ended += 1
        heapq.heappush(self._ends, (end_ns, -self._ended, shape, args, then))

    def end_until(self, ts_ns: int) -> None:
        """Add the ends up to a time."""
        while self._ends and self._ends[0][0] <= ts_ns:
            end_ns, _, shape, args, then = heapq.heappop(self._ends)
            self.add(("", NONE), end_ns, self.number_of(shape), args)
            if then:
                then()

    def nests(self, row: object, start_ns: int, end_ns: int) -> bool:
        """Whether a range can be a begin and an end: it is within those that are open on its row, and its end
        can wait. If so, it is open from now on. Ranges come in the order of their starts.
        """
        if not self.has_room_for_ends:
            return False
        if len(self._open) >= _ROWS_MAX and row not in self._open:
            self._open = {key: ends for key, ends in self._open.items() if ends and ends[-1] > start_ns}
        ends = self._open.setdefault(row, [])
        while ends and ends[-1] <= start_ns:
            ends.pop()
        if ends and end_ns > ends[-1]:
            return False
        ends.append(end_ns)
        return True

    def steps(
        self, streams: Sequence[tuple[str, Iterator[Values], Take]], first: Callable[[int], None]
    ) -> Iterator[None]:
        """Take the rows of several tables in the order of time, in which each table is. A row is its number,
        its time and the rest. `first` is called with the first time.
        """
        dated = [_dated(at, rows) for at, (_, rows, _) in enumerate(streams)]
        is_first = True
        for ts_ns, at, row in heapq.merge(*dated):
            if is_first:
                first(ts_ns)
                is_first = False
            self.end_until(ts_ns)
            table, _, take = streams[at]
            take((table, row[0]), row[1:])
            yield

    def batches(self, steps: Iterable[object]) -> Iterator[SourceBatch]:
        """The batches of the events that are added while `steps` is iterated."""
        given_bytes = self.tables.given_bytes
        for _ in steps:
            is_full = len(self._rows) >= BATCH_ROWS or len(self.problems) >= BATCH_ROWS
            if is_full or self.tables.given_bytes - given_bytes >= _BATCH_BYTES:
                yield self._batch()
                given_bytes = self.tables.given_bytes  # the consumer of batches may reset it to 0
                if self._rounds != self.tables.rounds:
                    self._rounds = self.tables.rounds
                    self._numbers.clear()
        self.end_until(_NEVER_NS)
        if self._rows or self.problems:
            yield self._batch()

    def _batch(self) -> SourceBatch:
        batch = SourceBatch(event_columns(self._rows), self._others, list(self.problems))
        self._rows, self._others = [], []
        self.problems.clear()  # readers hold this one
        return batch


def _dated(at: int, rows: Iterator[Values]) -> Iterator[tuple[int, int, Values]]:
    return ((row[1], at, row) for row in rows)


def cut(shape: Shape) -> Shape:
    """A shape whose texts are cut to the length that is kept."""
    texts = ("name", "comm", "layer", "domain")
    long: dict[str, Any] = {
        name: cut_text(text)
        for name in texts
        if (text := getattr(shape, name)) and len(text) > NAME_BYTES_MAX // 4
    }
    return replace(shape, **long) if long else shape


def cut_text(text: str) -> str:
    """A text, cut to the length that is kept."""
    if len(text) <= NAME_BYTES_MAX // 4:
        return text
    whole = text.encode("utf-8", "replace")
    return text if len(whole) <= NAME_BYTES_MAX else whole[:NAME_BYTES_MAX].decode("utf-8", "ignore")
