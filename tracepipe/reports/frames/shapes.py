"""The shapes of a recording as columns. A shape is what events have in common that differ only in time and
arguments."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, Literal, overload

from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, Int64s, Three, distinct
from tracepipe.event.model import LAYERS, Record
from tracepipe.event.shape import Shape
from tracepipe.event.vocabulary import RUNNING
from tracepipe.kernel_names import short_kernel_name
from tracepipe.reports.frames.arrays import AnyArray, Ints
from tracepipe.reports.frames.eager import nulls, picked, where
from tracepipe.reports.frames.grouping import equal
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.numbered import Numbered
from tracepipe.reports.frames.stored import ROWS_AT_ONCE, empty, made, parts

FRAMES = tuple(layer for layer in LAYERS if layer != "gpu_warp")  # warps have separate columns
"""The frames of a run."""
GROUPS = tuple(name for name in FRAMES if name not in ("gpu_kernel", "gpu_thread"))
"""The groups of frames whose events nest together."""
_CODES = {name: code for code, name in enumerate(FRAMES)}
NO_SUCH = -(1 << 31)
"""The number of a value that no shape has."""
_HAS_DUR, _HAS_LAUNCH = 1, 2
_SHAPE, _SIZES, _PLACE = Struct("<2i"), Struct("<6q"), Struct("<q10i3B")
_OF_PLACE = [
    ("stream", "<i8"),
    *((name, "<i4") for name in ("pid", "tid", "cpu", "gpu", "range")),
    *((name, "<i4") for name in ("comm", "domain", "kernel", "sizes", "layer")),
    *((name, "u1") for name in ("phase", "frame", "flags")),
]  # fmt: skip
# The types of the columns of `rows`: on a stream or not, layer, GPU or process, stream or thread, domain,
# range.
_KINDS_OF_ROWS = ("?", "i4", "i4", "i8", "i4", "i4")
_TEXTS = ("name", "comm", "domain", "kernel")
_NUMBERS = ("pid", "tid", "cpu", "gpu", "range", "stream")
_MOST = {name: (1 << 63) - 1 if name == "stream" else (1 << 31) - 1 for name in _NUMBERS}
# The most processes and threads whose given names are kept.
_GIVEN_MAX = 1 << 16
# No side of a block is longer. The product of three such sides fits 64 bits.
_THREADS_MOST = 1 << 20
# The texts that become a column at a time.
_AT_ONCE = 1 << 14


def three() -> pl.DataType:
    """The polars type of a grid, a block, or an index into one."""
    return pl.Array(pl.Int64(), 3)


def series(name: str, values: Sequence[Sequence[int] | None], dtype: pl.DataType) -> pl.Series:
    """A column of these values; null where a value is None, or does not have the type."""
    if dtype != three():
        return pl.Series(name, values, dtype=dtype, strict=False)
    if not any(values):
        return nulls(name, len(values), dtype)
    # One flat list, as polars converts lists of lists one by one.
    flat = pl.Series([size for value in values for size in value or (0, 0, 0)], dtype=pl.Int64, strict=False)
    known = pl.Series([value is not None for value in values])
    return where(known, flat.reshape((len(values), 3)).alias(name))


class ShapeTable:
    """Shapes by number, each once. A shape is a name at a place: the place is everything else, with the whole
    name of a kernel where that is longer.

    Columns have numbers. In those of `_NUMBERS` a number is the value itself, or less than NONE for a value
    that is too large; in the others it is an index into a table. NONE means "no value". A layer is an index
    into `LAYERS`, or the inverted index of a text.
    """

    def __init__(self) -> None:
        self._texts, self._sizes = Numbered(), Numbered(_SIZES.size)
        self._places, self._shapes = Numbered(_PLACE.size), Numbered(_SHAPE.size)
        self._large: dict[int, int] = {}
        self._larges: list[int] = []
        self._kinds: dict[tuple[str, bool, bool], tuple[int, int]] = {}
        self._columns: dict[str, pl.Series] = {}
        self._given: dict[tuple[int | None, int | None], str] = {}
        self._named: tuple[Ints, Ints] | None = None

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def names(self) -> Numbered:
        """The texts of names, by their numbers in the column `name`."""
        return self._texts

    def number(self, shape: Shape | None) -> int:
        """The number of a shape; NONE for None."""
        if shape is None:
            return NONE
        numbers = (
            self._number(name, getattr(shape, name))
            for name in ("stream", "pid", "tid", "cpu", "gpu", "range")
        )
        flags = shape.has_dur * _HAS_DUR | shape.has_launch * _HAS_LAUNCH
        layer, frame = self._kind(shape)
        if shape.layer is not None:
            layer = ~self._text(shape.layer)
        # Some formats and engines include a kernel's parameters, others do not: the short names are equal.
        name = short_kernel_name(shape.name) if shape.type == "gpu_kernel" else shape.name
        place = _PLACE.pack(
            *numbers,
            self._text(shape.comm),
            self._text(shape.domain),
            self._text(None if name == shape.name else shape.name),
            self._size(shape),
            layer,
            ord(shape.phase),
            frame,
            flags,
        )
        return self._shapes.number(_SHAPE.pack(self._text(name), self._places.number(place)))

    def put_away(self) -> None:
        """Move the shapes to files, where there are many. No shape may get a new number afterwards. Raises
        OutputError.
        """
        for one in (self._texts, self._sizes, self._places, self._shapes):
            one.put_away()

    def _text(self, text: str | None) -> int:
        return NONE if text is None else self._texts.number(text.encode("utf-8", "surrogatepass"))

    def _text_at(self, number: int) -> str:
        return self._texts[number].decode("utf-8", "surrogatepass")

    def _number(self, name: str, value: int | None) -> int:
        if value is None:
            return NONE
        if 0 <= value <= _MOST[name]:
            return value
        if value not in self._large:
            self._large[value] = len(self._larges)
            self._larges.append(value)
        return NONE - 1 - self._large[value]

    def _size(self, shape: Shape) -> int:
        if shape.grid is None and shape.block is None:
            return NONE
        sizes = (*(shape.grid or (NONE,) * 3), *(shape.block or (NONE,) * 3))
        return self._sizes.number(_SIZES.pack(*(min(size, (1 << 63) - 1) for size in sizes)))

    def _kind(self, shape: Shape) -> tuple[int, int]:
        """The index of a shape's layer in `LAYERS`, and of its frame in `FRAMES`."""
        key = shape.type, shape.phase != "I" and shape.name != RUNNING, shape.gpu is None
        if key not in self._kinds:
            frame = shape.type if shape.on_stream or shape.row is None else shape.drawn_layer
            self._kinds[key] = LAYERS.index(shape.type), _CODES[frame]
        return self._kinds[key]

    def _of_shapes(self) -> AnyArray:
        return np.frombuffer(self._shapes.data, np.dtype([("name", "<i4"), ("place", "<i4")]))

    def _of_places(self) -> AnyArray:
        return np.frombuffer(self._places.data, np.dtype(_OF_PLACE))

    def column(self, name: str, shapes: Ints | int) -> AnyArray:
        """The numbers of a column for some shapes, or for rows that have these shapes. Shapes `(n,)`."""
        if isinstance(shapes, int) or np.size(shapes) <= ROWS_AT_ONCE:
            return self._some(name, shapes)
        kind = np.int32 if name == "name" else np.dtype(_OF_PLACE)[name]
        return made(len(shapes), kind, lambda part: self._some(name, shapes[part]))

    def _some(self, name: str, shapes: Ints | int) -> AnyArray:
        if name == "name":
            return self._of_shapes()["name"][shapes]
        found: AnyArray = self._of_places()[name][self._of_shapes()["place"][shapes]]
        return found

    def _at(self, name: str) -> AnyArray:
        """A column of all shapes, shape `(shapes,)`."""
        found: AnyArray = self.column(name, np.arange(len(self), dtype=np.int32))
        return found

    @overload
    def value(self, name: Literal["name", "layer"], number: int) -> str: ...
    @overload
    def value(self, name: Literal["comm"], number: int) -> str | None: ...
    @overload
    def value(self, name: Literal["pid", "tid"], number: int) -> int | None: ...

    def value(self, name: str, number: int) -> int | str | None:
        """The value of a number in a column; None for NONE."""
        if name == "layer":
            return LAYERS[number] if number >= 0 else self._text_at(~number)
        if name == "phase":
            return chr(number)
        if number == NONE:
            return None
        if name in _TEXTS:
            return self._text_at(number)
        return number if number > NONE else self._larges[NONE - 1 - number]

    def ids_of(self, shape: int) -> tuple[int | None, int | None]:
        """The process and the thread of a shape."""
        pid, tid = (int(self.column(name, shape)) for name in ("pid", "tid"))
        return self.value("pid", pid), self.value("tid", tid)

    def number_of(self, name: str, value: object) -> int:
        """The number of a value in a column, NO_SUCH where no shape has it."""
        if name == "layer" and value in LAYERS:
            return LAYERS.index(value)
        if name == "phase" and isinstance(value, str):
            return ord(value)
        if value is None:
            return NONE
        if isinstance(value, str):
            number = self._texts.find(value.encode("utf-8", "surrogatepass"))
            return NO_SUCH if number == NONE else ~number if name == "layer" else number
        assert isinstance(value, int)
        return value if value <= _MOST[name] else NONE - 1 - self._large.get(value, -NO_SUCH)

    @property
    def frames(self) -> Bytes:
        """The index in `FRAMES` of each shape's events. Shape `(shapes,)`."""
        frames: Bytes = self._at("frame")
        return frames

    def groups(self, numbers: Int32s) -> Bytes:
        """The index in `FRAMES` of the group in which shapes nest: copies on a stream nest with kernels.
        Shapes `(n,)`.
        """
        frames = self.column("frame", numbers)
        groups: Bytes = np.where(frames == _CODES["gpu_kernel"], np.uint8(_CODES["transfer"]), frames)
        return groups

    def has_launch(self, shapes: Ints) -> Bools:
        """Flags the shapes that have launch ids. Shapes `(n,)`."""
        has: Bools = (self.column("flags", shapes) & _HAS_LAUNCH) != 0
        return has

    def has_dur(self, shapes: Ints) -> Bools:
        """Flags the shapes that have a duration. Shapes `(n,)`."""
        has: Bools = (self.column("flags", shapes) & _HAS_DUR) != 0
        return has

    @property
    def is_whole(self) -> Bools:
        """Flags the shapes whose events are whole slices (X). Shape `(shapes,)`."""
        whole: Bools = self._at("phase") == ord("X")
        return whole

    def rows(self, shapes: Ints) -> tuple[Any, ...]:
        """The row in which the events of each shape nest, as in `Shape.row`: a tuple of columns of shape
        `(n,)`.
        """
        found: list[AnyArray] = [empty(len(shapes), kind) for kind in _KINDS_OF_ROWS]
        for part in parts(len(shapes)):
            for column, values in zip(found, self._rows(shapes[part]), strict=True):
                column[part] = values
        return tuple(found)

    def _rows(self, shapes: Ints) -> tuple[Any, ...]:
        frame, gpu, layer = (self.column(name, shapes) for name in ("frame", "gpu", "layer"))
        on_stream = (frame == _CODES["gpu_kernel"]) | ((frame == _CODES["transfer"]) & (gpu != NONE))
        stream, pid, tid = (self.column(name, shapes) for name in ("stream", "pid", "tid"))
        domain, number = self.column("domain", shapes), self.column("range", shapes)
        first = np.where(on_stream, np.where(gpu == NONE, 0, gpu), pid)
        own = np.where(layer < 0, layer, 0)
        second = np.where(on_stream, np.where(stream == NONE, 0, stream), tid)
        return on_stream, own, first, np.where(number == NONE, second, NONE), domain, number

    def series(self, name: str, shapes: Int32s) -> pl.Series:
        """A column of a frame, for rows that have these shapes, `(n,)`; null where there is no value."""
        if name in ("grid", "block"):
            return self._size_series(name, self.column("sizes", shapes))
        values = self.column(name, shapes)
        if name in _NUMBERS:
            return self._number_series(name, values)
        if name in _TEXTS and len(values) < len(self._texts):
            return pl.Series(name, self.texts(name, shapes), dtype=pl.String)
        if name == "layer" and not (values < 0).any():
            return picked(pl.Series(name, LAYERS, dtype=pl.String), values)
        if name not in self._columns:
            self._columns[name] = self._text_series(name)
        places = np.where(values == NONE, len(self._texts), values) if name in _TEXTS else values
        if name == "layer":
            places = np.where(values < 0, len(LAYERS) + ~values, values)
        return picked(self._columns[name], places).alias(name)

    def texts(self, name: str, shapes: Int32s) -> list[str | None]:
        """A column of texts for a few rows, None where there is no text."""
        numbers = self.column(name, shapes).tolist()
        known = {number: self.text(number) for number in set(numbers) - {NONE}}
        return [known.get(number) for number in numbers]

    def text_bytes(self, shapes: Ints) -> int:
        """How many bytes of text some shapes have, each text counted once."""
        numbers = [distinct(self.column(name, shapes)) for name in _TEXTS]
        return sum(int(self._texts.sizes(some[some != NONE]).sum()) for some in numbers)

    def text(self, number: int) -> str:
        """The text with a number; invalid Unicode is replaced."""
        return self._texts[number].decode("utf-8", "replace")

    def _text_series(self, name: str) -> pl.Series:
        """The texts by the numbers of a column, and a null after them."""
        if name == "layer":
            return pl.concat(
                [pl.Series(name, LAYERS, dtype=pl.String), self._text_series("name").alias(name)]
            )
        if name == "phase":
            return pl.Series(name, [chr(code) for code in range(128)], dtype=pl.String)
        other = next((column for of, column in self._columns.items() if of in _TEXTS), None)
        if other is not None:
            return other
        count = len(self._texts)
        parts = [
            pl.Series(
                name,
                [self.text(at) for at in range(start, min(start + _AT_ONCE, count))],
                dtype=pl.String,
            )
            for start in range(0, count, _AT_ONCE)
        ]
        return pl.concat([*parts, pl.Series(name, [None], dtype=pl.String)])

    def numbers(self, name: str, shapes: Int32s, without: int) -> Int64s:
        """A column of integers like `series`, with `without` where there is no value. Shapes `(n,)`."""
        kept = self.column(name, shapes)

        def some(part: slice) -> Int64s:
            values = kept[part].astype(np.int64)
            for at in np.flatnonzero(values < NONE).tolist():
                large = self._larges[NONE - 1 - int(values[at])]
                values[at] = large if large < 1 << 63 else NONE
            return np.where(values == NONE, without, values)

        numbers: Int64s = made(len(kept), np.int64, some)
        return numbers

    def _number_series(self, name: str, values: Ints) -> pl.Series:
        large = np.flatnonzero(values < NONE)
        known = values != NONE
        if len(large):
            values = values.astype(np.int64)
            given = [self._larges[NONE - 1 - number] for number in values[large].tolist()]
            fits = [value < 1 << 63 for value in given]
            values[large] = [value if fit else 0 for value, fit in zip(given, fits, strict=True)]
            known[large] = fits
        return where(known, pl.Series(name, values.astype(np.int64)))

    def block_threads(self, shapes: Ints) -> Int64s:
        """How many threads a block has, 0 where that was not recorded. Shapes `(n,)`."""
        numbers = self.column("sizes", shapes)
        if not len(self._sizes):
            return np.zeros(len(numbers), np.int64)
        blocks = np.frombuffer(self._sizes.data, np.int64).reshape(-1, 2, 3)[:, 1].clip(0, _THREADS_MOST)
        threads: Int64s = np.where(numbers == NONE, 0, blocks.prod(axis=1)[np.maximum(numbers, 0)])
        return threads

    def sizes(self, shapes: Ints) -> tuple[list[Three | None], list[Three | None]]:
        """The grids and the blocks of some shapes, None where one was not recorded."""
        numbers = self.column("sizes", shapes)
        # The last place is for shapes that have neither.
        both = np.full((len(self._sizes) + 1, 2, 3), NONE, np.int64)
        both[:-1].reshape(-1)[:] = np.frombuffer(bytes(self._sizes.data), np.int64)
        grids, blocks = (
            [None if x == NONE else (x, y, z) for x, y, z in both[numbers, at].tolist()] for at in range(2)
        )
        return grids, blocks

    def _size_series(self, name: str, numbers: Int32s) -> pl.Series:
        if not len(self._sizes):
            return pl.repeat(None, len(numbers), dtype=three(), eager=True).alias(name)
        both = np.frombuffer(self._sizes.data, np.int64).reshape(-1, 2, 3)
        sizes = both[:, 0 if name == "grid" else 1][np.maximum(numbers, 0)]
        return where((numbers != NONE) & (sizes[:, 0] != NONE), pl.Series(name, sizes))

    def give_name(self, record: Record) -> None:
        """Add the name that a recording gives a process or a thread."""
        key = record["pid"], record.get("tid")
        if "name" in record and (key in self._given or len(self._given) < _GIVEN_MAX):
            self._given[key] = record["name"]

    def given_name(self, pid: int | None, tid: int | None) -> str | None:
        """The name that the recording gives a thread, or a process where `tid` is None."""
        return self._given.get((pid, tid))

    def thread_name(self, pid: int | None, tid: int | None) -> str | None:
        """The name that the recording gives a thread, else its last name."""
        if given := self.given_name(pid, tid):
            return given
        if self._named is None:
            self._named = self._threads_named()
        keys, comms = self._named
        key = _thread_key(self.number_of("pid", pid), self.number_of("tid", tid))
        at = int(np.searchsorted(keys, key))
        return self.value("comm", int(comms[at])) if at < len(keys) and keys[at] == key else None

    def _threads_named(self) -> tuple[Ints, Ints]:
        """The sorted keys of threads that have names, and their last names. Shapes `(threads,)`."""
        comm = self._at("comm")
        # The name that an annotation gives a thread is not the name of its process.
        is_known = (comm != NONE) & (self.frames != _CODES["annotation"])
        named = np.flatnonzero(is_known)[::-1]
        keys = _thread_key(self._at("pid")[named].astype(np.int64), self._at("tid")[named].astype(np.int64))
        _, first = equal(keys)
        return keys[first], comm[named[first]]


@overload
def _thread_key(pid: int, tid: int) -> int: ...
@overload
def _thread_key(pid: Int64s, tid: Int64s) -> Int64s: ...
def _thread_key(pid: Int64s | int, tid: Int64s | int) -> Int64s | int:
    """Process and thread in one integer of 64 bits."""
    return (pid << 32) | (tid & ((1 << 32) - 1))
