"""Turns TrackEvents into rows, which are sorted by time, and sorted rows into rows of events.

    TrackEvent   9 type (1 begin  2 end  3 instant  4 counter)  11 track  10 name_iid  23 name
                 3, 22 categories  4 debug_annotations  30, 44 value of a counter
                 31, 12 and 45, 46 tracks and values of further counters
                 47 flow_ids  48 terminating_flow_ids (36, 42 in old traces)
                 1, 16 times in µs, old  6 legacy_event
                 3000 {1 stages of GPUs that it submitted…  2 stages that it waited for…}, by their event ids
    LegacyEvent  1 name_iid  2 phase  3 duration_us  6, 10, 11 id  7 id_scope  8 bind_id
                 13 flow_direction (1 in  2 out  3 both)  14 scope of an instant (1 all  2 process)
                 18 pid  19 tid
    DebugAnnotation   1 name_iid  10 name  2 bool  3 uint  4 int  5 double  6 string  7 pointer  9 JSON
                      17 string_iid  8 nested value, old  11 dictionary entries…  12 array values…
    SourceLocation    2 file  3 function  4 line
    Frame             2 function_name_id  4 rel_pc  5 source_path_iid  6 line      Callstack   2 frame_ids…

An end closes the slice that began last on its track, with its name and category if it has these, and all
slices inside. A flow starts where its number comes first. Source: track_event.proto, debug_annotation.proto
and source_location.proto in protos/perfetto/trace/track_event, and profiling/profile_common.proto.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter as Counts
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import numpy as np
import orjson

from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import Bools, Int32s, Int64s, Texts
from tracepipe.event.model import FLOW_LIMIT, TIME_LIMIT_NS, Record, cut_text
from tracepipe.event.tables import packed
from tracepipe.native import checked, owned, seed, text_of
from tracepipe.native.signatures import OrderMade, OrderRows
from tracepipe.readers.ids import flow_number
from tracepipe.readers.perfetto_sched import ThreadsInOrder
from tracepipe.readers.perfetto_sequences import (
    ARG_NAMES,
    BODIES,
    CALLSTACKS,
    CATEGORIES,
    CORRELATIONS,
    EVENT_NAMES,
    FRAMES,
    FUNCTIONS,
    LOCATIONS,
    MONOTONIC,
    SOURCE_PATHS,
    STRINGS,
    NativePackets,
    PerfettoClocks,
    Sequence,
    clock_of,
    numbers,
)
from tracepipe.readers.perfetto_tracks import EVENTS, GLOBAL, Tracks, begun, kernel_name, kind_of
from tracepipe.readers.recording import is_too_deep
from tracepipe.readers.sorted_rows import SLICE, Rows, SortedRow, SortedRows, rows_of
from tracepipe.readers.wire_fields import BYTES, FIXED64, double, signed, tagged, text

ANNOTATIONS: Final = 4 << 3 | 2
_ARG_IID, _ARG_NAME = 1 << 3, 10 << 3 | 2
_BOOL, _UINT, _INT, _POINTER, _DOUBLE = 2 << 3, 3 << 3, 4 << 3, 7 << 3, 5 << 3 | 1
_STRING, _JSON, _STRING_IID = 6 << 3 | 2, 9 << 3 | 2, 17 << 3
_NESTED, _ENTRIES, _ELEMENTS = 8 << 3 | 2, 11 << 3 | 2, 12 << 3 | 2
# Old form: NestedValue.
_DICT_KEYS, _DICT_VALUES, _ARRAY_VALUES = 2 << 3 | 2, 3 << 3 | 2, 4 << 3 | 2
_OLD_INT, _OLD_DOUBLE, _OLD_BOOL, _OLD_STRING = 5 << 3, 6 << 3 | 1, 7 << 3, 8 << 3 | 2
_DEPTH_MAX: Final = 32
# The most values of an event, and bytes of its texts: a number of few bytes may refer to a long text.
_VALUES_MAX: Final = 1 << 12
_TEXT_BYTES_MAX: Final = 1 << 20
_FRAMES_MAX: Final = 256
_LOCATION, _LOCATION_IID, _LOG, _TASK = 33 << 3 | 2, 34 << 3, 21 << 3 | 2, 5 << 3 | 2
_CORRELATION, _CORRELATION_TEXT, _CORRELATION_IID = 52 << 3, 53 << 3 | 2, 54 << 3
CALLSTACK: Final = "callstack"
_CALLSTACK, _CALLSTACK_IID = 55 << 3 | 2, 56 << 3
_ONE, _TWO, _PRIORITY = 1 << 3, 2 << 3, 3 << 3
_PRIORITIES: Final = ("", "unused", "verbose", "debug", "info", "warn", "error", "fatal")
_FILE, _FUNCTION, _LINE = 2 << 3 | 2, 3 << 3 | 2, 4 << 3


def number_or_text(value: float) -> float | str:
    """A double, as text where JSON has no such number."""
    return value if math.isfinite(value) else str(value)


class Arguments:
    """Reads arguments. Those that are missing or do not fit are counted."""

    def __init__(self) -> None:
        self.left_out = self.unnamed = 0
        self._values = self._bytes = 0
        self._sequence = Sequence(0)
        self._typed: dict[int, Callable[[Any], Iterable[tuple[str, Any]]]] = {
            _LOCATION: lambda data: [("source", self._location(data))],
            _LOCATION_IID: lambda iid: [("source", self._location_numbered(iid))],
            _LOG: self._log,
            _TASK: self._task,
            _CORRELATION: lambda id: [("correlation_id", id)],
            _CORRELATION_TEXT: lambda data: [("correlation_id", text(data))],
            _CORRELATION_IID: lambda iid: [("correlation_id", self._named(CORRELATIONS, iid))],
            _CALLSTACK: lambda data: [(CALLSTACK, self._inline(data))],
            _CALLSTACK_IID: lambda iid: [(CALLSTACK, self._callstack(iid))],
        }

    def read(
        self, sequence: Sequence, annotations: Iterable[tuple[int, Any]], fields: dict[int, Any]
    ) -> dict[str, Any]:
        """The arguments of an event: its annotations and its typed `fields`. Raises WireError."""
        self._sequence, self._values, self._bytes = sequence, 0, 0
        args: dict[str, Any] = {}
        for tag in fields:
            if tag in self._typed:
                args |= {name: value for name, value in self._typed[tag](fields[tag]) if value is not None}
        for tag, data in annotations:
            if tag == ANNOTATIONS:
                name, value = self._annotation(data, 0)
                if value is not None:
                    args[name] = value
        return args

    def _fits(self, size_bytes: int) -> bool:
        self._values += 1
        self._bytes += size_bytes
        fits = self._values <= _VALUES_MAX and self._bytes <= _TEXT_BYTES_MAX
        self.left_out += not fits
        return fits

    def _entry(self, table: int, iid: int) -> bytes | None:
        """An entry of a table by its number."""
        entry = self._sequence.name(table, iid)
        self.unnamed += entry is None
        return entry

    def _named(self, table: int, iid: int) -> str | None:
        """A text by its number."""
        entry = self._entry(table, iid)
        return text(entry) if entry is not None and self._fits(len(entry)) else None

    def _annotation(self, data: bytes, depth: int) -> tuple[str, Any]:
        """The name and the value of a DebugAnnotation; None for a value that cannot be shown."""
        name, value = "", None
        many: list[tuple[int, bytes]] = []
        if not self._fits(len(data)):
            return name, value
        for tag, one in tagged(data):
            if tag == _ARG_IID:
                name = self._named(ARG_NAMES, one) or f"argument {one}"
            elif tag == _ARG_NAME:
                name = text(one)
            elif tag in (_ENTRIES, _ELEMENTS, _NESTED):
                many.append((tag, one))
            elif (made := self._plain(tag, one)) is not None:
                value = made
        if many and depth >= _DEPTH_MAX:
            self.left_out += 1
        elif many:
            value = self._many(many, depth + 1)
        return name, value

    def _plain(self, tag: int, value: Any) -> Any:
        if tag == _INT:
            return signed(value)
        if tag == _UINT:
            return value
        if tag == _STRING:
            return text(value)
        if tag == _STRING_IID:
            return self._named(STRINGS, value)
        if tag == _BOOL:
            return bool(value)
        if tag == _DOUBLE:
            return number_or_text(double(value))
        if tag == _POINTER:
            return f"0x{value:x}"
        if tag == _JSON:
            try:
                parsed = orjson.loads(value)
            except orjson.JSONDecodeError:
                return text(value)
            return text(value) if is_too_deep(value, parsed) else parsed
        return None

    def _many(self, many: list[tuple[int, bytes]], depth: int) -> Any:
        """The values of an array, or of a dictionary by their names."""
        if many[0][0] == _NESTED:
            return self._nested(many[0][1], depth)
        if many[0][0] == _ELEMENTS:
            return [self._annotation(data, depth)[1] for tag, data in many if tag == _ELEMENTS]
        return dict(self._annotation(data, depth) for tag, data in many if tag == _ENTRIES)

    def _nested(self, data: bytes, depth: int) -> Any:
        """A NestedValue."""
        if depth > _DEPTH_MAX or not self._fits(len(data)):
            return None
        keys: list[str] = []
        values: list[Any] = []
        value: Any = None
        for tag, one in tagged(data):
            if tag == _DICT_KEYS:
                keys.append(text(one))
            elif tag in (_DICT_VALUES, _ARRAY_VALUES):
                values.append(self._nested(one, depth + 1))
            elif tag == _OLD_INT:
                value = signed(one)
            elif tag == _OLD_DOUBLE:
                value = number_or_text(double(one))
            elif tag in (_OLD_BOOL, _OLD_STRING):
                value = bool(one) if tag == _OLD_BOOL else text(one)
        if keys:
            return dict(zip(keys, values, strict=False))
        return values or value

    # Typed ----------------------------------------------------------------------------------------------

    def _location(self, data: bytes) -> str | None:
        if not self._fits(len(data)):
            return None
        of = dict(tagged(data))
        return _place(text(of.get(_FILE, b"")), of.get(_LINE, 0), text(of.get(_FUNCTION, b"")))

    def _location_numbered(self, iid: int) -> str | None:
        data = self._entry(LOCATIONS, iid)
        return None if data is None else self._location(data)

    def _log(self, data: bytes) -> Iterator[tuple[str, Any]]:
        of = dict(tagged(data))
        if _ONE in of:
            yield "source", self._location_numbered(of[_ONE])
        if _TWO in of:
            yield "log", self._named(BODIES, of[_TWO])
        if 0 < of.get(_PRIORITY, 0) < len(_PRIORITIES):
            yield "priority", _PRIORITIES[of[_PRIORITY]]

    def _task(self, data: bytes) -> Iterator[tuple[str, Any]]:
        of = dict(tagged(data))
        if _ONE in of:
            yield "posted_from", self._location_numbered(of[_ONE])

    def _inline(self, data: bytes) -> list[str]:
        """The frames of a callstack in the event, innermost first."""
        frames = [dict(tagged(one)) for tag, one in tagged(data) if tag == 1 << 3 | 2]
        return [
            _place(text(of.get(2 << 3 | 2, b"")), of.get(3 << 3, 0), text(of.get(1 << 3 | 2, b"")))
            for of in reversed(frames[-_FRAMES_MAX:])
            if self._fits(sum(len(value) for value in of.values() if type(value) is bytes))
        ]

    def _callstack(self, iid: int) -> list[str] | None:
        """The frames of a callstack by its number, innermost first."""
        data = self._entry(CALLSTACKS, iid)
        if data is None:
            return None
        ids = [id for tag, value in tagged(data) if tag >> 3 == 2 for id in numbers(tag, value)]
        return [frame for id in reversed(ids[-_FRAMES_MAX:]) if (frame := self._frame(id))]

    def _frame(self, iid: int) -> str | None:
        data = self._entry(FRAMES, iid)
        if data is None:
            return None
        of = dict(tagged(data))
        path = self._named(SOURCE_PATHS, of[5 << 3]) if 5 << 3 in of else None
        function = self._named(FUNCTIONS, of[2 << 3]) if 2 << 3 in of else None
        return _place(path or "", of.get(6 << 3, 0), function or f"0x{of.get(4 << 3, 0):x}")


def _place(path: str, line: int, function: str) -> str:
    """`model/train.py:41 step`."""
    place = f"{path}:{line}" if path and line else path
    return " ".join(part for part in (place, function) if part)


BEGIN, END, INSTANT, COUNTER, WHOLE = "B", "E", "I", "C", "X"
FLOW, NEXT_FLOW, LAST_FLOW, INSTANT_FLOW = "s", "t", "f", "Is"
"""Phases of rows. The flow of an instant is a separate row, in place of the instant's."""
NO_NAME: Final = "no name"
_TYPE, _TRACK, _NAME_IID, _NAME, _LEGACY = 9 << 3, 11 << 3, 10 << 3, 23 << 3 | BYTES, 6 << 3 | BYTES
_PHASES: Final = {1: BEGIN, 2: END, 3: INSTANT, 4: COUNTER}
_VALUE, _DOUBLE_VALUE = 30 << 3, 44 << 3 | FIXED64
_TIME_DELTA, _TIME_ABSOLUTE = 1 << 3, 16 << 3
_CATEGORY_IIDS, _CATEGORY = 3, 22
_COUNTERS, _VALUES, _DOUBLE_COUNTERS, _DOUBLE_VALUES = 31, 12, 45, 46
_FLOWS, _OLD_FLOWS, _LAST_FLOWS, _OLD_LAST_FLOWS = 47, 36, 48, 42
_MANY: Final = {
    _CATEGORY_IIDS, _CATEGORY, ANNOTATIONS >> 3, _COUNTERS, _VALUES, _DOUBLE_COUNTERS, _DOUBLE_VALUES,
    _FLOWS, _OLD_FLOWS, _LAST_FLOWS, _OLD_LAST_FLOWS,
}  # fmt: skip
# Of an event.
_FLOWS_MAX: Final = 64
_COUNTERS_MAX: Final = 256
_WHOLE_MAX: Final = (1 << 63) - 1
_OLD_PHASE, _OLD_NAME, _DURATION, _DIRECTION, _SCOPE = 2 << 3, 1 << 3, 3 << 3, 13 << 3, 7 << 3 | BYTES
_BIND_ID: Final = 8 << 3
_INSTANT_SCOPE, _PID, _TID = 14 << 3, 18 << 3, 19 << 3
_SCOPED: Final = frozenset(b"iI")
_OF_ALL, _OF_PROCESS = 1, 2
# The thread's processor time and instructions, as numbers or as differences.
_OF_THREADS: Final = frozenset({17 << 3, 2 << 3, 20 << 3, 8 << 3})
_OF_THREADS_LEGACY: Final = frozenset({4 << 3, 15 << 3})
_MARKS: Final = {"B": BEGIN, "E": END, "I": INSTANT, "C": COUNTER, "S": BEGIN, "F": END}
_NUMBER = re.compile(r"-?[0-9]{1,18}")
_DIRECTIONS: Final = {1: NEXT_FLOW, 2: FLOW, 3: FLOW}
_OLD_FLOW_PHASES: Final = {"s": FLOW, "t": NEXT_FLOW, "f": LAST_FLOW}
_OLD_IDS: Final = (6 << 3, 10 << 3, 11 << 3)
_SPANS: Final = {"B": BEGIN, "E": END, "X": WHOLE, "I": INSTANT, "i": INSTANT, "R": INSTANT}
_ASYNCHRONOUS: Final = {"b": BEGIN, "e": END, "n": INSTANT, "S": BEGIN, "F": END, "T": INSTANT,
                         "p": INSTANT}  # fmt: skip
