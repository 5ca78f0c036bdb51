"""`tracepipe.open` and `tracepipe.load`: a recording as events, one after the other, or as a table for each
layer, as the reports use it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from tracepipe.api.options import ReadOptions
from tracepipe.errors import TracepipeError

if TYPE_CHECKING:
    from tracepipe.api.event import Event
    from tracepipe.event.model import Header, Problem
    from tracepipe.recording.account import Account
    from tracepipe.recording.files import Progress
    from tracepipe.store.run import Run


class Events(Iterator["Event"], AbstractContextManager["Events"]):
    """The events of a recording in the order of its file, on the trace's clock. Each warp is an event.

    They can be iterated once. At most some thousands are in memory. The end of the iteration closes the file,
    as do `close` and the end of a `with` block. With `strict`, a bad line raises InputError.
    """

    def __init__(self, path: str, options: ReadOptions, progress: Progress | None) -> None:
        from tracepipe.recording.reading import Reading, open_recording

        self.path = path
        """The path as it was given."""
        self._stack = ExitStack()
        assumed = options.assume_offset
        opened = self._stack.enter_context(
            open_recording(path, options.source_format, assumed, options.undated, progress=progress)
        )
        self.source_format: str = opened.source
        """The name of the input format."""
        self.header: Header = opened.recording.header
        """The first record of an event file; for other formats, the fields that they have of it."""
        self.trace_clock: str = opened.clocks.trace_clock
        """The clock of every `ts_ns`."""
        self._opened = opened
        self._reading = Reading(opened, path, strict=options.strict)
        self._account: Account | None = None
        self._events = self._read(assumed)

    def _read(self, assumed: Mapping[str, int | str]) -> Iterator[Event]:
        from tracepipe.api.event import EventRows

        rows = EventRows(self._opened.recording.tables, self._opened.clocks.default, assumed)
        try:
            for batch, _ in self._reading.placed():
                yield from rows.events(batch)
            self._account = self._reading.finish()
        finally:
            self.close()

    def __next__(self) -> Event:
        return next(self._events)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._stack.close()

    @property
    def account(self) -> Account:
        """The account of what was read, as `convert` returns it. Raises TracepipeError before the last event
        was read.
        """
        if self._account is None:
            raise TracepipeError(
                f"{self.path} was not read to its end.", "Iterate over all of its events first."
            )
        return self._account

    @property
    def counts(self) -> Counter[str]:
        """Layer → events; a warp counts as one. Raises as `account`."""
        return self.account.counts

    @property
    def losses(self) -> Counter[str]:
        """Layer → events that happened and were not recorded. Raises as `account`."""
        return self.account.losses

    @property
    def problems(self) -> list[Problem]:
        """The first lines that could not be used, or that are ambiguous. Raises as `account`."""
        return self.account.problems

    @property
    def clocks(self) -> list[dict[str, Any]]:
        """How each other clock of the events so far was placed on the trace's clock."""
        return self._opened.clocks.statements()

    def __repr__(self) -> str:
        return f"<Events of {self.path} ({self.source_format}) on the clock {self.trace_clock}>"


def open(
    path: str | PathLike[str], options: ReadOptions | None = None, *, progress: Progress | None = None
) -> Events:
    """The events of a recording of any input format, plain or compressed; `-` is standard input.

    `progress` is called with bytes read and bytes in all. Raises InputError, FormatError, ClockError.
    """
    return Events(fspath(path), options or ReadOptions(), progress)


def load(
    path: str | PathLike[str], options: ReadOptions | None = None, *, progress: Progress | None = None
) -> Run:
    """Read a recording of any input format into tables, with begins and ends matched and nested.

    `progress` is called with bytes read and bytes in all. Raises InputError, FormatError, ClockError,
    OutputError, and LibraryMissing where duckdb cannot be imported.
    """
    from tracepipe.store.run import load_run

    return load_run(fspath(path), **(options or ReadOptions()).as_read(), progress=progress)
