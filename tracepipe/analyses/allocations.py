"""Follows allocations from the call that made them to the call that freed them, as far as a
recording shows.
"""

from __future__ import annotations

from array import array
from struct import Struct
from typing import Any

from tracepipe.analyses.allocation_events import (
    ALL_IN_USE,
    DEVICE,
    FREES,
    HOST,
    MAKES,
    MANAGED,
    AllocationEvents,
)
from tracepipe.event.columns import NONE, Bools, Int64s, distinct
from tracepipe.event.vocabulary import MEMORY_IN_USE
from tracepipe.reports.frames.arrays import AnyArray
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.numbered import Numbered
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import Growing, parts, put_away

DOUBLE, UNKNOWN, REFUSED = "double free", "free of an unknown address", "free refused"
IN_USE, FAILED = "address given again while in use", "allocation failed"
FAULTS = (IN_USE, FAILED, DOUBLE, UNKNOWN, REFUSED)
"""The faults; their order is that of the tables."""
Place = tuple[int | None, int | None, str]
"""Process, GPU, kind of memory."""
_KINDS = (DEVICE, MANAGED, HOST, ALL_IN_USE)
_PLACE, _KEY = Struct("<qqB"), Struct("<qQ2?")
_OF_PLACE = [("pid", "<i8"), ("gpu", "<i8"), ("kind", "u1")]
_MOST = (1 << 63) - 1
_COLUMNS = {
    "at_ns": np.int64, "size_bytes": np.int64, "tid": np.int64, "place": np.int32, "site": np.int32,
    "key": np.int32, "fault": np.int8, "before": np.int32, "is_made": np.bool_,
}  # fmt: skip


class Allocations:
    """Allocations, frees and faults: a row for each event, sorted by time, in columns of shape `(rows,)`:

    at_ns, tid, place, site
    size_bytes                      NONE where it is not known
    key                             number of process, side and address; NONE without an address
    is_made                         whether it is an allocation
    ended                           for an allocation, the row of its free, or of the allocation that got its
                                    address while it was in use; NONE where no end is known
    fault                           index into `FAULTS`, NONE for none
    before                          for a fault, the row of the first free, or of the allocation that has the
                                    address; NONE without

    `steps` are the bytes over time. The values of each place are in lists by its number: the last and the
    most bytes, when the most were reached, whether sizes are known at all, the allocations at an address that
    was freed before (`reused`), and the events without an address (`unmatched`).
    """

    def __init__(self, from_calls: bool) -> None:
        self.from_calls = from_calls
        self.columns: dict[str, Growing[Any]] = {name: Growing(kind) for name, kind in _COLUMNS.items()}
        self.ended_column = Growing(np.int32)
        self.steps: dict[str, Growing[Any]] = {
            "ts_ns": Growing(np.int64),
            "place": Growing(np.int32),
            "total_bytes": Growing(np.int64),
        }
        self.sites, self._odd = Numbered(), Numbered()
        self._keys, self._places = Numbered(_KEY.size), Numbered(_PLACE.size)
        self.total_bytes: Any = array("q")
        self.most_bytes: Any = array("q")
        self.most_ns: Any = array("q")
        self.reused: Any = array("i")
        self.unmatched: Any = array("i")
        self.is_known, self.is_counted = bytearray(), bytearray()
        self.counted: Any = array("i")
        """The places whose bytes were counted, in the order of their first events."""

    def __len__(self) -> int:
        return self.ended_column.count

    def column(self, name: str) -> AnyArray:
        """One of the columns, shape `(rows,)`."""
        of = self.ended_column if name == "ended" else self.columns[name]
        return of.so_far(len(self))

    def step_column(self, name: str) -> AnyArray:
        """One of the columns of bytes over time, shape `(steps,)`."""
        return self.steps[name].so_far(self.steps[name].count)

    def put_away(self) -> None:
        """Move addresses and places to files, where there are many. Nothing may be added afterwards. Raises
        OutputError.
        """
        for one in (self.sites, self._odd, self._keys, self._places):
            one.put_away()
        for name in ("total_bytes", "most_bytes", "most_ns", "reused", "unmatched", "counted"):
            setattr(self, name, put_away(getattr(self, name)))

    @property
    def place_count(self) -> int:
        """How many places there are."""
        return len(self._places)

    def place_number(self, pid: int | None, gpu: int | None, kind: str) -> int:
        """The number of a place; a new place gets the next number."""
        packed = _PLACE.pack(NONE if pid is None else pid, NONE if gpu is None else gpu, _KINDS.index(kind))
        number = self._places.number(packed)
        if number == len(self.total_bytes):
            for values in (self.total_bytes, self.most_bytes, self.most_ns, self.reused, self.unmatched):
                values.append(0)
            self.is_known.append(False)
            self.is_counted.append(False)
        return number

    def place(self, number: int) -> Place:
        """The place with a number."""
        pid, gpu, kind = _PLACE.unpack(self._places[number])
        return None if pid == NONE else pid, None if gpu == NONE else gpu, _KINDS[kind]

    @property
    def place_pids(self) -> Int64s:
        """The processes of all places, shape `(places,)`, NONE for an unknown one."""
        pids: Int64s = np.frombuffer(self._places.data, _OF_PLACE)["pid"]
        return pids

    def site(self, number: int) -> str:
        """The text of the site with a number."""
        return self.sites[number].decode("utf-8", "replace")

    def key(self, pid: int | None, address: str, on_host: bool) -> int:
        """The number of an address of a process, on the side of the device or of the host."""
        try:
            value = int(address, 16)
        except ValueError:
            value = -1
        is_odd = hex(value) != address or not 0 <= value < 1 << 64
        if is_odd:
            value = self._odd.number(address.encode("utf-8", "replace"))
        return self._keys.number(_KEY.pack(NONE if pid is None else pid, value, on_host, is_odd))

    def address(self, key: int) -> str | None:
        """The address of a key, None for NONE."""
        if key == NONE:
            return None
        _, value, _, is_odd = _KEY.unpack(self._keys[key])
        return self._odd[value].decode("utf-8", "replace") if is_odd else hex(value)


