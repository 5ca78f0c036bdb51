"""Asks DuckDB about the tables of a dataset or of a recording. Each layer of a dataset is a table, with each
time a second time as `aligned_…`: on the reference clock. The tables of a recording are `store.views.VIEWS`.

A query can read these tables and no other files, and write nothing:

    TMP/dataset ──▶ the folder    the only place that DuckDB may open. The link has no letters with a
                                  meaning in patterns, and no folders that look like partitions
    TMP/answer                    an answer that is written as a file, before it is copied to the output
    TMP/spill                     what does not fit into memory
    SELECT                        the only statement that is run; the settings are locked
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from tracepipe.dataset.places import RANKS, Dataset, files_of
from tracepipe.errors import QueryError
from tracepipe.present.writing.table_formats import write_table
from tracepipe.sql.processor import Bounds, all_different
from tracepipe.store.tables import connect
from tracepipe.store.views import VIEWS

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection
    from duckdb.typing import DuckDBPyType

    from tracepipe.store.run import Run

_ROWS_OF_PART: Final = 1 << 13
_ROWS_UNREAD: Final = 16
"""The rows at a time of statements whose answer nobody reads."""
_MEMORY_MB, _MEMORY_OF_THREAD_MB = 1_074, 268
_ALIGNMENT: Final = "alignment"
_DATASET, _ANSWER = "dataset", "answer"
_SHOW: Final = re.compile(r"\s*show\s+tables\s*;?\s*", re.IGNORECASE)
# The tables that SQL names, which DuckDB may not be able to parse; without texts and comments.
_NAMED: Final = re.compile(r"\b(?:from|join|into|update|table|view)\s+\"?(\w+)", re.IGNORECASE)
_NAMED_HERE: Final = re.compile(r"\b(\w+)\s+as\s*\(", re.IGNORECASE)
_IGNORED: Final = re.compile(r"'[^']*'|--[^\n]*")
_LAYER: Final = re.compile(r"[a-z][a-z_]*")
_TIMES: Final = ("start_ns", "end_ns", "ts_ns", "entry_ns", "exit_ns", "first_exit_ns", "last_exit_ns")
# Division rounds towards zero, and the time before `at_ns` is below it.
_PLACED: Final = """
create schema tracepipe;
create macro tracepipe.floored(product) as
    product // 1000000000 - (product % 1000000000 < 0)::hugeint;
create macro tracepipe.aligned(ns, at_ns, offset_ns, drift_ppb) as
    try_cast(ns::hugeint + offset_ns + tracepipe.floored((ns::hugeint - at_ns) * drift_ppb) as bigint);
create table tracepipe.clock_of_rank (rank bigint, at_ns bigint, offset_ns bigint, drift_ppb bigint);
"""
_CLOCKS: Final = """
insert into tracepipe.clock_of_rank
select distinct on (rank) rank, at_ns, offset_ns, drift_ppb from {ranks} join {alignment} using (clock)
where offset_ns is not null
"""
# The types of an answer. Other values are written as text.
_WHOLE: Final = ("tinyint", "smallint", "integer", "bigint", "utinyint", "usmallint", "uinteger")
_BROKEN: Final = ("float", "double", "decimal")
_LARGE: Final = ("hugeint", "uhugeint")
_AS_THEY_ARE: Final = ("ubigint", "boolean", "varchar", "blob")
_IN_LISTS: Final = {
    "integer": "bigint",
    **{name: name for name in ("bigint", "double", "varchar", "boolean")},
}
_TOO_LARGE: Final = " has more than 64 bits: cast it to DOUBLE."


class Rows:
    """The rows of an answer, which are made as they are read."""

    def __init__(
        self,
        connection: DuckDBPyConnection,
        question: str,
        folder: Path,
        path: str,
        bounds: Bounds | None = None,
    ) -> None:
        self._connection, self._question, self._folder = connection, question, folder
        self._bounds = bounds
        self._errors = str(folder / _DATASET), path
        answer = connection.sql(question)
        self.columns = all_different(answer.columns)
        """The names, each of which is there once."""
        self._kinds = answer.types

    def _converted(self, form: str) -> str:
        """The SELECT of the rows with the types of answers."""
        places = [f"column_{at}" for at in range(len(self.columns))]
        shown = ", ".join(
            f"{self._bounded(_value(place, kind, form), kind)} as {_name(name)}"
            for place, name, kind in zip(places, self.columns, self._kinds, strict=True)
        )
        return f"select {shown} from ({self._question}\n) as answer({', '.join(places)})"

    def _bounded(self, value: str, kind: DuckDBPyType) -> str:
        """The SQL of a value of an answer, of which no more is made than is wanted."""
        has_length = kind.id not in (*_WHOLE, *_BROKEN, *_LARGE, "ubigint", "boolean")
        return f"({value})[1:{self._bounds.value}]" if self._bounds and has_length else value

    def parts(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows, some at a time. Raises QueryError."""
        rows_at_once = self._bounds.rows_at_once if self._bounds else _ROWS_OF_PART
        with _translated(*self._errors):
            self._connection.execute(self._converted("json"))
        while True:
            with _translated(*self._errors):
                rows = self._connection.fetchmany(rows_at_once)
            if not rows:
                return
            yield rows

    def write(self, form: str, out: BinaryIO) -> int:
        """Write the rows in one of `table_formats.FORMATS`, and return their number. Raises QueryError."""
        with _translated(*self._errors):
            return write_table(
                self._connection, self._converted(form), out, form, str(self._folder / _ANSWER)
            )


