"""Follows allocations from the call that made them to the call that freed them, as far as a recording shows;
their sums and peaks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from tracepipe.analyses.cuda_calls import rows_by_effect, rows_named, values_by_names
from tracepipe.analyses.distribution import PERCENTS
from tracepipe.analyses.gpu_work import outermost_rows
from tracepipe.event.columns import NONE, Int64s, Ints, distinct
from tracepipe.event.groups import RowsByNumber
from tracepipe.event.vocabulary import MEMORY_IN_USE
from tracepipe.libraries import np
from tracepipe.store.args import address_in, argument_text, integer, result_in, size_bytes_in
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
_DIGITS_MAX = 64


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


@dataclass
class Place:
    """The memory of a kind that a process has on a GPU: its bytes over time, the allocations at an address
    that was freed before (`reused`), and the events without an address (`unmatched`). `is_known`: sizes are
    known at all.
    """

    number: int
    """Its index in `Allocations.places`."""
    pid: int | None
    gpu: int | None
    kind: str
    reused: int = 0
    unmatched: int = 0
    is_known: bool = False
    changed_ns: array[int] = field(default_factory=lambda: array("q"))
    """The times at which the bytes changed, and the bytes from then on."""
    steps_bytes: array[int] = field(default_factory=lambda: array("q"))

    @property
    def total_bytes(self) -> int:
        """The bytes at the end."""
        return self.steps_bytes[-1] if self.steps_bytes else 0

    @cached_property
    def peak(self) -> tuple[int, int]:
        """The most bytes, and when they were first reached."""
        if not self.steps_bytes:
            return 0, 0
        at = int(np.argmax(self.steps_bytes))
        return self.steps_bytes[at], self.changed_ns[at]


@dataclass
class Nameless:
    """The allocations of a process and side without an address: the sizes that are known. `frees` may be of
    them: they have no address either, or one that no allocation has.
    """

    count: int = 0
    sizes_bytes: array[int] = field(default_factory=lambda: array("q"))
    frees: int = 0

    def has_open(self) -> bool:
        """Whether one of them may not be freed yet."""
        return self.frees < self.count

    def least_kept(self) -> tuple[int, int]:
        """How many of them were surely not freed, and their bytes at the least."""
        kept = max(0, self.count - self.frees)
        unsized = self.count - len(self.sizes_bytes)
        return kept, sum(sorted(self.sizes_bytes)[: max(0, kept - unsized)])


@dataclass(frozen=True, slots=True)
class Allocations:
    """Allocations, frees and faults: a row for each event, sorted by time, in columns of shape `(rows,)`.
    `from_calls`: they are from calls, as the recording has no memory events.
    """

    from_calls: bool
    places: list[Place]
    counted: list[Place]
    """The places whose bytes were counted, in the order of their first events."""
    nameless: list[Nameless]
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
    is_made: Int64s
    """Whether it is an allocation, 0 or 1."""
    ended: Int64s
    """For an allocation, the row of its free, or of the allocation that got its address while it was in use;
    NONE where no end is known."""


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
    of_shape, _ = shapes.threads
    outer: list[str | None] = [None] * len(rows)
    callers: list[str | None] = [None] * len(order)
    if sites:
        outer = _names(run, outermost_rows(run, calls.parent[rows]))
        callers = _callers(run, of_shape, of_shape[shape], at_ns)
    columns: tuple[list[Any], ...] = (
        at_ns.tolist(),
        shapes.values("pid", shape),
        shapes.values("tid", shape),
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


def _text(value: object) -> str | None:
    """A value of an argument as text."""
    text = argument_text(value)
    return text and text.encode("utf-8", "replace").decode()


def _whole(value: object) -> int | None:
    """A value of an argument as an integer of 64 bits, None where it is none."""
    text = _text(value) or ""
    # Python converts no text of thousands of digits.
    whole = int(text) if len(text) <= _DIGITS_MAX and text.removeprefix("-").isdecimal() else None
    return whole if whole is not None and abs(whole) <= _INT64_MAX else None


def _address(args: dict[str, Any]) -> str | None:
    """The address among arguments as hexadecimal, from any notation."""
    text = address_in(args)
    try:
        return text and hex(int(text, 0))
    except ValueError:
        return text


def _names(run: Run, rows: Ints) -> list[str | None]:
    """The names of rows of calls, None for NONE."""
    shapes = run.layer("userspace").shape[rows[rows != NONE]]
    names = iter(run.shapes.texts("name", shapes))
    return [None if row == NONE else next(names) for row in rows.tolist()]


def _callers(run: Run, of_shape: Ints, threads: Ints, at_ns: Int64s) -> list[str | None]:
    """The names of the outermost calls that the events' threads were in, None without one. `of_shape` has the
    thread of each shape.
    """
    calls, is_wanted = run.layer("userspace"), np.isin(of_shape, threads)
    tops = np.flatnonzero(is_wanted[calls.shape] & calls.is_outermost & calls.is_call)
    # The time of an event is the return of its call, at which the next call may begin.
    by_thread = RowsByNumber(of_shape[calls.shape[tops]], tops)
    found = by_thread.last_before(calls.start_ns, threads, at_ns, "left")
    known = np.flatnonzero(found != NONE)
    found[known[calls.end_ns[found[known]] < at_ns[known]]] = NONE
    return _names(run, found)


def _gpus(run: Run, of_shape: Ints, threads: Ints, at_ns: Int64s, gpus: Int64s) -> list[int | None]:
    """The GPUs of events. Of one that does not name it, it is the only one of the machine, or the one that
    the thread chose.
    """
    known = run.facts.footer.gpus or run.facts.header.gpus
    if len(known) == 1 and isinstance(known[0].get("index"), int):
        gpus = np.where(gpus == NONE, known[0]["index"], gpus)
    elif (gpus == NONE).any():
        rows = rows_named(run, "userspace", lambda name: name == "cudaSetDevice")
        calls = run.layer("userspace").rows(rows, "shape", "args", "end_args", "end_ns")
        result, has_result = run.args.result(calls.args, calls.end_args)
        device, has_device = run.args.integers(calls.args, lambda args: _whole(args.get("device")))
        some = np.flatnonzero(has_device & (~has_result | (result == 0)))
        some = some[np.argsort(calls.end_ns[some], kind="stable")]
        by_thread = RowsByNumber(of_shape[calls.shape[some]])
        last = by_thread.last_before(calls.end_ns[some], threads, at_ns, "right")
        # A thread that did not choose a device uses device 0, if any thread chose one.
        chosen = np.append(device[some], 0 if len(some) else NONE)[last]
        gpus = np.where(gpus == NONE, chosen, gpus)
    return [None if gpu < 0 else gpu for gpu in gpus.tolist()]


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
        self._counted: list[Place] = []
        self._nameless: dict[tuple[int | None, bool], Nameless] = {}

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
        columns = np.array(self._rows, np.int64).reshape(-1, 9).T, [np.array(self._ended, np.int64)]
        addresses = [address for _, address, _ in self._keys]
        places, counted = self._by_number, self._counted
        nameless = [*self._nameless.values()]
        return Allocations(from_calls, places, counted, nameless, [*self._sites], addresses, *chain(*columns))

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
        place.steps_bytes.append(min(max(0, total), _INT64_MAX))
        place.changed_ns.append(at_ns)
        if len(place.changed_ns) == 1:
            self._counted.append(place)
        place.is_known |= change_bytes != 0 or known_bytes is not None

    def _alloc(self, event: _Event, side: str) -> None:
        kind = MANAGED if side == DEVICE and "Managed" in event.site else side
        place = self._place(event.pid, event.gpu if side == DEVICE else None, kind)
        key = self._key(event, side)
        if key == NONE:
            place.unmatched += 1
            nameless = self._nameless.setdefault((event.pid, side == HOST), Nameless())
            nameless.count += 1
            if event.size_bytes is not None:
                nameless.sizes_bytes.append(event.size_bytes)
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
        of = event.pid, side == HOST
        nameless = self._nameless.get(of, Nameless())
        if key == NONE:
            place.unmatched += 1
            # Of an allocation with an address, too: a free of that address may be of one without, later.
            self._nameless.setdefault(of, nameless).frees += 1
            self._count(place, event.at_ns, -(event.size_bytes or 0), event.total_bytes)
            return
        if self._live[key] == NONE:
            was_open = nameless.has_open()
            nameless.frees += nameless.count > 0
            if was_open:
                self._add(event, place, key)
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
    shapes = run.shapes
    exits = shapes.column("name") == shapes.number_of("name", "exit_group")
    # Main threads that were dead when the scheduler took them off a processor.
    switches, pid = run.layer("scheduler"), shapes.column("pid")
    is_main = ((pid != NONE) & (pid == shapes.column("tid")))[switches.shape]
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


@dataclass(frozen=True, slots=True)
class Group:
    """The allocations of a group: one of its rows, their number and bytes, how many were never freed, and the
    bytes of these; the percentiles of the known sizes, and of the times from allocation to free.

    Bytes are None where no size is known, and those that were never freed where no address was recorded.
    """

    row: int
    count: int
    total_bytes: int | None
    never_freed: int | None
    never_freed_bytes: int | None
    sizes: list[int] | None
    lived_ns: list[int] | None


def groups_of(run: Run, found: Allocations, by: str, top: int = 0) -> tuple[list[Group], int]:
    """The allocations in groups `by` some columns in SQL, those with the most bytes that were never freed
    first, then those with the most bytes: the first `top`, or all for 0, and how many there are.
    """
    # Another allocation at the address is no free.
    was_freed = (found.is_made == 1) & (found.ended != NONE) & (found.is_made[found.ended] == 0)
    events = {name: getattr(found, name) for name in ("site", "tid", "place", "size_bytes")} | {
        "number": np.arange(len(found.at_ns)),
        "has_address": found.key != NONE,
        "is_live": (found.key != NONE) & (found.ended == NONE),
        "lived_ns": np.where(was_freed, found.at_ns[found.ended] - found.at_ns, NONE),
    }
    percentiles = [percent / 100 for percent in PERCENTS]
    rows = run.store.rows(
        f"""select min(number), count(*), sum(size_bytes) filter (size_bytes >= 0) as total_bytes,
            if(bool_or(has_address), count(*) filter (is_live), null) as live,
            if(live = 0, 0, sum(size_bytes) filter (is_live and size_bytes >= 0)) as live_bytes,
            quantile_disc(size_bytes, {percentiles}) filter (size_bytes >= 0),
            quantile_disc(lived_ns, {percentiles}) filter (lived_ns >= 0), count(*) over ()
        from events group by {by}
        order by coalesce(live_bytes, 0) desc, coalesce(total_bytes, 0) desc, {by}
        {f"limit {top}" if top > 0 else ""}""",
        events={name: column[found.is_made == 1] for name, column in events.items()},
    )
    return [Group(*cells) for *cells, _ in rows], rows[0][-1] if rows else 0


def groups_by_place(run: Run, found: Allocations) -> list[Group]:
    """The allocations of each of `Allocations.places`."""
    groups = {int(found.place[one.row]): one for one in groups_of(run, found, "place")[0]}
    return [groups.get(place.number, Group(NONE, 0, 0, 0, 0, None, None)) for place in found.places]


def never_freed(found: Allocations) -> Int64s:
    """The rows of allocations that were never freed, the largest first. Shape `(n,)`."""
    rows = np.flatnonzero((found.is_made == 1) & (found.key != NONE) & (found.ended == NONE))
    return rows[np.argsort(-np.maximum(found.size_bytes[rows], 0), kind="stable")]


def faults_of(found: Allocations) -> Int64s:
    """The rows of faults, sorted by kind, then by time. Shape `(n,)`."""
    rows = np.flatnonzero(found.fault != NONE)
    return rows[np.argsort(found.fault[rows], kind="stable")]


def given_again(found: Allocations) -> int:
    """How many allocations end because their address was allocated again."""
    return int(found.is_made[found.ended[found.ended != NONE]].sum())


def places_with_most(found: Allocations, most: int) -> tuple[list[Place], int]:
    """The `most` places with the highest peaks, or all for 0, and how many others there are."""
    places = found.counted
    if not 0 < most < len(places):
        return places, 0
    shown = sorted(range(len(places)), key=lambda at: -places[at].peak[0])[:most]
    return [places[at] for at in sorted(shown)], len(places) - most


def live_at(run: Run, found: Allocations, pids: Int64s, at_ns: Int64s) -> list[tuple[int, int]]:
    """How many allocations of processes were live at some times, and their bytes: those that began before,
    and had not ended by then. A pid may be NONE. Shapes `(n,)`.
    """
    rows = np.flatnonzero((found.is_made == 1) & (found.key != NONE))
    of_place = np.array([NONE if place.pid is None else place.pid for place in found.places], np.int64)
    ended = found.ended[rows]
    made = {
        "pid": of_place[found.place[rows]],
        "at_ns": found.at_ns[rows],
        "end_ns": np.where(ended == NONE, _INT64_MAX, found.at_ns[ended]),
        "size_bytes": np.maximum(found.size_bytes[rows], 0),
    }
    # An allocation that ends in the ns of its begin is never live.
    return run.store.rows(
        """select count, size_bytes from (
            select number, sum(change) over past as count, sum(change_bytes) over past as size_bytes from (
                select pid, at_ns, 0 as change, 0 as change_bytes, number from asked
                union all select pid, at_ns + 1, 1, size_bytes, -1 from made
                union all select pid, greatest(end_ns, at_ns + 1), -1, -size_bytes, -1 from made)
            window past as (partition by pid order by at_ns range unbounded preceding))
        where number >= 0 order by number""",
        made=made,
        asked={"pid": pids, "at_ns": at_ns, "number": np.arange(len(pids))},
    )


# The most allocations and frees that are followed: each takes some hundred bytes of memory.
EVENTS_MAX = 100_000
# Parts of the names of PyTorch's kernels and operators; and of its threads: pt_autograd_0, pt_nccl_watchdg.
_OF_PYTORCH = ("at::native::", "c10::", "aten::")
_THREAD_OF_PYTORCH = "pt_"


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
    comms = distinct(run.shapes.column("comm"))
    names = (run.shapes.value("comm", number) or "" for number in comms.tolist())
    if any(name.startswith(_THREAD_OF_PYTORCH) for name in names):
        return True
    return any("/torch/" in (frame.file or "") for frame in run.stacks.frames)


def allocations_in(run: Run) -> int:
    """About how many events and calls allocate or free memory."""
    calls = rows_by_effect(run)
    count = sum(len(rows) for effect, rows in calls.items() if effect.startswith(("alloc", "free")))
    return len(run.layer("memory")) + count


def peaks_of(run: Run) -> list[tuple[Place, Group]]:
    """The memory that processes have on GPUs, and the allocations of it, the highest peak first."""
    found = allocations(run, sites=False)
    peaks = [
        (place, of)
        for place, of in zip(found.places, groups_by_place(run, found), strict=True)
        if place.kind in (DEVICE, MANAGED) and place.is_known and place.peak[0]
    ]
    return sorted(peaks, key=lambda one: -one[0].peak[0])
