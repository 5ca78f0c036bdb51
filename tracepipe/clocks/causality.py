"""Relates the clock of a GPU, where a recording has no pairs of it, by what must be true of each launch.

    cuLaunchKernel ├──────┤            cuCtxSynchronize ├──────────┤
                   began  returned                      began      waited
                            first entry ├── kernel ──┤ last exit

A kernel starts after its launch began, and has ended when a call returns that began after the launch had
returned, and waited for all work of the device. So its first entry is, on the host's clock, from `began` to
`waited` less the length of the kernel. That is a clock pair, if a wide one, and those of all launches narrow
each other. This is a proof as long as clocks drift by no more than crystals do.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np

from tracepipe.clocks.maps import CRYSTAL_PPM, ClockMap, ClockPair, Method, Pairs, fit
from tracepipe.errors import ClockError
from tracepipe.event.columns import SPECIAL, SourceBatch, unsigned
from tracepipe.event.model import GLOBALTIMER, TIME_LIMIT_NS
from tracepipe.event.shape import Shape, ShapeColumn
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Warps

_WAITS: Final = re.compile(r"cu(Ctx|daDevice|daThread)Synchronize(_v\d+)?(_ptsz|_ptds)?")
_CHOICES: Final = re.compile(
    r"cuda(SetDevice|DeviceReset)|cuCtx((Set|Push|Pop)Current|Create|Destroy)(_v\d+)?(_ptsz)?"
)
_LAUNCH, _WAIT, _BEGINS, _ENDS, _OF_GPU, _CHOICE = 1, 2, 4, 8, 16, 32
# Beyond this many launches, only every second one is noted, then every fourth …
_NOTED_MAX: Final = 1 << 15
# 2⁶⁴ divided by the golden ratio, which spreads launch numbers.
_SPREADING: Final = 0x9E3779B97F4A7C15
_Chosen = tuple[object, object]
"""The device and the context that a thread chose; a time if the call does not state which."""
_ANY: Final = None
"""The launch of work without a number, which may be of any launch."""


def is_of_gpu(clock: str) -> bool:
    """Whether a clock is that of a GPU."""
    return clock.startswith(GLOBALTIMER)


@dataclass(slots=True)
class _Launch:
    began_ns: int
    chosen: _Chosen
    waited_ns: int | None = None


@dataclass(slots=True)
class _Work:
    """All work of a launch on a clock: its first entry and its last exit."""

    first_ns: int
    last_ns: int
    name: str


class Bounds(NamedTuple):
    """The host's times between which the first entry of some work must be."""

    launch: int | None
    name: str
    first_ns: int
    low_ns: int
    high_ns: int


@dataclass(slots=True)
class LaunchSpan:
    """From the begin of the first launch to the return of the call that waited for the last ones, None if
    there is no such call.
    """

    began_ns: int
    waited_ns: int | None


@dataclass(slots=True)
class _Thread:
    """The calls of a thread that are open; the launches for which nothing has waited since they returned, and
    when that was; the return of the last call that waited for any. `unwaited` counts all launches for which
    nothing is known to have waited. `chosen` is what the thread chose last, and `pushed` what a pop restores.
    """

    open: list[tuple[int, int, _Launch | None]] = field(default_factory=list)
    returned: deque[_Launch] = field(default_factory=lambda: deque(maxlen=_NOTED_MAX))
    waiting: deque[tuple[int, _Launch]] = field(default_factory=lambda: deque(maxlen=_NOTED_MAX))
    waited_ns: int | None = None
    unwaited: int = 0
    chosen: _Chosen = (None, None)
    pushed: list[_Chosen] = field(default_factory=list)

    def choose(self, name: str, chosen: object) -> None:
        """Note a call that chooses the device or the context of the next calls."""
        if "Pop" in name:
            self.chosen = self.pushed.pop() if self.pushed else (self.chosen[0], chosen)
            return
        if "Push" in name or "Create" in name:
            self.pushed.append(self.chosen)
            del self.pushed[:-64]
        elif "Set" not in name:  # what was pushed may be gone
            self.pushed.clear()
        self.chosen = (chosen, self.chosen[1]) if "Device" in name else (self.chosen[0], chosen)


