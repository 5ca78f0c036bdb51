"""Datasets and queries: the recordings of a job's ranks in one folder, and SQL on them or on a recording."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from tracepipe import paths
from tracepipe.api.convert import account_lines, convert
from tracepipe.api.options import OUTPUT, ConvertOptions, ReadOptions
from tracepipe.errors import InputError, QueryError
from tracepipe.options import STANDARD, Option
from tracepipe.printable import is_unicode

if TYPE_CHECKING:
    from tracepipe.dataset.build import Built as Built
    from tracepipe.recording.files import Progress
    from tracepipe.sql.processor import Answer, Bounds, Processor
    from tracepipe.sql.tables import Rows

QUERY_FORMATS: Final = ("table", "json", "csv", "parquet", "arrow")
_FOR_PEOPLE: Final = ("table", "json")
"""CSV has unescaped names, which a terminal may obey."""
_TRACES: Final = (".pftrace", ".perfetto-trace", ".zip")
"""Endings of traces that need no conversion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryOptions(ReadOptions):
    """How a recording is read and asked, and the form of the answer."""

    trace_processor: Annotated[
        str,
        Option(
            "Use this trace_processor_shell. Default: the one in PATH, or else the one that tracepipe[query] "
            "installs.",
            "PATH",
        ),
    ] = ""
    format: Annotated[str, Option("Write the rows in this format.", choices=QUERY_FORMATS, panel=OUTPUT)] = (
        "table"
    )


def is_dataset(path: str) -> bool:
    """Whether a dataset is at a path."""
    if not paths.is_folder(path):
        return False
    from tracepipe.dataset.places import Dataset

    return Dataset.is_at(path)


