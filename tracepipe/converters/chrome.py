"""Writes Chrome's JSON trace, for chrome://tracing, Perfetto and Speedscope.

The format has processes and threads and nothing below them. Each track becomes a "thread" whose name includes
those of its parents, and each group at the top becomes a "process". Times are µs. They count from the trace's
start, as a double can represent nanoseconds of the time since boot, but not since 1970. Source: the "Trace
Event Format" document of the Chromium project.
"""

from __future__ import annotations

import ctypes
import re
from array import array
from dataclasses import dataclass
from typing import BinaryIO, Final

import orjson

from tracepipe.converters.native_columns import DrawnView, WarpsView
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT, MARKS, Op
from tracepipe.event.tables import Args
from tracepipe.layout.timeline import (
    FIRST_EXTRA,
    PYTHON,
    WARP_BEGIN,
    WARP_COUNT,
    WARP_END,
    Book,
    Drawn,
    Track,
    WarpChanges,
    shown_after,
    shown_before,
    shows_launch,
)
from tracepipe.native import checked, library, owned

PLACES, TOPS, COUNTS, NAMES, KERNELS, BEFORE, LAUNCH, AFTER, MARK, ARGS, LINES = range(11)
"""Texts that are made once. By the id of a track: its ids and the key of the time, the same after its
category, and the line of a count up to its time. By number: names, and names of kernels without their last
quote. By shape: what is shown before its arguments, the key of its launch, and what is shown after that. By
mark. By number: arguments, and Python frames. Members that an event shows have a comma before each."""
SHOWN: Final = ("launch", *MARKS[1:], "cpu", "source_ns", "grid", "block", PYTHON)
"""What may be shown in addition to arguments. An argument of that name replaces it."""
_HEADS: Final = {
    BEGIN: b',\n{"ph":"B","name":',
    # An end repeats the name: Speedscope does not end a slice of a different name.
    END: b',\n{"ph":"E","name":',
    INSTANT: b',\n{"ph":"i","s":"t","name":',
}
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1
# Speedscope keeps begins and ends in two queues, and takes an end first where both have the same time. It
# never finds the end of a slice without length. So a begin at the time of an end, or an end at the time of a
# begin, is a little later in the decimals. That is less than half a nanosecond in all, which rounding to
# nanoseconds removes, and enough for a double (µs from an hour before the start) over the first hours.
_APART_PS = 2
_APART_MAX = 249
# A string that ends with a backslash. Perfetto v52 takes the quote after it for an escaped one, and rejects
# the whole file. Of an even number of backslashes before a quote, the last pair is written as a code point.
_ENDS_IN_BACKSLASH = re.compile(rb'(?<!\\)((?:\\\\)*)\\\\"')


def _readable(text: bytes) -> bytes:
    """JSON text in a form that every viewer reads."""
    return _ENDS_IN_BACKSLASH.sub(rb'\1\\u005c"', text) if b'\\\\"' in text else text


def json_text(value: object) -> bytes:
    """A value in JSON."""
    return _readable(orjson.dumps(value))


def args_text(args: Args) -> bytes:
    """Arguments in JSON. Integers beyond 63 bits, which Perfetto would read as -1, become text."""
    try:
        text = orjson.dumps(args, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER)
    except orjson.JSONEncodeError:  # an integer beyond 53 bits: most of these are times, which fit
        text = orjson.dumps(_with_texts(args), option=orjson.OPT_NON_STR_KEYS)
    return _readable(text)


def _with_texts(value: object) -> object:
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    return str(value) if isinstance(value, int) and not _INT_MIN <= value <= _INT_MAX else value


def members(args: Args) -> bytes:
    """The members of the object of arguments, each after a comma."""
    return b"," + args_text(args)[1:-1] if args else b""


@dataclass(slots=True)
class _Turns:
    """Begins and ends of a track at one nanosecond: how often they alternated, and if the last is an end."""

    at_ns: int = -1
    step: int = 0
    is_end: bool = False


