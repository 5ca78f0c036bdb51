"""The layers of a recording as tables for other programs: times in whole ns, null where not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tracepipe.reports.frames.libraries import pl
from tracepipe.reports.frames.run import Run

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


def _numbered(frame: pl.DataFrame) -> pl.DataFrame:
    return frame.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))


def _three(column: str, name: str) -> Iterator[pl.Expr]:
    """The three numbers of sizes or indices, each as a column."""
    for at, axis in enumerate("xyz"):
        yield pl.col(column).arr.get(at, null_on_oob=True).alias(f"{name}_{axis}")


def _spans(frame: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Spans with the columns that are told of them, and the number of the row."""
    whole = _numbered(frame).with_columns(
        pl.col("kind").cast(pl.String), pl.col("parent").alias("parent_row"), pl.col("depth").cast(pl.Int64)
    )
    wide = whole.with_columns(*_three("grid", "grid"), *_three("block", "block"))
    return wide.select("row", *columns)


def _gpu_threads(run: Run) -> pl.DataFrame:
    threads = run.gpu_threads.with_columns(ts_ns="start_ns")
    for what in ("block", "thread"):
        threads = threads.with_columns(*_three(what, f"{what}_index"))
    indices = (f"{what}_index_{axis}" for what in ("block", "thread") for axis in "xyz")
    told = ("ts_ns", "phase", "name", "pid", "gpu", "launch", *indices, "bound_ns", "args")
    return _numbered(threads).select("row", *told)


def _warps(run: Run) -> pl.DataFrame:
    warps = run.warps.with_columns(
        dur_ns=pl.col("last_exit_ns") - pl.col("entry_ns"), exit_count=pl.col("exits").cast(pl.Int64)
    ).with_columns(pl.col("sm", "slot", "entry_mask").cast(pl.Int64))
    wide = warps.with_columns(*_three("grid", "grid"), *_three("block", "block"))
    return _numbered(wide).select("row", *_LAUNCH, *_PLACE, *_STAY)


def _exits(run: Run) -> pl.DataFrame:
    return run.exits.select("warp_row", "exit_ns", exit_mask="mask")


def _ranges(run: Run) -> pl.DataFrame:
    return run.ranges.select("warp_row", "name", "start_ns", "dur_ns", "self_ns", "cycles", "open")


def _stacks(run: Run) -> pl.DataFrame:
    stacks = run.stacks
    rows = [
        (number, depth, *stacks.frames[at], stacks.is_library[at])
        for number in range(len(stacks))
        for depth, at in enumerate(stacks.frames_of(number))
    ]
    return pl.DataFrame(rows, _STACKS, orient="row")


def _losses(run: Run) -> pl.DataFrame:
    return run.losses.select("layer", "count", "start_ns", "dur_ns", "cpu", "reason")


def _clocks(run: Run) -> pl.DataFrame:
    return pl.DataFrame(
        {
            name: pl.Series([said.get(name) for said in run.facts.clocks], dtype=getattr(pl, kind))
            for name, kind in _CLOCKS.items()
        }
    )


TABLES: dict[str, Callable[[Run], pl.DataFrame]] = {
    "annotations": lambda run: _spans(run.annotations, (*_TIMES, "name", "domain", "range", *_OF_THREAD)),
    "calls": lambda run: _spans(run.calls, _CALL),
    "hooks": lambda run: _spans(run.hooks, ("layer", *_CALL)),
    "syscalls": lambda run: _spans(run.syscalls, _CALL),
    "driver": lambda run: _spans(run.driver, ("layer", *_CALL)),
    "scheduler": lambda run: _spans(run.scheduler, (*_TIMES, "name", *_THREAD, *_ARGS)),
    "kernels": lambda run: _spans(run.kernels, (*_TIMES, *_LAUNCH, *_PYTHON, "args")),
    "warps": _warps,
    "exits": _exits,
    "ranges": _ranges,
    "gpu_threads": _gpu_threads,
    "memory": lambda run: _spans(run.memory, (*_EFFECT, *_ARGS)),
    "transfers": lambda run: _spans(run.transfers, (*_EFFECT, *_ARGS, "bound_ns")),
    "stacks": _stacks,
    "losses": _losses,
    "clocks": _clocks,
}
"""Name of a table → how it is made of a run. docs/reports.md says what each column means."""
