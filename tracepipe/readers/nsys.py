"""Reads exports of Nsight Systems' reports, written by `nsys export --type sqlite`.

Tables and columns exist only if they have data, so each is looked up. Times are nanoseconds since the
session's start, which TARGET_INFO_SESSION_START_TIME has on two clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, BinaryIO, Final, cast

from tracepipe.event.columns import NONE, SourceBatch
from tracepipe.event.model import MONOTONIC, TIME_LIMIT_NS, Header, HostInstant, Problem, new_header
from tracepipe.event.tables import Tables
from tracepipe.readers import nsys_ranges
from tracepipe.readers.event_rows import EventRows, Values
from tracepipe.readers.nsys_names import Names, launches_of
from tracepipe.readers.nsys_ranges import Annotations
from tracepipe.readers.nsys_tables import Events, Source
from tracepipe.readers.recording import Recording
from tracepipe.readers.sqlite_tables import BROKEN, Database, unreadable
from tracepipe.units import counted

SESSION_CLOCK: Final = "nsys"
"""The clock of a file that does not state when the session began."""
_SESSION: Final = "TARGET_INFO_SESSION_START_TIME"
# Events may come at most this long before the session began. Earlier times are errors.
_OF_SM: Final = {
    "maxWarpsPerSm": "max_warps_per_sm",
    "maxBlocksPerSm": "max_blocks_per_sm",
    "maxRegistersPerSm": "registers_per_sm",
    "maxShmemPerSm": "shared_bytes_per_sm",
}
_EARLIEST_NS: Final = -3_600_000_000_000
_TABLES: Final = ("CUPTI_ACTIVITY_KIND_", "NVTX_EVENTS", "StringIds", "TARGET_INFO_", "META_DATA_EXPORT")
_NO_EVENTS: Final = (
    "ENUM_", "META_DATA_", "TARGET_INFO_", "ANALYSIS_", "NVTX_PAYLOAD_", "StringIds", "ThreadNames",
    "PROCESSES", "ProcessStreams", "EXPORT_",
)  # fmt: skip
_MONOTONIC_SAID: Final = (
    "times are placed by systemClockNs, taken for CLOCK_MONOTONIC, which NVIDIA does not state"
)
_REALTIME_SAID: Final = (
    "times count from utcEpochNs, the UTC time at the session's start, on the clock of Nsight Systems"
)
_NO_CLOCK_SAID: Final = "the file does not state when the session began: its times are on a separate clock"


def holds(file: BinaryIO) -> bool:
    """Whether a database has tables of Nsight Systems. Raises InputError."""
    with closing(Database(file)) as database:
        return any(name.startswith(_TABLES) for name in database.tables)


def read(stream: BinaryIO) -> Recording:
    """The recording in an export, which is a file. Raises InputError."""
    return _Export(Database(stream)).recording()


class _Export:
    """One file, as it is read."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = Tables()
        self._rows = EventRows(self._tables)
        self._problems = self._rows.problems
        self._names = Names(database, self._problems)
        self._capture = self._names.settings("META_DATA_CAPTURE")

    def recording(self) -> Recording:
        header = self._header()
        return Recording(header, self._batches(), self._tables)

    # What the file says of itself ----------------------------------------------------------------------

    def _header(self) -> Header:
        clock, start = self._clock()
        header = new_header(engine="Nsight Systems", clock=clock, clocks=[clock])
        export = self._names.settings("META_DATA_EXPORT")
        if version := export.get("EXPORT_PRODUCT_VERSION"):
            header["tool"] = f"Nsight Systems {version}"
        if start:
            header["start"] = start
        system = self._names.settings("TARGET_INFO_SYSTEM_ENV")
        for key, name in (
            ("host", "Hostname"),
            ("kernel", "SoftwareReleaseVersion"),
            ("machine", "CpuArchitecture"),
        ):
            if name in system:
                header[key] = system[name]  # type: ignore[literal-required]
        if command := self._command():
            header["command"] = command
        if gpus := self._gpus():
            header["gpus"] = gpus
        return header

    def _clock(self) -> tuple[str, HostInstant]:
        """The clock of the events, and the start. Sets the offset to add to their times."""
        found = self._database.texts(_SESSION, ("systemClockNs", "utcEpochNs"), 1, self._problems)
        system_ns, utc_ns = (
            value if type(value) is int and 0 < value < TIME_LIMIT_NS else None
            for value in (found[0] if found else (None, None))
        )
        start: dict[str, int] = {}
        if utc_ns is not None:
            start["realtime_ns"] = utc_ns
        clock, stated = SESSION_CLOCK, _NO_CLOCK_SAID
        if system_ns is not None:
            start["monotonic_ns"] = system_ns
            clock, stated, self._rows.base_ns = MONOTONIC, _MONOTONIC_SAID, system_ns
        elif utc_ns is not None:
            clock, stated, self._rows.base_ns = "realtime", _REALTIME_SAID, utc_ns
        self._say(stated)
        return clock, cast(HostInstant, start)

    def _command(self) -> list[str]:
        of, command = self._capture, "PROCESS_0:COMMAND"
        if command not in of:
            return []
        given = (of.get(f"PROCESS_0:ARGUMENT_{at}") for at in range(len(of)))
        return [of[command], *(one for one in given if one is not None)]

    def _gpus(self) -> list[dict[str, Any]]:
        columns = ("id", "name", "uuid", "smCount", "computeMajor", "computeMinor", *_OF_SM)
        rows = self._database.texts("TARGET_INFO_GPU", columns, 1 << 10, self._problems)
        gpus = []
        for index, name, uuid, count, major, minor, *limits in rows:
            if type(index) is int and index >= 0 and type(name) is str:
                gpu = {"index": index, "name": name}
                gpu |= {"uuid": f"GPU-{uuid}"} if type(uuid) is str and uuid else {}
                gpu |= {"sm_count": count} if type(count) is int else {}
                if type(major) is int and type(minor) is int:
                    gpu["compute_capability"] = f"{major}.{minor}"
                known = zip(_OF_SM.values(), limits, strict=True)
                gpus.append(gpu | {key: value for key, value in known if type(value) is int})
        return gpus

    def _longest_ns(self) -> int:
        found = self._database.texts("ANALYSIS_DETAILS", ("duration",), 1, self._problems)
        duration = found[0][0] if found else None
        return duration if type(duration) is int and duration > 0 else 0

    # Events --------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[SourceBatch]:
        try:
            yield from self._rows.batches(self._steps())
        finally:
            self._database.close()

    def _sources(self) -> Iterator[Source]:
        launches = launches_of(self._database, self._problems)
        self._rows.longest_ns = self._longest_ns() or self._rows.longest_ns
        whole = self._capture.get("CUDA_GRAPH_TRACE_OPTIONS:MODE") == "Graph"
        events = Events(self._rows, self._names, launches, graphs_are_whole=whole)
        self._annotations = Annotations(self._rows, self._names, self._database, self._problems)
        yield from events.sources(self._database)
        if "start" in self._database.tables.get(nsys_ranges.TABLE, ()):
            yield Source(nsys_ranges.TABLE, nsys_ranges.COLUMNS, self._annotations.take)

    def _steps(self) -> Iterator[None]:
        """Take rows of all tables in the order of time."""
        for record in self._names.records():
            self._rows.other(record)
        sources = list(self._sources())
        self._say_unread({source.table for source in sources})
        streams = [(source.table, self._in_order(source), source.take) for source in sources]
        yield from self._rows.steps(streams, self._begin)
        self._annotations.say_others()

    def _begin(self, first_ns: int) -> None:
        """If the separate clock began after the first event, let it begin there."""
        if self._rows.base_ns == 0 and _EARLIEST_NS < first_ns < 0:
            self._rows.base_ns = -first_ns

    def _in_order(self, source: Source) -> Iterator[Values]:
        order = tuple(one for one in (source.columns[0], "end DESC") if one.split()[0] in source.columns)
        return self._database.in_order(source.table, source.columns, self._problems, order)

    def _say_unread(self, read: set[str]) -> None:
        """Add a problem for each table with rows that are not read."""
        for table in self._database.tables:
            if table in read or table.startswith(_NO_EVENTS):
                continue
            try:
                count = self._database.count(table)
            except BROKEN as e:
                self._problems.append(Problem(0, table, f"cannot be read on: {unreadable(e)}"))
                continue
            if count:
                self._say(counted(count, "row|rows is|are not read"), table)

    def _say(self, text: str, table: str = "") -> None:
        self._rows.say((table, NONE), text)
