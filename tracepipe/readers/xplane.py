"""Reads profiles of XLA (JAX, TensorFlow): a Protobuf message XSpace, `NAME.xplane.pb`.

    XSpace   1 planes…                      XLine    1 id  2 name  3 timestamp_ns  4 events…  11 display_name
    XPlane   1 id  2 name  3 lines…         XEvent   1 metadata_id  2 offset_ps  3 duration_ps  4 stats…
             4 event_metadata {1 id  2 …}            5 num_occurrences: of an aggregate, in place of 2
             5 stat_metadata {1 id  2 …}    XStat    1 metadata_id  2 double  3 uint64  4 int64  5 text
             6 stats…                                6 bytes  7 the stat_metadata whose name it is
    XEventMetadata  1 id  2 name  4 display_name  5 stats…        XStatMetadata  1 id  2 name

/device:GPU:N, Stream #S         gpu_kernel, or transfer or memory by its details: `launch` by correlation_id
               other lines       hook: a layer by the line's name, of a process called as the plane
host planes    correlation_id    userspace: `launch` where the call asks for work
               $file:line name   hook: the layer `python`
               others            annotation of the domain `xla`; producers and consumers are joined by flows
other planes                     hook: a layer by the line's name, of a process called as the plane

The lines of a plane come before the names for their numbers, so it is read twice, from a file. Events are
sorted by time. Times count from `profile_start_time` of the plane "Task Environment", or are times of
CLOCK_REALTIME.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, cast

from tracepipe.errors import InputError
from tracepipe.event.columns import SourceBatch
from tracepipe.event.model import COLUMN_LIMIT, ID_LIMIT, TIME_LIMIT_NS, Problem, Record, new_header
from tracepipe.event.vocabulary import direction_named
from tracepipe.readers.ids import LAUNCHES, Ids, flow_number
from tracepipe.readers.recording import FirstProblems, Recording, cut_text
from tracepipe.readers.sorted_events import SortedEvents, batches_of
from tracepipe.readers.sorted_rows import FLOW, MARK, SLICE
from tracepipe.readers.wire_fields import (
    BYTES,
    FIXED64,
    VARINT,
    Place,
    WireError,
    WireFile,
    double,
    fields_of,
    signed,
    varint,
)
from tracepipe.units import counted

Stats = dict[str, Any]
# The most bytes that are kept for the numbers of a plane: names of operators, sizes of grids, paths of
# sources.
_TEXT_BYTES_MAX: Final = 12 << 20
# The memory of a name in addition to its text, of a list of stats, and of a stat in it.
_NAME_BYTES, _LIST_BYTES, _ONE_BYTES = 180, 170, 40
_STAT_BYTES_MAX: Final = 4096
# The most stats of an event. A stat of four bytes may refer to a text of 4 KB.
_STATS_MAX: Final = 256
_GPU = re.compile(r"/device:GPU:(\d{1,9})")
_STREAM = re.compile(r"Stream #(\d{1,18})")
_NUMBER = re.compile(r"[0-9]{1,18}")
_FUNCTION = re.compile(r"(cu|cuda|hip)[A-Z]")
_DETAIL = re.compile(r"(\w+):(\S*)")
_HOST: Final = ("/host:", "Host CPUs", "Syscalls")
_DETAILS: Final = {
    "kernel_details": "kernel",
    "memcpy_details": "copy",
    "Memset_details": "set",
    "memset_details": "set",
    "memalloc_details": "alloc",
    "MemFree_details": "free",
    "memfree_details": "free",
}
_RENAMED: Final = {"regs": "registers", "static_shared": "shared_bytes", "num_bytes": "size"}
# The stats for what an event produced, and for what it consumed: a type and a number each.
_MADE, _USED = ("_pt", "_p"), ("_ct", "_c")
_CONTEXTS: Final = (_MADE, _USED)
_FLOWS_MAX: Final = 1 << 15


@dataclass(slots=True)
class Meaning:
    """The meaning of a plane's numbers: names and stats of events, and names of stats, up to a limit.
    `left_out` counts what is not kept.
    """

    events: dict[int, str] = field(default_factory=dict)
    stats_of: dict[int, list[bytes]] = field(default_factory=dict)
    """By the number of an event that has some."""
    stats: dict[int, str] = field(default_factory=dict)
    left_out: int = 0
    _bytes: int = 0

    def _has_room(self, size_bytes: int) -> bool:
        self._bytes += size_bytes + _NAME_BYTES
        has_room = self._bytes <= _TEXT_BYTES_MAX
        self.left_out += not has_room
        return has_room

    def add_event(self, id: int, data: bytes) -> None:
        """Add an XEventMetadata. Raises WireError."""
        name, shown, stats = "", "", []
        for one in fields_of(data):
            if one.number == 2:
                name = one.data.decode("utf-8", "replace")
            elif one.number == 4:
                shown = one.data.decode("utf-8", "replace")
            elif one.number == 5 and len(one.data) > _STAT_BYTES_MAX:
                self.left_out += 1
            elif one.number == 5:
                stats.append(one.data)
        name = cut_text(name or shown)
        stats_bytes = _LIST_BYTES + sum(_ONE_BYTES + len(one) for one in stats) if stats else 0
        if self._has_room(len(name) + stats_bytes):
            self.events[id] = name
            if stats:
                self.stats_of[id] = stats

    def add_stat(self, id: int, data: bytes) -> None:
        """Add an XStatMetadata. Raises WireError."""
        for one in fields_of(data):
            if one.number == 2 and self._has_room(len(one.data)):
                self.stats[id] = cut_text(one.data.decode("utf-8", "replace"))


@dataclass(slots=True)
class Plane:
    """A plane without its lines."""

    name: str = ""
    meaning: Meaning = field(default_factory=Meaning)
    raw_stats: list[bytes] = field(default_factory=list)
    stats: Stats = field(default_factory=dict)


@dataclass(slots=True)
class Line:
    """A line without its events."""

    id: int = 0
    name: str = ""
    timestamp_ns: int = 0


def stat_of(data: bytes, meaning: Meaning) -> Stats:
    """An XStat by its name; empty where its value cannot be shown. Raises WireError."""
    name, value = "", cast(Any, None)
    for one in fields_of(data):
        if one.number == 1 and one.wire_type == VARINT:
            id = signed(one.value)
            name = meaning.stats.get(id, f"stat {id}")
        elif one.number == 2 and one.wire_type == FIXED64:
            value = double(one.data)
        elif one.number in (3, 4) and one.wire_type == VARINT:
            value = one.value if one.number == 3 else signed(one.value)
        elif one.number == 5 and one.wire_type == BYTES:
            value = one.data.decode("utf-8", "replace")
        elif one.number == 7 and one.wire_type == VARINT:
            value = meaning.stats.get(signed(one.value), one.value)
    return {name: value} if name and value is not None else {}


class PlaneEvents:
    """Takes the events of one line after the other."""

    def __init__(self) -> None:
        self.sorted = SortedEvents()
        self.aggregates = self.flows_left_out = self.stats_left_out = 0
        self._made: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
        self._used: list[tuple[tuple[Any, ...], int, dict[str, Any]]] = []
        self._ids = Ids()
        self._least_ns = TIME_LIMIT_NS
        self._names: dict[tuple[int, int | None], str] = {}
        self._plane, self._line = Plane(), Line()
        self._thread: dict[str, Any] = {}
        self._place: tuple[int, int] | None = None
        self._is_host = False

    def is_after(self, ns: int) -> bool:
        """Whether there are events, and all of them are after a time."""
        return ns <= self._least_ns < TIME_LIMIT_NS

    def begin(self, plane: Plane, line: Line) -> None:
        """Begin with the events of a line."""
        self._plane, self._line = plane, line
        self._is_host = plane.name.startswith(_HOST)
        gpu, stream = _GPU.match(plane.name), _STREAM.match(line.name)
        self._place = (int(gpu[1]), int(stream[1])) if gpu and stream and int(gpu[1]) <= ID_LIMIT else None
        process: Any = plane.stats.get("process_id") if self._is_host else plane.name
        if type(process) is not int and self._is_host:
            process = "host"
        thread: Any = line.id if 0 <= line.id <= ID_LIMIT and self._is_host else line.name or str(line.id)
        self._thread = self._ids.thread({"pid": process, "tid": thread}, {})
        if self._is_host and "pid" in self._thread and line.name and len(self._names) < 1 << 14:
            self._names[self._thread["pid"], self._thread["tid"]] = cut_text(line.name)

    def name_records(self) -> list[Record]:
        """Names of processes and threads."""
        used = dict(self._ids.named()) | self._names
        return [
            {"type": "name", "pid": pid, "name": cut_text(name)} | ({} if tid is None else {"tid": tid})
            for (pid, tid), name in used.items()
        ]

    def take(self, data: bytes) -> str:
        """Take an XEvent. Return what is wrong with it, or "". Raises WireError."""
        id = offset_ps = dur_ps = 0
        is_aggregate = has_length = False
        raw: list[bytes] = []
        for one in fields_of(data):
            if one.number == 4:
                raw.append(one.data)
            elif one.wire_type == VARINT and one.number in (1, 2, 3, 5):
                value = signed(one.value)
                if one.number == 1:
                    id = value
                elif one.number == 2:
                    offset_ps = value
                elif one.number == 3:
                    dur_ps, has_length = value, True
                else:
                    is_aggregate = True
        if is_aggregate:
            self.aggregates += 1
            return ""
        # Begin and end are each rounded, so that events that nest still nest.
        start_ns = self._line.timestamp_ns + (offset_ps + 500) // 1000
        dur_ns = self._line.timestamp_ns + (offset_ps + dur_ps + 500) // 1000 - start_ns
        if not (0 <= start_ns <= TIME_LIMIT_NS // 2 and 0 <= dur_ns <= TIME_LIMIT_NS // 2):
            return "is at a time that a trace cannot have"
        meaning = self._plane.meaning
        name, stats = meaning.events.get(id) or f"event {id}", meaning.stats_of.get(id, ())
        args: Stats = {}
        stated = [*stats, *(stat for stat in raw if len(stat) <= _STAT_BYTES_MAX)]
        self.stats_left_out += len(stats) + len(raw) - min(len(stated), _STATS_MAX)
        for stat in stated[:_STATS_MAX]:
            args |= stat_of(stat, meaning)
        self._least_ns = min(self._least_ns, start_ns)
        self._add(name, start_ns, dur_ns if has_length else None, args)
        return ""

    def _add(self, name: str, start_ns: int, dur_ns: int | None, args: Stats) -> None:
        if self._place is not None:
            self._on_stream(name, start_ns, dur_ns or 0, args)
            return
        launch = None
        ends = [end for end in _CONTEXTS if set(end) <= args.keys()] if self._is_host else []
        if ends and dur_ns is None:
            dur_ns = 0  # a flow needs a slice
        rank = MARK if dur_ns is None else SLICE
        record: dict[str, Any] = {"name": name, "phase": "I" if dur_ns is None else "X", **self._thread}
        if not self._is_host:
            record |= {"type": "hook", "layer": self._line.name or f"line {self._line.id}"}
        elif type(args.get("correlation_id")) is int:
            record["type"] = "userspace"
            # On NVIDIA's GPUs, XLA names a launch after its kernel.
            is_launch = LAUNCHES.search(name) or not _FUNCTION.match(name)
            launch = _launch(args) if is_launch and dur_ns is not None else None
        elif name.startswith("$"):
            record |= {"type": "hook", "layer": "python", "name": name[1:]}
        else:
            record |= {"type": "annotation", "domain": "xla"}
            for end in ends:
                self._end(end is _MADE, tuple(args[key] for key in end), start_ns)
        self.sorted.add(start_ns, record, args, rank=rank, dur_ns=dur_ns, launch=launch)

    def _end(self, is_made: bool, context: tuple[Any, ...], start_ns: int) -> None:
        """Keep an end of a flow until all are known: one producer may have many consumers."""
        if len(self._made) + len(self._used) >= _FLOWS_MAX:
            self.flows_left_out += not is_made
        elif is_made:
            self._made[context] = start_ns, self._thread
        else:
            self._used.append((context, start_ns, self._thread))

    def finish(self) -> None:
        """Add the flows from producers to consumers."""
        for at, (context, used_ns, user) in enumerate(self._used):
            if context in self._made:
                made_ns, maker = self._made[context]
                number = flow_number("xla", *context, at)
                for phase, ts_ns, thread in (("s", made_ns, maker), ("f", used_ns, user)):
                    end = {
                        "type": "annotation",
                        "domain": "xla",
                        "name": "context",
                        "phase": phase,
                        "flow": 0,
                    }
                    self.sorted.add(ts_ns, end | thread, {}, rank=FLOW, flow=number)
        self._made, self._used = {}, []

    def _on_stream(self, name: str, start_ns: int, dur_ns: int, args: Stats) -> None:
        assert self._place is not None
        record: dict[str, Any] = {"name": name, "phase": "X", "gpu": self._place[0], "stream": self._place[1]}
        detail = next((key for key in _DETAILS if type(args.get(key)) is str), "")
        kind = _DETAILS.get(detail, "kernel")
        for key, value in _DETAIL.findall(args.pop(detail, "")):
            if key in ("grid", "block") and (size := _size(value)):
                record[key] = size
            else:
                args[_RENAMED.get(key, key)] = int(value) if _NUMBER.fullmatch(value) else value
        launch = _launch(args)
        if kind in ("alloc", "free"):
            record |= {"type": "memory", "phase": "I", "name": kind, **self._thread}
            self.sorted.add(start_ns, record, args, rank=MARK)
            return
        if kind == "kernel":
            record["type"] = "gpu_kernel"
        else:
            called = "memset" if kind == "set" else direction_named(name.removeprefix("Memcpy"))
            record |= {"type": "transfer", "name": called}
            record.pop("grid", None)
            record.pop("block", None)
        self.sorted.add(start_ns, record, args, rank=SLICE, dur_ns=dur_ns, launch=launch)


def _launch(args: Stats) -> int | None:
    """The number of a launch, which calls share with their work; None where there is none."""
    number = args.get("correlation_id")
    return number if type(number) is int and 0 < number <= COLUMN_LIMIT else None


def _size(text: str) -> list[int] | None:
    """A grid or a block."""
    parts = text.split(",")
    if len(parts) != 3 or not all(_NUMBER.fullmatch(part) and len(part) < 10 for part in parts):
        return None
    return [int(part) for part in parts]


CLOCK: Final = "trace"
_TASK: Final = "Task Environment"
_START: Final = "profile_start_time"
# Times of CLOCK_REALTIME after 1973 are above this. Times that count from the start of a profile are below
# it.
_REALTIME_NS: Final = 10**17
_MESSAGE_BYTES_MAX: Final = 1 << 20
_NAMES: Final = (b"/host:", b"/device:", b"/custom:", b"#Chip", _TASK.encode(), b"Host CPUs", b"Syscalls")


class _Space:
    """Turns one XSpace into batches."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = WireFile(file)
        self._in_columns = SortedEvents()
        self.tables = self._in_columns.tables
        self._events = PlaneEvents()
        self._problems = FirstProblems()
        self._too_long = self._left_out = self._start_ns = 0
        for place in self._fields(0, self._file.size, "the file"):
            if (place.number, place.wire_type) == (1, BYTES):
                self._take(place)
        self._events.finish()

    @property
    def clock(self) -> str:
        """The clock of the times."""
        return "realtime" if self._start_ns or self._events.is_after(_REALTIME_NS) else CLOCK

    # Reading --------------------------------------------------------------------------------------------

    def _say(self, message: str) -> None:
        self._problems.add(Problem(0, "", message))

    def _fields(self, start: int, end: int, of: str) -> Iterator[Place]:
        """The fields of a message, up to the first that is broken."""
        try:
            yield from self._file.fields(start, end)
        except WireError as e:
            self._say(f"{of}: {e}, and what follows in it is not read")

    def _bytes(self, place: Place) -> bytes:
        """The bytes of a message, empty if it is too long."""
        if place.end - place.start > _MESSAGE_BYTES_MAX:
            self._too_long += 1
            return b""
        return self._file.read(place.start, place.end)

    def _take(self, where: Place) -> None:
        plane, lines = Plane(), []
        for place in self._fields(where.start, where.end, f"the plane at byte {where.start}"):
            if place.wire_type != BYTES:
                continue
            if place.number == 3:
                lines.append(place)
                continue
            data = self._bytes(place)
            try:
                if place.number == 2:
                    plane.name = data.decode("utf-8", "replace")
                elif place.number in (4, 5):
                    _meaning(data, place.number == 4, plane.meaning)
                elif place.number == 6:
                    plane.raw_stats.append(data)
            except WireError:
                self._say(f"{plane.name}: field {place.number} at byte {place.start} cannot be read")
        for data in plane.raw_stats:
            with suppress(WireError):
                plane.stats |= stat_of(data, plane.meaning)
        if plane.name == _TASK and _START in plane.stats:
            self._begin_at(plane.stats[_START])
        self._left_out += plane.meaning.left_out
        for place in lines:
            self._line(plane, place)

    def _begin_at(self, start_ns: object) -> None:
        """Take the time from which the other times count."""
        if type(start_ns) is int and 0 <= start_ns <= TIME_LIMIT_NS // 2:
            self._start_ns = start_ns
        else:
            self._say(f"{_TASK}: {_START} is not a time that a trace can have")

    def _line(self, plane: Plane, where: Place) -> None:
        of = f"the line at byte {where.start} of {plane.name}"
        line = Line()
        with suppress(WireError):  # reported when its events are read
            for place in self._file.fields(where.start, where.end):
                if place.wire_type == VARINT and place.number in (1, 3):
                    if place.number == 1:
                        line.id = signed(place.value)
                    else:
                        line.timestamp_ns = signed(place.value)
                elif place.wire_type == BYTES and place.number in (2, 11):
                    line.name = self._bytes(place).decode("utf-8", "replace") or line.name
        self._events.begin(plane, line)
        for place in self._fields(where.start, where.end, of):
            if (place.number, place.wire_type) == (4, BYTES):
                try:
                    message = self._events.take(self._bytes(place))
                except WireError:
                    message = "cannot be read"
                if message:
                    self._say(f"{plane.name}: the event at byte {place.start} {message}")

    # Batches --------------------------------------------------------------------------------------------

    def batches(self) -> Iterator[SourceBatch]:
        """The events in the order of time, and the problems."""
        ahead_ns = 0 if self._events.is_after(_REALTIME_NS) else self._start_ns
        in_order = self._events.sorted.rows.in_order()
        columns = (self._in_columns.columns(rows, rows.ts_ns + ahead_ns) for rows in in_order)
        return batches_of(columns, self._events.name_records(), self._problems.take(), self._stated())

    def _stated(self) -> Iterator[Problem]:
        yield from self._problems.rest("message|messages cannot be read")
        if self._too_long:
            messages = counted(self._too_long, "message|messages is|are")
            yield Problem(0, "", f"{messages} longer than {_MESSAGE_BYTES_MAX} bytes")
        if self._left_out:
            words = "name|names or stat|stats by number is|are left out: there are more than can be kept"
            yield Problem(0, "", counted(self._left_out, words), skipped=False)
        if self._events.flows_left_out:
            words = "flow|flows is|are left out: there are more than can be kept"
            yield Problem(0, "", counted(self._events.flows_left_out, words), skipped=False)
        if self._events.stats_left_out:
            words = "stat|stats is|are left out: an event has more than can be kept"
            yield Problem(0, "", counted(self._events.stats_left_out, words), skipped=False)
        if self._events.aggregates:
            words = "event|events has|have a sum instead of times: it|they is|are not drawn"
            yield Problem(0, "num_occurrences", counted(self._events.aggregates, words), skipped=False)


def _meaning(data: bytes, is_event: bool, meaning: Meaning) -> None:
    """Add an entry of a plane's maps to the meaning of its numbers. Raises WireError."""
    id, value = 0, b""
    for entry in fields_of(data):
        if entry.number == 1:
            id = signed(entry.value)
        elif entry.number == 2:
            value = entry.data
    if is_event:
        meaning.add_event(id, value)
    else:
        meaning.add_stat(id, value)


def sniff(head: bytes) -> bool:
    """Whether content begins with a plane that has one of XLA's names."""
    try:
        if not head.startswith(b"\x0a"):
            return False
        _, at = varint(head, 1)
        while head[at : at + 1] == b"\x08":  # the plane's id
            _, at = varint(head, at + 1)
        if head[at : at + 1] != b"\x12":
            return False
        size, at = varint(head, at + 1)
    except WireError:
        return False
    return head[at : at + size].startswith(_NAMES)


def read(stream: BinaryIO) -> Recording:
    """The recording in a file, which is read to its end first. Raises InputError."""
    try:
        space = _Space(stream)
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror}", "Copy it to another disk.") from e
    header = new_header(clock=space.clock, clocks=[space.clock], engine="XLA's profiler")
    return Recording(header, space.batches(), space.tables)
