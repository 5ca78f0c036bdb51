"""The errors of tracepipe, and what the command line makes of them.

    TracepipeError            exit 1   message: what happened; hint: what to do
    ├── InputError                     path, line and field of input that cannot be used
    ├── FormatError                    no such input or output format, or none recognised
    ├── ClockError                     times that cannot be put on one clock
    ├── OutputError                    an output that exists already or cannot be written
    ├── QueryError                     SQL that is refused
    ├── CaptureTimeout                 what was asked of a capture that runs was not done in time
    ├── CaptureUnavailable    exit 3   this machine cannot capture what was asked for
    └── LibraryMissing        exit 3   a library that only some commands need is not installed

Anything else that reaches the command line is a bug and keeps its traceback.
"""

from __future__ import annotations


class TracepipeError(Exception):
    """Base of every error that is the input's, the machine's or the user's, not a bug's. `option` is the name
    of the option that it is about, if it is about one.
    """

    exit_code = 1
    option = ""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(TracepipeError):
    """Input that cannot be used. `line` counts from 1 and is 0 where the whole file is meant."""

    def __init__(
        self, message: str, hint: str = "", *, path: str = "", line: int = 0, field: str = ""
    ) -> None:
        self.path, self.line, self.field = path, line, field
        place = f"{path}:{line}" if line else path
        super().__init__(": ".join(part for part in (place, field, message) if part), hint)


class FormatError(TracepipeError):
    """An input or output format that is not known, or not recognised from the content."""


class ClockError(TracepipeError):
    """Times that cannot be put on one clock."""


class OutputError(TracepipeError):
    """An output that exists already or cannot be written."""


class QueryError(TracepipeError):
    """The message of Perfetto's trace processor, or of DuckDB, for a query that it refused."""


class CaptureTimeout(TracepipeError):
    """A running capture did not do in time what it was asked for."""


class CaptureUnavailable(TracepipeError):
    """This machine cannot capture what was asked for; `hint` is the command that fixes it."""

    exit_code = 3


class LibraryMissing(TracepipeError):
    """A library that only some commands need is not installed; `hint` is the command that installs it."""

    exit_code = 3
