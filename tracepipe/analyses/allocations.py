"""Follows allocations from the call that made them to the call that freed them, as far as a recording shows;
their sums and peaks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from tracepipe.analyses.cuda_calls import rows_by_effect, rows_named, values_by_names
from tracepipe.analyses.gpu_work import outermost_rows
from tracepipe.event.columns import NONE, Bools, Floats, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.event.vocabulary import ADDRESS_KEYS, MEMORY_IN_USE
from tracepipe.libraries import np
from tracepipe.store.args import integer, result_in, size_bytes_in
from tracepipe.store.run import Run
from tracepipe.store.schema import UNCLOSED

DEVICE, MANAGED, HOST, ALL_IN_USE = "device", "managed", "host", "in use"
_MAKES = {"alloc": DEVICE, "alloc_host": HOST}
_FREES = {"free": DEVICE, "free_host": HOST}
_EFFECTS = (*_MAKES, *_FREES)
DOUBLE, UNKNOWN, REFUSED = "double free", "free of an unknown address", "free refused"
IN_USE, FAILED = "address given again while in use", "allocation failed"
FAULTS = (IN_USE, FAILED, DOUBLE, UNKNOWN, REFUSED)
"""The faults; their order is that of the tables."""
_NULL = hex(0)
_INT64_MAX = (1 << 63) - 1
_LOW_BITS = 32


class _Event(NamedTuple):
    """An allocation, a free, or a call for one that failed. `total_bytes` is what the recording says to be
    allocated since then.
    """

    at_ns: int
    effect: str
    pid: int | None
    tid: int | None
    gpu: int | None
    size_bytes: int | None
    address: str | None
    total_bytes: int | None
    has_failed: bool
    site: str


@dataclass(slots=True)
class Place:
    """The memory of a kind that a process has on a GPU: the last and the most bytes, when the most were
    reached, the allocations at an address that was freed before (`reused`), and the events without an address
    (`unmatched`). `is_known`: sizes are known at all. `is_counted`: its bytes were counted.
    """

    number: int
    """Its index in `Allocations.places`."""
    pid: int | None
    gpu: int | None
    kind: str
    total_bytes: int = 0
    most_bytes: int = 0
    most_ns: int = 0
    reused: int = 0
    unmatched: int = 0
    is_known: bool = False
    is_counted: bool = False


@dataclass(slots=True)
class Allocations:
    """Allocations, frees and faults: a row for each event, sorted by time, in columns of shape `(rows,)`.
    `from_calls`: they are from calls, as the recording has no memory events.
    """

    from_calls: bool
    places: list[Place]
    counted: Ints
    """The places whose bytes were counted, in the order of their first events."""
    sites: list[str]
    addresses: list[str]
    at_ns: Int64s
    size_bytes: Int64s
    """NONE where it is not known."""
    tid: Int64s
    place: Int64s
    site: Int64s
    key: Int64s
    """The number of process, side and address, an index into `addresses`; NONE without an address."""
    fault: Int64s
    """Index into `FAULTS`, NONE for none."""
    before: Int64s
    """For a fault, the row of the first free, or of the allocation that has the address; NONE without."""
    is_made: Bools
    """Whether it is an allocation."""
    ended: Int64s
    """For an allocation, the row of its free, or of the allocation that got its address while it was in use;
    NONE where no end is known."""
    steps: tuple[Int64s, Int64s, Int64s]
    """Times, places, and the bytes of the place from then on."""

    def __len__(self) -> int:
        return len(self.at_ns)


class _Arguments(NamedTuple):
    """The arguments of an event that are about memory."""

    size_bytes: int | None
    result: int | None
    address: str | None
    call: str | None
    in_use_bytes: int | None
    allocated_bytes: int | None

    @classmethod
    def of(cls, args: dict[str, Any]) -> _Arguments:
        """The arguments that are known."""
        if not args:
            return cls(*(None,) * 6)
        totals = (_whole(args.get(name)) for name in ("total_bytes", "total_allocated"))
        size_bytes, result = integer(size_bytes_in(args)), integer(result_in(args))
        known_bytes = size_bytes if size_bytes is not None and size_bytes >= 0 else None
        return cls(known_bytes, result, _address(args), _text(args.get("call")), *totals)


def allocations(run: Run, *, sites: bool = True) -> Allocations:
    """Return all allocations of a recording, sorted by time; from calls where it has no memory events.
    Without `sites`, their sites lack the outermost calls, which takes less time.
    """
    names = run.shapes.column("name", np.flatnonzero(run.used_shapes("memory")))
    from_calls = not np.isin(names, [run.shapes.number_of("name", effect) for effect in _EFFECTS]).any()
    following = _Following()
    for event in _events(run, from_calls, sites):
        following.follow(event)
    return following.found(from_calls)


def _events(run: Run, from_calls: bool, sites: bool) -> Iterator[_Event]:
    """Yield memory events and calls that allocate or free, sorted by time. Of calls, those that failed count,
    and with `from_calls` all that ended.
    """
    memory, calls, shapes = run.layer("memory"), run.layer("userspace"), run.shapes
    by_effect = rows_by_effect(run)
    rows = np.concatenate([by_effect[effect] for effect in _EFFECTS])
    effects = [effect for effect in _EFFECTS for _ in range(len(by_effect[effect]))]
    of_memory = np.where(memory.kind == UNCLOSED, memory.start_ns, memory.end_ns)
    own = calls.rows(rows, "shape", "args", "end_args", "kind", "end_ns")
    at_ns = np.concatenate([of_memory, own.end_ns])
    order = np.argsort(at_ns, kind="stable")
    shape, args, end_args = (
        np.concatenate([getattr(memory, name), getattr(own, name)])[order]
        for name in ("shape", "args", "end_args")
    )
    at_ns, places = at_ns[order], (order - len(memory)).tolist()
    is_open = (own.kind == UNCLOSED).tolist()
    every = np.arange(len(shapes), dtype=np.int32)
    of_shape, _ = number_rows(shapes.column("pid", every), shapes.column("tid", every))
    outer: list[str | None] = [None] * len(rows)
    callers: list[str | None] = [None] * len(order)
    if sites:
        outermost = outermost_rows(run, calls.parent[rows])
        outer_names = iter(shapes.texts("name", calls.shape[outermost[outermost != NONE]]))
        outer = [None if row == NONE else next(outer_names) for row in outermost.tolist()]
        callers = _callers(run, of_shape, rows, of_shape[shape], at_ns)
    columns: tuple[list[Any], ...] = (
        at_ns.tolist(),
        _optional(shapes.numbers("pid", shape, NONE)),
        _optional(shapes.numbers("tid", shape, NONE)),
        _gpus(run, of_shape, of_shape[shape], at_ns, shapes.numbers("gpu", shape, NONE)),
        shapes.texts("name", shape),
        callers,
        run.args.values(args, _Arguments.of),
        run.args.values(end_args, _Arguments.of),
    )
    for place, ts_ns, pid, tid, gpu, name, caller, begin, end in zip(places, *columns, strict=True):
        size = end.size_bytes if begin.size_bytes is None else begin.size_bytes
        address = end.address if begin.address is None else begin.address
        failed = bool(begin.result if end.result is None else end.result)
        if place >= 0:
            if is_open[place] or not (from_calls or failed):
                continue
            effect, call, total_bytes, around = effects[place], name, None, outer[place] or name
        else:
            effect, failed, call, around = name, False, begin.call, caller
            total_bytes = begin.in_use_bytes if name == MEMORY_IN_USE else begin.allocated_bytes
            if name not in _EFFECTS and total_bytes is None:
                continue
        if address == _NULL:
            # Freeing a null pointer is allowed, and does nothing. For an allocation, a null address means
            # that the address was not read.
            if effect in _FREES:
                continue
            address = None
        site = " > ".join(dict.fromkeys(of for of in (around, call) if of)) or effect
        yield _Event(ts_ns, effect, pid, tid, gpu, size, address, total_bytes, failed, site)


def _optional(values: Ints) -> list[int | None]:
    """The values, None for negative ones."""
    return [None if value < 0 else value for value in values.tolist()]


def _text(value: object) -> str | None:
    """A value of an argument as text."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def _whole(value: object) -> int | None:
    """A value of an argument as an integer of 64 bits, None where it is none."""
    text = _text(value) or ""
    whole = int(text) if text.removeprefix("-").isdecimal() else None
    return whole if whole is not None and abs(whole) <= _INT64_MAX else None


