"""Decides tracks, names, nesting and flows: batches on the trace clock go in, operations on tracks come out.

    process ─ thread ─ CUDA API, syscalls, driver, scheduler, memory, transfers
    GPU ─ what warps wait for ─ streams ─ kernels and copies, and the annotations that they were launched in
        ─ SM ─ hardware warp slot, a slice for each warp
    tracepipe ─ capture, losses, problems

The class here puts events in order, and draws what is about the recording itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    Int32s,
    Int64s,
    Ints,
    TraceBatch,
    TraceColumns,
    grown,
    unsigned,
)
from tracepipe.event.model import COUNTS, LAYERS, NO_SLICES, Header, Problem, Record
from tracepipe.event.nesting import Outcomes
from tracepipe.event.ops import END, INSTANT, OpColumns, op_of
from tracepipe.event.origins import FILE, Origins
from tracepipe.event.tables import KEPT_MAX, Args, Tables
from tracepipe.event.warps import Others, PlacedWarps
from tracepipe.layout import LayoutOptions
from tracepipe.layout.counters import Counters
from tracepipe.layout.merging import EventQueue
from tracepipe.layout.ranges_on_gpu import RangesOnGpu
from tracepipe.layout.rows import Rows
from tracepipe.layout.summaries import BusyGpus, CpuUse, Summaries, ThreadWork
from tracepipe.layout.timeline import Drawn, WarpChanges
from tracepipe.layout.tree import Tree
from tracepipe.layout.warps import ThreadLayout, WarpLayout
from tracepipe.units import counted

# Longer lines than this count as several events.
_BYTES_AN_EVENT = 1 << 8
# All problems are counted. This many are drawn in all, and at one time, where a viewer stacks them.
PROBLEMS_DRAWN = 1000
PROBLEMS_AT_ONCE = 16
# Losses have a track for each layer, and for at most this many layers that are not ours.
_OTHER_LAYERS_MAX = 100
_ALL_NS = (1 << 63) - 1
# Records that are not drawn: those about the recording itself, and samples that `gpu_stall` has too.
_UNDRAWN = frozenset({"header", "footer", "clock", "stack", "name", "gpu_stall_pc"})


class Layout:
    """Lays out a recording, or several as one. Call `place` with a batch of the source that `turn` returns,
    `end` when a source has no more, and `finish` once. Write what each of them returns.

    With `separate_switches`, context switches are not on tracks but in `Drawn.switches`. With `loads`, GPUs
    have a counter of how busy they are, and processes one of their CPU use. With `summaries`, the groups of a
    GPU and of its SMs have slices, which a viewer shows while the groups are closed.
    """

    def __init__(
        self,
        header: Header,
        tables: Tables,
        options: LayoutOptions | None = None,
        *,
        origins: Origins | None = None,
        separate_switches: bool = False,
        loads: bool = False,
        summaries: bool = False,
    ) -> None:
        options = options or LayoutOptions()
        if {"gpu_warp", "gpu_thread"} <= set(header.layers.got):
            # The capture was asked for exits of single threads, which are on the tracks of their warps.
            options = replace(options, thread_exits=True)
        self.end_ns = self._dealt_ns = 0
        self._problems_drawn = self._problems_here = self._problems_undrawn = 0
        self._problem_ns = 0
        self._tables = tables
        origins = origins or Origins()
        self._queue = EventQueue(tables, origins, self._heavy)
        self._others = Others[PlacedWarps]()
        self._beyond = 0
        self._window_rows: dict[int, None] = {}
        self._lost: set[str] = set()
        self._later = OpColumns()
        """Ends of slices that last longer than the events so far."""
        self._tree = Tree(header, origins)
        self._rows = Rows(header, tables, self._tree, origins, separate_switches=separate_switches)
        self._counters = Counters(self._rows)
        self._threads = ThreadLayout(self._rows, options)
        self._busy_gpus = BusyGpus(self._rows) if loads else None
        self._cpu_use = CpuUse(self._rows) if loads else None
        self._summaries = Summaries(self._rows) if summaries else None
        self._warps = WarpLayout(self._rows, options, self._summaries)
        self._ranges = RangesOnGpu(self._rows)
        self._thread_work = ThreadWork(self._rows, self._cpu_use)

    @property
    def outcomes(self) -> Outcomes:
        """The counts so far of what did not go as it should."""
        outcomes = self._rows.nesting.outcomes
        beyond = self._beyond + self._threads.beyond + self._warps.beyond
        return replace(outcomes, unclosed=outcomes.unclosed + self._warps.unclosed, beyond=beyond)

    @property
    def doubled(self) -> int:
        """The number of events that were merged into those of another recording so far."""
        return 0 if self._queue.doubles is None else self._queue.doubles.count

    # Events --------------------------------------------------------------------------------------------

    def turn(self) -> int | None:
        """The source whose next batch must be placed; None when all have ended."""
        return self._queue.turn()

    def place(self, batch: TraceBatch, source: int = 0) -> Drawn:
        """Take a batch and draw the events that are in order. The newest wait for earlier ones."""
        events, weight = batch.events, 0
        if batch.others:
            events, weight = self._take_others(batch)
        if len(events):
            weight += max(len(events), batch.text_bytes // _BYTES_AN_EVENT)
        self._queue.push(events, weight, source)
        return self._deal_ready()

    def end(self, source: int) -> Drawn:
        """Note that a source has no more batches, and draw what waited for them."""
        self._queue.end(source)
        return self._drawn(None, []) if self.turn() is None else self._deal_ready()

    def _deal_ready(self) -> Drawn:
        events = self._queue.pop()
        return self._drawn(None, []) if events is None else self._deal(events)

    def _heavy(self, numbers: Ints) -> int:
        """The number of further events that would take as much memory as some records."""
        return int((self._others.sizes(numbers[self._others.are_warps(numbers)]) // 2).sum())

    def _take_others(self, batch: TraceBatch) -> tuple[TraceColumns, int]:
        """The rows that have a place in time, and by how many events their memory exceeds their number."""
        events, others, timeless = batch.events, batch.others, list[int]()
        special = np.flatnonzero(events.shape == SPECIAL)
        numbers = events.args[special]
        are_warps = others.are_warps(numbers)
        for first, last, group, places in others.stretches(numbers[are_warps]):
            events.args[special[are_warps][first:last]] = self._others.add(group.take(places))
        weight = self._heavy(events.args[special[are_warps]])
        for at in special[~are_warps].tolist():
            other = cast("Record", others[int(events.args[at])])
            if other["type"] in _UNDRAWN:
                timeless.append(at)
                if other["type"] == "name":
                    self._tree.give_name(other)
                continue
            (events.args[at],) = self._others.add(other)
        events = events.take(np.delete(np.arange(len(events)), timeless)) if timeless else events
        return events, weight

    def relieve(self) -> bool:
        """Make the tables forget what is not in use any more. Return whether shapes and names have new
        numbers, as arguments have.
        """
        rounds = self._tables.shape_rounds
        self._queue.forget()
        if self._tables.shape_rounds == rounds and len(self._rows.book.names) <= KEPT_MAX:
            return False
        self._rows.forget_shapes()
        self._rows.forget_names(self._later)
        self._rows.of_shape["is_known"] = False
        return True

    def _add_shapes(self, shapes: Int32s) -> None:
        """Note the new shapes, in the order in which they come."""
        self._rows.of_shape = grown(self._rows.of_shape, len(self._tables.shapes), 0)
        is_known = self._rows.of_shape["is_known"]
        numbers = shapes[shapes >= 0] if int(shapes.min()) < 0 else shapes
        for number in dict.fromkeys(numbers[~is_known[numbers]].tolist()):
            is_known[number] = True
            shape = self._rows.shape(number)
            self._rows.add_shape(number, shape)
            self._counters.add_shape(number, shape)
            self._thread_work.add_shape(number, shape)
            if self._summaries is not None:
                self._summaries.add_shape(number, shape)

    def _deal(self, events: TraceColumns, *, last: bool = False) -> Drawn:
        changes: list[WarpChanges] = []
        switches: TraceColumns | None = None
        if len(events):
            self._dealt_ns = int(events.ts_ns[-1])
            self._rows.nesting.set_horizon(self._dealt_ns)
            self.end_ns = max(self.end_ns, self._dealt_ns)
            if len(self._tables.shapes):
                self._add_shapes(events.shape)
                beyond = self._rows.flagged("beyond", events)
                if len(beyond):
                    self._beyond += len(beyond)
                    events = events.take(np.delete(np.arange(len(events)), beyond))
                self._thread_work.measure(events)
            self._rows.name_threads(events)
            apart = self._rows.flagged("switches", events)
            if len(apart):
                stays = np.ones(len(events), np.bool_)
                stays[apart] = False
                switches, events = events.take(apart), events.take(np.flatnonzero(stays))
            of_shape, single = self._rows.of_shape, events.shape == SPECIAL
            if len(of_shape):
                numbers = np.maximum(events.shape, 0)
                single |= ~of_shape["drawn"][numbers]
                ends_ns = (events.ts_ns + events.dur_ns)[of_shape["on_stream"][numbers]]
                self.end_ns = max(self.end_ns, int(ends_ns.max(initial=0)))
            special, done = np.flatnonzero(events.shape == SPECIAL), 0
            numbers = events.args[special]
            warps = special[self._others.are_warps(numbers)]  # drawn with the events around them
            single[warps] = False
            if single.all() and self._threads.place_all(events):
                single[:], done = False, len(events)
            for at in np.flatnonzero(single).tolist():
                changes += self._nest(events, warps, done, at)
                if events.shape[at] != SPECIAL:
                    self._draw_single(events, at)
                else:
                    other = cast("Record", self._others[int(events.args[at])])
                    draw = {"window": self._window_turn, "gpu_stall": self._counters.count_stalls}
                    draw.get(other["type"], self._loss)(int(events.ts_ns[at]), other)
                done = at + 1
            changes += self._nest(events, warps, done, len(events))
            self._others.drop(numbers)
            self._counters.count_memory(events)
            self._ranges.draw(events)
            if not last:
                self._rows.nesting.settle()
        made = self._drawn(events, changes, last=last)
        made.switches = switches
        return made

    def _nest(self, events: TraceColumns, warps: Int64s, start: int, stop: int) -> list[WarpChanges]:
        """Draw events, and the warps among them; `warps` are the rows of all."""
        if start == stop:
            return []
        first, last = np.searchsorted(warps, (start, stop)).tolist()
        self._warps.add(warps[first:last], self._others, events.args[warps[first:last]])
        starts = self._warps.starts()
        self._rows.nesting.events(events, start, stop, starts)
        if starts is None:
            return []
        end_ns, changes = self._warps.draw(starts)
        self.end_ns = max(self.end_ns, end_ns)
        return changes

    def _draw_single(self, events: TraceColumns, at: int) -> None:
        """Draw an event that does not nest on the row of its shape."""
        ts_ns, shape = int(events.ts_ns[at]), self._rows.shape(int(events.shape[at]))
        launch = unsigned(int(events.launch[at])) if shape.has_launch else None
        if shape.type == "gpu_thread" and self._warps.has_drawn(launch):
            return
        args = self._tables.args(int(events.args[at]))
        if shape.phase == COUNTS:
            self._counters.count_values(ts_ns, shape, args)
        if shape.phase in NO_SLICES:
            return
        if shape.phase == "X" and events.source_ns is not None and events.source_ns[at] != NONE:
            args["source_ns"] = int(events.source_ns[at])

        def keep(args: Args) -> int:
            events.args[at] = self._tables.args_number(args)
            return at

        of, dur_ns = events.thread_of(at), int(events.dur_ns[at])
        end_ns = self._threads.place(ts_ns, shape, of, args, dur_ns, launch, keep)
        self.end_ns = max(self.end_ns, end_ns)

    def _loss(self, ts_ns: int, record: Record) -> None:
        layer = record.get("layer", "unknown layer")
        if layer not in LAYERS and layer not in self._lost:
            if len(self._lost) >= _OTHER_LAYERS_MAX:
                layer = "other layers"
            self._lost.add(layer)
        rank = 1 + (LAYERS.index(layer) if layer in LAYERS else len(LAYERS))
        track = self._tree.child(self._tree.recording(), "slices", f"losses: {layer}", rank, "loss")
        args = {k: v for k, v in record.items() if k not in ("type", "dur_ns", "ts_ns", "args")}
        name = self._rows.name(f"lost {counted(record['count'], 'event|events')}")
        row = self._rows.row_of(track)
        self._rows.nesting.one(row, "X", ts_ns, record.get("dur_ns", 0), name, self._rows.keep_args(args))

    def _window_turn(self, ts_ns: int, record: Record) -> None:
        file = record.get(FILE)
        title = f"windows of {file}" if file else "capture"
        track = self._tree.child(self._tree.recording(), "slices", title, 0, "tracepipe")
        numbered = f"window {record['window']}" if "window" in record else "window"
        stated = ("pid", "tid", "waited_ns", *(("window",) if "name" in record else ()))
        args = {k: v for k, v in record.items() if k in stated}
        args["began_by" if record["phase"] == "B" else "ended_by"] = record.get("cause", "not known")
        name = self._rows.name(record.get("name", numbered))
        row = self._rows.row_of(track)
        self._window_rows[row] = None
        self._rows.nesting.one(row, record["phase"], ts_ns, None, name, self._rows.keep_args(args))

    # What is drawn -------------------------------------------------------------------------------------

    def _drawn(self, events: TraceColumns | None, changes: list[WarpChanges], *, last: bool = False) -> Drawn:
        """The operations since the last call, in the order of time. The ends of long slices come later."""
        for early in self._rows.nesting.early():
            args = {
                "launch": unsigned(early.launch),
                "before_launch_ns": early.call_ns - early.start_ns,
                "bound_ns": early.bound_ns,
            }
            self._instant("starts before its launch", early.start_ns, args, "problems")
        self._rows.add_overlap_tracks()
        ops = self._rows.nesting.take_ops()
        self._rows.book.more_flows = self._rows.nesting.more_flows
        if self._summaries is not None:
            self._summaries.draw(events, ops)
        extras, self._rows.extras = self._rows.extras, []
        later = OpColumns()
        held_ns = _ALL_NS
        if last or events is not None:
            # Ends that waited come first: a stable sort keeps them before what begins at the same time.
            later, self._later = self._later, later
        if events is not None and not last:
            held_ns = self._dealt_ns
        order = self._order(ops, later, held_ns)
        if self._busy_gpus is not None:
            self._busy_gpus.measure(ops, order)
        return Drawn(self._rows.book, self._tree.take_declared(), events, ops, order, extras, changes)

    def _order(self, ops: OpColumns, later: OpColumns, held_ns: int) -> Int64s:
        made = ops.count
        ops.extend(later)
        count, columns = ops.count, ops.used()
        ts_ns, row = columns["ts"], columns["row"]
        if later.count:
            first = np.concatenate([np.arange(made, count), np.arange(made)])
            order = first[np.argsort(ts_ns[first], kind="stable")]
        else:
            order = np.argsort(ts_ns, kind="stable")
        if count and int(row.min()) < 0:
            order = order[row[order] >= 0]
        if not len(order) or int(ts_ns[order[-1]]) <= held_ns:
            return order
        waits = (columns["kind"][order] == END) & (columns["event"][order] == NONE) & (ts_ns[order] > held_ns)
        self._later = ops.take(order[waits])
        found: Int64s = order[~waits]
        return found

    def _instant(self, name: str, ts_ns: int, args: Args, track: str) -> None:
        row = self._rows.row_of(self._tree.child(self._tree.recording(), "slices", track, 0, "tracepipe"))
        self._rows.nesting.add(op_of(INSTANT, row, ts_ns, self._rows.name(name), self._rows.keep_args(args)))

    def say(self, name: str, ts_ns: int, args: Args, track: str = "capture") -> Drawn:
        """Draw a fact about the recording itself as an instant."""
        self._instant(name, ts_ns, args, track)
        return self._drawn(None, [])

    def problem(self, problem: Problem, file: str = "") -> Drawn | None:
        """Draw a problem at its place in the file, which is named where there are several. None where there
        are too many: it is counted.
        """
        has_room = self._problems_drawn < PROBLEMS_DRAWN
        if has_room and self.end_ns != self._problem_ns:
            self._say_undrawn()
            self._problem_ns, self._problems_here = self.end_ns, 0
        if not has_room or self._problems_here >= PROBLEMS_AT_ONCE:
            self._problems_undrawn += 1
            return None
        self._problems_drawn += 1
        self._problems_here += 1
        name = "skipped line" if problem.skipped else "ambiguous"
        args = {"line": problem.line, "field": problem.field, "message": problem.message}
        self._instant(name, self.end_ns, args | ({FILE: file} if file else {}), "problems")
        return self._drawn(None, [])

    def _say_undrawn(self) -> None:
        """Draw the instant that counts the problems which were not drawn."""
        count, self._problems_undrawn = self._problems_undrawn, 0
        if count:
            self._instant(counted(count, "more line|lines"), self._problem_ns, {}, "problems")

    def finish(self) -> list[Drawn]:
        """Draw all that is left, with the ends of what is still open."""
        drawn = []
        if (events := self._queue.pop_all()) is not None:
            drawn.append(self._deal(events, last=True))
        changes = self._warps.finish(self.end_ns)
        for gpu in self._rows.gpu_indices():
            self._threads.close(gpu, self.end_ns)
        self._rows.close_streams(self.end_ns)
        self._ranges.finish(self.end_ns)
        self._rows.close(self.end_ns)
        for row in self._window_rows:
            self._rows.nesting.close(row, self.end_ns)
        self._say_undrawn()
        self._tree.put_in_order(self._thread_work.finish(self.end_ns))
        drawn.append(self._drawn(None, changes, last=True))
        if self._busy_gpus is not None and self._cpu_use is not None:
            self._busy_gpus.draw()
            self._cpu_use.draw()
            drawn.append(self._drawn(None, [], last=True))
        return drawn
