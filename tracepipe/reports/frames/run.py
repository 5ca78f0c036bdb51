"""Loads a recording for the reports: every layer as a frame of columns, on the trace clock."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import PurePath
from typing import Any

from tracepipe.event.columns import SPECIAL, Bools, Int64s, TraceBatch
from tracepipe.event.model import STALLS, TIME_LIMIT_NS, Header, Problem, Record
from tracepipe.event.stacks import Stacks
from tracepipe.event.warps import PlacedWarps, at_once
from tracepipe.recording.account import Account
from tracepipe.recording.open import OpenRecording, no_collector, open_recording
from tracepipe.recording.reading import Progress, Reading
from tracepipe.reports.frames.arguments import ArgsTable
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
    """What a recording is and what it lacks, besides its events; times on the trace clock, as all are."""

    header: Header
    trace_clock: str
    footer: Record | None = None
    start_ns: int = 0
    end_ns: int = 0

    @classmethod
    def of(cls, account: Account, **more: Any) -> Facts:
        """What was found in reading, and more."""
        return cls(**{field.name: getattr(account, field.name) for field in fields(account)}, **more)


class Run:
    """A recording in columns. Frames are made when they are asked for, a row for each span and instant in the
    order of their starts:

    start_ns, end_ns                of an instant the same
    dur_ns                          null where it is not known: instants, calls without an end
    kind                            one of `spans.KINDS`
    layer, name, phase, pid, tid, cpu, comm, launch, gpu, stream, grid, block, bound_ns
                                    null where the recording does not tell
    size_bytes, address, result     from the arguments, `result` at the end; address as text
    args, end_args                  all arguments of begin and end as JSON text
    depth, parent                   how deep in others of the same thread and layer; the row of the next
    stack, python                   of a call, or of its launch: number in `stacks`, and the user's line
    lane                            0, or the number of the track beside it on which the timeline draws it

    `layer` has the same as numpy columns, for what must be quick, and `some` a few columns of a frame.
    """

    def __init__(
        self,
        facts: Facts,
        layers: dict[str, Layer],
        shapes: ShapeTable,
        args: ArgsTable,
        warps: WarpTable,
        losses: LossTable,
        stacks: Stacks,
        stalls: StallTable,
        counters: CounterTable,
    ) -> None:
        self.facts, self.shapes, self.args, self.warp_table = facts, shapes, args, warps
        self.stacks, self._layers, self.loss_table, self.stall_table = stacks, layers, losses, stalls
        self.counters = counters
        self._frames = Frames(shapes, args, stacks)

    def layer(self, name: str) -> Layer:
        """The numpy columns of a layer, one of `FRAMES`."""
        release()
        return self._layers[name]

    def has(self, column: str, value: Hashable, layer: Layer) -> Bools:
        """Which rows of a layer have a value in a column of their shapes."""
        number = self.shapes.number_of(column, value)
        every = np.arange(len(self.shapes), dtype=np.int32)
        flagged: Bools = (self.shapes.column(column, every) == number)[layer.shape]
        return flagged

    def seen(self, name: str) -> Bools:
        """Which shapes the rows of a layer have."""
        layer, seen = self.layer(name), np.zeros(len(self.shapes), np.bool_)
        for part in parts(len(layer)):
            seen[layer.shape[part]] = True
        return seen

    def some(self, name: str, *columns: str) -> pl.DataFrame:
        """A few columns of a layer's frame: what the others have is not looked at."""
        return self._frames.frame(self._layers[name], columns)

    def rows(self, name: str, rows: Any, *columns: str) -> pl.DataFrame:
        """A few rows of a layer's frame, all columns or a few; `parent` is a row of the whole."""
        return self._frames.frame(self._layers[name].rows(rows), columns or COLUMNS)

    def part(self, name: str, rows: Int64s | slice, *columns: str) -> pl.DataFrame:
        """As `rows`, of rows near to each other: nothing of them is kept, so that parts take little."""
        frames = Frames(self.shapes, self.args.afresh(), self.stacks)
        return frames.frame(self._layers[name].rows(rows), columns)

    def text_bytes(self, name: str, rows: slice) -> int:
        """How much text rows of a layer that follow each other have, but for a little."""
        layer = self._layers[name].rows(rows)
        of_args = sum(map(self.args.text_bytes, (layer.args, layer.end_args)))
        return of_args + self.shapes.text_bytes(layer.shape)

    def _frame(self, name: str) -> pl.DataFrame:
        return self._frames.frame(self._layers[name])

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """The `annotation` layer, with the columns `domain` and, of ranges of a process, `range`."""
        return self.some("annotation", *COLUMNS, "domain", "range")

    @cached_property
    def calls(self) -> pl.DataFrame:
        """The `userspace` layer: calls of the CUDA libraries, those inside others too (`depth`)."""
        return self._frame("userspace")

    @cached_property
    def hooks(self) -> pl.DataFrame:
        """Functions and tracepoints of hooks in layers of their own: `layer` has the names of these."""
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
        """When threads run (`running`), and instants of the `scheduler` layer."""
        return self._frame("scheduler")

    @cached_property
    def memory(self) -> pl.DataFrame:
        """The `memory` layer: `alloc`, `free`, …"""
        return self._frame("memory")

    @cached_property
    def transfers(self) -> pl.DataFrame:
        """The `transfer` layer: copies by the call, and where `gpu` is known by the GPU's own times."""
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
        """Exits of warps that left in several steps: see `WarpTable.exits`."""
        return self.warp_table.exits()

    @cached_property
    def ranges(self) -> pl.DataFrame:
        """One row for each range of a warp: see `RangeTable.frame`."""
        return self.warp_table.ranges.frame()

    @cached_property
    def losses(self) -> pl.DataFrame:
        """Stretches in which events were lost: layer, count, start_ns, dur_ns, cpu, reason."""
        return self.loss_table.frame()

    def thread_name(self, pid: int | None, tid: int | None) -> str | None:
        """The name that a thread had last."""
        return self.shapes.thread_name(pid, tid)

    def process_name(self, pid: int | None) -> str:
        """What its main thread was called last, else the command that was recorded."""
        if pid is None:
            return "process (pid not recorded)"
        command = self.facts.header.get("command")
        recorded = PurePath(command[0]).name if command else "process"
        # Formats without thread ids name the process alone.
        given = self.shapes.given_name(pid, None)
        return given or self.thread_name(pid, pid) or self.thread_name(pid, None) or recorded


