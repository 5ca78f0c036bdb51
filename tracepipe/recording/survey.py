"""Finds the numbers of a recording, and what other recordings may have too, by reading it once before it is
merged with them.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from pathlib import PurePath
from typing import Final

import numpy as np

from tracepipe.clocks.anchors import REALTIME, Source, is_one_host, reference
from tracepipe.clocks.common_events import CELL_BITS, CommonEvents
from tracepipe.errors import InputError
from tracepipe.event.columns import NONE, SPECIAL, Bools, Bytes, Int64s, Ints, TraceBatch
from tracepipe.event.origins import HOSTS_MAX, IDS_PER_HOST, Numbers, Origins, id_on
from tracepipe.event.shape import Shape, ShapeColumn
from tracepipe.event.tables import Tables
from tracepipe.event.vocabulary import IS_FUNCTION, KERNEL, LAUNCHES
from tracepipe.event.warps import PlacedWarps
from tracepipe.recording.reading import OpenRecording, Reading
from tracepipe.units import MADE_UP

# The most processes of a recording that are noted. A machine has some thousand.
_PROCESSES_MAX: Final = 1 << 16
# In formats with several processes, a launch number has CUPTI's number in these bits and the process above.
_CORRELATION: Final = (1 << 32) - 1
# 2⁶⁴ divided by the golden ratio. It is odd, so that keys spread over all numbers.
_SPREADING: Final = np.uint64(0x9E3779B97F4A7C15)
_HAS_LAUNCH, _IS_NCCL, _BEGINS, _ENDS, _LAUNCHES = 1, 2, 4, 8, 16
# At most this many launches are examined one by one.
_KERNELS_MAX: Final = 1 << 16
# Collectives in which every rank needs data of all others: all ranks end at nearly the same time.
_OF_ALL: Final = ("all", "reduce_scatter", "barrier")
_COLLECTIVE: Final = ("Collective name", "Process Group Name", "Process Group Ranks", "Seq")


@dataclass(slots=True)
class Survey:
    """The processes and GPUs of a recording, its number of processors, its highest launch, its times, and
    what other recordings may have too. `realtime_ns` is by how much CLOCK_REALTIME was ahead of the times;
    None where that is not known.
    """

    tables: Tables
    common: CommonEvents
    realtime_ns: int | None = None
    pids: set[int] = field(default_factory=set)
    gpus: set[int] = field(default_factory=set)
    cpus: int = 0
    launches: int = 0
    first_ns: int = 0
    last_ns: int = 0
    end_ns: int = 0
    """The end of the last whole slice, or the time of the last event."""
    is_begun: bool = False

    _rounds: int = 0
    _flags: ShapeColumn = field(init=False)
    """What the events of a shape are, as flags."""
    _keys: ShapeColumn = field(init=False)
    """The key of the launch calls of a shape, 0 for other events."""
    _calls: ShapeColumn = field(init=False)
    """The key of the calls of a shape's thread and name, 0 for other events."""

    _open: dict[tuple[int | None, int | None, str], int] = field(default_factory=dict)
    """By process, thread and function of an open launch call: the key of its kernel."""
    _kernels: dict[tuple[int | None, int], int] = field(default_factory=dict)
    """The key of a kernel by process and number of arguments, 0 for arguments without a kernel."""
    _launches_noted: int = 0

    def __post_init__(self) -> None:
        self._flags = ShapeColumn(self.tables, self._flags_of, np.uint8)
        self._keys = ShapeColumn(self.tables, _key_of_call, np.uint64)
        self._calls = ShapeColumn(self.tables, _key_of_name, np.uint64)

    def _flags_of(self, shape: Shape, number: int) -> int:
        """The flags of a new shape, of which the numbers are noted."""
        if shape.pid is not None and shape.pid < MADE_UP and len(self.pids) < _PROCESSES_MAX:
            self.pids.add(shape.pid)
        if shape.gpu is not None or shape.on_stream:
            self.gpus.add(shape.gpu or 0)
        if shape.cpu is not None:
            self.cpus = max(self.cpus, shape.cpu + 1)
        is_call, is_nccl = _key_of_name(shape, number) > 0, shape.on_stream and "nccl" in shape.name.lower()
        begins, ends = is_call and shape.phase in ("B", "X"), is_call and shape.phase in ("E", "X")
        launches = is_call and (LAUNCHES in shape.name or (shape.has_launch and shape.phase == "X"))
        kinds = _HAS_LAUNCH * shape.has_launch | _IS_NCCL * is_nccl | _BEGINS * begins | _ENDS * ends
        return kinds | _LAUNCHES * launches

    def finish(self) -> None:
        """Note the last shapes, and release the tables: there may be many surveys."""
        self._flags.values()
        del self.tables, self._flags, self._keys, self._calls

    def note(self, batch: TraceBatch) -> None:
        """Note the events of a batch."""
        events, tables = batch.events, self.tables
        if self._rounds != tables.rounds:
            self._rounds = tables.rounds
            self._kernels.clear()
        of_shapes = self._flags.values()
        is_event = events.shape >= 0
        if is_event.any():
            whole = tables.are_whole()[events.shape]
            ends_ns = events.ts_ns[whole] + events.dur_ns[whole]
            last_ns = int(events.ts_ns[is_event].max())
            self._note_times(int(events.ts_ns[is_event].min()), last_ns, int(ends_ns.max(initial=last_ns)))
            flags = of_shapes[events.shape]
            has = (flags & _HAS_LAUNCH) > 0
            if has.any():
                self.launches = max(self.launches, int(events.launch[has].max(initial=0)))
                # The calls that launched something, by process, name and the number that CUPTI gave them.
                keys = self._keys.values()[events.shape]
                calling = np.flatnonzero(has & (keys > 0))
                correlation = (events.launch[calling] & _CORRELATION).astype(np.uint64)
                lengths_ns = np.where(whole[calling], events.dur_ns[calling], NONE)
                of_call = ((correlation * _SPREADING ^ keys[calling]) * _SPREADING).view(np.int64)
                self.common.launches.add(of_call, events.ts_ns[calling], lengths_ns)
            if self.realtime_ns is not None:
                # When calls began and ended, by thread, name and approximate time.
                calls = self.common.calls
                for flag, times in ((_BEGINS, calls.begins), (_ENDS, calls.ends)):
                    places = np.flatnonzero(flags & flag)
                    ns = events.ts_ns[places] + (events.dur_ns[places] if flag == _ENDS else 0)
                    times.add(self._cells(self._calls.values()[events.shape[places]], ns), ns)
                self._note_kernels(batch, flags)
            self._note_collectives(batch, (flags & _IS_NCCL) > 0)
        for at in np.flatnonzero(events.shape == SPECIAL).tolist() if batch.others else ():
            other = batch.others[int(events.args[at])]
            if isinstance(other, PlacedWarps):
                exits_ns = other.entry_ns + np.maximum(other.last_of_exits(other.exit_ns), 0)
                self._note_times(other.ts_ns, other.ts_ns, other.ts_ns + int(exits_ns.max(initial=0)))
                self.gpus.add(other.launched.get("gpu", 0))
                self.launches = max(self.launches, other.launched.get("launch", 0))

    def _note_times(self, first_ns: int, last_ns: int, end_ns: int) -> None:
        self.first_ns = min(self.first_ns, first_ns) if self.is_begun else first_ns
        self.last_ns, self.is_begun = max(self.last_ns, last_ns), True
        self.end_ns = max(self.end_ns, end_ns)

    def _note_kernels(self, batch: TraceBatch, flags: Bytes) -> None:
        """Note when launches began and ended, by kernel: some tools name launches after their kernels."""
        if self._launches_noted >= _KERNELS_MAX:
            return
        events, tables = batch.events, self.tables
        found: tuple[list[tuple[int, int]], ...] = ([], [])
        for at in np.flatnonzero(flags & _LAUNCHES).tolist():
            shape = tables.shapes[int(events.shape[at])]
            assert shape is not None
            of_thread, ns = (shape.pid, shape.tid, shape.name), int(events.ts_ns[at])
            if shape.phase == "E":
                key = self._open.pop(of_thread, 0)
            else:
                self._launches_noted += 1
                kernel = shape.pid, int(events.args[at])
                if not IS_FUNCTION(shape.name):
                    key = _key((shape.pid, shape.name)) | 1
                elif (known := self._kernels.get(kernel)) is not None:
                    key = known
                else:
                    name = tables.args(kernel[1]).get(KERNEL)
                    key = self._kernels[kernel] = 0 if name is None else _key((shape.pid, name)) | 1
            if not key:
                continue
            if shape.phase == "B":
                self._open[of_thread] = key
            if shape.phase != "E":
                found[0].append((key, ns))
            if shape.phase != "B":
                found[1].append((key, ns + int(events.dur_ns[at])))
        for seen, times in zip(found, (self.common.kernels.begins, self.common.kernels.ends), strict=True):
            keys = np.array([key for key, _ in seen], np.uint64)
            seen_ns = np.array([ns for _, ns in seen], np.int64)
            times.add(self._cells(keys, seen_ns), seen_ns)

    def _cells(self, keys: Ints, ns: Int64s) -> Int64s:
        """The cells of times, by their keys and their approximate times."""
        cells = (ns + (self.realtime_ns or 0) >> CELL_BITS).astype(np.uint64) * _SPREADING
        spread: Int64s = ((cells ^ keys) * _SPREADING).view(np.int64)
        return spread

    def _note_collectives(self, batch: TraceBatch, is_nccl: Bools) -> None:
        """Note the ends of collectives, by process group and number."""
        events = batch.events
        places = np.flatnonzero(is_nccl & (events.args != NONE)).tolist()
        if not places:
            return
        keys, ends_ns = [], []
        for at in places:
            args = self.tables.args(int(events.args[at]))
            name = str(args.get("Collective name", "")).lower()
            if "Seq" in args and "Process Group Name" in args and any(one in name for one in _OF_ALL):
                keys.append(_key([args.get(key) for key in _COLLECTIVE]))
                ends_ns.append(int(events.ts_ns[at] + events.dur_ns[at]))
        spread = np.array(keys, np.uint64) * _SPREADING
        # They begin when each rank arrives. Only their ends are the same.
        self.common.collectives.add(
            spread.view(np.int64), np.array(ends_ns, np.int64), np.zeros(len(ends_ns), np.int64)
        )


