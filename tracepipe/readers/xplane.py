"""Reads profiles of XLA (JAX, TensorFlow): a Protobuf message XSpace, `NAME.xplane.pb`.

    XSpace   1 planes…                      XLine    1 id  2 name  3 timestamp_ns  4 events…  11 display_name
    XPlane   1 id  2 name  3 lines…         XEvent   1 metadata_id  2 offset_ps  3 duration_ps  4 stats…
             4 event_metadata {1 id  2 …}            5 num_occurrences: of an aggregate, in place of 2
             5 stat_metadata {1 id  2 …}    XStat    1 metadata_id  2 double  3 uint64  4 int64  5 text
             6 stats…                                6 bytes  7 the stat_metadata whose name it is
    XEventMetadata  1 id  2 name  4 display_name  5 stats…        XStatMetadata  1 id  2 name

The lines of a plane come before the names for their numbers, so it is read twice, from a file. Events are
sorted by time. Times count from `profile_start_time` of the plane "Task Environment", or are times of
CLOCK_REALTIME.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO, Final

from tracepipe.errors import InputError
from tracepipe.event.columns import SourceBatch
from tracepipe.event.model import TIME_LIMIT_NS, Problem, new_header
from tracepipe.readers.recording import FirstProblems, Recording
from tracepipe.readers.sorted_events import RowColumns, batches_of
from tracepipe.readers.wire_fields import BYTES, VARINT, Place, WireError, WireFile, fields_of, signed, varint
from tracepipe.readers.xplane_events import Line, Meaning, Plane, PlaneEvents, stat_of
from tracepipe.units import counted

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
        self._in_columns = RowColumns()
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