def _address(args: dict[str, Any]) -> str | None:
    """The address among arguments as hexadecimal, from any notation."""
    value = next((args[key] for key in ADDRESS_KEYS if key in args), None)
    if value is None:
        return None
    text = str(value).encode("utf-8", "replace").decode()
    try:
        return hex(int(text, 0))
    except ValueError:
        return text


def _last_before(
    rows_of: RowsByNumber, times_ns: Int64s, threads: Ints, at_ns: Int64s, *, side: Literal["left", "right"]
) -> Int64s:
    """For each event, the last row of its thread whose time is before the event's (`left`), or not after it
    (`right`); else NONE. The rows of a thread are sorted by time. Shapes `(events,)`.
    """
    found = np.full(len(threads), NONE, np.int64)
    for thread, places in RowsByNumber(threads):
        own = rows_of.of(thread)
        at = np.searchsorted(times_ns[own], at_ns[places], side)
        found[places] = np.append(NONE, own)[at]
    return found


def _callers(run: Run, of_shape: Ints, rows: Ints, threads: Ints, at_ns: Int64s) -> list[str | None]:
    """The names of the outermost calls that the events' threads were in, None without one. `of_shape` has the
    thread of each shape, `rows` are the calls that allocate or free.
    """
    calls, is_wanted = run.layer("userspace"), np.zeros(int(of_shape.max(initial=-1)) + 1, np.bool_)
    is_wanted[of_shape[np.flatnonzero(run.used_shapes("memory"))]] = True
    is_wanted[of_shape[calls.shape[rows]]] = True
    tops = np.flatnonzero(is_wanted[of_shape[calls.shape]] & calls.is_outermost & calls.is_call)
    # The time of an event is the return of its call, at which the next call may begin.
    by_thread = RowsByNumber(of_shape[calls.shape[tops]], tops)
    found = _last_before(by_thread, calls.start_ns, threads, at_ns, side="left")
    known = np.flatnonzero(found != NONE)
    found[known[calls.end_ns[found[known]] < at_ns[known]]] = NONE
    names = iter(run.shapes.texts("name", calls.shape[found[found != NONE]]))
    return [None if row == NONE else next(names) for row in found.tolist()]


