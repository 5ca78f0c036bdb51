"""The arguments of a recording: texts in a file, by number, parsed when a value of them is needed."""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Final, TypeVar

import numpy as np
import orjson

from tracepipe.errors import OutputError
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s, Ints, distinct
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import ADDRESS_KEYS, SIZE_KEYS

TEXTS: Final = "args.texts"
"""All texts, one after the other."""
ENDS: Final = "args.ends"
"""Where each ends: integers of 64 bits."""
_INT64: Final = range(-(1 << 63), 1 << 63)
# What is read of the texts at a time, and the most texts whose values are remembered.
_READ_BYTES, _KNOWN_MAX = 1 << 18, 1 << 12
Value = TypeVar("Value")


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
        texts = tables.texts()
        try:
            self._texts.write(texts.data)
            self._ends.write((texts.ends + self._end).data)
        except OSError as e:
            raise _cannot_write(e) from e
        self.count += len(texts)
        self._end += len(texts.data)


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
        return next(self.texts(np.array([number])))

    def texts(self, numbers: Ints) -> Iterator[bytes]:
        """The JSON texts of arguments, whose numbers are sorted."""
        if len(numbers) and numbers[0] == NONE:
            yield b"{}"
            numbers = numbers[1:]
        starts, ends = np.where(numbers, self._ends[numbers - 1], 0), self._ends[numbers]
        first = 0
        while first < len(numbers):
            start = int(starts[first])
            last = max(first + 1, int(np.searchsorted(ends, start + _READ_BYTES)))
            block = os.pread(self._file.fileno(), int(ends[last - 1]) - start, start)
            begins, stops = (of[first:last] - start for of in (starts, ends))
            for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True):
                yield block[begin:stop]
            first = last

    def values(self, numbers: Ints, value_of: Callable[[Args], Value]) -> list[Value]:
        """A function's result for each of some arguments. It is called once for equal texts."""
        wanted, known, found = distinct(numbers), dict[bytes, Value](), []
        for text in self.texts(wanted):
            if text not in known:
                if len(known) >= _KNOWN_MAX:
                    known.clear()
                known[text] = value_of(parsed(text))
            found.append(known[text])
        return [found[at] for at in np.searchsorted(wanted, numbers).tolist()]

    def args(self, number: int) -> Args:
        """The arguments with a number, as a new dict."""
        return parsed(self.text(number))

    def json(self, number: int) -> str | None:
        """The text of arguments as `json_of` has it."""
        return json_of(self.text(number))

    def jsons(self, numbers: Int32s) -> list[str | None]:
        """The texts of arguments; each is made once."""
        texts = {number: self.json(number) for number in distinct(numbers).tolist()}
        return [texts[number] for number in numbers.tolist()]

    def integers(self, numbers: Ints, value_of: Callable[[Args], object]) -> tuple[Int64s, Bools]:
        """The integers of 64 bits that a function finds in some arguments, and flags for known ones."""
        found = self.values(numbers, lambda args: integer(value_of(args)))
        known = np.fromiter((value is not None for value in found), np.bool_, len(found))
        return np.fromiter((value or 0 for value in found), np.int64, len(found)), known

    def whole_numbers(self, key: str) -> Int64s:
        """For all arguments, the value of one that is an integer from 0, else NONE. Shape `(count,)`. The
        texts are searched for it, which takes a tenth of the time of parsing them.
        """
        found = np.full(self.count, NONE, np.int64)
        if not self.count:
            return found
        pattern = re.compile(rb"%s\s*:\s*(\d{1,18})\s*[,}]" % re.escape(orjson.dumps(key)))
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as texts:
            pairs = ((one.start(), int(one[1])) for one in pattern.finditer(texts))
            at, values = np.fromiter(chain.from_iterable(pairs), np.int64).reshape(-1, 2).T
        found[np.searchsorted(self._ends, at, "right")] = values
        return found

    def size_bytes(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """The sizes among the arguments of begins, else of ends, and flags for known ones."""
        return _either(self.integers(args, size_bytes_in), self.integers(end_args, size_bytes_in))

    def result(self, args: Int32s, end_args: Int32s) -> tuple[Int64s, Bools]:
        """The results among the arguments of ends, else of begins, and flags for known ones."""
        return _either(self.integers(end_args, result_in), self.integers(args, result_in))

    def sizes(self, key: str, numbers: Int32s) -> list[list[int] | None]:
        """The grid or block among arguments, None where there is none."""
        return self.values(numbers, lambda args: three(args.get(key)))

    def addresses(self, args: Int32s, end_args: Int32s) -> list[str | None]:
        """The addresses among the arguments of begins, else of ends, as text."""
        pairs = zip(self.values(args, address_in), self.values(end_args, address_in), strict=True)
        return [at_end if at_begin is None else at_begin for at_begin, at_end in pairs]

    def texts_of(self, key: str, numbers: Int32s) -> list[str | None]:
        """One argument as text, None where it is missing."""
        return self.values(numbers, lambda args: argument_text(args.get(key)))


def json_of(text: bytes, args: Args | None = None) -> str | None:
    """The text of arguments as `orjson` writes it, or as it was recorded where `orjson` cannot write it; None
    without arguments. `args` are the arguments where they are parsed already.
    """
    text = text.lstrip() if is_odd(text) else orjson.dumps(orjson.loads(text) if args is None else args)
    return None if text == b"{}" else text.decode()


def parsed(text: bytes) -> Args:
    """The arguments of a text."""
    return json.loads(text) if is_odd(text) else orjson.loads(text)  # type: ignore[no-any-return]


def _either(first: tuple[Int64s, Bools], then: tuple[Int64s, Bools]) -> tuple[Int64s, Bools]:
    """The values of `first`, or of `then` where those are not known."""
    return np.where(first[1], first[0], then[0]), first[1] | then[1]


def size_bytes_in(args: Args) -> object:
    """The size among arguments, None without one."""
    return next((args[name] for name in SIZE_KEYS if name in args), None)


def result_in(args: Args) -> object:
    """The result among arguments, None without one."""
    return args.get("result", args.get("retval"))


def address_in(args: Args) -> str | None:
    """The address among arguments as text, None without one."""
    address = next((args[key] for key in ADDRESS_KEYS if key in args), None)
    return None if address is None else str(address).encode("utf-8", "replace").decode()


def integer(value: object) -> int | None:
    """The value of an argument that is an integer of 64 bits, else None."""
    return value if type(value) is int and value in _INT64 else None


def argument_text(value: object) -> str | None:
    """The value of an argument as text, None for None."""
    return value if value is None or isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def three(value: object) -> list[int] | None:
    """A grid or a block among arguments; None for anything else."""
    fits = isinstance(value, list) and len(value) == 3 and all(type(size) is int for size in value)
    return value if fits else None  # type: ignore[return-value]


def is_odd(text: bytes) -> bool:
    """Whether arguments contain integers beyond 64 bits: `Tables` puts a blank before their texts."""
    return text.startswith(b" ")
