"""The arguments of a recording by their numbers: read once each, when one of their columns is asked for."""

from __future__ import annotations

import json
from typing import Any

import orjson

from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import ADDRESS_KEYS
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import series, three

_INT64 = range(-(1 << 63), 1 << 63)


class _Numbers:
    """An integer of each arguments, where it is known."""

    def __init__(self, count: int) -> None:
        # The last place is for no arguments.
        self.values: Int64s = np.zeros(count + 1, np.int64)
        self.known = np.zeros(count + 1, np.bool_)

    def put(self, number: int, value: object) -> None:
        """Keep the value of one, if it is an integer of 64 bits."""
        if type(value) is int and value in _INT64:
            self.values[number], self.known[number] = value, True

    def either(self, first: Int32s, then: Int32s) -> tuple[Int64s, Bools]:
        """The values of the first arguments, or of others where those have none; and which are known."""
        numbers = np.where(self.known[first], first, then)
        return self.values[numbers], self.known[numbers]


class ArgsTable:
    """What reports ask of arguments, as columns by their numbers; NONE has nothing of it."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        count = tables.args_count
        self._size_bytes, self._result = _Numbers(count), _Numbers(count)
        self._address: list[str | None] = [None] * (count + 1)
        self._sizes: dict[str, dict[int, Any]] = {"grid": {}, "block": {}}
        self._texts: list[str | None] = [None] * (count + 1)
        self._is_read = np.zeros(count + 1, np.bool_)
        self._has_text = np.zeros(count + 1, np.bool_)

    def args(self, number: int) -> Args:
        """All of one."""
        return self._tables.args(number)

    @staticmethod
    def _new(numbers: Int32s, done: Any) -> list[int]:
        """Those of some numbers that are not done yet; they are now."""
        wanted = np.zeros(len(done), np.bool_)
        wanted[numbers] = True
        wanted[NONE] = False
        wanted &= ~done
        done |= wanted
        return np.flatnonzero(wanted).tolist()

    def read(self, numbers: Int32s) -> None:
        """Make what the other methods give of these arguments, but for their texts."""
        for number in self._new(numbers, self._is_read):
            args = self._tables.args(number)
            given = args.get
            self._size_bytes.put(number, given("size_bytes", given("size")))
            self._result.put(number, given("result", given("retval")))
            address = next((args[key] for key in ADDRESS_KEYS if key in args), None)
            self._address[number] = None if address is None else str(address)
            for key, sizes in self._sizes.items():
                if key in args and (size := _three(args[key])):
                    sizes[number] = size

    def size_bytes(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """Sizes that begins, or else ends, have among their arguments, and which are known."""
        self.read(args)
        self.read(end_args)
        return self._size_bytes.either(args, end_args)

    def result(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """Results that ends, or else begins, have among their arguments, and which are known."""
        self.read(args)
        self.read(end_args)
        return self._result.either(end_args, args)

    def sizes(self, key: str, numbers: Int32s) -> pl.Series | None:
        """The grid or block among arguments, null without; None where none has any."""
        self.read(numbers)
        known = self._sizes[key]
        if not known:
            return None
        places = pl.Series(np.where(np.isin(numbers, list(known)), numbers, NONE))
        by_number = series(key, [*known.values(), None], three())
        to = {number: at for at, number in enumerate(known)} | {NONE: len(known)}
        return by_number.gather(places.replace_strict(to, return_dtype=pl.Int64))

    def addresses(self, numbers: Int32s) -> pl.Series:
        """The address among arguments, as text."""
        self.read(numbers)
        return self._gathered("address", self._address, numbers)

    def texts(self, numbers: Int32s) -> pl.Series:
        """Arguments as JSON text, written as `orjson` writes it."""
        for number in self._new(numbers, self._has_text):
            text = self._tables.text(number)
            if not self._tables.is_odd(number):
                text = orjson.dumps(orjson.loads(text))
            if text != b"{}":
                self._texts[number] = text.decode().lstrip()
        return self._gathered("args", self._texts, numbers)

    def texts_of(self, key: str, numbers: Int32s) -> list[str | None]:
        """One argument as text, None where it is not among them."""
        found: dict[int, str | None] = {NONE: None}
        for number in numbers.tolist():
            if number not in found:
                value = self._tables.args(number).get(key)
                found[number] = (
                    value
                    if value is None or isinstance(value, str)
                    else json.dumps(value, separators=(",", ":"))
                )
        return [found[number] for number in numbers.tolist()]

    @staticmethod
    def _gathered(name: str, values: list[str | None], numbers: Int32s) -> pl.Series:
        """The values of some numbers."""
        wanted = np.zeros(len(values), np.bool_)
        wanted[numbers] = True
        few = [values[number] for number in np.flatnonzero(wanted).tolist()]
        return pl.Series(name, few, dtype=pl.String).gather((np.cumsum(wanted) - 1)[numbers])


def _three(value: object) -> list[int] | None:
    fits = isinstance(value, list) and len(value) == 3 and all(type(size) is int for size in value)
    return value if fits else None  # type: ignore[return-value]