_GPU_STAGES: Final = 3000 << 3 | BYTES
_SUBMITTED, _WAITED = 1, 2
# A slice with one of these categories is a call of CUDA, as in PyTorch's JSON.
OF_CALLS: Final = frozenset({"cuda_runtime", "cuda_driver"})
_STAGES_MAX: Final = 1 << 17
_STAGES_OF_CALL_MAX: Final = 1 << 12
_WAITS_OF_STAGE_MAX: Final = 64


class Submissions:
    """Which stages of GPUs were submitted together, and how many wait for each. `left_out` counts those for
    which there is no room.
    """

    def __init__(self) -> None:
        self.left_out = 0
        self._first: dict[int, int] = {}
        """The launch ids of stages that are not the first ones of their calls."""
        self._waiting: dict[int, int] = {}

    @staticmethod
    def launch_id(id: int, machine: int) -> int:
        """The number of a launch for an event id of a machine."""
        return id if id < 1 << 63 and not (id and machine) else flow_number("stage", machine, id)

    def submit(self, ids: list[int], machine: int) -> int:
        """Note the stages of a call, and return the number of its launch."""
        first, *others = (self.launch_id(id, machine) for id in ids)
        for other in others:
            if other in self._first or len(self._first) < _STAGES_MAX:
                self._first[other] = first
            else:
                self.left_out += 1
        return first

    def launch(self, number: int) -> int:
        """The launch of a stage by the number of its own id."""
        return self._first.get(number, number)

    def wait(self, id: int, machine: int) -> int:
        """Note that something waits for a stage, and return the number of the flow; 0 for no room."""
        number = self.launch_id(id, machine)
        count = self._waiting.get(number, 0)
        if count >= _WAITS_OF_STAGE_MAX or (not count and len(self._waiting) >= _STAGES_MAX):
            self.left_out += 1
            return 0
        self._waiting[number] = count + 1
        return flow_number("wait", number, count)

    def flows(self, number: int) -> list[int]:
        """The flows that start at a stage."""
        return [flow_number("wait", number, count) for count in range(self._waiting.get(number, 0))]


