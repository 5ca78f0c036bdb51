"""The tables of a recording, opened to be asked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import Int32s, Int64s
from tracepipe.event.model import Footer, Header, Problem
from tracepipe.event.nesting import Outcomes
from tracepipe.event.stacks import Frame, Stacks
from tracepipe.recording.account import Account
from tracepipe.store.tables import connect_to_ask, more_memory

# The rows that are fetched at a time.
_ROWS_AT_ONCE = 1 << 20
# The memory that DuckDB may use for questions at first. It holds the parts of tables that were read. A
# question that needs more gets more. DuckDB takes some 70 MB in addition, which it does not count.
_MEMORY_MB: Final = 32


@dataclass(slots=True, kw_only=True)
class Facts(Account):
    """A recording without its events: what it is, and what it lacks. Times are on the trace clock."""

    header: Header
    trace_clock: str
    footer: Footer = field(default_factory=Footer)
    start_ns: int = 0
    end_ns: int = 0

    def gpus(self) -> dict[int, dict[str, Any]]:
        """The GPUs of the recording by number, in the form of a header."""
        gpus: dict[int, dict[str, Any]] = {}
        for record in (self.header, self.footer):
            for gpu in record.gpus:
                if isinstance(gpu.get("index"), int):
                    gpus.setdefault(gpu["index"], {}).update(gpu)
        return gpus


class Store:
    """The tables of `schema.TABLES` in a folder, as `build` makes them. They are not changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Its own catalog is empty: `store` is that of the file, which is only read.
        self.connection = self._con = connect_to_ask(folder, memory_mb=_MEMORY_MB)
        self._memory_mb = _MEMORY_MB
        self._late: dict[tuple[str, int], tuple[Int64s, Int32s]] = {}
        """For a table and the first id of a part: the rows that stand behind rows with higher ids, by their
        places in the part, and their ids, counted from the first. The other rows stand in the order of their
        ids."""
        self._facts = dict(self.rows("select name, value from store.facts"))

    def fact(self, name: str) -> Any:
        """A fact about the recording, as JSON has it."""
        return json.loads(self._facts[name])

    def facts(self) -> Facts:
        """All facts."""
        values: dict[str, Any] = {
            field.name: self.fact(field.name) for field in fields(Facts) if field.name in self._facts
        }
        values["counts"], values["losses"] = Counter(values["counts"]), Counter(values["losses"])
        values["problems"] = [Problem(**problem) for problem in values["problems"]]
        values["header"] = Header.from_record(values["header"])
        values["footer"] = Footer.from_record(values["footer"] or {})
        values["outcomes"] = Outcomes(**values["outcomes"])
        return Facts(**values)

    def rows(self, sql: str, given: Sequence[Any] = (), **tables: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """The rows of an answer. `tables` are tables of numpy columns, which the question may name."""
        with self._with(tables):
            found: list[tuple[Any, ...]] = self.ask(lambda: self._con.execute(sql, given).fetchall())
            return found

    @contextmanager
    def _with(self, tables: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """The connection has more tables meanwhile."""
        for name, table in tables.items():
            self._con.register(name, {key: np.ascontiguousarray(column) for key, column in table.items()})
        try:
            yield
        finally:
            for name in tables:
                self._con.unregister(name)

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer to a question, for which DuckDB gets more memory if it has too little. Raises what the
        question raises.
        """
        import duckdb

        while True:
            try:
                return question()
            except duckdb.OutOfMemoryException as error:
                self._memory_mb = more_memory(self._con, self._memory_mb, error)

    def columns(self, sql: str, **tables: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of an answer as numpy arrays, with `tables` as in `rows`. Numbers must not be null."""
        with self._with(tables):
            found: dict[str, Any] = self.ask(lambda: self._con.execute(sql).fetchnumpy())
            return found

    def column(self, table: str, name: str) -> Any:
        """A column of a table in the order of its rows; of spans, in the order of their ids."""
        return self.columns(f'select "{name}" from store."{table}"')[name]

    def count(self, table: str) -> int:
        """The number of rows of a table."""
        return int(self.rows(f'select count(*) from store."{table}"')[0][0])

    def has(self, table: str, column: str) -> bool:
        """Whether any row of a table has a value in a column."""
        return column in self.fact("has").get(table, ())

    def by_id(self, table: str, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of a table of spans in the order of their ids, which count from 0."""
        names, count, whole = ", ".join(columns), self.count(table), dict[str, Any]()
        if not count:
            return self.columns(f'select {names} from store."{table}"')
        # An answer is made as a whole before it becomes an array: parts take less memory.
        for first in range(0, count, _ROWS_AT_ONCE):
            where = f'from store."{table}" where id >= {first} and id < {first + _ROWS_AT_ONCE}'
            if (table, first) not in self._late:
                ids = self.columns(f"select id {where}")["id"] - first
                at = np.flatnonzero(ids < np.maximum.accumulate(ids))
                self._late[table, first] = at, ids[at]
            at, ids = self._late[table, first]
            found = self.columns(f"select {names} {where}")
            for name in columns:
                written = found.pop(name)
                column = whole.setdefault(name, np.empty(count, written.dtype))
                _sort_late(written, at, ids, column[first : first + len(written)])
        return whole


def _sort_late(written: Any, at: Int64s, ids: Int32s, into: Any) -> None:
    """Copy the rows of a part, as they are written, into the order of their ids. The rows `at` have these
    `ids`; the others are in order.
    """
    into[ids] = written[at]
    # Counting only the others: where rows are left out of what is written, and into what is sorted.
    out, back = at - np.arange(len(at)), np.sort(ids) - np.arange(len(ids))
    cuts = np.unique(np.concatenate(([0], out, back, [len(into) - len(at)])))
    out_before, back_before = (np.searchsorted(of, cuts, "right").tolist() for of in (out, back))
    for (begin, end), skipped, moved in zip(pairwise(cuts.tolist()), out_before, back_before, strict=False):
        into[begin + moved : end + moved] = written[begin + skipped : end + skipped]


def stacks_of(store: Store) -> Stacks:
    """The stacks of a recording."""
    frames = store.rows("select function, file, line, is_library from store.frames")
    of = store.columns("select stack, depth, frame from store.stack_frames")
    stacks = Stacks()
    stacks.restore(
        [Frame(*frame) for *frame, _ in frames], [bool(one) for *_, one in frames],
        of["stack"], of["frame"], store.fact("omitted"),
    )  # fmt: skip
    return stacks
