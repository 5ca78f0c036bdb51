"""Writes Chrome's JSON trace, for chrome://tracing, Perfetto and Speedscope.

The format has processes and threads and nothing below: each track becomes a "thread" that bears the names
of its parents, and each group at the top a "process". Times are µs; they count from the trace's start,
as a double holds nanoseconds of the time since boot but not of the time since 1970.
Source: the "Trace Event Format" document of the Chromium project.
"""

from __future__ import annotations

import re
from typing import Any, BinaryIO

import orjson

from tracepipe.converters.writer import TraceInfo
from tracepipe.event.tables import Args
from tracepipe.layout.timeline import COUNTER, END, INSTANT, Drawn, Track

# Ids of groups that are no process: beyond any process id of Linux (at most 2^22).
_NO_PROCESS = 1 << 23
# Times count from an hour before the start: Perfetto drops negative ones, a call may be known by its end and
# length alone, and text that several threads printed has its earliest event anywhere.
_BEFORE_START_NS = 3_600 * 1_000_000_000
_INT_MAX = (1 << 63) - 1
# Speedscope keeps begins and ends in two queues, and at one time takes an end first: one of a slice without
# length it never finds. So what begins where something ended, or ends where it began, is a little later in
# the decimals: less than half a nanosecond in all, which rounding to nanoseconds takes away, and enough for a
# double (µs from an hour before the start) over the first hours.
_APART_PS = 2
_APART_MAX = 249
# A string that ends in a backslash: Perfetto v52 takes the quote behind it for an escaped one, and refuses
# the whole file. Of backslashes in even number before a quote the last pair is written by its code point.
_ENDS_IN_BACKSLASH = re.compile(rb'(?<!\\)((?:\\\\)*)\\\\"')


def _readable(text: bytes) -> bytes:
    """JSON text in a form that every viewer reads."""
    # Most texts have no backslash at all, and to look for one byte is thirty times as fast as for three.
    if b"\\" in text and b'\\\\"' in text:
        return _ENDS_IN_BACKSLASH.sub(rb'\1\\u005c"', text)
    return text


def _args_json(args: Args) -> bytes:
    """`args` in JSON, with integers that Perfetto would read as -1, beyond 63 bits, as text."""
    try:
        return orjson.dumps(args, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_STRICT_INTEGER)
    except orjson.JSONEncodeError:  # an integer of over 53 bits: most of them are times, and fit
        return orjson.dumps(_with_texts(args), option=orjson.OPT_NON_STR_KEYS)


def _with_texts(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_texts(item) for item in value]
    return str(value) if isinstance(value, int) and value > _INT_MAX else value


class _Row:
    """A track as the format has it, and how its begins and ends at one nanosecond are kept apart."""

    __slots__ = ("_at_ns", "_ended", "_step", "category", "name", "place")

    def __init__(self, place: bytes, category: bytes, name: str) -> None:
        self.place, self.category, self.name = place, category, name
        self._at_ns, self._step, self._ended = -1, 0, False

    def step(self, kind: int, ts_ns: int) -> int:
        """How often begins and ends took turns on this track at that nanosecond before."""
        if kind == INSTANT:
            return self._step if ts_ns == self._at_ns else 0
        if ts_ns != self._at_ns:
            self._at_ns, self._ended, self._step = ts_ns, kind == END, 0
        elif self._ended != (kind == END):
            self._ended = not self._ended
            self._step += 1
        return min(self._step, _APART_MAX)