_Many = dict[int, list[tuple[int, Any]]]


class TrackEvents:
    """Reads events and adds their `rows`. `counted` counts what was not read, by kind."""

    def __init__(
        self,
        tracks: Tracks,
        clocks: PerfettoClocks,
        rows: SortedRows,
        submissions: Submissions,
        core: NativePackets | None = None,
    ) -> None:
        self._tracks, self._clocks, self._rows, self._submissions = tracks, clocks, rows, submissions
        self._core = core
        self.arguments = Arguments()
        self.counted: Counts[str] = Counts()
        self._last: dict[int, tuple[int, int, bool]] = {}
        """By track: the time and the rank of its last event, and whether it was a whole slice."""

    def add(self, data: bytes, ts_ns: int, sequence: Sequence) -> None:
        """Add a TrackEvent, of a packet with this time. Raises WireError."""
        one: dict[int, Any] = {}
        many: _Many = {}
        for tag, value in tagged(data):
            if tag >> 3 in _MANY:
                many.setdefault(tag >> 3, []).append((tag, value))
            else:
                one[tag] = value
        if _TIME_DELTA in one or _TIME_ABSOLUTE in one:  # on CLOCK_MONOTONIC
            own_ns = None
            if one.get(_TIME_ABSOLUTE, 0):
                own_ns = signed(one[_TIME_ABSOLUTE]) * 1000
            elif sequence.time_ns is not None:
                own_ns = sequence.time_ns = sequence.time_ns + signed(one.get(_TIME_DELTA, 0)) * 1000
            if own_ns is not None:
                placed_ns = self._clocks.trace_ns(own_ns, clock_of(MONOTONIC, sequence.id))
                ts_ns = own_ns if placed_ns is None else placed_ns
        track = one.get(_TRACK, sequence.defaults.track)
        if track is None:
            track = GLOBAL if sequence.thread is None else sequence.thread
        elif self._tracks.machine:
            track = self._tracks.own(track)
        if _LEGACY in one and not one.get(_TRACK, sequence.defaults.track):
            if (stated := self._stated_by(one, track, sequence)) is None:
                self.counted["event|events states|state a process or thread 0"] += 1
                return
            track = stated
        if track == GLOBAL:
            track = self._tracks.default()
        if one.keys() & _OF_THREADS:
            self.counted["value|values of a thread's time"] += 1
        phase = _PHASES.get(one.get(_TYPE, 0), "")
        if phase == COUNTER:
            value = one.get(_VALUE)
            if value is not None:
                value = signed(value)
            elif _DOUBLE_VALUE in one:
                value = double(one[_DOUBLE_VALUE])
            self._add_value(track, ts_ns, value, sequence)
        elif phase:
            self._event(phase, track, ts_ns, one, many, sequence)
        elif _LEGACY in one:
            self._legacy(track, ts_ns, one, many, sequence)
        elif not many.keys() & {_VALUES, _DOUBLE_VALUES}:
            self.counted["event|events of a type that is not read"] += 1
        if _VALUES in many or _DOUBLE_VALUES in many:
            self._more_values(ts_ns, many, sequence)

    def _stated_by(self, one: dict[int, Any], track: int, sequence: Sequence) -> int | None:
        """The track of an event that names no track but `track`: its LegacyEvent may state another one. None
        for a process or thread 0.
        """
        legacy, thread = dict(tagged(one[_LEGACY])), sequence.thread
        if track == GLOBAL and thread is not None and not (_TYPE in one and _TRACK in one):
            track = thread
        pid, tid = (signed(legacy[tag]) if tag in legacy else None for tag in (_PID, _TID))
        if pid is not None or (tid is not None and thread is not None):
            if 0 in (pid, tid):
                return None
            track = self._tracks.thread_on(pid, tid, thread)
        scope = legacy.get(_INSTANT_SCOPE, 0) if legacy.get(_OLD_PHASE) in _SCOPED else 0
        if scope == _OF_PROCESS:
            return self._tracks.process_track(track)
        return GLOBAL if scope == _OF_ALL else track

    # What is not a TrackEvent ---------------------------------------------------------------------------

    def mark(self, ts_ns: int, tid: int, marked: str) -> bool:
        """Add what a thread wrote to ftrace's trace_marker in the form of atrace. Return whether it has that
        form.
        """
        letter, *parts = marked.rstrip("\n\0").split("|", 2)
        pid = int(parts[0]) if parts and _NUMBER.fullmatch(parts[0]) else None
        if letter not in _MARKS or (letter != "E" and len(parts) < 2):
            return False
        name, value = (parts[1] if len(parts) > 1 else ""), ""
        if letter in "CSF":
            name, _, value = name.rpartition("|")
        if letter == "C":
            if not _NUMBER.fullmatch(value):
                return False
            track = self._tracks.counter_of(tid if pid is None else pid, cut_text(name))
            if self._may_stand(track, ts_ns):
                self._add(ts_ns, (COUNTER, track, "", ""), packed({"value": int(value)}))
            return True
        track = self._tracks.thread_on(pid, tid)
        self._tracks.lives.see(self._tracks.machine, tid, ts_ns)
        if letter in "SF":
            track = self._tracks.process_track(track)
            number = flow_number("mark", track, name, value)
            track = self._tracks.asynchronous(number, track, cut_text(name))
        if self._may_stand(track, ts_ns):
            rank = self._rank(track, ts_ns, False)
            self._add(ts_ns, (_MARKS[letter], track, cut_text(name), ""), rank=rank)
        return True

    def add_trigger(self, data: bytes, ts_ns: int) -> None:
        """Add a Trigger. Raises WireError."""
        of = dict(tagged(data))
        track = self._tracks.asynchronous(flow_number("triggers"), GLOBAL, "Trace Triggers")
        if self._may_stand(track, ts_ns):
            args: dict[str, Any] = {"producer_name": text(of[_TWO | BYTES])} if _TWO | BYTES in of else {}
            args |= {"trusted_producer_uid": signed(of[3 << 3])} if 3 << 3 in of else {}
            name = cut_text(text(of.get(_ONE | BYTES, b"")))
            self._add(ts_ns, (INSTANT, track, name, ""), packed(args) if args else b"")

    # Slices and instants --------------------------------------------------------------------------------

    def _event(
        self, phase: str, track: int, ts_ns: int, one: dict[int, Any], many: _Many, sequence: Sequence,
        dur_ns: int = 0,
    ) -> None:  # fmt: skip
        if not self._may_stand(track, ts_ns):
            return
        name = self._name(one, sequence)
        args = self.arguments.read(sequence, many.get(ANNOTATIONS >> 3, ()), one)
        if phase == END and CALLSTACK in args:
            # A slice has the arguments of both of its ends.
            args[f"end_{CALLSTACK}"] = args.pop(CALLSTACK)
        category = self._category(many, sequence) if many else ""
        flows = self._flows(many) if many else []
        if _LEGACY in one:
            legacy = dict(tagged(one[_LEGACY]))
            if of_direction := _DIRECTIONS.get(legacy.get(_DIRECTION, 0)):
                flows.append((of_direction, self._flow_id(legacy.get(_BIND_ID, 0))))
        second = packed(args) if args else b""
        rank, launch = self._rank(track, ts_ns, phase == WHOLE), 0
        if _GPU_STAGES in one and phase in (BEGIN, WHOLE):
            stages = tagged(one[_GPU_STAGES])
            submitted = _ids(stages, _SUBMITTED)
            machine = self._tracks.machine
            launch = self._submissions.submit(submitted, machine) if submitted else 0
            waits = (self._submissions.wait(id, machine) for id in _ids(stages, _WAITED))
            flows += [(LAST_FLOW, flow) for flow in waits if flow]
        if flows and phase == INSTANT:
            (ends, number), *flows = flows
            phase = INSTANT_FLOW + (ends if ends != FLOW else "")
            self._add(ts_ns, (phase, track, name, category), second, number=number, rank=rank)
        else:
            self._add(ts_ns, (phase, track, name, category), second, dur_ns, launch, rank)
        for ends, number in flows:
            self._add(ts_ns, (ends, track, name, ""), number=number, rank=rank)

    def _rank(self, track: int, ts_ns: int, is_whole: bool) -> int:
        """The rank of an event among those of its track and time: they are in the order of the file, but of
        whole slices that follow each other, the longest comes first.
        """
        if self._core is not None:
            return self._core.rank(track, ts_ns, is_whole)
        last_ns, rank, was_whole = self._last.get(track, (ts_ns, 0, is_whole))
        rank = 0 if last_ns != ts_ns else rank + (was_whole != is_whole)
        self._last[track] = ts_ns, rank, is_whole
        return rank

    def _name(self, one: dict[int, Any], sequence: Sequence) -> str:
        """The name of an event."""
        if _NAME not in one:
            return self._interned(EVENT_NAMES, one[_NAME_IID], sequence) if _NAME_IID in one else ""
        whole = one[_NAME].decode("utf-8", "replace")
        name = cut_text(whole)
        if name != whole:
            self.counted["name|names that is|are cut"] += 1
        return name

    def _may_stand(self, track: int, ts_ns: int) -> bool:
        if not 0 <= ts_ns <= TIME_LIMIT_NS:
            self.counted["event|events at a time that a trace cannot have"] += 1
        elif not self._tracks.use(track, ts_ns):
            self.counted["event|events on more tracks than can be kept"] += 1
        else:
            return True
        return False

    def _add(
        self,
        ts_ns: int,
        key: tuple[Any, ...],
        second: bytes = b"",
        dur_ns: int = 0,
        number: int = 0,
        rank: int = SLICE,
    ) -> None:
        self._rows.add(SortedRow(ts_ns, rank, dur_ns, number, packed(key), second))

    def _interned(self, table: int, iid: int, sequence: Sequence) -> str:
        name = sequence.text_of(table, iid)
        if name is None:
            self.arguments.unnamed += 1
            return f"name {iid}"
        return cut_text(name)

    def _category(self, many: _Many, sequence: Sequence) -> str:
        names = [
            value.decode("utf-8", "replace") for tag, value in many.get(_CATEGORY, ()) if tag & 7 == BYTES
        ]
        for tag, value in many.get(_CATEGORY_IIDS, ()):
            names += [self._interned(CATEGORIES, iid, sequence) for iid in numbers(tag, value)[:_FLOWS_MAX]]
        return cut_text(",".join(names[:_FLOWS_MAX]))

    def _flows(self, many: _Many) -> list[tuple[str, int]]:
        """The flows that go through an event, with whether they end there."""
        found: list[tuple[str, int]] = []
        for phase, number_field, old_field in (
            (FLOW, _FLOWS, _OLD_FLOWS),
            (LAST_FLOW, _LAST_FLOWS, _OLD_LAST_FLOWS),
        ):
            for tag, value in many.get(number_field, ()):
                found += [(phase, id) for id in _fixed(tag, value)]
            for tag, value in many.get(old_field, ()):
                found += [(phase, id) for id in numbers(tag, value)]
        if len(found) > _FLOWS_MAX:
            self.counted["flow|flows beyond those that an event can have"] += len(found) - _FLOWS_MAX
        return [(phase, self._flow_id(id)) for phase, id in found[:_FLOWS_MAX]]

    def _flow_id(self, id: int) -> int:
        """The number of a flow by its id."""
        return self._tracks.own_flow(id if id <= FLOW_LIMIT else flow_number("flow", id))

    # Counters -------------------------------------------------------------------------------------------

    def _add_value(self, track: int, ts_ns: int, value: int | float | None, sequence: Sequence) -> None:
        """Add a value of a counter."""
        counter = self._tracks.counter(track)
        if value is None or counter is None:
            self.counted["value|values without a counter"] += 1
            return
        if counter.of_thread:
            self.counted["value|values of a thread's time"] += 1
            return
        if not self._may_stand(track, ts_ns):
            return
        value *= counter.multiplier
        if counter.is_incremental:
            value += sequence.totals.get(track, 0)
            sequence.totals[track] = value
        value = float(value) if abs(value) > _WHOLE_MAX else value
        if isinstance(value, float) and not math.isfinite(value):
            self.counted["value|values that is|are not numeric"] += 1
            return
        self._add(ts_ns, (COUNTER, track, "", ""), packed({"value": value}))
        if self._core is not None and not counter.is_incremental:
            self._core.note_counter(track, counter.multiplier)

    def _more_values(self, ts_ns: int, many: _Many, sequence: Sequence) -> None:
        """Add the values of counters that an event has."""
        defaults = sequence.defaults
        for tracks_field, values_field, standard in (
            (_COUNTERS, _VALUES, defaults.counters),
            (_DOUBLE_COUNTERS, _DOUBLE_VALUES, defaults.doubles),
        ):
            values: list[int | float] = []
            for tag, value in many.get(values_field, ()):
                if values_field == _VALUES:
                    values += map(signed, numbers(tag, value))
                else:
                    values += [double(one.to_bytes(8, "little")) for one in _fixed(tag, value)]
            named = [uuid for tag, value in many.get(tracks_field, ()) for uuid in numbers(tag, value)]
            tracks = named or standard
            self.counted["value|values without a counter"] += max(
                0, len(values) - min(len(tracks), _COUNTERS_MAX)
            )
            for uuid, number in list(zip(tracks, values, strict=False))[:_COUNTERS_MAX]:
                self._add_value(self._tracks.own(uuid), ts_ns, number, sequence)

    # Old events ---------------------------------------------------------------------------------------------

    def _legacy(self, track: int, ts_ns: int, one: dict[int, Any], many: _Many, sequence: Sequence) -> None:
        """Add an event that is described by a LegacyEvent."""
        of = dict(tagged(one[_LEGACY]))
        if of.keys() & _OF_THREADS_LEGACY:
            self.counted["value|values of a thread's time"] += 1
        code = of.get(_OLD_PHASE, 0)
        letter = chr(code) if 0 < code < 128 else ""
        if _NAME_IID not in one and _NAME not in one and _OLD_NAME in of:
            one[_NAME_IID] = of[_OLD_NAME]
        phase = _SPANS.get(letter) or _ASYNCHRONOUS.get(letter)
        if letter in _OLD_FLOW_PHASES and self._may_stand(track, ts_ns):
            name = self._name(one, sequence)
            ids = [(tag, of[tag]) for tag in _OLD_IDS if tag in of]
            number = self._tracks.own_flow(flow_number("flow", self._category(many, sequence), name, *ids))
            rank = self._rank(track, ts_ns, False)
            self._add(ts_ns, (_OLD_FLOW_PHASES[letter], track, name, ""), number=number, rank=rank)
            return
        if phase is None:
            self.counted["event|events of a type that is not read"] += 1
            return
        dur_ns = 0
        if phase == WHOLE:
            dur_ns = max(0, min(signed(of.get(_DURATION, 0)) * 1000, TIME_LIMIT_NS - ts_ns))
        if letter in _ASYNCHRONOUS:  # events that share an id have a track
            ids = [(tag, of[tag]) for tag in _OLD_IDS if tag in of]
            category = self._category(many, sequence)
            scope = of.get(_SCOPE, b"").decode("utf-8", "replace")
            # Without a process, the id is global.
            local = track if any(tag == _OLD_IDS[1] for tag, _ in ids) else GLOBAL
            number = flow_number("asynchronous", category, scope, local, *ids)
            track = self._tracks.asynchronous(number, track, category or scope or "asynchronous")
        self._event(phase, track, ts_ns, one, many, sequence, dur_ns)


