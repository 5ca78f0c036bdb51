"""The tables of a recording: shapes and arguments by number, as the columns of its events have them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson

from tracepipe.event.columns import NONE, Bools, Int32s, Texts, distinct
from tracepipe.event.shape import Shape, shape_of
from tracepipe.event.stacks import Stacks

# At most this many shapes and arguments, and this much of their text, are kept between two batches.
KEPT_MAX = 1 << 13
KEPT_BYTES_MAX = 2 << 20
Args = dict[str, Any]


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
        self.rounds = 0
        """How often numbers were given again."""
        self._numbers: dict[Shape, int] = {}
        self._texts: list[bytes] = []
        self._text_bytes = 0
        self.given_bytes = 0
        """The bytes of text of the events that were numbered since this was set to 0."""
        self._args_numbers: dict[bytes, int] = {}
        self._odd: dict[int, Args] = {}
        self._whole = np.zeros(2, np.bool_)

    def shape_number(self, record: Mapping[str, Any]) -> int:
        """The number of the shape of a good record."""
        return self.number_of(shape_of(record))

    def number_of(self, shape: Shape) -> int:
        """The number of a shape."""
        number = self._numbers.get(shape)
        if number is None:
            number = self._numbers[shape] = self._new_shape(shape)
            self.given_bytes += _text_size(shape)
        return number

    def _new_shape(self, shape: Shape) -> int:
        self._text_bytes += _text_size(shape)
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
            self._text_bytes += len(text)
        return number

    def text_numbers(self, texts: Texts) -> Int32s:
        """The numbers of arguments given as JSON texts of objects; NONE for an empty text."""
        return np.array([self.text_number(text) if text else NONE for text in texts], np.int32)

    def text(self, number: int) -> bytes:
        """The JSON text of arguments."""
        return self._texts[number]

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
        known = len(self._whole) - 2
        if known < len(self.shapes):
            new = [shape is not None and shape.phase == "X" for shape in self.shapes[known:]]
            self._whole = np.concatenate([self._whole[:known], np.array([*new, False, False], np.bool_)])
        return self._whole

    def crowded(self) -> bool:
        """Whether it is time to forget what is not in use any more and to number the rest again."""
        return max(len(self.shapes), self.args_count) > KEPT_MAX or self.text_bytes() > KEPT_BYTES_MAX

    def text_bytes(self) -> int:
        """The bytes of text that are kept."""
        return self._text_bytes

    def keep(self, shapes: Int32s, args: Int32s) -> tuple[Int32s, Int32s]:
        """Forget all but these shapes and arguments. Return the new numbers of each by the old ones."""
        kept_shapes, kept_args = distinct(shapes[shapes >= 0]), distinct(args[args >= 0])
        new = _new_numbers(kept_shapes, len(self.shapes)), _new_numbers(kept_args, self.args_count)
        odd = {int(new[1][old]): value for old, value in self._odd.items() if new[1][old] >= 0}
        self.shapes = [self.shapes[at] for at in kept_shapes.tolist()]
        self._numbers = {shape: at for at, shape in enumerate(self.shapes) if shape is not None}
        self._keep_texts(kept_shapes.tolist(), kept_args.tolist())
        self._odd = odd
        self._whole = np.zeros(2, np.bool_)
        self.rounds += 1
        return new

    def _keep_texts(self, shapes: Iterable[int], args: Iterable[int]) -> None:
        self._texts = [self._texts[at] for at in args]
        self._args_numbers = {text: at for at, text in enumerate(self._texts)}
        self._text_bytes = sum(map(len, self._texts)) + sum(map(_text_size, self._numbers))


def packed(value: object) -> bytes:
    """The JSON text of a value that is kept. Raises TypeError."""
    # The bytes that orjson returns hold at least 4 KB of memory. A copy holds no more than its size.
    return bytes(memoryview(orjson.dumps(value)))


def _text_size(shape: Shape) -> int:
    return len(shape.name) + sum(len(text or "") for text in (shape.comm, shape.layer, shape.domain))


def _new_numbers(kept: Int32s, count: int) -> Int32s:
    """The new numbers by the old ones. The last place is for NONE. The two numbers below NONE stay too."""
    new = np.full(count + 3, NONE, np.int32)
    new[kept] = np.arange(len(kept), dtype=np.int32)
    new[[-3, -2]] = -3, -2
    return new