def _gpus(run: Run, of_shape: Ints, threads: Ints, at_ns: Int64s, gpus: Int64s) -> list[int | None]:
    """The GPUs of events. Of one that does not name it, it is the only one of the machine, or the one that
    the thread chose.
    """
    known = run.facts.footer.gpus or run.facts.header.gpus
    if len(known) == 1 and isinstance(known[0].get("index"), int):
        return _optional(np.where(gpus == NONE, known[0]["index"], gpus))
    if not (gpus == NONE).any():
        return _optional(gpus)
    rows = rows_named(run, "userspace", lambda name: name == "cudaSetDevice")
    calls = run.layer("userspace").rows(rows, "shape", "args", "end_args", "end_ns")
    result, has_result = run.args.result(calls.args, calls.end_args)
    given = run.args.values(calls.args, lambda args: _whole(args.get("device")))
    has_device = np.array([device is not None for device in given], np.bool_)
    chosen_by = np.flatnonzero(has_device & (~has_result | (result == 0)))
    if not len(chosen_by):
        return _optional(gpus)
    chosen_by = chosen_by[np.argsort(calls.end_ns[chosen_by], kind="stable")]
    device = np.array([given[at] for at in chosen_by.tolist()], np.int64)
    by_thread = RowsByNumber(of_shape[calls.shape[chosen_by]])
    chosen = _last_before(by_thread, calls.end_ns[chosen_by], threads, at_ns, side="right")
    # A thread that did not choose a device uses device 0.
    return _optional(np.where(gpus == NONE, np.where(chosen == NONE, 0, device[chosen]), gpus))


