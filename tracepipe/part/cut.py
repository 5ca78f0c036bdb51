"""Writes a part of a recording as an event file. The recording is read twice: rows are chosen, then written.

Events in the window may depend on earlier ones, and a call that is open at the window's end may end much
later. So the content of the part is known only at the end of the recording; it is kept as a bit for each row.
The rows are written as they are in the recording, and readers see them in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import numpy as np

from tracepipe.converters.event_file import EventFileWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import SPECIAL, SourceBatch, TraceBatch
from tracepipe.event.model import TIME_LIMIT_NS, Footer, Header, HostInstant, Record
from tracepipe.event.warps import PlacedWarps, Warps
from tracepipe.part.choice import THREADS_MAX, Choice, Chosen, Thread
from tracepipe.part.stretch import Moment, Stretch
from tracepipe.recording.account import Account
from tracepipe.recording.files import opened_again
from tracepipe.recording.inputs import InputOptions
from tracepipe.recording.reading import OpenRecording, Progress, Reading, no_collector

# The keys of the recording's footer that the part's footer has; the others are sums over the whole recording.
_OF_FOOTER = ("end", "gpus")


@dataclass(slots=True)
class CutOptions(InputOptions):
    """The window from `start` to before `end`, by default the recording's."""

    start: Moment | None = None
    end: Moment | None = None


class Cut:
    """One part: call `run` with a stream."""

    def __init__(self, path: str, options: CutOptions) -> None:
        self._path, self._options = path, options
        self._file = path
        """The path to open, which may be that of a copy."""

    def run(self, out: BinaryIO, progress: Progress | None = None) -> Account:
        """Write the part. The returned account has its content, and the problems of the recording.

        Raises TracepipeError where the window is empty, and, with `strict`, InputError on the first bad line.
        """
        with no_collector(), opened_again(self._path) as self._file:
            chosen, stretch, info, account, footer = self._choose(progress)
            writer = EventFileWriter(out, info)
            writer.footer = Footer(end=footer.end, gpus=footer.gpus)
            with self._open() as opened:
                reading = Reading(opened, self._path, progress=progress)
                _Writing(writer, opened, chosen).write(reading, stretch)
            writer.finish()
        account.counts, account.losses = writer.counts, writer.losses
        if chosen.last_ns < stretch.start_ns:
            account.notes.append("the recording ends before the part begins")
        account.notes += writer.remarks()
        return account

    def _open(self) -> AbstractContextManager[OpenRecording]:
        return self._options.open(self._file, self._path)

    def _choose(self, progress: Progress | None) -> tuple[Chosen, Stretch, TraceInfo, Account, Footer]:
        """Choose the rows of the part, and make its header and footer."""
        with self._open() as opened:
            start, end = self._options.start, self._options.end
            is_absolute = start is not None and start.is_absolute and (end is None or end.is_absolute)
            base_ns = 0 if is_absolute else self._start_ns(opened)
            stretch = Stretch(
                base_ns if start is None else start.on_trace(base_ns),
                TIME_LIMIT_NS if end is None else end.on_trace(base_ns),
            )
            if stretch.start_ns >= stretch.end_ns:
                raise TracepipeError("The window is empty.", "Give an end after its start.")
            reading = Reading(opened, self._path, strict=self._options.strict, progress=progress)
            chosen = _chosen(opened, reading, stretch)
            info = TraceInfo(opened.clocks.trace_clock, header=_header(opened, stretch))
            return chosen, stretch, info, reading.finish(), reading.footer

    def _start_ns(self, opened: OpenRecording) -> int:
        """The start of the recording, as in reports: that of its header, else its first event."""
        here_ns = opened.recording.header.start_ns(opened.clocks.trace_clock)
        if here_ns is not None:
            return here_ns
        with self._open() as again:
            firsts = (_first_ns(batch) for batch, _ in Reading(again, self._path).placed())
            first_ns = min(firsts, default=TIME_LIMIT_NS)
        return 0 if first_ns == TIME_LIMIT_NS else first_ns


