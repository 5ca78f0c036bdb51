"""Puts a recording's batches on the trace clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import numpy as np

from tracepipe.clocks import maps
from tracepipe.clocks.maps import SNAPSHOT_NS, ClockMap, Method, fit_all, offset_map
from tracepipe.clocks.warp_times import WarpTimes
from tracepipe.errors import ClockError
from tracepipe.event.columns import (
    NONE,
    SPECIAL,
    UNDATED_NS,
    Int64s,
    Ints,
    SourceBatch,
    TraceBatch,
    TraceColumns,
    distinct,
)
from tracepipe.event.model import (
    HOST_CLOCKS,
    HOST_LAYERS,
    MONOTONIC,
    TIME_LIMIT_NS,
    Header,
    Record,
    SourceNs,
    TraceNs,
)
from tracepipe.event.shape import Shape, ShapeColumn
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Others, PlacedWarps, Warps

# The name for further clocks, of which there are too many.
_OTHERS = "other clocks"


def _offset_ns(instant: Mapping[str, Any], clock: str, trace_clock: str) -> int | None:
    here, trace = instant.get(f"{clock}_ns"), instant.get(f"{trace_clock}_ns")
    return trace - here if isinstance(here, int) and isinstance(trace, int) else None


def _leave_out(clock: str, count: int, unplaced: dict[str, int]) -> None:
    """Count events that are not placed, by clock for the first clocks."""
    if clock not in unplaced and len(unplaced) >= maps.CLOCKS_MAX:
        clock = _OTHERS
    unplaced[clock] = unplaced.get(clock, 0) + count


class Clocks:
    """Every clock of one recording, each with its map onto the trace clock.

    The trace clock is CLOCK_MONOTONIC where the recording has host times, else the recording's one clock.
    `pairs` are `clock` records, and may be read twice. `assumed` are offsets that a user gave: clock → ns to
    add, or the name of a host clock, for which the source clock is then taken.
    """

    def __init__(
        self, header: Header, pairs: Iterable[Record] = (), assumed: Mapping[str, int | str] | None = None
    ) -> None:
        self.default = header.default_clock
        declared = header.declared_clocks
        self.trace_clock = declared[0] if len(declared) == 1 else MONOTONIC
        self.start = header.start
        self._maps: dict[str, ClockMap] = {self.trace_clock: offset_map(self.trace_clock, Method.SAME, 0, 0)}
        self._placed: dict[str, int] = {}
        self._warp_times = WarpTimes()
        self._codes: ShapeColumn | None = None
        """The number of each shape's clock in `_clocks`, from 1; 0 for the trace's own and no shape."""
        self._clocks: dict[str, int] = {}
        self._moved: dict[str, int] = {}
        self._anchor_ns = 0
        self._drift: ClockMap | None = None
        for clock in HOST_CLOCKS:
            if (offset_ns := _offset_ns(self.start, clock, self.trace_clock)) is not None:
                self._maps.setdefault(clock, offset_map(clock, Method.OFFSET, offset_ns, SNAPSHOT_NS))
        if self.trace_clock == MONOTONIC:
            self._maps |= fit_all(pairs)
        for clock, offset in (assumed or {}).items():
            by = offset
            if isinstance(by, str):
                found = _offset_ns(self.start, by, self.trace_clock) if by in HOST_CLOCKS else None
                if found is None:
                    raise ClockError(
                        f"cannot place {clock} by {offset!r}",
                        "Give nanoseconds to add, or a host clock of the header's start.",
                    )
                by = found
            elif abs(by) >= TIME_LIMIT_NS:
                raise ClockError(f"cannot place {clock} by {by} ns", "Give at most 146 years.")
            self._maps[clock] = offset_map(clock, Method.ASSUMED, by, 0)
        self.last_ns = TraceNs(0)
        self.others: Callable[[], Mapping[str, ClockMap]] | None = None
        """Finds the maps of clocks that nothing else relates: called when the first of them is needed."""

    def anchor(self, offset_ns: int, drift: ClockMap | None = None) -> None:
        """Put all times on the common clock of several recordings: by an offset, or by `drift`."""
        self._anchor_ns, self._drift = offset_ns, drift

    def get(self, clock: str) -> ClockMap | None:
        """The map of `clock`, or None where nothing relates it to the trace clock. Raises ClockError."""
        if clock not in self._maps and self.others is not None:
            find, self.others = self.others, None
            self._maps = {**find(), **self._maps}
        return self._maps.get(clock)

    def stamp(self, batch: SourceBatch, tables: Tables, unplaced: dict[str, int]) -> TraceBatch:
        """Put a batch on the trace clock. What cannot be placed is counted by clock and left out.

        Events on another clock keep its reading in `source_ns`, and get the bound of its map. Times of warps
        become finer by the cycles of their SM, see `sm_clock`.
        """
        events = batch.events.shared(TraceColumns)
        others = Others[PlacedWarps]()
        left_out: list[int] = []
        if self._codes is None:
            self._codes = ShapeColumn(tables, self._code, np.int16)
        of = self._codes.values()[events.shape]
        if of.any():
            self._move(events, of, left_out, unplaced)
        if batch.others:
            special, events.args = np.flatnonzero(events.shape == SPECIAL), events.args.copy()
            are_warps = batch.others.are_warps(events.args[special])
            self._place_warps(batch.others, events, special[are_warps], others, left_out, unplaced)
            for at in special[~are_warps].tolist():
                record = cast("Record", batch.others[int(events.args[at])])
                if (placed := self._stamp_other(record, events, at, unplaced)) is not None:
                    (events.args[at],) = others.add(placed)
                else:
                    left_out.append(at)
                    events.ts_ns[at] = NONE
        self.last_ns = self._before(events, len(events))
        places = np.delete(np.arange(len(events)), left_out) if left_out else None
        if places is not None:
            events = events.take(places)
        if self._anchor_ns or self._drift is not None:
            # The lengths of warps and losses stay, as drift changes them only by some millionths.
            if self._drift is None:
                events.ts_ns = events.ts_ns + self._anchor_ns
            else:
                ends_ns = self._drift.place_all(events.ts_ns + events.dur_ns)
                events.ts_ns = self._drift.place_all(events.ts_ns)
                events.dur_ns = np.maximum(0, ends_ns - events.ts_ns)
            for group in others.warps:
                base_ns, drift = group.base_ns, self._drift
                group.base_ns = base_ns + self._anchor_ns if drift is None else drift.place_all(base_ns)
                if group.whole.source_ns is not None:
                    group.whole.offset_ns -= self._anchor_ns
        return TraceBatch(events, others, batch.text_bytes, places)

    def _code(self, shape: Shape, _: int) -> int:
        clock = shape.clock or self.default
        clock_map = self.get(clock)
        if clock_map is not None and clock_map.method == Method.SAME:
            if shape.type not in HOST_LAYERS or shape.clock is not None or shape.comm is not None:
                self._note(clock, 0)
            return 0
        names_max = len(self._maps) + maps.CLOCKS_MAX
        if clock_map is None and clock not in self._clocks and len(self._clocks) >= names_max:
            clock = _OTHERS
        return self._clocks.setdefault(clock, len(self._clocks) + 1)

    def _move(self, events: TraceColumns, of: Ints, left_out: list[int], unplaced: dict[str, int]) -> None:
        """Place the events on clocks other than the trace's; `of` has the numbers of their clocks."""
        events.ts_ns, events.dur_ns = events.ts_ns.copy(), events.dur_ns.copy()
        source = events.source_ns = np.full(len(events), NONE, np.int64)
        bounds = events.bound_ns = np.zeros(len(events), np.int64)
        found = [(np.flatnonzero(of == code), code) for code in distinct(of[of > 0]).tolist()]
        names = list(self._clocks)
        # In the order of the file, as the shapes may be in another.
        for places, code in sorted(found, key=lambda one: int(one[0][0])):
            clock = names[code - 1]
            clock_map = self.get(clock)
            if clock_map is None:
                _leave_out(clock, len(places), unplaced)
                events.ts_ns[places] = NONE
                left_out += places.tolist()
                continue
            read_ns = events.ts_ns[places]
            placed_ns = clock_map.place_all(read_ns)
            ends_ns = clock_map.place_all(read_ns + events.dur_ns[places])
            source[places], bounds[places] = read_ns, clock_map.bounds_at(read_ns)
            events.ts_ns[places], events.dur_ns[places] = placed_ns, np.maximum(0, ends_ns - placed_ns)
            self._note(clock, int(bounds[places].max()))

    def _note(self, clock: str, bound_ns: int) -> None:
        self._placed[clock] = max(self._placed.get(clock, 0), bound_ns)

    def _stamp_other(
        self, other: Record, events: TraceColumns, at: int, unplaced: dict[str, int]
    ) -> Record | None:
        """Place a record that is not an event, and its row. None where it cannot be placed."""
        if other["type"] == "footer":
            # One of the host's clocks may have been set, and one counts in sleep.
            for clock, clock_map in self._maps.items():
                now_ns = _offset_ns(other.get("end", {}), clock, self.trace_clock)
                if clock_map.method == Method.OFFSET and now_ns is not None:
                    moved_ns = abs(now_ns - clock_map.place(SourceNs(0)))
                    self._moved[clock] = moved_ns if moved_ns > 2 * SNAPSHOT_NS else 0
        if other["type"] in ("footer", "clock", "header", "stack", "name"):
            events.ts_ns[at] = self._before(events, at)
            return other
        if events.ts_ns[at] == UNDATED_NS:  # a loss that its writer could not date
            events.ts_ns[at] = self._before(events, at)
            return other
        clock = other.get("clock", self.default)
        placed_by = self.get(clock)
        if placed_by is None:
            _leave_out(clock, 1, unplaced)
            return None
        source_ns = events.ts_ns[at : at + 1]
        self._note(clock, int(placed_by.bounds_at(source_ns)[0]))
        if placed_by.method == Method.SAME:
            return other
        start_ns, end_ns = placed_by.place_all(np.append(source_ns, source_ns + other.get("dur_ns", 0)))
        events.ts_ns[at] = start_ns
        return other | {"dur_ns": max(0, int(end_ns - start_ns))} if "dur_ns" in other else other

    def _place_warps(
        self,
        read: Others[Warps],
        events: TraceColumns,
        rows: Int64s,
        others: Others[PlacedWarps],
        left_out: list[int],
        unplaced: dict[str, int],
    ) -> None:
        """Place batches of warps, whose rows are `rows`, and add them to `others`."""
        for stretch, group in read.groups(events.args[rows]):
            names = [record.get("clock", self.default) for record in group.records]
            clocks = [*dict.fromkeys(names[kind] for kind in group.kind.tolist())]
            of_clock = np.array([clocks.index(name) if name in clocks else NONE for name in names])[
                group.kind
            ]
            for number, clock in enumerate(clocks):
                own = np.flatnonzero(of_clock == number)
                at, clock_map = rows[stretch][own], self.get(clock)
                if clock_map is None:
                    _leave_out(clock, int(group.sizes[own].sum()), unplaced)
                    left_out += at.tolist()
                    events.ts_ns[at] = NONE
                    continue
                placed = self._warp_times.place(clock_map, group.take(own))
                self._note(clock, int(placed.bound_ns.max()))
                events.ts_ns[at], events.args[at] = placed.base_ns, others.add(placed)

    def _before(self, events: TraceColumns, at: int) -> TraceNs:
        """The time of the last dated row before `at`."""
        while at > 0:
            at -= 1
            if events.ts_ns[at] >= 0:
                return TraceNs(int(events.ts_ns[at]))
        return self.last_ns

    def statements(self) -> list[dict[str, Any]]:
        """Statements about each clock that placed an event: method, pairs, drift, largest bound.

        The host's own clock needs no statement. "same" is stated where a GPU's clock is the trace's.
        """
        out = []
        for clock, bound_ns in self._placed.items():
            m = self._maps[clock]
            if m.method == Method.SAME and clock in HOST_CLOCKS:
                continue
            stated: dict[str, Any] = {"clock": clock, "trace_clock": self.trace_clock}
            stated["method"] = m.method.value
            if m.method == Method.FIT:
                stated |= {"pairs": m.pairs, "pairs_dropped": m.dropped}
                if (drift_ppm := m.drift_ppm) is not None:
                    stated["drift_ppm"] = round(drift_ppm, 3)
            elif m.method == Method.LAUNCHES:
                stated["launches"] = m.pairs
            if m.method != Method.ASSUMED:
                stated["bound_ns"] = bound_ns + self._moved.get(clock, 0)
            else:
                stated["bound"] = "unknown: the offset was assumed"
            if clock in self._warp_times.offsets_ns:
                # At a warp's entry, its time in the trace + this + `source_after_ns` is the reading of the
                # GPU's timer.
                stated["offset_ns"] = self._warp_times.offsets_ns[clock] - self._anchor_ns
            out.append(stated)
        return out