def _key(of: object) -> int:
    text = repr(of).encode("utf-8", "replace")
    return zlib.crc32(text) << 32 | zlib.adler32(text)


def _key_of_call(shape: Shape, _: int) -> int:
    """The key of the launch calls of a shape; 0 for other events."""
    if shape.on_stream or not shape.has_launch or shape.phase not in ("B", "X"):
        return 0
    return _key((shape.pid, shape.name)) | 1


def _key_of_name(shape: Shape, _: int) -> int:
    """The key of the calls of a library with one thread and name; 0 for other events."""
    if shape.type != "userspace" or shape.tid is None or not shape.name:
        return 0
    return _key((shape.pid, shape.tid, shape.name)) | 1


def surveyed(opened: OpenRecording, path: str) -> Survey:
    """Survey a recording by reading it once."""
    header, clock = opened.recording.header, opened.clocks.trace_clock
    realtime_ns = Source(path, header, clock).ahead_ns(REALTIME, clock)
    survey = Survey(opened.recording.tables, CommonEvents(opened.source), realtime_ns)
    for batch, _ in Reading(opened, path).placed():
        survey.note(batch)
    survey.finish()
    return survey


# Launches of each further capture count from a multiple of this, so that people can read their numbers.
_LAUNCHES_APART = 1_000_000
# Launch ids have 64 bits, so there is no room for more.
_LAUNCHES_MAX = 1 << 62


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One of several recordings: its header, its survey, and the name of its format."""

    source: Source
    survey: Survey
    format: str

    @property
    def rank(self) -> int | None:
        """Its rank among the processes of a distributed run, where it states one."""
        return self.source.header.rank

    @property
    def capture(self) -> object:
        """A key that the parts of one capture share. Each capture has its own launch numbers."""
        header = self.source.header
        return (header.host, self.rank, tuple(sorted(header.start.items()))) if header.start else self


def hosts_of(parts: Sequence[Part]) -> list[int]:
    """The number of the host of each recording. A recording that does not state its host is taken to be of
    the reference's host, unless the same tool recorded the same processes there at the same time.
    """
    first = reference([part.source for part in parts])
    hosts: list[list[Part]] = []
    of = [0] * len(parts)
    for at in sorted(range(len(parts)), key=lambda at: at != first):
        found = (host for host, members in enumerate(hosts) if _is_of(parts[at], members))
        of[at] = next(found, len(hosts))
        if of[at] == len(hosts):
            hosts.append([])
        hosts[of[at]].append(parts[at])
    return of


def _is_of(part: Part, members: Sequence[Part]) -> bool:
    stated = [is_one_host(part.source, one.source) for one in members]
    if True in stated or False in stated:
        return True in stated
    for one in members:
        if one.format != part.format or one.capture == part.capture or not one.survey.pids & part.survey.pids:
            continue
        is_after = part.survey.first_ns > one.survey.last_ns or one.survey.first_ns > part.survey.last_ns
        if part.source.clock != one.source.clock or not is_after:
            return False  # one tool recorded the same pids at the same time, but not in one capture
    return True


@dataclass(slots=True)
class _Gpu:
    """A GPU: its number among all GPUs, what is known about it, and by format the ranks that ran on it."""

    number: int
    title: str
    uuid: str | None = None
    ranks: dict[str, int] = field(default_factory=dict)


def _number_gpus(
    parts: Sequence[Part], of_host: Sequence[int], hosts: Sequence[str], *, names_ranks: bool
) -> tuple[list[dict[int, int]], dict[int, str]]:
    """The numbers of each recording's GPUs by their indices in it, and the titles of all GPUs by number.

    A uuid identifies a GPU where both recordings state one; else the host and the index do. But two ranks
    that one tool recorded have different GPUs, as NCCL requires.
    """
    known: dict[tuple[int, int], list[_Gpu]] = {}
    numbers: set[int] = set()
    by_index: list[dict[int, int]] = []
    for part, host in zip(parts, of_host, strict=True):
        of_part: dict[int, int] = {}
        stated = {gpu["index"]: gpu for gpu in part.source.header.gpus if isinstance(gpu.get("index"), int)}
        for index in sorted(part.survey.gpus):
            about, rank = stated.get(index, {}), part.rank
            uuid, title = about.get("uuid"), f"GPU {index} {about.get('name') or ''}".rstrip()
            of_index = known.setdefault((host, index), [])
            for gpu in of_index:
                if uuid is not None and gpu.uuid is not None:
                    is_same = uuid == gpu.uuid
                else:
                    is_same = rank is None or gpu.ranks.get(part.format, rank) == rank
                if is_same:
                    gpu.uuid, gpu.title = gpu.uuid or uuid, max(gpu.title, title, key=len)
                    break
            else:
                number = index if index not in numbers else max(numbers) + 1
                gpu = _Gpu(number, f"{title} of rank {rank}" if names_ranks else title, uuid)
                of_index.append(gpu)
                numbers.add(number)
            if rank is not None:
                gpu.ranks[part.format] = rank
            of_part[index] = gpu.number
        by_index.append(of_part)
    titles = {
        gpu.number: f"{gpu.title} {hosts[host]}" if hosts else gpu.title
        for (host, _), gpus in known.items()
        for gpu in gpus
    }
    return by_index, titles


def numbered(parts: Sequence[Part]) -> tuple[list[Numbers], Origins]:
    """The new numbers of each recording, and the origins of all. Raises InputError."""
    of_host, stated = hosts_of(parts), {part.rank for part in parts}
    names_ranks = None not in stated and len(stated) == len(parts)  # the ranks must be distinguished
    if max(of_host) >= HOSTS_MAX:
        raise InputError(
            f"the recordings come from {max(of_host) + 1} hosts",
            f"Merge those of {HOSTS_MAX} hosts at a time.",
        )
    cpus = [0] * (max(of_host) + 2)
    for part, host in zip(parts, of_host, strict=True):
        cpus[host + 1] = max(cpus[host + 1], part.survey.cpus)
    for host in range(1, len(cpus)):
        cpus[host] += cpus[host - 1]
    captures: dict[object, tuple[int, int]] = {}
    next_launch = 0
    for part in parts:
        if part.capture not in captures:
            captures[part.capture] = len(captures), next_launch
        base = captures[part.capture][1]
        if part.survey.launches < _LAUNCHES_MAX:
            end = base + part.survey.launches
            next_launch = max(next_launch, (end // _LAUNCHES_APART + 1) * _LAUNCHES_APART)
    hosts = _names_of_hosts(parts, of_host)
    gpus, titles = _number_gpus(parts, of_host, hosts, names_ranks=names_ranks)
    # A recording may be of several hosts itself, and has a range of ids for each.
    ranges = [1] * (max(of_host) + 1)
    for part, host in zip(parts, of_host, strict=True):
        ranges[host] = max(ranges[host], max(part.survey.pids, default=0) // IDS_PER_HOST + 1)
    ranges = ranges if sum(ranges) <= HOSTS_MAX else [1] * len(ranges)
    first_ranges = list(accumulate(ranges, initial=0))
    hosts = tuple(name for name, count in zip(hosts, ranges, strict=False) for _ in range(count))
    numbers: list[Numbers] = []
    programs: dict[int, str] = {}
    ranks: dict[int, int] = {}
    shared: set[int] = set()  # processes that are in several recordings, such as a launcher, have no rank
    for part, host, indices in zip(parts, of_host, gpus, strict=True):
        at, launches = captures[part.capture]
        flows, made_up_below = (len(captures), at), at * (IDS_PER_HOST // len(captures))
        numbers.append(Numbers(first_ranges[host], cpus[host], launches, indices, flows, made_up_below))
        ids = [id_on(first_ranges[host], pid) for pid in part.survey.pids]
        if command := part.source.header.command:
            programs |= dict.fromkeys(ids, PurePath(command[0]).name)
        if names_ranks:
            shared.update(ranks.keys() & ids)
            ranks |= dict.fromkeys(ids, part.rank or 0)
    ranks = {id: rank for id, rank in ranks.items() if id not in shared}
    # Recordings with the same processes, of different captures but not ranks.
    doubles = frozenset(
        (at, to)
        for at, to in combinations(range(len(parts)), 2)
        if of_host[at] == of_host[to]
        and parts[at].capture != parts[to].capture
        and (None in (parts[at].rank, parts[to].rank) or parts[at].rank == parts[to].rank)
        and parts[at].survey.pids & parts[to].survey.pids
    )
    files = tuple(part.source.name for part in parts)
    return numbers, Origins(len(parts), programs, ranks, hosts, titles, files, doubles)


def _names_of_hosts(parts: Sequence[Part], of_host: Sequence[int]) -> tuple[str, ...]:
    """The text for each host, by its name or one of its files; none where there is only one host."""
    if max(of_host) == 0:
        return ()
    names = []
    for host in range(max(of_host) + 1):
        members = [part.source for part, of in zip(parts, of_host, strict=True) if of == host]
        stated = next((one.header.host for one in members if one.header.host), None)
        names.append(f"on {stated}" if stated else f"of {members[0].name}")
    counts = Counter(names)
    return tuple(name if counts[name] == 1 else f"{name} ({at + 1})" for at, name in enumerate(names))
