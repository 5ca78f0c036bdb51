"""Joins two lines of a call: one at its entry, one at its exit with the duration, perhaps both without a
phase.

    {"ts":1.000,"tid":7,"type":"scheduler","name":"f"}                       an instant, as far as it shows
    {"ts":1.100,"tid":7,"type":"scheduler","name":"f","duration_us":99.8}    began when that was written

These are one call, and become its begin and its end. A record can be changed only while its batch is read.
For exits that come later, the newest entry of a function is a begin immediately, if nearly all of its entries
had their exits so far. A script may leave short calls out at their exits: such entries stay instants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tracepipe.event.model import HOST_LAYERS, Problem, Record
from tracepipe.readers.recording import Batch

# A script reads the clock separately for the line and for the duration, and may print one with fewer digits.
_APART_NS: Final = 100_000
# The most open calls of one name on one thread, and the most names and threads, that are remembered.
_OPEN_MAX: Final = 16
_KEYS_MAX: Final = 1 << 12
# There must be this many times as many entries with an exit as entries without.
_SURELY: Final = 10
_FAR_ENTRY: Final = (
    "its entry is so far before this line that it was read as an instant: the call is drawn from its "
    "duration, next to it"
)


@dataclass(slots=True)
class _Function:
    """How many calls of a function had both lines, and how many were followed by another without an exit."""

    exits: int = 0
    missing: int = 0

    @property
    def has_exits(self) -> bool:
        """Whether nearly all entries have an exit."""
        return self.exits > _SURELY * self.missing


@dataclass(slots=True, eq=False)
class _Entry:
    """A line that may be a call's entry: its time, and the batch and the place of its record. `says_so`: its
    phase is B. `is_begin`: it is read as a begin.
    """

    ts_ns: int
    batch: int
    place: int
    says_so: bool
    is_begin: bool


class CallEnds:
    """Remembers the entries of one input, and recognizes the lines that are their exits."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[_Entry]] = {}
        self._functions: dict[tuple[str, str], _Function] = {}
        self._batch: Batch | None = None
        self._batches = 0

    def take(self, number: int, record: Record, batch: Batch) -> None:
        """Take the record of line `number`, the next in `batch`. Its phase may change."""
        if record["type"] not in HOST_LAYERS:
            return
        if batch is not self._batch:
            self._batch, self._batches = batch, self._batches + 1
        key = record["type"], record["name"], record.get("pid"), record.get("tid")
        if record["phase"] in ("B", "I"):
            self._enter(key, record, batch)
        elif "dur_ns" in record:
            self._leave(number, key, record, batch)
        else:
            self._end_innermost(key)

    def _enter(self, key: tuple[Any, ...], record: Record, batch: Batch) -> None:
        if len(self._entries) >= _KEYS_MAX:
            self._entries.clear()
        entries = self._entries.setdefault(key, [])
        function = self._functions.get(key[:2])
        says_so = record["phase"] == "B"
        if function and entries and not entries[-1].says_so:
            function.missing += 1
            self._turn(entries[-1], "I", batch)
        if function and function.has_exits:
            record["phase"] = "B"
        if len(entries) >= _OPEN_MAX:
            del entries[0]
        place, is_begin = len(batch.records), record["phase"] == "B"
        entries.append(_Entry(record["ts_ns"], self._batches, place, says_so, is_begin))

    def _leave(self, number: int, key: tuple[Any, ...], record: Record, batch: Batch) -> None:
        """Find the entry of the call for a line with a duration, which is its exit."""
        entries = self._entries.get(key)
        if not entries:
            return
        is_end = record["phase"] == "E"
        entry = _nearest(entries, record["ts_ns"] - record["dur_ns"] * is_end, record["dur_ns"])
        if entry is None:
            if is_end:
                self._end_innermost(key)
            return
        if len(self._functions) >= _KEYS_MAX:
            self._functions.clear()
        function = self._functions.setdefault(key[:2], _Function())
        function.exits += 1
        function.missing -= function.missing > 0 and entry is not entries[-1] and not entry.says_so
        del entries[entries.index(entry) :]
        self._turn(entry, "B", batch)
        if not entry.is_begin:
            batch.problems.append(Problem(number, "duration_us", _FAR_ENTRY, skipped=False))
        elif not is_end:
            record.update(phase="E", ts_ns=record["ts_ns"] + record["dur_ns"])

    def _end_innermost(self, key: tuple[Any, ...]) -> None:
        """End the innermost call with an end that has no duration, or that of something else."""
        entries = self._entries.get(key)
        if entries and entries[-1].says_so:
            entries.pop()

    def _turn(self, entry: _Entry, phase: str, batch: Batch) -> None:
        """Give the record of an entry another phase, if it can still be changed."""
        if entry.batch == self._batches:
            batch.records[entry.place]["phase"] = phase
            entry.is_begin = phase == "B"


def _nearest(entries: list[_Entry], start_ns: int, dur_ns: int) -> _Entry | None:
    """The entry at whose time a call of that length began, preferably the innermost."""
    entry = min(reversed(entries), key=lambda entry: abs(entry.ts_ns - start_ns))
    is_near = abs(entry.ts_ns - start_ns) <= _APART_NS and entry.ts_ns <= start_ns + dur_ns
    return entry if is_near else None
