"""Makes whole slices of begins and ends in Chrome's trace format.

    B E      of a thread; an E ends the innermost B of its name, or the innermost one where it has none
    b n e    of an id: they nest, and may overlap those of other ids: ranges of a process

They come in the order of time. A begin without an end lasts to the end of the trace, marked `unclosed`. An
end without a begin is an instant, marked `no_begin`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final

import orjson

from tracepipe.event.model import RANGE_LIMIT
from tracepipe.readers.known import Known
from tracepipe.readers.sorted_rows import MARK, SLICE, Rows, SortedRow, SortedRows

# At most this many may be open. Further begins become instants.
_OPEN_MAX: Final = 1 << 15
_Key = tuple[Any, ...]


@dataclass(slots=True)
class _Open:
    """A begin that waits for its end."""

    ts_ns: int
    what: dict[str, Any]
    args: bytes


@dataclass(slots=True)
class _Lanes:
    """The numbers of the open ranges of a process and domain."""

    count: int = 0
    free: list[int] = field(default_factory=list)

    def take(self) -> int:
        """Take the lowest free number."""
        if self.free:
            return heappop(self.free)
        self.count += 1
        return min(self.count - 1, RANGE_LIMIT)

    def give_back(self, lane: int) -> None:
        """Free a number again."""
        heappush(self.free, lane)


class ChromePairs:
    """Adds slices made of begins and ends to `rows`."""

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self._open: dict[_Key, list[_Open]] = {}
        self._count = 0
        self._lanes: dict[_Key, _Lanes] = {}
        self._lane_of: dict[_Key, int] = {}
        self._known = Known[bytes, dict[str, Any]]()
        self.unclosed = self.no_begin = 0

    def take(self, paired: Iterable[Rows], last_ns: int) -> None:
        """Take all rows of begins and ends, in order; `last_ns` is the end of the trace."""
        for rows in paired:
            for row in rows:
                self._take(row.ts_ns, self._what(row.first), row.second)
        for key, opened in list(self._open.items()):
            while opened:
                self._end(key, opened.pop(), max(last_ns, 0), b"", unclosed=True)

    def _what(self, first: bytes) -> dict[str, Any]:
        what = self._known.get(first)
        if what is None:
            what = orjson.loads(first)
            self._known.keep(first, what, len(first))
        return what

    def _take(self, ts_ns: int, what: dict[str, Any], args: bytes) -> None:
        key, phase = tuple(what["key"]), what["phase"]
        opened = self._open.setdefault(key, [])
        if phase in "Bb":
            if self._count >= _OPEN_MAX:
                self._instant(ts_ns, key, what, args, "unclosed")
                return
            if phase == "b" and not opened:
                fields = what["fields"]
                lanes = self._lanes.setdefault((fields.get("pid"), fields.get("domain")), _Lanes())
                self._lane_of[key] = lanes.take()
            self._count += 1
            opened.append(_Open(ts_ns, what, args))
        elif phase == "n":
            self._instant(ts_ns, key, what, args, "")
        else:
            self._end_of(ts_ns, key, opened, what, args)
        if not opened:
            del self._open[key]

    def _end_of(self, ts_ns: int, key: _Key, opened: list[_Open], what: dict[str, Any], args: bytes) -> None:
        """End the innermost begin of a name, with all that is in it."""
        name = what.get("name")
        if not opened or (name is not None and all(one.what.get("name", name) != name for one in opened)):
            self._instant(ts_ns, key, what, args, "no_begin")
            return
        while True:
            one = opened.pop()
            is_it = name is None or one.what.get("name", name) == name
            self._end(key, one, ts_ns, args if is_it else b"", unclosed=not is_it)
            if is_it:
                break
        if not opened and key in self._lane_of:
            fields = what["fields"]
            self._lanes[fields.get("pid"), fields.get("domain")].give_back(self._lane_of.pop(key))

    def _end(self, key: _Key, one: _Open, end_ns: int, args: bytes, *, unclosed: bool) -> None:
        """Add a slice from a begin to its end."""
        self._count -= 1
        self.unclosed += unclosed
        fields, launch = one.what["fields"], one.what["launch"]
        record = {**fields, "name": fields.get("name") or one.what.get("name", "no name")}
        if key in self._lane_of:
            record["range"] = self._lane_of[key]
        record |= {"phase": "X", "dur_ns": 0}
        if launch is not None:
            record["launch"] = 0
        joined = _joined(one.args, args, "unclosed" if unclosed else "")
        dur_ns = max(0, end_ns - one.ts_ns)
        self._rows.add(SortedRow(one.ts_ns, SLICE, dur_ns, launch or 0, orjson.dumps(record), joined))

    def _instant(self, ts_ns: int, key: _Key, what: dict[str, Any], args: bytes, mark: str) -> None:
        self.no_begin += mark == "no_begin"
        self.unclosed += mark == "unclosed"
        record = {**what["fields"], "name": what.get("name", "no name"), "phase": "I"}
        if what["phase"] in "bne":
            record["range"] = self._lane_of.get(key, 0)
        self._rows.add(SortedRow(ts_ns, MARK, 0, 0, orjson.dumps(record), _joined(args, b"", mark)))


def _joined(first: bytes, second: bytes, mark: str) -> bytes:
    """The arguments of a begin and of its end, whose values replace those of the begin, and a mark."""
    if not second and not mark:
        return first
    args = (orjson.loads(first) if first else {}) | (orjson.loads(second) if second else {})
    return orjson.dumps(args | {mark: True} if mark else args) if args or mark else b""