@contextmanager
def query_dataset(path: str, sql: str, bounds: Bounds | None = None) -> Iterator[Rows]:
    """The rows of the last statement of some SQL on the dataset at a path, while the context is open.

    Raises QueryError, also from the rows, InputError where there is no dataset, LibraryMissing.
    """
    dataset, threads = Dataset.opened(path), len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as scratch:
        folder = Path(scratch)
        link = folder / _DATASET
        memory_mb = _MEMORY_MB + threads * _MEMORY_OF_THREAD_MB
        connection = connect(":memory:", folder, memory_mb=memory_mb, threads=threads)
        try:
            link.symlink_to(dataset.folder.absolute(), target_is_directory=True)
            with _translated(str(link), path):
                connection.execute("set allow_community_extensions = false")
                _open_only(connection, folder, bounds)
                connection.execute(_PLACED)
                layers = {layer: _files(link, layer) for layer in dataset.layers() if _LAYER.fullmatch(layer)}
                if {RANKS, _ALIGNMENT} <= set(layers):
                    sql_of_clocks = _CLOCKS.format(ranks=layers[RANKS], alignment=layers[_ALIGNMENT])
                    connection.execute(sql_of_clocks)
                for layer, files in layers.items():
                    connection.execute(f'create view "{layer}" as {_select(connection, layer, files)}')
            with _in_time(connection, bounds):
                with _translated(str(link), path):
                    rows = _answer(connection, sql, folder, path, bounds)
                yield rows
        finally:
            connection.close()


@contextmanager
def query_recording(run: Run, sql: str, bounds: Bounds | None = None) -> Iterator[Rows]:
    """The rows of the last statement of some SQL on the tables of a recording, while the context is open.
    Afterwards, the recording answers nothing else.

    Raises QueryError, also from the rows.
    """
    with tempfile.TemporaryDirectory(prefix="tracepipe-") as scratch:
        folder, connection = Path(scratch), run.connection
        with _translated("", ""):
            _open_only(connection, folder, bounds)
        with _in_time(connection, bounds):
            with _translated("", ""):
                rows = _answer(connection, sql, folder, "", bounds)
            yield rows


@contextmanager
def _in_time(connection: DuckDBPyConnection, bounds: Bounds | None) -> Iterator[None]:
    """Interrupt questions that take longer than the bounds allow. Raises QueryError then."""
    if bounds is None:
        yield
        return
    seconds, is_answered, is_late = bounds.seconds, Event(), Event()

    def interrupt() -> None:
        wait_s = seconds
        # Again and again, as only a question that runs at that moment is interrupted.
        while not is_answered.wait(wait_s):
            is_late.set()
            connection.interrupt()
            wait_s = 0.1

    watch = Thread(target=interrupt, daemon=True)
    watch.start()
    try:
        yield
    except KeyboardInterrupt:
        if not is_late.is_set():
            raise
        raise bounds.too_slow() from None
    finally:
        is_answered.set()
        watch.join()


def is_about_tables(sql: str) -> bool:
    """Whether some SQL is about the tables of recordings, and names no other ones."""
    with connect(":memory:", Path(tempfile.gettempdir()), memory_mb=_MEMORY_MB) as connection:
        import duckdb

        try:
            statements = [statement.query for statement in duckdb.extract_statements(sql)]
            named = {name.lower() for one in statements for name in connection.get_table_names(one)}
        except duckdb.Error:
            named = set()  # a slip, or a statement that only Perfetto has
    if not named:
        plain = _IGNORED.sub("''", sql.lower())
        named = {*_NAMED.findall(plain)} - {*_NAMED_HERE.findall(plain)}
    return named <= set(VIEWS) if named else _SHOW.fullmatch(sql) is not None


