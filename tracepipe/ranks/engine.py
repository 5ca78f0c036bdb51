"""What evaluates the SQL of reports across ranks: DuckDB in this process, or Spark, here or on a cluster.

Both give the same tables to the last digit, because questions reckon with integers alone: sums of floats
depend on their order, and quantiles differ between engines.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from numpy.typing import NDArray

from tracepipe.dataset.collectives import SCHEMA
from tracepipe.dataset.places import RANKS, Dataset, files_of
from tracepipe.errors import LibraryMissing, TracepipeError
from tracepipe.libraries import np
from tracepipe.ranks import queries
from tracepipe.store.tables import connect

MEMORY_MB: Final = 200
"""What DuckDB keeps in memory; it writes the rest to disk."""
Columns = dict[str, NDArray[Any]]
"""An answer: columns of one length."""


def rows(columns: Columns, *names: str) -> Iterator[tuple[Any, ...]]:
    """The rows of some columns."""
    return zip(*(columns[name].tolist() for name in names), strict=True)


@contextmanager
def opened(name: str, dataset: Dataset, master: str = "") -> Iterator[Engine]:
    """An engine that knows the layers `ranks`, `steps` and `collectives` of a dataset, and the views and
    tables of `queries`. `master` is the address of a Spark cluster.

    Raises LibraryMissing where the engine is not installed, TracepipeError where it cannot start or fails.
    """
    started: AbstractContextManager[Engine] = _duckdb() if name == "duckdb" else _spark(master)
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
            raise TracepipeError(
                f"{engine.name} failed on {dataset.folder}: {reason_of(e)}",
                "If a file of the dataset is damaged, build it again: tracepipe dataset build.",
            ) from e


class DuckDB:
    """Evaluates SQL about the layers of one dataset. `failures` are the errors that it may raise."""

    name = "DuckDB"

    def __init__(self, connection: Any, failure: type[Exception]) -> None:
        self.connection = connection
        self.failures: list[type[Exception]] = [failure]

    def read(self, layer: str, folder: Path) -> None:
        """Have `layer` stand for the rows of all ranks, with the columns `host` and `rank`, an integer."""
        self.define(layer, f"select * from {files_of(folder)}")

    def define(self, name: str, sql: str, *, keep: bool = False) -> None:
        """Have `name` stand for an answer, which is evaluated only once with `keep`."""
        self.connection.execute(f"create temp {'table' if keep else 'view'} {name} as {sql}")

    def columns(self, sql: str) -> Columns:
        """An answer, which has no nulls."""
        found: Columns = self.connection.execute(sql).fetchnumpy()
        return found


@contextmanager
def _duckdb() -> Iterator[DuckDB]:
    with tempfile.TemporaryDirectory(prefix="tracepipe-ranks-") as spilled:
        threads = len(os.sched_getaffinity(0))
        connection = connect(":memory:", Path(spilled), memory_mb=MEMORY_MB, threads=threads)
        import duckdb

        try:
            # Sorting rows that nothing asked to be sorted takes memory.
            connection.execute("set preserve_insertion_order = false")
            yield DuckDB(connection, duckdb.Error)
        finally:
            connection.close()


_HERE: Final = "local[*]"
_STANDALONE: Final = "spark://"
_ANSWERS_S: Final = 5.0
_SETTINGS: Final = {
    "spark.app.name": "tracepipe ranks",
    # Hosts may be called 007: what looks like a number stays a text.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
# 200 partitions, and a job for each stage of a query, are for clusters.
_SETTINGS_HERE: Final = {"spark.sql.shuffle.partitions": "4", "spark.sql.adaptive.enabled": "false"}
# The driver mostly plans queries: what Java's second compiler would gain there is less than it takes.
_JAVA: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Spark's scheduler warns where no worker is free, for which the report waits.
_LOGGED: Final = """rootLogger.level = error
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = Spark: %m%n
logger.scheduler.name = org.apache.spark.scheduler.TaskSchedulerImpl
logger.scheduler.level = warn
"""


class Spark:
    """The same as `DuckDB`, on this machine or on a cluster."""

    name = "Spark"

    def __init__(self, session: Any) -> None:
        self._session = session
        errors, java = import_module("pyspark.errors"), import_module("py4j.protocol")
        # The replay asks DuckDB, whatever evaluates the tables.
        failure = import_module("duckdb").Error
        self.failures: list[type[Exception]] = [errors.PySparkException, java.Py4JError, failure]

    def read(self, layer: str, folder: Path) -> None:
        files = re.sub(r"[][{}*?,\\]", r"\\\g<0>", str(folder))
        frame = self._session.read.option("basePath", str(folder)).parquet(files)
        frame.withColumn("rank", frame["rank"].cast("bigint")).createOrReplaceTempView(layer)

    def define(self, name: str, sql: str, *, keep: bool = False) -> None:
        frame = self._answer(sql)
        (frame.cache() if keep else frame).createOrReplaceTempView(name)

    def columns(self, sql: str) -> Columns:
        frame = self._answer(sql)
        columns = zip(*frame.collect(), strict=True)
        found = {name: np.array(values) for name, values in zip(frame.columns, columns, strict=False)}
        return found or {name: np.zeros(0, np.int64) for name in frame.columns}

    def _answer(self, sql: str) -> Any:
        return self._session.sql(sql.replace("//", "div"))


@contextmanager
def _spark(master: str) -> Iterator[Spark]:
    """Spark, on the cluster with the address `master`, else here.

    Raises LibraryMissing without PySpark or Java, TracepipeError where Spark cannot start.
    """
    # PySpark warns of a newer pandas, which evaluates nothing here.
    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
        warnings.simplefilter("ignore", FutureWarning)
        try:
            sql = import_module("pyspark.sql")
        except ImportError as e:
            hint = "pip install 'pyspark==VERSION', with the version of your cluster."
            raise LibraryMissing(f"ranks needs pyspark, which cannot be imported: {e}", hint) from e
        # The script that starts Spark would say so on stderr.
        home = os.environ.get("JAVA_HOME")
        if not (shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")):
            where = f"JAVA_HOME, which is {home}" if home else "PATH"
            raise LibraryMissing(
                f"Spark needs Java, which is not in {where}", "apt install openjdk-17-jre-headless"
            )
        check_answers(master)
        logged = Path(folder, "log4j2.properties")
        logged.write_text(_LOGGED, encoding="utf-8")
        session = _session(sql.SparkSession.builder, master or _HERE, logged)
        try:
            yield Spark(session)
        finally:
            session.stop()


def _session(builder: Any, master: str, logged: Path) -> Any:
    is_here = master.startswith("local")
    java = f"-Dlog4j2.configurationFile={logged.as_uri()} {_JAVA}"
    # The defaults: options that a site gives to its drivers stay, and come after these.
    settings = _SETTINGS | {"spark.master": master, "spark.driver.defaultJavaOptions": java}
    for key, value in (settings | (_SETTINGS_HERE if is_here else {})).items():
        builder = builder.config(key, value)
    try:
        return builder.getOrCreate()
    except Exception as e:  # Java's, py4j's and pyspark's own
        raise TracepipeError(
            f"Spark did not start on {master}: {reason_of(e)}",
            "Check that the master runs, and has the version of the installed PySpark.",
        ) from e


def check_answers(master: str) -> None:
    """Raise TracepipeError of a Spark master that takes no connections: Spark tries it for a minute."""
    if not master.startswith(_STANDALONE):
        return
    reasons = []
    for address in master.removeprefix(_STANDALONE).split(","):
        host, _, port = address.rpartition(":")
        if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 1 << 16:
            raise TracepipeError(f"Not the address of a Spark master: {master}", "Give spark://HOST:PORT.")
        try:
            socket.create_connection((host.strip("[]"), int(port)), _ANSWERS_S).close()
        except OSError as e:
            reasons.append(f"{address}: {e.strerror or e}")
        else:
            return
    hint = "Check that it runs, and on which port."
    raise TracepipeError(f"No Spark master answers: {'; '.join(reasons)}", hint)


def reason_of(error: Exception) -> str:
    """The message of an engine's exception in one line."""
    first, _, rest = str(error).strip().partition("\n")
    # For an exception of Java, the text of py4j begins with the call.
    return rest.partition("\n")[0][2:] if rest.startswith(": ") else first


Engine = DuckDB | Spark