def allocations(run: Run) -> Allocations:
    """Return all allocations of a recording, sorted by time; from calls where it has no memory events."""
    events = AllocationEvents(run)
    following = _Following(Allocations(events.from_calls))
    for some in events:
        following.follow(some)
    following.found.put_away()
    return following.found


class _Following:
    """Follows which addresses are in use through the recording."""

    def __init__(self, found: Allocations) -> None:
        self.found = found
        self._live, self._freed = array("i"), array("i")
        """By key: the row of the allocation that has the address, and the row of its last free; else NONE."""
        self._rows: list[tuple[Any, ...]] = []
        self._ended: list[tuple[int, int]] = []
        self._steps: list[tuple[int, int, int]] = []

    def follow(self, events: pl.DataFrame) -> None:
        """Process the next events, which are sorted by time."""
        self._first = len(self.found)
        for event in events.iter_rows(named=True):
            effect = event["effect"]
            if event["failed"]:
                self._refused(event)
            elif effect in MAKES:
                self._alloc(event, MAKES[effect])
            elif effect in FREES:
                self._free(event, FREES[effect])
            else:
                kind = ALL_IN_USE if effect == MEMORY_IN_USE else DEVICE
                place = self.found.place_number(event["pid"], event["gpu"], kind)
                self._count(place, event["at_ns"], 0, event["total_bytes"])
        self._keep()

    def _keep(self) -> None:
        """Append the rows that were found to the columns."""
        rows, ended, steps = self._rows, self._ended, self._steps
        self._rows, self._ended, self._steps = [], [], []
        for (name, kind), values in zip(_COLUMNS.items(), zip(*rows, strict=True), strict=bool(rows)):
            self.found.columns[name].extend(np.array(values, kind), len(values))
        self.found.ended_column.extend(NONE, len(rows))
        if ended:
            made, by = np.array(ended, np.int32).T
            self.found.column("ended")[made] = by
        for column, values in zip(self.found.steps.values(), zip(*steps, strict=True), strict=bool(steps)):
            column.extend(np.array(values, np.int64), len(values))

    def _add(
        self, event: dict[str, Any], place: int, key: int, fault: str | None = None, before: int = NONE,
        is_made: bool = False, has_size: bool = True,
    ) -> int:  # fmt: skip
        """Add an event, and return its row."""
        size = event["size_bytes"] if has_size else None
        self._rows.append(
            (
                event["at_ns"],
                NONE if size is None else size,
                NONE if event["tid"] is None else event["tid"],
                place,
                self.found.sites.number(event["site"].encode("utf-8", "replace")),
                key,
                NONE if fault is None else FAULTS.index(fault),
                before,
                is_made,
            )
        )
        return self._first + len(self._rows) - 1

    def _key(self, event: dict[str, Any], side: str) -> int:
        """The key of an event's address; NONE without one."""
        if event["address"] is None:
            return NONE
        key = self.found.key(event["pid"], event["address"], side == HOST)
        if key == len(self._live):
            self._live.append(NONE)
            self._freed.append(NONE)
        return key

    def _of(self, row: int) -> tuple[int, int]:
        """The place and the size of an earlier row."""
        if row >= self._first:
            _, size, _, place, *_ = self._rows[row - self._first]
        else:
            place, size = (int(self.found.column(name)[row]) for name in ("place", "size_bytes"))
        return place, max(0, size)

    def _count(self, place: int, at_ns: int, change_bytes: int, known_bytes: int | None = None) -> None:
        found = self.found
        total = found.total_bytes[place] + change_bytes if known_bytes is None else known_bytes
        # A negative sum comes from allocations that were made before the recording began.
        total = found.total_bytes[place] = min(max(0, total), _MOST)
        if total > found.most_bytes[place] or not found.is_counted[place]:
            found.most_bytes[place], found.most_ns[place] = total, at_ns
        if not found.is_counted[place]:
            found.is_counted[place] = True
            found.counted.append(place)
        found.is_known[place] |= change_bytes != 0 or known_bytes is not None
        self._steps.append((at_ns, place, total))

    def _alloc(self, event: dict[str, Any], side: str) -> None:
        found, at_ns = self.found, event["at_ns"]
        kind = MANAGED if side == DEVICE and "Managed" in event["site"] else side
        place = found.place_number(event["pid"], event["gpu"] if side == DEVICE else None, kind)
        key = self._key(event, side)
        if key == NONE:
            found.unmatched[place] += 1
            self._add(event, place, key, is_made=True)
        else:
            before = self._live[key]
            fault = None if before == NONE else IN_USE
            row = self._live[key] = self._add(event, place, key, fault, before, is_made=True)
            if before != NONE:
                self._ended.append((before, row))
                was_place, size_bytes = self._of(before)
                self._count(was_place, at_ns, -size_bytes)
            found.reused[place] += self._freed[key] != NONE
            self._freed[key] = NONE
        self._count(place, at_ns, event["size_bytes"] or 0, event["total_bytes"])

    def _free(self, event: dict[str, Any], side: str) -> None:
        found, at_ns = self.found, event["at_ns"]
        place = found.place_number(event["pid"], event["gpu"] if side == DEVICE else None, side)
        key = self._key(event, side)
        if key == NONE:
            found.unmatched[place] += 1
            self._count(place, at_ns, -(event["size_bytes"] or 0), event["total_bytes"])
            return
        one, self._live[key] = self._live[key], NONE
        if one == NONE:
            before = self._freed[key]
            self._add(event, place, key, UNKNOWN if before == NONE else DOUBLE, before)
            return
        self._freed[key] = self._add(event, place, key)
        self._ended.append((one, self._freed[key]))
        was_place, size_bytes = self._of(one)
        self._count(was_place, at_ns, -size_bytes, event["total_bytes"])

    def _refused(self, event: dict[str, Any]) -> None:
        """Add the fault of a call that failed, and so changed nothing."""
        side = FREES.get(event["effect"])
        place = self.found.place_number(event["pid"], event["gpu"], side or DEVICE)
        if side is None:
            self._add(event, place, self._key(event, DEVICE), FAILED)
            return
        key = self._key(event, side)
        before = NONE if key == NONE else self._freed[key]
        known = key == NONE or before != NONE or self._live[key] != NONE
        what = REFUSED if known and before == NONE else UNKNOWN if before == NONE else DOUBLE
        self._add(event, place, key, what, before, has_size=False)


