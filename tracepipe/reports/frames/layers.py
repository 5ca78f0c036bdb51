"""The layers of a recording as numpy columns, and the polars frames of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import orjson

from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, Int64s, TraceColumns
from tracepipe.event.stacks import Stacks
from tracepipe.kernel_names import short_kernel_name
from tracepipe.reports.frames.arguments import ArgsTable
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.eager import nulls, picked, where
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import FRAMES, ShapeTable, three
from tracepipe.reports.frames.spans import FROM_DURATION, INSTANT, KINDS, NO_BEGIN, SPAN
from tracepipe.reports.frames.stored import flagged, made, parts, taken

_OF_ARGS = ("size_bytes", "address", "result")
COLUMNS = (
    "layer", "name", "pid", "tid", "cpu", "comm", "launch", "gpu", "stream", *_OF_ARGS, "grid", "block",
    "thread", "phase", "bound_ns", "args", "start_ns", "end_ns", "kind", "depth", "lane", "parent",
    "end_args", "dur_ns", "stack", "python",
)  # fmt: skip
"""The columns of a frame, in their order; `Run` documents them."""


@dataclass(slots=True)
class Layer:
    """A row for each slice and instant, sorted by start. Columns have the shape `(rows,)`.

    `kind` is an index into `KINDS`. `shape`, `args` and `stack` are numbers of the begin, and `end_args` of
    the end, NONE without a value. `parent` is the row of the innermost slice around it in this layer, or
    NONE. The columns below them are None where no row has a value.
    """

    start_ns: Int64s
    end_ns: Int64s
    kind: Bytes
    depth: Int32s
    parent: Int32s
    lane: Bytes
    shape: Int32s
    args: Int32s
    end_args: Int32s
    launch: Int64s | None = None
    bound_ns: Int64s | None = None
    source_ns: Int64s | None = None
    end_source_ns: Int64s | None = None
    index: Int32s | None = None
    stack: Int32s | None = None

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def has_length(self) -> Bools:
        """Flags the rows whose length is known."""
        known: Bools = (self.kind == SPAN) | (self.kind == FROM_DURATION)
        return known

    @property
    def is_call(self) -> Bools:
        """Flags all rows except ends without a begin."""
        calls: Bools = self.kind != NO_BEGIN
        return calls

    @property
    def is_outermost(self) -> Bools:
        """Flags the slices that are inside no other: their lengths can be summed."""
        outermost: Bools = (self.parent == NONE) & (self.kind != INSTANT)
        return outermost

    def lengths_ns(self, rows: Ints | Bools) -> Int64s:
        """The known lengths of some rows, which are flags or row numbers. Shape `(known,)`."""
        if rows.dtype != np.bool_:
            some = rows[self.has_length[rows]]
            return np.asarray(self.end_ns[some] - self.start_ns[some])
        some = rows & self.has_length
        lengths_ns: Int64s = np.empty(int(np.count_nonzero(some)), np.int64)
        at = 0
        for part in parts(len(self)):
            here = self.end_ns[part][some[part]] - self.start_ns[part][some[part]]
            lengths_ns[at : at + len(here)] = here
            at += len(here)
        return lengths_ns

    def rows(self, rows: Ints | slice) -> Layer:
        """Some rows, in which `parent` is still a row of the whole layer."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        some: Any = {name: None if column is None else column[rows] for name, column in columns.items()}
        return Layer(**some)

    def take(self, rows: Ints) -> Layer:
        """Some rows as a separate layer: `parent` is NONE if the caller is not among them."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        some: Any = {name: None if of is None else taken(of, rows) for name, of in columns.items()}
        places = np.full(len(self) + 1, NONE, np.int32)
        places[rows] = np.arange(len(rows), dtype=np.int32)
        some["parent"] = made(len(rows), np.int32, lambda part: places[some["parent"][part]])
        return Layer(**some)


def streams_and_copies(both: Layer, table: ShapeTable) -> dict[str, Layer]:
    """Divide the layer of events that nest on streams into kernels, with copies on GPUs, and copies
    by call.
    """
    found = {}
    for name in ("transfer", "gpu_kernel"):
        rows = _rows_of(both, table.frames == FRAMES.index(name))
        found[name] = both if len(rows) == len(both) else both.take(rows)
    return found


def _rows_of(layer: Layer, shapes: Bools) -> Int32s:
    """The rows whose shapes are flagged."""
    return flagged(len(layer), lambda part: shapes[layer.shape[part]])


def threads_of(events: TraceColumns) -> Layer:
    """The layer of events that do not nest: those of single threads of a GPU."""
    # Broadcast arrays keep one value in memory.
    kind: Bytes = np.broadcast_to(np.uint8(INSTANT), len(events))
    none: Int32s = np.broadcast_to(np.int32(0), len(events))
    lane: Bytes = np.broadcast_to(np.uint8(0), len(events))
    nobody: Int32s = np.broadcast_to(np.int32(NONE), len(events))
    return Layer(
        events.ts_ns,
        events.ts_ns,
        kind,
        none,
        nobody,
        lane,
        events.shape,
        events.args,
        nobody,
        events.launch if bool(events.launch.any()) else None,
        events.bound_ns,
        events.source_ns,
        index=events.index,
    )


class Frames:
    """Makes polars frames of layers."""

    def __init__(self, table: ShapeTable, args: ArgsTable, stacks: Stacks) -> None:
        self._table, self._args, self._stacks = table, args, stacks

    def frame(self, layer: Layer, names: tuple[str, ...] = COLUMNS) -> pl.DataFrame:
        """The named columns of a layer, in that order."""
        return pl.DataFrame([self._column(layer, name) for name in names])

    def _column(self, layer: Layer, name: str) -> pl.Series:
        if name in ("start_ns", "end_ns"):
            return pl.Series(name, getattr(layer, name))
        if name in ("depth", "lane"):
            return pl.Series(name, np.ascontiguousarray(getattr(layer, name)), dtype=pl.Int32)
        if name in _OF_ARGS:
            return self._of_args(layer, name)
        if name in ("grid", "block"):
            return self._sizes(layer, name)
        make = _MADE_BY.get(name)
        return self._table.series(name, layer.shape) if make is None else make(self, layer)

    def _kind(self, layer: Layer) -> pl.Series:
        return picked(pl.Series("kind", KINDS, dtype=pl.Enum(KINDS)), np.ascontiguousarray(layer.kind))

    def _parent(self, layer: Layer) -> pl.Series:
        return where(layer.parent != NONE, pl.Series("parent", layer.parent.astype(np.int64)))

    def _dur_ns(self, layer: Layer) -> pl.Series:
        return where(layer.has_length, pl.Series("dur_ns", layer.end_ns - layer.start_ns))

    def _launch(self, layer: Layer) -> pl.Series:
        if layer.launch is None and not bool(self._table.has_launch(layer.shape).any()):
            return nulls("launch", len(layer), pl.UInt64())
        launch = np.zeros(len(layer), np.int64) if layer.launch is None else layer.launch
        return where(self._table.has_launch(layer.shape), pl.Series("launch", launch.view(np.uint64)))

    def _bound_ns(self, layer: Layer) -> pl.Series:
        if layer.bound_ns is None or layer.source_ns is None:
            return nulls("bound_ns", len(layer), pl.Int64())
        # A time that was recorded on the trace's clock has no error from an alignment.
        return where(layer.source_ns != NONE, pl.Series("bound_ns", layer.bound_ns))

    def _of_args(self, layer: Layer, name: str) -> pl.Series:
        """A value of the begin, else of the end; for a result, of the end first."""
        if name == "address":
            begin, end = self._args.addresses(layer.args), self._args.addresses(layer.end_args)
            return pl.select(pl.coalesce(begin, end)).to_series()
        of = self._args.result if name == "result" else self._args.size_bytes
        values, known = of(layer.args, layer.end_args)
        return where(known, pl.Series(name, values))

    def _stack(self, layer: Layer) -> pl.Series:
        if layer.stack is None:
            return nulls("stack", len(layer), pl.Int64())
        return where(layer.stack != NONE, pl.Series("stack", layer.stack.astype(np.int64)))

    def _python(self, layer: Layer) -> pl.Series:
        if layer.stack is None:
            return nulls("python", len(layer), pl.String())
        own, places = np.unique(self._stacks.own(layer.stack), return_inverse=True)
        texts = [None if at == NONE else str(self._stacks.frames[at]) for at in own.tolist()]
        return picked(pl.Series("python", texts, dtype=pl.String), places)

    def _kernel(self, layer: Layer) -> pl.Series:
        """The longest name that the recording has for a kernel; some formats have it as an argument."""
        short = self._table.texts("name", layer.shape)
        whole = self._table.texts("kernel", layer.shape)
        of_args = self._args.texts_of("function", layer.args)
        longest = [
            one if one is not None and short_kernel_name(one) == name else recorded or name
            for name, recorded, one in zip(short, whole, of_args, strict=True)
        ]
        return pl.Series("kernel", longest, dtype=pl.String)

    def _sizes(self, layer: Layer, key: str) -> pl.Series:
        known = self._table.series(key, layer.shape)
        if key == "block" and layer.index is not None:
            known = _indices(key, layer.index[:, :3])
        of_args = self._args.sizes(key, layer.args)
        return known if of_args is None else pl.select(pl.coalesce(known, of_args)).to_series()

    def _thread(self, layer: Layer) -> pl.Series:
        if layer.index is None:
            return nulls("thread", len(layer), three())
        return _indices("thread", layer.index[:, 3:])

    def _end_args(self, layer: Layer) -> pl.Series:
        return _with_source(self._args.texts(layer.end_args), layer.end_source_ns).alias("end_args")

    def _args_text(self, layer: Layer) -> pl.Series:
        return _with_source(self._args.texts(layer.args), layer.source_ns)


_MADE_BY: dict[str, Callable[[Frames, Layer], pl.Series]] = {
    "kind": Frames._kind,
    "parent": Frames._parent,
    "dur_ns": Frames._dur_ns,
    "launch": Frames._launch,
    "bound_ns": Frames._bound_ns,
    "thread": Frames._thread,
    "args": Frames._args_text,
    "end_args": Frames._end_args,
    "stack": Frames._stack,
    "python": Frames._python,
    "kernel": Frames._kernel,
}


def _indices(name: str, index: Int32s) -> pl.Series:
    return where(index[:, 0] != NONE, pl.Series(name, index.astype(np.int64)))


def _with_source(texts: pl.Series, source_ns: Int64s | None) -> pl.Series:
    """Arguments as JSON text, with the time of their event on its own clock as `source_ns`."""
    if source_ns is None:
        return texts
    text, source = pl.col(texts.name), pl.col("source")
    reading = pl.lit('"source_ns":') + source.cast(pl.String) + pl.lit("}")
    added = pl.coalesce(text.str.head(-1) + pl.lit(","), pl.lit("{")) + reading
    both = pl.DataFrame([texts, pl.Series("source", source_ns)])
    moved = both.select(pl.when(source != NONE).then(added).otherwise(text).alias(texts.name)).to_series()
    of_its_own = texts.str.contains('"source_ns"', literal=True).fill_null(False).to_numpy() & (
        source_ns != NONE
    )
    for row in np.flatnonzero(of_its_own).tolist():
        args = orjson.loads(texts[row]) | {"source_ns": int(source_ns[row])}
        moved = moved.scatter(row, orjson.dumps(args).decode())
    return moved
