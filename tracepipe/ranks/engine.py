"""What evaluates the expressions of reports across ranks: DuckDB in this process, or Spark, here or on a
cluster.

Both give the same tables to the last digit, because expressions reckon with integers alone: sums of floats
depend on their order, and quantiles differ between engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from tracepipe.dataset.places import Dataset
from tracepipe.libraries import pl
from tracepipe.ranks import spark
from tracepipe.ranks.on_ibis import OnIbis, library

if TYPE_CHECKING:
    from ibis.expr.types import Table

MEMORY: Final = "200MB"
"""What DuckDB keeps in memory; it writes the rest to disk."""


class Engine(Protocol):
    """Evaluates expressions on the layers of one dataset."""

    def layer(self, name: str, columns: Mapping[str, str] | None = None) -> Table:
        """The rows of all ranks in a layer, with the columns `host` and `rank`, which is an integer.

        Of a layer that no rank has: no rows, with these columns and their types in Polars.
        """
        ...

    def kept(self, table: Table) -> Table:
        """The same rows, which are not made anew each time they are asked for."""
        ...

    def rows(self, table: Table) -> pl.DataFrame:
        """Evaluate an expression. Raises TracepipeError where the engine fails."""
        ...


def opened(name: str, dataset: Dataset, master: str = "") -> AbstractContextManager[Engine]:
    """An engine for a dataset, which is given back at the end. `master` is the address of a Spark cluster.

    Raises LibraryMissing where the engine is not installed, TracepipeError where it cannot start.
    """
    if name == "duckdb":
        return _duckdb(dataset)
    return spark.started(dataset, master)


class _DuckDB(OnIbis):
    name = "DuckDB"

    def __init__(self, dataset: Dataset, connection: Any) -> None:
        super().__init__(dataset)
        self._connection = connection
        self.failures = (import_module("duckdb").Error,)

    def _read(self, folder: str) -> Table:
        # Hosts may be called 007: what looks like a number stays a text.
        table: Table = self._connection.read_parquet(
            f"{_no_pattern(folder)}/**/*.parquet", hive_partitioning=True, hive_types_autocast=False
        )
        return table.drop("layer")

    def _keep(self, table: Table) -> Table:
        self._kept += 1
        return self._connection.create_table(f"kept_{self._kept}", table, temp=True)


def _no_pattern(path: str) -> str:
    """A path whose letters stand for themselves in a pattern of DuckDB."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in path)


@contextmanager
def _duckdb(dataset: Dataset) -> Iterator[Engine]:
    ibis = library("ibis")
    library("duckdb")
    with tempfile.TemporaryDirectory(prefix="tracepipe-ranks-") as spilled:
        connection = ibis.duckdb.connect(
            threads=len(os.sched_getaffinity(0)),
            memory_limit=MEMORY,
            temp_directory=spilled,
            # Sorting rows that nothing asked to be sorted takes memory.
            preserve_insertion_order=False,
            autoinstall_known_extensions=False,
        )
        try:
            # Ibis switches it on. It would be drawn on standard output, amid what is printed there.
            connection.con.execute("SET enable_progress_bar = false")
            yield _DuckDB(dataset, connection)
        finally:
            connection.disconnect()
