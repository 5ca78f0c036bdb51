"""What evaluates the expressions of reports across ranks: DuckDB in this process, or Spark, here or on a
cluster.

Both give the same tables to the last digit, because expressions reckon with integers alone: sums of floats
depend on their order, and quantiles differ between engines.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

from tracepipe.dataset.places import Dataset
from tracepipe.errors import LibraryMissing, TracepipeError
from tracepipe.reports.frames.libraries import pl

if TYPE_CHECKING:
    from ibis.expr.types import Table

ENGINES: Final = ("duckdb", "spark")
MEMORY: Final = "300MB"
"""What DuckDB keeps in memory; of more it writes a part to disk."""
_LOCAL: Final = "local[*]"
_INSTALL: Final = {
    "ibis": "pip install 'tracepipe[ranks]'",
    "duckdb": "pip install 'tracepipe[ranks]'",
    "pyspark": "pip install 'tracepipe[ranks]' 'pyspark==VERSION', with the version of your cluster.",
}


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
    return _duckdb(dataset) if name == "duckdb" else _spark(dataset, master or _LOCAL)


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as e:
        package = name.partition(".")[0]
        raise LibraryMissing(f"ranks needs {name}, which cannot be imported: {e}", _INSTALL[package]) from e


class _Ibis:
    """An engine behind Ibis. `_read` returns the table of a folder of Parquet files."""

    failures: tuple[type[Exception], ...] = ()

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._layers: dict[str, Table] = {}
        self._kept = 0

    def layer(self, name: str, columns: Mapping[str, str] | None = None) -> Table:
        """See Engine."""
        if name not in self._layers:
            if name in self._dataset.layers():
                table = self._read(str(self._dataset.layer(name).absolute()))
                self._layers[name] = table.mutate(rank=table["rank"].cast("int64"))
            else:
                self._layers[name] = self._nothing({**(columns or {}), "host": "String", "rank": "Int64"})
        return self._layers[name]

    def kept(self, table: Table) -> Table:
        """See Engine."""
        with self._failing():
            return self._keep(table)

    def rows(self, table: Table) -> pl.DataFrame:
        """See Engine."""
        with self._failing():
            found = pl.from_arrow(table.to_pyarrow())
        assert isinstance(found, pl.DataFrame)
        return found

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self.failures as e:
            reason = str(e).strip().partition("\n")[0]
            raise TracepipeError(f"{type(self).__name__.lstrip('_')} failed: {reason}") from e

    def _nothing(self, columns: Mapping[str, str]) -> Table:
        ibis = _library("ibis")
        return ibis.memtable(pl.DataFrame(schema={name: getattr(pl, kind) for name, kind in columns.items()}))

    def _read(self, folder: str) -> Table:
        raise NotImplementedError

    def _keep(self, table: Table) -> Table:
        raise NotImplementedError


class _DuckDB(_Ibis):
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
    ibis = _library("ibis")
    _library("duckdb")
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
            yield _DuckDB(dataset, connection)
        finally:
            connection.disconnect()


class _Spark(_Ibis):
    def __init__(self, dataset: Dataset, session: Any) -> None:
        super().__init__(dataset)
        self._session, self._connection = session, _library("ibis").pyspark.connect(session)
        self.failures = (
            import_module("pyspark.errors").PySparkException,
            import_module("py4j.protocol").Py4JError,
        )

    def _read(self, folder: str) -> Table:
        return self._connection.read_parquet(re.sub(r"[][{}*?,\\]", r"\\\g<0>", folder), basePath=folder)

    def _keep(self, table: Table) -> Table:
        self._kept += 1
        name = f"kept_{self._kept}"
        frame = self._connection.compile(table)
        self._session.sql(frame).cache().createOrReplaceTempView(name)
        return self._connection.table(name)


@contextmanager
def _spark(dataset: Dataset, master: str) -> Iterator[Engine]:
    _library("ibis")
    sql = _library("pyspark.sql")
    settings = {
        "spark.master": master,
        "spark.app.name": "tracepipe ranks",
        "spark.sql.session.timeZone": "UTC",
        # Hosts may be called 007: what looks like a number stays a text.
        "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
    }
    if master.startswith("local"):
        # 200 partitions, which is usual, are for clusters.
        settings["spark.sql.shuffle.partitions"] = "4"
    builder = sql.SparkSession.builder
    for key, value in settings.items():
        builder = builder.config(key, value)
    try:
        session = builder.getOrCreate()
    except Exception as e:  # Java's, py4j's and pyspark's own
        reason = str(e).strip().partition("\n")[0]
        raise TracepipeError(
            f"Spark did not start on {master}: {reason}", "Check that Java is installed and the master runs."
        ) from e
    try:
        yield _Spark(dataset, session)
    finally:
        session.stop()
