"""The arguments of a recording: texts in a file, by number, parsed when a value of them is needed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import orjson

from tracepipe.errors import OutputError
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, distinct
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import ADDRESS_KEYS, SIZE_KEYS

TEXTS: Final = "args.texts"
"""All texts, one after the other."""
ENDS: Final = "args.ends"
"""Where each ends: integers of 64 bits."""
_INT64: Final = range(-(1 << 63), 1 << 63)


class ArgsWriter:
    """Writes arguments into a folder. `count` is how many there are."""

    def __init__(self, folder: Path) -> None:
        self._texts, self._ends = (folder / TEXTS).open("wb"), (folder / ENDS).open("wb")
        self.count = self._end = 0

    def __enter__(self) -> ArgsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._texts, self._ends):
            try:
                file.close()
            except OSError as e:
                raise _cannot_write(e) from e

    def put(self, tables: Tables) -> None:
        """Append the arguments of a reading's tables, which may drop them then. Raises OutputError."""
        texts = [tables.text(number) for number in range(tables.args_count)]
        ends = self._end + np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
        try:
            self._texts.write(b"".join(texts))
            self._ends.write(ends.data)
        except OSError as e:
            raise _cannot_write(e) from e
        self.count += len(texts)
        self._end = int(ends[-1]) if len(ends) else self._end


def _cannot_write(error: OSError) -> OutputError:
    return OutputError(
        f"cannot keep the arguments of calls: {error.strerror}",
        "Name a folder with room in TRACEPIPE_CACHE, or in TMPDIR.",
    )


class ArgsTable:
    """Arguments by number; NONE has no values. Numbers, and the columns of values, have the shape `(n,)`."""

    def __init__(self, folder: Path, count: int) -> None:
        self._file = (folder / TEXTS).open("rb")
        self._ends: Int64s = np.memmap(folder / ENDS, np.int64, "r") if count else np.zeros(0, np.int64)
        self.count = count

    def text(self, number: int) -> bytes:
        """The JSON text of arguments."""
        start, end = int(self._ends[number - 1]) if number else 0, int(self._ends[number])
        return os.pread(self._file.fileno(), end - start, start)

    def args(self, number: int) -> Args:
        """The arguments with a number, as a new dict."""
        if number == NONE:
            return {}
        text = self.text(number)
        return json.loads(text) if is_odd(text) else orjson.loads(text)  # type: ignore[no-any-return]

    def json(self, number: int) -> str | None:
        """The text of arguments as `orjson` writes it, or as it was recorded where `orjson` cannot write it;
        None without arguments.
        """
        if number == NONE:
            return None
        text = self.text(number)
        text = text.lstrip() if is_odd(text) else orjson.dumps(orjson.loads(text))
        return None if text == b"{}" else text.decode()

    def jsons(self, numbers: Int32s) -> list[str | None]:
        """The texts of arguments; each is made once."""
        texts = {number: self.json(number) for number in distinct(numbers).tolist()}
        return [texts[number] for number in numbers.tolist()]

    def _numbers_of(self, key: str, numbers: Int32s) -> tuple[Int64s, Bools]:
        """The values of a kind, and flags for known ones."""
        wanted = distinct(numbers)
        values, known = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.bool_)
        for at, number in enumerate(wanted.tolist()):
            args = self.args(number)
            value = (
                next((args[name] for name in SIZE_KEYS if name in args), None)
                if key == "size_bytes"
                else args.get("result", args.get("retval"))
            )
            if type(value) is int and value in _INT64:
                values[at], known[at] = value, True
        places = np.searchsorted(wanted, numbers)
        return values[places], known[places]

    def _either(self, key: str, first: Int32s, then: Int32s) -> tuple[Int64s, Bools]:
        """The values of `first`, or of `then` where those have none."""
        values, known = self._numbers_of(key, first)
        others, known_too = self._numbers_of(key, then)
        return np.where(known, values, others), known | known_too

    def size_bytes(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """The sizes among the arguments of begins, else of ends, and flags for known ones."""
        return self._either("size_bytes", args, end_args)

    def result(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """The results among the arguments of ends, else of begins, and flags for known ones."""
        return self._either("result", end_args, args)

    def sizes(self, key: str, numbers: Int32s) -> list[list[int] | None]:
        """The grid or block among arguments, None where there is none."""
        known = {number: self.three(self.args(number).get(key)) for number in distinct(numbers).tolist()}
        return [known[number] for number in numbers.tolist()]

    def addresses(self, args: Int32s, end_args: Int32s) -> list[str | None]:
        """The addresses among the arguments of begins, else of ends, as text."""
        known = {number: self._address(number) for number in {*args.tolist(), *end_args.tolist()}}
        pairs = zip(args.tolist(), end_args.tolist(), strict=True)
        return [known[end] if known[begin] is None else known[begin] for begin, end in pairs]

    def _address(self, number: int) -> str | None:
        args = self.args(number)
        address = next((args[key] for key in ADDRESS_KEYS if key in args), None)
        return None if address is None else str(address).encode("utf-8", "replace").decode()

    @staticmethod
    def three(value: object) -> list[int] | None:
        """A grid or a block among arguments; None for anything else."""
        fits = isinstance(value, list) and len(value) == 3 and all(type(size) is int for size in value)
        return value if fits else None  # type: ignore[return-value]

    def texts_of(self, key: str, numbers: Int32s) -> list[str | None]:
        """One argument as text, None where it is missing."""
        found: dict[int, str | None] = {}
        for number in distinct(numbers).tolist():
            value = self.args(number).get(key)
            found[number] = (
                value if value is None or isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            )
        return [found[number] for number in numbers.tolist()]


def is_odd(text: bytes) -> bool:
    """Whether arguments contain integers beyond 64 bits: `Tables` puts a blank before their texts."""
    return text.startswith(b" ")
