"""Two lines of one call: one at its entry, one at its exit with the duration, and maybe neither with a phase.

    {"ts":1.000,"tid":7,"type":"scheduler","name":"f"}                       an instant, as far as it says
    {"ts":1.100,"tid":7,"type":"scheduler","name":"f","duration_us":99.8}    began when that was written

They are one call, and become its begin and its end.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from tracepipe.event.model import HOST_LAYERS, Problem, Record
from tracepipe.readers.recording import Batch

# A script reads the clock once for the line and once for the duration, and may print fewer digits of one.
_APART_NS: Final = 100_000
# Calls of one name on one thread that are open at once, and names and threads, as far as they are remembered.
_OPEN_MAX: Final = 16
_KEYS_MAX: Final = 1 << 12
_FAR_ENTRY = (
    "its entry stands so far before this line that it was read as an instant: the call is drawn from its "
    "duration, beside it"
)


class _Entry(NamedTuple):
    """A line that may be a call's entry: its time, and its record's place in which batch. `is_begin`: it was
    read as a begin, not as an instant.
    """

    ts_ns: int
    batch: int
    place: int
    is_begin: bool


class CallEnds:
    """Remembers the entries of one input, and recognises the lines that are their exits."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Any, ...], list[_Entry]] = {}
        self._logged_twice: set[tuple[str, str]] = set()
        """Layer and name of calls that are known to be logged at both ends."""
        self._batch: Batch | None = None
        self._batches = 0

    def take(self, number: int, record: Record, batch: Batch) -> None:
        """Look at the record of line `number`, which comes next in `batch`; its phase may change."""
        if record["type"] not in HOST_LAYERS:
            return
        if batch is not self._batch:
            self._batch, self._batches = batch, self._batches + 1
        key = record["type"], record["name"], record.get("pid"), record.get("tid")
        if record["phase"] in ("X", "E"):
            self._leave(number, key, record, batch)
            return
        if key[:2] in self._logged_twice:
            record["phase"] = "B"
        if len(self._entries) >= _KEYS_MAX:
            self._entries.clear()
        entries = self._entries.setdefault(key, [])
        if len(entries) >= _OPEN_MAX:
            del entries[0]
        is_begin = record["phase"] == "B"
        entries.append(_Entry(record["ts_ns"], self._batches, len(batch.records), is_begin))

    def _leave(self, number: int, key: tuple[Any, ...], record: Record, batch: Batch) -> None:
        """Find the entry of the call that a line with a duration, or an end, is the exit of."""
        entries = self._entries.get(key)
        if not entries:
            return
        is_end = record["phase"] == "E"
        entry = self._nearest(entries, record["ts_ns"], record.get("dur_ns"), is_end)
        if entry is None:
            # An end without a duration, or with that of something else, is the innermost call's.
            if is_end and entries[-1].is_begin:
                entries.pop()
            return
        del entries[entries.index(entry) :]
        self._logged_twice.add(key[:2])
        if entry.batch == self._batches:
            batch.records[entry.place]["phase"] = "B"
        elif not entry.is_begin:
            batch.problems.append(Problem(number, "duration_us", _FAR_ENTRY, skipped=False))
            return
        if not is_end:
            record.update(phase="E", ts_ns=record["ts_ns"] + record["dur_ns"])

    def _nearest(self, entries: list[_Entry], ts_ns: int, dur_ns: int | None, is_end: bool) -> _Entry | None:
        """The entry, rather the innermost, whose time is that at which a call of that length began."""
        if dur_ns is None:
            return None
        start_ns = ts_ns - dur_ns if is_end else ts_ns
        entry = min(reversed(entries), key=lambda entry: abs(entry.ts_ns - start_ns))
        is_near = abs(entry.ts_ns - start_ns) <= _APART_NS and entry.ts_ns <= start_ns + dur_ns
        return entry if is_near else None
