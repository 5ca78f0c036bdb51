"""The tables that users ask: a recording's layers with names instead of numbers, and null where nothing is
known.

`tracepipe export` writes them, `tracepipe query` asks them, and `Run` gives them. docs/reports.md documents
their columns. Times are whole ns on the trace clock.
"""

from __future__ import annotations

import tempfile
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson

from tracepipe.errors import OutputError
from tracepipe.event.columns import NONE
from tracepipe.event.model import LAYERS
from tracepipe.kernel_names import short_kernel_name
from tracepipe.paths import is_file
from tracepipe.store.args import (
    address_in,
    integer,
    is_odd,
    json_of,
    parsed,
    result_in,
    size_bytes_in,
    three,
)
from tracepipe.store.schema import KINDS
from tracepipe.store.tables import connect, object_column, typed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tracepipe.store.run import Run

# The arguments that are parsed at a time.
_AT_ONCE: Final = 1 << 13
_ARGS_FILE: Final = "args.duckdb"
# The values of fewer arguments are made as fast as a file is opened.
_KEPT_LEAST: Final = 1 << 12
# What DuckDB may use to write them.
_WRITING_MB: Final = 100
_TIMES: Final = ("start_ns", "end_ns", "dur_ns", "kind")
_THREAD: Final = ("pid", "tid", "cpu", "comm")
_NESTING: Final = ("depth", "parent_row")
_ARGS: Final = ("args", "end_args")
_OF_THREAD: Final = (*_THREAD, *_NESTING, *_ARGS)
_PYTHON: Final = ("stack", "python")
_CALL: Final = (
    *_TIMES, "name", *_THREAD, "launch", *_NESTING, "size_bytes", "address", "result", *_PYTHON, *_ARGS
)  # fmt: skip
_EFFECT: Final = (
    *_TIMES, "name", *_THREAD, "gpu", "stream", "launch", "size_bytes", "address", "result", *_PYTHON, *_ARGS
)  # fmt: skip
_SIZES: Final = tuple(f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz")
_LAUNCH: Final = ("launch", "name", "gpu", "stream", "pid", *_SIZES, "bound_ns")
_SPANS: Final = {
    "annotations": ("annotation", (*_TIMES, "name", "domain", "range", *_OF_THREAD)),
    "calls": ("userspace", _CALL),
    "hooks": ("hook", ("layer", *_CALL)),
    "syscalls": ("syscall", _CALL),
    "driver": ("kernel", ("layer", *_CALL)),
    "scheduler": ("scheduler", (*_TIMES, "name", *_THREAD, *_ARGS)),
    "host_samples": ("host_sample", (*_TIMES, "name", *_THREAD, *_PYTHON, *_ARGS)),
    "kernels": ("gpu_kernel", (*_TIMES, *_LAUNCH, *_PYTHON, "kernel", "args")),
    "memory": ("memory", _EFFECT),
    "transfers": ("transfer", (*_EFFECT, "bound_ns")),
}
"""View → its layer, and its columns after `row`."""
VIEWS: Final = (
    "annotations", "calls", "hooks", "syscalls", "driver", "scheduler", "host_samples", "kernels", "warps",
    "exits", "ranges", "gpu_threads", "memory", "transfers", "stacks", "losses", "clocks",
)  # fmt: skip
"""The tables, in the order in which they are documented."""
_COUNTED: Final = {
    **{view: layer for view, (layer, _) in _SPANS.items()},
    "gpu_threads": "gpu_thread", "warps": "warps", "exits": "warp_exits", "ranges": "warp_ranges",
    "stacks": "stack_frames", "losses": "losses",
}  # fmt: skip
"""View → the table of the store that has a row for each of its rows; `clocks` is a table itself."""
# These have no column `row`. Without an order they have that of the file.
_ORDERS: Final = {"exits": "", "ranges": "", "stacks": "order by stack, frame", "losses": "", "clocks": ""}


def question(view: str) -> str:
    """The SELECT of all rows of a view in their order."""
    return f'select * from "{view}" {_ORDERS.get(view, "order by row")}'


def count(run: Run, view: str) -> int:
    """The number of rows of a view."""
    if view == "clocks":
        return len(run.facts.clocks)
    return run.store.count(_COUNTED[view])


def _list(texts: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{text}'" for text in texts) + "]"


LAYER_TEXT: Final = f"case when s.layer >= 0 then {_list(LAYERS)}[s.layer + 1] else l.text end"
"""The name of the layer of a shape `s`; `l` is the text with the number `-1 - s.layer`."""


def _unsigned(column: str) -> str:
    """A launch as an unsigned number: a column has its two's complement."""
    return (
        f"(case when {column} < 0 then {column}::hugeint + 18446744073709551616 else {column} end)::ubigint"
    )


def _with_source(args: str, source: str) -> str:
    """Arguments with the time of their event on its own clock as `source_ns`."""
    reading = f"""'"source_ns":' || {source}"""
    return f"""case when {source} = -1 then {args}.text
        when {args}.text is null then '{{' || {reading} || '}}'
        when {args}.before is not null then {args}.before || {reading} || {args}.after
        else {args}.text[:-2] || ',' || {reading} || '}}' end"""


_VALUES: Final = {
    "dur_ns": "case when s.kind in (0, 3) then s.end_ns - s.start_ns end",
    "kind": f"{_list(KINDS)}[s.kind + 1]",
    "launch": f"case when v.has_launch then {_unsigned('s.launch')} end",
    "depth": "s.depth::bigint",
    "parent_row": "nullif(s.parent, -1)::bigint",
    "size_bytes": "coalesce(a.size_bytes, e.size_bytes)",
    "address": "coalesce(a.address, e.address)",
    "result": "coalesce(e.result, a.result)",
    "stack": "nullif(s.stack, -1)::bigint",
    "python": "p.python",
    # A time that was recorded on the trace's clock has no error from an alignment.
    "bound_ns": "case when s.source_ns <> -1 then s.bound_ns end",
    "args": _with_source("a", "s.source_ns"),
    "end_args": _with_source("e", "s.end_source_ns"),
    # The longest name that the recording has; some formats have it as an argument.
    "kernel": "case when a.function_name = v.name then a.function else coalesce(v.kernel, v.name) end",
    **{name: f"coalesce(v.{name}, a.{name})" for name in _SIZES},
}
"""How the columns of spans are made; the others are those of the table, or of shapes."""
_OF_TABLE: Final = ("start_ns", "end_ns")


def _span_view(view: str, layer: str, columns: tuple[str, ...]) -> str:
    made = (
        f"s.{name}" if name in _OF_TABLE else f'{_VALUES.get(name, f"v.{name}")} as "{name}"'
        for name in columns
    )
    return f"""create view "{view}" as select s.id::bigint as row, {", ".join(made)}
        from store."{layer}" s join tracepipe.shape_values v using (shape)
        left join tracepipe.args_values a on s.args = a.number
        left join tracepipe.args_values e on s.end_args = e.number
        left join tracepipe.stack_lines p on s.stack = p.stack"""


def _known(table: str, *columns: str) -> str:
    """Columns of numbers, null where they are less than 0."""
    return ", ".join(
        f'case when {table}."{name}" >= 0 then {table}."{name}" end as "{name}"' for name in columns
    )


_INDEX: Final = ", ".join(
    f"nullif(s.{what}_{axis}, -1)::bigint as {what}_index_{axis}"
    for what in ("block", "thread")
    for axis in "xyz"
)
_OTHERS: Final = (
    f"""create view tracepipe.shape_values as
        select s.shape, n.text as name, c.text as comm, d.text as domain, k.text as kernel,
            {LAYER_TEXT} as layer,
            chr(s.phase) as phase, s.has_launch,
            {_known("s", "pid", "tid", "cpu", "gpu", "stream", "range", *_SIZES)}
        from store.shapes s left join store.texts n on s.name_text = n.number
        left join store.texts c on s.comm_text = c.number left join store.texts d on s.domain_text = d.number
        left join store.texts k on s.kernel_text = k.number
        left join store.texts l on -1 - s.layer = l.number""",
    f"""create view gpu_threads as
        select s.id::bigint as row, s.start_ns as ts_ns, v.phase, v.name, v.pid, v.gpu,
            {_VALUES["launch"]} as launch, {_INDEX}, {_VALUES["bound_ns"]} as bound_ns,
            {_VALUES["args"]} as args
        from store.gpu_thread s join tracepipe.shape_values v using (shape)
        left join tracepipe.args_values a on s.args = a.number""",
    f"""create view warps as
        select w.rowid as row, case when l.has_launch then {_unsigned("l.launch")} end as launch,
            k.name, k.gpu, case when l.stream >= 0 then l.stream end as stream, k.pid, {_known("k", *_SIZES)},
            case when l.bound_ns >= 0 then l.bound_ns end as bound_ns, w.warp,
            case when l.warps_per_block > 0 then w.warp // l.warps_per_block end as block_index,
            case when l.warps_per_block > 0 then w.warp % l.warps_per_block end as warp_in_block,
            nullif(w.sm, -1)::bigint as sm, nullif(w.slot, -1)::bigint as slot,
            nullif(w.entry_mask, -1) as entry_mask, w.entry_ns,
            case when w.exits > 0 then w.first_exit_ns end as first_exit_ns,
            case when w.exits > 0 then w.last_exit_ns end as last_exit_ns,
            case when w.exits > 0 then w.last_exit_ns - w.entry_ns end as dur_ns,
            w.exits::bigint as exit_count, nullif(w.cycles, -1) as cycles
        from store.warps w join tracepipe.launches l on w.launch_number = l.number
        join tracepipe.warp_kernel_values k on l.kernel = k.number""",
    """create view tracepipe.launches as
        select row_number() over (order by rowid) - 1 as number, * from store.warp_launches""",
    """create view tracepipe.warp_kernel_values as
        select row_number() over (order by rowid) - 1 as number, * from store.warp_kernels""",
    """create view exits as select warp_row::bigint as warp_row, exit_ns,
        case when mask >= 0 then mask end as exit_mask from store.warp_exits""",
    """create view ranges as
        select r.warp_row::bigint as warp_row, n.name, r.start_ns, r.dur_ns, r.self_ns, r.cycles, r.open
        from store.warp_ranges r join tracepipe.range_names n on r.name_text = n.number order by r.rowid""",
    """create view stacks as
        select s.stack::bigint as stack, s.depth::bigint as frame, f.function, f.file, f.line, f.is_library
        from store.stack_frames s
        join (select row_number() over (order by rowid) - 1 as number, * from store.frames) f
        on s.frame = f.number""",
    "create view losses as select * from store.losses",
)


_OF_ARGS: Final = {
    "number": "integer",
    "text": "varchar",
    "size_bytes": "bigint",
    "result": "bigint",
    "address": "varchar",
    "function": "varchar",
    "function_name": "varchar",
    # The text before and after `source_ns`, where it has one.
    "before": "varchar",
    "after": "varchar",
    **dict.fromkeys(_SIZES, "bigint"),
}
"""The columns of arguments."""
_OF_CLOCKS: Final = {
    "clock": "varchar", "trace_clock": "varchar", "method": "varchar", "pairs": "bigint",
    "pairs_dropped": "bigint", "drift_ppm": "double", "bound_ns": "bigint",
}  # fmt: skip
# A time that is written in place of `source_ns`, to find its place.
_MARK: Final = -(1 << 63)


def create(run: Run) -> None:
    """Create the views, and the tables that they need in addition to those of the store."""
    con = run.store.connection
    con.execute("create schema tracepipe")  # of the tables that no question is about
    if run.args.count >= _KEPT_LEAST and _has_args_file(run):
        path = str(run.store.folder / _ARGS_FILE).replace("'", "''")
        con.execute(f"attach '{path}' as kept (read_only)")
        con.execute("create view tracepipe.args_values as select * from kept.args_values")
    else:
        con.execute(f"create table tracepipe.args_values ({typed(_OF_ARGS)})")
        _put_args(run, con, "tracepipe.args_values")
    own = run.stacks.own(np.arange(len(run.stacks))).tolist()
    lines = [(stack, str(run.stacks.frames[at])) for stack, at in enumerate(own) if at != NONE]
    ranges = [*enumerate(run.warp_table.range_names)]
    clocks = [tuple(clock.get(key) for key in _OF_CLOCKS) for clock in run.facts.clocks]
    for table, kinds, rows_of in (
        ("tracepipe.stack_lines", {"stack": "integer", "python": "varchar"}, lines),
        ("tracepipe.range_names", {"number": "integer", "name": "varchar"}, ranges),
        ("clocks", _OF_CLOCKS, clocks),
    ):
        con.execute(f"create table {table} ({typed(kinds)})")
        if rows_of:
            con.executemany(f"insert into {table} values ({', '.join('?' * len(kinds))})", rows_of)
    for sql in sorted(_OTHERS, key=lambda sql: "view tracepipe." not in sql):
        con.execute(sql)
    for view, (layer, columns) in _SPANS.items():
        con.execute(_span_view(view, layer, columns))


def _has_args_file(run: Run) -> bool:
    """Whether the values of arguments are in a file next to the tables, where they are put at first, as to
    parse them takes longer than most questions.
    """
    import duckdb

    folder = run.store.folder
    if is_file(folder / _ARGS_FILE):
        return True
    try:
        with tempfile.TemporaryDirectory(prefix="args-", dir=folder) as made:
            with connect(str(Path(made, _ARGS_FILE)), Path(made), memory_mb=_WRITING_MB) as con:
                con.execute(f"create table args_values ({typed(_OF_ARGS)})")
                _put_args(run, con, "args_values")
            Path(made, _ARGS_FILE).rename(folder / _ARGS_FILE)
    except (OSError, OutputError, duckdb.Error):  # the disk is full, or the tables were removed meanwhile
        return False
    return True


def _put_args(run: Run, con: Any, table: str) -> None:
    """Insert the values of all arguments."""
    names = ", ".join(f"{name}::{kind}" for name, kind in _OF_ARGS.items())
    rows = _args(run)
    while some := [*islice(rows, _AT_ONCE)]:
        values = zip(_OF_ARGS, zip(*some, strict=True), strict=True)
        con.register("given", {name: object_column(column) for name, column in values})
        con.execute(f"insert into {table} select {names} from given")
        con.unregister("given")


def _args(run: Run) -> Iterator[tuple[Any, ...]]:
    """The values of all arguments by their numbers."""
    for number, recorded in enumerate(run.args.texts(np.arange(run.args.count))):
        args = parsed(recorded)
        text = json_of(recorded, args)
        function = args.get("function")
        if function is not None and not isinstance(function, str):
            function = orjson.dumps(function).decode()
        before = after = None
        if text is not None and "source_ns" in args and not is_odd(recorded):
            marked = orjson.dumps(args | {"source_ns": _MARK}).decode()
            before, _, after = marked.partition(f'"source_ns":{_MARK}')
        sides = [side for key in ("grid", "block") for side in three(args.get(key)) or (None,) * 3]
        yield (
            number,
            text,
            integer(size_bytes_in(args)),
            integer(result_in(args)),
            address_in(args),
            None if function is None else _unicode(function),
            None if function is None else _unicode(short_kernel_name(function)),
            before,
            after,
            *sides,
        )


def _unicode(text: str) -> str:
    """A text without lone surrogates."""
    return text.encode("utf-8", "replace").decode()