@dataclass(slots=True)
class Causality:
    """Notes the launches, waits and work of a recording, batch by batch."""

    tables: Tables
    host_clock: str
    """The clock of events that name none."""
    is_complete: bool = True
    """Whether nothing was lost, so that work without a number is of a launch that is known."""
    leave_out: frozenset[str] = frozenset()
    """Clocks that are placed by other means."""
    _kinds: ShapeColumn = field(init=False)
    _threads: dict[tuple[int | None, int | None], _Thread] = field(default_factory=dict)
    _launches: dict[tuple[int | None, int | None], _Launch] = field(default_factory=dict)
    _work: dict[tuple[str, int | None, int | None], _Work] = field(default_factory=dict)
    _clocks_of: dict[int | None, set[str]] = field(default_factory=dict)
    """The clocks of all work of each process, and by None of work without a number."""
    _mask: int = 0
    _first_ns: int | None = None
    _end_ns: int | None = None
    """The end of the recording, before which all that it has has ended."""

    def __post_init__(self) -> None:
        self._kinds = ShapeColumn(self.tables, self._kind, np.uint8)

    def _kind(self, shape: Shape, _: int) -> int:
        if shape.clock is not None and self._is_of_gpu(shape.clock):
            return _OF_GPU
        if shape.type != "userspace":
            return 0
        if _CHOICES.fullmatch(shape.name):
            return _CHOICE | _BEGINS * (shape.phase != "E") | _ENDS * (shape.phase in "EX")
        if shape.phase not in ("B", "E", "X"):
            return 0
        if shape.clock not in (None, self.host_clock):
            return 0
        of = _LAUNCH * (shape.has_launch or "Launch" in shape.name) | _WAIT * (
            _WAITS.fullmatch(shape.name) is not None
        )
        return of and of | _BEGINS * (shape.phase in "BX") | _ENDS * (shape.phase in "EX")

    def _is_of_gpu(self, clock: str) -> bool:
        return is_of_gpu(clock) and clock != self.host_clock and clock not in self.leave_out

    def add(self, batch: SourceBatch) -> None:
        """Note what a batch has."""
        events, tables = batch.events, self.tables
        kinds = self._kinds.values()[events.shape]
        for at in np.flatnonzero(kinds & (_LAUNCH | _WAIT | _CHOICE)).tolist():
            self._call(batch, at, int(kinds[at]))
        of_gpu = np.flatnonzero(kinds & _OF_GPU)
        for number in np.unique(events.shape[of_gpu]).tolist():
            rows = of_gpu[events.shape[of_gpu] == number]
            shape = tables.shapes[number]
            assert shape is not None and shape.clock is not None
            first_ns, last_ns = events.ts_ns[rows], events.ts_ns[rows] + events.dur_ns[rows]
            if not shape.has_launch:
                self._done(shape.clock, None, _ANY, int(first_ns.min()), int(last_ns.max()), shape.name)
                continue
            launches, of = np.unique(events.launch[rows], return_inverse=True)
            firsts = np.full(len(launches), TIME_LIMIT_NS)
            lasts = np.zeros(len(launches), np.int64)
            np.minimum.at(firsts, of, first_ns)
            np.maximum.at(lasts, of, last_ns)
            for launch, first, last in zip(launches.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
                self._done(shape.clock, shape.pid, unsigned(launch), first, last, shape.name)
        for at in np.flatnonzero(events.shape == SPECIAL).tolist() if batch.others else ():
            self._other(batch.others[int(events.args[at])])

    def _other(self, other: object) -> None:
        if isinstance(other, Warps) and len(other):
            of = other.launched
            exits_ns = other.last_of_exits(other.exit_ns)
            first_ns = other.ts_ns + int(other.entry_ns.min())
            last_ns = other.ts_ns + int((other.entry_ns + np.maximum(exits_ns, 0)).max())
            clock = of.get("clock", self.host_clock)
            if self._is_of_gpu(clock):
                self._done(
                    clock, of.get("pid"), of.get("launch", _ANY), first_ns, last_ns, of.get("name", "")
                )
        elif isinstance(other, dict) and other["type"] == "footer":
            self._end_ns = other.get("end", {}).get(f"{self.host_clock}_ns")
        elif (
            isinstance(other, dict) and other["type"] == "loss" and other.get("layer") in (None, "userspace")
        ):
            self.is_complete = False

    def _is_noted(self, launch: int | None) -> bool:
        return launch is _ANY or not (launch * _SPREADING >> 40) & self._mask

    def _done(
        self, clock: str, pid: int | None, launch: int | None, first_ns: int, last_ns: int, name: str
    ) -> None:
        """Note work, which may be a part of that of its launch."""
        key = clock, None if launch is _ANY else pid, launch
        self._clocks_of.setdefault(key[1], set()).add(clock)
        if not self._is_noted(launch):
            return
        if (work := self._work.get(key)) is None:
            self._work[key] = _Work(first_ns, last_ns, name)
            if len(self._work) > _NOTED_MAX:
                self._thin()
        else:
            work.first_ns, work.last_ns = min(work.first_ns, first_ns), max(work.last_ns, last_ns)

    def _thin(self) -> None:
        """Forget every second launch."""
        self._mask = 2 * self._mask + 1
        self._launches = {key: one for key, one in self._launches.items() if self._is_noted(key[1])}
        self._work = {key: one for key, one in self._work.items() if self._is_noted(key[2])}

    def _call(self, batch: SourceBatch, at: int, kind: int) -> None:
        """Note the begin or the end of a launch or a wait, or both, or a choice."""
        events = batch.events
        shape = self.tables.shapes[int(events.shape[at])]
        assert shape is not None
        thread = self._threads.setdefault((shape.pid, shape.tid), _Thread())
        ts_ns, of = int(events.ts_ns[at]), kind & (_LAUNCH | _WAIT)
        if kind & _CHOICE:
            unknown, args = f"at {ts_ns}", self.tables.args(int(events.args[at]))
            if kind & _BEGINS:
                is_named = "Create" not in shape.name and "Destroy" not in shape.name
                chosen = args.get("device", args.get("context", unknown)) if is_named else unknown
                thread.choose(shape.name, chosen)
            if kind & _ENDS and not self._succeeded(int(events.args[at])):
                thread.chosen = unknown, unknown
            return
        if kind & _BEGINS:
            launch = None
            if of == _LAUNCH:
                launch = _Launch(ts_ns, thread.chosen)
                thread.unwaited += 1
                number = unsigned(int(events.launch[at])) if shape.has_launch else None
                if number is not None and self._is_noted(number):
                    before = self._launches.get((shape.pid, number))
                    if before is not None and all(one is not before for *_, one in thread.open):
                        launch.began_ns = before.began_ns  # the number is used again: work may be of either
                    self._launches[shape.pid, number] = launch
                    if len(self._launches) > _NOTED_MAX:
                        self._thin()
                self._first_ns = ts_ns if self._first_ns is None else min(ts_ns, self._first_ns)
            thread.open.append((of, ts_ns, launch))
            del thread.open[:-64]
        if not kind & _ENDS:
            return
        end_ns = ts_ns + int(events.dur_ns[at]) if kind & _BEGINS else ts_ns
        while thread.open:
            was, began_ns, launch = thread.open.pop()
            if was == of:
                break
        else:
            return
        if end_ns < began_ns:  # the lines are not in order: begin and end are of two calls
            return
        if launch is not None:
            thread.returned.append(launch)
            # Of unknown threads, the end may be that of another launch that is open.
            if shape.tid is not None or all(one is None for *_, one in thread.open):
                thread.waiting.extend((end_ns, one) for one in thread.returned)
                thread.returned.clear()
        elif self._succeeded(int(events.args[at])):
            others = []  # it may not have waited for them
            while thread.waiting and thread.waiting[0][0] <= began_ns:
                one = thread.waiting.popleft()
                if one[1].chosen != thread.chosen:
                    others.append(one)
                    continue
                one[1].waited_ns = thread.waited_ns = end_ns
                thread.unwaited -= 1
            thread.waiting.extendleft(reversed(others))

    def _succeeded(self, number: int) -> bool:
        args = self.tables.args(number)
        return args.get("result", args.get("retval", args.get("ret", 0))) == 0

    def span(self) -> LaunchSpan | None:
        """The span of all launches; None without one, or where some may have been lost."""
        if self._first_ns is None or not self.is_complete:
            return None
        ends_ns = [
            None if one.unwaited else one.waited_ns
            for one in self._threads.values()
            if one.unwaited or one.waited_ns is not None
        ]
        return LaunchSpan(self._first_ns, None if None in ends_ns else max(ns or 0 for ns in ends_ns))

    def maps(self) -> dict[str, ClockMap]:
        """The maps of the clocks that this relates. Raises ClockError where a launch contradicts others."""
        return {
            clock: _map(clock, bounds)
            for clock in dict.fromkeys(clock for clock, *_ in self._work)
            if (bounds := self._bounds(clock))
        }

    def _bounds(self, clock: str) -> list[Bounds]:
        """The bounds of the work on a clock. Work of which only the begin is bounded is bounded by others."""
        found: list[tuple[int | None, _Work, int, int | None]] = []
        for (of, pid, launch), work in self._work.items():
            call = self._launches.get((pid, launch))
            if of == clock and launch is not _ANY and call is not None:
                # A call waits for the work of one GPU. Work without a number may be of any process.
                is_one = len(self._clocks_of[pid] | self._clocks_of.get(None, set())) == 1
                waited_ns = call.waited_ns if is_one else None
                found.append((launch, work, call.began_ns, waited_ns or self._end_ns))
        if not found and (span := self.span()) and (any_work := self._work.get((clock, None, _ANY))):
            is_one = len(set().union(*self._clocks_of.values())) == 1
            waited_ns = span.waited_ns if is_one else None
            found.append((_ANY, any_work, span.began_ns, waited_ns or self._end_ns))
        known = [
            (work.last_ns, waited_ns - work.last_ns)
            for _, work, _, waited_ns in found
            if waited_ns is not None
        ]
        if not known:
            return []
        known_ns, offset_ns = min(known, key=lambda one: one[1])
        bounds = []
        for launch, work, low_ns, waited_ns in found:
            if waited_ns is None:
                waited_ns = work.last_ns + offset_ns + drift_ns_in(work.last_ns - known_ns)
            high_ns = waited_ns - (work.last_ns - work.first_ns) + drift_ns_in(work.last_ns - work.first_ns)
            bounds.append(Bounds(launch, work.name, work.first_ns, low_ns, high_ns))
        return sorted(bounds, key=lambda one: one.first_ns)


def drift_ns_in(length_ns: int) -> int:
    """By how much two clocks may be apart after some time."""
    return abs(length_ns) * 2 * CRYSTAL_PPM // 1_000_000 + 1


def _map(clock: str, bounds: list[Bounds]) -> ClockMap:
    """The map of a clock through the bounds of its launches."""
    for ordered in (bounds, bounds[::-1]):
        least, before_ns = ordered[0].low_ns - ordered[0].first_ns, ordered[0].first_ns
        for one in ordered:
            drift_ns, before_ns = drift_ns_in(one.first_ns - before_ns), one.first_ns
            least = max(least - drift_ns, one.low_ns - one.first_ns)
            if least > one.high_ns - one.first_ns:
                by_ns = least - (one.high_ns - one.first_ns)
                which = "all launches" if one.launch is _ANY else f"launch {one.launch}"
                raise ClockError(
                    f"clock {clock} has no pairs, and cannot be placed by launches: the work of {which} "
                    f"({one.name}) would end {by_ns} ns after the call that waited for it",
                    "The GPU's times are of another run, or the host's are. "
                    f"--assume-offset {clock}=NS places them as they are.",
                )
    pairs = Pairs.of(
        ClockPair(one.first_ns, (one.low_ns + one.high_ns) // 2, (one.high_ns - one.low_ns + 1) // 2)
        for one in bounds
    )
    return replace(fit(clock, pairs), method=Method.LAUNCHES)
