"""The shapes of a recording as columns: what events that differ in time and arguments have in common."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tracepipe.event.columns import Bytes, Int32s
from tracepipe.event.shape import Shape
from tracepipe.reports.frames.libraries import np, pl

# Which frame an event goes to.
FRAMES = ("userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu_kernel", "gpu_thread")
GROUPS = tuple(name for name in FRAMES if name not in ("gpu_kernel", "gpu_thread"))
"""Those whose events nest, by the group that they nest in."""
_CODES = {name: code for code, name in enumerate(FRAMES)}
_NO_FRAME = len(FRAMES)


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
    return where(known, flat.reshape((len(values), 3)).alias(name))


def where(known: Any, values: pl.Series) -> pl.Series:
    """Values, and null where they are not known: numpy booleans, or a series of them."""
    return pl.select(pl.when(pl.Series(known, dtype=pl.Boolean)).then(values).alias(values.name)).to_series()


def schema() -> dict[str, Any]:
    """The columns that shapes alone decide."""
    number, text = pl.Int64(), pl.String()
    return {
        "layer": text, "name": text, "pid": number, "tid": number, "cpu": number, "comm": text,
        "gpu": number, "stream": number, "phase": text, "grid": three(), "block": three(),
    }  # fmt: skip


class ShapeTable:
    """Shapes by their numbers."""

    def __init__(self, shapes: Sequence[Shape | None]) -> None:
        self.shapes = shapes
        self.frames: Bytes = np.array([frame_of(shape) for shape in shapes], np.uint8)
        """The place in `FRAMES` of each shape's events."""
        self.has_launch = np.array([shape is not None and shape.has_launch for shape in shapes], np.bool_)
        self._columns: dict[str, pl.Series] = {}
        self._numbers: dict[str, tuple[Int32s, list[Any]]] = {}

    def _values(self, name: str) -> list[Any]:
        name = "type" if name == "layer" else name
        return [None if shape is None else getattr(shape, name) for shape in self.shapes]

    def numbered(self, name: str) -> tuple[Int32s, list[Any]]:
        """What shapes have of one column, each value once, and the place of each shape's there."""
        if name not in self._numbers:
            places: dict[Hashable, int] = {}
            numbers = [places.setdefault(value, len(places)) for value in self._values(name)]
            self._numbers[name] = np.array(numbers, np.int32), list(places)
        return self._numbers[name]

    def column(self, name: str) -> pl.Series:
        """A column of `schema`, with a row for each shape."""
        if name not in self._columns:
            self._columns[name] = series(name, self._values(name), schema()[name])
        return self._columns[name]

    def thread_names(self) -> dict[tuple[int | None, int | None], str]:
        """(pid, tid) → the name that the thread had last."""
        named = (shape for shape in self.shapes if shape is not None and shape.comm is not None)
        return {(shape.pid, shape.tid): shape.comm or "" for shape in named}


def frame_of(shape: Shape | None) -> int:
    """The place in `FRAMES` of a shape's events."""
    if shape is None:
        return _NO_FRAME
    return _CODES[shape.type if shape.on_stream or shape.row is None else shape.drawn_layer]


def group_of(shape: Shape | None) -> int:
    """The place in `FRAMES` of the group that nests together: copies on a stream nest with its kernels."""
    frame = frame_of(shape)
    return _CODES["transfer"] if frame == _CODES["gpu_kernel"] else frame
