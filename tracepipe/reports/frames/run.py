"""Loads a recording for the reports: every layer as a frame of columns, on the trace clock."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import Any

from tracepipe.clocks.maps import Clocks
from tracepipe.event.model import TIME_LIMIT_NS, Header, Problem, Record, Shape, Timed
from tracepipe.recording.account import Account
from tracepipe.recording.open import (
    OpenRecording,
    damage,
    footer_notes,
    no_collector,
    open_recording,
    refused,
)
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.shapes import FRAMES, NOT_AN_EVENT, ShapeTable
from tracepipe.reports.frames.spans import FROM_DURATION, KINDS, SPAN, Spans
from tracepipe.reports.frames.warp_columns import WarpColumns

# Events handed to the matching at a time, as Python objects.
_MATCHED_AT_ONCE = 1 << 16
_TIMELESS = frozenset({"header", "footer", "clock"})

Progress = Callable[[int, int], None]
"""Called with bytes read and bytes in all, which are 0 where unknown."""


@dataclass(slots=True, kw_only=True)
class Facts(Account):
    """What a recording is and what it lacks, beside its events; times on the trace clock, as all are."""

    header: Header
    trace_clock: str
    footer: Record | None = None
    start_ns: int = 0
    end_ns: int = 0


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
    lane                            0, or the number of the track beside it on which the timeline draws it
    """

    def __init__(
        self, facts: Facts, spans: pl.DataFrame, table: ShapeTable, warps: WarpColumns, losses: list[Record]
    ) -> None:
        self.facts = facts
        self._spans, self._table, self._warps, self._losses = spans, table, warps, losses

    def _frame(self, name: str) -> pl.DataFrame:
        frame_of = np.frombuffer(bytes(self._table.frames), np.uint8)
        places = np.flatnonzero(frame_of[self._spans["shape"].to_numpy()] == FRAMES.index(name))
        spans = self._spans[places]
        ends = spans["end_shape"]
        ended = self._table.take(ends.clip(0), ("result", "size_bytes", "address", "args"))
        has_end = ends >= 0
        # A parent on the same row of a stream may be a copy, which is in another frame.
        parents = spans["parent"].to_numpy()
        at = np.searchsorted(places, parents)
        inside = (parents >= 0) & (places.take(at, mode="clip") == parents) if len(places) else parents >= 0
        lasts = spans["kind"].is_in([SPAN, FROM_DURATION])
        columns = self._table.take(spans["shape"]).with_columns(
            start_ns=spans["start_ns"],
            end_ns=spans["end_ns"],
            kind=pl.Series(KINDS, dtype=pl.Enum(KINDS))[spans["kind"]],
            depth=spans["depth"],
            lane=spans["lane"],
            parent=pl.Series(at, dtype=pl.Int64),
            end_args=ended["args"],
        )
        return columns.with_columns(
            pl.when(lasts).then(pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"),
            pl.when(pl.Series(inside)).then("parent").alias("parent"),
            pl.when(has_end).then("end_args").alias("end_args"),
            *(
                pl.coalesce(pl.when(has_end).then(ended[key]), pl.col(key)).alias(key)
                if key == "result"
                else pl.coalesce(pl.col(key), pl.when(has_end).then(ended[key])).alias(key)
                for key in ("result", "size_bytes", "address")
            ),
        )

    @cached_property
    def calls(self) -> pl.DataFrame:
        """The `userspace` layer: calls of the CUDA libraries, those inside others too (`depth`)."""
        return self._frame("userspace")

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
        """One row for each warp: see `WarpColumns.warps`."""
        return self._warps.warps()

    @cached_property
    def exits(self) -> pl.DataFrame:
        """Exits of warps that left in several steps: see `WarpColumns.exits`."""
        return self._warps.exits()

    @cached_property
    def losses(self) -> pl.DataFrame:
        """Stretches in which events were lost: layer, count, start_ns, dur_ns, cpu, reason."""
        number = pl.Int64()
        schema = {"layer": pl.String(), "count": number, "start_ns": number, "dur_ns": number, "cpu": number}
        rows = {
            name: pl.Series([record.get(name) for record in self._losses], dtype=dtype, strict=False)
            for name, dtype in {**schema, "reason": pl.String()}.items()
        }
        return pl.DataFrame(rows)

    @cached_property
    def thread_names(self) -> dict[tuple[int | None, int | None], str]:
        """(pid, tid) → the name that the thread had last."""
        shapes = self._table.frame()
        if "comm" not in shapes:
            return {}
        # A table without ids has names all the same.
        ids = [pl.col(key) if key in shapes else pl.lit(None).alias(key) for key in ("pid", "tid")]
        named = shapes.select(*ids, "comm").drop_nulls("comm")
        named = named.unique(["pid", "tid"], keep="last")
        return {(pid, tid): comm for pid, tid, comm in named.iter_rows()}

    def process_name(self, pid: int | None) -> str:
        """What its main thread was called last, else the command that was recorded."""
        if pid is None:
            return "process (pid not recorded)"
        names, command = self.thread_names, self.facts.header.get("command")
        recorded = PurePath(command[0]).name if command else "process"
        # Formats without thread ids name the process alone.
        return names.get((pid, pid)) or names.get((pid, None)) or recorded


class _Loading:
    """One recording on its way into columns."""

    def __init__(self, opened: OpenRecording, path: str, strict: bool) -> None:
        self._path, self._strict = path, strict
        header, clocks = opened.recording.header, opened.clocks
        self.facts = Facts(path, opened.source, header=header, trace_clock=clocks.trace_clock)
        self._ts_ns, self._shapes = array("q"), array("l")
        self.table, self.warps = ShapeTable(), WarpColumns()
        self.losses: list[Record] = []
        self._last_ns = -TIME_LIMIT_NS
        self._after_footer = 0

    def problem(self, problem: Problem) -> None:
        """Count a problem; raises InputError where `strict` and its line was skipped."""
        if self._strict and problem.skipped:
            raise refused(problem, self._path)
        self.facts.add(problem)

    def take(self, events: list[Timed]) -> None:
        """Add events on the trace clock."""
        if self.facts.footer is not None:
            self._after_footer += len(events)
        for shape, count in Counter([shape for _, shape in events]).items():
            self.facts.counts[shape.type] += count * shape.events
            if shape.row is None:
                self.table.meet(shape)
        places = [shape.row for _, shape in events]
        times = [ts_ns for ts_ns, _ in events]
        if NOT_AN_EVENT in places or max(times) > TIME_LIMIT_NS or min(times) < -TIME_LIMIT_NS:
            events = [event for event in events if self._is_event(*event)]
            places, times = [shape.row for _, shape in events], [ts_ns for ts_ns, _ in events]
        self._ts_ns.extend(times)
        self._shapes.extend(places)

    def _is_event(self, ts_ns: int, shape: Shape) -> bool:
        """Whether it goes to the columns of events; puts it where it belongs if not."""
        if abs(ts_ns) > TIME_LIMIT_NS and shape.type not in _TIMELESS:
            self.problem(Problem(0, "ts_ns", f"{ts_ns} is no time of a recording"))
        elif shape.row != NOT_AN_EVENT:
            return True
        elif shape.type == "footer":
            self.facts.footer = shape.record
        elif shape.type == "loss":
            self.facts.losses[shape.record.get("layer", "unknown layer")] += shape.record["count"]
            self.losses.append({**shape.record, "start_ns": ts_ns})
        elif shape.type == "gpu_warp":
            try:
                self._last_ns = max(self._last_ns, self.warps.add(ts_ns, shape.record))
            except OverflowError:
                self.problem(Problem(0, "gpu_warp", "holds numbers that are too large to reckon with"))
        return False

    def finish(self, clocks: Clocks) -> Run:
        """Match what was taken, and say what was found."""
        facts = self.facts
        spans = Spans(self.table)
        times, shapes = _in_order(self._ts_ns, self._shapes, self.table)
        for at in range(0, len(times), _MATCHED_AT_ONCE):
            part = slice(at, at + _MATCHED_AT_ONCE)
            spans.match(zip(times[part].tolist(), shapes[part].tolist(), strict=True))
        here = facts.header.get("start", {}).get(f"{clocks.trace_clock}_ns")
        first_ns = [int(times[0])] if len(times) else []
        first_ns += [] if self.warps.first_ns is None else [self.warps.first_ns]
        facts.start_ns = here if isinstance(here, int) else min(first_ns, default=0)
        facts.end_ns = max(self._last_ns, max(spans.end_ns, default=facts.start_ns), facts.start_ns)
        spans.finish(facts.end_ns)
        spans.nest_again()
        facts.outcomes, facts.clocks = spans.outcomes, clocks.statements()
        for kind in ("footer", "clock", "loss", "header"):
            del facts.counts[kind]
        if facts.source == "tracepipe":
            if self._after_footer:
                facts.notes.append(f"{self._after_footer} records stand after the footer")
            facts.notes += footer_notes(facts.footer, facts.counts)
        return Run(facts, spans.columns(), self.table, self.warps, self.losses)


def _in_order(times: array[int], shapes: array[int], table: ShapeTable) -> tuple[Any, Any]:
    """Events in the order of time, the file's at one time; an X before those it encloses."""
    ts_ns, shape = np.array(times, np.int64), np.array(shapes, np.int64)
    order = np.argsort(ts_ns, kind="stable")
    ts_ns, shape = ts_ns[order], shape[order]
    if len(shape):
        durations, phases = np.array(table.dur_ns, np.int64), np.frombuffer(bytes(table.phases), np.uint8)
        whole = np.flatnonzero(phases[shape] == ord("X"))
        shape[whole] = shape[whole][np.lexsort((-durations[shape[whole]], ts_ns[whole]))]
    return ts_ns, shape


def load_run(
    path: str,
    source_format: str = "",
    strict: bool = False,
    assumed: Mapping[str, int | str] | None = None,
    progress: Progress | None = None,
) -> Run:
    """Read a recording of any input format into columns.

    `assumed` places clocks without pairs, as in `open_recording`. Raises InputError, on the first bad line
    where `strict`, FormatError, ClockError, and LibraryMissing.
    """
    pl.DataFrame  # noqa: B018 - before the reading, which may take long
    with open_recording(path, source_format, assumed) as opened, no_collector():
        loading = _Loading(opened, path, strict)
        for batch in opened.recording.batches:
            for problem in batch.problems:
                loading.problem(problem)
            events = opened.clocks.stamp(batch.take(), loading.facts.unplaced)
            if events:
                loading.take(events)
            if progress and batch.offset_bytes:
                progress(opened.stream.position_bytes(), opened.stream.size_bytes)
        if opened.stream.damage:
            loading.problem(damage(opened.stream))
        return loading.finish(opened.clocks)
