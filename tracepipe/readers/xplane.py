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

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, cast

from tracepipe.errors import InputError
from tracepipe.event.columns import SourceBatch
from tracepipe.event.model import ID_LIMIT, TIME_LIMIT_NS, Header, Problem, Record, cut_text
from tracepipe.readers.ids import Ids, flow_number
from tracepipe.readers.recording import FirstProblems, Recording, counted_problems
from tracepipe.readers.sorted_rows import FLOW, MARK, SLICE, SortedEvents, batches_of
from tracepipe.readers.wire_fields import (
    BYTES,
    FIXED64,
    VARINT,
    Place,
    WireError,
    WireFile,
    double,
    signed,
    tagged,
    varint,
)
from tracepipe.readers.xla_events import GPU, STREAM, Stats, call_fields, launch_of, launches, work_fields
from tracepipe.units import counted

# The most bytes that are kept for the numbers of a plane: names of operators, sizes of grids, paths of
# sources.
_TEXT_BYTES_MAX: Final = 12 << 20
# The memory of a name in addition to its text, of a list of stats, and of a stat in it.
_NAME_BYTES, _LIST_BYTES, _ONE_BYTES = 180, 170, 40
_STAT_BYTES_MAX: Final = 4096
# The most stats of an event. A stat of four bytes may refer to a text of 4 KB.
_STATS_MAX: Final = 256
_HOST: Final = ("/host:", "Host CPUs", "Syscalls")
# The stats for what an event produced, and for what it consumed: a type and a number each.
_MADE, _USED = ("_pt", "_p"), ("_ct", "_c")
_FLOWS_MAX: Final = 1 << 15
_NAMES_MAX: Final = 1 << 14
_ID, _OFFSET, _DURATION, _STAT, _OCCURRENCES = 1 << 3, 2 << 3, 3 << 3, 4 << 3 | BYTES, 5 << 3
_NAME, _SHOWN_NAME, _STAT_OF_NAME = (field << 3 | BYTES for field in (2, 4, 5))
_RAW: Final = 6 << 3 | BYTES
CLOCK: Final = "trace"
_TASK: Final = "Task Environment"
_START: Final = "profile_start_time"
# Times of CLOCK_REALTIME after 1973 are above this. Times that count from the start of a profile are below
# it.
_REALTIME_NS: Final = 10**17
_MESSAGE_BYTES_MAX: Final = 1 << 20
_NAMES: Final = (b"/host:", b"/device:", b"/custom:", b"#Chip", _TASK.encode(), b"Host CPUs", b"Syscalls")
_LEFT_OUT: Final = "name|names or stat|stats by number is|are left out: there are more than can be kept"
_FLOWS_LEFT_OUT: Final = "flow|flows is|are left out: there are more than can be kept"
_STATS_LEFT_OUT: Final = "stat|stats is|are left out: an event has more than can be kept"


