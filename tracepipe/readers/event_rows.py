"""Events of a reader that makes them itself, in the order of time: rows, and from them batches.

Ends of ranges wait here until their time comes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tracepipe.event.columns import NONE, SPECIAL, Row, SourceBatch, event_columns, signed
from tracepipe.event.model import NAME_BYTES_MAX, TIME_LIMIT_NS, Problem, Record
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.warps import Warps

BATCH_ROWS: Final = 1 << 10
# Shapes whose numbers are remembered by what a reader tells them from.
_SHAPES_MAX: Final = 1 << 13
# Ends that wait. Ranges nest some dozen deep on some hundred threads.
ENDS_MAX: Final = 1 << 14
_NEVER_NS: Final = 1 << 63


Place = tuple[str, int]
"""Where something stands in an input without lines: a table and a row of it, say."""


def named(at: Place) -> str:
    """A place as a problem's field."""
    table, row = at
    return f"{table} row {row}" if table and row != NONE else table


@dataclass(slots=True)
class EventRows:
    """Takes events one by one; `between` gives the batches of all that a reader calls for.

    `base_ns` is added to each time.
    """

    tables: Tables
    base_ns: int = 0
    problems: list[Problem] = field(default_factory=list)
    _rows: list[Row] = field(default_factory=list)
    _others: list[Record | Warps] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _rounds: int = 0
    _ends: list[tuple[int, int, Shape, Args | None, Callable[[], None] | None]] = field(default_factory=list)
    _ended: int = 0

    def shape(self, key: Any, make: Callable[..., Shape], *of: Any) -> int:
        """The number of the shape that `make` makes of `of`, asked once for each key."""
        number = self._numbers.get(key)
        if number is None:
            if len(self._numbers) >= _SHAPES_MAX:
                self._numbers.clear()
            number = self._numbers[key] = self.number_of(make(*of))
        return number

    def number_of(self, shape: Shape) -> int:
        """The number of a shape, cut to what is kept of its texts."""
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
        """Add an event; `at` says where it stands in the input, should its time be none that can be."""
        ts_ns += self.base_ns
        if not 0 <= ts_ns <= TIME_LIMIT_NS:
            said = "is before the clock began" if ts_ns < 0 else "is beyond 146 years"
            self.say(at, f"its time, {ts_ns - self.base_ns} ns, {said}", skipped=True)
            return
        number = self.tables.args_number(args) if args else NONE
        self._rows.append((ts_ns, shape, number, dur_ns, signed(launch), None, stack))

    def say(self, at: Place, text: str, *, skipped: bool = False) -> None:
        """Add a problem of what stands at a place; `skipped` if it is left out."""
        self.problems.append(Problem(0, named(at), text, skipped))

    def other(self, record: Record, ts_ns: int = NONE) -> None:
        """Add a record that is no event: a loss, on the clock of the events, or a stack."""
        self._others.append(record)
        self._rows.append((ts_ns, SPECIAL, len(self._others) - 1, 0, 0, None, NONE))

    @property
    def has_room_for_ends(self) -> bool:
        """Whether a further range may wait for its end."""
        return len(self._ends) < ENDS_MAX

    def end_later(
        self, end_ns: int, shape: Shape, args: Args | None = None, then: Callable[[], None] | None = None
    ) -> None:
        """Add the end of a range when its time comes; `then` is called at it. What began last ends first."""
        self._ended += 1
        heapq.heappush(self._ends, (end_ns, -self._ended, shape, args, then))

    def end_until(self, ts_ns: int) -> None:
        """Add the ends up to a time."""
        while self._ends and self._ends[0][0] <= ts_ns:
            end_ns, _, shape, args, then = heapq.heappop(self._ends)
            self.add(("", NONE), end_ns, self.number_of(shape), args)
            if then:
                then()

    def batches(self, steps: Iterable[object]) -> Iterator[SourceBatch]:
        """The events that are added while `steps` goes on."""
        for _ in steps:
            if len(self._rows) >= BATCH_ROWS or len(self.problems) >= BATCH_ROWS:
                yield self._batch()
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


def cut(shape: Shape) -> Shape:
    """A shape whose texts are no longer than what is kept of them."""
    texts = ("name", "comm", "layer", "domain")
    long: dict[str, Any] = {
        name: cut_text(text)
        for name in texts
        if (text := getattr(shape, name)) and len(text) > NAME_BYTES_MAX // 4
    }
    return replace(shape, **long) if long else shape


def cut_text(text: str) -> str:
    """A text as far as it is kept."""
    whole = text.encode("utf-8", "replace")
    return text if len(whole) <= NAME_BYTES_MAX else whole[:NAME_BYTES_MAX].decode("utf-8", "ignore")
