"""The types of the core's functions, whose C files describe what they do."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any


def _pointers(name: str, *fields: str) -> type[Structure]:
    """A structure that has a pointer for each of these columns."""
    return type(name, (Structure,), {"_fields_": [(field, c_void_p) for field in fields]})


Columns = _pointers("Columns", "ts", "shape", "args", "dur", "launch", "stack", "index")
LayeredRows = _pointers("LayeredRows", "ts", "stem", "args", "dur", "index")
WarpLines = _pointers("WarpLines", "done", "ts", "launch", "rest", "counts")
Batches = _pointers(
    "Batches", "base", "warps", "exits", "has", "entry_ns", "exit_ns", "sm", "slot", "entry_clk", "exit_clk",
    "exit_count",
)  # fmt: skip
Ops = _pointers("Ops", "kind", "mark", "row", "name", "event", "ts", "flow", "flow2", "slice_id", "parent")
Events = _pointers("Events", "ts", "dur", "launch", "bound", "shape", "args")
Starts = _pointers("Starts", "place", "launch", "ts", "bound", "done", "flow")
Shapes = _pointers("Shapes", "row", "name", "has_dur", "phase", "takes_flow", "has_launch")
SortedColumns = _pointers("SortedColumns", "ts", "rank", "dur", "number", "second_end", "first_end", "first")
OrderRows = _pointers("OrderRows", "ts", "dur", "number", "second_end", "first", "key")
OrderMade = _pointers("OrderMade", "ts", "dur", "number", "second_end", "record")
Drawn = _pointers(
    "Drawn", "order", "kind", "mark", "row", "name", "event", "ts", "flow", "flow2", "value", "more"
)
Given = _pointers("Given", "shape", "args", "launch", "source", "line")
Changes = _pointers("Changes", "ts", "value", "mask", "slice", "kind")
Slices = _pointers(
    "Slices", "number", "cycles", "source", "exits", "lanes", "flow", "row", "kernel", "unclosed"
)
Graph = _pointers("Graph", "first", "target", "lag", "weight", "waits", "role", "gpu", "slow")
Spent = _pointers("Spent", "stretch", "dur", "call", "syscall", "state")
Switches = _pointers("Switches", "ts", "shape", "args", "kind", "cpu", "tid")

at, ptr, text, i32, i64, u32, u64 = POINTER, c_void_p, c_char_p, c_int32, c_int64, c_uint32, c_uint64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "tp_reader_new": (ptr, [u64]),
    "tp_reader_free": (None, [ptr]),
    "tp_read_lines": (i64, [ptr, text, i64, at(i64), at(Columns), at(i64), i64]),
    "tp_reader_count": (i64, [ptr, i32]),
    "tp_reader_bytes": (i64, [ptr, i32]),
    "tp_reader_text": (i64, [ptr, i32, i64, at(ptr)]),
    "tp_reader_texts": (i64, [ptr, i32, ptr, at(ptr)]),
    "tp_reader_number": (i64, [ptr, i32, text, i64]),
    "tp_reader_numbers": (i32, [ptr, i32, text, ptr, i64, ptr]),
    "tp_reader_keep": (i64, [ptr, i32, ptr, i64]),
    "tp_layered_new": (ptr, [u64]),
    "tp_layered_free": (None, [ptr]),
    "tp_layered_forget": (None, [ptr]),
    "tp_layered_stem": (i64, [ptr, i64, at(ptr), ptr]),
    "tp_layered_set": (i32, [ptr, ptr, i64, text, i64]),
    "tp_layered_read": (i64, [ptr, ptr, text, i64, at(i64), i64, at(LayeredRows), i64, i64]),
    "tp_layered_unwrap": (i64, [text, i64, ptr, at(i32)]),
    "tp_layered_forget_calls": (None, [ptr]),
    "tp_layered_note": (i64, [ptr, *[ptr] * 5, *[i64] * 4]),
    "tp_ring_new": (ptr, [i32, i64, i32]),
    "tp_ring_free": (None, [ptr]),
    "tp_ring_copy": (i64, [ptr, i64, ptr, i64]),
    "tp_ring_leave": (i32, [ptr, i64, i64]),
    "tp_ring_follow": (None, [ptr, i64, i64]),
    "tp_ring_end": (None, [ptr]),
    "tp_ring_left": (i64, [ptr]),
    "tp_ring_made": (i64, [ptr]),
    "tp_object_size": (i64, [text, i64]),
    "tp_batch_new": (ptr, []),
    "tp_batch_free": (None, [ptr]),
    "tp_batch_read": (None, [ptr, text, i64, ptr, ptr, at(WarpLines)]),
    "tp_batch_column": (i64, [ptr, i32, at(ptr)]),
    "tp_batch_rest": (i64, [ptr, at(ptr)]),
    "tp_nest_new": (ptr, [i32]),
    "tp_nest_free": (None, [ptr]),
    "tp_nest_row": (i64, [ptr, i32, i32]),
    "tp_nest_forget_rows": (None, [ptr]),
    "tp_nest_above": (None, [ptr, i32, i32, i32, i32]),
    "tp_nest_count": (i64, [ptr, i32]),
    "tp_nest_more": (None, [ptr, ptr]),
    "tp_nest_base": (i32, [ptr, i32]),
    "tp_nest_early": (i64, [ptr, ptr, i64]),
    "tp_nest_names": (None, [ptr, ptr]),
    "tp_nest_rename": (None, [ptr, ptr]),
    "tp_nest_most": (i64, [ptr, i64]),
    "tp_nest_horizon": (None, [ptr, i64]),
    "tp_nest_events": (i64, [ptr, at(Events), at(Shapes), at(Starts), i64, i64, i64, at(Ops), i64]),
    "tp_nest_one": (i64, [ptr, i32, i32, i64, i64, i32, i32, at(Ops), i64]),
    "tp_nest_overlap_row": (i64, [ptr, i32, i64, i64]),
    "tp_nest_settle": (None, [ptr, at(Ops), i64]),
    "tp_nest_close": (i64, [ptr, i32, i64, at(Ops), i64]),
    "tp_replay": (i64, [at(Graph), i64, i64, ptr, ptr]),
    "tp_states": (i64, [ptr, ptr, i64, ptr, ptr, at(Spent), i64, at(i64)]),
    "tp_order": (i32, [ptr, i64, ptr]),
    "tp_sm_clocks_new": (ptr, []),
    "tp_sm_clocks_free": (None, [ptr]),
    "tp_sm_clocks_refine_all": (i32, [ptr, i64, at(Batches), *[ptr] * 3]),
    "tp_records_needed": (i64, [text, i64, u32, text, text, i64, text, i64, ptr]),
    "tp_records_count": (None, [text, i64, i64, ptr, ptr]),
    "tp_objects": (i64, [text, i64, ptr, ptr, ptr, i64]),
    "tp_events_new": (ptr, [u64]),
    "tp_events_free": (None, [ptr]),
    "tp_events_take": (i64, [ptr, ptr, text, ptr, ptr, i64, i64, ptr, ptr]),
    "tp_events_kind": (i64, [ptr, *[i32] * 4, at(text), at(i64)]),
    "tp_events_rule": (i64, [ptr, text, i64, text, i64]),
    "tp_events_bytes": (i64, [ptr]),
    "tp_events_forget": (None, [ptr]),
    "tp_packets_new": (ptr, [u64]),
    "tp_packets_free": (None, [ptr]),
    "tp_packets_state": (ptr, [ptr]),
    "tp_packets_sequence": (ptr, [ptr, u64]),
    "tp_packets_name": (i64, [ptr, u64, u64, at(ptr)]),
    "tp_packets_keep": (i32, [ptr, ptr, u64, u64, text, i64]),
    "tp_packets_forget": (None, [ptr, ptr]),
    "tp_packets_rank": (i64, [ptr, u64, i32, i64, i32]),
    "tp_packets_counter": (i32, [ptr, u64, i32, i64]),
    "tp_packets_take": (i64, [ptr, ptr, text, i64, i64, ptr]),
    "tp_order_new": (ptr, [u64, i64]),
    "tp_order_free": (None, [ptr]),
    "tp_order_add_key": (i64, [ptr, *[i32] * 5, text, i64, i64]),
    "tp_order_set_record": (None, [ptr, *[i32] * 3]),
    "tp_order_set_variant": (i32, [ptr, i32]),
    "tp_order_forget": (None, [ptr]),
    "tp_order_open": (i64, [ptr, at(ptr)]),
    "tp_order_counted": (None, [ptr, ptr]),
    "tp_order_flow": (i32, [ptr, i32, i64, ptr]),
    "tp_order_part": (i64, [ptr, at(ptr)]),
    "tp_order_add": (i32, [ptr, at(OrderMade), *[i64] * 3, i32, text, i64]),
    "tp_order_take": (i64, [ptr, at(OrderRows), text, i64, i64, at(OrderMade), ptr]),
    "tp_order_made_rows": (i64, [ptr, at(ptr), at(i64)]),
    "tp_sorted_new": (ptr, [u64, i64, i64]),
    "tp_sorted_free": (None, [ptr]),
    "tp_sorted_add": (i32, [ptr, i64, i32, i64, i64, text, i64, text, i64]),
    "tp_sorted_count": (i64, [ptr]),
    "tp_sorted_run": (i64, [ptr, i32, i64]),
    "tp_sorted_merge": (i32, [ptr, i32, ptr, ptr, i64, i64]),
    "tp_sorted_next": (i64, [ptr, at(SortedColumns), *[i64] * 3, ptr]),
    "tp_sorted_fold": (i64, [ptr, i64]),
    "tp_sorted_texts": (i64, [ptr, i32, at(ptr)]),
    "tp_ranges_nest": (i64, [i64, *[ptr] * 5]),
    "tp_warps_new": (ptr, []),
    "tp_warps_free": (None, [ptr]),
    "tp_warps_take": (i32, [ptr, i64, i64, *[ptr] * 6]),
    "tp_warps_running": (i64, [i64, ptr, ptr, i64, ptr, ptr, at(i64)]),
    "tp_perfetto_new": (ptr, [u64, i32, i32, i64]),
    "tp_perfetto_free": (None, [ptr]),
    "tp_perfetto_set": (i32, [ptr, i32, i64, text, i64]),
    "tp_perfetto_forget": (None, [ptr, i32]),
    "tp_perfetto_intern": (i64, [ptr, i32, text, i64]),
    "tp_perfetto_args": (i32, [ptr, i64, ptr, i64]),
    "tp_perfetto_packet": (i32, [ptr, i64, i32, text, i64]),
    "tp_perfetto_write": (i64, [ptr, at(Drawn), at(Given), ptr, i64, i64]),
    "tp_perfetto_take": (i64, [ptr, at(ptr)]),
    "tp_perfetto_warps": (i64, [ptr, at(Changes), at(Slices), ptr, i32, i64, i64, i64]),
    "tp_perfetto_switches": (i64, [ptr, at(Switches), ptr, i64, i64, i64]),
    "tp_chrome_new": (ptr, [i64]),
    "tp_chrome_free": (None, [ptr]),
    "tp_chrome_set": (i32, [ptr, i32, i64, text, i64, i32]),
    "tp_chrome_forget": (None, [ptr, i32]),
    "tp_chrome_take": (i64, [ptr, at(ptr)]),
    "tp_chrome_line": (i32, [ptr, text, i64]),
    "tp_chrome_one": (i32, [ptr, at(Drawn), ptr, i64, text, i64]),
    "tp_chrome_write": (i64, [ptr, at(Drawn), at(Given), ptr, ptr, i64, i64, at(i32)]),
    "tp_chrome_warps": (i64, [ptr, at(Changes), at(Slices), ptr, ptr, i32, i64, i64]),
}


def declare(core: ctypes.CDLL) -> ctypes.CDLL:
    """Set the types of each function. Raises AttributeError where one is missing, as in an older core."""
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core
