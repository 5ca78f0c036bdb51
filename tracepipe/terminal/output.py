"""Guards standard output and standard error, for all code that writes text there.

    put, say, Typer, Rich, warnings, tracebacks ──▶ sys.stdout, sys.stderr: `Guarded` ──▶ the stream itself

Names from a recording, a path or a machine cannot send control characters to a terminal. A stream that cannot
be written ends the command with two lines, or silently if its reader has closed it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO

from tracepipe.errors import OutputError
from tracepipe.printable import json_pieces, printable

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")


def has_colours(stream: TextIO | Guarded | None) -> bool:
    """Whether text on a stream may have colours, by the usual environment variables.

    `NO_COLOR` turns them off, `FORCE_COLOR` (other than 0) on. Otherwise they are on for terminals, except
    with `TERM=dumb`.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if (forced := os.environ.get("FORCE_COLOR", "")) != "":
        return forced != "0"
    return can_draw(stream)


def can_draw(stream: TextIO | Guarded | None) -> bool:
    """Whether a stream is a terminal on which the cursor can be moved."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def is_ascii(stream: TextIO | Guarded) -> bool:
    """True for a stream whose encoding does not have all letters."""
    return not (stream.encoding or "").lower().startswith("utf")


def say(text: str) -> None:
    """Print a line for the user on standard error, separate from a command's output."""
    print(printable(text), file=sys.stderr)


def put(text: str, colours: bool = False) -> None:
    """Print a line of a command's output on standard output; `colours`: tracepipe coloured it."""
    print(_coloured(text) if colours else printable(text))


def put_json(value: object) -> None:
    """Print a value as JSON on standard output; an iterator in it becomes a list."""
    for piece in json_pieces(value):
        print(piece, end="")
    print()


def _coloured(text: str) -> str:
    return "".join(part if _COLOUR.fullmatch(part) else printable(part) for part in _COLOUR.split(text))


class Guarded:
    """A text stream, or None for a closed one, which shows control characters as their escapes.

    Colours pass if `has_colours` allows them. `losing`: text that cannot be written is discarded, as nobody
    would see an error; otherwise OutputError is raised, or BrokenPipeError if the reader has closed the
    stream.
    """

    def __init__(self, stream: TextIO | None, name: str, *, losing: bool) -> None:
        self._stream, self._name, self._losing = stream, name, losing
        self._failure: Exception | None = None
        self._has_colours = has_colours(stream)

    def __getattr__(self, name: str) -> object:
        if self._stream is None:
            raise self._closed()
        return getattr(self._stream, name)

    def _closed(self) -> OutputError:
        return OutputError(f"{self._name} is closed", "Send it to a file, or to /dev/null.")

    @property
    def encoding(self) -> str:
        """The encoding of the written text."""
        return self._stream.encoding or "utf-8" if self._stream else "utf-8"

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Write text of any number of lines."""
        if not isinstance(text, str):  # libraries check this way whether a stream takes bytes
            raise TypeError(f"{self._name} takes text")
        if self._stream is None:
            if not self._losing:
                raise self._closed()
            return len(text)
        if text.replace("\n", "").isprintable():  # most text is, and much is written in large pieces
            shown = text
        else:
            show = _coloured if self._has_colours else printable
            shown = "\n".join(map(show, text.split("\n")))
        if not shown.isascii():
            shown = shown.encode(self.encoding, "backslashreplace").decode(self.encoding)
        with self._writing():
            self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write buffered text."""
        if self._stream is not None:
            with self._writing():
                self._stream.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """After a failure each write fails, as the first may have been on a thread that draws."""
        if self._failure is None:
            try:
                yield
            except BrokenPipeError as e:
                self._failure = e
            except OSError as e:
                hint = "Free some space, or write elsewhere."
                self._failure = OutputError(f"cannot write {self._name}: {e.strerror}", hint)
            if self._failure is not None:
                self._abandon()
        else:
            yield
        if self._failure is not None and not self._losing:
            raise self._failure

    def _abandon(self) -> None:
        """Discard buffered text, as the interpreter flushes it at its end, and would fail again."""
        assert self._stream is not None
        try:
            descriptor = self._stream.fileno()
        except OSError:  # a test's stream has no descriptor
            return
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def guard() -> tuple[Guarded, Guarded]:
    """Guard standard output and standard error, and return the guards."""
    out = Guarded(sys.stdout, "standard output", losing=False)
    err = Guarded(sys.stderr, "standard error", losing=True)
    sys.stdout, sys.stderr = out, err
    return out, err


def unguarded(stream: TextIO | Guarded) -> TextIO:
    """The stream itself, for code that moves the cursor and writes only escaped names."""
    own: TextIO | None = stream._stream if isinstance(stream, Guarded) else stream
    assert own is not None  # a closed stream is not a terminal
    return own