def _dead(run: Run) -> Bools:
    """Flags the shapes of main threads that were dead when the scheduler took them off a processor. Shape
    `(shapes,)`.
    """
    switches, every = run.layer("scheduler"), np.arange(len(run.shapes), dtype=np.int32)
    pid = run.shapes.column("pid", every)
    is_main: Bools = (pid != NONE) & (pid == run.shapes.column("tid", every))
    dead = np.zeros(len(every), np.bool_)
    for part in parts(len(switches)):
        ends, of = switches.end_args[part], switches.shape[part]
        for number in distinct(ends[is_main[of] & (ends != NONE)]).tolist():
            if run.args.args(number).get("prev_state") == "dead":
                dead[of[(ends == number) & is_main[of]]] = True
    return dead


def ends_of(run: Run) -> Int64s:
    """The sorted pids of processes that ended during the recording, NONE for an unknown one. Shape `(n,)`."""
    shapes, every = run.shapes, np.arange(len(run.shapes), dtype=np.int32)
    exits = shapes.column("name", every) == shapes.number_of("name", "exit_group")
    gone: Any = np.flatnonzero((exits & run.seen("syscall")) | _dead(run))
    why = str((run.facts.footer or {}).get("ended_by", ""))
    if why.startswith(("exit", "signal")):
        of_calls = np.flatnonzero(run.seen("userspace") | run.seen("memory"))
        pids = shapes.column("pid", of_calls)
        if len(pids) and bool((pids == pids[0]).all()):
            gone = np.append(gone, of_calls[0])
    ended: Int64s = distinct(shapes.numbers("pid", gone, NONE))
    return ended
