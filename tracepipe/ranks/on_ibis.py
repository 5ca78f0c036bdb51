"""What engines behind Ibis have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from tracepipe.dataset.places import Dataset
from tracepipe.errors import LibraryMissing, TracepipeError
from tracepipe.libraries import pl

if TYPE_CHECKING:
    from ibis.expr.types import Table

_INSTALL: Final = {
    "ibis": "pip install 'tracepipe[ranks]'",
    "duckdb": "pip install 'tracepipe[ranks]'",
    "pyspark": "pip install 'tracepipe[ranks]' 'pyspark==VERSION', with the version of your cluster.",
}


def library(name: str) -> Any:
    """A module that an engine needs. Raises LibraryMissing."""
    try:
        return import_module(name)
    except ImportError as e:
        package = name.partition(".")[0]
        raise LibraryMissing(f"ranks needs {name}, which cannot be imported: {e}", _INSTALL[package]) from e


def reason_of(error: Exception) -> str:
    """The message of an engine's exception in one line."""
    first, _, rest = str(error).strip().partition("\n")
    # For an exception of Java, the text of py4j begins with the call.
    return rest.partition("\n")[0][2:] if rest.startswith(": ") else first


class OnIbis:
    """An engine behind Ibis, of one dataset. `_read` returns the table of a folder of Parquet files."""

    name = ""
    failures: tuple[type[Exception], ...] = ()

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._layers: dict[str, Table] = {}
        self._kept = 0

    def layer(self, name: str, columns: Mapping[str, str] | None = None) -> Table:
        """See Engine."""
        if name not in self._layers:
            with self._failing():
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
            found = pl.from_arrow(self._arrow(table))
        assert isinstance(found, pl.DataFrame)
        return found

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except self.failures as e:
            raise TracepipeError(f"{self.name} failed: {reason_of(e)}") from e

    def _nothing(self, columns: Mapping[str, str]) -> Table:
        ibis = library("ibis")
        return ibis.memtable(pl.DataFrame(schema={name: getattr(pl, kind) for name, kind in columns.items()}))

    def _read(self, folder: str) -> Table:
        raise NotImplementedError

    def _keep(self, table: Table) -> Table:
        raise NotImplementedError

    def _arrow(self, table: Table) -> Any:
        return table.to_pyarrow()
