"""Turns events of Chrome's trace format into rows, which are sorted later.

X                 a row with its length
I i R P, C, s t f a row without one
N O D             the same: the life of an object
B E, b n e        a row for `chrome_pairs`, which matches them
M                 names and places of processes and threads
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

from tracepipe.event.model import COUNTS, FLOW_PHASES, NAME_BYTES_MAX, TIME_LIMIT_NS, Problem, Record
from tracepipe.event.tables import packed
from tracepipe.readers.chrome_kinds import Kind, Kinds
from tracepipe.readers.chrome_numbers import Ids, flow_number, ns_of
from tracepipe.readers.json_elements import Elements, Fault, events_in
from tracepipe.readers.known import Known
from tracepipe.readers.lines import TOO_DEEP, is_too_deep
from tracepipe.readers.native_sorted_rows import sorted_rows
from tracepipe.readers.sorted_rows import FLOW, MARK, SLICE, SortedRow

_INSTANTS = frozenset("iIRP")
_OF_OBJECTS = {"N": "created", "O": "snapshot", "D": "destroyed"}
_PAIRED = frozenset("BEbne")
_KNOWN = frozenset({"ph", "cat", "name", "pid", "tid", "ts", "dur", "args"})
_OF_ASYNC = _KNOWN | {"id", "id2", "scope"}
_OF_FLOWS = _OF_ASYNC | {"bp"}
# A year: no slice of a trace is that long.
_LONG_NS: Final = 365 * 24 * 3600 * 10**9
_NAMES_MAX: Final = 1 << 16
_NO_NAME: Final = "no name"
_DIGITS = re.compile(r"-?[0-9]{1,18}(\.[0-9]{1,18})?")


def _parsed(text: bytes) -> Any:
    """The value of JSON, in which invalid UTF-8 and invalid numbers are replaced. Raises ValueError."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        value = json.loads(text.decode("utf-8", "replace"), parse_constant=str)
        return orjson.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def id_of(event: dict[str, Any]) -> tuple[Any, ...] | None:
    """The id that distinguishes an asynchronous event or a flow from others of its category; None without
    one.
    """
    id2 = event.get("id2")
    if type(id2) is dict:
        if "global" in id2:
            return event.get("scope"), str(id2["global"])
        if "local" in id2:
            return event.get("scope"), event.get("pid"), str(id2["local"])
    return (event.get("scope"), str(event["id"])) if "id" in event else None