class _Loading:
    """One recording on its way into columns."""

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
        """Add what a batch holds."""
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
        """Some batches of warps, of which each may be bad."""
        try:
            self._last_ns = max(self._last_ns, self._warps.add(batches))
        except OverflowError:
            if len(batches) == 1:
                self._reading.note(Problem(0, "gpu_warp", "holds numbers that are too large to reckon with"))
            else:
                for one in batches:
                    self._take_warps([one])

    def _take_other(self, ts_ns: int, other: Record) -> None:
        """A record that is neither an event nor warps."""
        if other["type"] == "loss" and abs(ts_ns) > TIME_LIMIT_NS:
            self._reading.note(_no_time(ts_ns))
        elif other["type"] == "name":
            self._shapes.give_name(other)
        elif other["type"] in STALLS:
            self._stalls.add(other)
        elif other["type"] == "loss":
            self._losses.add(other, ts_ns)

    def relieve(self) -> None:
        """Make room in the tables, which hold much that is kept here too."""
        self._events.relieve()

    def finish(self) -> Run:
        """Match what was taken, and say what was found."""
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
        stacks, args = self._opened.recording.tables.stacks, ArgsTable(self._args)
        tables = self._stalls, self._counters
        return Run(facts, layers, shapes, args, self._warps, self._losses, stacks, *tables)


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

    `assumed` and `undated` are as in `open_recording`. Raises InputError, on the first bad line
    where `strict`, FormatError, ClockError, and LibraryMissing.
    """
    give_back_at_once()
    with open_recording(path, source_format, assumed, undated) as opened, no_collector():
        reading = Reading(opened, path, strict=strict, progress=progress)
        loading = _Loading(opened, reading)
        reading.relieve = loading.relieve
        for batch, _ in reading.placed():
            loading.take(batch)
        return loading.finish()
