"""Writes a part of a recording as an event file. The recording is read twice: rows are chosen, then written.

Events in the window may depend on earlier ones, and a call that is open at the window's end may end much
later. So the content of the part is known only at the end of the recording; it is kept as a bit for each row.
The rows are written as they are in the recording, and readers see them in the same order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, BinaryIO, cast

import numpy as np

from tracepipe.converters.event_file import EventFileWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import SPECIAL, SourceBatch, TraceBatch
from tracepipe.event.model import TIME_LIMIT_NS, Footer, Header, HostInstant, Record
from tracepipe.part.choice import THREADS_MAX, Choice, Chosen, Thread
from tracepipe.part.stretch import Moment, Stretch
from tracepipe.recording.account import Account
from tracepipe.recording.files import Progress, opened_again
from tracepipe.recording.inputs import InputOptions
from tracepipe.recording.reading import OpenRecording, Reading, no_collector


def write_part(
    path: str,
    out: BinaryIO,
    options: InputOptions,
    start: Moment | None,
    end: Moment | None,
    progress: Progress | None = None,
) -> Account:
    """Write the events from `start` to before `end`, by default the recording's. The returned account has the
    content of the part, and the problems of the recording.

    Raises TracepipeError where the window is empty, and, with `strict`, InputError on the first bad line.
    """
    with no_collector(), opened_again(path) as file:
        with options.open(file, path, progress=progress) as opened:
            base_ns, trace_clock = 0, opened.clocks.trace_clock
            if start is None or not start.is_absolute or (end is not None and not end.is_absolute):
                if (stated_ns := opened.recording.header.start_ns(trace_clock)) is not None:
                    base_ns = stated_ns
                else:  # the recording starts with its first event, as in reports
                    with options.open(file, path) as again:
                        firsts_ns = (_first_ns(batch) for batch, _ in Reading(again, path).placed())
                        first_ns = min(firsts_ns, default=TIME_LIMIT_NS)
                    base_ns = 0 if first_ns == TIME_LIMIT_NS else first_ns
            stretch = Stretch(
                base_ns if start is None else start.on_trace(base_ns),
                TIME_LIMIT_NS + 1 if end is None else end.on_trace(base_ns),
            )
            if stretch.start_ns >= stretch.end_ns:
                raise TracepipeError("The window is empty.", "Give an end after its start.")
            reading = Reading(opened, path, strict=options.strict)
            choice, first = Choice(opened.recording.tables, stretch), 0
            reading.relieve = choice.relieve
            for batch, placed in reading.both():
                count = len(batch.events)  # before they are chosen, as both share columns
                choice.add_batch(placed, first)
                first += count
            chosen = choice.finish()
            account, footer = reading.finish(), reading.footer
            info = TraceInfo(trace_clock, header=_header(opened, stretch))
        writer = EventFileWriter(out, info)
        writer.footer = Footer(end=footer.end, gpus=footer.gpus)  # the rest are sums over all of it
        with options.open(file, path, progress=progress) as opened:
            reading = Reading(opened, path)
            _write_rows(writer, opened, reading, chosen, stretch)
        writer.finish()
    account.counts, account.losses = writer.counts, writer.losses
    if chosen.last_ns < stretch.start_ns:
        account.notes.append("the recording ends before the part begins")
    account.notes += writer.remarks()
    return account


def _first_ns(batch: TraceBatch) -> int:
    """The time of the first event or warp of a batch; TIME_LIMIT_NS where it has none."""
    events = batch.events
    times = events.ts_ns[(events.shape != SPECIAL) & (np.abs(events.ts_ns) <= TIME_LIMIT_NS)]
    of_warps = (
        int((np.repeat(group.base_ns, group.sizes) + group.whole.entry_ns).min())
        for group in batch.others.warps
        if len(group.whole)
    )
    return min([int(times.min(initial=TIME_LIMIT_NS)), *of_warps])


def _header(opened: OpenRecording, stretch: Stretch) -> Header:
    """The header of the part: that of the recording, with the start of the window if that is later."""
    header = opened.recording.header
    start, here_ns = cast("dict[str, Any]", header.start), header.start_ns(opened.clocks.trace_clock)
    if here_ns is None or stretch.start_ns <= here_ns:
        return header
    after_ns = stretch.start_ns - here_ns
    later = {name: ns + after_ns if name in HostInstant.__annotations__ else ns for name, ns in start.items()}
    return replace(header, start=cast("HostInstant", later))


def _write_rows(
    writer: EventFileWriter, opened: OpenRecording, reading: Reading, chosen: Chosen, stretch: Stretch
) -> None:
    """Write the chosen rows, the window, and the names of the rows' threads."""
    tables, trace_clock = opened.recording.tables, opened.clocks.trace_clock
    # The field that states that a time is on the trace's clock.
    clock = {} if trace_clock == opened.clocks.default else {"clock": trace_clock}
    end_ns = max(stretch.start_ns, min(stretch.end_ns, chosen.last_ns))

    def edge(phase: str, ts_ns: int) -> Record:
        """The begin or the end of the window."""
        ts_ns = max(0, min(ts_ns, TIME_LIMIT_NS))
        return {"ts_ns": ts_ns, "type": "window", "phase": phase, **clock, "cause": "cut"}

    # The recording's own windows may cross this one: it is then written with its end alone, as an instant
    # after theirs.
    if not chosen.has_windows:
        writer.record(edge("B", stretch.start_ns))
    first = 0
    threads: set[Thread] = set()
    for batch in reading.source():
        at = np.flatnonzero(chosen.marks.are_marked(first, len(batch.events)))
        if len(at):
            events = batch.events.take(at)
            for place in np.flatnonzero(events.shape == SPECIAL).tolist():
                ts_ns = chosen.undated_ns.get(first + int(at[place]))
                if ts_ns is not None:  # in the part, other lines are around the loss
                    number = int(events.args[place])
                    dated = {"type": "loss", "ts_ns": ts_ns, **clock}
                    batch.others[number] = dated | cast("Record", batch.others[number])
            for number in set(events.shape[events.shape >= 0].tolist()):
                shape = tables.shapes[number]
                if shape is not None and len(threads) < THREADS_MAX:
                    threads.add((shape.pid, shape.tid))
            writer.write_events(SourceBatch(events, batch.others), tables)
        first += len(batch.events)
        if first > chosen.marks.last:
            break
    if chosen.has_windows:
        writer.record(edge("B", end_ns))
    # Calls that are open at the end are drawn up to it.
    writer.record(edge("E", end_ns))
    for record in chosen.names_of(threads):
        writer.record(record)
