"""Runs a recording through all stages: reader → clocks → layout → converter."""

from __future__ import annotations

import gc
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, cast

import orjson

from tracepipe.clocks import Clocks
from tracepipe.converters.writer import EventWriter, OutputFormat, TraceInfo, Writer
from tracepipe.errors import InputError
from tracepipe.files import InputStream, open_input
from tracepipe.layout import Layout, LayoutOptions, Outcomes
from tracepipe.model import HOST_CLOCKS, Batch, Header, Problem, Record, Timed
from tracepipe.readers import InputFormat, Recording, recognise
from tracepipe.readers.lines import chunks_of_lines
from tracepipe.validate import first_fault

# So many problems are kept with their text; all are counted.
PROBLEMS_KEPT = 20
_CLOCK_RECORD = re.compile(rb'"type"\s*:\s*"clock"')

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


@dataclass(slots=True)
class Report:
    """What a conversion found: counts and losses by layer, and everything that did not go by the book."""

    path: str
    source: str
    counts: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    ambiguous: int = 0
    problems: list[Problem] = field(default_factory=list)
    outcomes: Outcomes = field(default_factory=Outcomes)
    unplaced: dict[str, int] = field(default_factory=dict)
    clocks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, problem: Problem) -> None:
        """Count a problem, and keep its text while there are few."""
        self.skipped += problem.skipped
        self.ambiguous += not problem.skipped
        if len(self.problems) < PROBLEMS_KEPT:
            self.problems.append(problem)


def clock_records(stream: BinaryIO) -> Iterator[Record]:
    """The good `clock` records of a stream of JSON Lines, found without parsing the other lines."""
    for _, lines, _, _ in chunks_of_lines(stream):
        for line in lines:
            if b'"clock"' in line and _CLOCK_RECORD.search(line):
                try:
                    record = orjson.loads(line)
                except orjson.JSONDecodeError:
                    continue  # the reader will count it
                if isinstance(record, dict) and record.get("type") == "clock" and not first_fault(record):
                    yield record


def _header_pairs(header: Header, report: Report) -> Iterator[Record]:
    for at, pair in enumerate(header.get("clock_pairs", [])):
        record = {"type": "clock", **pair}
        if fault := first_fault(record):
            report.add(Problem(1, f"clock_pairs[{at}].{fault[0]}", fault[1]))
        else:
            yield record


def _clocks(header: Header, stream: BinaryIO | None, options: ConvertOptions, report: Report) -> Clocks:
    pairs = list(_header_pairs(header, report))
    if stream is not None:
        pairs += clock_records(stream)
    return Clocks(header, pairs, options.assumed)


@contextmanager
def _opened(
    path: str, options: ConvertOptions, report: Report
) -> Iterator[tuple[Recording, Clocks, InputStream]]:
    """Open an input and settle its clocks: where they need pairs from all over the file, it is read twice."""
    with ExitStack() as stack:
        stream = stack.enter_context(open_input(path))
        source = _recognised(stream, path, options)
        report.source = source.name
        recording = _read(source, cast(BinaryIO, stream), path)
        header = recording.header
        used = header.get("clocks", [header.get("clock", HOST_CLOCKS[0])])
        if set(used) <= set(HOST_CLOCKS) or len(used) == 1:
            yield recording, _clocks(header, None, options, report), stream
            return
        again = stack.enter_context(stream.again())
        clocks = _clocks(header, cast(BinaryIO, again), options, report)
        yield recording, clocks, stream


def _recognised(stream: InputStream, path: str, options: ConvertOptions) -> InputFormat:
    head = stream.head()
    if not head.strip() and not options.source_format:
        if stream.damage:
            raise InputError(f"cannot be read: {stream.damage}", "copy or record it again", path=path)
        raise InputError("is empty", "record something first", path=path)
    return recognise(head, options.source_format)


def _read(source: InputFormat, stream: BinaryIO, path: str) -> Recording:
    try:
        return source.read(stream)
    except InputError as e:
        # The reader does not know the path: its message starts with the place without one.
        raise InputError(e.message.removeprefix(f":{e.line}: "), e.hint, path=path, line=e.line) from e


class Conversion:
    """One recording on its way: call `run` with a writer's stream."""

    def __init__(self, path: str, output: OutputFormat, options: ConvertOptions) -> None:
        self._path, self._output, self._options = path, output, options
        self.report = Report(path, "")

    def run(self, out: BinaryIO, progress: Progress | None = None) -> Report:
        """Convert; raises InputError on the first bad line where `strict`."""
        with _opened(self._path, self._options, self.report) as (recording, clocks, stream), _no_collector():
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
                self._problem(_damage(stream))
                writer.write(layout.problem(_damage(stream)))
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
            self._problem(_damage(stream))
        writer.finish()
        if writer.unwritten:
            self.report.notes.append(
                f"{writer.unwritten} warps or threads are not written: their block or thread is not recorded"
            )

    def _problem(self, problem: Problem) -> None:
        if self._options.strict and problem.skipped:
            raise InputError(
                problem.message,
                "without --strict such lines are counted and skipped",
                path=self._path,
                line=problem.line,
                field=problem.field,
            )
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
) -> Report:
    """Read a recording without drawing it, and `say` each problem as `path:line: field: message`."""
    options = ConvertOptions(source_format=source_format)
    report = Report(path, "")
    footer: Record | None = None
    with _opened(path, options, report) as (recording, _, stream), _no_collector():
        for batch in recording.batches:
            for problem in batch.problems:
                report.add(problem)
                say(problem.at(path))
            for _, shape in batch.take():
                report.counts[shape.type] += shape.events
                footer = shape.record if shape.type == "footer" else footer
            if progress:
                progress(stream.position_bytes(), stream.size_bytes)
        if stream.damage:
            report.add(_damage(stream))
            say(_damage(stream).at(path))
    if report.source == "tracepipe":
        report.notes += footer_notes(footer, report.counts)
    for kind in ("footer", "clock", "loss"):
        del report.counts[kind]
    return report


def _damage(stream: InputStream) -> Problem:
    return Problem(0, "", f"the data is damaged from here on: {stream.damage}")


def footer_notes(footer: Record | None, counts: Counter[str]) -> list[str]:
    """What the footer says that the file does not bear out."""
    if footer is None:
        return ["the file has no footer: the capture was cut off"]
    return [
        f"the footer counts {made} {layer} events, the file holds {counts[layer]}"
        for layer, made in footer["counts"].items()
        if counts[layer] != made
    ]


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


@contextmanager
def _no_collector() -> Iterator[None]:
    """Stop the cycle collector: records hold no cycles, and looking for them costs a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
