"""Reads the JSON of rocprofv3. It is put into tables like those of rocpd, and read from there in order.

    {"rocprofiler-sdk-tool": [{"metadata": …, "agents": […], "strings": …, "kernel_symbols": […], …
        "callback_records": …, "buffer_records": {"kernel_dispatch": […], "hip_api": […], …}}]}

Records come kind by kind, each kind in a different order. The tables are in a temporary file.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, BinaryIO, Final, cast

from tracepipe.errors import InputError
from tracepipe.event.columns import SourceBatch
from tracepipe.event.model import Problem, cut_text
from tracepipe.readers.json_elements import JsonText, objects, parsed
from tracepipe.readers.recording import Recording
from tracepipe.readers.rocpd_file import SIZES, recording_in
from tracepipe.readers.sqlite_tables import Database
from tracepipe.units import counted


class WalkError(Exception):
    """JSON is broken or ends too early. The text states where."""


class JsonWalk(JsonText):
    """A position before a value in a stream. Each call moves past the value. Raises WalkError."""

    def _wrong(self, what: str) -> WalkError:
        return WalkError(f"{what} at byte {self._before + self._at}")

    def _expect(self, letter: bytes) -> None:
        found = self._peek()
        if found != letter:
            raise self._wrong("the file ends" if not found else f"{letter.decode()!r} is missing")
        self._at += 1

    def sees(self, letter: bytes) -> bool:
        """Whether the value begins with this character."""
        return self._peek() == letter

    def members(self) -> Iterator[str]:
        """The keys of an object. The value of each must be read or skipped before the next."""
        for _ in self._inside(b"{", b"}"):
            if not self.sees(b'"'):
                raise self._wrong("a key is missing")
            key = self.value()
            self._expect(b":")
            yield key

    def elements(self) -> Iterator[None]:
        """The elements of an array. Each must be read or skipped before the next."""
        return self._inside(b"[", b"]")

    def _inside(self, first: bytes, last: bytes) -> Iterator[None]:
        self._expect(first)
        if not self.sees(last):
            yield None
            while not self.sees(last):
                self._expect(b",")
                yield None
        self._at += 1

    def value(self) -> Any:
        """The whole value. Raises WalkError where it is longer than LINE_LIMIT_BYTES."""
        text = self._value()
        if text is None:  # a number may end with the file
            text, self._at = self._text[self._at :], len(self._text)
        return self._parsed(text)

    def values(self) -> Iterator[Any]:
        """The values of an array. Objects that are in memory are found together."""
        self._expect(b"[")
        while not self.sees(b"]"):
            found = objects(self._text, self._at)
            for start, self._at in zip(found.starts.tolist(), found.ends.tolist(), strict=True):
                yield self._parsed(self._text[start : self._at])
            self._at = found.at
            if not len(found.starts):
                yield self.value()
                if not self.sees(b"]"):
                    self._expect(b",")
        self._at += 1

    def _parsed(self, text: bytes) -> Any:
        try:
            return parsed(text)
        except RecursionError as e:
            raise self._wrong("nests too deep") from e
        except ValueError as e:
            raise self._wrong("is not JSON, or longer than a value may be,") from e

    def skip(self) -> None:
        """Skip the value, which may have any length."""
        if not self._skip():
            raise self._wrong("the file ends")


TOP: Final = "rocprofiler-sdk-tool"
_GPU: Final = 2  # rocprofiler_agent_type_t
_TABLES: Final = {
    "string": ("id", "string"),
    "metadata": ("id", "tag", "value"),
    "info_node": ("id", "hostname"),
    "info_process": ("id", "pid", "command", "name"),
    "info_agent": ("id", "type", "type_index", "product_name", "name"),
    "info_kernel_symbol": ("id", "kernel_name", "display_name"),
    "event": ("id", "category_id", "stack_id", "extdata"),
    "region": ("id", "pid", "tid", "start", "end", "event_id", "name_id"),
    "kernel_dispatch": (
        "id", "pid", "tid", "agent_id", "queue_id", "stream_id", "start", "end", "event_id", "kernel_id",
        "dispatch_id", "group_segment_size", "private_segment_size", *SIZES,
    ),
    "memory_copy": (
        "id", "pid", "tid", "stream_id", "start", "end", "event_id", "name_id", "size", "dst_agent_id",
        "src_agent_id",
    ),
    "memory_allocate": (
        "id", "pid", "tid", "agent_id", "start", "end", "event_id", "name_id", "type", "level", "address",
        "size",
    ),
}  # fmt: skip
_WITHOUT_TIMES: Final = frozenset({"code_objects", "counters", "host_functions", "summary"})
"""Members of a process that are not read, as they have no events."""
_EFFECTS: Final = (("ALLOCATE", "ALLOC"), ("FREE", "FREE"))
# Rows and bytes of text between two commits. Each commit frees the memory of SQLite.
_ROWS_AT_ONCE: Final = 1 << 14
_BYTES_AT_ONCE: Final = 1 << 20
# The most text of the names of kinds and operations, and the most kinds of records that are not read.
_NAMES_BYTES_MAX: Final = 4 << 20
_UNREAD_MAX: Final = 1 << 10
_KIND_LENGTH_MAX: Final = 1 << 8


def sniff(head: bytes) -> bool:
    """Whether the first key is that of rocprofv3."""
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return start.startswith(b"{") and start[1:].lstrip().startswith(b'"' + TOP.encode() + b'"')


def read(stream: BinaryIO) -> Recording:
    """The recording in a stream, which is read to its end first. Raises InputError."""
    with ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile(prefix="tracepipe-"))
        problems = _to_tables(JsonWalk(stream), file.name)
        recording = recording_in(Database(cast(BinaryIO, file)), problems)
        held, batches = stack.pop_all(), recording.batches

    def batches_until_closed() -> Iterator[SourceBatch]:
        with held:
            yield from batches

    recording.batches = batches_until_closed()
    return recording


def _to_tables(walk: JsonWalk, path: str) -> list[Problem]:
    """Put all records into the tables of a new database. Return the problems of those that cannot be read."""
    connection = sqlite3.connect(path, isolation_level=None)
    problems: list[Problem] = []
    try:
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -1024"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("BEGIN")
        try:
            for key in walk.members():
                if key != TOP:
                    walk.skip()
                    problems.append(Problem(0, key, "is not read", skipped=False))
                    continue
                for number, _ in enumerate(walk.elements()):
                    _Process(connection, f"_{number}", problems).read(walk)
        except WalkError as e:
            problems.append(Problem(0, "", f"{e}: what follows is not read"))
        connection.execute("COMMIT")
    except sqlite3.Error as e:
        raise InputError(
            f"its records cannot be sorted: {e}",
            f"Free some space in {tempfile.gettempdir()}, to which they are copied, or set TMPDIR.",
        ) from e
    finally:
        connection.close()
    return problems


class _Process:
    """Reads one element: the recording of a process."""

    def __init__(self, connection: sqlite3.Connection, ending: str, problems: list[Problem]) -> None:
        self._connection, self._problems = connection, problems
        self._inserts: dict[str, str] = {}
        for kind, columns in _TABLES.items():
            table = f'"rocpd_{kind}{ending}"'
            rest = ", ".join(f'"{name}"' for name in columns[1:])
            connection.execute(f"CREATE TABLE {table} (id INTEGER PRIMARY KEY, {rest})")
            places = ", ".join(["?"] * len(columns))
            self._inserts[kind] = f"INSERT OR IGNORE INTO {table} VALUES ({places})"
        self._pid: int | None = None
        self._texts: dict[str, int] = {}
        self._kinds: list[str] = []
        self._operations: list[list[str]] = []
        self._names_bytes = self._text_bytes = 0
        connection.execute("CREATE TEMP TABLE IF NOT EXISTS message (id INTEGER PRIMARY KEY, text)")
        connection.execute("DELETE FROM message")
        self._has_messages = False
        self._events = self._rows = 0
        self._unread: Counter[str] = Counter()

    def read(self, walk: JsonWalk) -> None:
        """Read all members of the element."""
        for key in walk.members():
            if key == "metadata":
                self._metadata(walk.value())
            elif key == "agents":
                for agent in _objects(walk):
                    kind = "GPU" if agent.get("type") == _GPU else "CPU"
                    index = _whole(agent.get("logical_node_type_id"))
                    names = _text(agent.get("product_name")), _text(agent.get("name"))
                    self._insert("info_agent", _handle(agent.get("id")), kind, index, *names)
            elif key == "kernel_symbols":
                for symbol in _objects(walk):
                    whole = (symbol.get(f"{kind}_kernel_name") for kind in ("demangled", "formatted"))
                    shown = next((name for name in whole if isinstance(name, str) and name), None)
                    number, name = _whole(symbol.get("kernel_id")), _text(symbol.get("kernel_name"))
                    self._insert("info_kernel_symbol", number, name, shown)
            elif key == "strings":
                self._strings(walk)
            elif key in ("buffer_records", "callback_records"):
                for kind in walk.members():
                    self._records(walk, kind)
            else:
                walk.skip()
                if key not in _WITHOUT_TIMES:
                    self._not_read(key)
        for kind, count in self._unread.items():
            words = counted(count, "record|records is|are not read")
            self._problems.append(Problem(0, kind, words, skipped=False))

    def _metadata(self, stated: object) -> None:
        stated = stated if isinstance(stated, dict) else {}
        self._pid = _whole(stated.get("pid"))
        node, command = stated.get("node"), stated.get("command")
        if isinstance(node, dict):
            self._insert("info_node", 1, _text(node.get("hostname")))
        words = [word for word in command if isinstance(word, str)] if isinstance(command, list) else []
        if self._pid is not None:
            self._insert("info_process", self._pid, self._pid, " ".join(words), None)

    def _strings(self, walk: JsonWalk) -> None:
        for key in walk.members():
            if key == "buffer_records":
                for kind in _objects(walk):
                    names = kind.get("operations")
                    self._kinds.append(self._kept(kind.get("kind")))
                    self._operations.append([*map(self._kept, names)] if isinstance(names, list) else [])
            elif key == "marker_api":
                for message in _objects(walk):
                    number, text = _whole(message.get("key")), message.get("value")
                    if number is not None and isinstance(text, str):
                        self._has_messages = True
                        self._execute("INSERT OR REPLACE INTO message VALUES (?, ?)", (number, text))
            else:
                walk.skip()

    # Records -------------------------------------------------------------------------------------------

    def _records(self, walk: JsonWalk, kind: str) -> None:
        if not walk.sees(b"["):
            walk.skip()
            self._not_read(kind)
            return
        insert = {
            "kernel_dispatch": self._dispatch,
            "memory_copy": self._copy,
            "memory_allocation": self._allocation,
        }.get(kind, self._region)
        for record in walk.values():
            if isinstance(record, dict) and "start_timestamp" in record:
                insert(record)
            else:
                self._not_read(kind)

    def _of(self, record: dict[str, Any]) -> tuple[int | None, int | None, Any, Any, int]:
        """Process and thread, start and end, and the event of a record."""
        correlation = record.get("correlation_id")
        number = _whole(correlation.get("internal")) if isinstance(correlation, dict) else None
        kind = _whole(record.get("kind"))
        category = self._kinds[kind] if kind is not None and 0 <= kind < len(self._kinds) else ""
        self._events += 1
        extra = None
        if self._has_messages:
            found = self._connection.execute("SELECT text FROM message WHERE id = ?", (number,)).fetchone()
            extra = json.dumps({"message": found[0]}) if found else None
        self._insert("event", self._events, self._number_of(category or "records"), number, extra)
        span = _whole(record.get("start_timestamp")), _whole(record.get("end_timestamp"))
        return self._pid, _whole(record.get("thread_id")), *span, self._events

    def _operation(self, record: dict[str, Any]) -> int:
        """The number of an operation's name among the texts."""
        kind, operation = _whole(record.get("kind")), _whole(record.get("operation"))
        known = self._operations[kind] if kind is not None and 0 <= kind < len(self._operations) else []
        is_known = operation is not None and 0 <= operation < len(known)
        name = known[operation] if is_known and operation is not None else ""
        return self._number_of(name or f"operation {operation}")

    def _region(self, record: dict[str, Any]) -> None:
        self._insert("region", None, *self._of(record), self._operation(record))

    def _dispatch(self, record: dict[str, Any]) -> None:
        pid, tid, start, end, event = self._of(record)
        info = record.get("dispatch_info")
        info = info if isinstance(info, dict) else {}
        on = (_handle(info.get(f"{name}_id")) for name in ("agent", "queue"))
        names = ("kernel_id", "dispatch_id", "group_segment_size", "private_segment_size")
        named = (_whole(info.get(name)) for name in names)
        sizes = (
            _whole(size.get(axis)) if isinstance(size := info.get(name), dict) else None
            for name in ("workgroup_size", "grid_size")
            for axis in "xyz"
        )
        stream = _handle(record.get("stream_id"))
        self._insert("kernel_dispatch", None, pid, tid, *on, stream, start, end, event, *named, *sizes)

    def _copy(self, record: dict[str, Any]) -> None:
        pid, tid, start, end, event = self._of(record)
        agents = (_handle(record.get(f"{way}_agent_id")) for way in ("dst", "src"))
        stream, size = _handle(record.get("stream_id")), _whole(record.get("bytes"))
        name = self._operation(record)
        self._insert("memory_copy", None, pid, tid, stream, start, end, event, name, size, *agents)

    def _allocation(self, record: dict[str, Any]) -> None:
        pid, tid, start, end, event = self._of(record)
        name = self._operation(record)
        stated = next(text for text, number in self._texts.items() if number == name)
        effect = next((effect for word, effect in _EFFECTS if stated.endswith(word)), None)
        level = "VIRTUAL" if "VMEM" in stated else "REAL"
        address = record.get("address")
        where = _whole(address) if not isinstance(address, dict) else _handle(address)
        size = _whole(record.get("allocation_size"))
        agent = _handle(record.get("agent_id"))
        self._insert(
            "memory_allocate", None, pid, tid, agent, start, end, event, name, effect, level, where, size
        )

    def _number_of(self, text: str) -> int:
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts) + 1
            self._insert("string", number, text)
        return number

    def _kept(self, stated: object) -> str:
        """A name that is kept, "" where there are too many."""
        name = cut_text(str(stated))
        self._names_bytes += len(name) + _KIND_LENGTH_MAX
        if self._names_bytes <= _NAMES_BYTES_MAX:
            return name
        self._unread["names of operations"] += 1
        return ""

    def _not_read(self, kind: str) -> None:
        """Count a record that is not read."""
        kind = cut_text(kind, _KIND_LENGTH_MAX)
        has_room = kind in self._unread or len(self._unread) < _UNREAD_MAX
        self._unread[kind if has_room else "other kinds"] += 1

    def _insert(self, kind: str, *values: object) -> None:
        self._execute(self._inserts[kind], values)

    def _execute(self, sql: str, values: tuple[object, ...]) -> None:
        self._connection.execute(sql, values)
        self._rows += 1
        self._text_bytes += sum(len(value) for value in values if isinstance(value, str))
        if self._rows >= _ROWS_AT_ONCE or self._text_bytes >= _BYTES_AT_ONCE:
            self._rows = self._text_bytes = 0
            self._connection.execute("COMMIT")
            self._connection.execute("BEGIN")


def _objects(walk: JsonWalk) -> Iterator[dict[str, Any]]:
    """The objects in an array; none where the value is not an array."""
    if not walk.sees(b"["):
        walk.skip()
        return
    yield from (one for one in walk.values() if isinstance(one, dict))


def _whole(value: object) -> int | None:
    return value if type(value) is int and -(1 << 63) <= value < 1 << 63 else None


def _handle(value: object) -> int | None:
    return _whole(value.get("handle")) if isinstance(value, dict) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
