"""Writes the table of CUDA calls that the eBPF tutorial's `cuda_events.bt` prints, for scripts that read it.

    TIME(ms)     PROCESS          PID          EVENT                DETAILS
    1234         my_cuda_app      12345        cudaMalloc           size=1048576 bytes
    1235         my_cuda_app      12345        cudaMalloc           returned=0 (success)

Times are whole milliseconds since the start of the trace. A call has a row for its entry, with its arguments,
and one for its exit. Calls that other calls make are left out, as that script sees only the program's own
calls: otherwise the bytes of a cudaMalloc would count again in its cuMemAlloc. Losses are rows in bpftrace's
words.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import BinaryIO, Final

from tracepipe.converters.line_writer import LineWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.bounded import put_bounded
from tracepipe.event.columns import TraceBatch
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import ADDRESS_KEYS, COPY_KINDS, SIZE_KEYS, direction_named
from tracepipe.printable import json_text, printable

_TITLES: Final = ("TIME(ms)", "PROCESS", "PID", "EVENT", "DETAILS")
_ROW: Final = "%-12s %-16s %-12s %-20s %s\n"
# The functions that the script hooks have such names. No function of another library has.
_CALL: Final = re.compile(r"cu[a-z]*[A-Z]\w*")
# The script prints the values of these arguments as addresses.
_HANDLES: Final = frozenset({"stream", "event", "function", "to", "from", *ADDRESS_KEYS})
_NAMES_MAX: Final = 1 << 14
_UNKNOWN: Final = "?"
_INSIDE = "call|calls inside others"
_NOT_CUDA = "call|calls outside of CUDA's libraries"
_INSTANTS = "call|calls without begin and end"


class TableWriter(LineWriter):
    """Writes events as they come."""

    loss = b"Lost %d events\n"
    what = "call|calls"

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        super().__init__(out, info)
        self._names = OrderedDict[tuple[int | None, int | None], str]()
        self._line(*_TITLES)

    def write_events(self, batch: TraceBatch, tables: Tables) -> None:
        """Write the events of a batch, on the trace's clock."""
        for _, ts_ns, dur_ns, shape, args in self._rows(batch, tables):
            if shape.comm and not shape.on_stream:
                name = printable(shape.comm).strip() or _UNKNOWN
                put_bounded(self._names, (shape.pid, shape.tid), name, _NAMES_MAX)
            if shape.type == "userspace":
                self._call(ts_ns, dur_ns, shape, tables, args)
        self._flush()

    def _left_out(self, shape: Shape) -> str:
        return "" if shape.type == "userspace" else f"{shape.type} event|events"

    def _call(self, ts_ns: int, dur_ns: int, shape: Shape, tables: Tables, args: int) -> None:
        """Write the part of a call that an event is: its entry, its exit, or both."""
        thread = shape.pid, shape.tid
        is_inside = self._is_inside(ts_ns, shape, thread)
        if shape.phase == "I":
            self._unwritten[_INSTANTS] += 1
        elif not _CALL.fullmatch(shape.name):
            self._unwritten[_NOT_CUDA] += shape.phase != "E"
        elif is_inside:
            self._unwritten[_INSIDE] += shape.phase != "E"
        else:
            details = tables.args(args)
            if shape.phase != "E":
                self._row(ts_ns, shape, _entry(details))
            if shape.phase != "B":
                result = details.get("result")
                is_known = isinstance(result, int)
                returned = f"{result} ({'error' if result else 'success'})" if is_known else "?"
                self._row(ts_ns + (dur_ns if shape.phase == "X" else 0), shape, f"returned={returned}")

    def _is_inside(self, ts_ns: int, shape: Shape, thread: tuple[int | None, int | None]) -> bool:
        """Whether a call is inside another one of its thread. Calls of unknown threads are not."""
        if shape.tid is None:
            return False
        if shape.phase == "E":
            begun = self._calls.end(thread, shape.name)
            return begun is not None and begun.depth > 0
        if shape.phase == "B":
            return self._calls.begin(thread, shape.name, ts_ns).depth > 0
        return self._calls.around(thread) is not None

    def _row(self, ts_ns: int, shape: Shape, details: str) -> None:
        known = self._names.get((shape.pid, shape.tid)) or self._names.get((shape.pid, shape.pid), _UNKNOWN)
        self._line(self._after_start_ns(ts_ns) // 1_000_000, known, shape.pid or 0, shape.name, details)

    def _line(self, *cells: object) -> None:
        self._lines.append((_ROW % cells).encode("utf-8", "backslashreplace"))


def _entry(args: Args) -> str:
    """The details of an entry: `size=4096 bytes, kind=1`."""
    parts = []
    size = next((args[key] for key in SIZE_KEYS if isinstance(args.get(key), int)), None)
    if size is not None:
        parts.append(f"size={size} bytes")
    direction = args.get("direction")
    if isinstance(direction, str) and (way := direction_named(direction)) in COPY_KINDS:
        parts.append(f"kind={COPY_KINDS.index(way)}")
    for key, value in args.items():
        if (key in SIZE_KEYS and size is not None) or key in ("direction", "result", "result_name"):
            continue
        if key in _HANDLES and isinstance(value, int):
            parts.append(f"{'ptr' if key in ADDRESS_KEYS else key}=0x{value:x}")
        elif value is not None:
            text = value if isinstance(value, str) else json_text(value)
            parts.append(f"{key}={printable(text).replace(', ', ',')}")
    return ", ".join(parts)