@dataclass(slots=True)
class _Plane:
    """A plane without its lines: names and stats of events, and names of stats, by their numbers, up to a
    limit. `left_out` counts what is not kept.
    """

    name: str = ""
    stats: Stats = field(default_factory=dict)
    event_names: dict[int, str] = field(default_factory=dict)
    event_stats: dict[int, list[bytes]] = field(default_factory=dict)
    stat_names: dict[int, str] = field(default_factory=dict)
    left_out: int = 0
    _bytes: int = 0

    def _has_room(self, size_bytes: int) -> bool:
        self._bytes += size_bytes + _NAME_BYTES
        has_room = self._bytes <= _TEXT_BYTES_MAX
        self.left_out += not has_room
        return has_room

    def add_metadata(self, data: bytes, *, is_event: bool) -> None:
        """Add an entry of the meanings of numbers: 1 id  2 value. Raises WireError."""
        entry = dict(tagged(data))
        id, value = signed(entry.get(_ID, 0)), tagged(entry.get(2 << 3 | BYTES, b""))
        texts = {tag: text.decode("utf-8", "replace") for tag, text in value if tag in (_NAME, _SHOWN_NAME)}
        if not is_event:
            for text in (text for tag, text in value if tag == _NAME):
                if self._has_room(len(text)):
                    self.stat_names[id] = cut_text(texts[_NAME])
            return
        # Bytes, such as the program of a whole module, are not shown.
        stats = [stat for tag, stat in value if tag == _STAT_OF_NAME and _RAW not in dict(tagged(stat))]
        fitting = [stat for stat in stats if len(stat) <= _STAT_BYTES_MAX]
        self.left_out += len(stats) - len(fitting)
        name = cut_text(texts.get(_NAME) or texts.get(_SHOWN_NAME, ""))
        stats_bytes = _LIST_BYTES + sum(_ONE_BYTES + len(one) for one in fitting) if fitting else 0
        if self._has_room(len(name) + stats_bytes):
            self.event_names[id] = name
            if fitting:
                self.event_stats[id] = fitting

    def stat(self, data: bytes) -> Stats:
        """An XStat by its name; empty where its value cannot be shown. Raises WireError."""
        name, value = "", cast(Any, None)
        for tag, one in tagged(data):
            if tag == _ID:
                id = signed(one)
                name = self.stat_names.get(id, f"stat {id}")
            elif tag == 2 << 3 | FIXED64:
                value = double(one)
            elif tag in (3 << 3, 4 << 3):
                value = one if tag == 3 << 3 else signed(one)
            elif tag == 5 << 3 | BYTES:
                value = one.decode("utf-8", "replace")
            elif tag == 7 << 3:
                value = self.stat_names.get(signed(one), one)
        return {name: value} if name and value is not None else {}


@dataclass(slots=True)
class _Line:
    """A line without its events. `stream` is the GPU and the stream whose work it has. Events of other lines
    are of a `thread`.
    """

    id: int = 0
    name: str = ""
    timestamp_ns: int = 0
    stream: tuple[int, int] | None = None
    thread: dict[str, Any] = field(default_factory=dict)
    is_of_host: bool = False