def _first_ns(batch: TraceBatch) -> int:
    """The time of the first event or warp of a batch; TIME_LIMIT_NS where it has none."""
    events = batch.events
    times = events.ts_ns[(events.shape != SPECIAL) & (np.abs(events.ts_ns) <= TIME_LIMIT_NS)]
    of_warps = (
        other.ts_ns + int(other.entry_ns.min())
        for other in batch.others
        if isinstance(other, PlacedWarps) and len(other)
    )
    return min([int(times.min(initial=TIME_LIMIT_NS)), *of_warps])


def _chosen(opened: OpenRecording, reading: Reading, stretch: Stretch) -> Chosen:
    """Choose the rows of the part."""
    choice = Choice(opened.recording.tables, stretch)
    reading.relieve = choice.relieve
    first = 0
    for batch, placed in reading.both():
        count = len(batch.events)
        choice.add_batch(placed, first)
        first += count
    return choice.finish()


def _header(opened: OpenRecording, stretch: Stretch) -> Header:
    """The header of the part: that of the recording, with the start of the window if that is later."""
    header = opened.recording.header
    start, here_ns = cast("dict[str, Any]", header.start), header.start_ns(opened.clocks.trace_clock)
    if here_ns is None or stretch.start_ns <= here_ns:
        return header
    after_ns = stretch.start_ns - here_ns
    later = {name: ns + after_ns if name in HostInstant.__annotations__ else ns for name, ns in start.items()}
    return replace(header, start=cast("HostInstant", later))


class _Writing:
    """Writes the rows that were chosen."""

    def __init__(self, writer: EventFileWriter, opened: OpenRecording, chosen: Chosen) -> None:
        self._writer, self._chosen, self._tables = writer, chosen, opened.recording.tables
        trace_clock = opened.clocks.trace_clock
        self._clock = {} if trace_clock == opened.clocks.default else {"clock": trace_clock}
        """The field that states that a time is on the trace's clock."""
        self._threads: set[Thread] = set()

    def write(self, reading: Reading, stretch: Stretch) -> None:
        """Write the rows, the window, and the names of the rows' threads."""
        end_ns = max(stretch.start_ns, min(stretch.end_ns, self._chosen.last_ns))
        # The recording's own windows may cross this one: it is then written with its end alone, as an
        # instant after theirs.
        is_instant = self._chosen.has_windows
        if not is_instant:
            self._write_edge("B", stretch.start_ns)
        first = 0
        for batch in reading.source():
            count = len(batch.events)
            at = np.flatnonzero(self._chosen.marks.are_marked(first, count))
            if len(at):
                events = batch.events.take(at)
                others: list[Record | Warps] = list(batch.others)
                for place in np.flatnonzero(events.shape == SPECIAL).tolist():
                    number = int(events.args[place])
                    others[number] = self._dated(others[number], first + int(at[place]))
                for number in set(events.shape[events.shape >= 0].tolist()):
                    shape = self._tables.shapes[number]
                    if shape is not None and len(self._threads) < THREADS_MAX:
                        self._threads.add((shape.pid, shape.tid))
                self._writer.write_events(SourceBatch(events, others), self._tables)
            first += count
            if first > self._chosen.marks.last:
                break
        if is_instant:
            self._write_edge("B", end_ns)
        # Calls that are open at the end are drawn up to it.
        self._write_edge("E", end_ns)
        for record in self._chosen.names.records(self._threads):
            self._writer.record(record)

    def _write_edge(self, phase: str, ts_ns: int) -> None:
        """Write the begin or the end of the window."""
        ts_ns = max(0, min(ts_ns, TIME_LIMIT_NS))
        edge = {"ts_ns": ts_ns, "type": "window", "phase": phase, **self._clock, "cause": "cut"}
        self._writer.record(edge)

    def _dated(self, other: Record | Warps, row: int) -> Record | Warps:
        """Add the time of its place to a loss that has none: in the part, other lines are around it."""
        ts_ns = self._chosen.undated_ns.get(row)
        if ts_ns is None or ts_ns < 0 or not isinstance(other, dict):
            return other
        return {"type": "loss", "ts_ns": ts_ns, **self._clock, **other}
