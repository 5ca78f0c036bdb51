"""Reads the recordings of a rocpd database as one, whose rows are joined with the tables to which they refer.

rocpd_kernel_dispatch    gpu_kernel X     launch, grid (in blocks), block, stream
rocpd_memory_copy        transfer X       HtoD, …: gpu, stream, size, launch
rocpd_memory_allocate    memory X         alloc, free: size, address
rocpd_region             userspace X      calls of HIP: arguments; launch, where they asked for work
                         annotation B, E  ranges of roctx
                         hook X           calls of HSA, RCCL, …: a layer each
rocpd_sample             hook I           marks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, Final

import orjson

from tracepipe.event.columns import NONE, SourceBatch, Three
from tracepipe.event.model import ID_LIMIT, INDEX_LIMIT, Header, Problem, Record, new_header
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args, Tables
from tracepipe.event.vocabulary import direction_named
from tracepipe.kernel_names import short_kernel_name
from tracepipe.readers.event_rows import EventRows, Place, Take, Values, cut_text
from tracepipe.readers.ids import Launches
from tracepipe.readers.recording import Recording
from tracepipe.readers.sqlite_tables import BROKEN, Database, Strings, quoted, unreadable
from tracepipe.units import counted

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


TABLES: Final = ("kernel_dispatch", "memory_copy", "memory_allocate", "region", "sample")
_SIZES: Final = (
    "workgroup_size_x", "workgroup_size_y", "workgroup_size_z", "grid_size_x", "grid_size_y", "grid_size_z",
)  # fmt: skip
_COPY: Final = "MEMORY_COPY_"
_OWN: Final = len(COMMON)
_MARK: Final = "roctxMark"
_EFFECTS: Final = {"ALLOC": "alloc", "FREE": "free"}


class Events:
    """Makes events of the rows of one recording."""

    def __init__(self, rows: EventRows, session: Session, launches: Launches) -> None:
        self._rows, self._session, self._launches = rows, session, launches

    def streams(self) -> Iterator[tuple[str, Iterator[Values], Take]]:
        """The tables, with their rows in the order of time, and the function that takes a row."""
        session = self._session
        takes: tuple[tuple[str, tuple[str, ...], str, Take], ...] = (
            ("region", ("name_id",), "start", self._region),
            ("sample", ("name_id",), "timestamp", self._sample),
            ("memory_allocate", ("type", "level", "name_id", "address", "size"), "start", self._allocate),
            (
                "kernel_dispatch",
                ("kernel_id", "dispatch_id", "group_segment_size", "private_segment_size", *_SIZES),
                "start",
                self._kernel,
            ),
            ("memory_copy", ("name_id", "size", "dst_agent_id", "src_agent_id"), "start", self._copy),
        )
        for kind, columns, time, take in takes:
            yield session.table(kind), session.rows(kind, columns, time), take

    # Calls ---------------------------------------------------------------------------------------------

    def _region(self, at: Place, row: Values) -> None:
        start, end, pid, tid, _, _, _, correlation, category, stated, event, name = row
        kind = self._session.strings.get(category) or "regions"
        if kind.startswith("MARKER"):
            self._range(at, row, self._message(stated) or self._text(name))
            return
        args = self._args(event)
        dur_ns = self._rows.length(at, start, end, args)
        launch = None
        if kind.startswith("HIP"):
            process = self._session.pid(pid) or 0
            launch = self._launches.of(process, correlation, is_call=True)
        key = ("region", at[0], pid, tid, kind, name, launch is not None)
        shape = self._rows.shape(key, self._region_shape, *key[2:])
        self._rows.add(at, start, shape, args, dur_ns, launch or 0)

    def _region_shape(self, pid: object, tid: object, kind: str, name: object, has_launch: bool) -> Shape:
        is_call = kind.startswith("HIP")
        return Shape(
            "userspace" if is_call else "hook", self._text(name), "X", self._session.pid(pid),
            self._session.tid(tid), has_dur=True, has_launch=has_launch, layer=None if is_call else kind,
        )  # fmt: skip

    def _args(self, event: object) -> Args:
        try:
            return self._session.args(event)
        except BROKEN:  # one of the texts is too long; the call itself is kept
            return {"arguments": "cannot be read"}

    def _message(self, stated: object) -> str | None:
        """The text of a marker."""
        try:
            value = orjson.loads(stated) if isinstance(stated, str) else None
        except orjson.JSONDecodeError:
            return None
        message = value.get("message") if isinstance(value, dict) else None
        return message if isinstance(message, str) and message else None

    def _range(self, at: Place, row: Values, name: str) -> None:
        start, end, pid, tid, *_ = row
        args: Args = {}
        dur_ns = self._rows.length(at, start, end, args)
        is_mark = self._text(row[_OWN]).startswith(_MARK)
        nests = not is_mark and self._rows.nests((at[0], pid, tid), start, start + dur_ns)
        phase = "I" if is_mark else "B" if nests else "X"
        process, thread = self._session.pid(pid), self._session.tid(tid)
        shape = Shape("annotation", name, phase, process, thread, has_dur=phase == "X")
        self._rows.add(at, start, self._rows.number_of(shape), args, dur_ns if phase == "X" else 0)
        if nests:
            self._rows.end_later(start + dur_ns, Shape("annotation", name, "E", process, thread))

    def _sample(self, at: Place, row: Values) -> None:
        kind = self._session.strings.get(row[COMMON.index("category_id")]) or "samples"
        name = self._message(row[COMMON.index("extdata")]) or self._text(row[_OWN])
        layer = ("annotation", None) if kind.startswith("MARKER") else ("hook", kind)
        shape = Shape(
            layer[0], name, "I", self._session.pid(row[2]), self._session.tid(row[3]), layer=layer[1]
        )
        self._rows.add(at, row[0], self._rows.number_of(shape), self._args(row[COMMON.index("event_id")]))

    # Work of GPUs --------------------------------------------------------------------------------------

    def _kernel(self, at: Place, row: Values) -> None:

        kernel, dispatch, shared, private, *sizes = row[_OWN:]
        whole = self._session.kernel(kernel)
        args: Args = {"function": whole} if short_kernel_name(whole) != whole else {}
        values = {"dispatch": dispatch, "shared_bytes": shared, "private_bytes": private}
        args |= {name: value for name, value in values.items() if type(value) is int}
        block, grid = _blocks(sizes)
        self._work(at, "gpu_kernel", short_kernel_name(whole), row, args, row[4], (grid, block))

    def _copy(self, at: Place, row: Values) -> None:
        name, size, target, source = row[_OWN:]
        args: Args = {"size": size} if type(size) is int else {}
        session = self._session
        gpus = [gpu for agent in (target, source) if (gpu := session.gpu(agent)) is not None]
        if len(set(gpus)) == 2:
            args |= {"to_gpu": gpus[0], "from_gpu": gpus[1]}
        agent = target if session.gpu(target) is not None else source
        self._work(at, "transfer", direction_named(self._text(name).removeprefix(_COPY)), row, args, agent)

    def _work(
        self,
        at: Place,
        kind: str,
        name: str,
        row: Values,
        args: Args,
        agent: object,
        sizes: tuple[Three | None, Three | None] = (None, None),
    ) -> None:
        start, end, pid, tid, _, queue, stream, correlation = row[:8]
        if type(tid) is int:
            args["tid"] = self._session.tid(tid)
        if type(queue) is int:
            args["queue"] = queue
        launch = self._launches.of(self._session.pid(pid) or 0, correlation, is_call=False)
        on = stream if type(stream) is int else queue
        key = (kind, at[0], name, pid, agent, on, launch is not None, *sizes)
        shape = self._rows.shape(key, self._work_shape, kind, name, pid, agent, on, launch is not None, sizes)
        self._rows.add(at, start, shape, args, self._rows.length(at, start, end, args), launch or 0)

    def _work_shape(
        self,
        kind: str,
        name: str,
        pid: object,
        agent: object,
        stream: object,
        has_launch: bool,
        sizes: tuple[Three | None, Three | None],
    ) -> Shape:
        grid, block = sizes
        return Shape(
            kind, name, "X", self._session.pid(pid), gpu=self._session.gpu(agent) or 0,
            stream=stream if type(stream) is int and stream >= 0 else None,
            grid=grid, block=block, has_dur=True, has_launch=has_launch,
        )  # fmt: skip

    def _allocate(self, at: Place, row: Values) -> None:
        start, end, pid, tid, agent = row[:5]
        kind, level, name, address, size = row[_OWN:]
        args: Args = {"size": size} if type(size) is int else {}
        args |= {"address": address} if type(address) is int else {}
        args |= {"level": level.lower()} if type(level) is str else {}
        dur_ns = self._rows.length(at, start, end, args)
        # Only real memory counts as allocated, not reserved address space.
        effect = _EFFECTS.get(kind) if level == "REAL" else None
        shape = Shape(
            "memory", effect or self._text(name), "X", self._session.pid(pid), self._session.tid(tid),
            gpu=self._session.gpu(agent), has_dur=True,
        )  # fmt: skip
        self._rows.add(at, start, self._rows.number_of(shape), args, dur_ns)

    # What all have -------------------------------------------------------------------------------------

    def _text(self, number: object) -> str:
        text = self._session.strings.get(number)
        return text if text is not None else f"text {number}"


def _blocks(sizes: list[Any]) -> tuple[Three | None, Three | None]:
    """The blocks of a grid, and the threads of a block. rocpd has the threads of the grid."""
    if not all(type(size) is int and 0 < size <= INDEX_LIMIT for size in sizes):
        return None, None
    x, y, z, *threads = sizes
    return (x, y, z), (-(-threads[0] // x), -(-threads[1] // y), -(-threads[2] // z))


STRINGS: Final = "rocpd_string"
_ABOUT: Final = ("info_", "metadata", "string", "track", "timestamp", "event", "arg")
_SESSIONS_MAX: Final = 64


class RocpdFile:
    """Reads one file. `problems` come first. It closes the database."""

    def __init__(self, database: Database, problems: list[Problem]) -> None:
        self._database = database
        self._tables = Tables()
        self._rows = EventRows(self._tables, problems=problems)
        endings = sorted(name[len(STRINGS) :] for name in database.tables if name.startswith(STRINGS))
        self._sessions = [
            Session(database, ending, self._rows.problems) for ending in endings[:_SESSIONS_MAX]
        ]
        if len(endings) > _SESSIONS_MAX:
            self._rows.say(
                ("", NONE), f"the first {_SESSIONS_MAX} of {len(endings)} recordings in it are read"
            )

    def recording(self) -> Recording:
        """Its header and its events."""
        return Recording(self._header(), self._batches(), self._tables)

    def _header(self) -> Header:
        header = new_header(engine="rocprofiler-sdk", clock="boottime", clocks=["boottime"])
        for session in self._sessions:
            about = session.about()
            if "schema_version" in about:
                header.setdefault("tool", f"rocpd, schema {about['schema_version']}")
            if session.host:
                header.setdefault("host", session.host)
            if session.command:
                header.setdefault("command", session.command)
        gpus = {gpu["index"]: gpu for session in self._sessions for gpu in session.gpus}
        if gpus:
            header["gpus"] = [gpus[index] for index in sorted(gpus)]
        return header

    def _batches(self) -> Iterator[SourceBatch]:
        try:
            yield from self._rows.batches(self._steps())
        finally:
            self._database.close()

    def _steps(self) -> Iterator[None]:
        launches = Launches()
        streams = []
        for session in self._sessions:
            for record in session.names():
                self._rows.other(record | {"name": cut_text(PurePath(record["name"]).name or record["name"])})
            for process, correlation in session.work():
                launches.note(process, correlation)
        for session in self._sessions:
            events = Events(self._rows, session, launches)
            streams += [(table, rows, take) for table, rows, take in events.streams()]
        self._say_unread()
        yield from self._rows.steps(streams, lambda first_ns: None)

    def _say_unread(self) -> None:
        """Add a problem for each table with rows that are not read."""
        known = tuple(f"rocpd_{kind}" for kind in (*_ABOUT, *TABLES))
        for table in self._database.tables:
            if not table.startswith("rocpd_") or table.startswith(known):
                continue
            try:
                count = self._database.count(table)
            except BROKEN as e:
                self._rows.say((table, NONE), unreadable(e), skipped=True)
                continue
            if count:
                self._rows.say((table, NONE), counted(count, "row|rows is|are not read"))
