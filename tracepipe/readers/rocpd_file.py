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

from tracepipe.event.columns import Three
from tracepipe.event.model import INDEX_LIMIT, Header, Problem, Record, cut_text
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.event.vocabulary import direction_named
from tracepipe.kernel_names import short_kernel_name
from tracepipe.mangled_names import demangled
from tracepipe.readers.ids import Launches, is_id
from tracepipe.readers.recording import Recording
from tracepipe.readers.sqlite_tables import (
    BROKEN,
    AddRow,
    Database,
    EventRows,
    Strings,
    Values,
    integers,
    quoted,
)

_FEW_MAX: Final = 1 << 14
# The columns that every row has in addition to its own, in this order, after its number.
COMMON: Final = (
    "start", "end", "pid", "tid", "agent_id", "queue_id", "stream_id", "stack_id", "category_id", "extdata",
    "event_id",
)  # fmt: skip
_OF_TRACKS: Final = ("pid", "tid", "agent_id", "queue_id", "stream_id")
_OF_EVENTS: Final = ("stack_id", "category_id", "extdata")


class _Session:
    """Looks up the numbers of a recording. `ending` is the end of its tables' names."""

    def __init__(self, database: Database, ending: str, problems: list[Problem]) -> None:
        self._database, self._ending, self._problems = database, ending, problems
        self.strings = Strings(database, self.table("string"), "id", "string", problems)
        symbols = self.table("info_kernel_symbol")
        self._kernels = Strings(database, symbols, "id", "display_name", problems)
        self._symbols = Strings(database, symbols, "id", "kernel_name", problems)
        processes = self._texts("info_process", "id", "pid", "command", "name")
        threads = self._texts("info_thread", "id", "tid", "name", "pid")
        self._pids = {at: pid for at, pid, *_ in processes if is_id(pid)}
        self._tids = {at: tid for at, tid, *_ in threads if is_id(tid)}
        self._process_names = {pid: name or command for _, pid, command, name in processes if is_id(pid)}
        self._thread_names = [(self.pid(pid), tid, name) for _, tid, name, pid in threads if is_id(tid)]
        self.command: list[str] = next(
            (command.split() for _, _, command, _ in processes if _is_text(command)), []
        )
        hosts = self._texts("info_node", "id", "hostname")
        self.host = next((host for _, host in hosts if _is_text(host)), "")
        self._agents: dict[Any, int] = {}
        self.gpus: list[dict[str, Any]] = []
        """The GPUs, numbered from 0, in the order of the machine."""
        columns = ("id", "type", "type_index", "product_name", "name")
        for at, kind, index, *names in self._texts("info_agent", *columns):
            if kind == "GPU" and is_id(index):
                self._agents[at] = index
                name = next((text for text in names if _is_text(text)), "GPU")
                self.gpus.append({"index": index, "name": name})
        self._has_args = database.is_indexed(self.table("arg"), "event_id")
        if not self._has_args and database.tables.get(self.table("arg")):
            stated = "has no index of events: arguments of calls are not read"
            problems.append(Problem(0, self.table("arg"), stated, skipped=False))

    def table(self, kind: str) -> str:
        """The name of one of its tables."""
        return f"rocpd_{kind}{self._ending}"

    def _texts(self, kind: str, *columns: str) -> list[Values]:
        return self._database.texts(self.table(kind), columns, _FEW_MAX, self._problems)

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
        return demangled(name.removesuffix(".kd"))

    def pid(self, value: object) -> int | None:
        """The process for a row's value, which is a row of processes, or an id."""
        known: int | None = self._pids.get(value, value if is_id(value) else None)
        return known

    def tid(self, value: object) -> int | None:
        """The thread for a row's value, which is a row of threads, or an id."""
        known: int | None = self._tids.get(value, value if is_id(value) else None)
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
        reported_later: list[Problem] = []  # when they become events
        for kind in ("kernel_dispatch", "memory_copy"):
            for row in self.rows(kind, (), "start", reported_later):
                yield self.pid(row[1 + COMMON.index("pid")]) or 0, row[1 + COMMON.index("stack_id")]

    def rows(
        self, kind: str, columns: Sequence[str], time: str, problems: list[Problem] | None = None
    ) -> Iterator[Values]:
        """The rows of a table in the order of time: the number, those of `COMMON`, and its own columns."""
        table, problems = self.table(kind), self._problems if problems is None else problems
        tables = self._database.tables
        if table not in tables:
            return iter(())
        here = tables[table]
        column_of = {name: f"r.{quoted(name)}" for name in here}
        joined = []
        if f"{time}_id" in here:
            for name in (time, "end") if "end_id" in here else (time,):
                column_of[name] = f'"{name} time"."value"'
                joined.append((f'"{name} time"', self.table("timestamp"), f"{name}_id"))
        for alias, other, names in (("t", "track", _OF_TRACKS), ("e", "event", _OF_EVENTS)):
            if f"{other}_id" in here:
                joined.append((alias, self.table(other), f"{other}_id"))
                there = tables.get(self.table(other), ())
                column_of |= {name: f"{alias}.{quoted(name)}" for name in names if name in there}
        if time != "start":
            column_of |= dict.fromkeys(("start", "end"), column_of.get(time, "NULL"))
        if not all(self._database.is_key(other, "id") for _, other, _ in joined):
            problems.append(Problem(0, table, "refers to tables that have no key: it is not read"))
            return iter(())
        joins = " ".join(
            f"LEFT JOIN {quoted(other)} AS {name} ON {name}.id = r.{quoted(by)}" for name, other, by in joined
        )
        found = ", ".join(column_of.get(name, "NULL") for name in (*COMMON, *columns))
        source = f"{quoted(table)} AS r NOT INDEXED {joins}"
        order = [(column_of.get("start", "NULL"), ""), (column_of.get("end", "NULL"), "DESC")]
        with_texts = [table, *(other for _, other, _ in joined)]
        return self._database.dated(with_texts, f"r.rowid, {found}", source, order, problems)