class _Following:
    """Follows which addresses are in use through the recording."""

    def __init__(self) -> None:
        self._places: dict[tuple[int | None, int | None, str], Place] = {}
        self._by_number: list[Place] = []
        self._sites: dict[str, int] = {}
        self._keys: dict[tuple[int | None, str, bool], int] = {}
        self._live: list[int] = []
        self._freed: list[int] = []
        """By key: the row of the allocation that has the address, and the row of its last free; else NONE."""
        self._rows: list[tuple[int, ...]] = []
        self._ended: list[int] = []
        self._counted: list[int] = []
        self._steps: list[tuple[int, int, int]] = []

    def follow(self, event: _Event) -> None:
        """Process the next event; events are sorted by time."""
        effect = event.effect
        if event.has_failed:
            self._refused(event)
        elif effect in _MAKES:
            self._alloc(event, _MAKES[effect])
        elif effect in _FREES:
            self._free(event, _FREES[effect])
        else:
            kind = ALL_IN_USE if effect == MEMORY_IN_USE else DEVICE
            self._count(self._place(event.pid, event.gpu, kind), event.at_ns, 0, event.total_bytes)

    def found(self, from_calls: bool) -> Allocations:
        """The allocations that were followed. Nothing may follow afterwards."""
        at_ns, size, tid, place, site, key, fault, before, is_made = (
            np.array(self._rows, np.int64).reshape(-1, 9).T
        )
        steps_ns, step_place, step_bytes = np.array(self._steps, np.int64).reshape(-1, 3).T
        return Allocations(
            from_calls,
            self._by_number,
            np.array(self._counted, np.int64),
            [*self._sites],
            [address for _, address, _ in self._keys],
            at_ns,
            size,
            tid,
            place,
            site,
            key,
            fault,
            before,
            is_made.astype(np.bool_),
            np.array(self._ended, np.int64),
            (steps_ns, step_place, step_bytes),
        )

    def _place(self, pid: int | None, gpu: int | None, kind: str) -> Place:
        place = self._places.get((pid, gpu, kind))
        if place is None:
            place = self._places[pid, gpu, kind] = Place(len(self._by_number), pid, gpu, kind)
            self._by_number.append(place)
        return place

    def _add(
        self, event: _Event, place: Place, key: int, fault: str | None = None, before: int = NONE,
        is_made: bool = False, has_size: bool = True,
    ) -> int:  # fmt: skip
        """Add an event, and return its row."""
        size = event.size_bytes if has_size else None
        self._rows.append(
            (
                event.at_ns,
                NONE if size is None else size,
                NONE if event.tid is None else event.tid,
                place.number,
                self._sites.setdefault(event.site, len(self._sites)),
                key,
                NONE if fault is None else FAULTS.index(fault),
                before,
                is_made,
            )
        )
        self._ended.append(NONE)
        return len(self._rows) - 1

    def _key(self, event: _Event, side: str) -> int:
        """The key of an event's address; NONE without one."""
        if event.address is None:
            return NONE
        key = self._keys.setdefault((event.pid, event.address, side == HOST), len(self._keys))
        if key == len(self._live):
            self._live.append(NONE)
            self._freed.append(NONE)
        return key

    def _end(self, row: int, by: int, at_ns: int, known_bytes: int | None = None) -> None:
        """End the allocation of a row by that of another row."""
        self._ended[row] = by
        _, size, _, place, *_ = self._rows[row]
        self._count(self._by_number[place], at_ns, -max(0, size), known_bytes)

    def _count(self, place: Place, at_ns: int, change_bytes: int, known_bytes: int | None = None) -> None:
        total = place.total_bytes + change_bytes if known_bytes is None else known_bytes
        # A negative sum comes from allocations that were made before the recording began.
        total = place.total_bytes = min(max(0, total), _INT64_MAX)
        if total > place.most_bytes or not place.is_counted:
            place.most_bytes, place.most_ns = total, at_ns
        if not place.is_counted:
            place.is_counted = True
            self._counted.append(place.number)
        place.is_known |= change_bytes != 0 or known_bytes is not None
        self._steps.append((at_ns, place.number, total))

    def _alloc(self, event: _Event, side: str) -> None:
        kind = MANAGED if side == DEVICE and "Managed" in event.site else side
        place = self._place(event.pid, event.gpu if side == DEVICE else None, kind)
        key = self._key(event, side)
        if key == NONE:
            place.unmatched += 1
            self._add(event, place, key, is_made=True)
        else:
            before = self._live[key]
            fault = None if before == NONE else IN_USE
            row = self._live[key] = self._add(event, place, key, fault, before, is_made=True)
            if before != NONE:
                self._end(before, row, event.at_ns)
            place.reused += self._freed[key] != NONE
            self._freed[key] = NONE
        self._count(place, event.at_ns, event.size_bytes or 0, event.total_bytes)

    def _free(self, event: _Event, side: str) -> None:
        place = self._place(event.pid, event.gpu if side == DEVICE else None, side)
        key = self._key(event, side)
        if key == NONE:
            place.unmatched += 1
            self._count(place, event.at_ns, -(event.size_bytes or 0), event.total_bytes)
            return
        one, self._live[key] = self._live[key], NONE
        if one == NONE:
            before = self._freed[key]
            self._add(event, place, key, UNKNOWN if before == NONE else DOUBLE, before)
            return
        self._freed[key] = self._add(event, place, key)
        self._end(one, self._freed[key], event.at_ns, event.total_bytes)

    def _refused(self, event: _Event) -> None:
        """Add the fault of a call that failed, and so changed nothing."""
        side = _FREES.get(event.effect)
        place = self._place(event.pid, event.gpu, side or DEVICE)
        if side is None:
            self._add(event, place, self._key(event, DEVICE), FAILED)
            return
        key = self._key(event, side)
        before = NONE if key == NONE else self._freed[key]
        known = key == NONE or before != NONE or self._live[key] != NONE
        what = REFUSED if known and before == NONE else UNKNOWN if before == NONE else DOUBLE
        self._add(event, place, key, what, before, has_size=False)


