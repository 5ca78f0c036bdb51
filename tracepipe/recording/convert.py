"""Runs a recording through all stages: reader → clocks → layout → converter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

from tracepipe.clocks.maps import Clocks
from tracepipe.converters.writer import EventWriter, OutputFormat, TraceInfo, Writer
from tracepipe.event.model import Batch, Header, Problem, Record, Timed
from tracepipe.layout import Layout, LayoutOptions
from tracepipe.readers import Recording
from tracepipe.recording.account import Account
from tracepipe.recording.files import InputStream
from tracepipe.recording.open import damage, footer_notes, no_collector, open_recording, refused

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes in all, which are 0 where unknown."""


@dataclass(slots=True)
class ConvertOptions:
    """`assumed` places clocks that have no pairs: clock → ns to add, or a host clock's name."""

    source_format: str = ""
    strict: bool = False
    compress: bool = False
    assumed: dict[str, int | str] = field(default_factory=dict)
    layout: LayoutOptions = field(default_factory=LayoutOptions)


class Conversion:
    """One recording on its way: call `run` with a writer's stream."""

    def __init__(self, path: str, output: OutputFormat, options: ConvertOptions) -> None:
        self._path, self._output, self._options = path, output, options
        self.report = Account(path, "")

    def run(self, out: BinaryIO, progress: Progress | None = None) -> Account:
        """Convert; raises InputError on the first bad line where `strict`."""
        options = self._options
        with open_recording(self._path, options.source_format, options.assumed) as opened, no_collector():
            recording, clocks, stream = opened.recording, opened.clocks, opened.stream
            self.report.source = opened.source
            if self._output.of == "events":
                self._copy_events(out, recording, stream, progress)
                return self.report
            layout = Layout(recording.header, self._options.layout)
            writer: Writer | None = None
            start_ns = 0
            # A recording without a line after its header is a timeline too.
            for batch in itertools.chain(recording.batches, [Batch()]):
                events = clocks.stamp(batch.take(), self.report.unplaced)
                if writer is None:
                    info = _trace_info(recording.header, clocks, events, self._options.compress)
                    writer, start_ns = self._output.open(out, info), info.start["trace_ns"]
                    layout.end_ns = start_ns
                    about = _about(recording.header, self.report.source)
                    writer.write(layout.say("capture", start_ns, about))
                for problem in batch.problems:
                    self._problem(problem)
                    writer.write(layout.problem(problem))
                writer.write(layout.place(events))
                if progress and batch.offset_bytes:
                    progress(stream.position_bytes(), stream.size_bytes)
            assert writer is not None
            if stream.damage:
                self._problem(damage(stream))
                writer.write(layout.problem(damage(stream)))
            writer.write(layout.finish())
            self._conclude(layout, clocks)
            if layout.footer is not None and "ended_by" in layout.footer:
                ended = {"ended_by": layout.footer["ended_by"]}
                writer.write(layout.say("capture ended", layout.end_ns, ended))
            for said in self.report.clocks:
                writer.write(layout.say(f"clock {said['clock']}", start_ns, said))
            for clock, count in self.report.unplaced.items():
                args = {"clock": clock, "events": count, "reason": "no clock pairs"}
                writer.write(layout.say("not placed in time", start_ns, args, "problems"))
            writer.finish()
        return self.report

    def _copy_events(
        self, out: BinaryIO, recording: Recording, stream: InputStream, progress: Progress | None
    ) -> None:
        """Write events as they were recorded, on the clocks that they were recorded with."""
        writer: EventWriter = self._output.open(out, TraceInfo(recording.header.get("clock", "")))
        for batch in recording.batches:
            for problem in batch.problems:
                self._problem(problem)
            events = batch.take()
            for _, shape in events:
                self.report.counts[shape.type] += shape.events
                if shape.type == "loss":
                    self.report.losses[shape.record.get("layer", "unknown layer")] += shape.record["count"]
            writer.write_events(events)
            if progress:
                progress(stream.position_bytes(), stream.size_bytes)
        if stream.damage:
            self._problem(damage(stream))
        writer.finish()
        if writer.unwritten:
            self.report.notes.append(
                f"{writer.unwritten} warps or threads are not written: their block or thread is not recorded"
            )

    def _problem(self, problem: Problem) -> None:
        if self._options.strict and problem.skipped:
            raise refused(problem, self._path)
        self.report.add(problem)

    def _conclude(self, layout: Layout, clocks: Clocks) -> None:
        report = self.report
        report.counts, report.losses, report.outcomes = layout.counts, layout.losses, layout.outcomes
        report.clocks = clocks.statements()
        if report.source != "tracepipe":
            return
        if layout.after_footer:
            report.notes.append(f"{layout.after_footer} records stand after the footer")
        if layout.footer is None or not report.unplaced:
            report.notes += footer_notes(layout.footer, layout.counts)


def check(
    path: str, source_format: str, say: Callable[[str], None], progress: Progress | None = None
) -> Account:
    """Read a recording without drawing it, and `say` each problem as `path:line: field: message`."""
    report = Account(path, "")
    footer: Record | None = None
    with open_recording(path, source_format) as opened, no_collector():
        stream = opened.stream
        report.source = opened.source
        for batch in opened.recording.batches:
            for problem in batch.problems:
                report.add(problem)
                say(problem.at(path))
            for _, shape in batch.take():
                report.counts[shape.type] += shape.events
                footer = shape.record if shape.type == "footer" else footer
            if progress:
                progress(stream.position_bytes(), stream.size_bytes)
        if stream.damage:
            report.add(damage(stream))
            say(damage(stream).at(path))
    if report.source == "tracepipe":
        report.notes += footer_notes(footer, report.counts)
    for kind in ("footer", "clock", "loss"):
        del report.counts[kind]
    return report


def _trace_info(header: Header, clocks: Clocks, events: list[Timed], compress: bool) -> TraceInfo:
    """What the writer is told: the trace starts with the capture, or with the first event that is known."""
    start = cast("dict[str, int]", header.get("start", {}))
    here = start.get(f"{clocks.trace_clock}_ns")
    known = dict(start) if here is not None else {}
    start_ns = here if here is not None else min((ts_ns for ts_ns, _ in events if ts_ns >= 0), default=0)
    return TraceInfo(clocks.trace_clock, {"trace_ns": start_ns, **known}, compress=compress)


def _about(header: Header, source: str) -> dict[str, Any]:
    """What the trace says of where it comes from."""
    keys = ("tool", "engine", "host", "kernel", "machine", "command", "layers", "gpus")
    return {"source_format": source} | {key: header[key] for key in keys if key in header}  # type: ignore[literal-required]
