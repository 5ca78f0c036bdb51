"""Walks through JSON of any size: members and elements one by one, and only requested values as a whole."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, Final

_CHUNK_BYTES: Final = 1 << 16
# A longer value is an error: a record has some hundred characters.
VALUE_MAX: Final = 1 << 20
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_TOKEN: Final = re.compile(r'["\[\]{}]')
_TEXT_END: Final = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)
_ENDS: Final = ",]} \t\r\n"
_SCALAR_END: Final = re.compile(r"[,\]}\s]")


class WalkError(Exception):
    """JSON is broken or ends too early. The text states where."""


class JsonWalk:
    """A position before a value in a stream. Each call moves past the value. Raises WalkError."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._scan = json.JSONDecoder()
        self._text, self._at, self._before = "", 0, 0
        self._is_ended = False

    def _more(self) -> bool:
        """Read more. Return False at the end."""
        if self._is_ended:
            return False
        self._before += self._at
        chunk = self._stream.read(max(_CHUNK_BYTES, len(self._text) - self._at))
        self._is_ended = not chunk
        self._text = self._text[self._at :] + self._decoder.decode(chunk, final=not chunk)
        self._at = 0
        return True

    def _wrong(self, what: str) -> WalkError:
        return WalkError(f"{what} at character {self._before + self._at}")

    def _next(self) -> str:
        """The next character that is not blank, "" at the end."""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _expect(self, letter: str) -> None:
        found = self._next()
        if found != letter:
            raise self._wrong("the file ends" if not found else f"{letter!r} is missing")
        self._at += 1

    def sees(self, letter: str) -> bool:
        """Whether the value begins with this character."""
        return self._next() == letter

    def members(self) -> Iterator[str]:
        """The keys of an object. The value of each must be read or skipped before the next."""
        self._expect("{")
        if self.sees("}"):
            self._at += 1
            return
        while True:
            if not self.sees('"'):
                raise self._wrong("a key is missing")
            key = self.value()
            self._expect(":")
            yield key
            if self.sees("}"):
                self._at += 1
                return
            self._expect(",")

    def elements(self) -> Iterator[None]:
        """The elements of an array. Each must be read or skipped before the next."""
        self._expect("[")
        if self.sees("]"):
            self._at += 1
            return
        while True:
            yield None
            if self.sees("]"):
                self._at += 1
                return
            self._expect(",")

    def value(self) -> Any:
        """The whole value. Raises WalkError where it is longer than VALUE_MAX."""
        self._next()
        while True:
            try:
                value, end = self._scan.raw_decode(self._text, self._at)
            except (ValueError, RecursionError) as e:
                if isinstance(e, RecursionError):
                    raise self._wrong("nests too deep") from e
                if len(self._text) - self._at <= VALUE_MAX and self._more():
                    continue
                raise self._wrong("is not JSON, or longer than a value may be,") from e
            # A number may continue.
            is_ended = end < len(self._text) and self._text[end] in _ENDS
            if not is_ended and type(value) in (int, float) and self._more():
                continue
            self._at = end
            return value

    def skip(self) -> None:
        """Skip the value, which may have any length."""
        first = self._next()
        if first not in ('"', "[", "{"):
            self._skip_scalar()
            return
        depth = 0
        while True:
            found = _TOKEN.search(self._text, self._at)
            if found is None:
                self._at = len(self._text)
                if not self._more():
                    raise self._wrong("the file ends")
                continue
            self._at = found.end()
            if found[0] == '"':
                self._skip_text()
            else:
                depth += 1 if found[0] in "[{" else -1
            if depth <= 0:
                return

    def _skip_text(self) -> None:
        while (found := _TEXT_END.match(self._text, self._at)) is None:
            # Drop the text so far, but keep an escape at its end whole.
            rest = self._text[self._at :]
            keep = (len(rest) - len(rest.rstrip("\\"))) % 2
            self._at = len(self._text) - keep
            if not self._more():
                raise self._wrong("the file ends")
        self._at = found.end()

    def _skip_scalar(self) -> None:
        while (found := _SCALAR_END.search(self._text, self._at)) is None:
            self._at = len(self._text)
            if not self._more():
                return
        self._at = found.start()