def _ids(fields: list[tuple[int, Any]], field: int) -> list[int]:
    """The numbers of a repeated field that are not 0."""
    ids = [id for tag, value in fields if tag >> 3 == field for id in numbers(tag, value)]
    return [id for id in ids if id][:_STAGES_OF_CALL_MAX]


def _fixed(tag: int, value: bytes) -> list[int]:
    """The numbers of a repeated field of eight bytes each, packed or not."""
    if tag & 7 not in (BYTES, FIXED64):
        return []
    return [int.from_bytes(value[at : at + 8], "little") for at in range(0, len(value) - 7, 8)]


_OPEN_MAX: Final = 1 << 17
# The most open slices of a track among which an end is matched. The trace processor keeps no more.
_LOOKED_AT_MAX: Final = 512
_OPEN_FLOWS_MAX: Final = 1 << 16
Key = tuple[str, int, str, str]
"""Phase, track, name and category."""
_Row = tuple[int, int, int, bytes, bytes]
"""Time, length, flow, record and arguments."""


def _stated(first: bytes, tracks: Tracks) -> tuple[Key | Record, bytes]:
    """What a first text states, and that text with the numbers of processors and GPUs."""
    stated = orjson.loads(first)
    if not isinstance(stated, dict):
        return tuple(stated), first
    if "gpu" in stated:
        stated["gpu"] = tracks.gpu(stated["gpu"])
    elif stated["type"] == "loss" and "cpu" in stated:
        stated["cpu"] = tracks.cpu(stated["cpu"])
    return stated, packed(stated)


