"""The tables of a recording: shapes and arguments by number, as the columns of its events have them."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from zlib import crc32

import numpy as np
import orjson

from tracepipe.event.checks import first_fault, long_texts
from tracepipe.event.columns import NONE, Bools, Events, Int32s, Int64s, Texts, distinct
from tracepipe.event.model import OTHERS, cut_text
from tracepipe.event.shape import TEXTS, Shape, ShapeColumn, shape_of
from tracepipe.event.stacks import Stacks
from tracepipe.native import checked, library, owned, seed, text_of
from tracepipe.units import counted

# At most this many shapes, twice as many arguments, and this much of their text are kept between two batches.
KEPT_MAX = 1 << 13
KEPT_BYTES_MAX = 2 << 20
Args = dict[str, Any]
# A name that is longer than this may be kept several times: for its track, its kernel, an open slice.
LONG_NAME = 256
LONG_NAMES_BYTES_MAX = 2 << 20
_CUT_NAME = 100
# This many names are counted one by one.
_CUT_NAMES_MAX = 1 << 12


class LongNames:
    """Names of more than LONG_NAME characters, which may have LONG_NAMES_BYTES_MAX bytes in all. The further
    ones are cut, and end in a number that distinguishes them.
    """

    def __init__(self) -> None:
        self._kept: set[int] = set()
        self._cut: set[int] = set()
        self._bytes = 0

    def note(self) -> str:
        """A sentence about the names that were cut, "" if there are none."""
        if not self._cut:
            return ""
        words = counted(len(self._cut), f"name|names of more than {LONG_NAME} characters was|were cut")
        more = "over " if len(self._cut) >= _CUT_NAMES_MAX else ""
        return f"{more}{words}: those before have {LONG_NAMES_BYTES_MAX >> 20} MiB"

    def shortened(self, name: str) -> str:
        """A name that may be kept. The same name always gives the same one."""
        if len(name) <= LONG_NAME:
            return name
        text = name.encode("utf-8", "surrogatepass")
        # A module of digests would take 5 MB of memory.
        digest = crc32(text) << 32 | crc32(text[::-1])
        if digest in self._kept:
            return name
        if digest not in self._cut and self._bytes + len(text) <= LONG_NAMES_BYTES_MAX:
            self._bytes += len(text)
            self._kept.add(digest)
            return name
        if len(self._cut) < _CUT_NAMES_MAX:
            self._cut.add(digest)
        return f"{name[:_CUT_NAME]}… ({digest:016x})"

    def cut(self, name: str) -> str:
        """A name that may be kept, from a text of any length."""
        return self.shortened(cut_text(name))

    def shape(self, shape: Shape) -> Shape:
        """A shape whose texts may be kept. They may have any length before."""
        long: dict[str, Any] = {
            key: self.cut(text) for key in TEXTS if (text := getattr(shape, key)) and len(text) > LONG_NAME
        }
        return replace(shape, **long) if long else shape


class Tables:
    """Numbers shapes and arguments in the order in which they are read.

    `shapes` has None for a line that is not an event. Arguments are kept as the text that they have in the
    recording, and parsed when they are asked for.
    """

    reader: Any = None
    """The native core's reader, where it keeps the texts of arguments."""

    def __init__(self) -> None:
        self.shapes: list[Shape | None] = []
        self.stacks = Stacks()
        self.long_names = LongNames()
        self.rounds = self.shape_rounds = 0
        """How often numbers were given again, and those of shapes."""
        self._numbers: dict[Shape, int] = {}
        self._texts: list[bytes] = []
        self._shape_bytes = self._args_bytes = 0
        self.given_bytes = 0
        """The bytes of text of the events that were numbered since this was set to 0."""
        self._args_numbers: dict[bytes, int] = {}
        self._odd: dict[int, Args] = {}
        # It refers to these tables. Without it they are freed at once: a reading does not look for cycles.
        self._whole: ShapeColumn | None = None

    def shape_number(self, record: Mapping[str, Any]) -> int:
        """The number of the shape of a good record."""
        return self.number_of(shape_of(record))

    def number_of(self, shape: Shape) -> int:
        """The number of a shape."""
        number = self._numbers.get(shape)
        if number is None:
            kept = self.long_names.shape(shape)
            number = self._numbers.get(kept) if kept is not shape else None
            if number is None:
                number = self._numbers[kept] = self._new_shape(kept)
                self.given_bytes += _text_size(kept)
        return number

    def _new_shape(self, shape: Shape) -> int:
        self._shape_bytes += _text_size(shape)
        self.shapes.append(shape)
        return len(self.shapes) - 1

    def args_number(self, args: Args | None) -> int:
        """The number of arguments; NONE where there are none."""
        if not args:
            return NONE
        try:
            text = packed(args)
        except TypeError:  # an integer beyond 64 bits, which a reader of text may make
            # The text begins with a blank, which no other text of arguments does.
            number = self.text_number(b" " + json.dumps(args, default=str).encode("utf-8", "replace"))
            self._odd[number] = args
            return number
        self.given_bytes += len(text)
        return self.text_number(text)

    def text_number(self, text: bytes) -> int:
        """The number of arguments given as the JSON text of an object."""
        number = self._args_numbers.get(text)
        if number is None:
            number = self._args_numbers[text] = len(self._texts)
            self._texts.append(text)
            self._args_bytes += len(text)
        return number

    def text_numbers(self, texts: Texts) -> Int32s:
        """The numbers of arguments given as JSON texts of objects; NONE for an empty text."""
        return np.array([self.text_number(text) if text else NONE for text in texts], np.int32)

    def text(self, number: int) -> bytes:
        """The JSON text of arguments."""
        return self._texts[number]

    def texts(self) -> Texts:
        """The JSON texts of all arguments, by their numbers."""
        return Texts.of(self._texts)

    def args(self, number: int) -> Args:
        """Arguments by their number, as a new dict that may be changed."""
        if number == NONE:
            return {}
        odd = self._odd.get(number)
        return dict(odd) if odd is not None else orjson.loads(self.text(number))

    def is_odd(self, number: int) -> bool:
        """Whether arguments cannot be parsed from their text, as they have integers beyond 64 bits."""
        return number in self._odd

    @property
    def args_count(self) -> int:
        """The number of arguments."""
        return len(self._texts)

    def are_whole(self) -> Bools:
        """Whether the events of a shape are whole slices (X), by its number, and two places for no shape."""
        if self._whole is None:
            self._whole = ShapeColumn(self, lambda shape, _: shape.phase == "X", np.bool_)
        return self._whole.values()

    def crowded(self) -> bool:
        """Whether it is time to forget what is not in use any more and to number the rest again."""
        many = len(self.shapes) > KEPT_MAX or self.args_count > 2 * KEPT_MAX
        return many or self.text_bytes() > KEPT_BYTES_MAX

    def text_bytes(self) -> int:
        """The bytes of text that are kept."""
        return self.shape_bytes() + self._args_bytes

    def shape_bytes(self) -> int:
        """The bytes of text of shapes."""
        return self._shape_bytes

    def relieve(self, shapes: Int32s, args: Int32s) -> tuple[Int32s, Int32s]:
        """Keep these, and all shapes if there are few. Arguments may differ from event to event, and what
        each stage knows of a shape is not made again for those.
        """
        if len(self.shapes) <= KEPT_MAX and self.shape_bytes() <= KEPT_BYTES_MAX // 2:
            shapes = np.arange(len(self.shapes), dtype=np.int32)
        return self.keep(shapes, args)

    def keep(self, shapes: Int32s, args: Int32s) -> tuple[Int32s, Int32s]:
        """Forget all but these shapes and arguments. Return the new numbers of each by the old ones."""
        kept_shapes, kept_args = distinct(shapes[shapes >= 0]), distinct(args[args >= 0])
        new = _new_numbers(kept_shapes, len(self.shapes)), _new_numbers(kept_args, self.args_count)
        odd = {int(new[1][old]): value for old, value in self._odd.items() if new[1][old] >= 0}
        if len(kept_shapes) < len(self.shapes):
            self.shapes = [self.shapes[at] for at in kept_shapes.tolist()]
            self._numbers = {shape: at for at, shape in enumerate(self.shapes) if shape is not None}
            self._keep_shapes(kept_shapes)
            self.shape_rounds += 1
        self._keep_args(kept_args)
        self._odd = odd
        self.rounds += 1
        return new

    def _keep_shapes(self, shapes: Int32s) -> None:
        self._shape_bytes = sum(map(_text_size, self._numbers))

    def _keep_args(self, args: Int32s) -> None:
        self._texts = [self._texts[at] for at in args.tolist()]
        self._args_numbers = {text: at for at, text in enumerate(self._texts)}
        self._args_bytes = sum(map(len, self._texts))


