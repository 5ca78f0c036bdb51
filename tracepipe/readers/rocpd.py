"""Reads the databases of rocprofv3 and the other tools of ROCm, `rocpd`.

Each recording in a database has tables of its own, whose names end with its number. Times are nanoseconds of
CLOCK_BOOTTIME: columns of a row, or rows of a table that it names, as is its thread, GPU and stream in
`rocpd_track`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import PurePath
from typing import BinaryIO, Final

from tracepipe.event.columns import NONE, SourceBatch
from tracepipe.event.model import Header, new_header
from tracepipe.event.tables import Tables
from tracepipe.readers.event_rows import EventRows, cut_text
from tracepipe.readers.launch_numbers import Launches
from tracepipe.readers.recording import Recording
from tracepipe.readers.rocpd_events import TABLES, Events
from tracepipe.readers.rocpd_rows import Session
from tracepipe.readers.sqlite_tables import MAGIC, Database, unreadable

_STRINGS: Final = "rocpd_string"
_ABOUT: Final = ("info_", "metadata", "string", "track", "timestamp", "event", "arg")
_SAID_MAX: Final = 64


def sniff(head: bytes) -> bool:
    """Whether it is a database of SQLite; where its schema stands is not known."""
    return head.startswith(MAGIC)


def holds(file: BinaryIO) -> bool:
    """Whether a database has tables of rocpd. Raises InputError."""
    with closing(Database(file)) as database:
        return any(name.startswith(_STRINGS) for name in database.tables)


def read(stream: BinaryIO) -> Recording:
    """The recordings in a database, which is a file. Raises InputError."""
    return _File(Database(stream)).recording()


class _File:
    """One file, as it is read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = Tables()
        self._rows = EventRows(self._tables)
        endings = sorted(name[len(_STRINGS) :] for name in database.tables if name.startswith(_STRINGS))
        self._sessions = [Session(database, ending, self._rows.problems) for ending in endings[:_SAID_MAX]]
        if len(endings) > _SAID_MAX:
            self._rows.say(("", NONE), f"the first {_SAID_MAX} of {len(endings)} recordings in it are read")

    def recording(self) -> Recording:
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
        """Say which tables have rows that no event is made of."""
        known = tuple(f"rocpd_{kind}" for kind in (*_ABOUT, *TABLES))
        for table in self._database.tables:
            if not table.startswith("rocpd_") or table.startswith(known):
                continue
            try:
                count = self._database.count(table)
            except sqlite3.Error as e:
                self._rows.say((table, NONE), unreadable(e), skipped=True)
                continue
            if count:
                self._rows.say((table, NONE), f"{count} rows are not read")
