"""Reads a recording once and writes its tables."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from struct import Struct
from typing import Any, Final, cast

import numpy as np

from tracepipe.event.columns import NONE, SPECIAL, Int32s, TraceBatch, TraceColumns, distinct
from tracepipe.event.counters import GPU_COUNTERS
from tracepipe.event.groups import number_rows
from tracepipe.event.model import (
    COUNTS,
    LAYERS,
    NO_SLICES,
    STALLS,
    TIME_LIMIT_NS,
    Footer,
    Header,
    Problem,
    Record,
)
from tracepipe.event.nesting import new_nesting
from tracepipe.event.shape import Shape
from tracepipe.event.tables import KEPT_BYTES_MAX, Tables
from tracepipe.event.warps import PlacedWarps, WarpGroup
from tracepipe.kernel_names import short_kernel_name
from tracepipe.recording.account import Account
from tracepipe.recording.files import Progress
from tracepipe.recording.inputs import InputOptions
from tracepipe.recording.reading import OpenRecording, Reading, no_collector
from tracepipe.store.args import ArgsWriter
from tracepipe.store.numbered import Numbered
from tracepipe.store.python_stacks import LAYER, PythonSlices
from tracepipe.store.samples import SERIES, sample_values
from tracepipe.store.schema import FRAMES, GROUPS, INSTANT, IS_TIMED, NO_BEGIN, SHAPES
from tracepipe.store.spans import (
    Kinds,
    Rows,
    SpanRows,
    Spool,
    depths_and_tops,
    parents_by_time,
)
from tracepipe.store.stalls import StallTable
from tracepipe.store.tables import Writer
from tracepipe.store.warp_rows import WarpRows
from tracepipe.units import counted

# The most shapes that stay in the reading's tables: adding a shape again takes as long as reading fifty
# events.
_SHAPES_MAX, _SHAPES_BYTES_MAX = 1 << 14, 4 * KEPT_BYTES_MAX
# Values of counters and ends of flows are in no table of spans.
_NO_SPANS: Final = [ord(phase) for phase in NO_SLICES]
_NAME_MATTERS: Final = (ord("B"), ord("E"))
_SLICES: Final = (ord("B"), ord("X"))
_INT64_MAX: Final = (1 << 63) - 1
# The most processes and threads whose given names are kept, and losses that are written at a time.
_GIVEN_MAX, _LOSSES_AT_ONCE = 1 << 16, 1 << 10
# The most layers, and reasons, of losses; a file may contain any text.
_LOSS_TEXTS_MAX: Final = 100
_OTHERS: Final = {"layer": "other layers", "reason": "other reasons"}
# The most GPUs whose counters are kept.
_GPUS_MAX: Final = 256
_SHAPE: Final = Struct("<5i2B6q6q2?i")
_OF_SHAPE: Final = np.dtype(
    [
        *((name, "<i4") for name in ("name_text", "comm_text", "domain_text", "kernel_text", "layer")),
        ("frame", "u1"),
        ("phase", "u1"),
        *((name, "<i8") for name in ("pid", "tid", "cpu", "gpu", "stream", "range")),
        *((f"{what}_{axis}", "<i8") for what in ("grid", "block") for axis in "xyz"),
        ("has_dur", "?"),
        ("has_launch", "?"),
        ("row", "<i4"),
    ]
)


# Work of streams. A row inside another one of its stream is later, and its parent or top is around it.
_WORK: Final = f"""
select x.id, parent, top, end_ns - start_ns as length_ns, pid, case when has_launch then launch end as launch
from transfer x join shapes s using (shape)
where {IS_TIMED} and end_ns > start_ns and stream >= 0
    and (gpu >= 0 or frame = {FRAMES.index("gpu_kernel")})"""
_MEANWHILE_MIN: Final = 2
_OVERLONG: Final = f"""
with inside as (
    select distinct id, unnest([parent, top]) as around, pid, launch from ({_WORK} and parent >= 0)
), pairs as (
    select inside.id, around, length_ns from inside join ({_WORK}) work on work.id = around
    where work.pid = inside.pid and coalesce(work.launch <> inside.launch, true)
    qualify count(*) over (partition by around) >= {_MEANWHILE_MIN}
)
select count(*), (select count(distinct id) from pairs), sum(length_ns)
from (select distinct around, length_ns from pairs)"""


class ShapeNumbers:
    """Gives shapes permanent numbers, each shape once. Values are as in `schema.SHAPES`."""

    def __init__(self) -> None:
        self.texts = Numbered()
        self._shapes, self._rows = Numbered(), Numbered()
        self._large: dict[int, int] = {}
        self.given: dict[tuple[int | None, int | None], str] = {}
        """The names that a recording gives threads, or processes where the second number is None."""

    def __len__(self) -> int:
        return len(self._shapes)

    def number(self, shape: Shape | None) -> int:
        """The number of a shape; NONE for None."""
        if shape is None:
            return NONE
        # Some formats and engines include a kernel's parameters, others do not: the short names are equal.
        name = short_kernel_name(shape.name) if shape.type == "gpu_kernel" else shape.name
        layer = LAYERS.index(shape.type) if shape.layer is None else ~self.text(shape.layer)
        frame = shape.type if shape.on_stream or shape.row is None else shape.drawn_layer
        sizes = (*(shape.grid or (NONE,) * 3), *(shape.block or (NONE,) * 3))
        packed = _SHAPE.pack(
            self.text(name),
            self.text(shape.comm),
            self.text(shape.domain),
            self.text(None if name == shape.name else shape.name),
            layer,
            FRAMES.index(frame),
            ord(shape.phase),
            *(self._value(getattr(shape, key)) for key in ("pid", "tid", "cpu", "gpu", "stream", "range")),
            *(min(size, _INT64_MAX) for size in sizes),
            shape.has_dur,
            shape.has_launch,
            self._rows.number(repr(shape.row).encode("utf-8", "surrogatepass")),
        )
        return self._shapes.number(packed)

    def text(self, text: str | None) -> int:
        """The number of a text; NONE for None."""
        return NONE if text is None else self.texts.number(text.encode("utf-8", "surrogatepass"))

    def _value(self, value: int | None) -> int:
        """A number as a column has it."""
        if value is None:
            return NONE
        if 0 <= value <= _INT64_MAX:
            return value
        return NONE - 1 - self._large.setdefault(value, len(self._large))

    @property
    def large(self) -> list[int]:
        """The numbers that do not fit a column."""
        return list(self._large)

    def columns(self) -> Any:
        """The shapes so far, as an array of structures of shape `(shapes,)`."""
        return np.frombuffer(self._shapes.data(), _OF_SHAPE)

    def give_name(self, record: Record) -> None:
        """Add the name that a recording gives a process or a thread."""
        key = record["pid"], record.get("tid")
        if "name" in record and (key in self.given or len(self.given) < _GIVEN_MAX):
            self.given[key] = record["name"]


class _Building:
    """Writes the tables of one recording."""

    def __init__(self, opened: OpenRecording, reading: Reading, writer: Writer, args: ArgsWriter) -> None:
        self._opened, self._reading, self._writer, self._args = opened, reading, writer, args
        self._tables: Tables = opened.recording.tables
        self._shapes = ShapeNumbers()
        self._numbers: Int32s = np.empty(0, np.int32)
        """By the number of a shape in the reading's tables, its permanent number."""
        self._of_frame = self._is_span = self._is_whole = np.empty(0, np.int64)
        """By the permanent number of a shape."""
        self._last = np.empty(0, np.int32)
        """The shapes of the last batch, as the reading's tables number them."""
        self._spools: dict[str, Spool] = {}
        self._warps = WarpRows(opened.clocks.trace_clock, writer)
        self._stalls = StallTable()
        self._losses: list[tuple[Any, ...]] = []
        self._loss_texts: dict[str, set[str]] = {name: set() for name in _OTHERS}
        self._gpus: set[int] = set()
        self._has: dict[str, list[str]] = {}
        self._threads = 0
        self._first_ns: int | None = None
        self._last_ns = -TIME_LIMIT_NS

    def add(self, batch: TraceBatch) -> None:
        """Add a batch. Raises OutputError."""
        events = batch.events
        good = np.abs(events.ts_ns) <= TIME_LIMIT_NS
        if batch.others:
            good &= events.shape != SPECIAL
            special = np.flatnonzero(events.shape == SPECIAL)
            are_warps = batch.others.are_warps(events.args[special])
            for at in special[~are_warps].tolist():
                record = cast("Record", batch.others[int(events.args[at])])
                self._add_other(int(events.ts_ns[at]), record)
            for _, group in batch.others.groups(events.args[special[are_warps]]):
                self._add_warps(group)
        if not good.all():
            for ts_ns in events.ts_ns[~good & (events.shape != SPECIAL)].tolist():
                self._reading.note(_no_time(ts_ns))
            events = events.take(good)
        if len(events):
            first_ns = int(events.ts_ns.min())
            self._first_ns = first_ns if self._first_ns is None else min(first_ns, self._first_ns)
            self._add_events(events)

    def _add_events(self, events: TraceColumns) -> None:
        self._last = events.shape
        if len(self._tables.shapes) > len(self._numbers):
            self._number_shapes()
        self._add_samples(events)
        events.shape = self._numbers[events.shape]
        if self._args.count:
            events.args = np.where(events.args == NONE, NONE, events.args + np.int32(self._args.count))
        is_span = self._is_span[events.shape].astype(np.bool_)
        if not is_span.all():
            events = events.take(is_span)
        if not len(events):
            return
        frames = self._of_frame[events.shape]
        lasts = (self._is_whole[events.shape] > 0) & (frames != FRAMES.index("gpu_thread"))
        end_ns = events.ts_ns + np.where(lasts, events.dur_ns, 0)
        for frame in np.flatnonzero(np.bincount(frames)).tolist():
            own = frames == frame
            some = events if own.all() else events.take(own)
            self._spools.setdefault(FRAMES[frame], Spool()).add(some)
        # A duration beyond all times ends at the last time that a slice can have.
        last_ns = int(np.where(end_ns < events.ts_ns, _INT64_MAX, end_ns).max())
        self._last_ns = max(self._last_ns, last_ns)

    def _number_shapes(self) -> None:
        """Give the new shapes of the reading's tables permanent numbers."""
        new = self._tables.shapes[len(self._numbers) :]
        numbers = np.array([self._shapes.number(shape) for shape in new], np.int32)
        self._numbers = np.concatenate([self._numbers, numbers])
        known = len(self._of_frame)
        if len(self._shapes) > known:
            of = self._shapes.columns()[known:]
            # Copies on a stream nest with its kernels.
            frames = np.where(
                of["frame"] == FRAMES.index("gpu_kernel"), FRAMES.index("transfer"), of["frame"]
            )
            self._of_frame = np.concatenate([self._of_frame, frames])
            self._is_span = np.concatenate([self._is_span, ~np.isin(of["phase"], _NO_SPANS)])
            self._is_whole = np.concatenate([self._is_whole, of["phase"] == ord("X")])

    def _add_threads(self, events: TraceColumns) -> None:
        """Write events of single threads of a GPU, in the order of time."""
        count = len(events)
        index = np.full((count, 6), NONE, np.int32) if events.index is None else events.index
        names = [f"{what}_{axis}" for what in ("block", "thread") for axis in "xyz"]
        columns = dict(zip(names, index.T, strict=True))
        none = np.full(count, NONE, np.int64)
        self._writer.put(
            "gpu_thread",
            {
                "id": np.arange(self._threads, self._threads + count, dtype=np.int32),
                "start_ns": events.ts_ns,
                "shape": events.shape,
                "args": events.args,
                "launch": events.launch,
                "source_ns": none if events.source_ns is None else events.source_ns,
                "bound_ns": none if events.bound_ns is None else events.bound_ns,
                **columns,
            },
        )
        self._threads += count

    def _add_samples(self, events: TraceColumns) -> None:
        """Write the samples of GPUs' counters. A sample is the mean over its interval: one without a length
        has no meaning.
        """
        gpus: dict[int, list[int]] = {}
        for number in distinct(events.shape).tolist():
            shape = self._tables.shapes[number] if number >= 0 else None
            if shape is not None and shape.phase == COUNTS and shape.layer == shape.name == GPU_COUNTERS:
                gpus.setdefault(shape.gpu or 0, []).append(number)
        for gpu, shapes in gpus.items():
            rows = np.flatnonzero(np.isin(events.shape, shapes) & (events.dur_ns > 0))
            if not len(rows) or not (gpu in self._gpus or len(self._gpus) < _GPUS_MAX):
                continue
            self._gpus.add(gpu)
            values = [sample_values(self._tables.args(number)) for number in events.args[rows].tolist()]
            start_ns = events.ts_ns[rows]
            self._writer.put(
                "gpu_samples",
                {
                    "gpu": np.full(len(rows), gpu, np.int64),
                    "start_ns": start_ns,
                    "end_ns": start_ns + events.dur_ns[rows],
                    **dict(zip(SERIES, np.array(values, np.float64).T, strict=True)),
                },
            )

    def _add_warps(self, group: WarpGroup[PlacedWarps]) -> None:
        """Add batches of warps; bad ones are reported and left out."""
        try:
            self._last_ns = max(self._last_ns, self._warps.add(group))
        except OverflowError:
            if len(group) == 1:
                self._reading.note(Problem(0, "gpu_warp", "contains numbers that are too large"))
            else:
                for one in group:
                    self._add_warps(WarpGroup.of(one))

    def _add_other(self, ts_ns: int, other: Record) -> None:
        """Add a record that is neither an event nor warps."""
        if other["type"] == "loss" and abs(ts_ns) > TIME_LIMIT_NS:
            self._reading.note(_no_time(ts_ns))
        elif other["type"] == "name":
            self._shapes.give_name(other)
        elif other["type"] in STALLS:
            self._stalls.add(other)
        elif other["type"] == "loss":
            texts = (self._loss_text(name, other.get(name)) for name in _OTHERS)
            layer, reason = texts
            # A file may contain any number of a processor; real ones fit 63 bits.
            cpu = other.get("cpu", NONE)
            times = other["count"], ts_ns, other.get("dur_ns", NONE), cpu if cpu <= _INT64_MAX else NONE
            self._losses.append((layer, *times, reason))
            if len(self._losses) >= _LOSSES_AT_ONCE:
                self._put_losses()

    def _loss_text(self, name: str, text: str | None) -> str | None:
        known = self._loss_texts[name]
        if text is None or text in known:
            return text
        if len(known) >= _LOSS_TEXTS_MAX:
            return _OTHERS[name]
        known.add(text)
        return text

    def _put_losses(self) -> None:
        rows = [
            (layer, count, start_ns, *(None if value == NONE else value for value in (dur_ns, cpu)), reason)
            for layer, count, start_ns, dur_ns, cpu, reason in self._losses
        ]
        self._writer.put_rows("losses", rows)
        self._losses = []

    def relieve(self) -> None:
        """Free memory of the reading's tables: if there are many shapes, only those of the last batch
        stay."""
        self._args.put(self._tables)
        if len(self._tables.shapes) <= _SHAPES_MAX:
            self._keep(np.arange(len(self._numbers), dtype=np.int32))
        if len(self._tables.shapes) > _SHAPES_MAX or self._tables.text_bytes() > _SHAPES_BYTES_MAX:
            self._keep(self._last)

    def _keep(self, shapes: Int32s) -> None:
        """Keep these shapes in the reading's tables."""
        turned, _ = self._tables.keep(shapes, np.empty(0, np.int32))
        numbers = np.full(len(self._tables.shapes), NONE, np.int32)
        stays = turned[: len(self._numbers)] >= 0
        numbers[turned[: len(self._numbers)][stays]] = self._numbers[stays]
        self._numbers = numbers

    def finish(self) -> None:
        """Match begins and ends, and write the tables of spans, and of what is known once all is read."""
        account = self._reading.finish()
        self._args.put(self._tables)
        self._warps.finish()
        self._put_losses()
        header, footer = self._opened.recording.header, self._reading.footer
        trace_clock = self._opened.clocks.trace_clock
        stated_ns = header.start_ns(trace_clock)
        first_ns = min((ns for ns in (self._first_ns, self._warps.first_ns) if ns is not None), default=0)
        start_ns = first_ns if stated_ns is None else stated_ns
        end_ns = max(self._last_ns, start_ns)
        nesting, shapes = new_nesting(), self._shapes.columns()
        is_whole = self._is_whole.astype(np.bool_)
        for group, spool in self._spools.items():
            has = {name: spool.has(name) for name in ("launch", "stack", "index")}
            has["moved"] = spool.has("source_ns") or spool.has("bound_ns")
            self._has[group] = [name for name, is_there in has.items() if is_there]
        for events in self._spools.pop("gpu_thread", Spool()).in_order(is_whole):
            self._add_threads(events)
        for group in GROUPS:
            if group in self._spools:
                spool = self._spools.pop(group)
                kinds = Kinds(
                    self._of_frame == FRAMES.index(group),
                    shapes["row"],
                    np.where(np.isin(shapes["phase"], _NAME_MATTERS), shapes["name_text"], NONE),
                    shapes["phase"],
                    shapes["has_dur"],
                )
                rows = SpanRows(nesting, kinds, partial(self._writer.put, group))
                for events in spool.in_order(is_whole):
                    rows.nest(events)
                rows.finish(end_ns)
                self._settle(group, rows, kinds)
        self._put_shapes(shapes)
        self._add_python_stacks(shapes)
        account.notes += self._impossible()
        self._divide_streams(shapes["frame"])
        account.outcomes = nesting.outcomes
        self._put_facts(account, header, footer, trace_clock, start_ns, end_ns)
        self._writer.sum_up()

    def _add_python_stacks(self, shapes: Any) -> None:
        """Give calls and ranges the stacks of the Python functions around them, where there are no others."""
        stacks, layer = self._opened.recording.tables.stacks, ~self._shapes.text(LAYER)
        own = np.flatnonzero((shapes["layer"] == layer) & np.isin(shapes["phase"], _SLICES))
        if len(stacks) or not len(own):
            return
        thread, _ = number_rows(shapes["pid"], shapes["tid"])
        found = self._writer.of_shapes("hook", own, ("id", "start_ns", "end_ns", "parent", "shape"))
        order = np.argsort(found["id"])
        ids, start_ns, end_ns, parent, shape = (column[order] for column in found.values())
        at = np.searchsorted(ids, parent)
        is_there = (parent != NONE) & (ids[np.minimum(at, len(ids) - 1)] == parent)
        slices = PythonSlices(
            start_ns, end_ns, np.where(is_there, at, NONE), thread[shape], shapes["name_text"][shape]
        )

        def name(number: int) -> str:
            return self._shapes.texts[number].decode(errors="replace")

        for table in ("userspace", "annotation"):
            of_table = np.flatnonzero(self._of_frame == FRAMES.index(table))
            rows = self._writer.of_shapes(table, of_table, ("id", "start_ns", "shape"))
            around = slices.around(thread[rows["shape"]], rows["start_ns"])
            stack = slices.stacks(around, name, stacks)
            self._writer.give_stacks(table, rows["id"], stack)
            self._has[table] = list({*self._has.get(table, []), "stack"})

    def _impossible(self) -> list[str]:
        """A note about work that lasts longer than it can, if there is any. The work of all streams nests in
        the table of copies.

        A stream does one thing after the other. Programmatic dependent launch lets a kernel begin before the
        end of the one before, but not several of them end before that. The kernels of one launch of a CUDA
        graph may run side by side.
        """
        count, later, overlong_ns = self._writer.rows(_OVERLONG)[0]
        if not count:
            return []
        (whole_ns,) = self._writer.rows(f"select sum(length_ns) from ({_WORK})")[0]
        share = f"it_has|they_have {100 * overlong_ns / whole_ns:.1f}% of the time of all kernels and copies"
        words = "kernel_or_copy|kernels_or_copies lasts|last while later ones of its_stream|their_streams"
        return [f"impossible: {counted(count, f'{words} begin and end ({later:,} of them); {share}')}"]

    def _settle(self, table: str, rows: SpanRows, kinds: Kinds) -> None:
        """Give rows with overlap tracks their callers, and number all rows in the order of their starts."""
        if rows.is_sorted and not rows.overlaps:
            return
        found = self._writer.by_id(table, ("start_ns", "depth", "parent", "top"))
        start_ns, depth, parent, top = (found.pop(name) for name in ("start_ns", "depth", "parent", "top"))
        if rows.overlaps:
            shapes = np.flatnonzero(np.isin(kinds.row, list(rows.overlaps)))
            own = self._writer.of_shapes(table, shapes, ("id", "start_ns", "end_ns", "kind", "shape"))
            row = kinds.row[own["shape"]]
            # By row, then by start, the longer first.
            order = np.lexsort((own["id"], -own["end_ns"], own["start_ns"], row))
            row, own = row[order], {name: own.pop(name)[order] for name in list(own)}
            del order
            lasts = (own["kind"] != INSTANT) & (own["kind"] != NO_BEGIN)
            around = np.full(len(row), NONE, np.int32)
            bounds = np.flatnonzero(np.diff(row, prepend=-1, append=-1))
            for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                part = slice(first, last)
                found_in = parents_by_time(own["start_ns"][part], own["end_ns"][part], lasts[part])
                around[part] = np.where(found_in == NONE, NONE, found_in + first)
            ids = own["id"]
            parent[ids] = np.where(around == NONE, NONE, ids[around])
            depth[ids], outermost = depths_and_tops(around)
            top[ids] = ids[outermost]
            del own
        order = np.lexsort((depth, start_ns))
        del start_ns, found
        self._renumber(table, table, order, parent, depth, top)

    def _renumber(
        self, source: str, table: str, order: Any, parent: Int32s, depth: Int32s, top: Int32s
    ) -> None:
        """Write the rows `order` of `source` with new ids in this order as `table`. The other columns are by
        the old ids, and so are their values.
        """
        new = np.full(len(parent) + 1, NONE, np.int32)
        new[order] = np.arange(len(order), dtype=np.int32)
        self._writer.replace(source, table, new, parent, depth, top)

    def _divide_streams(self, frames: Any) -> None:
        """Divide the rows of streams into kernels, with copies on GPUs, and copies by call."""
        found = self._writer.by_id("transfer", ("depth", "parent", "shape"))
        is_kernel = frames[found.pop("shape")] == FRAMES.index("gpu_kernel")
        if not is_kernel.any():
            return
        self._has["gpu_kernel"] = self._has.get("transfer", [])
        for table, own in (("gpu_kernel", is_kernel), ("transfer", ~is_kernel)):
            parent = found["parent"].copy()
            parent[~own] = NONE
            parent[(parent != NONE) & ~own[parent]] = NONE
            _, top = depths_and_tops(parent)
            self._renumber("transfer", table, np.flatnonzero(own), parent, found["depth"], top)

    def _put_facts(
        self,
        account: Account,
        header: Header,
        footer: Footer,
        trace_clock: str,
        start_ns: int,
        end_ns: int,
    ) -> None:
        facts: dict[str, Any] = {field.name: getattr(account, field.name) for field in fields(account)}
        facts |= {
            "problems": [asdict(problem) for problem in account.problems],
            "outcomes": asdict(account.outcomes),
            "header": header.to_record(),
            "footer": footer.as_read or None,
            "trace_clock": trace_clock,
            "start_ns": start_ns,
            "end_ns": end_ns,
            "has": self._has,
            "large": self._shapes.large,
            "stalls": self._stalls.state(),
            "args_count": self._args.count,
            "range_names": self._warps.range_names,
            "first_warp_ns": self._warps.first_ns,
        }
        del facts["parts"]
        stacks = self._opened.recording.tables.stacks
        facts["omitted"] = [stacks.omitted(number) for number in range(len(stacks))]
        self._writer.put_rows(
            "facts", [(name, json.dumps(value, default=str)) for name, value in facts.items()]
        )
        self._writer.put_rows(
            "frames",
            [
                (*frame, is_library)
                for frame, is_library in zip(stacks.frames, stacks.is_library, strict=True)
            ],
        )
        columns = (column.astype(np.int32) for column in stacks.rows())
        self._writer.put("stack_frames", dict(zip(("stack", "depth", "frame"), columns, strict=True)))

    def _put_shapes(self, shapes: Any) -> None:
        columns: Rows = {name: shapes[name] for name in SHAPES if name != "shape"}
        self._writer.put("shapes", {"shape": np.arange(len(shapes), dtype=np.int32), **columns})
        self._writer.put_texts("texts", self._shapes.texts)
        given = [
            (str(pid), None if tid is None else str(tid), name)
            for (pid, tid), name in self._shapes.given.items()
        ]
        self._writer.put_rows("thread_names", given)


def _no_time(ts_ns: int) -> Problem:
    return Problem(0, "ts_ns", f"{ts_ns} is not a time of a recording")


def build(folder: Path, path: str, how: InputOptions, progress: Progress | None = None) -> None:
    """Read a recording of any input format, and write its tables into a folder.

    Raises InputError (with `how.strict`, on the first bad line), FormatError, ClockError, OutputError and
    LibraryMissing.
    """
    with (
        how.open(path, progress=progress) as opened,
        no_collector(),
        Writer(folder) as writer,
        ArgsWriter(folder) as args,
    ):
        reading = Reading(opened, path, strict=how.strict)
        building = _Building(opened, reading, writer, args)
        reading.relieve = building.relieve
        for batch, _ in reading.placed():
            building.add(batch)
        building.finish()
