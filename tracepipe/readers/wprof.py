"""Reads the JSON Lines of wprof (`--json-trace`).

    {"version":"3.1","dur":1.000000000,"timer_freq_hz":997,…,"stack_cnt":42,"pmus":["cycles"]}
    {"id":42,"frames":["[U] main+0x1a","[K] schedule+0x8e"],"srcs":["main.c:42",""]}      stack_cnt of them
    {"ts":0.500123456,"t":"switch","prev":{…},"next":{…},"cpu":3,…}                       in the order of `ts`

Times are seconds since the start of the session, on a clock that the header does not name. `ts` of a slice is
its end, so events are sorted by their starts, in temporary files without names if there are many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO, Final

import orjson

from tracepipe.event.columns import SourceBatch, no_events
from tracepipe.event.model import Problem, Record, new_header
from tracepipe.event.tables import packed
from tracepipe.readers.lines import BOM, TOO_DEEP, chunks_of_lines, is_too_deep, not_json
from tracepipe.readers.recording import Recording
from tracepipe.readers.sorted_events import RowColumns, batches_of
from tracepipe.readers.wprof_events import Unusable, WprofEvents
from tracepipe.units import counted

CLOCK: Final = "trace"
_CHUNK_BYTES: Final = 1 << 18
# The most bytes of stacks that are kept. A session has some thousand stacks of some 2 KB.
_STACK_BYTES_MAX: Final = 4 << 20
_FRAMES_MAX: Final = 128
_KEYS: Final = (b'"timer_freq_hz"', b'"stack_cnt"')


class _Trace:
    """Turns one session into batches."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._in_columns = RowColumns()
        self.tables = self._in_columns.tables
        self._events = WprofEvents()
        self._stack_bytes = self._stacks_left_out = 0

    def batches(self) -> Iterator[SourceBatch]:
        """Batches with problems while lines are read, and then the events in the order of their starts."""
        for number, lines, offset_bytes, cut in chunks_of_lines(self._stream, _CHUNK_BYTES):
            problems = [
                Problem(at, *fault)
                for at, text in enumerate(lines, number)
                if (
                    fault := self._line(
                        at, text.removeprefix(BOM).strip(), cut and at == number + len(lines) - 1
                    )
                )
            ]
            yield SourceBatch(no_events(), problems=problems, offset_bytes=offset_bytes)
        in_order = self._events.sorted.rows.in_order()
        columns = (self._in_columns.columns(rows, rows.ts_ns) for rows in in_order)
        yield from batches_of(columns, [*self._names()], [], self._stated())

    def _line(self, number: int, text: bytes, cut: bool) -> tuple[str, str] | None:
        """Take a line. Return the field and what is wrong with it, or None."""
        if not text:
            return None
        try:
            line = orjson.loads(text)
        except orjson.JSONDecodeError as e:
            return "", "was cut off in the middle of the line" if cut else not_json(e)
        if type(line) is not dict:
            return "", "is not a JSON object"
        if is_too_deep(text, line):
            return "", TOO_DEEP
        if "t" not in line and "timer_freq_hz" in line:
            pmus = line.get("pmus")
            self._events.pmus = pmus if type(pmus) is list else []
            return None
        if "t" not in line and "frames" in line:
            return self._stack(line, len(text))
        try:
            self._events.take(line)
        except Unusable as e:
            return e.field, e.message
        return None

    def _stack(self, line: dict[str, Any], size_bytes: int) -> tuple[str, str] | None:
        id, frames, places = line.get("id"), line.get("frames"), line.get("srcs")
        if type(id) is not int:
            return "id", "is not an integer"
        if type(frames) is not list or not all(type(frame) is str for frame in frames):
            return "frames", "is not a list of strings"
        if self._stack_bytes + size_bytes > _STACK_BYTES_MAX:
            self._stacks_left_out += 1
            return None
        self._stack_bytes += size_bytes
        if type(places) is list and len(places) == len(frames):
            frames = [
                f"{frame} {place}" if place else frame for frame, place in zip(frames, places, strict=True)
            ]
        self._events.stacks[id] = packed(frames[-_FRAMES_MAX:])
        return None

    def _names(self) -> Iterator[Record]:
        for (pid, tid), name in self._events.names.items():
            yield {"type": "name", "pid": pid, "name": name} | ({} if tid is None else {"tid": tid})

    def _stated(self) -> Iterator[Problem]:
        stated = {
            "event|events refers|refer to a stack that is missing": self._events.without_stack,
            "stack|stacks is|are left out: there are more than can be kept": self._stacks_left_out,
            "task|tasks has|have a name that is left out: there are more than can be kept": (
                self._events.names_left_out
            ),
            "slice|slices began before the session: drawn from there (args.began_before_ns)": (
                self._events.early
            ),
        }
        for words, count in stated.items():
            if count:
                yield Problem(0, "", counted(count, words), skipped=False)


def sniff(head: bytes) -> bool:
    """Whether the first line is the header of wprof."""
    first = head.removeprefix(BOM).lstrip().partition(b"\n")[0]
    return first.startswith(b"{") and all(key in first for key in _KEYS)


def read(stream: BinaryIO) -> Recording:
    """Header and batches of such a stream."""
    trace = _Trace(stream)
    header = new_header(clock=CLOCK, clocks=[CLOCK], engine="wprof")
    return Recording(header, trace.batches(), trace.tables)