def ends_of(run: Run) -> Int64s:
    """The sorted pids of processes that ended during the recording, NONE for an unknown one. Shape `(n,)`."""
    shapes, every = run.shapes, np.arange(len(run.shapes), dtype=np.int32)
    exits = shapes.column("name", every) == shapes.number_of("name", "exit_group")
    # Main threads that were dead when the scheduler took them off a processor.
    switches, pid = run.layer("scheduler"), shapes.column("pid", every)
    is_main = ((pid != NONE) & (pid == shapes.column("tid", every)))[switches.shape]
    ends = distinct(switches.end_args[is_main & (switches.end_args != NONE)])
    states = run.args.values(ends, lambda args: args.get("prev_state"))
    dead = ends[np.array([state == "dead" for state in states], np.bool_)]
    gone: Any = np.flatnonzero(exits & run.used_shapes("syscall"))
    gone = np.append(gone, switches.shape[is_main & np.isin(switches.end_args, dead)])
    why = run.facts.footer.ended_by
    if why.startswith(("exit", "signal")):
        of_calls = np.flatnonzero(run.used_shapes("userspace") | run.used_shapes("memory"))
        pids = shapes.column("pid", of_calls)
        if len(pids) and bool((pids == pids[0]).all()):
            gone = np.append(gone, of_calls[0])
    return distinct(shapes.numbers("pid", gone, NONE))


class AllocationSums:
    """The number and the bytes of the allocations in each of `count` groups. `numbers` has the group of each
    row, shape `(rows,)`.
    """

    def __init__(self, found: Allocations, numbers: Ints, count: int) -> None:
        size, of = found.size_bytes[found.is_made], numbers[found.is_made]
        has_address, is_sized = found.key[found.is_made] != NONE, size != NONE
        is_live = has_address & (found.ended[found.is_made] == NONE)
        self.count, self._sized, self._addressed, self._live, self._live_sized = (
            np.bincount(of[which], minlength=count)
            for which in (slice(None), is_sized, has_address, is_live, is_live & is_sized)
        )
        self._bytes, self._live_bytes = np.zeros((2, count, 2), np.int64)
        for halves, which in ((self._bytes, is_sized), (self._live_bytes, is_live & is_sized)):
            # In two halves, as sums of many large sizes exceed 64 bits.
            np.add.at(halves[:, 0], of[which], size[which] >> _LOW_BITS)
            np.add.at(halves[:, 1], of[which], size[which] & ((1 << _LOW_BITS) - 1))

    def bytes_of(self, number: int) -> int | None:
        """The bytes of a group's allocations with known sizes; None where it has some, but no size
        is known.
        """
        return _known(self._bytes[number], self.count[number], self._sized[number])

    def never_freed(self, number: int) -> tuple[int | None, int | None]:
        """How many of a group were never freed, and their bytes; None where no address was recorded."""
        if self.count[number] and not self._addressed[number]:
            return None, None
        live = int(self._live[number])
        return live, _known(self._live_bytes[number], live, self._live_sized[number])

    def most_first(self) -> Int64s:
        """The groups that have allocations, those with the most bytes that were never freed first, then by
        all bytes. Shape `(n,)`.
        """
        all_bytes, live_bytes = (
            of[:, 0] * float(1 << _LOW_BITS) + of[:, 1] for of in (self._bytes, self._live_bytes)
        )
        some = np.flatnonzero(self.count)
        return some[np.lexsort((-all_bytes[some], -live_bytes[some]))]