def build_dataset(
    inputs: Iterable[str],
    output: str,
    options: ReadOptions,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Built:
    """Add the recordings of ranks to a dataset, and put the clocks of their hosts on one. `jobs` are read at
    a time, by default one per processor. Raises InputError for a path where nothing is, OutputError.
    """
    from tracepipe.dataset.build import build

    return build(inputs, output, jobs=jobs, options=options.as_read(), progress=progress)


@contextmanager
def dataset_of(
    path: str, options: ReadOptions, showing: Callable[[str], AbstractContextManager[Progress | None]]
) -> Iterator[tuple[str, list[str]]]:
    """A dataset of what is at a path, and notes about recordings that are not in it: the dataset there, or
    one of the recording there or of those below a folder, which is deleted in the end. Raises InputError
    where there is none, and what `build_dataset` raises.
    """
    if is_dataset(path):
        yield path, []
        return
    name = Path(path.rstrip("/")).name or "job"
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        target = str(Path(folder) / f"{name}.dataset")
        with showing(f"read {name}") as bar:
            built = build_dataset([path], target, options, progress=bar)
        left_out = [f"left out: {one}: {reason}" for one, reason in built.left_out.items()]
        if not built.ranks:
            reason = next(iter(built.left_out.values()), "has no recordings")
            raise InputError(reason, "Name a recording, a folder of recordings or a dataset.", path=path)
        yield target, left_out


def query(
    path: str,
    sql: str,
    output: str = STANDARD,
    options: QueryOptions | None = None,
    *,
    force: bool = False,
    notify: Callable[[str], None],
    showing: Callable[[str], AbstractContextManager[Progress | None]],
) -> int:
    """Run SQL on a dataset, a trace or a recording; write the rows of the last statement in one of
    `QUERY_FORMATS`, and return how many these are.

    A recording is asked for its tables if the SQL names no others, else it is converted and asked in
    Perfetto's SQL. `notify` gets the first of these facts, and the losses and problems of a recording. Raises
    QueryError for SQL that is refused, InputError, LibraryMissing, OutputError. The options are for
    recordings, but for `format`.
    """
    from tracepipe.recording.outputs import replacing
    from tracepipe.sql.answers import write_answer, write_rows
    from tracepipe.sql.processor import Answer

    options = options or QueryOptions()
    with (
        answered(path, sql, options, notify=notify, showing=showing) as answer,
        replacing(output, force=force, sources=[path], on_terminal=options.format in _FOR_PEOPLE) as out,
    ):
        if not isinstance(answer, Answer):
            return write_rows(answer, options.format, out)
        write_answer(answer, options.format, out)
        return len(answer.rows)


@contextmanager
def answered(
    path: str,
    sql: str,
    options: QueryOptions,
    *,
    notify: Callable[[str], None],
    showing: Callable[[str], AbstractContextManager[Progress | None]],
    kept: KeptTrace | None = None,
) -> Iterator[Rows | Answer]:
    """The rows of the last statement of some SQL, while the context is open. The rest is as in `query`.

    With `kept`, within its bounds, and Perfetto's SQL is asked of the WebAssembly, which cannot open files.
    """
    from tracepipe.sql.processor import ask, find_shell
    from tracepipe.sql.tables import is_about_tables, query_dataset, query_recording

    if not is_unicode(sql):
        raise QueryError("The SQL is not UTF-8.", "Write other bytes as a BLOB: '\\xFF'::BLOB.")
    bounds = None if kept is None else kept.bounds
    if paths.is_folder(path):
        with query_dataset(path, sql, bounds) as rows:
            yield rows
        return
    if not path.endswith(_TRACES) and is_about_tables(sql):
        from tracepipe.api.open import load

        with showing(f"query {Path(path).name}") as bar:
            run = load(path, options, progress=bar)
        notify("asked: the tables that export writes, in DuckDB's SQL")
        for line in list(account_lines(run.facts))[1:]:
            notify(line)
        with query_recording(run, sql, bounds) as rows:
            yield rows
        return
    if kept is not None:
        with _hinted(path):
            found = kept.ask(path, sql, options, notify, showing)
        yield found
        return
    shell = find_shell(options.trace_processor)
    with _as_trace(path, options, showing) as (trace, notes):
        for note in notes:
            notify(note)
        with _hinted(path):
            found = ask(trace, sql, shell)
        yield found


@contextmanager
def _hinted(path: str) -> Iterator[None]:
    """Say which tables the recording at a path has, where Perfetto has none of the name in some SQL."""
    from tracepipe.hooks.names import near_names
    from tracepipe.store.views import VIEWS

    try:
        yield
    except QueryError as error:
        missing = re.search(r"no such table: (\w+)", error.message)
        if missing is None or path.endswith(_TRACES):
            raise
        near = near_names(missing[1], VIEWS, 1)
        hint = f"Did you mean {near[0]}?" if near else "`show tables` lists the tables for DuckDB."
        if missing[1].lower() in VIEWS:
            hint = f"{missing[1]} is a table for DuckDB: ask about its tables alone, or Perfetto's alone."
        raise QueryError(error.message, hint) from error


@contextmanager
def _as_trace(
    path: str, options: ReadOptions, showing: Callable[[str], AbstractContextManager[Progress | None]]
) -> Iterator[tuple[Path, list[str]]]:
    """A file with a recording as a trace, while the context is open, and the losses and problems of one that
    is converted for that.
    """
    from tracepipe.recording.files import opened_again

    if path.endswith(_TRACES):
        with opened_again(path) as trace:
            yield Path(trace), []
        return
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as folder:
        converted = Path(folder) / "run.pftrace"
        drawn = ConvertOptions(**{one.name: getattr(options, one.name) for one in fields(ReadOptions)})
        with showing(f"query {Path(path).name}") as bar:
            account = convert(path, converted, options=drawn, progress=bar)
        yield converted, list(account_lines(account))[1:]


class KeptTrace:
    """A trace processor with the last trace that was asked in Perfetto's SQL, which is read again where its
    file has changed. It may take up to 4 GiB of memory.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._of: object = None
        self._processor: Processor | None = None
        self._notes: list[str] = []

    def ask(
        self,
        path: str,
        sql: str,
        options: ReadOptions,
        notify: Callable[[str], None],
        showing: Callable[[str], AbstractContextManager[Progress | None]],
    ) -> Answer:
        """The answer to SQL that is about one file. Raises as `query`."""
        from tracepipe.sql.processor import Processor

        wanted = path, paths.identity(path), options
        if self._processor is None or not self._processor.is_open or self._of != wanted:
            self.close()
            with _as_trace(path, options, showing) as (trace, self._notes):
                self._processor, self._of = Processor(trace), wanted
        for note in self._notes:
            notify(note)
        return self._processor.ask_again(sql, self.bounds)

    def close(self) -> None:
        """End the trace processor."""
        if self._processor is not None:
            self._processor.close()
        self._processor = None