class Ordered:
    """Reads rows in the order of time. `counted` counts what could not be used."""

    def __init__(self, tracks: Tracks, submissions: Submissions) -> None:
        self._open_max = _OPEN_MAX
        self._tracks, self._submissions = tracks, submissions
        self.counted: Counts[str] = Counts()
        self._open: dict[int, list[tuple[str, str, bool]]] = {}
        """By track: the names and categories of its open slices, and whether they are calls of CUDA."""
        self._opened = 0
        self._deeper: Counts[int] = Counts()
        self._begun_ns: dict[int, int] = {}
        self._flows = OrderedDict[int, tuple[int, bool]]()
        """By the number of a flow: how often it ended, and whether it has begun again. The last used are at
        the end."""
        self.threads = ThreadsInOrder(tracks)
        self.losses: list[Record] = []
        """The losses among the rows that were taken."""

    def events(self, rows: Rows) -> Rows:
        """The rows of events for these rows."""
        made: list[_Row] = []
        for ts_ns, _, dur_ns, number, first, second in rows:
            key, first = _stated(first, self._tracks)
            if isinstance(key, dict):
                made += self._rows_of(key, (ts_ns, dur_ns, number, first, second))
                continue
            phase, track, name, category = key
            if (part := self._tracks.at(track, ts_ns)) != track:
                track, key = part, (phase, part, name, category)
            is_call = number != 0 or category in OF_CALLS
            stream = self._tracks.place(track).stream
            if stream is not None:
                if stream.is_summary:
                    continue
                name = kernel_name(name, second)
            if phase == BEGIN:
                if self._opened >= self._open_max:
                    self._deeper[track] += 1
                    self.counted["more begins than can be open at a time"] += 1
                    continue
                self._opened += 1
                name, category = map(self._tracks.long_names.shortened, (name, category))
                self._open.setdefault(track, []).append((name, category, is_call))
                self._begun_ns[track] = ts_ns
            elif phase == END:
                called = self._end(track, name, category)
                if called is None:
                    continue
                (name, is_call), category = called, ""
            elif phase == COUNTER:
                name = self._tracks.place(track).counter
            elif phase not in (INSTANT, "X"):
                made += self._flow(key, ts_ns, number, second)
                continue
            elif phase == "X":
                self._begun_ns[track] = ts_ns
            is_call &= phase in (BEGIN, END, WHOLE)
            has_launch = number != 0 and self._may_launch(track)
            record = self._record(phase, track, name, is_call, has_launch)
            second = self._with_category(track, category, second)
            if stream is not None and phase != END:
                record, second = begun(orjson.loads(record), second)
            made.append((ts_ns, dur_ns, number if has_launch else 0, record, second))
        return rows_of([SortedRow(of[0], 0, *of[1:]) for of in made])

    def _rows_of(self, record: Record, row: _Row) -> list[_Row]:
        """The rows for the row of a record, which has its thread or stream."""
        ts_ns, dur_ns, number, first, second = row
        if record["type"] == "loss":
            self.losses.append({**record, "ts_ns": ts_ns})
        elif record["phase"] == LAST_FLOW:
            if flow := self._goes_on(LAST_FLOW, number):
                return [(ts_ns, 0, flow[1], first, b"")]
        elif record["type"] != "scheduler":
            whole = (ts_ns, dur_ns, self._submissions.launch(number), first, second)
            return [whole, *self._waited_for(record, ts_ns, number)]
        elif event := self.threads.event(record, second, ts_ns):
            return [(ts_ns, 0, 0, *event)]
        return []

    def _may_launch(self, track: int) -> bool:
        """Whether the calls of CUDA on a track become calls: they do on the track of a thread itself."""
        place = self._tracks.place(track)
        return place.stream is None and place.tid is not None and place.layer == EVENTS

    def _waited_for(self, record: Record, ts_ns: int, number: int) -> Iterator[_Row]:
        """The starts of flows to what waits for a stage."""
        for flow in self._submissions.flows(number) if number else ():
            self._goes_on(FLOW, flow)
            kept = {key: record[key] for key in ("type", "name", "gpu", "stream")}
            yield ts_ns, 0, flow, packed({**kept, "phase": FLOW, "flow": 0}), b""

    def _end(self, track: int, name: str, category: str) -> tuple[str, bool] | None:
        """Close a slice. Return its name, or that of the end where nothing is open, and whether it is a call
        of CUDA. None for an end that is left out.
        """
        if self._deeper[track]:
            self._deeper[track] -= 1
            return None
        opened = self._open.get(track)
        name, category = map(self._tracks.long_names.shortened, (name, category))
        if not opened:
            return name, False
        for at in range(len(opened) - 1, max(-1, len(opened) - 1 - _LOOKED_AT_MAX), -1):
            called, of, is_call = opened[at]
            if (not name or not called or name == called) and (not category or category == of):
                self._opened -= len(opened) - at
                del opened[at:]
                return called, is_call
        self.counted["end|ends without an open slice"] += 1
        return None

    def _flow(self, key: Key, ts_ns: int, number: int, second: bytes) -> list[_Row]:
        """The rows for an end of a flow, and for its instant."""
        phase, track, name, category = key
        is_instant = phase.startswith(INSTANT_FLOW)
        if is_instant:
            phase = phase.removeprefix(INSTANT_FLOW) or FLOW
            second = self._with_category(track, category, second)
        instant = (ts_ns, 0, 0, self._record(INSTANT, track, name), second)
        if self._tracks.place(track).stream is not None and self._begun_ns.get(track) != ts_ns:
            # Without a slice, the end of a flow would be an instant, and reports have no instants on streams.
            self.counted["flow|flows without a slice on its|their stream"] += 1
            return [instant] if is_instant else []
        flow = self._goes_on(phase, number)
        if flow is None:
            return [instant] if is_instant else []
        phase, number = flow
        record = self._record(phase, track, name)
        if is_instant and self._begun_ns.get(track) == ts_ns:
            # The flow will belong to the slice that begins there, so the instant is a separate row.
            return [instant, (ts_ns, 0, number, record, b"")]
        return [(ts_ns, 0, number, record, second)]

    def _goes_on(self, phase: str, number: int) -> tuple[str, int] | None:
        """The phase of a flow (it starts, continues or ends) and its number. A number that is used again is
        replaced by another. None where the flow ends and has not begun.
        """
        times, is_open = self._flows.pop(number, (0, False))
        ends = phase == LAST_FLOW
        if (ends or phase == NEXT_FLOW) and not is_open:
            self.counted["flow|flows ends|end without a begin"] += 1
            return None
        put_bounded(self._flows, number, (times + ends, not ends), _OPEN_FLOWS_MAX)
        called = flow_number("again", number, times) if times else number
        return (NEXT_FLOW if is_open and not ends else phase), called

    def _record(
        self, phase: str, track: int, name: str, is_call: bool = False, has_launch: bool = False
    ) -> bytes:
        place = self._tracks.place(track)
        record = {**place.fields, "name": name or NO_NAME, "phase": phase}
        if place.stream is not None:
            record["type"] = kind_of(name)
        elif is_call and self._may_launch(track):
            record["type"] = "userspace"
            del record["layer"]
            record |= {"launch": 0} if has_launch else {}
        if phase == "X":
            record["dur_ns"] = 0
        elif phase in (FLOW, NEXT_FLOW, LAST_FLOW):
            record["flow"] = 0
        return packed(record)

    def _with_category(self, track: int, category: str, second: bytes) -> bytes:
        """Arguments with the category, where the layer is not named after it."""
        if not category or category == self._tracks.place(track).layer:
            return second
        # The bytes that orjson returns hold at least 4 KB of memory. A copy holds no more than its size.
        stated = bytes(memoryview(orjson.dumps({"cat": category})))
        return stated[:-1] + b"," + second[1:] if second else stated