def _known(halves: Ints, count: int, sized: int) -> int | None:
    total = (int(halves[0]) << _LOW_BITS) + int(halves[1])
    return total if sized or not count else None


class Sites:
    """Allocations in groups by site (the call that made them), thread and place, sorted by these."""

    def __init__(self, found: Allocations) -> None:
        self._found = found
        numbers, self._first = number_rows(found.site, found.tid, found.place)
        self.sums = AllocationSums(found, numbers, len(self._first))
        rows = np.flatnonzero(found.is_made)
        self._rows = RowsByNumber(numbers[rows], rows)

    def first(self, number: int) -> int:
        """The first row of a group."""
        return int(self._first[number])

    def sizes(self, number: int) -> Int64s:
        """The known sizes of a group's allocations. Shape `(n,)`."""
        sizes = self._found.size_bytes[self._rows.of(number)]
        known: Int64s = sizes[sizes != NONE]
        return known

    def lived_ns(self, number: int) -> Int64s:
        """The times from allocation to free of a group's allocations that were freed. Shape `(n,)`."""
        rows, found = self._rows.of(number), self._found
        ended = found.ended[rows]
        # Another allocation at the address is no free.
        was_freed = (ended != NONE) & ~found.is_made[ended]
        lived_ns: Int64s = found.at_ns[ended[was_freed]] - found.at_ns[rows[was_freed]]
        return lived_ns


def never_freed(found: Allocations) -> Int64s:
    """The rows of allocations that were never freed, the largest first. Shape `(n,)`."""
    rows = np.flatnonzero(found.is_made & (found.key != NONE) & (found.ended == NONE))
    return rows[np.argsort(-np.maximum(found.size_bytes[rows], 0), kind="stable")]


def faults_of(found: Allocations) -> Int64s:
    """The rows of faults, sorted by kind, then by time. Shape `(n,)`."""
    rows = np.flatnonzero(found.fault != NONE)
    return rows[np.argsort(found.fault[rows], kind="stable")]


def given_again(found: Allocations) -> int:
    """How many allocations end because their address was allocated again."""
    return int(np.count_nonzero(found.is_made[found.ended[found.ended != NONE]]))


def places_with_most(found: Allocations, most: int) -> tuple[Ints, int]:
    """The `most` places with the highest peaks, or all for 0, shape `(n,)`, and how many others there are."""
    some = found.counted
    if not 0 < most < len(some):
        return some, 0
    peaks = np.array([found.places[number].most_bytes for number in some.tolist()])
    return some[np.sort(np.argsort(-peaks, kind="stable")[:most])], len(some) - most


def steps_of(found: Allocations, places: Ints) -> Iterator[tuple[int, Int64s, Int64s]]:
    """Yield each of some places, with the times at which its bytes changed and the bytes from then on, shapes
    `(steps,)`.
    """
    ts_ns, of, total_bytes = found.steps
    by_place = RowsByNumber(of)
    for place in places.tolist():
        rows = by_place.of(place)
        yield place, ts_ns[rows], total_bytes[rows]


_Sums = tuple[Int64s, Floats]
"""Sorted times, and the sum of the bytes before each and of all; shapes `(n,)` and `(n + 1,)`."""


