"""The tables of a store. One row of a table of spans is a slice or an instant."""

from __future__ import annotations

from typing import Final

from tracepipe.event.model import LAYERS
from tracepipe.store.samples import SERIES

VERSION: Final = 6
"""Goes up whenever a table or a rule that fills one changes: stores of another version are made again."""
FRAMES: Final = tuple(layer for layer in LAYERS if layer != "gpu_warp")  # warps have separate columns
"""The tables of spans, and `gpu_thread`."""
GROUPS: Final = tuple(name for name in FRAMES if name not in ("gpu_kernel", "gpu_thread"))
"""The groups of layers whose events nest together: kernels nest with the copies on their stream."""

KINDS: Final = ("span", "instant", "no_begin", "from_duration", "unclosed")
"""The kinds of rows of tables of spans.

span: begin and end are known. instant: no length. no_begin: an end without a begin, drawn as an instant.
from_duration: an end without a begin, whose duration gives the begin. unclosed: a begin without an end;
`end_ns` is the end of its caller or of the recording.
"""
SPAN, INSTANT, NO_BEGIN, FROM_DURATION, UNCLOSED = range(len(KINDS))

SPANS: Final = {
    "id": "INTEGER",  # from 0, in the order of start, then depth
    "start_ns": "BIGINT",
    "end_ns": "BIGINT",  # of an instant: its start
    "kind": "UTINYINT",  # an index into KINDS
    "depth": "INTEGER",
    "parent": "INTEGER",  # the id of the innermost slice around it, -1 without one
    "top": "INTEGER",  # the id of the outermost slice around it, its own without one
    "lane": "UTINYINT",  # 0, or the number of the overlap track
    "shape": "INTEGER",
    "args": "INTEGER",  # numbers of arguments, -1 without any
    "end_args": "INTEGER",
    "launch": "BIGINT",  # 0 where its shape has no launch
    "stack": "INTEGER",  # -1 without one
    "source_ns": "BIGINT",  # the times on the clock of the recording, -1 where that is the trace's
    "end_source_ns": "BIGINT",
    "bound_ns": "BIGINT",  # the error of the time, -1 without one
}
_INDEX: Final = {f"{what}_{axis}": "INTEGER" for what in ("block", "thread") for axis in "xyz"}
SHAPES: Final = {
    "shape": "INTEGER",
    "name_text": "INTEGER",  # numbers of texts, -1 without one
    "comm_text": "INTEGER",
    "domain_text": "INTEGER",
    "kernel_text": "INTEGER",  # the whole name of a kernel, where that is longer
    "layer": "INTEGER",  # an index into LAYERS, or the inverted number of a text
    "frame": "UTINYINT",  # an index into FRAMES
    "phase": "UTINYINT",
    "pid": "BIGINT",  # -1 without one; below that, an index into the numbers beyond 63 bits
    "tid": "BIGINT",
    "cpu": "BIGINT",
    "gpu": "BIGINT",
    "stream": "BIGINT",
    "range": "BIGINT",
    "grid_x": "BIGINT", "grid_y": "BIGINT", "grid_z": "BIGINT",  # -1 without one
    "block_x": "BIGINT", "block_y": "BIGINT", "block_z": "BIGINT",
    "has_dur": "BOOLEAN",
    "has_launch": "BOOLEAN",
}  # fmt: skip
IS_TIMED: Final = f"x.kind in ({SPAN}, {FROM_DURATION})"
"""Whether the length of a row `x` of a table of spans is known."""
IS_CALL: Final = f"x.kind <> {NO_BEGIN}"
"""Whether such a row is a call, not an end without a begin."""
LENGTHS: Final = {
    "calls": "count(*)",
    "known": f"count(*) filter ({IS_TIMED})",
    "total_ns": f"sum(x.end_ns - x.start_ns) filter ({IS_TIMED})",
    "percentiles": f"quantile_disc(x.end_ns - x.start_ns, [0.50, 0.95, 0.99]) filter ({IS_TIMED})",
    "max_ns": f"max(x.end_ns - x.start_ns) filter ({IS_TIMED})",
}
"""How many rows `x` there are, and how many with known lengths, whose distribution the rest is."""
FUNCTIONS: Final = {
    "userspace": f"{IS_CALL} and x.parent = -1",
    "hook": f"{IS_CALL} and x.parent = -1",
    "kernel": f"{IS_CALL} and x.parent = -1",
    **dict.fromkeys(("syscall", "gpu_kernel", "scheduler", "annotation"), IS_CALL),
}
"""The tables of spans whose rows are functions, and those of them that count as its activity: of calls in
each other, the outermost one, whose length can be summed."""
TABLES: Final[dict[str, dict[str, str]]] = {
    **{name: SPANS for name in FRAMES if name != "gpu_thread"},
    # What the events of single threads of a GPU have.
    "gpu_thread": {
        name: SPANS[name] for name in ("id", "start_ns", "shape", "args", "launch", "source_ns", "bound_ns")
    }
    | _INDEX,
    "shapes": SHAPES,
    "texts": {"number": "INTEGER", "text": "VARCHAR"},
    # The names that a recording gives threads, or processes where tid is null.
    "thread_names": {"pid": "HUGEINT", "tid": "HUGEINT", "name": "VARCHAR"},
    "warps": {
        "launch_number": "INTEGER",
        "warp": "BIGINT",
        "entry_ns": "BIGINT",
        "first_exit_ns": "BIGINT",  # -1 for a warp that never exited
        "last_exit_ns": "BIGINT",
        "exits": "INTEGER",
        "cycles": "BIGINT",  # from here on: -1 where not recorded
        "sm": "INTEGER",
        "slot": "INTEGER",
        "entry_mask": "BIGINT",
    },
    "warp_launches": {
        "kernel": "INTEGER",
        "launch": "BIGINT",
        "has_launch": "BOOLEAN",
        "stream": "BIGINT",
        "warps_per_block": "BIGINT",
        "bound_ns": "BIGINT",
    },
    "warp_kernels": {
        "name": "VARCHAR",
        "gpu": "BIGINT",
        "pid": "BIGINT",
        **{f"{what}_{axis}": "BIGINT" for what in ("grid", "block") for axis in "xyz"},
    },
    "warp_exits": {"warp_row": "INTEGER", "exit_ns": "BIGINT", "mask": "BIGINT"},
    "warp_ranges": {
        "warp_row": "INTEGER",
        "name_text": "INTEGER",
        "start_ns": "BIGINT",
        "dur_ns": "BIGINT",
        "self_ns": "BIGINT",
        "cycles": "BIGINT",
        "open": "BOOLEAN",
    },
    "frames": {"function": "VARCHAR", "file": "VARCHAR", "line": "BIGINT", "is_library": "BOOLEAN"},
    # The frames of a stack, innermost first.
    "stack_frames": {"stack": "INTEGER", "depth": "INTEGER", "frame": "INTEGER"},
    "losses": {
        "layer": "VARCHAR",
        "count": "BIGINT",
        "start_ns": "BIGINT",
        "dur_ns": "BIGINT",
        "cpu": "BIGINT",
        "reason": "VARCHAR",
    },
    "gpu_samples": {
        "gpu": "BIGINT",
        "start_ns": "BIGINT",
        "end_ns": "BIGINT",
        **dict.fromkeys(SERIES, "DOUBLE"),
    },
    # The sums of the rows of a table of spans with one shape and kind.
    "shape_sums": {
        "layer": "VARCHAR",
        "shape": "INTEGER",
        "kind": "UTINYINT",
        "is_outermost": "BOOLEAN",
        "rows": "BIGINT",
        "total_ns": "HUGEINT",
    },
    # `LENGTHS` of the calls of each function of a table of `FUNCTIONS`: those with one name and layer. And of
    # all of the table's activity, without a name.
    "lengths": {
        "layer": "VARCHAR",
        "name_text": "INTEGER",
        "of_layer": "INTEGER",
        "calls": "BIGINT",
        "known": "BIGINT",
        "total_ns": "HUGEINT",
        "percentiles": "BIGINT[]",
        "max_ns": "BIGINT",
    },
    "facts": {"name": "VARCHAR", "value": "VARCHAR"},  # JSON
}