# What the core asks for, as in perfetto_order.c.
_ALL, _NEW_KEY, _NEW_VARIANT, _NEW_RECORD, _FOREIGN = range(5)
_ROW_PHASES: Final = (
    BEGIN, END, INSTANT, COUNTER, WHOLE, FLOW, NEXT_FLOW, LAST_FLOW, INSTANT_FLOW, INSTANT_FLOW + NEXT_FLOW,
    INSTANT_FLOW + LAST_FLOW,
)  # fmt: skip
_RECORD: Final = len(_ROW_PHASES)
_NUMBERS: Final = {phase: number for number, phase in enumerate(_ROW_PHASES)}
_IS_CALL, _IS_STREAM, _IS_SUMMARY, _MAY_LAUNCH, _HAS_GRID, _HAS_BLOCK, _IS_VARIANT = (
    1 << bit for bit in range(7)
)
_OF_ENDS: Final = 4
_OF_FLOWS: Final = (INSTANT, FLOW, NEXT_FLOW, LAST_FLOW)
_COUNTED: Final = (
    "more begins than can be open at a time",
    "end|ends without an open slice",
    "flow|flows ends|end without a begin",
    "flow|flows without a slice on its|their stream",
)
# The most keys, and bytes of their texts, before those that no open slice needs are forgotten.
_KEYS_MAX: Final = 1 << 12
_BYTES_MAX: Final = 1 << 20

