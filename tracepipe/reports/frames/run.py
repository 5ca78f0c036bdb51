"""Loads a recording for the reports: each layer becomes a frame of columns, on the trace clock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import PurePath
from typing import Any

from tracepipe.event.columns import SPECIAL, Bools, TraceBatch
from tracepipe.event.model import STALLS, TIME_LIMIT_NS, Header, Problem, Record
from tracepipe.event.stacks import Stacks
from tracepipe.event.warps import PlacedWarps, at_once
from tracepipe.recording.account import Account
from tracepipe.recording.open import OpenRecording, no_collector, open_recording
from tracepipe.recording.reading import Progress, Reading
from tracepipe.reports.frames.arguments import ArgsTable
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.collected import CollectedLayers
from tracepipe.reports.frames.counter_columns import CounterTable
from tracepipe.reports.frames.kept_args import KeptArgs
from tracepipe.reports.frames.layers import COLUMNS, Frames, Layer, streams_and_copies, threads_of
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.losses import LossTable
from tracepipe.reports.frames.shapes import GROUPS, ShapeTable
from tracepipe.reports.frames.spans import Matching
from tracepipe.reports.frames.stalls import StallTable
from tracepipe.reports.frames.stored import give_back_at_once, parts, release
from tracepipe.reports.frames.warp_columns import WarpTable


@dataclass(slots=True, kw_only=True)
class Facts(Account):
    """A recording without its events: what it is, and what it lacks. Times are on the trace clock."""

    header: Header
    trace_clock: str
    footer: Record | None = None
    start_ns: int = 0
    end_ns: int = 0

    @classmethod
    def of(cls, account: Account, **more: object) -> Facts:
        """The facts of an account of the reading, and more fields."""
        values: dict[str, Any] = {field.name: getattr(account, field.name) for field in fields(account)}
        return cls(**values | more)


@dataclass(frozen=True, slots=True)
class RunTables:
    """The tables of a recording in addition to the columns of its layers."""

    shapes: ShapeTable
    args: ArgsTable
    warps: WarpTable
    losses: LossTable
    stacks: Stacks
    stalls: StallTable
    counters: CounterTable


class Run:
    """A recording in columns. Frames are computed when they are needed, with a row for each slice and
    instant, sorted by start:

    start_ns, end_ns                equal for an instant
    dur_ns                          null where it is not known: instants, calls without an end
    kind                            one of `spans.KINDS`
    layer, name, phase, pid, tid, cpu, comm, launch, gpu, stream, grid, block, bound_ns
                                    null where it was not recorded
    size_bytes, address, result     from the arguments, `result` of the end; address as text
    args, end_args                  all arguments of begin and end as JSON text
    depth, parent                   how many others of the same thread and layer are around it; the row of the
                                    innermost of them
    stack, python                   of a call, or of its launch: number in `stacks`, and the user's line
    lane                            0, or the number of the overlap track on which the timeline draws it

    `layer` returns the same as numpy columns, which is faster, and `some` returns a few columns of a frame.
    """

    def __init__(self, facts: Facts, layers: dict[str, Layer], tables: RunTables) -> None:
        self.facts, self._layers = facts, layers
        self.shapes, self.args, self.stacks = tables.shapes, tables.args, tables.stacks
        self.warp_table, self.loss_table, self.stall_table = tables.warps, tables.losses, tables.stalls
        self.counters = tables.counters
        self._frames = Frames(self.shapes, self.args, self.stacks)

    def layer(self, name: str) -> Layer:
        """The numpy columns of a layer, which is one of `FRAMES`."""
        release()
        return self._layers[name]

    def has(self, column: str, value: Hashable, layer: Layer) -> Bools:
        """Flags the rows of a layer whose shapes have a value in a column. Shape `(rows,)`."""
        number = self.shapes.number_of(column, value)
        every = np.arange(len(self.shapes), dtype=np.int32)
        flagged: Bools = (self.shapes.column(column, every) == number)[layer.shape]
        return flagged

    def seen(self, name: str) -> Bools:
        """Flags the shapes that rows of a layer have. Shape `(shapes,)`."""
        layer, seen = self.layer(name), np.zeros(len(self.shapes), np.bool_)
        for part in parts(len(layer)):
            seen[layer.shape[part]] = True
        return seen

    def some(self, name: str, *columns: str) -> pl.DataFrame:
        """A few columns of a layer's frame; the others are not read."""
        return self._frames.frame(self._layers[name], columns)

    def rows(self, name: str, rows: Ints, *columns: str) -> pl.DataFrame:
        """A few rows of a layer's frame, with all columns or a few; `parent` is a row of the whole frame."""
        return self._frames.frame(self._layers[name].rows(rows), columns or COLUMNS)

    def part(self, name: str, rows: Ints | slice, *columns: str) -> pl.DataFrame:
        """Like `rows`, for a part of many rows: parsed arguments are not cached, so parts take
        little memory.
        """
        frames = Frames(self.shapes, self.args.afresh(), self.stacks)
        return frames.frame(self._layers[name].rows(rows), columns)

    def text_bytes(self, name: str, rows: slice) -> int:
        """About how many bytes of text successive rows of a layer have."""
        layer = self._layers[name].rows(rows)
        of_args = sum(map(self.args.text_bytes, (layer.args, layer.end_args)))
        return of_args + self.shapes.text_bytes(layer.shape)

    def _frame(self, name: str) -> pl.DataFrame:
        return self._frames.frame(self._layers[name])

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """The `annotation` layer, with the additional columns `domain` and `range` (of ranges of a
        process).
        """
        return self.some("annotation", *COLUMNS, "domain", "range")

    @cached_property
    def calls(self) -> pl.DataFrame:
        """The `userspace` layer: calls of the CUDA libraries, also those inside others (`depth`)."""
        return self._frame("userspace")

    @cached_property
    def hooks(self) -> pl.DataFrame:
        """Functions and tracepoints of hooks in separate layers, whose names are in `layer`."""
        return self._frame("hook")

    @cached_property
    def syscalls(self) -> pl.DataFrame:
        """The `syscall` layer."""
        return self._frame("syscall")

    @cached_property
    def driver(self) -> pl.DataFrame:
        """Functions of the driver: the `kernel` layer, and the scheduler's calls, which nest there."""
        return self._frame("kernel")

    @cached_property
    def scheduler(self) -> pl.DataFrame:
        """The `scheduler` layer: slices during which threads run (`running`), and instants."""
        return self._frame("scheduler")

    @cached_property
    def memory(self) -> pl.DataFrame:
        """The `memory` layer: `alloc`, `free`, …"""
        return self._frame("memory")

    @cached_property
    def transfers(self) -> pl.DataFrame:
        """The `transfer` layer: copies with the times of their calls, or, where `gpu` is known, of
        the GPU.
        """
        return self._frame("transfer")

    @cached_property
    def kernels(self) -> pl.DataFrame:
        """The `gpu_kernel` layer."""
        return self._frame("gpu_kernel")

    @cached_property
    def gpu_threads(self) -> pl.DataFrame:
        """The `gpu_thread` layer: entries and exits of single threads (`phase` B, E, I), with `block` and
        `thread`."""
        return self._frame("gpu_thread")

    @cached_property
    def warps(self) -> pl.DataFrame:
        """One row for each warp: see `WarpTable.frame`."""
        return self.warp_table.frame()

    @cached_property
    def exits(self) -> pl.DataFrame:
        """The exits of warps whose lanes did not exit together: see `WarpTable.exits`."""
        return self.warp_table.exits()

    @cached_property
    def ranges(self) -> pl.DataFrame:
        """One row for each range of a warp: see `RangeTable.frame`."""
        return self.warp_table.ranges.frame()

    @cached_property
    def losses(self) -> pl.DataFrame:
        """The stretches in which events were lost: layer, count, start_ns, dur_ns, cpu, reason."""
        return self.loss_table.frame()

    def thread_name(self, pid: int | None, tid: int | None) -> str | None:
        """The last name of a thread."""
        return self.shapes.thread_name(pid, tid)

    def process_name(self, pid: int | None) -> str:
        """The last name of the process's main thread, else the command that was recorded."""
        if pid is None:
            return "process (pid not recorded)"
        command = self.facts.header.get("command")
        recorded = PurePath(command[0]).name if command else "process"
        # Formats without thread ids only name the process.
        given = self.shapes.given_name(pid, None)
        return given or self.thread_name(pid, pid) or self.thread_name(pid, None) or recorded