def packed(value: object) -> bytes:
    """The JSON text of a value that is kept. Raises TypeError."""
    # The bytes that orjson returns hold at least 4 KB of memory. A copy holds no more than its size.
    return bytes(memoryview(orjson.dumps(value)))


def _text_size(shape: Shape) -> int:
    return sum(len(getattr(shape, key) or "") for key in TEXTS)


def _new_numbers(kept: Int32s, count: int) -> Int32s:
    """The new numbers by the old ones. The last place is for NONE. The two numbers below NONE stay too."""
    new = np.full(count + 3, NONE, np.int32)
    new[kept] = np.arange(len(kept), dtype=np.int32)
    new[[-3, -2]] = -3, -2
    return new


# The core's tables, by number.
_SHAPES, _ARGS = 0, 1


class NativeTables(Tables):
    """Tables whose texts the core keeps. A shape is parsed when a line has it for the first time."""

    def __init__(self, core: ctypes.CDLL) -> None:
        super().__init__()
        self._core = core
        self.reader = owned(self, core.tp_reader_new(seed()), core.tp_reader_free)

    def _number(self, table: int, text: bytes) -> int:
        return checked(self._core.tp_reader_number(self.reader, table, text, len(text)))

    def _new_shape(self, shape: Shape) -> int:
        # No line has such a text.
        number = self._number(_SHAPES, repr(shape).encode("utf-8", "surrogatepass"))
        assert number == len(self.shapes)
        self.shapes.append(shape)
        return number

    def text_number(self, text: bytes) -> int:
        return self._number(_ARGS, text)

    def text_numbers(self, texts: Texts) -> Int32s:
        numbers = np.empty(len(texts), np.int32)
        refs = texts.data, texts.ends.ctypes.data, len(texts), numbers.ctypes.data
        checked(self._core.tp_reader_numbers(self.reader, _ARGS, *refs))
        return numbers

    def text(self, number: int) -> bytes:
        return text_of(self._core.tp_reader_text, self.reader, _ARGS, number)

    def texts(self) -> Texts:
        ends = np.empty(self.args_count, np.int64)
        return Texts(text_of(self._core.tp_reader_texts, self.reader, _ARGS, ends.ctypes.data), ends)

    @property
    def args_count(self) -> int:
        return int(self._core.tp_reader_count(self.reader, _ARGS))

    def text_bytes(self) -> int:
        return self.shape_bytes() + int(self._core.tp_reader_bytes(self.reader, _ARGS))

    def shape_bytes(self) -> int:
        return int(self._core.tp_reader_bytes(self.reader, _SHAPES))

    def _keep_shapes(self, shapes: Int32s) -> None:
        self._keep(_SHAPES, shapes)

    def _keep_args(self, args: Int32s) -> None:
        self._keep(_ARGS, args)

    def _keep(self, table: int, kept: Int32s) -> None:
        numbers = kept.astype(np.int64)
        checked(self._core.tp_reader_keep(self.reader, table, numbers.ctypes.data, len(numbers)))

    def parse_shapes(self) -> bool:
        """Parse the new shapes. Return whether any of them is not of an event."""
        bad = False
        for number in range(len(self.shapes), self._core.tp_reader_count(self.reader, _SHAPES)):
            record = orjson.loads(text_of(self._core.tp_reader_text, self.reader, _SHAPES, number))
            good = type(record) is dict and record.get("ts_ns") == 0 and "phase" in record
            good = good and not first_fault(record) and record["type"] not in OTHERS
            good = good and not long_texts(record)  # these are cut, with a problem
            self.shapes.append(self.long_names.shape(shape_of(record)) if good else None)
            bad = bad or not good
        return bad


def new_tables() -> Tables:
    """Return tables whose texts the native core keeps, where it is loaded."""
    core = library()
    return Tables() if core is None else NativeTables(core)


def in_order(events: Events, tables: Tables) -> Events:
    """Events in the order of time, then of the file; an X before those it encloses."""
    order = order_of(events.ts_ns, events.dur_ns, tables.are_whole()[events.shape])
    return events if order is None else events.take(order)


def order_of(ts_ns: Int64s, dur_ns: Int64s, whole: Bools) -> Int64s | None:
    """The places of events in that order, None where they are in it already; `whole` is which are X."""
    if not bool((ts_ns[1:] < ts_ns[:-1]).any()):
        at = np.flatnonzero(whole)
        together = ts_ns[at[1:]] == ts_ns[at[:-1]]
        if not bool((together & (dur_ns[at[1:]] > dur_ns[at[:-1]])).any()):
            return None
    order = np.argsort(ts_ns, kind="stable")
    places = np.flatnonzero(whole[order])
    if len(places) > 1:
        of = order[places]
        order[places] = of[np.lexsort((-dur_ns[of], ts_ns[of]))]
    return order