def _is_text(value: object) -> bool:
    return type(value) is str and bool(value)


_TABLES: Final = ("kernel_dispatch", "memory_copy", "memory_allocate", "region", "sample")
SIZES: Final = (
    "workgroup_size_x", "workgroup_size_y", "workgroup_size_z", "grid_size_x", "grid_size_y", "grid_size_z",
)  # fmt: skip
_OWN: Final = len(COMMON)
_EFFECTS: Final = {"ALLOC": "alloc", "FREE": "free"}


class _Events:
    """Makes events of the rows of one recording."""

    def __init__(self, rows: EventRows, session: _Session, launches: Launches) -> None:
        self._rows, self._session, self._launches = rows, session, launches

    def sources(self) -> Iterator[tuple[str, Iterator[Values], AddRow]]:
        """The tables, with their rows in the order of time, and what adds a row."""
        of_kernels = ("kernel_id", "dispatch_id", "group_segment_size", "private_segment_size", *SIZES)
        of_memory = ("type", "level", "name_id", "address", "size")
        sources: tuple[tuple[str, tuple[str, ...], str, AddRow], ...] = (
            ("region", ("name_id",), "start", self._region),
            ("sample", ("name_id",), "timestamp", self._sample),
            ("memory_allocate", of_memory, "start", self._allocate),
            ("kernel_dispatch", of_kernels, "start", self._kernel),
            ("memory_copy", ("name_id", "size", "dst_agent_id", "src_agent_id"), "start", self._copy),
        )
        for kind, columns, time, add in sources:
            yield self._session.table(kind), self._session.rows(kind, columns, time), add

    # Calls ---------------------------------------------------------------------------------------------

    def _region(self, row: Values) -> None:
        start, end, pid, tid, _, _, _, correlation, category, stated, event, name = row
        kind = self._session.strings.get(category) or "regions"
        if kind.startswith("MARKER"):
            self._range(row, _message(stated) or self._text(name))
            return
        args = self._args(event)
        dur_ns = self._rows.length(start, end, args)
        is_call, launch = kind.startswith("HIP"), None
        process, thread = self._session.pid(pid), self._session.tid(tid)
        if is_call:
            launch = self._launches.launch(process or 0, correlation, is_call=True)
        shape = self._rows.shape(
            ("region", self._rows.table, pid, tid, kind, name, launch is not None),
            lambda: Shape(
                "userspace" if is_call else "hook", self._text(name), "X", process, thread, has_dur=True,
                has_launch=launch is not None, layer=None if is_call else kind,
            ),
        )  # fmt: skip
        self._rows.add(start, shape, args, dur_ns, launch or 0)

    def _args(self, event: object) -> Args:
        try:
            return self._session.args(event)
        except BROKEN:  # one of the texts is too long; the call itself is kept
            return {"arguments": "cannot be read"}

    def _range(self, row: Values, name: str) -> None:
        start, end, pid, tid, *_ = row
        args: Args = {}
        dur_ns = self._rows.length(start, end, args)
        is_mark = self._text(row[_OWN]).startswith("roctxMark")
        process, thread = self._session.pid(pid), self._session.tid(tid)
        nests = not is_mark and self._rows.nests((process, thread), start, start + dur_ns)
        phase = "I" if is_mark else "B" if nests else "X"
        shape = Shape("annotation", name, phase, process, thread, has_dur=phase == "X")
        self._rows.add(start, self._rows.tables.number_of(shape), args, dur_ns if phase == "X" else 0)
        if nests:
            self._rows.end_later(start + dur_ns, Shape("annotation", name, "E", process, thread))

    def _sample(self, row: Values) -> None:
        start, _, pid, tid, _, _, _, _, category, stated, event, name = row
        kind = self._session.strings.get(category) or "samples"
        layer = ("annotation", None) if kind.startswith("MARKER") else ("hook", kind)
        process, thread = self._session.pid(pid), self._session.tid(tid)
        shape = Shape(layer[0], _message(stated) or self._text(name), "I", process, thread, layer=layer[1])
        self._rows.add(start, self._rows.tables.number_of(shape), self._args(event))

    # Work of GPUs --------------------------------------------------------------------------------------

    def _kernel(self, row: Values) -> None:
        kernel, dispatch, shared, private, *sizes = row[_OWN:]
        whole = self._session.kernel(kernel)
        args: Args = {"function": whole} if short_kernel_name(whole) != whole else {}
        args |= integers(dispatch=dispatch, shared_bytes=shared, private_bytes=private)
        grid = block = None
        if all(type(size) is int and 0 < size <= INDEX_LIMIT for size in sizes):
            x, y, z, *threads = sizes
            block = x, y, z
            # rocpd has the threads of the grid.
            grid = -(-threads[0] // x), -(-threads[1] // y), -(-threads[2] // z)
        self._work("gpu_kernel", short_kernel_name(whole), row, args, row[4], (grid, block))

    def _copy(self, row: Values) -> None:
        name, size, target, source = row[_OWN:]
        args, session = integers(size=size), self._session
        gpus = [gpu for agent in (target, source) if (gpu := session.gpu(agent)) is not None]
        if len(set(gpus)) == 2:
            args |= {"to_gpu": gpus[0], "from_gpu": gpus[1]}
        agent = target if session.gpu(target) is not None else source
        direction = direction_named(self._text(name).removeprefix("MEMORY_COPY_"))
        self._work("transfer", direction, row, args, agent)

    def _work(
        self,
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
        args |= integers(queue=queue)
        process = self._session.pid(pid)
        launch = self._launches.launch(process or 0, correlation, is_call=False)
        on = stream if type(stream) is int else queue
        shape = self._rows.shape(
            (kind, self._rows.table, name, pid, agent, on, launch is not None, *sizes),
            lambda: Shape(
                kind, name, "X", process, gpu=self._session.gpu(agent) or 0,
                stream=on if type(on) is int and on >= 0 else None, grid=sizes[0], block=sizes[1],
                has_dur=True, has_launch=launch is not None,
            ),
        )  # fmt: skip
        self._rows.add(start, shape, args, self._rows.length(start, end, args), launch or 0)

    def _allocate(self, row: Values) -> None:
        start, end, pid, tid, agent = row[:5]
        kind, level, name, address, size = row[_OWN:]
        args = integers(size=size, address=address)
        args |= {"level": level.lower()} if type(level) is str else {}
        dur_ns = self._rows.length(start, end, args)
        # Only real memory counts as allocated, not reserved address space.
        effect = _EFFECTS.get(kind) if level == "REAL" else None
        process, thread = self._session.pid(pid), self._session.tid(tid)
        gpu = self._session.gpu(agent)
        shape = Shape("memory", effect or self._text(name), "X", process, thread, gpu=gpu, has_dur=True)
        self._rows.add(start, self._rows.tables.number_of(shape), args, dur_ns)

    def _text(self, number: object) -> str:
        text = self._session.strings.get(number)
        return text if text is not None else f"text {number}"


def _message(stated: object) -> str | None:
    """The text of a marker."""
    try:
        value = orjson.loads(stated) if isinstance(stated, str) else None
    except orjson.JSONDecodeError:
        return None
    message = value.get("message") if isinstance(value, dict) else None
    return message if isinstance(message, str) and message else None


STRINGS: Final = "rocpd_string"
_READ: Final = tuple(
    f"rocpd_{kind}"
    for kind in ("info_", "metadata", "string", "track", "timestamp", "event", "arg", *_TABLES)
)
_SESSIONS_MAX: Final = 64


def recording_in(database: Database, problems: list[Problem]) -> Recording:
    """The recordings in a database as one. `problems` come first. The database is closed at the end."""
    rows = EventRows(database, problems)
    kinds = (STRINGS, *(f"rocpd_{kind}" for kind in _TABLES))
    endings = sorted(
        {name.removeprefix(kind) for kind in kinds for name in database.tables if name.startswith(kind)}
    )
    sessions = [_Session(database, ending, rows.problems) for ending in endings[:_SESSIONS_MAX]]
    if len(endings) > _SESSIONS_MAX:
        rows.say(f"the first {_SESSIONS_MAX} of {len(endings)} recordings in it are read")
    header = Header(engine="rocprofiler-sdk", clock="boottime", clocks=["boottime"])
    for session in sessions:
        about = session.about()
        if "schema_version" in about:
            header.tool = header.tool or f"rocpd, schema {about['schema_version']}"
        header.host = header.host or session.host
        header.command = header.command or session.command
    gpus = {gpu["index"]: gpu for session in sessions for gpu in session.gpus}
    header.gpus = [gpus[index] for index in sorted(gpus)]
    return Recording(header, rows.batches(_steps(rows, sessions)), rows.tables)


def _steps(rows: EventRows, sessions: list[_Session]) -> Iterator[None]:
    """Add the rows of all tables in the order of time."""
    launches = Launches()
    for session in sessions:
        for record in session.names():
            name = record["name"]
            rows.add_record(record | {"name": cut_text(PurePath(name).name or name)})
        for process, correlation in session.work():
            launches.note(process, correlation)
    sources = [one for session in sessions for one in _Events(rows, session, launches).sources()]
    rows.say_unread(lambda table: table.startswith(_READ))
    yield from rows.steps(sources)