class ChromeEvents:
    """Takes events. `rows` are those that are complete in themselves, `paired` are begins and ends."""

    def __init__(self, kinds: Kinds, ids: Ids) -> None:
        self._kinds, self._ids = kinds, ids
        self.rows, self.paired = sorted_rows(), sorted_rows()
        self.first_ns, self.last_ns = TIME_LIMIT_NS, 0
        """The first and the last time, without 0."""
        self.least_ns = TIME_LIMIT_NS
        """The first time, which may be below 0."""
        self.negative = self.impossible = self.cut = self.names_left_out = 0
        self._firsts = Known[tuple[Any, ...], tuple[bytes, int]]()
        self._names: dict[tuple[int, int | None], Record] = {}

    def take(self, batch: Elements) -> list[Problem]:
        """Take events, and return the problems of events and of the text between them."""
        faults = batch.faults + self._take_all(batch)
        return [batch.problem(fault) for fault in sorted(faults)]

    def _take_all(self, batch: Elements) -> list[Fault]:
        """Take events one by one, and return the places and texts of what is wrong."""
        return [(place + at, message) for place, text in batch.texts() for at, message in self._event(text)]

    def _event(self, text: bytes) -> list[Fault]:
        """Take an event, and return the places and texts of what is wrong."""
        try:
            event = _parsed(text)
        except (ValueError, RecursionError):
            # A missing bracket or quote may have joined it with valid events.
            wrong = [(0, "is not JSON")]
            for start, end in events_in(text, 1):
                wrong += [(start + at, message) for at, message in self._event(text[start:end])]
            return wrong
        if is_too_deep(text, event):
            return [(0, TOO_DEEP)]
        message = self._take(event, text) if event else ""
        return [(0, message)] if message else []

    def _take(self, event: dict[str, Any], text: bytes) -> str:
        phase = event.get("ph")
        if type(phase) is not str:
            return "ph: is missing, or is not a string"
        if phase == "M":
            return self._name(event)
        ts_ns = ns_of(event.get("ts"), "ts", text)
        if ts_ns is None:
            return "ts: is missing" if "ts" not in event else "ts: is not a time that a trace can have"
        category = event.get("cat")
        category = self._shortened(category) if type(category) is str else ""
        if phase == "X":
            self._slice(event, ts_ns, category, text)
        elif phase in _INSTANTS:
            self._add(*self._whole(event, ts_ns, category, "I", MARK, 0, _args_of(event, _KNOWN)))
        elif phase in _OF_OBJECTS:
            args = {"object": _OF_OBJECTS[phase], **_args_of(event, _KNOWN)}
            self._add(*self._whole(event, ts_ns, category, "I", MARK, 0, args))
        elif phase == COUNTS:
            return self._counter(event, ts_ns, category)
        elif phase in FLOW_PHASES:
            return self._flow(event, ts_ns, category)
        elif phase in _PAIRED:
            return self._pair(event, ts_ns, category)
        else:
            return f"ph: {phase[:8]!r} is not a phase that is read"
        return ""

    def _note_time(self, ts_ns: int, dur_ns: int) -> None:
        if ts_ns > 0:
            self.first_ns = min(self.first_ns, ts_ns)
        self.least_ns = min(self.least_ns, ts_ns)
        self.last_ns = max(self.last_ns, ts_ns + dur_ns)

    def _shortened(self, name: str) -> str:
        if len(name) <= NAME_BYTES_MAX // 4:
            return name
        whole = name.encode("utf-8", "replace")
        self.cut += len(whole) > NAME_BYTES_MAX
        return whole[:NAME_BYTES_MAX].decode("utf-8", "ignore")

    # Rows -----------------------------------------------------------------------------------------------

    def _slice(self, event: dict[str, Any], ts_ns: int, category: str, text: bytes) -> None:
        args = _args_of(event, _KNOWN)
        dur_ns = ns_of(event.get("dur"), "dur", text)
        if dur_ns is None:
            args["no_duration" if "dur" not in event else "impossible_duration"] = event.get("dur", True)
            self.impossible += "dur" in event
            dur_ns = 0
        elif dur_ns < 0 or dur_ns > _LONG_NS:
            args["negative_duration_ns" if dur_ns < 0 else "impossible_duration_ns"] = dur_ns
            self.negative += dur_ns < 0
            self.impossible += dur_ns > 0
            dur_ns = 0
        self._add(*self._whole(event, ts_ns, category, "X", SLICE, dur_ns, args))

    def mark(self, name: str, ts_ns: int) -> None:
        """Add an instant of the process that is named first."""
        process = next(({"pid": pid} for pid, _ in self._names), {})
        row, _ = self._whole({"name": name, **process}, ts_ns, "", "I", MARK, 0, {})
        self.rows.add(row)

    def _whole(
        self,
        event: dict[str, Any],
        ts_ns: int,
        category: str,
        phase: str,
        rank: int,
        dur_ns: int,
        args: dict[str, Any],
    ) -> tuple[SortedRow, Kind]:
        """The row of a slice or an instant, and its kind."""
        kind = self._kinds.kind(event, category, args)
        self._note_time(ts_ns, dur_ns)
        first = self._first(kind.fields, event, phase, kind.launch is not None)
        return SortedRow(ts_ns, rank, dur_ns, kind.launch or 0, first, _dumped(kind.args_of(args))), kind

    def _add(self, row: SortedRow, kind: Kind) -> None:
        """Take the row of an event of a kind."""
        self.rows.add(row)

    def _first(self, fields: dict[str, Any], event: dict[str, Any], phase: str, has_launch: bool) -> bytes:
        """The record without time and arguments, and with 0 for its length and launch."""
        name = fields.get("name", event.get("name"))
        text = name if type(name) is str else str(name)
        key = (phase, has_launch, text, *fields.values())
        known = self._firsts.get(key)
        if known is None:
            before, record = self.cut, dict(fields)
            record["name"] = self._shortened(_NO_NAME if name is None else text)
            record["phase"] = phase
            if phase == "X":
                record["dur_ns"] = 0
            if has_launch:
                record["launch"] = 0
            known = _dumped(record), self.cut - before
            self._firsts.keep(key, known, len(text) + len(known[0]))
            self.cut = before
        first, cut = known
        self.cut += cut
        return first

    def _counter(self, event: dict[str, Any], ts_ns: int, category: str) -> str:
        args = event.get("args")
        values = {key: _value(value) for key, value in args.items()} if type(args) is dict else {}
        if not values or None in values.values():
            return "args: are without numbers, which a counter needs"
        kind = self._kinds.counter(event, category)
        id = id_of(event)
        name = f"{event.get('name', _NO_NAME)}" + (f"[{id[-1]}]" if id else "")
        self._note_time(ts_ns, 0)
        first = self._first({**kind.fields, "name": name}, event, COUNTS, False)
        self._add(SortedRow(ts_ns, MARK, 0, 0, first, _dumped(values)), kind)
        return ""

    def _flow(self, event: dict[str, Any], ts_ns: int, category: str) -> str:
        id = id_of(event)
        if id is None:
            return "id: is missing"
        if self._kinds.is_known_otherwise(category):
            return ""
        kind = self._kinds.kind(event, category, {})
        fields = {**kind.fields, "flow": 0}
        kind.flow = (category, event.get("name"), *id[:-1])
        number = flow_number(*kind.flow, id[-1])
        self._note_time(ts_ns, 0)
        first = self._first(fields, event, event["ph"], False)
        args = _args_of(event, _OF_FLOWS)
        self._add(SortedRow(ts_ns, FLOW, 0, number, first, _dumped(args)), kind)
        return ""

    def _pair(self, event: dict[str, Any], ts_ns: int, category: str) -> str:
        phase = event["ph"]
        self._note_time(ts_ns, 0)
        if phase in "BE":
            args = _args_of(event, _KNOWN)
            kind = self._kinds.kind(event, category if phase == "B" else "", args)
            key: list[Any] = ["", kind.fields.get("pid"), kind.fields.get("tid")]
        else:
            id = id_of(event)
            if id is None:
                return "id: is missing"
            args = _args_of(event, _OF_ASYNC)
            fields: dict[str, Any] = {"type": "annotation"}
            if category:
                fields["domain"] = category
            pid = self._ids.thread({"pid": event.get("pid")}, fields).get("pid")
            # With a global id, the process does not matter.
            shared = type(event.get("id2")) is dict and "global" in event["id2"]
            kind = Kind(fields)
            key = [category, None if shared else pid, *map(str, id)]
        name = event.get("name")
        what = {"phase": phase, "key": key, "fields": kind.fields, "launch": kind.launch}
        if name is not None:
            what["name"] = self._shortened(str(name))
        self.paired.add(SortedRow(ts_ns, 0, 0, 0, _dumped(what), _dumped(kind.args_of(args))))
        return ""

    # Names ----------------------------------------------------------------------------------------------

    def _name(self, event: dict[str, Any]) -> str:
        what, args = event.get("name"), event.get("args")
        if type(args) is not dict or type(what) is not str:
            return "args: are missing, which a name needs"
        pid, tid = self._ids.number(event.get("pid")), self._ids.number(event.get("tid"))
        of, _, kind = what.partition("_")
        if pid is None or of not in ("process", "thread") or (of == "thread" and tid is None):
            return ""
        key = (pid, tid if of == "thread" else None)
        if key not in self._names and len(self._names) >= _NAMES_MAX:
            self.names_left_out += 1
            return ""
        record = self._names.setdefault(key, {})
        if kind in ("name", "labels") and type(args.get(kind)) is str:
            record[kind] = self._shortened(args[kind])
        elif kind == "sort_index" and type(args.get(kind)) in (int, float):
            record["order"] = args[kind]
        return ""

    def name_records(self) -> list[Record]:
        """Names and places of processes and threads, as records."""
        for key, name in self._ids.named():
            self._names.setdefault(key, {}).setdefault("name", self._shortened(name))
        places = sorted({record["order"] for record in self._names.values() if "order" in record})
        order = {place: at for at, place in enumerate(places)}
        records = []
        for (pid, tid), known in self._names.items():
            record: Record = {"type": "name", "pid": pid}
            if tid is not None:
                record["tid"] = tid
            words = [known[key] for key in ("name", "labels") if known.get(key)]
            if words:
                record["name"] = self._shortened(", ".join(words))
            if "order" in known:
                record["order"] = order[known["order"]]
            records.append(record)
        return records


def _dumped(value: dict[str, Any]) -> bytes:
    return packed(value) if value else b""


def _args_of(event: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """All members of an event but the known fields."""
    args = event.get("args")
    args = args if type(args) is dict else {} if args is None else {"args": args}
    if len(event) > len(known) or not event.keys() <= known:
        more = {key: value for key, value in event.items() if key not in known}
        args = {**more, **args}
    return args


def _value(value: object) -> int | float | None:
    """The value of a counter, which may be given as a string."""
    if type(value) is int or type(value) is float:
        return value
    if type(value) is not str or not _DIGITS.fullmatch(value):
        return None
    return int(value) if value.lstrip("-").isdigit() else float(value)
