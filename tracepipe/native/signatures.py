"""The types of the core's functions, whose C files describe what they do."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any


def _pointers(name: str, *fields: str) -> type[Structure]:
    """A structure that has a pointer for each of these columns."""
    return type(name, (Structure,), {"_fields_": [(field, c_void_p) for field in fields]})


Columns = _pointers("Columns", "ts", "shape", "args", "dur", "launch", "stack", "index")
WarpLines = _pointers("WarpLines", "done", "ts", "launch", "rest", "counts")
Batches = _pointers(
    "Batches", "base", "warps", "exits", "has", "entry_ns", "exit_ns", "sm", "slot", "entry_clk", "exit_clk",
    "exit_count",
)  # fmt: skip
Ops = _pointers("Ops", "kind", "mark", "row", "name", "event", "ts", "flow", "flow2", "slice_id", "parent")
Events = _pointers("Events", "ts", "dur", "launch", "bound", "shape")
Starts = _pointers("Starts", "place", "launch", "ts", "bound", "done", "flow")
Shapes = _pointers("Shapes", "row", "name", "has_dur", "phase", "takes_flow", "has_launch")
SortedColumns = _pointers("SortedColumns", "ts", "rank", "dur", "number", "second_end", "first_end", "first")
Drawn = _pointers("Drawn", "order", "kind", "mark", "row", "name", "event", "ts", "flow", "flow2", "value")
Given = _pointers("Given", "shape", "args", "launch", "source", "line")
Changes = _pointers("Changes", "ts", "value", "mask", "slice", "kind")
Slices = _pointers(
    "Slices", "number", "cycles", "source", "exits", "lanes", "flow", "row", "kernel", "unclosed"
)
Spent = _pointers("Spent", "stretch", "dur", "call", "syscall", "state")
Switches = _pointers("Switches", "ts", "shape", "args", "kind", "cpu", "tid")

_TEXT = POINTER(c_void_p)
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tp_reader_new": (c_void_p, [c_uint64]),
    "tp_reader_free": (None, [c_void_p]),
    "tp_read_lines": (
        c_int64,
        [c_void_p, c_char_p, c_int64, POINTER(c_int64), POINTER(Columns), POINTER(c_int64), c_int64],
    ),
    "tp_reader_count": (c_int64, [c_void_p, c_int]),
    "tp_reader_bytes": (c_int64, [c_void_p, c_int]),
    "tp_reader_text": (c_int64, [c_void_p, c_int, c_int64, _TEXT]),
    "tp_reader_number": (c_int64, [c_void_p, c_int, c_char_p, c_int64]),
    "tp_reader_numbers": (c_int, [c_void_p, c_int, c_char_p, c_void_p, c_int64, c_void_p]),
    "tp_reader_keep": (c_int64, [c_void_p, c_int, c_void_p, c_int64]),
    "tp_ring_new": (c_void_p, [c_int, c_int64, c_int]),
    "tp_ring_free": (None, [c_void_p]),
    "tp_ring_copy": (c_int64, [c_void_p, c_int64, c_void_p, c_int64]),
    "tp_ring_leave": (c_int, [c_void_p, c_int64, c_int64]),
    "tp_ring_follow": (None, [c_void_p, c_int64, c_int64]),
    "tp_ring_end": (None, [c_void_p]),
    "tp_ring_left": (c_int64, [c_void_p]),
    "tp_ring_made": (c_int64, [c_void_p]),
    "tp_object_size": (c_int64, [c_char_p, c_int64]),
    "tp_batch_new": (c_void_p, []),
    "tp_batch_free": (None, [c_void_p]),
    "tp_batch_read": (None, [c_void_p, c_char_p, c_int64, c_void_p, c_void_p, POINTER(WarpLines)]),
    "tp_batch_column": (c_int64, [c_void_p, c_int, _TEXT]),
    "tp_batch_rest": (c_int64, [c_void_p, _TEXT]),
    "tp_nest_new": (c_void_p, [c_int32]),
    "tp_nest_free": (None, [c_void_p]),
    "tp_nest_row": (c_int64, [c_void_p, c_int32, c_int32]),
    "tp_nest_forget_rows": (None, [c_void_p]),
    "tp_nest_above": (None, [c_void_p, c_int32, c_int32, c_int32, c_int]),
    "tp_nest_count": (c_int64, [c_void_p, c_int]),
    "tp_nest_base": (c_int32, [c_void_p, c_int32]),
    "tp_nest_early": (c_int64, [c_void_p, c_void_p, c_int64]),
    "tp_nest_names": (None, [c_void_p, c_void_p]),
    "tp_nest_rename": (None, [c_void_p, c_void_p]),
    "tp_nest_most": (c_int64, [c_void_p, c_int64]),
    "tp_nest_events": (
        c_int64,
        [
            *[c_void_p, POINTER(Events), POINTER(Shapes), POINTER(Starts)],
            *[c_int64, c_int64, c_int64, POINTER(Ops), c_int64],
        ],
    ),
    "tp_nest_one": (
        c_int64,
        [c_void_p, c_int32, c_int, c_int64, c_int64, c_int32, c_int32, POINTER(Ops), c_int64],
    ),
    "tp_nest_overlap_row": (c_int64, [c_void_p, c_int32, c_int64, c_int64]),
    "tp_nest_settle": (None, [c_void_p, POINTER(Ops), c_int64]),
    "tp_nest_close": (c_int64, [c_void_p, c_int32, c_int64, POINTER(Ops), c_int64]),
    "tp_states": (
        c_int64,
        [c_void_p, c_void_p, c_int64, c_void_p, c_void_p, POINTER(Spent), c_int64, POINTER(c_int64)],
    ),
    "tp_order": (c_int, [c_void_p, c_int64, c_void_p]),
    "tp_sm_clocks_new": (c_void_p, []),
    "tp_sm_clocks_free": (None, [c_void_p]),
    "tp_sm_clocks_refine": (c_int, [c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 9]),
    "tp_sm_clocks_refine_all": (c_int, [c_void_p, c_int64, POINTER(Batches), *[c_void_p] * 3]),
    "tp_records_needed": (
        c_int64,
        [c_char_p, c_int64, c_uint32, c_char_p, c_char_p, c_int64, c_char_p, c_int64, c_void_p],
    ),
    "tp_records_count": (None, [c_char_p, c_int64, c_int64, c_void_p, c_void_p]),
    "tp_objects": (c_int64, [c_char_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64]),
    "tp_events_new": (c_void_p, [c_uint64, c_uint64]),
    "tp_events_free": (None, [c_void_p]),
    "tp_events_take": (
        c_int64,
        [c_void_p, c_void_p, c_char_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p],
    ),
    "tp_events_kind": (c_int64, [c_void_p, *[c_int] * 4, POINTER(c_char_p), POINTER(c_int64)]),
    "tp_events_rule": (c_int64, [c_void_p, c_char_p, c_int64, c_char_p, c_int64]),
    "tp_events_bytes": (c_int64, [c_void_p]),
    "tp_events_forget": (None, [c_void_p]),
    "tp_sorted_new": (c_void_p, [c_uint64, c_int64, c_int64]),
    "tp_sorted_free": (None, [c_void_p]),
    "tp_sorted_add": (
        c_int,
        [c_void_p, c_int64, c_int, c_int64, c_int64, c_char_p, c_int64, c_char_p, c_int64],
    ),
    "tp_sorted_count": (c_int64, [c_void_p]),
    "tp_sorted_run": (c_int64, [c_void_p, c_int, c_int64]),
    "tp_sorted_merge": (c_int, [c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64]),
    "tp_sorted_next": (c_int64, [c_void_p, POINTER(SortedColumns), *[c_int64] * 3, c_void_p]),
    "tp_sorted_fold": (c_int64, [c_void_p, c_int64]),
    "tp_sorted_texts": (c_int64, [c_void_p, c_int, _TEXT]),
    "tp_ranges_nest": (c_int64, [c_int64, *[c_void_p] * 5]),
    "tp_warps_new": (c_void_p, []),
    "tp_warps_free": (None, [c_void_p]),
    "tp_warps_take": (c_int, [c_void_p, c_int64, c_int64, *[c_void_p] * 6]),
    "tp_warps_running": (
        c_int64,
        [c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, POINTER(c_int64)],
    ),
    "tp_perfetto_new": (c_void_p, [c_uint64, c_int32, c_int32, c_int64]),
    "tp_perfetto_free": (None, [c_void_p]),
    "tp_perfetto_set": (c_int, [c_void_p, c_int, c_int64, c_char_p, c_int64]),
    "tp_perfetto_forget": (None, [c_void_p, c_int]),
    "tp_perfetto_intern": (c_int64, [c_void_p, c_int, c_char_p, c_int64]),
    "tp_perfetto_args": (c_int, [c_void_p, c_int64, c_void_p, c_int64]),
    "tp_perfetto_packet": (c_int, [c_void_p, c_int64, c_int, c_char_p, c_int64]),
    "tp_perfetto_write": (c_int64, [c_void_p, POINTER(Drawn), POINTER(Given), c_void_p, c_int64, c_int64]),
    "tp_perfetto_take": (c_int64, [c_void_p, _TEXT]),
    "tp_perfetto_warps": (
        c_int64,
        [c_void_p, POINTER(Changes), POINTER(Slices), c_void_p, c_int32, c_int64, c_int64, c_int64],
    ),
    "tp_perfetto_switches": (c_int64, [c_void_p, POINTER(Switches), c_void_p, c_int64, c_int64, c_int64]),
    "tp_chrome_new": (c_void_p, [c_int64]),
    "tp_chrome_free": (None, [c_void_p]),
    "tp_chrome_set": (c_int, [c_void_p, c_int, c_int64, c_char_p, c_int64, c_int]),
    "tp_chrome_forget": (None, [c_void_p]),
    "tp_chrome_take": (c_int64, [c_void_p, _TEXT]),
    "tp_chrome_line": (c_int, [c_void_p, c_char_p, c_int64]),
    "tp_chrome_one": (c_int, [c_void_p, POINTER(Drawn), c_void_p, c_int64, c_char_p, c_int64]),
    "tp_chrome_write": (
        c_int64,
        [c_void_p, POINTER(Drawn), POINTER(Given), c_void_p, c_void_p, c_int64, c_int64, POINTER(c_int)],
    ),
    "tp_chrome_warps": (
        c_int64,
        [c_void_p, POINTER(Changes), POINTER(Slices), c_void_p, c_void_p, c_int32, c_int64, c_int64],
    ),
}


def declare(core: ctypes.CDLL) -> ctypes.CDLL:
    """Set the types of each function. Raises AttributeError where one is missing, as in an older core."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core