class ChromeEvents:
    """Writes the elements of an array to `out`. Times count from `base_ns`."""

    def __init__(self, out: BinaryIO, base_ns: int) -> None:
        self._stream, self._base_ns, self._is_empty = out, base_ns, True
        self._of_tracks: tuple[dict[int, bytes], ...] = ({}, {}, {})
        """PLACES, TOPS and COUNTS."""
        self._turns: dict[int, _Turns] = {}
        self._out: list[bytes] = []

    def give(self, which: int, at: int, text: bytes) -> None:
        """Set a text of a track."""
        self._of_tracks[which][at] = text

    def give_track(self, track: Track, pid: int) -> None:
        """Make the texts of a track, which is a thread in this format."""
        place = b',"pid":%d,"tid":%d,"ts":' % (pid, track.id)
        self.give(PLACES, track.id, place)
        self.give(TOPS, track.id, (b',"cat":' + json_text(track.category) if track.category else b"") + place)
        if track.kind == "counter":
            self.give(COUNTS, track.id, b',\n{"ph":"C","name":' + json_text(_counter_name(track)) + place)

    def forget(self, *, shapes: bool) -> None:
        """Forget all arguments, and all names and `shapes`: they have new numbers now. None are kept here."""

    # Lines ---------------------------------------------------------------------------------------------

    def line(self, text: bytes) -> None:
        """Write a line that is complete."""
        self._out.append(b",\n" + text)

    def flush(self) -> None:
        """Write out the lines that are buffered."""
        lines, self._out = self._out, []
        self.put(b"".join(lines))

    def put(self, lines: bytes) -> None:
        """Write out lines that each begin with a comma and a newline, but for the first line of all."""
        if lines:
            self._stream.write(lines[2:] if self._is_empty else lines)
            self._is_empty = False

    def _when(self, track: int, kind: int, ts_ns: int) -> bytes:
        """A time as µs since the base, with the nanoseconds as decimals; at least the base."""
        ns = max(0, ts_ns - self._base_ns)
        when = b"%d.%03d" % (ns // 1000, ns % 1000)
        step = 0 if kind == COUNTER else min(self._step(track, kind, ts_ns), _APART_MAX)
        return when + b"%03d" % (step * _APART_PS) if step else when

    def _step(self, track: int, kind: int, ts_ns: int) -> int:
        """Count how often begins and ends have alternated on a track at that nanosecond."""
        turns = self._turns.get(track)
        if turns is None:
            turns = self._turns[track] = _Turns()
        if kind == INSTANT:
            return turns.step if ts_ns == turns.at_ns else 0
        if ts_ns != turns.at_ns:
            turns.at_ns, turns.step, turns.is_end = ts_ns, 0, kind == END
        elif turns.is_end != (kind == END):
            turns.is_end = not turns.is_end
            turns.step += 1
        return turns.step

    def _count(self, track: int, ts_ns: int, value: float) -> None:
        when = self._when(track, COUNTER, ts_ns)
        self._out.append(
            b'%b%b,"args":{"value":%b}}' % (self._of_tracks[COUNTS][track], when, orjson.dumps(value))
        )

    def _event(self, kind: int, track: int, ts_ns: int, name: bytes, shown: bytes, *flows: int) -> None:
        """Write a begin, end or instant that shows these members, and its steps of flows."""
        when = self._when(track, kind, ts_ns)
        place = self._of_tracks[PLACES][track]
        top = place if kind == END else self._of_tracks[TOPS][track]
        args = b',"args":{' + shown[1:] + b"}" if shown else b""
        self._out.append(_HEADS[kind] + name + top + when + args + b"}")
        for flow in flows if kind != END else ():
            if flow:
                # This binds the flow to the slice that has just begun.
                self._out.append(
                    b',\n{"ph":"%b","cat":"flow","name":"flow","id":%d%b%b,"bp":"e"}'
                    % (b"s" if flow < 0 else b"t", abs(flow), place, when)
                )

    # Operations ----------------------------------------------------------------------------------------

    def write(self, drawn: Drawn) -> None:
        """Write the operations of a batch."""
        tracks, names = drawn.book.tracks, drawn.book.names
        for kind, row, ts_ns, name, event, mark, flow, flow2, value, _ in drawn.rows():
            track = tracks[row].id
            if kind == COUNTER:
                self._count(track, ts_ns, drawn.counted(event, value))
            else:
                shown, flows = members(drawn.args_of(event, mark)), drawn.flows(flow, flow2)
                self._event(kind, track, ts_ns, json_text(names[name]), shown, *flows)

    # Warps ---------------------------------------------------------------------------------------------

    def warps(self, changes: WarpChanges) -> None:
        """Write the changes of a GPU. The count of running warps comes after the change that it is for."""
        for change in changes.rows():
            if change.kind != WARP_COUNT:
                ts_ns, kind, at, _, mask = change
                track = changes.track(at).id
                if kind == WARP_BEGIN:
                    shown = members(changes.args(at))
                    self._event(BEGIN, track, ts_ns, json_text(changes.name(at)), shown, changes.flow(at))
                elif kind == WARP_END:
                    self._event(END, track, ts_ns, json_text(changes.name(at)), b"")
                else:
                    left = {"mask": f"0x{mask:08x}", "lanes": mask.bit_count()}
                    self._event(INSTANT, track, ts_ns, b'"exit"', members(left))
            if change.value >= 0:
                self._count(changes.counter.id, change.ts_ns, change.value)


def _counter_name(track: Track) -> str:
    """The name of a counter with those of its groups: all counters are directly in a process."""
    group, name = track.parent, track.name
    while group is not None and group.parent is not None:
        group, name = group.parent, f"{group.name} / {name}"
    return name


def _address_of(ids: array[int], tracks: list[Track]) -> int:
    """The address of the ids of all tracks, after those of tracks that are new were added."""
    ids.extend(track.id for track in tracks[len(ids) :])
    return ids.buffer_info()[0]


class NativeChromeEvents(ChromeEvents):
    """Writes the elements by `chrome.c`, with the same bytes."""

    def __init__(self, core: ctypes.CDLL, out: BinaryIO, base_ns: int) -> None:
        self._core = core
        self._events = owned(self, core.tp_chrome_new(base_ns), core.tp_chrome_free)
        self._rows = array("i")
        self._gpus: dict[int, tuple[array[int], array[int]]] = {}
        """The tracks of each GPU, and its kernels as four numbers each."""
        self._kernel_count = 0
        self._made: set[int] = set()
        """Arguments whose text Python made."""
        self._names_made = self._shapes_made = self._frames_made = 0
        super().__init__(out, base_ns)
        for at, mark in enumerate(MARKS):
            self._give_some(MARK, at, members({mark: True} if mark else {}))

    def give(self, which: int, at: int, text: bytes) -> None:
        self._give(which, at, text, 0)

    def _give(self, which: int, at: int, text: bytes, shadows: int) -> None:
        checked(self._core.tp_chrome_set(self._events, which, at, text, len(text), shadows))

    def _give_some(self, which: int, at: int, text: bytes) -> None:
        """Set a text, unless it is empty, as most are."""
        if text:
            self.give(which, at, text)

    def _make_ready(self, book: Book) -> None:
        """Make the texts of new names, shapes and frames."""
        names, shapes = book.names, book.tables.shapes
        for at in range(self._names_made, len(names)):
            self.give(NAMES, at, json_text(names[at]))
        for at in range(self._shapes_made, len(shapes)):
            shape = shapes[at]
            if shape is not None:
                self._give_some(BEFORE, at, members(shown_before(shape)))
                self._give_some(LAUNCH, at, b',"launch":' if shows_launch(shape) else b"")
                self._give_some(AFTER, at, members(shown_after(shape)))
        frames = book.tables.stacks.frames
        for at in range(self._frames_made, len(frames)):
            self.give(LINES, at, members({PYTHON: str(frames[at])}))
        self._names_made, self._shapes_made, self._frames_made = len(names), len(shapes), len(frames)

    def forget(self, *, shapes: bool) -> None:
        self._made.clear()
        if shapes:
            self._names_made = self._shapes_made = 0
        self._core.tp_chrome_forget(self._events, shapes)

    def line(self, text: bytes) -> None:
        checked(self._core.tp_chrome_line(self._events, text, len(text)))

    def flush(self) -> None:
        lines = ctypes.c_void_p()
        size = self._core.tp_chrome_take(self._events, ctypes.byref(lines))
        self.put(ctypes.string_at(lines, size) if size else b"")

    def write(self, drawn: Drawn) -> None:
        self._make_ready(drawn.book)
        view = DrawnView(drawn)
        ops, is_odd = ctypes.byref(view.ops), ctypes.c_int()
        tracks = _address_of(self._rows, drawn.book.tracks)
        given = (ctypes.byref(view.given), drawn.book.tables.reader, tracks)
        at, count = 0, len(view.order)
        while at < count:
            write = self._core.tp_chrome_write
            at = checked(write(self._events, ops, *given, at, count, ctypes.byref(is_odd)))
            if not is_odd.value:
                self.flush()
                continue
            op = view.op(at)
            text = self._odd_text(drawn, op)
            if text is not None:
                place = int(view.order[at])
                checked(self._core.tp_chrome_one(self._events, ops, tracks, place, text, len(text)))
                at += 1

    def _odd_text(self, drawn: Drawn, op: Op) -> bytes | None:
        """The members that an operation shows, or None where the core has all texts for them now."""
        event, mark = op[4], op[5]
        if event > FIRST_EXTRA and drawn.events is not None:
            number = int(drawn.events.args[event])
            if number not in self._made:
                self._made.add(number)
                args = drawn.book.tables.args(number)
                shadows = sum(1 << at for at, name in enumerate(SHOWN) if name in args)
                self._give(ARGS, number, members(args), shadows)
                return None
        return members(drawn.args_of(event, mark))

    def warps(self, changes: WarpChanges) -> None:
        ids, kernels = self._gpus.setdefault(changes.id, (array("i"), array("q")))
        for kernel in changes.kernels[len(kernels) // 4 :]:
            self.give(KERNELS, self._kernel_count, orjson.dumps(kernel.name)[:-1])
            kernels.extend((self._kernel_count, kernel.warps, kernel.grid_x, kernel.grid_y))
            self._kernel_count += 1
        view, tracks = WarpsView(changes), _address_of(ids, changes.tracks)
        counter = changes.counter.id if changes.counter_row >= 0 else 0
        refs = ctypes.byref(view.changes), ctypes.byref(view.slices)
        columns = (*refs, kernels.buffer_info()[0], tracks)
        at, count = 0, len(changes.ts_ns)
        while at < count:
            at = checked(self._core.tp_chrome_warps(self._events, *columns, counter, at, count))
            self.flush()


# Ids of groups that are not processes: above all process ids of Linux (at most 2^22).
_NO_PROCESS = 1 << 23
# Times count from an hour before the start. Perfetto drops negative times, but events may come before the
# start: a call may be recorded by its end and length only, and text that several threads printed is not in
# order.
_BEFORE_START_NS = 3_600 * 1_000_000_000


class ChromeWriter:
    """Writes each batch as it comes."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self._base_ns = max(0, info.start.get("trace_ns", 0) - _BEFORE_START_NS)
        other = {"trace_clock": info.trace_clock, "base_ns": self._base_ns, "start": info.start}
        head = {"displayTimeUnit": "ns", "otherData": other}
        self._out.write(json_text(head)[:-1] + b',"traceEvents":[\n')
        core = library()
        self._events = (
            ChromeEvents(out, self._base_ns) if core is None else NativeChromeEvents(core, out, self._base_ns)
        )
        self._tracks: dict[int, Track] = {}
        self._named: dict[int, list[Track]] = {}
        """The tracks whose names include a group's name, by the group's id."""

    def write(self, drawn: Drawn) -> None:
        """Write what a batch draws."""
        for track in drawn.declared:
            for line in self._declare(track):
                self._events.line(line)
        if len(drawn.order):
            self._events.write(drawn)
        for warps in drawn.warps:
            self._events.warps(warps)
        self._events.flush()

    def forget(self, *, shapes: bool) -> None:
        """Forget all arguments, and all names and `shapes`: they have new numbers now."""
        self._events.forget(shapes=shapes)

    def _declare(self, track: Track) -> list[bytes]:
        """The metadata events of a track: the name and order of its process and of itself."""
        self._tracks[track.id] = track
        root = track
        while root.parent is not None:
            root = root.parent
        pid = root.pid or _NO_PROCESS + root.id
        if track.parent is None:
            named = [self._metadata("process_name", pid, 0, name=track.name)] if track.is_named else []
            return [*named, self._metadata("process_sort_index", pid, 0, sort_index=track.rank)]
        if track.kind not in ("slices", "counter"):  # a thread has a new name or place
            return [line for one in self._named.get(track.id, ()) for line in self._described(pid, one)]
        self._events.give_track(track, pid)
        self._named.setdefault(track.parent.id, []).append(track)
        return self._described(pid, track)

    def _described(self, pid: int, track: Track) -> list[bytes]:
        """The name of a track, with those of its groups, and its place under its top: the rank of its group,
        then its own.
        """
        path: list[Track] = []
        at: Track | None = track
        while at is not None and at.parent is not None:
            path.insert(0, self._tracks[at.id])
            at = at.parent
        own = path[-1].rank if len(path) > 1 else 0
        order = min(path[0].rank, (1 << 22) - 1) << 9 | min(own, 511)
        return [
            self._metadata("thread_name", pid, track.id, name=" / ".join(one.label() for one in path)),
            self._metadata("thread_sort_index", pid, track.id, sort_index=order),
        ]

    @staticmethod
    def _metadata(kind: str, pid: int, tid: int, **args: object) -> bytes:
        return json_text({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def finish(self) -> None:
        """Close the array and the object."""
        self._out.write(b"\n]}\n")