def _open_only(connection: DuckDBPyConnection, folder: Path, bounds: Bounds | None) -> None:
    """Let DuckDB open nothing but a dataset and its answer from here on; no setting can undo this."""
    (folder / _ANSWER).mkdir()
    # Else names of tables may be those of variables here.
    connection.execute("set python_enable_replacements = false")
    allowed = ", ".join(_text(f"{folder / name}/") for name in (_DATASET, _ANSWER))
    connection.execute(f"set temp_directory = {_text(str(folder / 'spill'))}")
    if bounds is not None:
        connection.execute(f"set max_temp_directory_size = '{bounds.spill_mb}MB'")
    connection.execute(f"set allowed_directories = [{allowed}]")
    connection.execute("set enable_external_access = false")


def _files(link: Path, layer: str) -> str:
    """The SQL that reads all files of a layer."""
    folder = link / f"layer={layer}"
    return f"read_parquet({_text(f'{folder}/*.parquet')})" if layer == _ALIGNMENT else files_of(folder)


def _select(connection: DuckDBPyConnection, layer: str, files: str) -> str:
    if layer == _ALIGNMENT:
        return f"select * from {files}"
    names = [name for name, *_ in connection.execute(f"describe select * from {files}").fetchall()]
    aligned = "".join(
        f", tracepipe.aligned({name}, at_ns, offset_ns, drift_ppb) as aligned_{name}"
        for name in _TIMES
        if name in names
    )
    clocks = "left join tracepipe.clock_of_rank using (rank)" if aligned else ""
    return f"select host, rank, here.* exclude (host, rank){aligned} from {files} as here {clocks}"


def _answer(connection: DuckDBPyConnection, sql: str, folder: Path, path: str, bounds: Bounds | None) -> Rows:
    """Run all statements but the last, whose rows are returned. Raises QueryError where one is no SELECT."""
    import duckdb

    connection.execute("set lock_configuration = true")
    statements = duckdb.extract_statements(sql)
    if not statements:
        raise QueryError("There is no statement.")
    for statement in statements:
        if statement.type != duckdb.StatementType.SELECT:
            raise QueryError(f"DuckDB only reads tables here: {statement.type.name} is not taken, SELECT is.")
    for statement in statements[:-1]:
        connection.execute(statement)
        while connection.fetchmany(_ROWS_UNREAD):
            pass
    # The question is part of another one, which a semicolon would end.
    question = statements[-1].query.encode()
    ends = [at for at, kind in duckdb.tokenize(question.decode()) if question[at : at + 1] == b";"]
    return Rows(connection, question[: ends[0] if ends else None].decode(), folder, path, bounds)


def _value(place: str, kind: DuckDBPyType, form: str) -> str:
    """The SQL of a value of an answer."""
    if kind.id == "list" and kind.children[0][1].id in _IN_LISTS:
        typed = f"{place}::{_IN_LISTS[kind.children[0][1].id]}[]"
        return f"to_json({typed})::varchar" if form == "csv" else typed
    if kind.id == "blob" and form == "csv":
        return f"lower(hex({place}))"
    if kind.id in _AS_THEY_ARE:
        return place
    if kind.id in _LARGE:
        whole = f"try_cast({place} as bigint)"
        return f"if({whole} is null, error({place} || '{_TOO_LARGE}')::bigint, {whole})"
    return f"{place}::{'bigint' if kind.id in _WHOLE else 'double' if kind.id in _BROKEN else 'varchar'}"


def _name(name: str) -> str:
    """A name in SQL."""
    return '"' + name.replace('"', '""') + '"'


@contextmanager
def _translated(link: str, path: str) -> Iterator[None]:
    """Raise DuckDB's errors as QueryError with the path of the dataset, and Ctrl-C as KeyboardInterrupt."""
    import duckdb

    try:
        yield
    except duckdb.InterruptException as e:
        raise KeyboardInterrupt from e
    except duckdb.Error as e:
        message = str(e).replace(link, path) if link else str(e)
        if message.endswith(_TOO_LARGE):
            raise QueryError(message.removeprefix("Invalid Input Error: ")) from e
        raise QueryError(f"DuckDB: {message}") from e
    except RuntimeError as e:
        if "interrupted" in str(e):
            raise KeyboardInterrupt from e
        raise


def _text(value: str) -> str:
    """A text in SQL."""
    return "'" + value.replace("'", "''") + "'"
