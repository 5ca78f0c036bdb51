"""Makes single events of columns on the trace's clock."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import accumulate

from tracepipe.api.event import Args, Event, Warp, WarpExit, WarpRange
from tracepipe.event.columns import NONE, SPECIAL, AnyArray, TraceBatch, TraceColumns, unsigned
from tracepipe.event.shape import Shape, shape_of
from tracepipe.event.stacks import Frame
from tracepipe.event.tables import Tables
from tracepipe.event.warps import PlacedWarps

_LANES = 32


class EventRows:
    """Makes events of batches. `assumed` are the clocks whose error is not known."""

    def __init__(self, tables: Tables, default_clock: str, assumed: Collection[str]) -> None:
        self._tables, self._default, self._assumed = tables, default_clock, assumed
        self._last: tuple[int, tuple[Frame, ...]] = (NONE, ())

    def events(self, batch: TraceBatch) -> Iterator[Event]:
        """The events of a batch in its order; each warp is one. All are made while the numbers of its tables
        are valid.
        """
        shapes = self._tables.shapes
        known: dict[int, Args | None] = {NONE: None}
        rows = enumerate(_rows(batch.events))
        for at, (ts_ns, shape_number, args_number, dur_ns, launch, source_ns, bound_ns) in rows:
            if shape_number == SPECIAL:
                other = batch.others[args_number]
                if isinstance(other, PlacedWarps):
                    yield from self._warps(other)
                continue
            shape = shapes[shape_number]
            assert shape is not None
            if args_number not in known:
                known[args_number] = self._args(args_number)
            read = source_ns != NONE
            event = Event(
                ts_ns,
                shape,
                known[args_number],
                dur_ns if shape.has_dur else None,
                unsigned(launch) if shape.has_launch else None,
                source_ns if read else None,
                None if read and self._is_assumed(shape.clock) else bound_ns,
            )
            if shape.type == "gpu_thread":
                event.put_thread(batch.events.thread_of(at))
            if batch.events.stack is not None:
                event.stack = self._stack(int(batch.events.stack[at]))
            yield event

    def _stack(self, number: int) -> tuple[Frame, ...] | None:
        """The frames of a stack, made once for consecutive events that have it."""
        if number == NONE:
            return None
        if number != self._last[0]:
            stacks = self._tables.stacks
            self._last = number, tuple(stacks.frames[at] for at in stacks.frames_of(number))
        return self._last[1]

    def _args(self, number: int) -> Args:
        odd = self._tables.args(number) if self._tables.is_odd(number) else None
        return Args(self._tables.text(number), odd)

    def _is_assumed(self, clock: str | None) -> bool:
        return (clock or self._default) in self._assumed

    def _warps(self, batch: PlacedWarps) -> Iterator[Warp]:
        """Each warp of a batch. The columns become lists once for all warps."""
        launched = batch.launched
        left = shape_of({**launched, "type": "gpu_warp", "phase": "X"})
        running = replace(left, phase="B")
        args = Args(b"", launched["args"]) if launched.get("args") else None
        bound_ns = None if self._is_assumed(left.clock) else batch.bound_ns
        each = _EachWarp(batch)
        for at, after_ns in enumerate(batch.entry_ns.tolist()):
            exits = each.exits(at, batch.ts_ns + after_ns)
            lasted_ns = max(one.ts_ns for one in exits) - batch.ts_ns - after_ns if exits else None
            source_ns = each.source_ns[at] if each.source_ns else None
            shape = left if exits else running
            warp = Warp(
                batch.ts_ns + after_ns, shape, args, lasted_ns, launched.get("launch"), source_ns, bound_ns
            )
            each.put(at, warp, left)
            warp.exits = exits
            warp.ranges = each.ranges(at, batch.ts_ns + after_ns)
            yield warp


class _EachWarp:
    """The columns of a batch of warps as lists."""

    def __init__(self, batch: PlacedWarps) -> None:
        self._warp = batch.warp.tolist()
        self._sm, self._slot, self._mask = _list(batch.sm), _list(batch.slot), _list(batch.entry_mask)
        self._counts = _list(batch.exit_count)
        self._firsts = batch.first_exits().tolist()
        self._exit_ns = batch.exit_ns.tolist()
        self._exit_mask, self._exit_clk = _list(batch.exit_mask), _list(batch.exit_clk)
        self.source_ns = _list(batch.source_ns)
        self._ranges: list[tuple[int, ...]] | None = None
        if batch.range_ns is not None and batch.range_count is not None:
            self._first_ranges = list(accumulate(batch.range_count.tolist(), initial=0))
            self._range_names = batch.ranges
            times = (batch.range_name, batch.range_ns, batch.range_dur_ns, batch.range_dur_clk)
            is_open = _list(batch.range_open) or [0] * len(batch.range_ns)
            self._ranges = list(zip(*(_list(column) or [] for column in times), is_open, strict=True))

    def exits(self, at: int, entry_ns: int) -> tuple[WarpExit, ...]:
        """The exits of a warp that entered at `entry_ns`."""
        first = self._firsts[at]
        count = self._counts[at] if self._counts is not None else 1
        masks, cycles = self._exit_mask, self._exit_clk
        return tuple(
            WarpExit(
                entry_ns + self._exit_ns[place],
                None if masks is None else masks[place],
                None if cycles is None else cycles[place],
            )
            for place in range(first, first + count)
        )

    def ranges(self, at: int, entry_ns: int) -> tuple[WarpRange, ...]:
        """The ranges of a warp that entered at `entry_ns`."""
        if self._ranges is None:
            return ()
        spans = self._ranges[self._first_ranges[at] : self._first_ranges[at + 1]]
        return tuple(
            WarpRange(self._range_names[name], entry_ns + after_ns, dur_ns, cycles, is_open == 1)
            for name, after_ns, dur_ns, cycles, is_open in spans
        )

    def put(self, at: int, warp: Warp, shape: Shape) -> None:
        """Set the numbers of a warp in the grid, and where it ran."""
        warp.warp = number = self._warp[at]
        size = -(-shape.block[0] * shape.block[1] * shape.block[2] // _LANES) if shape.block else 0
        warp.block_index, warp.warp_in_block = divmod(number, size) if size else (None, None)
        warp.sm = self._sm[at] if self._sm is not None else None
        warp.slot = self._slot[at] if self._slot is not None else None
        warp.entry_mask = self._mask[at] if self._mask is not None else None


def _list(column: AnyArray | None) -> list[int] | None:
    return None if column is None else column.tolist()


def _rows(events: TraceColumns) -> Iterator[tuple[int, int, int, int, int, int, int]]:
    """The columns row by row, as Python integers."""
    count = len(events)
    source = [NONE] * count if events.source_ns is None else events.source_ns.tolist()
    bound = [0] * count if events.bound_ns is None else events.bound_ns.tolist()
    columns = (events.ts_ns, events.shape, events.args, events.dur_ns, events.launch)
    return zip(*(column.tolist() for column in columns), source, bound, strict=True)
