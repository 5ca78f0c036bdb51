"""Turns source time into trace time: the one place that relates two clocks.

A source clock is related to the host's by pairs (source, host, uncertainty). Between two pairs the map is the
straight line through both; outside them it goes on with the overall rate. Every map states a bound: how
far a placed time may be from the true one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tracepipe.clock_pairs import (
    CRYSTAL_PPM,
    WANDER_PPM,
    ClockPair,
    bend_ns,
    bend_ppm,
    consistent,
    cut,
    jump_ns,
)
from tracepipe.errors import ClockError
from tracepipe.model import (
    HOST_CLOCKS,
    MONOTONIC,
    TIME_LIMIT_NS,
    Header,
    Record,
    Shape,
    SourceNs,
    Timed,
    TraceNs,
)

if TYPE_CHECKING:
    from tracepipe.sm_clock import SmClocks

# The readings of `start` in a header follow each other within this time.
SNAPSHOT_NS = 1000


@dataclass(frozen=True, slots=True)
class Segment:
    """trace = trace_ns + (source - source_ns) * rate_num // rate_den, from `start_ns` on."""

    start_ns: int
    source_ns: int
    trace_ns: int
    rate_num: int
    rate_den: int
    bound_ns: int
    bound_ppm: int
    """What each ns of distance from source_ns adds to the bound, in millionths."""
    length_ns: int = 0
    """Between two pairs: their distance. 0 before the first and after the last."""
    end_bound_ns: int = 0
    """The bound at the second of them."""

    def bound_at(self, source_ns: int) -> int:
        """How far off the line the clock may be there, ns."""
        away_ns, length_ns = abs(source_ns - self.source_ns), self.length_ns
        if not length_ns:
            return self.bound_ns - (-away_ns * self.bound_ppm // 1_000_000)
        # The farthest that a clock gets from the line between two points, when its rate changes just here.
        rest_ns = length_ns - away_ns
        wander = away_ns * rest_ns * WANDER_PPM // 1_000_000
        return -(-(self.bound_ns * rest_ns + self.end_bound_ns * away_ns + wander) // length_ns)


@dataclass(frozen=True, slots=True)
class ClockMap:
    """The map of one source clock. `method`: same, offset, fit or assumed."""

    clock: str
    method: str
    segments: tuple[Segment, ...]
    pairs: int = 0
    dropped: int = 0

    def segment_index(self, source_ns: int) -> int:
        """Which segment places a source time."""
        return max(0, bisect_right(self.segments, source_ns, key=lambda segment: segment.start_ns) - 1)

    def place(self, source_ns: SourceNs) -> TraceNs:
        """The trace time of a source time."""
        s = self.segments[self.segment_index(source_ns)]
        return TraceNs(s.trace_ns + (source_ns - s.source_ns) * s.rate_num // s.rate_den)

    def bound_at(self, source_ns: int) -> int:
        """How far `place(source_ns)` may be from the true time, ns."""
        return self.segments[self.segment_index(source_ns)].bound_at(source_ns)

    @property
    def drift_ppm(self) -> float | None:
        """How much slower the source clock runs than the trace clock over all pairs, in millionths; None
        where that is not known.
        """
        first = self.segments[0]
        if first.bound_ppm >= CRYSTAL_PPM and first.rate_num == first.rate_den:
            return None
        return (first.rate_num / first.rate_den - 1) * 1e6


def _offset(clock: str, method: str, offset_ns: int, bound_ns: int) -> ClockMap:
    return ClockMap(clock, method, (Segment(0, 0, offset_ns, 1, 1, bound_ns, 0),))


def fit(clock: str, pairs: Sequence[ClockPair]) -> ClockMap:
    """The piecewise-linear map through `pairs`. Raises ClockError without any.

    The bounds hold if the rate changes by no more than WANDER_PPM beyond what the pairs show. Inside: the
    uncertainties of the two ends, with such a change on the way, plus what the neighbours show of a bend.
    Outside: that of the end, plus the distance times the uncertainty of the overall rate.
    """
    if not pairs:
        raise ClockError(f"clock {clock} has no clock pairs", f"--assume-offset {clock}=NS places it")
    pairs = sorted(pairs, key=lambda pair: pair.source_ns)
    kept = consistent(cut(pairs))
    inside = [_between(kept, at) for at in range(len(kept) - 1)]
    alone_ns = kept[0].uncertainty_ns + 1
    first_ns, last_ns = (inside[0].bound_ns, inside[-1].end_bound_ns) if inside else (alone_ns, alone_ns)
    rate, before_ppm, after_ppm = _outside(kept)
    (source_ns, host_ns), end = ((pair.source_ns, pair.host_ns) for pair in (kept[0], kept[-1]))
    segments = [Segment(0, source_ns, host_ns, *rate, first_ns, before_ppm), *inside]
    if inside:
        segments.append(Segment(end[0], *end, *rate, last_ns, after_ppm))
    return _allowing(ClockMap(clock, "fit", tuple(segments)), pairs)


def _between(kept: Sequence[ClockPair], at: int) -> Segment:
    """The segment from pair `at` to the next."""
    a, b = kept[at : at + 2]
    more_ns = 1 + max(bend_ns(kept, at), bend_ns(kept, at + 1), jump_ns(a, b))
    start_ns, end_ns = (pair.uncertainty_ns + more_ns for pair in (a, b))
    rate = (b.host_ns - a.host_ns, b.source_ns - a.source_ns)
    return Segment(a.source_ns, a.source_ns, a.host_ns, *rate, start_ns, 0, rate[1], end_ns)


def _outside(kept: Sequence[ClockPair]) -> tuple[tuple[int, int], int, int]:
    """The rate before the first pair and after the last, and by how much it may be wrong there, in ppm."""
    first, last = kept[0], kept[-1]
    span_ns = last.source_ns - first.source_ns
    noise_ns = first.uncertainty_ns + last.uncertainty_ns + 1
    measured_ppm = -(-noise_ns * 1_000_000 // span_ns) + WANDER_PPM if span_ns else CRYSTAL_PPM
    if measured_ppm >= CRYSTAL_PPM:
        return (1, 1), CRYSTAL_PPM, CRYSTAL_PPM
    # At a rate that no crystal has, one of the two is wrong.
    measured_ppm += -(-jump_ns(first, last) * 1_000_000 // span_ns)
    before_ppm, after_ppm = (measured_ppm + bend_ppm(kept, end) for end in (first, last))
    return (last.host_ns - first.host_ns, span_ns), before_ppm, after_ppm


def _allowing(clock_map: ClockMap, pairs: Sequence[ClockPair]) -> ClockMap:
    """The map with bounds that allow for the pairs it contradicts: it may be wrong where they stand."""
    segments, dropped = list(clock_map.segments), 0
    for pair in pairs:
        off_ns = abs(clock_map.place(SourceNs(pair.source_ns)) - pair.host_ns)
        if off_ns > clock_map.bound_at(pair.source_ns) + pair.uncertainty_ns + 2:
            at = clock_map.segment_index(pair.source_ns)
            bounds_ns = (
                max(bound_ns, off_ns + pair.uncertainty_ns)
                for bound_ns in (segments[at].bound_ns, segments[at].end_bound_ns)
            )
            segments[at] = replace(segments[at], bound_ns=next(bounds_ns), end_bound_ns=next(bounds_ns))
            dropped += 1
    return replace(clock_map, segments=tuple(segments), pairs=len(pairs) - dropped, dropped=dropped)


def _finer(batch: Record, sm_clocks: SmClocks, base_ns: SourceNs) -> tuple[list[int], list[int]] | None:
    """`entry_ns` and `exit_ns` as the cycles of the SMs make them; None where those are absent or too few."""
    import numpy as np

    if any(batch.get(name) is None for name in ("sm", "entry_clk", "exit_clk")):
        return None
    names = ("entry_ns", "exit_ns", "sm", "slot", "entry_clk", "exit_clk", "exit_count")
    try:
        columns: list[Any] = [np.array(batch[name], np.int64) if name in batch else None for name in names]
    except OverflowError:  # a count of cycles that no SM reaches
        return None
    finer = sm_clocks.refine(base_ns, *columns)
    return (finer[0].tolist(), finer[1].tolist()) if finer else None


def _stamp_columns(batch: Record, clock_map: ClockMap, sm_clocks: SmClocks, base_ns: SourceNs) -> TraceNs:
    """Put the columns of a warp batch on the trace clock, and return their new base, the first entry.

    Where they change, the readings stay in `source_entry_ns`. Exits are after their warp's entry.
    """
    entry, exits = batch["entry_ns"], batch["exit_ns"]
    finer = _finer(batch, sm_clocks, base_ns)
    if finer:
        batch["source_ns"] = base_ns
    entered, stayed = finer or (entry, exits)
    first_ns = min(entered, default=0) if finer else 0
    place = clock_map.place
    start_ns = place(SourceNs(base_ns + first_ns))
    longest_ns = max(entered, default=0) + max(stayed, default=0)
    if abs(place(SourceNs(base_ns + longest_ns)) - start_ns - longest_ns + first_ns) < 1:
        if finer:
            batch |= {
                "source_entry_ns": entry,
                "entry_ns": [ns - first_ns for ns in entered],
                "exit_ns": stayed,
            }
        return start_ns
    counts = batch.get("exit_count", [1] * len(entry))
    batch["source_entry_ns"] = entry
    batch["entry_ns"] = [place(SourceNs(base_ns + ns)) - start_ns for ns in entered]
    each_exit = iter(stayed)
    batch["exit_ns"] = [
        place(SourceNs(base_ns + raw + next(each_exit))) - start_ns - placed
        for raw, placed, count in zip(entered, batch["entry_ns"], counts, strict=True)
        for _ in range(count)
    ]
    return start_ns


def _offset_ns(instant: Mapping[str, Any], clock: str, trace_clock: str) -> int | None:
    here, trace = instant.get(f"{clock}_ns"), instant.get(f"{trace_clock}_ns")
    return trace - here if isinstance(here, int) and isinstance(trace, int) else None


class Clocks:
    """Every clock of one recording, each with its map onto the trace clock.

    The trace clock is CLOCK_MONOTONIC where the recording has host times, else the recording's one clock.
    `pairs` are `clock` records; `assumed` are offsets asked for by hand: clock → ns to add, or "realtime",
    which takes the source clock for CLOCK_REALTIME.
    """

    def __init__(
        self, header: Header, pairs: Iterable[Record] = (), assumed: Mapping[str, int | str] | None = None
    ) -> None:
        self.default = header.get("clock", MONOTONIC)
        declared = header.get("clocks", [self.default])
        self.trace_clock = declared[0] if len(declared) == 1 else MONOTONIC
        self.start = header.get("start", {})
        self._maps: dict[str, ClockMap] = {self.trace_clock: _offset(self.trace_clock, "same", 0, 0)}
        self._placed: dict[str, int] = {}
        self._sm_clocks: dict[str, SmClocks] = {}
        self._moved: dict[str, int] = {}
        by_clock: dict[str, list[ClockPair]] = {}
        for record in pairs:
            by_clock.setdefault(record["clock"], []).append(ClockPair.of(record))
        for clock in HOST_CLOCKS:
            if (offset_ns := self._host_offset_ns(clock)) is not None:
                self._maps.setdefault(clock, _offset(clock, "offset", offset_ns, SNAPSHOT_NS))
        if self.trace_clock == MONOTONIC:
            self._maps |= {clock: fit(clock, found) for clock, found in by_clock.items()}
        for clock, offset in (assumed or {}).items():
            self._maps[clock] = self._assume(clock, offset)
        self.last_ns = TraceNs(0)

    def _host_offset_ns(self, clock: str) -> int | None:
        return _offset_ns(self.start, clock, self.trace_clock)

    def _note_end(self, end: Mapping[str, Any]) -> None:
        """What became of the host's clocks: CLOCK_REALTIME may be set, CLOCK_BOOTTIME goes on in sleep."""
        for clock, clock_map in self._maps.items():
            now_ns = _offset_ns(end, clock, self.trace_clock)
            if clock_map.method == "offset" and now_ns is not None:
                moved_ns = abs(now_ns - clock_map.place(SourceNs(0)))
                self._moved[clock] = moved_ns if moved_ns > 2 * SNAPSHOT_NS else 0

    def _assume(self, clock: str, offset: int | str) -> ClockMap:
        if isinstance(offset, int):
            if abs(offset) >= TIME_LIMIT_NS:
                raise ClockError(
                    f"cannot place {clock} by {offset} ns", "146 years are the most that a trace can hold"
                )
            return _offset(clock, "assumed", offset, 0)
        found = self._host_offset_ns(offset) if offset in HOST_CLOCKS else None
        if found is None:
            raise ClockError(
                f"cannot place {clock} by {offset!r}",
                "give nanoseconds to add, or a host clock that the header's start names",
            )
        return _offset(clock, "assumed", found, 0)

    def get(self, clock: str) -> ClockMap | None:
        """The map of `clock`, or None where nothing relates it to the trace clock."""
        return self._maps.get(clock)

    def stamp(self, events: list[Timed], unplaced: dict[str, int]) -> list[Timed]:
        """`events` on the trace clock; those that cannot be placed are counted by clock and left out.

        A record that was on another clock keeps its reading: `source_ns` in an event's args, `source_ns`
        of a warp batch (which also gets the map's bound as `bound_ns`). Times of warps become as fine as the
        cycles of their SM make them, see `sm_clock`.
        """
        same = self.default == self.trace_clock
        moving = [at for at, (_, shape) in enumerate(events) if not (same and shape.plain)]
        left_out: set[int] = set()
        for at in moving:
            ts_ns, shape = events[at]
            clock = shape.record.get("clock", self.default)
            if shape.type == "footer":
                self._note_end(shape.record.get("end", {}))
            if shape.type in ("footer", "clock"):
                continue
            if ts_ns < 0:  # a loss that its writer could not date: it stands where it stands
                events[at] = self._before(events, at), shape
            elif (clock_map := self._maps.get(clock)) is None:
                unplaced[clock] = unplaced.get(clock, 0) + shape.events
                events[at] = -1, shape
                left_out.add(at)
            else:
                events[at] = self._stamp_one(ts_ns, shape, clock_map)
        self.last_ns = self._before(events, len(events))
        if left_out:
            return [event for at, event in enumerate(events) if at not in left_out]
        return events

    def _before(self, events: list[Timed], at: int) -> TraceNs:
        """The time of the last dated event before `at`."""
        while at > 0:
            at -= 1
            if events[at][0] >= 0:
                return TraceNs(events[at][0])
        return self.last_ns

    def _stamp_one(self, source_ns: int, shape: Shape, clock_map: ClockMap) -> Timed:
        ts_ns = clock_map.place(SourceNs(source_ns))
        bound_ns = clock_map.bound_at(source_ns)
        self._placed[clock_map.clock] = max(self._placed.get(clock_map.clock, 0), bound_ns)
        record = shape.record
        if shape.type == "gpu_warp":
            if clock_map.method != "same":
                record["source_ns"], record["bound_ns"] = source_ns, bound_ns
            sm_clocks = self._sm_clocks_of(clock_map.clock)
            ts_ns = _stamp_columns(record, clock_map, sm_clocks, SourceNs(source_ns))
        elif clock_map.method != "same":
            moved = record | {"args": record.get("args", {}) | {"source_ns": source_ns}, "bound_ns": bound_ns}
            if "dur_ns" in record:
                end_ns = clock_map.place(SourceNs(source_ns + record["dur_ns"]))
                moved["dur_ns"] = max(0, end_ns - ts_ns)
            shape = Shape(moved)
        return ts_ns, shape

    def _sm_clocks_of(self, clock: str) -> SmClocks:
        if clock not in self._sm_clocks:
            from tracepipe.sm_clock import SmClocks  # needs numpy, which a recording without warps does not

            self._sm_clocks[clock] = SmClocks()
        return self._sm_clocks[clock]

    def statements(self) -> list[dict[str, Any]]:
        """What the trace says of each clock that placed an event: method, pairs, drift, worst bound.

        The host's own clock needs no words; "same" says that a GPU's clock stands alone.
        """
        out = []
        for clock, bound_ns in self._placed.items():
            m = self._maps[clock]
            if m.method == "same" and clock in HOST_CLOCKS:
                continue
            said: dict[str, Any] = {"clock": clock, "trace_clock": self.trace_clock, "method": m.method}
            if m.method == "fit":
                said |= {"pairs": m.pairs, "pairs_dropped": m.dropped}
                if (drift_ppm := m.drift_ppm) is not None:
                    said["drift_ppm"] = round(drift_ppm, 3)
            if m.method != "assumed":
                said["bound_ns"] = bound_ns + self._moved.get(clock, 0)
            else:
                said["bound"] = "unknown: the offset was assumed"
            out.append(said)
        return out
