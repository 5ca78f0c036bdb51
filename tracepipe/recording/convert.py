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
from tracepipe.recording.account import Account
from tracepipe.recording.inputs import InputOptions, Inputs, Placed, open_inputs, open_separately
from tracepipe.recording.outputs import trace_names
from tracepipe.recording.reading import OpenRecording, Progress, Reading, no_collector, open_recording
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
        self._paths = [path] if isinstance(path, str) else list(path)
        self._output, self._options = output, options

    def run(self, out: BinaryIO, progress: Progress | None = None) -> Account:
        """Convert. Raises InputError on the first bad line where `strict`."""
        options = self._options
        if self._output.of == "archive":
            with no_collector():
                return self._archive(out, open_separately(self._paths, options, progress))
        with no_collector(), open_inputs(self._paths, options, progress) as inputs:
            if self._output.of == "timeline":
                return _Drawing(inputs, self._output, options).write(out)
            if self._output.of == "events":
                return self._copy_events(out, inputs.parts[0].opened, inputs.parts[0].reading)
            reading = inputs.parts[0].reading
            writer: EventWriter | None = None
            for batch, _ in reading.placed():
                writer = writer or self._event_writer(out, inputs, [batch])
                writer.write_events(batch, inputs.tables)
            return self._finished(writer or self._event_writer(out, inputs, []), reading)

    def _archive(self, out: BinaryIO, apart: Iterator[Inputs]) -> Account:
        """Write a trace of each recording, one after the other."""
        accounts: list[Account] = []
        first = next(apart)
        writer: ArchiveWriter = self._output.open(out, TraceInfo(first.clock))
        with writer as archive:
            for name, inputs in zip(trace_names(self._paths), chain([first], apart), strict=True):
                with archive.trace(name) as trace:
                    account = _Drawing(inputs, CONVERTERS["perfetto"], self._options).write(trace)
                archive.say(name, inputs.parts[0].machine, account.anchor)
                accounts.append(account)
        return Account.of_all(accounts)

    def _copy_events(self, out: BinaryIO, opened: OpenRecording, reading: Reading) -> Account:
        """Write events as they were recorded, on the clocks that they were recorded with."""
        header = opened.recording.header
        writer: EventWriter = self._output.open(out, TraceInfo(header.default_clock, header=header))
        for batch in reading.source():
            writer.write_events(batch, opened.recording.tables)
        account = self._finished(writer, reading)
        account.clocks, account.notes = [], writer.remarks()
        return account

    def _event_writer(self, out: BinaryIO, inputs: Inputs, firsts: Sequence[TraceBatch]) -> EventWriter:
        info = _trace_info(inputs, firsts, self._options.compress)
        writer: EventWriter = self._output.open(out, info)
        return writer

    @staticmethod
    def _finished(writer: EventWriter, reading: Reading) -> Account:
        writer.finish()
        account = reading.finish()
        account.notes += writer.remarks()
        return account


class _Drawing:
    """Draws and writes one timeline."""

    def __init__(self, inputs: Inputs, output: OutputFormat, options: ConversionOptions) -> None:
        self._inputs, self._output, self._options = inputs, output, options
        self._layout = Layout(
            inputs.header,
            inputs.tables,
            options.layout,
            origins=inputs.origins,
            separate_switches=output.has_switches,
            loads=output.has_loads,
            summaries=output.has_summaries,
        )
        self._start_ns = 0

    def write(self, out: BinaryIO) -> Account:
        """Read everything, and write what it draws."""
        layout = self._layout
        writer: Writer | None = None

        def relieve() -> None:
            layout.relieve()
            if writer is not None:
                writer.forget()

        streams = self._inputs.streams(relieve)
        firsts = [next(stream, None) for stream in streams]
        # A recording with nothing after its header makes a timeline too.
        writer = self._open(out, [first[0] for first in firsts if first is not None])
        for at, first in enumerate(firsts):
            self._place(writer, at, first)
        while (turn := layout.turn()) is not None:
            self._place(writer, turn, next(streams[turn], None))
        for drawn in layout.finish():
            writer.write(drawn)
        account = self._inputs.account()
        account.outcomes = layout.outcomes
        if layout.doubled:
            account.notes.append(
                counted(
                    layout.doubled,
                    "call|calls, kernel|kernels or copy|copies is|are in two recordings and drawn once",
                )
            )
        for part, of in zip(self._inputs.parts, account.parts or [account], strict=True):
            file = {FILE: part.name} if part.name else {}
            footer = part.reading.footer
            if footer.ended_by:
                ended = {"ended_by": footer.ended_by} | file
                writer.write(self._layout.say("capture ended", self._layout.end_ns, ended))
            for stated in of.clocks:
                writer.write(self._layout.say(f"clock {stated['clock']}", self._start_ns, stated | file))
            for clock, count in of.unplaced.items():
                args = {"clock": clock, "events": count, "reason": "no clock pairs"} | file
                writer.write(self._layout.say("not placed in time", self._start_ns, args, "problems"))
        writer.finish()
        return account

    def _place(self, writer: Writer, at: int, read: Placed | None) -> None:
        """Draw a batch of a recording; None where the recording has ended."""
        if read is None:
            writer.write(self._layout.end(at))
            return
        batch, problems = read
        for problem in problems:
            writer.write(self._layout.problem(problem, self._inputs.parts[at].name))
        writer.write(self._layout.place(batch, at))

    def _open(self, out: BinaryIO, firsts: Sequence[TraceBatch]) -> Writer:
        """Return the writer, after drawing where the recordings come from."""
        inputs = self._inputs
        info = _trace_info(inputs, firsts, self._options.compress)
        writer: Writer = self._output.open(out, info)
        self._start_ns = self._layout.end_ns = info.start["trace_ns"]
        for part in inputs.parts:
            record = part.opened.recording.header.to_record()
            about: dict[str, Any] = {"source_format": part.opened.source}
            about |= {key: record[key] for key in _SAID if key in record}
            if part.anchor is not None:
                about |= {FILE: part.name} | part.anchor.stated(inputs.clock)
            writer.write(self._layout.say("capture", self._start_ns, about))
        return writer


def check(
    path: str, source_format: str, say: Callable[[str], None], progress: Progress | None = None
) -> Account:
    """Read a recording without drawing it, and `say` each problem as `path:line: field: message`."""
    with open_recording(path, source_format) as opened, no_collector():
        reading = Reading(opened, path, progress=progress)
        for batch in reading.source():
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
