"""The layers of a recording as tables for other programs: times in integer ns, null where not known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tracepipe.reports.frames.libraries import np, pl
from tracepipe.store.run import Run

# The most rows of a part, and the most text of its rows, for which there may be fewer rows.
_ROWS_AT_ONCE, _TEXT_BYTES = 1 << 13, 1 << 20
_TIMES = ("start_ns", "end_ns", "dur_ns", "kind")
_THREAD = ("pid", "tid", "cpu", "comm")
_NESTING = ("depth", "parent_row")
_ARGS = ("args", "end_args")
_OF_THREAD = (*_THREAD, *_NESTING, *_ARGS)
_PYTHON = ("stack", "python")
_CALL = (*_TIMES, "name", *_THREAD, "launch", *_NESTING, "size_bytes", "address", "result", *_PYTHON, *_ARGS)
_EFFECT = (*_TIMES, "name", *_THREAD, "gpu", "stream", "launch", "size_bytes", "address", "result", *_PYTHON)
_SIZES = tuple(f"{what}_{axis}" for what in ("grid", "block") for axis in "xyz")
_LAUNCH = ("launch", "name", "gpu", "stream", "pid", *_SIZES, "bound_ns")
_PLACE = ("warp", "block_index", "warp_in_block", "sm", "slot", "entry_mask")
_STAY = ("entry_ns", "first_exit_ns", "last_exit_ns", "dur_ns", "exit_count", "cycles")
_CLOCKS = {
    "clock": "String", "trace_clock": "String", "method": "String", "pairs": "Int64",
    "pairs_dropped": "Int64", "drift_ppm": "Float64", "bound_ns": "Int64",
}  # fmt: skip


_STACKS = {
    "stack": pl.Int64, "frame": pl.Int64, "function": pl.String, "file": pl.String, "line": pl.Int64,
    "is_library": pl.Boolean,
}  # fmt: skip


class LayerTable(NamedTuple):
    """A table of a run: functions for its number of rows, for a part of them, and for the most bytes of text
    of a part.
    """

    count: Callable[[Run], int]
    part: Callable[[Run, slice], pl.DataFrame]
    text_bytes: Callable[[Run, slice], int] = lambda run, rows: 0

    def rows_at_once(self, run: Run) -> int:
        """A number of rows of which any part takes little memory."""
        found = _ROWS_AT_ONCE
        for rows in self._parts(run, _ROWS_AT_ONCE):
            found = min(found, (rows.stop - rows.start) * _TEXT_BYTES // max(self.text_bytes(run, rows), 1))
        return max(found, 1)

    def frames(self, run: Run, rows_at_once: int) -> Iterator[pl.DataFrame]:
        """Yield the whole table, `rows_at_once` rows at a time."""
        for rows in self._parts(run, rows_at_once):
            yield self.part(run, rows)

    def _parts(self, run: Run, at_once: int) -> Iterator[slice]:
        count = self.count(run)
        for start in range(0, count, at_once):
            yield slice(start, min(start + at_once, count))


_TEXTS = {
    "layer", "name", "domain", "comm", "kind", "address", "kernel", "phase", "python", "args", "end_args",
}  # fmt: skip


def values_frame(run: Run, layer: str, rows: slice, *columns: str) -> pl.DataFrame:
    """Columns of some rows of a layer as a frame."""

    def kind(name: str) -> pl.DataType:
        if name in _TEXTS:
            return pl.String()
        if name in ("grid", "block", "thread"):
            return pl.Array(pl.Int64, 3)
        return pl.UInt64() if name == "launch" else pl.Int64()

    found = run.values(layer, rows, *columns)
    return pl.DataFrame({name: pl.Series(name, of, kind(name), strict=False) for name, of in found.items()})


def _numbered(frame: pl.DataFrame, rows: slice) -> pl.DataFrame:
    return frame.with_columns(
        pl.Series("row", np.arange(rows.start, rows.start + len(frame), dtype=np.int64))
    )


def _three(column: str, name: str) -> Iterator[pl.Expr]:
    """The three numbers of sizes or indices, each as a separate column."""
    for at, axis in enumerate("xyz"):
        yield pl.col(column).arr.get(at, null_on_oob=True).alias(f"{name}_{axis}")


def _spans(layer: str, *columns: str) -> LayerTable:
    """The table of a layer with some columns, and the number of each row."""
    sizes = [what for what in ("grid", "block") if f"{what}_x" in columns]
    others = {"parent_row": "parent", **dict.fromkeys(_SIZES, "")}
    needed = [name for column in columns if (name := others.get(column, column))]

    def part(run: Run, rows: slice) -> pl.DataFrame:
        frame = _numbered(values_frame(run, layer, rows, *needed, *sizes), rows)
        wide = frame.with_columns(*(e for what in sizes for e in _three(what, what)))
        if "parent" in needed:
            wide = wide.with_columns(pl.col("parent").alias("parent_row"), pl.col("depth").cast(pl.Int64))
        return wide.select("row", *columns)

    return LayerTable(lambda run: len(run.layer(layer)), part)


def _gpu_threads(run: Run, rows: slice) -> pl.DataFrame:
    columns = ("phase", "name", "pid", "gpu", "launch", "bound_ns", "args")
    threads = values_frame(run, "gpu_thread", rows, "start_ns", "block", "thread", *columns)
    indices = [one for what in ("block", "thread") for one in _three(what, f"{what}_index")]
    of_thread = pl.col("phase", "name", "pid", "gpu", "launch")
    ts_ns = pl.col("start_ns").alias("ts_ns")
    return _numbered(threads, rows).select("row", ts_ns, of_thread, *indices, "bound_ns", "args")


def _warps(run: Run, rows: slice) -> pl.DataFrame:
    warps = warp_frame(run, rows)
    warps = warps.with_columns(
        dur_ns=pl.col("last_exit_ns") - pl.col("entry_ns"), exit_count=pl.col("exits").cast(pl.Int64)
    ).with_columns(pl.col("sm", "slot", "entry_mask").cast(pl.Int64))
    wide = warps.with_columns(*_three("grid", "grid"), *_three("block", "block"))
    return _numbered(wide, rows).select("row", *_LAUNCH, *_PLACE, *_STAY)


def _exits(run: Run, rows: slice) -> pl.DataFrame:
    warp_row, exit_ns, mask = (column[rows] for column in run.warp_table.exit_columns())
    frame = pl.DataFrame({"warp_row": warp_row, "exit_ns": exit_ns, "exit_mask": mask})
    return frame.with_columns(pl.when(pl.col("exit_mask") >= 0).then("exit_mask").alias("exit_mask"))


def _ranges(run: Run, rows: slice) -> pl.DataFrame:
    table = run.warp_table
    ranges = pl.DataFrame({name: column[rows] for name, column in table.ranges.items()})
    names = pl.Series("name", [table.range_names[at] for at in ranges["name"].to_list()], pl.String)
    return ranges.with_columns(names, pl.col("warp_row").cast(pl.Int64)).select(
        "warp_row", "name", "start_ns", "dur_ns", "self_ns", "cycles", "open"
    )


def _stacks(run: Run, rows: slice) -> pl.DataFrame:
    frames, is_library = run.stacks.frames, run.stacks.is_library
    some = [
        (number, depth, *frames[at], is_library[at])
        for number, depth, at in run.stacks.placed(rows.start, rows.stop)
    ]
    return pl.DataFrame(some, _STACKS, orient="row")


def _of_longest(texts: Iterable[str], rows: slice) -> int:
    """The most bytes of text of rows that have one of these texts each."""
    return max(map(len, texts), default=0) * len(range(rows.start, rows.stop))


def _stack_bytes(run: Run, rows: slice) -> int:
    return _of_longest((f"{frame.function}{frame.file}" for frame in run.stacks.frames), rows)


def _losses(run: Run, rows: slice) -> pl.DataFrame:
    kinds = {name: pl.String if name in ("layer", "reason") else pl.Int64 for name in run.loss_columns}
    return pl.DataFrame({name: of[rows] for name, of in run.loss_columns.items()}, kinds)


def warp_frame(run: Run, rows: slice) -> pl.DataFrame:
    """The warps of some rows, null where a value is not known."""

    def column(name: str) -> pl.Series:
        values, known = run.warp_table.column(name, rows)
        if name == "name":
            texts = {number: run.warp_table.launches.name(number) for number in set(values[known].tolist())}
            return pl.Series(name, [texts.get(number) for number in values.tolist()], pl.String)
        series = pl.Series(name, values)
        return (
            series
            if known.all()
            else pl.select(pl.when(pl.Series(known)).then(series).alias(name)).to_series()
        )

    return pl.DataFrame([column(name) for name in _WARP_COLUMNS])


_WARP_COLUMNS = (
    "launch", "name", "gpu", "stream", "pid", "grid", "block", "warps_per_block", "bound_ns", "warp",
    "entry_ns", "first_exit_ns", "last_exit_ns", "exits", "cycles", "sm", "slot", "entry_mask",
    "block_index", "warp_in_block",
)  # fmt: skip


def _clocks(run: Run) -> pl.DataFrame:
    return pl.DataFrame(
        {
            name: pl.Series([clock.get(name) for clock in run.facts.clocks], dtype=getattr(pl, kind))
            for name, kind in _CLOCKS.items()
        }
    )


TABLES: dict[str, LayerTable] = {
    "annotations": _spans("annotation", *_TIMES, "name", "domain", "range", *_OF_THREAD),
    "calls": _spans("userspace", *_CALL),
    "hooks": _spans("hook", "layer", *_CALL),
    "syscalls": _spans("syscall", *_CALL),
    "driver": _spans("kernel", "layer", *_CALL),
    "scheduler": _spans("scheduler", *_TIMES, "name", *_THREAD, *_ARGS),
    "kernels": _spans("gpu_kernel", *_TIMES, *_LAUNCH, *_PYTHON, "kernel", "args"),
    "warps": LayerTable(lambda run: len(run.warp_table), _warps),
    "exits": LayerTable(lambda run: len(run.warp_table.exit_columns()[0]), _exits),
    "ranges": LayerTable(
        lambda run: len(run.warp_table.ranges["name"]),
        _ranges,
    ),
    "gpu_threads": LayerTable(
        lambda run: len(run.layer("gpu_thread")),
        _gpu_threads,
    ),
    "memory": _spans("memory", *_EFFECT, *_ARGS),
    "transfers": _spans("transfer", *_EFFECT, *_ARGS, "bound_ns"),
    "stacks": LayerTable(lambda run: run.stacks.places, _stacks, _stack_bytes),
    "losses": LayerTable(lambda run: len(run.loss_columns["layer"]), _losses),
    "clocks": LayerTable(lambda run: len(run.facts.clocks), lambda run, rows: _clocks(run)[rows]),
}
"""The tables by name. docs/reports.md documents their columns."""