K = TypeVar("K", str, bytes)


class NativeOrdered(Ordered):
    """Reads rows in the core: `perfetto_order.c`."""

    def __init__(self, tracks: Tracks, submissions: Submissions, core: ctypes.CDLL) -> None:
        super().__init__(tracks, submissions)
        self._core = core
        made = core.tp_order_new(seed(), self._open_max)
        self._at = owned(self, made, core.tp_order_free)
        self._numbers: dict[bytes, int] = {}
        """The numbers of keys by first texts, and then what each is."""
        self._described: list[tuple[Key | Record, bytes]] = []
        self._names = {"": 0}
        self._track_numbers: dict[int, int] = {}
        self._record_numbers: dict[bytes, int] = {}
        self._bytes, self._bytes_max = 0, _BYTES_MAX

    def events(self, rows: Rows) -> Rows:
        if len(self._described) > _KEYS_MAX or self._bytes > self._bytes_max:
            self._forget()
        core, count, number_of = self._core, len(rows), self._numbers.get
        keys = np.array([number_of(first, -1) for first in rows.firsts], np.int32)
        columns: list[Int32s | Int64s] = [
            rows.ts_ns,
            rows.dur_ns,
            rows.number,
            rows.second.ends,
            rows.first,
            keys,
        ]
        view = ctypes.byref(OrderRows(*(column.ctypes.data for column in columns)))
        made, asked, at = _Made(2 * count), np.zeros(3, np.int64), 0
        while True:
            data = rows.second.data
            at = checked(core.tp_order_take(self._at, view, data, at, count, made.view, asked.ctypes.data))
            why, of, slot = asked.tolist()
            if why == _NEW_KEY:
                first = rows.firsts[int(rows.first[at])]
                keys[rows.first[at]] = self._numbers[first] = self._new_key(first, int(rows.ts_ns[at]))
            elif why == _NEW_VARIANT:
                key = self._described[of][0]
                assert isinstance(key, tuple)
                variant = self._describe(key, text_of(core.tp_order_part, self._at))
                checked(core.tp_order_set_variant(self._at, variant))
            elif why == _NEW_RECORD:
                core.tp_order_set_record(self._at, of, slot, self._record_number(self._record_of(of, slot)))
            elif why == _FOREIGN:
                at = self._take_records(rows, at, keys, made)
            else:
                break
        self._note_counts()
        return self._made_rows(made)

    def _made_rows(self, made: _Made) -> Rows:
        text, size = ctypes.c_void_p(), ctypes.c_int64()
        count = self._core.tp_order_made_rows(self._at, ctypes.byref(text), ctypes.byref(size))
        data = ctypes.string_at(text, size.value) if size.value else b""
        ts_ns, dur_ns, number, ends = made.numbers[:, :count]
        # The different records, in the order in which they come first.
        different, places, inverse = np.unique(made.records[:count], return_index=True, return_inverse=True)
        order = np.argsort(places)
        known = list(self._record_numbers)
        firsts = [known[at] for at in different[order].tolist()]
        first = np.empty(len(order), np.int32)
        first[order] = np.arange(len(order), dtype=np.int32)
        return Rows(
            ts_ns, np.zeros(count, np.int64), dur_ns, number, first[inverse], firsts, Texts(data, ends)
        )

    def _take_records(self, rows: Rows, at: int, keys: Int32s, made: _Made) -> int:
        """Add the rows of events for rows of records, from a place on. Return the place of the next row."""
        for place in range(at, len(rows)):
            key = keys.item(rows.first.item(place))
            record, text = self._described[key] if key >= 0 else ((), b"")
            if not isinstance(record, dict):
                return place
            ts_ns, dur_ns, number = (of.item(place) for of in (rows.ts_ns, rows.dur_ns, rows.number))
            for *columns, of, args in self._rows_of(
                record, (ts_ns, dur_ns, number, text, rows.second[place])
            ):
                made.reserve(2 * len(rows) + 1)
                called = self._record_number(of)
                checked(self._core.tp_order_add(self._at, made.view, *columns, called, args, len(args)))
                made.count += 1
        return len(rows)

    # Keys -----------------------------------------------------------------------------------------------

    def _new_key(self, first: bytes, ts_ns: int) -> int:
        """The number of a new key, or of one that has another track from a time on."""
        key, text = _stated(first, self._tracks)
        self._bytes += len(first)
        if isinstance(key, dict):
            return self._add_key(_RECORD, 0, 0, (key, text))
        phase, track, name, category = key
        until_ns, track = self._tracks.until(track, ts_ns), self._tracks.at(track, ts_ns)
        stream = self._tracks.place(track).stream
        if stream is None or _NUMBERS[phase] >= _NUMBERS[FLOW]:
            return self._describe((phase, track, name, category), b"", until_ns)
        flags = _IS_STREAM | (_IS_SUMMARY if stream.is_summary else 0)
        return self._add_key(_NUMBERS[phase], flags, track, (key, b""))

    def _describe(self, key: Key, part: bytes, until_ns: int = TIME_LIMIT_NS + 1) -> int:
        """The number of the key of an event. On a stream, `part` has the arguments on which it depends."""
        phase, track, name, category = key
        place = self._tracks.place(track)
        flags = (_IS_CALL if category in OF_CALLS else 0) | (_MAY_LAUNCH if self._may_launch(track) else 0)
        if place.stream is not None:
            flags |= _IS_STREAM | (_IS_SUMMARY if place.stream.is_summary else 0)
            if _NUMBERS[phase] < _NUMBERS[FLOW]:
                name = kernel_name(name, part)
        if part:
            moved = orjson.loads(begun({"name": name}, part)[0])
            flags |= (
                _IS_VARIANT | (_HAS_GRID if "grid" in moved else 0) | (_HAS_BLOCK if "block" in moved else 0)
            )
        if phase in (BEGIN, END):
            name, category = map(self._tracks.long_names.shortened, (name, category))
        elif phase == COUNTER:
            name = place.counter
        ahead = self._with_category(track, category, b"")
        described = (phase, track, name, category), part
        return self._add_key(_NUMBERS[phase], flags, track, described, (name, category), ahead, until_ns)

    def _add_key(
        self, phase: int, flags: int, track: int, described: tuple[Key | Record, bytes],
        names: tuple[str, str] = ("", ""), ahead: bytes = b"", until_ns: int = TIME_LIMIT_NS + 1,
    ) -> int:  # fmt: skip
        texts = (self._names.setdefault(text, len(self._names)) for text in names)
        number = self._track_numbers.setdefault(track, len(self._track_numbers))
        self._described.append(described)
        self._bytes += sum(map(len, names)) + len(ahead) + len(described[1])
        add = self._core.tp_order_add_key
        return checked(add(self._at, phase, flags, number, *texts, ahead, len(ahead), until_ns))

    def _record_of(self, number: int, slot: int) -> bytes:
        """A record of the events of a key."""
        key, part = self._described[number]
        assert isinstance(key, tuple)
        phase, track, name, _ = key
        if _NUMBERS[phase] >= _NUMBERS[FLOW]:
            return self._record(_OF_FLOWS[slot], track, name)
        if slot >= _OF_ENDS:
            return self._record(END, track, name, slot > _OF_ENDS)
        record = self._record(phase, track, name, slot >= 2, slot % 2 == 1)
        if phase == END or self._tracks.place(track).stream is None:
            return record
        return begun(orjson.loads(record), part)[0]

    def _record_number(self, record: bytes) -> int:
        number = self._record_numbers.get(record)
        if number is None:
            number = self._record_numbers[record] = len(self._record_numbers)
            self._bytes += len(record)
        return number

    def _forget(self) -> None:
        """Forget all keys, and the names and records that no open slice needs."""
        self._core.tp_order_forget(self._at)
        self._numbers.clear()
        self._described.clear()
        there = ctypes.c_void_p()
        size = 5 * self._core.tp_order_open(self._at, ctypes.byref(there))
        data = (ctypes.c_int32 * size).from_address(there.value) if there.value else bytearray()
        # By open slice: that below, its name and category, whether it is a call, and the record of its end.
        of = np.frombuffer(data, np.int32).reshape(-1, 5)
        is_open = of[:, 3] >= 0
        self._names = _renumber(self._names, of, is_open, [1, 2], {0})
        self._record_numbers = _renumber(self._record_numbers, of, is_open, [4], set())
        self._bytes = sum(map(len, self._names)) + sum(map(len, self._record_numbers))
        self._bytes_max = max(_BYTES_MAX, 2 * self._bytes)

    # Flows, and what is counted -------------------------------------------------------------------------

    def _goes_on(self, phase: str, number: int) -> tuple[str, int] | None:
        made = np.zeros(2, np.int64)
        if not checked(self._core.tp_order_flow(self._at, _NUMBERS[phase], number, made.ctypes.data)):
            return None
        return _ROW_PHASES[int(made[0])], int(made[1])

    def _note_counts(self) -> None:
        counts = np.zeros(2 * len(_COUNTED), np.int64)
        self._core.tp_order_counted(self._at, counts.ctypes.data)
        numbers, order = counts.reshape(2, -1).tolist()
        for _, words, count in sorted(zip(order, _COUNTED, numbers, strict=True)):
            if count:
                self.counted[words] = count


