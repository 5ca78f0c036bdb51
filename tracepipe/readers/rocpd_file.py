"""The recordings of a rocpd database, read as one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Final

from tracepipe.event.columns import NONE, SourceBatch
from tracepipe.event.model import Header, Problem, new_header
from tracepipe.event.tables import Tables
from tracepipe.readers.event_rows import EventRows, cut_text
from tracepipe.readers.launch_numbers import Launches
from tracepipe.readers.recording import Recording
from tracepipe.readers.rocpd_events import TABLES, Events
from tracepipe.readers.rocpd_rows import Session
from tracepipe.readers.sqlite_tables import BROKEN, Database, unreadable
from tracepipe.units import counted

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
