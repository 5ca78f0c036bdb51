"""The texts of a recording's arguments. Most are in a file, and are read when they are needed."""

from __future__ import annotations

import json
import os
import weakref
from array import array

import orjson

from tracepipe.event.columns import NONE
from tracepipe.event.tables import Args, Tables
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import no_room, unnamed_file


class KeptArgs:
    """Arguments by number: first those that were moved to the file, then those in the recording's tables."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._ends = array("q")
        self._file: int | None = None

    @property
    def put_away(self) -> int:
        """How many arguments are in the file."""
        return len(self._ends)

    @property
    def count(self) -> int:
        """How many arguments there are."""
        return len(self._ends) + self._tables.args_count

    def put_all_away(self) -> None:
        """Write the arguments of the tables to the file; the tables may drop them then. Raises
        OutputError.
        """
        texts = [self._tables.text(number) for number in range(self._tables.args_count)]
        end = self._ends[-1] if self._ends else 0
        self._write(b"".join(texts), end)
        for text in texts:
            end += len(text)
            self._ends.append(end)

    def _write(self, data: bytes, at: int) -> None:
        try:
            if self._file is None:
                self._file = unnamed_file()
                weakref.finalize(self, os.close, self._file)
            while data:
                written = os.pwrite(self._file, data, at)
                data, at = data[written:], at + written
        except OSError as e:
            raise no_room("the arguments of calls", e) from e

    def text(self, number: int) -> bytes:
        """The JSON text of arguments."""
        if number >= len(self._ends):
            return self._tables.text(number - len(self._ends))
        start = self._ends[number - 1] if number else 0
        assert self._file is not None
        return os.pread(self._file, self._ends[number] - start, start)

    def text_bytes(self, numbers: Ints) -> int:
        """How many bytes some arguments have in the file; those in the tables are few."""
        ends = np.frombuffer(self._ends or array("q", [0]), np.int64)
        known = numbers[(numbers != NONE) & (numbers < len(self._ends))]
        return int((ends[known] - np.where(known > 0, ends[known - 1], 0)).sum())

    def args(self, number: int) -> Args:
        """The arguments with a number, as a new dict."""
        if number >= len(self._ends):
            return self._tables.args(number - len(self._ends))
        if number == NONE:
            return {}
        text = self.text(number)
        return json.loads(text) if _is_odd(text) else orjson.loads(text)  # type: ignore[no-any-return]

    def json(self, number: int) -> bytes:
        """The text of arguments as `orjson` writes it, or as it was stored where `orjson` cannot write it."""
        text = self.text(number)
        return text.lstrip() if _is_odd(text) else orjson.dumps(orjson.loads(text))


def _is_odd(text: bytes) -> bool:
    """Whether arguments contain integers beyond 64 bits: `Tables` puts a blank before their texts."""
    return text.startswith(b" ")