class ChromeWriter:
    """Writes what is drawn as it comes."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self._base_ns = max(0, info.start.get("trace_ns", 0) - _BEFORE_START_NS)
        other = {"trace_clock": info.trace_clock, "base_ns": self._base_ns, "start": info.start}
        head = {"displayTimeUnit": "ns", "otherData": other}
        self._out.write(_readable(orjson.dumps(head))[:-1] + b',"traceEvents":[\n')
        self._first = True
        self._rows: dict[int, _Row] = {}
        self._tracks: dict[int, Track] = {}
        self._named: dict[int, list[Track]] = {}
        """The tracks that bear a group's name, by its id."""

    def write(self, drawn: Drawn) -> None:
        """Write what a batch draws."""
        lines: list[bytes] = []
        for track in drawn.declared:
            lines += self._declare(track)
        for kind, track, ts_ns, name, args, flows in drawn.items():
            row = self._rows[track.id]
            place, when = row.place, self._microseconds(ts_ns)
            if kind == COUNTER:
                lines.append(
                    b'{"ph":"C","name":%b,%b,"ts":%b,"args":{"value":%d}}'
                    % (orjson.dumps(track.name), place, when, name)
                )
                continue
            if step := row.step(kind, ts_ns):
                when += b"%03d" % (step * _APART_PS)
            shown = b',"args":' + _args_json(args) if args else b""
            if kind == END:
                # The name again: Speedscope ends nothing by another name.
                lines.append(b'{"ph":"E","name":%b,%b,"ts":%b%b}' % (orjson.dumps(name), place, when, shown))
                continue
            phase = b'i","s":"t' if kind == INSTANT else b"B"
            lines.append(
                b'{"ph":"%b","name":%b%b,%b,"ts":%b%b}'
                % (phase, orjson.dumps(name), row.category, place, when, shown)
            )
            for flow in flows:
                lines.append(self._flow(flow, place, when))
        self._put(lines)

    def forget(self) -> None:
        """Nothing here has numbers."""

    def _put(self, lines: list[bytes]) -> None:
        if lines:
            self._out.write((b"" if self._first else b",\n") + _readable(b",\n".join(lines)))
            self._first = False

    def _microseconds(self, ts_ns: int) -> bytes:
        """µs since the base, with the nanoseconds as three decimals. What is older than that stands at it."""
        ns = ts_ns - self._base_ns
        if ns < 0:
            ns = 0
        return b"%d.%03d" % (ns // 1000, ns % 1000)

    @staticmethod
    def _flow(flow: int, place: bytes, when: bytes) -> bytes:
        """A step of an arrow, bound to the slice that was just begun."""
        return b'{"ph":"%b","cat":"flow","name":"flow","id":%d,%b,"ts":%b,"bp":"e"}' % (
            b"s" if flow < 0 else b"t",
            abs(flow),
            place,
            when,
        )

    def _declare(self, track: Track) -> list[bytes]:
        """The metadata events of a track: the name and order of its process and of itself."""
        self._tracks[track.id] = track
        root = track
        while root.parent is not None:
            root = root.parent
        pid = root.pid or _NO_PROCESS + root.id
        if track.parent is None:
            return [
                self._metadata("process_name", pid, 0, name=track.name),
                self._metadata("process_sort_index", pid, 0, sort_index=track.rank),
            ]
        if track.kind not in ("slices", "counter"):  # a thread has a new name
            return [self._thread_name(pid, one) for one in self._named.get(track.id, ())]
        self._rows[track.id] = _Row(
            b'"pid":%d,"tid":%d' % (pid, track.id),
            b',"cat":%b' % orjson.dumps(track.category) if track.category else b"",
            track.name,
        )
        self._named.setdefault(track.parent.id, []).append(track)
        return [
            self._thread_name(pid, track),
            self._metadata("thread_sort_index", pid, track.id, sort_index=self._order(track)),
        ]

    def _thread_name(self, pid: int, track: Track) -> bytes:
        names: list[str] = []
        at: Track | None = track
        while at is not None and at.parent is not None:
            names.insert(0, self._tracks[at.id].label())
            at = at.parent
        return self._metadata("thread_name", pid, track.id, name=" / ".join(names))

    @staticmethod
    def _order(track: Track) -> int:
        """The rank of a track under the top, its parent's first: a group and a track in it, no deeper."""
        ranks = []
        at: Track | None = track
        while at is not None and at.parent is not None:
            ranks.append(at.rank)
            at = at.parent
        group, own = (ranks[-1], ranks[0]) if len(ranks) > 1 else (ranks[0], 0)
        return min(group, (1 << 22) - 1) << 9 | min(own, 511)

    @staticmethod
    def _metadata(kind: str, pid: int, tid: int, **args: Any) -> bytes:
        return orjson.dumps({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def finish(self) -> None:
        """Close the array and the object."""
        self._out.write(b"\n]}\n")
