"""The shapes of a recording as columns: what all events with the same text but their time have in common."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tracepipe.event.model import HOST_LAYERS, TIME_LIMIT_NS, Shape
from tracepipe.event.vocabulary import ADDRESS_KEYS, RUNNING
from tracepipe.layout.rows import Row
from tracepipe.layout.timeline import Track
from tracepipe.reports.frames.libraries import pl

# Shapes kept as Python objects at a time; the rest are columns.
CHUNK_SHAPES = 1 << 14
NOT_AN_EVENT = -1
"""The number of a shape that is no event of a thread or stream: a loss, a warp batch, the footer."""
NO_DURATION = -1
# Which frame an event goes to.
FRAMES = ("userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu_kernel", "gpu_thread")
_FRAME_CODES = {name: code for code, name in enumerate(FRAMES)}
_EARLIEST_NS = -(1 << 63)


class SpanRow(Row):
    """A row of spans: `inside` are the numbers of the spans whose ends are in `ends`."""

    __slots__ = ("inside", "lane")

    def __init__(self, lane: int = 0) -> None:
        super().__init__(Track(0, None, "slices", ""), _EARLIEST_NS)
        self.inside: list[int] = []
        self.lane = lane


def three() -> Any:
    """The type of a grid, a block or a place in one."""
    return pl.Array(pl.Int64(), 3)


def series(name: str, values: Sequence[Any], dtype: Any) -> pl.Series:
    """A column of these values; null where one is None, or is no such value."""
    if dtype != three():
        return pl.Series(name, values, dtype=dtype, strict=False)
    if not any(values):
        return pl.repeat(None, len(values), dtype=dtype, eager=True).alias(name)
    # All numbers at once: lists of lists are turned into columns one by one.
    flat = pl.Series([size for value in values for size in value or (0, 0, 0)], dtype=pl.Int64, strict=False)
    known = pl.Series([value is not None for value in values])
    threes = flat.reshape((len(values), 3)).alias(name)
    return pl.select(pl.when(known).then(threes).alias(name)).to_series()


def _schema() -> dict[str, Any]:
    number, text = pl.Int64(), pl.String()
    return {
        "layer": text, "name": text, "pid": number, "tid": number, "cpu": number, "comm": text,
        "launch": pl.UInt64(), "gpu": number, "stream": number, "size_bytes": number, "address": text,
        "result": number, "grid": three(), "block": three(), "thread": three(),
        "phase": text, "bound_ns": number, "args": text,
    }  # fmt: skip


class ShapeTable:
    """Numbers shapes, and keeps what the matching of begins and ends needs of each, by its number.

    `frames` says which of `FRAMES` the events go to, `rows` is the row on which they nest, None for events
    that do not nest.
    """

    def __init__(self) -> None:
        self.frames = bytearray()
        self.phases = bytearray()
        self.names: list[str] = []
        self.dur_ns = array("q")
        self.rows: list[SpanRow | None] = []
        self._known_names: dict[str, str] = {}
        self._row_of: dict[tuple[object, ...], SpanRow] = {}
        self._schema = _schema()
        self._chunks: list[Any] = []
        self._cells: list[tuple[Any, ...]] = []

    def meet(self, shape: Shape) -> None:
        """Give a shape its number, in `shape.row`."""
        frame, key = _place(shape)
        dur_ns = NO_DURATION if shape.dur_ns is None else min(shape.dur_ns, TIME_LIMIT_NS)
        if frame is None:
            shape.row = NOT_AN_EVENT
            return
        shape.row = len(self.frames)
        self.frames.append(_FRAME_CODES[frame])
        self.phases.append(ord(shape.phase))
        self.names.append(self._known_names.setdefault(shape.name, shape.name))
        self.dur_ns.append(dur_ns)
        row = self._row_of.get(key) if key else None
        if key and row is None:
            row = self._row_of[key] = SpanRow()
        self.rows.append(row)
        self._cells.append(_cells(shape))
        if len(self._cells) >= CHUNK_SHAPES:
            self._flush()

    def every_row(self) -> Iterable[SpanRow]:
        """All rows on which spans nest."""
        return self._row_of.values()

    def _flush(self) -> None:
        columns = zip(*self._cells, strict=True) if self._cells else [()] * len(self._schema)
        typed = zip(self._schema.items(), columns, strict=True)
        # Most shapes lack most of it: a column of nulls takes as much room as any.
        known = [(name, dtype, column) for (name, dtype), column in typed if column.count(None) < len(column)]
        self._chunks.append(pl.DataFrame([series(name, column, dtype) for name, dtype, column in known]))
        self._cells = []

    def frame(self) -> pl.DataFrame:
        """A row for each shape, in the order of their numbers, with the columns that any of them has."""
        if self._cells or not self._chunks:
            self._flush()
        if len(self._chunks) > 1:
            self._chunks = [pl.concat(self._chunks, how="diagonal", rechunk=True)]
        whole: pl.DataFrame = self._chunks[0]
        return whole

    def take(self, shapes: Any, names: Sequence[str] = ()) -> pl.DataFrame:
        """The rows of these shapes in their order, with the named columns, or with all."""
        known, wanted = self.frame(), names or tuple(self._schema)
        columns = (
            known[name].gather(shapes) if name in known else pl.lit(None, self._schema[name]).alias(name)
            for name in wanted
        )
        # The shapes themselves say how long a column without any value is.
        return pl.DataFrame({"shape": shapes}).with_columns(*columns).select(*wanted)


def _place(shape: Shape) -> tuple[str | None, tuple[object, ...] | None]:
    """The frame of a shape's events, and the key of the row on which they nest: as the layout has it."""
    layer, record = shape.type, shape.record
    if layer == "gpu_thread":
        return layer, None
    if layer == "gpu_kernel" or (layer == "transfer" and "gpu" in record):
        return layer, ("gpu", record.get("gpu", 0), record.get("stream", 0))
    if layer not in HOST_LAYERS:
        return None, None
    # A scheduler of the GPU's work is a function of the driver, and nests among the others.
    calls = layer == "scheduler" and shape.phase != "I" and shape.name != RUNNING
    frame = "kernel" if calls else layer
    return frame, (frame, shape.pid, shape.tid)


def _cells(shape: Shape) -> tuple[Any, ...]:
    """A row of the columns of `_schema`."""
    record, args = shape.record, shape.args
    get = record.get
    size = address = result = text = None
    grid, block = get("grid"), get("block")
    if args:
        given = args.get
        size, result = given("size_bytes", given("size")), given("result", given("retval"))
        address = next((args[key] for key in ADDRESS_KEYS if key in args), None)
        grid, block, text = grid or given("grid"), block or given("block"), _json(args)
    return (
        shape.type, shape.name, shape.pid, shape.tid, get("cpu"), get("comm"),
        shape.launch, get("gpu"), get("stream"), size if type(size) is int else None,
        None if address is None else str(address), result if type(result) is int else None,
        grid and _three(grid), block and _three(block), get("thread"),
        shape.phase, get("bound_ns"), text,
    )  # fmt: skip


def _three(value: object) -> list[int] | None:
    fits = isinstance(value, list) and len(value) == 3 and all(type(size) is int for size in value)
    return value if fits else None  # type: ignore[return-value]


def _json(args: dict[str, Any]) -> str:
    try:
        return orjson.dumps(args).decode()
    except TypeError:  # an integer beyond 64 bits, which a reader of text may make
        import json

        return json.dumps(args, default=str)