class LiveAt:
    """Answers how many allocations of a process were live at a time, and their bytes."""

    def __init__(self, found: Allocations) -> None:
        self._found = found
        pids = np.array([NONE if place.pid is None else place.pid for place in found.places], np.int64)
        rows = np.flatnonzero(found.is_made & (found.key != NONE))
        self._rows = RowsByNumber(pids[found.place[rows]], rows)
        self._sums: dict[int, tuple[_Sums, _Sums]] = {}

    def at(self, pid: int | None, at_ns: int) -> tuple[int, int]:
        """The count and the bytes of the allocations that began before a time, and had not ended by then."""
        known = NONE if pid is None else pid
        if known not in self._sums:
            # Only one process is kept, as processes seldom end contexts in turn.
            self._sums = {known: self._sums_of(self._rows.of(known))}
        begun, ended = (_before(sums, at_ns) for sums in self._sums[known])
        return begun[0] - ended[0], round(begun[1] - ended[1])

    def _sums_of(self, rows: Ints) -> tuple[_Sums, _Sums]:
        """The sorted begins of allocations and their cumulative bytes, and the same for their ends."""
        at_ns, size = self._found.at_ns, np.maximum(self._found.size_bytes[rows], 0)
        ended = self._found.ended[rows]
        has_ended = ended != NONE
        # An allocation that ends in the ns of its begin is never live.
        ends_ns = np.maximum(at_ns[ended[has_ended]], at_ns[rows[has_ended]] + 1) - 1
        order = np.argsort(ends_ns, kind="stable")
        return (at_ns[rows], _sums(size)), (ends_ns[order], _sums(size[has_ended][order]))


def _sums(sizes: Ints) -> Floats:
    return np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])


def _before(sums: _Sums, at_ns: int) -> tuple[int, float]:
    """How many times are before `at_ns`, and the sum of their bytes."""
    place = int(np.searchsorted(sums[0], at_ns, "left"))
    return place, float(sums[1][place])


# The most allocations and frees that are followed: each takes some hundred bytes of memory.
EVENTS_MAX = 100_000
# Parts of the names of PyTorch's kernels and operators; and of its threads: pt_autograd_0, pt_nccl_watchdg.
_OF_PYTORCH = ("at::native::", "c10::", "aten::")
_THREAD_OF_PYTORCH = "pt_"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a process had on one GPU at a time, and when; the number of its allocations, and of
    those that were not freed (`kept`).
    """

    pid: int | None
    gpu: int | None
    peak_bytes: int
    at_ns: int
    allocations: int
    kept: int
    kept_bytes: int


def _is_pytorch(name: str) -> bool:
    return any(part in name for part in _OF_PYTORCH)


def keeps_segments(run: Run) -> bool:
    """Whether the allocations are segments of PyTorch's caching allocator, judged by PyTorch's kernels,
    operators, threads or Python frames. (PyTorch's profiler records the allocations inside the segments.)
    """
    if run.facts.source == "chrome":
        return False
    if any(True in values_by_names(run, layer, _is_pytorch)[1] for layer in ("gpu_kernel", "annotation")):
        return True
    if run.warp_table.launches.flags_by_names(_is_pytorch).any():
        return True
    comms = distinct(run.shapes.column("comm", np.arange(len(run.shapes), dtype=np.int32)))
    names = (run.shapes.value("comm", number) or "" for number in comms.tolist())
    if any(name.startswith(_THREAD_OF_PYTORCH) for name in names):
        return True
    return any("/torch/" in (frame.file or "") for frame in run.stacks.frames)


def allocations_in(run: Run) -> int:
    """About how many events and calls allocate or free memory."""
    calls = rows_by_effect(run)
    count = sum(len(rows) for effect, rows in calls.items() if effect.startswith(("alloc", "free")))
    return len(run.layer("memory")) + count


def peaks_of(run: Run) -> list[Peak]:
    """The peaks of each process and GPU, the highest first."""
    found = allocations(run, sites=False)
    sums = AllocationSums(found, found.place, len(found.places))
    peaks = [
        Peak(
            place.pid,
            place.gpu,
            place.most_bytes,
            place.most_ns,
            int(sums.count[place.number]),
            *(of or 0 for of in sums.never_freed(place.number)),
        )
        for place in found.places
        if place.kind in (DEVICE, MANAGED) and place.is_known and place.most_bytes
    ]
    return sorted(peaks, key=lambda peak: -peak.peak_bytes)
