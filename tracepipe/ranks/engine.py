"""What evaluates the SQL of reports across ranks: DuckDB in this process, or Spark, here or on a cluster.

Both give the same tables to the last digit, because questions reckon with integers alone: sums of floats
depend on their order, and quantiles differ between engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from numpy.typing import NDArray

from tracepipe.dataset.collectives import SCHEMA
from tracepipe.dataset.places import RANKS, Dataset, files_of
from tracepipe.errors import TracepipeError
from tracepipe.ranks import queries, spark
from tracepipe.store.tables import connect

MEMORY_MB: Final = 200
"""What DuckDB keeps in memory; it writes the rest to disk."""
Columns = dict[str, NDArray[Any]]
"""An answer: columns of one length."""


def rows(columns: Columns, *names: str) -> Iterator[tuple[Any, ...]]:
    """The rows of some columns."""
    return zip(*(columns[name].tolist() for name in names), strict=True)


class Engine(Protocol):
    """Evaluates SQL about the layers of one dataset. `failures` are the errors that it may raise."""

    name: str
    failures: list[type[Exception]]

    def read(self, layer: str, folder: Path) -> None:
        """Have `layer` stand for the rows of all ranks, with the columns `host` and `rank`, an integer."""
        ...

    def define(self, name: str, sql: str, *, keep: bool = False) -> None:
        """Have `name` stand for an answer, which is evaluated only once with `keep`."""
        ...

    def columns(self, sql: str) -> Columns:
        """An answer, which has no nulls."""
        ...


@contextmanager
def opened(name: str, dataset: Dataset, master: str = "") -> Iterator[Engine]:
    """An engine that knows the layers `ranks`, `steps` and `collectives` of a dataset, and the views and
    tables of `queries`. `master` is the address of a Spark cluster.

    Raises LibraryMissing where the engine is not installed, TracepipeError where it cannot start or fails.
    """
    started: AbstractContextManager[Engine]
    started = _duckdb() if name == "duckdb" else spark.started(master)
    with started as engine:
        try:
            layers = dataset.layers()
            for layer in (RANKS, "steps", "collectives"):
                if layer in layers:
                    engine.read(layer, dataset.layer(layer).absolute())
            if "collectives" not in layers:
                typed = {**SCHEMA, "host": "string", "rank": "bigint"}.items()
                nulls = ", ".join(f"cast(null as {kind}) as {column}" for column, kind in typed)
                engine.define("collectives", f"select {nulls} where false")
            if {RANKS, "steps"} <= set(layers):
                engine.define("step_times", queries.STEPS)
                engine.define("members", queries.MEMBERS)
                engine.define("meetings", queries.MEETINGS, keep=True)
                engine.define("waits", queries.WAITS, keep=True)
            yield engine
        except tuple(engine.failures) as e:
            raise TracepipeError(f"{engine.name} failed: {spark.reason_of(e)}") from e


class _DuckDB:
    name = "DuckDB"

    def __init__(self, connection: Any, failure: type[Exception]) -> None:
        self.connection = connection
        self.failures: list[type[Exception]] = [failure]

    def read(self, layer: str, folder: Path) -> None:
        self.define(layer, f"select * from {files_of(folder)}")

    def define(self, name: str, sql: str, *, keep: bool = False) -> None:
        self.connection.execute(f"create temp {'table' if keep else 'view'} {name} as {sql}")

    def columns(self, sql: str) -> Columns:
        found: Columns = self.connection.execute(sql).fetchnumpy()
        return found


@contextmanager
def _duckdb() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="tracepipe-ranks-") as spilled:
        threads = len(os.sched_getaffinity(0))
        connection = connect(":memory:", Path(spilled), memory_mb=MEMORY_MB, threads=threads)
        import duckdb

        try:
            # Sorting rows that nothing asked to be sorted takes memory.
            connection.execute("set preserve_insertion_order = false")
            # It would be drawn on standard output, amid what is printed there.
            connection.execute("set enable_progress_bar = false")
            yield _DuckDB(connection, duckdb.Error)
        finally:
            connection.close()
