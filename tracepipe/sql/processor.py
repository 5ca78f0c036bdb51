"""Queries a trace with Perfetto's trace processor: the program if there is one, else WebAssembly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, Final

from tracepipe import paths
from tracepipe.errors import InputError, LibraryMissing, OutputError, QueryError, TracepipeError

SHELL: Final = "trace_processor_shell"
# Where the perfetto package keeps the programs that it downloads.
_CACHE: Final = "~/.local/share/perfetto/prebuilts"
_CHUNK_BYTES: Final = 32 << 20
_HINT: Final = f"Run pip install 'tracepipe[query]', or name a {SHELL} with --trace-processor."


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a query's last statement; it has no columns if that is not a SELECT."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a question of somebody who is not trusted may take."""

    seconds: float = 30
    spill_mb: int = 2_000
    """Of disk, for what does not fit into memory."""
    reply_bytes: int = 16 << 20
    value: int = 1 << 20
    """The letters, bytes or items of a value that are read."""
    rows_at_once: int = 16

    def too_slow(self) -> QueryError:
        """The error for a question that takes too long."""
        return QueryError(f"The question takes more than {self.seconds:g} s.", "Ask for less.")


def all_different(names: Sequence[str]) -> list[str]:
    """The names of columns, each once: one that comes again has a number, which gives it no other's name."""
    found: list[str] = []
    for name in names:
        numbered = (f"{name}_{number}" for number in count(2))
        is_new = name not in found
        found.append(name if is_new else next(one for one in numbered if one not in (*names, *found)))
    return found


def find_shell(given: str = "") -> str:
    """The path of the program: `given`, or one in PATH or in the perfetto package's cache; "" for none.

    Raises InputError if `given` is not a program.
    """
    if given:
        found = shutil.which(given)
        if found is None:
            raise InputError("is not a program", f"Name a {SHELL}.", path=given)
        return found
    cached = [str(path) for path in paths.fitting(Path(_CACHE).expanduser(), f"{SHELL}*")]
    programs = [shutil.which(SHELL), *(path for path in cached if os.access(path, os.X_OK))]
    return next((one for one in programs if one is not None), "")


def ask(trace: Path, sql: str, shell: str = "") -> Answer:
    """Run SQL on a Perfetto trace; `shell` is the program to use, "" for the WebAssembly. Raises what
    `Processor` and `Processor.ask` raise.
    """
    with closing(Processor(trace, shell)) as processor:
        return processor.ask(sql)


class Processor:
    """A trace processor that has read a trace, to be asked more than once.

    Raises LibraryMissing if there is no trace processor, InputError for a trace that is refused or cannot be
    read, TracepipeError if the program ends meanwhile.
    """

    def __init__(self, trace: Path, shell: str = "") -> None:
        self.is_open = True
        try:
            opened = trace.open("rb")
        except OSError as error:
            raise InputError(
                f"cannot be read: {error.strerror}", "Check the path.", path=str(trace)
            ) from error
        self._shell = shell
        with opened as file:
            self._client = _started(shell)
            try:
                self._load(file)
            except BaseException:
                self.close()
                raise

    def _load(self, file: BinaryIO) -> None:
        from perfetto.common.exceptions import PerfettoException

        try:
            with self._ended():
                while chunk := file.read(_CHUNK_BYTES):
                    if refused := self._client.http.parse(chunk).error:
                        raise InputError(
                            f"the trace processor refuses the trace: {refused}", "Check the trace."
                        )
                self._client.http.notify_eof()
        except PerfettoException as error:
            raise InputError(f"the trace processor refuses the trace: {error}", "Check the trace.") from error

    def ask(self, sql: str) -> Answer:
        """The result of some SQL. Raises QueryError, and TracepipeError if the program ends meanwhile."""
        from perfetto.common.exceptions import PerfettoException

        try:
            with self._ended():
                result = self._client.http.execute_query(sql)
        except PerfettoException as error:
            raise QueryError(f"Perfetto: {error}") from error
        if result.error:
            # Its own error begins as Python's do, which it is none of.
            refused = result.error.removeprefix("Traceback (most recent call last):\n")
            raise QueryError(f"Perfetto: {refused}")
        columns = all_different(result.column_names)
        # A row's values are attributes, which cannot have every name that a column can.
        places = [f"column_{at}" for at in range(len(columns))]
        rows = self._client.QueryResultIterator(places, result.batch) if columns else ()
        return Answer(columns, [[vars(row)[place] for place in places] for row in rows])

    @contextmanager
    def _ended(self) -> Iterator[None]:
        """Translate the errors of a program that ends."""
        try:
            yield
        except (ConnectionError, HTTPException) as error:
            raise TracepipeError(
                f"{self._shell or 'The trace processor'} ended before it had answered: {error}",
                "It may have had too little memory: `tracepipe cut` makes a smaller part.",
            ) from error

    def ask_again(self, sql: str, bounds: Bounds) -> Answer:
        """The result of some SQL within some bounds, after which the WebAssembly has only the trace again.
        It is closed where that fails. Raises as `ask`.
        """
        backend = self._client.http
        try:
            with backend.bounded(bounds):
                return self.ask(sql)
        finally:
            if not backend.restored():
                self.close()

    def close(self) -> None:
        """End the trace processor, and free its memory. A second call does nothing."""
        self.is_open = False
        self._client.close()


def _started(shell: str) -> Any:
    """The client of a trace processor without a trace."""
    try:
        from perfetto.common.exceptions import PerfettoException
        from perfetto.trace_processor.api import TraceProcessor, TraceProcessorConfig

        if not shell:
            from tracepipe.sql.wasm import WasmTraceProcessor

            return WasmTraceProcessor()
    except (ImportError, OutputError) as error:
        raise LibraryMissing(f"no trace processor is on this machine: {error}", _HINT) from error
    try:
        return TraceProcessor(config=TraceProcessorConfig(bin_path=shell))
    except (PerfettoException, OSError) as error:
        raise LibraryMissing(f"{shell} does not run as a trace processor: {_why(error)}", _HINT) from error


def _why(error: Exception) -> str:
    """Why a program did not start: the last line of its output, if the client quotes it."""
    if isinstance(error, OSError):
        return str(error.strerror)
    output = str(error).partition("stderr: ")[2].partition("\nIf this is")[0].strip()
    return output.splitlines()[-1] if output else "it does not answer"