class _Space:
    """Turns one XSpace into batches."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = WireFile(file)
        self._sorted = SortedEvents()
        self._made: dict[tuple[Any, ...], tuple[int, dict[str, Any]]] = {}
        """By what an event produced: its time and its thread."""
        self._used: list[tuple[tuple[Any, ...], int, dict[str, Any]]] = []
        """By event that consumed something: what, its time and its thread."""
        self._ids = Ids()
        self._names: dict[tuple[int, int | None], str] = {}
        self._problems = FirstProblems()
        self._counted = Counter(dict.fromkeys((_LEFT_OUT, _FLOWS_LEFT_OUT, _STATS_LEFT_OUT), 0))
        self._too_long = self._sums = self._start_ns = 0
        self._least_ns = TIME_LIMIT_NS
        for place in self._fields(0, self._file.size, "the file"):
            if (place.number, place.wire_type) == (1, BYTES):
                self._read_plane(place)
        self._add_flows()

    def recording(self) -> Recording:
        """The recording. Times are those of CLOCK_REALTIME where all of them are, or the start is known."""
        is_absolute = _REALTIME_NS <= self._least_ns < TIME_LIMIT_NS
        clock = "realtime" if self._start_ns or is_absolute else CLOCK
        header = Header(clock=clock, clocks=[clock], engine="XLA's profiler")
        return Recording(header, self._batches(0 if is_absolute else self._start_ns), self._sorted.tables)

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

    def _read_plane(self, where: Place) -> None:
        plane, lines, stats = _Plane(), [], []
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
                    plane.add_metadata(data, is_event=place.number == 4)
                elif place.number == 6:
                    stats.append(data)
            except WireError:
                self._say(f"{plane.name}: field {place.number} at byte {place.start} cannot be read")
        for data in stats:
            with suppress(WireError):
                plane.stats |= plane.stat(data)
        if plane.name == _TASK and _START in plane.stats:
            start_ns = plane.stats[_START]
            if type(start_ns) is int and 0 <= start_ns <= TIME_LIMIT_NS // 2:
                self._start_ns = start_ns
            else:
                self._say(f"{_TASK}: {_START} is not a time that a trace can have")
        self._counted[_LEFT_OUT] += plane.left_out
        for place in lines:
            self._read_line(plane, place)

    def _read_line(self, plane: _Plane, where: Place) -> None:
        line = _Line()
        with suppress(WireError):  # reported when its events are read
            for place in self._file.fields(where.start, where.end):
                if place.wire_type == VARINT and place.number == 1:
                    line.id = signed(place.value)
                elif place.wire_type == VARINT and place.number == 3:
                    line.timestamp_ns = signed(place.value)
                elif place.wire_type == BYTES and place.number in (2, 11):
                    line.name = self._bytes(place).decode("utf-8", "replace") or line.name
        line.is_of_host = plane.name.startswith(_HOST)
        gpu, stream = GPU.match(plane.name), STREAM.match(line.name)
        if gpu and stream and int(gpu[1]) <= ID_LIMIT:
            line.stream = int(gpu[1]), int(stream[1])
        process: Any = plane.stats.get("process_id") if line.is_of_host else plane.name
        if type(process) is not int and line.is_of_host:
            process = "host"
        thread: Any = line.id if 0 <= line.id <= ID_LIMIT and line.is_of_host else line.name or str(line.id)
        line.thread = self._ids.thread({"pid": process, "tid": thread}, {})
        if line.is_of_host and "pid" in line.thread and line.name and len(self._names) < _NAMES_MAX:
            name = self._sorted.tables.long_names.cut(line.name)
            self._names[line.thread["pid"], line.thread["tid"]] = name
        for place in self._fields(where.start, where.end, f"the line at byte {where.start} of {plane.name}"):
            if (place.number, place.wire_type) == (4, BYTES):
                try:
                    message = self._read_event(plane, line, self._bytes(place))
                except WireError:
                    message = "cannot be read"
                if message:
                    self._say(f"{plane.name}: the event at byte {place.start} {message}")

    def _read_event(self, plane: _Plane, line: _Line, data: bytes) -> str:
        """Read an XEvent. Return what is wrong with it, or "". Raises WireError."""
        fields = tagged(data)
        stats, of = [stat for tag, stat in fields if tag == _STAT], dict(fields)
        if _OCCURRENCES in of:
            self._sums += 1
            return ""
        id, offset_ps, dur_ps = (signed(of.get(tag, 0)) for tag in (_ID, _OFFSET, _DURATION))
        # Begin and end are each rounded, so that events that nest still nest.
        start_ns = line.timestamp_ns + (offset_ps + 500) // 1000
        dur_ns = line.timestamp_ns + (offset_ps + dur_ps + 500) // 1000 - start_ns
        if not (0 <= start_ns <= TIME_LIMIT_NS // 2 and 0 <= dur_ns <= TIME_LIMIT_NS // 2):
            return "is at a time that a trace cannot have"
        name, of_name = plane.event_names.get(id) or f"event {id}", plane.event_stats.get(id, ())
        args: Stats = {}
        fitting = [*of_name, *(stat for stat in stats if len(stat) <= _STAT_BYTES_MAX)]
        self._counted[_STATS_LEFT_OUT] += len(of_name) + len(stats) - min(len(fitting), _STATS_MAX)
        for stat in fitting[:_STATS_MAX]:
            args |= plane.stat(stat)
        self._least_ns = min(self._least_ns, start_ns)
        if line.stream is not None:
            self._add_work(line, name, start_ns, dur_ns, args)
        else:
            self._add_event(line, name, start_ns, dur_ns if _DURATION in of else None, args)
        return ""

    def _add_event(self, line: _Line, name: str, start_ns: int, dur_ns: int | None, args: Stats) -> None:
        launch = None
        contexts = [keys for keys in (_MADE, _USED) if set(keys) <= args.keys()] if line.is_of_host else []
        if contexts and dur_ns is None:
            dur_ns = 0  # a flow needs a slice
        record: dict[str, Any] = {"name": name, "phase": "I" if dur_ns is None else "X", **line.thread}
        if not line.is_of_host:
            record |= {"type": "hook", "layer": line.name or f"line {line.id}"}
        elif type(args.get("correlation_id")) is int:
            record["type"] = "userspace"
            launch = launch_of(args) if launches(name) and dur_ns is not None else None
        else:
            record |= call_fields(name)
            for keys in contexts if record["type"] == "annotation" else ():
                # Ends of flows are kept until all are known: one producer may have many consumers.
                context = tuple(args[key] for key in keys)
                if len(self._made) + len(self._used) >= _FLOWS_MAX:
                    self._counted[_FLOWS_LEFT_OUT] += keys is _USED
                elif keys is _MADE:
                    self._made[context] = start_ns, line.thread
                else:
                    self._used.append((context, start_ns, line.thread))
        rank = MARK if dur_ns is None else SLICE
        self._sorted.add(start_ns, record, args, rank=rank, dur_ns=dur_ns, launch=launch)

    def _add_work(self, line: _Line, name: str, start_ns: int, dur_ns: int, args: Stats) -> None:
        """Add work of a stream."""
        assert line.stream is not None
        gpu, stream = line.stream
        record: dict[str, Any] = {"phase": "X", "gpu": gpu, "stream": stream, **work_fields(name, args)}
        if record["type"] == "memory":
            self._sorted.add(start_ns, record | {"phase": "I"} | line.thread, args, rank=MARK)
            return
        self._sorted.add(start_ns, record, args, rank=SLICE, dur_ns=dur_ns, launch=launch_of(args))

    def _add_flows(self) -> None:
        """Add the flows from producers to consumers."""
        end = {"type": "annotation", "domain": "xla", "name": "context", "flow": 0}
        for at, (context, used_ns, user) in enumerate(self._used):
            if context in self._made:
                made_ns, maker = self._made[context]
                number = flow_number("xla", *context, at)
                for phase, ts_ns, thread in (("s", made_ns, maker), ("f", used_ns, user)):
                    self._sorted.add(ts_ns, end | {"phase": phase} | thread, {}, rank=FLOW, flow=number)
        self._made, self._used = {}, []

    # Batches --------------------------------------------------------------------------------------------

    def _batches(self, ahead_ns: int) -> Iterator[SourceBatch]:
        """The events in the order of time, and the problems."""
        in_order = self._sorted.rows.in_order()
        columns = (self._sorted.columns(rows, rows.ts_ns + ahead_ns) for rows in in_order)
        names: list[Record] = [
            {"type": "name", "pid": pid, "name": cut_text(name)} | ({} if tid is None else {"tid": tid})
            for (pid, tid), name in (dict(self._ids.named()) | self._names).items()
        ]
        return batches_of(columns, names, self._problems.pop(), self._last_problems())

    def _last_problems(self) -> Iterator[Problem]:
        yield from self._problems.rest("message|messages cannot be read")
        if self._too_long:
            messages = counted(self._too_long, "message|messages is|are")
            yield Problem(0, "", f"{messages} longer than {_MESSAGE_BYTES_MAX} bytes")
        yield from counted_problems(self._counted)
        if self._sums:
            words = "event|events has|have a sum instead of times: it|they is|are not drawn"
            yield Problem(0, "num_occurrences", counted(self._sums, words), skipped=False)


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
        return _Space(stream).recording()
    except OSError as e:
        raise InputError(f"cannot be read: {e.strerror}", "Copy it to another disk.") from e
