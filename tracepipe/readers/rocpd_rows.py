"""Reads one recording of a rocpd database: its rows, joined with the tables to which they refer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from tracepipe.event.model import ID_LIMIT, Problem, Record
from tracepipe.readers.event_rows import Values
from tracepipe.readers.sqlite_tables import Database, Strings, quoted

_FEW_MAX: Final = 1 << 14
# The columns that every row has in addition to its own, in this order, after its number.
COMMON: Final = (
    "start", "end", "pid", "tid", "agent_id", "queue_id", "stream_id", "stack_id", "category_id", "extdata",
    "event_id",
)  # fmt: skip
_OF_TRACKS: Final = ("pid", "tid", "agent_id", "queue_id", "stream_id")
_OF_EVENTS: Final = ("stack_id", "category_id", "extdata")


class Session:
    """Looks up the numbers of a recording. `ending` is the end of its tables' names."""

    def __init__(self, database: Database, ending: str, problems: list[Problem]) -> None:
        self._database, self._ending, self._problems = database, ending, problems
        self.strings = Strings(database, self.table("string"), "id", "string", problems)
        symbols = self.table("info_kernel_symbol")
        self._kernels = Strings(database, symbols, "id", "display_name", problems)
        self._symbols = Strings(database, symbols, "id", "kernel_name", problems)
        processes = self._texts("info_process", "id", "pid", "command", "name")
        threads = self._texts("info_thread", "id", "tid", "name", "pid")
        self._pids = {at: pid for at, pid, *_ in processes if _is_id(pid)}
        self._tids = {at: tid for at, tid, *_ in threads if _is_id(tid)}
        self._process_names = {pid: name or command for _, pid, command, name in processes if _is_id(pid)}
        self._thread_names = [(self.pid(pid), tid, name) for _, tid, name, pid in threads if _is_id(tid)]
        self.command: list[str] = next(
            (command.split() for _, _, command, _ in processes if _is_text(command)), []
        )
        hosts = self._texts("info_node", "id", "hostname")
        self.host = next((host for _, host in hosts if _is_text(host)), "")
        self._agents: dict[Any, int] = {}
        self.gpus: list[dict[str, Any]] = []
        self._number_agents()
        self._has_args = database.is_indexed(self.table("arg"), "event_id")
        if not self._has_args and database.tables.get(self.table("arg")):
            stated = "has no index of events: arguments of calls are not read"
            problems.append(Problem(0, self.table("arg"), stated, skipped=False))

    def table(self, kind: str) -> str:
        """The name of one of its tables."""
        return f"rocpd_{kind}{self._ending}"

    def _texts(self, kind: str, *columns: str) -> list[Values]:
        return self._database.texts(self.table(kind), columns, _FEW_MAX, self._problems)

    def _number_agents(self) -> None:
        """Number the GPUs from 0, in the order of the machine."""
        agents = self._texts("info_agent", "id", "type", "type_index", "product_name", "name")
        for at, kind, index, product, name in agents:
            if kind == "GPU" and _is_id(index):
                self._agents[at] = index
                known = next((text for text in (product, name) if _is_text(text)), "GPU")
                self.gpus.append({"index": index, "name": known})

    def about(self) -> dict[str, str]:
        """The metadata of the recording."""
        rows = self._texts("metadata", "tag", "value")
        return {tag: value for tag, value in rows if _is_text(tag) and _is_text(value)}

    def names(self) -> Iterator[Record]:
        """The names of processes and threads."""
        for pid, name in self._process_names.items():
            if _is_text(name):
                yield {"type": "name", "pid": pid, "name": name.split()[0] if name.split() else name}
        for process, tid, name in self._thread_names:
            if process is not None and _is_text(name):
                yield {"type": "name", "pid": process, "tid": tid, "name": name}

    def kernel(self, number: object) -> str:
        """The whole name of a kernel."""
        name = self._kernels.get(number) or self._symbols.get(number) or f"kernel {number}"
        return name.removesuffix(".kd")

    def pid(self, value: object) -> int | None:
        """The process for a row's value, which is a row of processes, or an id."""
        known: int | None = self._pids.get(value, value if _is_id(value) else None)
        return known

    def tid(self, value: object) -> int | None:
        """The thread for a row's value, which is a row of threads, or an id."""
        known: int | None = self._tids.get(value, value if _is_id(value) else None)
        return known

    def gpu(self, agent: object) -> int | None:
        """The number of a GPU; None for a processor."""
        return self._agents.get(agent)

    def args(self, event: object) -> dict[str, Any]:
        """The arguments of an event's function."""
        if not self._has_args or type(event) is not int:
            return {}
        rows = self._database.select(
            self.table("arg"), ("name", "value", "position"), "WHERE event_id = ?", (event,)
        )
        found = sorted((row for row in rows if type(row[2]) is int), key=lambda row: int(row[2]))
        return {str(name): value for name, value, _ in found if isinstance(value, str | int | float)}

    def work(self) -> Iterator[tuple[int, Any]]:
        """The process and the correlation number of each kernel and copy."""
        said_later: list[Problem] = []  # when they become events
        for kind in ("kernel_dispatch", "memory_copy"):
            for row in self._rows(kind, (), "start", said_later):
                yield self.pid(row[1 + COMMON.index("pid")]) or 0, row[1 + COMMON.index("stack_id")]

    def rows(self, kind: str, columns: Sequence[str], time: str = "start") -> Iterator[Values]:
        """The rows of a table in the order of time: the number, those of `COMMON`, and its own columns."""
        return self._rows(kind, columns, time, self._problems)

    def _rows(
        self, kind: str, columns: Sequence[str], time: str, problems: list[Problem]
    ) -> Iterator[Values]:
        table = self.table(kind)
        if table not in self._database.tables:
            return iter(())
        sql = self._statement(table, columns, time)
        if sql is None:
            problems.append(Problem(0, table, "refers to tables that have no key: it is not read"))
            return iter(())
        return self._database.dated(table, sql, problems)

    def _statement(self, table: str, columns: Sequence[str], time: str) -> str | None:
        here = self._database.tables[table]
        places = {name: f"r.{quoted(name)}" for name in here}
        joined = []
        if f"{time}_id" in here:
            for name in (time, "end") if "end_id" in here else (time,):
                places[name] = f'"{name} time"."value"'
                joined.append((f'"{name} time"', self.table("timestamp"), f"{name}_id"))
        if "track_id" in here:
            joined.append(("t", self.table("track"), "track_id"))
            places |= {name: f"t.{quoted(name)}" for name in self._here("track", _OF_TRACKS)}
        if "event_id" in here:
            joined.append(("e", self.table("event"), "event_id"))
            places |= {name: f"e.{quoted(name)}" for name in self._here("event", _OF_EVENTS)}
        if time != "start":
            places |= {"start": places.get(time, "NULL"), "end": places.get(time, "NULL")}
        if not all(self._database.is_key(other, "id") for _, other, _ in joined):
            return None
        joins = " ".join(
            f"LEFT JOIN {quoted(other)} AS {name} ON {name}.id = r.{quoted(by)}" for name, other, by in joined
        )
        found = ", ".join(places.get(name, "NULL") for name in (*COMMON, *columns))
        # The second column is the time, the third the end.
        return f"SELECT r.rowid, {found} FROM {quoted(table)} AS r NOT INDEXED {joins} ORDER BY 2, 3 DESC"

    def _here(self, kind: str, names: Sequence[str]) -> list[str]:
        columns = self._database.tables.get(self.table(kind), ())
        return [name for name in names if name in columns]


def _is_text(value: object) -> bool:
    return type(value) is str and bool(value)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= ID_LIMIT
