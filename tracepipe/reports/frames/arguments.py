"""The arguments of a recording by their numbers. Each is parsed once, when one of its values is needed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, distinct
from tracepipe.event.tables import Args
from tracepipe.event.vocabulary import ADDRESS_KEYS, SIZE_KEYS
from tracepipe.reports.frames.eager import picked
from tracepipe.reports.frames.kept_args import KeptArgs
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import series, three
from tracepipe.reports.frames.stored import parts

# The texts that become a column at a time.
_AT_ONCE = 1 << 14
_INT64 = range(-(1 << 63), 1 << 63)


class _Numbers:
    """An integer from each of the arguments, where it is known."""

    def __init__(self, count: int) -> None:
        # The last place is for "no arguments" (NONE).
        self.values: Int64s = np.zeros(count + 1, np.int64)
        self.known = np.zeros(count + 1, np.bool_)

    def put(self, number: int, value: object) -> None:
        """Set the value of some arguments, if it is an integer of 64 bits."""
        if type(value) is int and value in _INT64:
            self.values[number], self.known[number] = value, True

    def either(self, first: Int32s, then: Int32s) -> tuple[Int64s, Bools]:
        """The values of `first`, or of `then` where those have none, and flags for known values.
        Shapes `(n,)`.
        """
        numbers = np.where(self.known[first], first, then)
        return self.values[numbers], self.known[numbers]


class ArgsTable:
    """The values of arguments that reports need, as columns by their numbers. NONE has no values.

    Arrays of numbers, and the columns of their values, have the shape `(n,)`.
    """

    def __init__(self, kept: KeptArgs) -> None:
        self._kept = kept
        # np.zeros takes memory only where it is written, and most arguments are never parsed.
        self._size_bytes, self._result = _Numbers(kept.count), _Numbers(kept.count)
        self._sizes: dict[str, dict[int, Any]] = {"grid": {}, "block": {}}
        self._is_read = np.zeros(kept.count + 1, np.bool_)

    def afresh(self) -> ArgsTable:
        """The same table with nothing parsed so far."""
        return ArgsTable(self._kept)

    def args(self, number: int) -> Args:
        """All arguments with a number."""
        return self._kept.args(number)

    def text_bytes(self, numbers: Int32s) -> int:
        """About how many bytes of text some arguments have."""
        return self._kept.text_bytes(numbers)

    def read(self, numbers: Int32s) -> None:
        """Parse some arguments, and cache their numbers and sizes."""
        wanted = distinct(numbers)
        wanted = wanted[(wanted != NONE) & ~self._is_read[wanted]]
        self._is_read[wanted] = True
        for number in itertools.chain.from_iterable(wanted[part].tolist() for part in parts(len(wanted))):
            args = self._kept.args(number)
            self._size_bytes.put(number, next((args[key] for key in SIZE_KEYS if key in args), None))
            self._result.put(number, args.get("result", args.get("retval")))
            for key, sizes in self._sizes.items():
                if key in args and (size := _three(args[key])):
                    sizes[number] = size

    def size_bytes(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """The sizes among the arguments of begins, else of ends, and flags for known ones."""
        self.read(args)
        self.read(end_args)
        return self._size_bytes.either(args, end_args)

    def result(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """The results among the arguments of ends, else of begins, and flags for known ones."""
        self.read(args)
        self.read(end_args)
        return self._result.either(end_args, args)

    def sizes(self, key: str, numbers: Int32s) -> pl.Series | None:
        """The grid or block among arguments, null where there is none; None where no arguments have one."""
        self.read(numbers)
        known = self._sizes[key]
        if not known:
            return None
        places = pl.Series(np.where(np.isin(numbers, list(known)), numbers, NONE))
        by_number = series(key, [*known.values(), None], three())
        to = {number: at for at, number in enumerate(known)} | {NONE: len(known)}
        return by_number.gather(places.replace_strict(to, return_dtype=pl.Int64))

    def addresses(self, numbers: Int32s) -> pl.Series:
        """The addresses among arguments, as text."""
        return _gathered("address", numbers + 1, self._address)

    def _address(self, number: int) -> str | None:
        args = self._kept.args(number - 1) if number else {}
        address = next((args[key] for key in ADDRESS_KEYS if key in args), None)
        return None if address is None else str(address).encode("utf-8", "replace").decode()

    def texts(self, numbers: Int32s) -> pl.Series:
        """Arguments as JSON text, written as `orjson` writes it."""
        return _gathered("args", numbers + 1, self._text)

    def _text(self, number: int) -> str | None:
        text = self._kept.json(number - 1) if number else b"{}"
        return None if text == b"{}" else text.decode()

    def texts_of(self, key: str, numbers: Int32s) -> list[str | None]:
        """One argument as text, None where it is missing."""
        found: dict[int, str | None] = {NONE: None}
        for number in numbers.tolist():
            if number not in found:
                value = self._kept.args(number).get(key)
                found[number] = (
                    value
                    if value is None or isinstance(value, str)
                    else json.dumps(value, separators=(",", ":"))
                )
        return [found[number] for number in numbers.tolist()]


def _gathered(name: str, numbers: Int32s, text: Callable[[int], str | None]) -> pl.Series:
    """A column of the texts of non-negative numbers; each text is computed once."""
    wanted, places = np.unique(numbers, return_inverse=True)
    parts = [
        pl.Series(
            name, [text(number) for number in wanted[start : start + _AT_ONCE].tolist()], dtype=pl.String
        )
        for start in range(0, len(wanted), _AT_ONCE)
    ]
    whole = pl.concat(parts) if parts else pl.Series(name, [], dtype=pl.String)
    return picked(whole, places)


def _three(value: object) -> list[int] | None:
    fits = isinstance(value, list) and len(value) == 3 and all(type(size) is int for size in value)
    return value if fits else None  # type: ignore[return-value]