class _Made:
    """Room for rows of events."""

    def __init__(self, room: int) -> None:
        self.count = 0
        self.numbers: Int64s = np.empty((4, room), np.int64)
        self.records = np.empty(room, np.int32)
        self._set_view()

    def _set_view(self) -> None:
        columns = [*self.numbers, self.records]
        self.view = ctypes.byref(OrderMade(*(column.ctypes.data for column in columns)))

    def reserve(self, room: int) -> None:
        """Have room for so many rows more than those that Python has added."""
        if self.count + room > len(self.records):
            room = 2 * (self.count + room)
            numbers, records = self.numbers, self.records
            self.numbers, self.records = np.empty((4, room), np.int64), np.empty(room, np.int32)
            self.numbers[:, : numbers.shape[1]], self.records[: len(records)] = numbers, records
            self._set_view()


def _renumber(
    numbers: dict[K, int], of: Int32s, is_open: Bools, columns: list[int], more: set[int]
) -> dict[K, int]:
    """New numbers of the texts that open slices have in these columns, which are changed, and of `more`."""
    kept = sorted({*of[is_open][:, columns].flatten().tolist(), *more})
    new = np.zeros(len(numbers) + 1, np.int32)
    new[kept] = np.arange(len(kept), dtype=np.int32)
    for column in columns:
        of[is_open, column] = new[of[is_open, column]]
    texts = list(numbers)
    return {texts[at]: place for place, at in enumerate(kept)}
