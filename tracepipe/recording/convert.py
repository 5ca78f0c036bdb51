"""Runs a recording through all stages: reader → clocks → layout → converter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from tracepipe.clocks import Clocks
from tracepipe.converters.writer import EventWriter, OutputFormat, TraceInfo, Writer
from tracepipe.event.columns import SPECIAL, TraceBatch, TraceColumns, no_events
from tracepipe.event.model import Header
from tracepipe.event.warps import PlacedWarps
from tracepipe.layout.draw import Layout
from tracepipe.layout.options import LayoutOptions
from tracepipe.readers import UNDATED
from tracepipe.recording.account import Account
from tracepipe.recording.open import OpenRecording, no_collector, open_recording
from tracepipe.recording.reading import Progress, Reading


@dataclass(slots=True)
class ConvertOptions:
    """`assumed` places clocks that have no pairs: clock → ns to add, or a host clock's name. `undated` is as
    `open_recording` has it.
    """

    source_format: str = ""
    strict: bool = False
    compress: bool = False
    assumed: dict[str, int | str] = field(default_factory=dict)
    layout: LayoutOptions = field(default_factory=LayoutOptions)
    undated: str = UNDATED[0]


class Conversion:
    """One recording on its way: call `run` with a writer's stream."""

    def __init__(self, path: str, output: OutputFormat, options: ConvertOptions) -> None:
        self._path, self._output, self._options = path, output, options

    def run(self, out: BinaryIO, progress: Progress | None = None) -> Account:
        """Convert; raises InputError on the first bad line where `strict`."""
        options = self._options
        how = (options.source_format, options.assumed, options.undated)
        with open_recording(self._path, *how) as opened, no_collector():
            reading = Reading(opened, self._path, strict=options.strict, progress=progress)
            if self._output.of == "events":
                return self._copy_events(out, opened, reading)
            if self._output.of == "trace events":
                return self._copy_placed(out, opened, reading)
            return self._draw(out, opened, reading)

    def _draw(self, out: BinaryIO, opened: OpenRecording, reading: Reading) -> Account:
        header = opened.recording.header
        layout = Layout(
            header,
            opened.recording.tables,
            self._options.layout,
            switches_apart=self._output.has_switches,
            summaries=self._output.has_summaries,
        )
        writer: Writer | None = None

        def relieve() -> None:
            layout.relieve()
            if writer is not None:
                writer.forget()

        reading.relieve = relieve
        start_ns = 0
        for batch, problems in reading.placed():
            if writer is None:
                writer, start_ns = self._open(out, opened, layout, batch)
            for problem in problems:
                writer.write(layout.problem(problem))
            writer.write(layout.place(batch))
        if writer is None:  # a recording without a line after its header is a timeline too
            writer, start_ns = self._open(out, opened, layout, _no_batch())
        for drawn in layout.finish():
            writer.write(drawn)
        account = reading.finish()
        account.outcomes = layout.outcomes
        if reading.footer is not None and "ended_by" in reading.footer:
            ended = {"ended_by": reading.footer["ended_by"]}
            writer.write(layout.say("capture ended", layout.end_ns, ended))
        for said in account.clocks:
            writer.write(layout.say(f"clock {said['clock']}", start_ns, said))
        for clock, count in account.unplaced.items():
            args = {"clock": clock, "events": count, "reason": "no clock pairs"}
            writer.write(layout.say("not placed in time", start_ns, args, "problems"))
        writer.finish()
        return account

    def _open(
        self, out: BinaryIO, opened: OpenRecording, layout: Layout, first: TraceBatch
    ) -> tuple[Writer, int]:
        """The writer, which has drawn where the recording comes from, and the start of the trace."""
        header = opened.recording.header
        info = _trace_info(header, opened.clocks, first, self._options.compress)
        writer: Writer = self._output.open(out, info)
        start_ns = layout.end_ns = info.start["trace_ns"]
        writer.write(layout.say("capture", start_ns, _about(header, opened.source)))
        return writer, start_ns

    def _copy_events(self, out: BinaryIO, opened: OpenRecording, reading: Reading) -> Account:
        """Write events as they were recorded, on the clocks that they were recorded with."""
        header = opened.recording.header
        writer: EventWriter = self._output.open(out, TraceInfo(header.get("clock", "")))
        for batch in reading.source():
            writer.write_events(batch, opened.recording.tables)
        account = self._finished(writer, reading)
        account.clocks, account.notes = [], writer.remarks()
        return account

    def _copy_placed(self, out: BinaryIO, opened: OpenRecording, reading: Reading) -> Account:
        """Write events one after the other, on the trace's clock."""
        writer: EventWriter | None = None
        for batch, _ in reading.placed():
            writer = writer or self._event_writer(out, opened, batch)
            writer.write_events(batch, opened.recording.tables)
        return self._finished(writer or self._event_writer(out, opened, _no_batch()), reading)

    def _event_writer(self, out: BinaryIO, opened: OpenRecording, first: TraceBatch) -> EventWriter:
        info = _trace_info(opened.recording.header, opened.clocks, first, self._options.compress)
        writer: EventWriter = self._output.open(out, info)
        return writer

    @staticmethod
    def _finished(writer: EventWriter, reading: Reading) -> Account:
        writer.finish()
        account = reading.finish()
        account.notes += writer.remarks()
        return account


def _no_batch() -> TraceBatch:
    events = no_events()
    return TraceBatch(TraceColumns(events.ts_ns, events.shape, events.args, events.dur_ns, events.launch))


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


def _trace_info(header: Header, clocks: Clocks, first: TraceBatch, compress: bool) -> TraceInfo:
    """What the writer is told: the trace starts with the capture, or with the first event that is known."""
    start = cast("dict[str, int]", header.get("start", {}))
    here = start.get(f"{clocks.trace_clock}_ns")
    known = dict(start) if here is not None else {}
    start_ns = here if here is not None else _first_ns(first)
    return TraceInfo(clocks.trace_clock, {"trace_ns": start_ns, **known}, compress=compress)


def _first_ns(batch: TraceBatch) -> int:
    """The time of the first event of a batch; 0 where it has none."""
    events = batch.events
    times = [
        int(ts_ns)
        for ts_ns, shape, args in zip(events.ts_ns, events.shape, events.args, strict=True)
        if ts_ns >= 0 and (shape != SPECIAL or _is_dated(batch.others[args]))
    ]
    return min(times, default=0)


def _is_dated(other: Any) -> bool:
    return isinstance(other, PlacedWarps) or other["type"] in ("loss", "window")


def _about(header: Header, source: str) -> dict[str, Any]:
    """What the trace says of where it comes from."""
    keys = ("tool", "engine", "host", "kernel", "machine", "command", "layers", "gpus")
    return {"source_format": source} | {key: header[key] for key in keys if key in header}  # type: ignore[literal-required]
