"""Runs a recording through all stages: reader → clocks → layout → converter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, BinaryIO

from tracepipe.converters import CONVERTERS
from tracepipe.converters.writer import EventWriter, OutputFormat, TraceInfo, Writer
from tracepipe.event.columns import SPECIAL, TraceBatch
from tracepipe.event.model import STALLS
from tracepipe.event.origins import FILE
from tracepipe.event.warps import PlacedWarps
from tracepipe.layout import LayoutOptions
from tracepipe.layout.draw import Layout
from tracepipe.readers.sorted_rows import SortedRow, row_sorter
from tracepipe.recording.account import Account
from tracepipe.recording.files import Progress, archives_kept, traces_of
from tracepipe.recording.inputs import InputOptions, Inputs, Placed, open_inputs, open_separately
from tracepipe.recording.outputs import trace_names
from tracepipe.recording.reading import Reading, no_collector, open_recording
from tracepipe.units import counted

if TYPE_CHECKING:
    from tracepipe.converters.archive import ArchiveWriter

# The fields of a header that a trace shows.
_SAID = ("tool", "engine", "host", "kernel", "machine", "command", "rank", "world_size", "layers", "gpus")


@dataclass(slots=True)
class ConversionOptions(InputOptions):
    """The options of a conversion."""

    compress: bool = False
    layout: LayoutOptions = field(default_factory=LayoutOptions)


class Conversion:
    """The conversion of one recording, or of several as one. Call `run` with the output stream."""

    def __init__(self, path: str | Sequence[str], output: OutputFormat, options: ConversionOptions) -> None:
        self._paths = [path] if isinstance(path, str) else path
        self._output, self._options = output, options

    def run(self, out: BinaryIO, progress: Progress | None = None) -> Account:
        """Convert. Raises InputError on the first bad line where `strict`."""
        with no_collector(), archives_kept():
            if self._output.takes_several:
                self._paths = [trace for one in self._paths for trace in traces_of(one)]
            if self._output.of == "archive":
                return self._archive(out, open_separately(self._paths, self._options, progress))
            return self._as_one(out, progress)

    def _as_one(self, out: BinaryIO, progress: Progress | None) -> Account:
        """Write one output of all recordings."""
        options, output = self._options, self._output
        with open_inputs(self._paths, options, progress) as inputs:
            if output.of == "timeline":
                return _draw(inputs, output, options, out)
            opened, reading = inputs.parts[0].opened, inputs.parts[0].reading
            writer: EventWriter | None = None
            if output.of == "events":  # as they were recorded, on the clocks that they were recorded with
                header = opened.recording.header
                info = TraceInfo(header.default_clock, header=header, new_sorter=SortedLines)
                writer = output.open(out, info)
                for batch in reading.source():
                    writer.write_events(batch, opened.recording.tables)
            else:
                for placed, _ in reading.placed():
                    writer = writer or output.open(out, _trace_info(inputs, [placed], options.compress))
                    writer.write_events(placed, inputs.tables)
                writer = writer or output.open(out, _trace_info(inputs, [], options.compress))
            writer.finish()
            account = reading.finish()
            if output.of == "events":
                account.clocks, account.notes = [], []
            account.notes += writer.remarks()
            return account

    def _archive(self, out: BinaryIO, apart: Iterator[Inputs]) -> Account:
        """Write a trace of each recording, one after the other."""
        accounts: list[Account] = []
        first = next(apart)
        writer: ArchiveWriter = self._output.open(out, TraceInfo(first.clock))
        with writer as archive:
            for name, inputs in zip(trace_names(self._paths), chain([first], apart), strict=True):
                with archive.trace(name) as trace:
                    account = _draw(inputs, CONVERTERS["perfetto"], self._options, trace)
                archive.say(name, inputs.parts[0].machine, account.anchor)
                accounts.append(account)
        return Account.of_all(accounts)


class SortedLines:
    """Sorts the lines of a writer, in files without a name where there are many."""

    def __init__(self) -> None:
        self._rows = row_sorter()

    def add(self, ts_ns: int, line: bytes) -> None:
        """Add a line, with its end."""
        self._rows.add(SortedRow(ts_ns, 0, 0, 0, b"", line))

    def lines(self) -> Iterator[bytes]:
        """All lines in order, many at a time."""
        for rows in self._rows.in_order():
            yield rows.second.data


def _draw(inputs: Inputs, output: OutputFormat, options: ConversionOptions, out: BinaryIO) -> Account:
    """Read everything, and write one timeline of it."""
    layout = Layout(
        inputs.header,
        inputs.tables,
        options.layout,
        origins=inputs.origins,
        separate_switches=output.has_switches,
        loads=output.has_loads,
        summaries=output.has_summaries,
    )
    writer: Writer | None = None

    def relieve() -> None:
        has_new_shapes = layout.relieve()
        if writer is not None:
            writer.forget(shapes=has_new_shapes)

    streams = inputs.streams(relieve)
    firsts = [next(stream, None) for stream in streams]
    # A recording with nothing after its header makes a timeline too.
    info = _trace_info(inputs, [first[0] for first in firsts if first is not None], options.compress)
    writer = output.open(out, info)
    start_ns = layout.end_ns = info.start["trace_ns"]
    # What a trace of tracepipe states of itself is among its events.
    states_itself = len(inputs.parts) == 1 and inputs.parts[0].opened.recording.states_itself
    for part in () if states_itself else inputs.parts:
        record = part.opened.recording.header.to_record()
        about: dict[str, Any] = {"source_format": part.opened.source}
        about |= {key: record[key] for key in _SAID if key in record}
        if part.anchor is not None:
            about |= {FILE: part.name} | part.anchor.stated(inputs.clock)
        writer.write(layout.say("capture", start_ns, about))

    def place(at: int, read: Placed | None) -> None:
        """Draw a batch of a recording; None where the recording has ended."""
        if read is None:
            writer.write(layout.end(at))
            return
        batch, problems = read
        for problem in problems:
            if (drawn := layout.problem(problem, inputs.parts[at].name)) is not None:
                writer.write(drawn)
        writer.write(layout.place(batch, at))

    for at, first in enumerate(firsts):
        place(at, first)
    while (turn := layout.turn()) is not None:
        place(turn, next(streams[turn], None))
    for drawn in layout.finish():
        writer.write(drawn)
    account = inputs.account()
    account.outcomes = layout.outcomes
    if layout.doubled:
        what = "call|calls, kernel|kernels or copy|copies is|are in two recordings and drawn once"
        account.notes.append(counted(layout.doubled, what))
    for part, of in zip(inputs.parts, account.parts or [account], strict=True):
        file = {FILE: part.name} if part.name else {}
        footer = part.reading.footer
        if footer.ended_by:
            writer.write(layout.say("capture ended", layout.end_ns, {"ended_by": footer.ended_by} | file))
        for stated in () if states_itself else of.clocks:
            writer.write(layout.say(f"clock {stated['clock']}", start_ns, stated | file))
        for clock, count in of.unplaced.items():
            args = {"clock": clock, "events": count, "reason": "no clock pairs"} | file
            writer.write(layout.say("not placed in time", start_ns, args, "problems"))
    writer.finish()
    return account


def check(
    path: str, source_format: str, say: Callable[[str], None], progress: Progress | None = None
) -> Account:
    """Read a recording without drawing it, and `say` each problem as `path:line: field: message`."""
    with open_recording(path, source_format, progress=progress) as opened, no_collector():
        reading = Reading(opened, path)
        for batch in reading.source():
            if opened.clocks.others is not None:  # launches that contradict each other are an error
                opened.clocks.stamp(batch, opened.recording.tables, {})
            for problem in batch.problems:
                say(problem.at(path))
        account = reading.finish()
        account.clocks = []
        return account


def _trace_info(inputs: Inputs, firsts: Sequence[TraceBatch], compress: bool) -> TraceInfo:
    """The writer's `TraceInfo`: the trace begins with the capture, or with the first known event."""
    here = inputs.start.get(f"{inputs.clock}_ns")
    known = dict(inputs.start) if here is not None else {}
    start_ns = here if here is not None else min((_first_ns(one) for one in firsts), default=0)
    return TraceInfo(inputs.clock, {"trace_ns": start_ns, **known}, compress=compress)


def _first_ns(batch: TraceBatch) -> int:
    """The time of the first event of a batch; 0 where it has none."""
    events = batch.events
    times = [
        int(ts_ns)
        for ts_ns, shape, args in zip(events.ts_ns, events.shape, events.args, strict=True)
        if ts_ns >= 0
        and (
            shape != SPECIAL
            or isinstance(other := batch.others[args], PlacedWarps)
            or other["type"] in ("loss", "window", *STALLS)
        )
    ]
    return min(times, default=0)