class _Loading:
    """Collects the columns of one recording."""

    def __init__(self, opened: OpenRecording, reading: Reading) -> None:
        self._opened, self._reading = opened, reading
        self._shapes, self._args = ShapeTable(), KeptArgs(opened.recording.tables)
        self._events = CollectedLayers(opened.recording.tables, self._shapes, self._args)
        self._warps = WarpTable(opened.clocks.trace_clock)
        self._losses = LossTable()
        self._stalls = StallTable()
        self._counters = CounterTable(opened.recording.tables)
        self._first_ns: int | None = None
        self._last_ns = -TIME_LIMIT_NS

    def take(self, batch: TraceBatch) -> None:
        """Add a batch."""
        events = batch.events
        kept = np.abs(events.ts_ns) <= TIME_LIMIT_NS
        if batch.others:
            kept &= events.shape != SPECIAL
            warps: list[PlacedWarps] = []
            for at in np.flatnonzero(events.shape == SPECIAL).tolist():
                other = batch.others[int(events.args[at])]
                if isinstance(other, PlacedWarps):
                    warps.append(other)
                else:
                    self._take_other(int(events.ts_ns[at]), other)
            for some in at_once(warps):
                self._take_warps(some)
        if not kept.all():
            for ts_ns in events.ts_ns[~kept & (events.shape != SPECIAL)].tolist():
                self._reading.note(_no_time(ts_ns))
            events = events.take(kept)
        if len(events):
            first_ns = int(events.ts_ns.min())
            self._first_ns = first_ns if self._first_ns is None else min(first_ns, self._first_ns)
            self._counters.add(events)
            self._events.add(events)

    def _take_warps(self, batches: list[PlacedWarps]) -> None:
        """Add batches of warps; bad ones are reported and left out."""
        try:
            self._last_ns = max(self._last_ns, self._warps.add(batches))
        except OverflowError:
            if len(batches) == 1:
                self._reading.note(Problem(0, "gpu_warp", "contains numbers that are too large"))
            else:
                for one in batches:
                    self._take_warps([one])

    def _take_other(self, ts_ns: int, other: Record) -> None:
        """Add a record that is neither an event nor warps."""
        if other["type"] == "loss" and abs(ts_ns) > TIME_LIMIT_NS:
            self._reading.note(_no_time(ts_ns))
        elif other["type"] == "name":
            self._shapes.give_name(other)
        elif other["type"] in STALLS:
            self._stalls.add(other)
        elif other["type"] == "loss":
            self._losses.add(other, ts_ns)

    def relieve(self) -> None:
        """Free memory of the recording's tables, much of whose content is kept here too."""
        self._events.relieve()

    def finish(self) -> Run:
        """Match begins and ends, and return the run."""
        account, shapes = self._reading.finish(), self._shapes
        header, footer = self._opened.recording.header, self._reading.footer
        facts = Facts.of(account, header=header, trace_clock=self._opened.clocks.trace_clock, footer=footer)
        self._events.forget_shapes()
        shapes.put_away()
        self._warps.finish()
        self._losses.finish()
        self._counters.finish()
        threads = threads_of(self._events.take("gpu_thread"))
        matching = Matching()
        spans = {name: matching.match(self._events.take(name), shapes, name) for name in GROUPS}
        here = header.get("start", {}).get(f"{facts.trace_clock}_ns")
        first_ns = [self._first_ns, self._warps.first_ns]
        facts.start_ns = (
            here if isinstance(here, int) else min((ns for ns in first_ns if ns is not None), default=0)
        )
        lasts_ns = [self._last_ns, facts.start_ns, *threads.end_ns[-1:].tolist()]
        facts.end_ns = max([*lasts_ns, *(one.last_ns for one in spans.values() if one.last_ns is not None)])
        for one in spans.values():
            one.finish(facts.end_ns)
        facts.outcomes = matching.outcomes
        layers = {name: Layer(**one.columns) for name, one in spans.items()} | {"gpu_thread": threads}
        layers |= streams_and_copies(layers["transfer"], shapes)
        tables = RunTables(
            shapes,
            ArgsTable(self._args),
            self._warps,
            self._losses,
            self._opened.recording.tables.stacks,
            self._stalls,
            self._counters,
        )
        return Run(facts, layers, tables)


def _no_time(ts_ns: int) -> Problem:
    return Problem(0, "ts_ns", f"{ts_ns} is not a time of a recording")


def load_run(
    path: str,
    source_format: str = "",
    strict: bool = False,
    assumed: Mapping[str, int | str] | None = None,
    progress: Progress | None = None,
    undated: str = "skip",
) -> Run:
    """Read a recording of any input format into columns.

    `assumed` and `undated` are as in `open_recording`. Raises InputError (with `strict`, on the first bad
    line), FormatError, ClockError and LibraryMissing.
    """
    give_back_at_once()
    with open_recording(path, source_format, assumed, undated) as opened, no_collector():
        reading = Reading(opened, path, strict=strict, progress=progress)
        loading = _Loading(opened, reading)
        reading.relieve = loading.relieve
        for batch, _ in reading.placed():
            loading.take(batch)
        return loading.finish()
