"""The state of packet sequences of a Perfetto trace: names by their numbers, defaults, threads; and clocks,
which are related by snapshots.

    TracePacket           12 interned_data  13 sequence_flags  42 previous_packet_dropped
                          59 trace_packet_defaults
    InternedData          FIELD entries {1 iid  2 text}…
    TracePacketDefaults   58 timestamp_clock_id  11 track_event_defaults {11 track  31, 45 tracks of counters}
    ClockSnapshot         1 clocks… {1 id  2 timestamp  3 is_incremental  4 unit_multiplier_ns}
                          2 primary_trace_clock
    RemoteClockSync       1 rounds… {2 ClockSnapshot of the machine  3 that of the host}

A packet whose flags clear the state starts a new state. After a lost packet, packets that need the state
cannot be used until then.

A time is put on the trace's clock as the trace processor does it: by the last snapshot at or before it,
without drift after that. Clocks 64 to 127 belong to one packet sequence. On an incremental clock, a time is
added to the one before it. Clocks that are never in the same snapshot are related by way of others.

Each machine has clocks of its own. It sends their readings to the host, which then reads its own, again and
again. Two such rounds have two estimates of how far the machine's clock is ahead: the middle of two readings
of one side is compared to the reading of the other side between them. The mean of all is used.

Source: protos/perfetto/trace/interned_data/interned_data.proto, trace_packet_defaults.proto,
clock_snapshot.proto, remote_clock_sync.proto, protos/perfetto/common/builtin_clock.proto, and what the trace
processor of v52 does.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from ctypes import Structure, c_int64, c_uint64
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from tracepipe.event.model import TIME_LIMIT_NS
from tracepipe.native import checked, library, owned, seed
from tracepipe.readers.sorted_rows import NativeSortedRows
from tracepipe.readers.wire_fields import BYTES, VARINT, signed, tagged, varints

CATEGORIES, EVENT_NAMES, ARG_NAMES, LOCATIONS, FUNCTIONS, FRAMES, CALLSTACKS = range(1, 8)
SOURCE_PATHS, BODIES, GPU_CONTEXTS, GPU_STAGES, STRINGS, CORRELATIONS = 18, 20, 23, 24, 29, 43
GPU_COUNTERS, GPU_KERNELS, GPU_ARGUMENTS = 47, 1000, 1001
"""Tables of names: the fields of InternedData."""
_TEXTS: Final = {
    CATEGORIES, EVENT_NAMES, ARG_NAMES, FUNCTIONS, SOURCE_PATHS, BODIES, GPU_ARGUMENTS, STRINGS, CORRELATIONS,
}  # fmt: skip
# The entries of the other tables are kept as messages.
_TABLES: Final = _TEXTS | {LOCATIONS, FRAMES, CALLSTACKS, GPU_CONTEXTS, GPU_STAGES, GPU_COUNTERS, GPU_KERNELS}
_IID: Final = 1 << 3
_TEXT: Final = 2 << 3 | BYTES
_DEFAULT_CLOCK: Final = 58 << 3
_EVENT_DEFAULTS: Final = 11 << 3 | BYTES
_TRACK: Final = 11 << 3
# The most bytes of all sequences, and what an entry takes in addition to its text.
_NAMES_BYTES_MAX: Final = 8 << 20
_ENTRY_BYTES: Final = 300
_SEQUENCES_MAX: Final = 1 << 14


@dataclass(slots=True)
class Defaults:
    """The values of fields that a packet does not have."""

    clock: int = 0
    track: int | None = None
    counters: list[int] = field(default_factory=list)
    doubles: list[int] = field(default_factory=list)


class Names:
    """The names of a sequence, by the table and the number of each. `size_bytes` is what they take."""

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int], bytes] = {}
        self._bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def get(self, table: int, iid: int) -> bytes | None:
        """An entry of a table; None where it is not there."""
        return self._entries.get((table, iid))

    def keep(self, table: int, iid: int, entry: bytes) -> None:
        """Keep an entry in place of the one with its number."""
        old = self._entries.get((table, iid))
        self._bytes += len(entry) + _ENTRY_BYTES - (0 if old is None else len(old) + _ENTRY_BYTES)
        self._entries[table, iid] = entry

    def clear(self) -> None:
        """Forget all entries."""
        self._entries, self._bytes = {}, 0


@dataclass(slots=True)
class Sequence:
    """One packet sequence. `thread` is the track of the thread that writes it, where the sequence
    states it.
    """

    id: int
    defaults: Defaults = field(default_factory=Defaults)
    names: Names = field(default_factory=Names)
    is_valid: bool = False
    is_begun: bool = False
    thread: int | None = None
    time_ns: int | None = None
    """The last time, for times that are differences, ns."""
    last_ns: int = 0
    """The time of its last packet that has one."""
    totals: dict[int, int | float] = field(default_factory=dict)
    """The totals of counters whose values are differences, by track."""

    def name(self, table: int, iid: int) -> bytes | None:
        """The whole entry of a table. For tables of texts, use `text_of`."""
        return self.names.get(table, iid)

    def text_of(self, table: int, iid: int) -> str | None:
        """The text of a table's entry; None where it is not there."""
        entry = self.names.get(table, iid)
        return None if entry is None else entry.decode("utf-8", "replace")


class Sequences:
    """All packet sequences. `new` makes one of those that are kept."""

    def __init__(self, new: Callable[[int], Sequence] = Sequence) -> None:
        self.left_out = 0
        self._new = new
        self._all: dict[int, Sequence] = {}
        self._bytes = 0

    @property
    def names_bytes(self) -> int:
        """What the names of all sequences take."""
        return self._bytes

    def sequence(self, id: int) -> Sequence:
        """A sequence by its id. If there are too many, it is one that is not kept."""
        found = self._all.get(id)
        if found is None:
            if len(self._all) >= _SEQUENCES_MAX:
                self.left_out += 1
                return Sequence(id)
            found = self._all[id] = self._new(id)
        return found

    def forget(self) -> None:
        """Forget all names, when all packets were read."""
        for sequence in self._all.values():
            sequence.names.clear()
        self._all.clear()

    def clear(self, sequence: Sequence) -> None:
        """Clear the state of a sequence."""
        self._bytes -= sequence.names.size_bytes
        sequence.names.clear()
        sequence.defaults, sequence.totals = Defaults(), {}
        sequence.time_ns = None
        sequence.is_valid = True

    def intern(self, sequence: Sequence, data: bytes) -> None:
        """Note an InternedData. Raises WireError."""
        for tag, value in tagged(data):
            table = tag >> 3
            if tag & 7 != BYTES or table not in _TABLES:
                continue
            fields = dict(tagged(value))
            entry = fields.get(_TEXT, b"") if table in _TEXTS else value
            if self.names_bytes + len(entry) + _ENTRY_BYTES > _NAMES_BYTES_MAX:
                self.left_out += 1
                continue
            names = sequence.names
            self._bytes -= names.size_bytes
            names.keep(table, fields.get(_IID, 0), entry)
            self._bytes += names.size_bytes


def defaults_of(data: bytes) -> Defaults:
    """A TracePacketDefaults. Raises WireError."""
    made = Defaults()
    for tag, value in tagged(data):
        if tag == _DEFAULT_CLOCK:
            made.clock = value
        elif tag == _EVENT_DEFAULTS:
            for inner, of_event in tagged(value):
                if inner == _TRACK:
                    made.track = of_event
                elif inner >> 3 in (31, 45):
                    uuids = made.counters if inner >> 3 == 31 else made.doubles
                    uuids += numbers(inner, of_event)
    return made


def numbers(tag: int, value: int | bytes) -> list[int]:
    """The numbers of a repeated field of varints, packed or not. Raises WireError."""
    if isinstance(value, bytes):
        return varints(value) if tag & 7 == BYTES else []
    return [value] if tag & 7 == VARINT else []


Clock = tuple[int, int]
"""The packet sequence of a clock, for a global clock the first of its machine, and its id. The number of a
sequence has that of its machine above 32 bits."""
HOST_CLOCKS: Final = {1: "realtime", 3: "monotonic", 6: "boottime"}
MONOTONIC: Final = 3
BOOTTIME: Final = 6
_OF_SEQUENCE: Final = range(64, 128)
_CLOCKS, _PRIMARY = 1 << 3 | BYTES, 2 << 3
_CLIENT, _HOST = 2 << 3 | BYTES, 3 << 3 | BYTES
# Readings that are further apart are not of one exchange.
_ROUND_NS: Final = 30 * 10**9
_ID, _TIME, _IS_INCREMENTAL, _UNIT = 1 << 3, 2 << 3, 3 << 3, 4 << 3
_HOPS_MAX: Final = 4
# The most clocks, clocks of a snapshot, and readings in all. If there are more readings, the later half of
# those of a set of clocks is kept.
_CLOCKS_MAX: Final = 1 << 12
_AT_ONCE_MAX: Final = 16
_READINGS_MAX: Final = 1 << 17


def clock_of(id: int, sequence: int) -> Clock:
    """The clock that an id refers to in a packet of a sequence."""
    return (sequence if id in _OF_SEQUENCE else sequence >> 32 << 32, id)


@dataclass(slots=True)
class _Domain:
    """One clock: the last reading if it is incremental, and its times in snapshots, by the clocks of
    these.
    """

    unit_ns: int = 1
    is_incremental: bool = False
    last_ns: int = 0
    times: dict[tuple[Clock, ...], list[int]] = field(default_factory=dict)


class Stretch(NamedTuple):
    """Times of a clock from `start_ns` on and before `end_ns`, to which `shift_ns` is added."""

    unit_ns: int
    is_incremental: bool
    start_ns: int
    end_ns: int
    shift_ns: int


_ALWAYS: Final = (-(1 << 63), (1 << 63) - 1)


class PerfettoClocks:
    """Reads snapshots, and puts times on the clock of the trace."""

    def __init__(self) -> None:
        self.starts: dict[int, dict[str, int]] = {}
        """By machine: the first instant at which several of its clocks were read, by their names."""
        self.left_out = 0
        self._trace: dict[int, Clock] = {}
        """By machine: the clock of its times."""
        self._used: set[int] = set()
        """The machines whose times have been placed."""
        self._ahead_ns: dict[Clock, int] = {}
        """How far the clocks of a machine are ahead of those of the host."""
        self._domains: dict[Clock, _Domain] = {}
        self._paths: dict[Clock, list[tuple[Clock, Clock, tuple[Clock, ...]]] | None] = {}
        self._is_disordered = False
        """Whether a clock was read again with an earlier time."""
        self._readings = 0

    def name(self, machine: int) -> str:
        """The clock of a machine's times: one of its host's, or its own where it is not known to be one."""
        name = HOST_CLOCKS.get(self._trace_of(machine)[1], "")
        return name if f"{name}_ns" in self.starts.get(machine, {}) else "trace"

    def _trace_of(self, machine: int) -> Clock:
        return self._trace.get(machine, (machine << 32, BOOTTIME))

    def is_related(self, machine: int) -> bool:
        """Whether it is known how far a machine's clock is ahead of that of the host."""
        return self._trace_of(machine) in self._ahead_ns

    def add_sync(self, data: bytes, sequence: int) -> None:
        """Add a RemoteClockSync. Raises WireError."""
        rounds: list[dict[int, list[int]]] = []
        for tag, value in tagged(data):
            if tag == _CLOCKS:
                of = dict(tagged(value))
                read: dict[int, list[int]] = {}
                for at, side in enumerate((_HOST, _CLIENT)):
                    for inner, clock in tagged(of.get(side, b"")):
                        fields = dict(tagged(clock)) if inner == _CLOCKS else {}
                        if fields and len(read) < _AT_ONCE_MAX:
                            read.setdefault(fields.get(_ID, 0), [0, 0])[at] = fields.get(_TIME, 0)
                self.add_snapshot(of.get(_CLIENT, b""), sequence)
                rounds.append(read)
        ahead_ns: dict[int, list[int]] = {}
        for first, second in pairwise(rounds):
            (_, begin_ns), (_, end_ns) = (one.get(BOOTTIME, (0, 0)) for one in (first, second))
            if not 0 <= end_ns - begin_ns < _ROUND_NS:
                continue
            for id in first.keys() & second.keys():
                (host_ns, own_ns), (next_host_ns, next_own_ns) = first[id], second[id]
                if host_ns and own_ns and next_host_ns and next_own_ns:
                    ahead_ns.setdefault(id, []).append((own_ns + next_own_ns) // 2 - host_ns)
                    ahead_ns[id].append(next_own_ns - (host_ns + next_host_ns) // 2)
        for id, estimates in ahead_ns.items():
            ns = abs(sum(estimates)) // len(estimates)
            self._ahead_ns[sequence >> 32 << 32, id] = ns if sum(estimates) > 0 else -ns

    def add_snapshot(self, data: bytes, sequence: int) -> None:
        """Add a ClockSnapshot. Raises WireError."""
        found: dict[Clock, int] = {}
        machine = sequence >> 32
        for tag, value in tagged(data):
            if tag == _PRIMARY and machine not in self._used:
                self._trace[machine] = (machine << 32, value)
            elif tag == _CLOCKS:
                fields = dict(tagged(value))
                clock = clock_of(fields.get(_ID, 0), sequence)
                is_full = len(found) >= _AT_ONCE_MAX or len(self._domains) >= _CLOCKS_MAX
                if clock not in self._domains and is_full:
                    self.left_out += 1
                    continue
                domain = self._domains.setdefault(clock, _Domain())
                domain.unit_ns = fields.get(_UNIT, 0) or 1
                domain.is_incremental = bool(fields.get(_IS_INCREMENTAL, 0)) and clock[1] in _OF_SEQUENCE
                domain.last_ns = found[clock] = signed(fields.get(_TIME, 0)) * domain.unit_ns
        if not self.starts.get(machine):
            host = {f"{name}_ns": found.get((machine << 32, id), -1) for id, name in HOST_CLOCKS.items()}
            shown = {name: ns for name, ns in host.items() if 0 <= ns <= TIME_LIMIT_NS}
            # A single clock may be any: programs without a clock of the host write CLOCK_BOOTTIME.
            self.starts[machine] = shown if len(shown) > 1 else {}
        key, trace = tuple(sorted(found)), self._trace_of(machine)
        times = self._domains[trace].times.get(key) if trace in found else None
        # The trace's clock may not be before its reading in the last snapshot of the same clocks.
        if len(found) < 2 or (times and found[trace] < times[-1]):
            return
        known = self._domains[key[0]].times.get(key, [])
        if not known:
            self._paths.clear()
        if self._readings + len(found) > _READINGS_MAX:
            gone = len(known) // 2
            if not gone:
                self.left_out += 1
                return
            for clock in key:
                del self._domains[clock].times[key][:gone]
            self._readings -= gone * len(key)
        for clock, ns in found.items():
            times = self._domains[clock].times.setdefault(key, [])
            self._is_disordered |= bool(times) and ns < times[-1]
            times.append(ns)
        self._readings += len(found)

    def trace_ns(self, value: int, clock: Clock) -> int | None:
        """A packet's time on the trace's clock; None where no snapshots relate it."""
        trace, ahead_ns = self._use(clock)
        if clock == trace:
            return value - ahead_ns
        domain = self._domains.get(clock)
        if domain is None:
            return None
        ns = value * domain.unit_ns
        if domain.is_incremental:
            ns = domain.last_ns = domain.last_ns + ns
        path = self._path_of(clock)
        if path is None:
            return None
        for here, there, key in path:
            times = self._domains[here].times[key]
            at = max(0, bisect_right(times, ns) - 1)
            ns += self._domains[there].times[key][at] - times[at]
        return ns - ahead_ns

    def stretch(self, value: int, clock: Clock) -> Stretch | None:
        """The times around that of a packet which are put on the trace's clock in the same way; None where
        that is not known.
        """
        trace, trace_ahead_ns = self._use(clock)
        if clock == trace:
            return Stretch(1, False, *_ALWAYS, -trace_ahead_ns)
        domain, path = self._domains.get(clock), self._path_of(clock) if clock in self._domains else None
        if domain is None or path is None or self._is_disordered:
            return None
        ns = value * domain.unit_ns + (domain.last_ns if domain.is_incremental else 0)
        (start, end), shift = _ALWAYS, 0
        for here, there, key in path:
            times = self._domains[here].times[key]
            at = max(0, bisect_right(times, ns + shift) - 1)
            start = max(start, times[at] - shift) if at else start
            end = min(end, times[at + 1] - shift) if at + 1 < len(times) else end
            shift += self._domains[there].times[key][at] - times[at]
        return Stretch(domain.unit_ns, domain.is_incremental, start, end, shift - trace_ahead_ns)

    def _use(self, clock: Clock) -> tuple[Clock, int]:
        """Note that times of a machine are placed. Return its clock, and how far that is ahead."""
        machine = clock[0] >> 32
        self._used.add(machine)
        trace = self._trace_of(machine)
        return trace, self._ahead_ns.get(trace, 0)

    def last_ns(self, clock: Clock) -> int:
        """The last time of an incremental clock."""
        return self._domains[clock].last_ns if clock in self._domains else 0

    def set_last(self, clock: Clock, ns: int) -> None:
        """Set the last time of an incremental clock."""
        self._domains[clock].last_ns = ns

    def _path_of(self, clock: Clock) -> list[tuple[Clock, Clock, tuple[Clock, ...]]] | None:
        if clock not in self._paths:
            self._paths[clock] = self._path(clock)
        return self._paths[clock]

    def _path(self, clock: Clock) -> list[tuple[Clock, Clock, tuple[Clock, ...]]] | None:
        """The shortest chain of snapshots from a clock to that of its machine's times."""
        paths = deque[tuple[Clock, list[tuple[Clock, Clock, tuple[Clock, ...]]]]]([(clock, [])])
        visited = {clock}
        while paths:
            here, path = paths.popleft()
            if here == self._trace_of(clock[0] >> 32):
                return path
            if len(path) >= _HOPS_MAX:
                continue
            for key in self._domains[here].times:
                for there in key:
                    if there not in visited:
                        visited.add(there)
                        paths.append((there, [*path, (here, there, key)]))
        return None


# Why the core returned, as in perfetto_rows.c.
_MORE, _FOREIGN, _CLOCK, _FULL = range(4)
_NO_CLOCK: Final = -1
_U64: Final = (1 << 64) - 1
_I64: Final = range(-(1 << 63), 1 << 63)


class _Clock(Structure):
    _fields_ = [
        (name, c_int64)
        for name in ("id", "unit_ns", "is_incremental", "last_ns", "start_ns", "end_ns", "shift_ns")
    ]


class _Stated(Structure):
    """What Python states of a sequence, and what changes in the core."""

    _fields_ = [
        *((name, c_int64) for name in ("is_valid", "has_track", "has_thread", "is_negative", "has_counter")),
        *((name, c_uint64) for name in ("track", "thread", "counter")),
        *((name, c_int64) for name in ("clock", "last_ns", "names_bytes", "snapshots")),
        ("clocks", _Clock * 2),
    ]


class _Shared(Structure):
    _fields_ = [(name, c_int64) for name in ("last_ns", "names_bytes", "snapshots", "descriptors")]


class _NativeNames(Names):
    """Names of a sequence that the core keeps."""

    def __init__(self, core: NativePackets, stated: _Stated) -> None:
        self._core, self._stated = core, stated

    @property
    def size_bytes(self) -> int:
        return int(self._stated.names_bytes)

    def get(self, table: int, iid: int) -> bytes | None:
        text = ctypes.c_void_p()
        size = self._core.core.tp_packets_name(ctypes.addressof(self._stated), table, iid, ctypes.byref(text))
        return None if size < 0 else ctypes.string_at(text, size)

    def keep(self, table: int, iid: int, entry: bytes) -> None:
        of = self._core
        address = ctypes.addressof(self._stated)
        checked(of.core.tp_packets_keep(of.at, address, table, iid, entry, len(entry)))

    def clear(self) -> None:
        self._core.core.tp_packets_forget(self._core.at, ctypes.addressof(self._stated))


class NativeSequences(Sequences):
    """Sequences that the core knows."""

    def __init__(self, core: NativePackets) -> None:
        super().__init__(core.new_sequence)
        self._core = core

    @property
    def names_bytes(self) -> int:
        return int(self._core.shared.names_bytes)


class NativePackets:
    """Reads the usual packets into `rows` in the core: its `perfetto_rows.c` describes which these are.

    The core keeps the names of all sequences, the ranks of tracks and the last times. Before Python reads a
    packet of a sequence, it fetches what the core has changed (`leave`). After that, it states what is known
    (`enter`).
    """

    def __init__(self, rows: NativeSortedRows, clocks: PerfettoClocks) -> None:
        core = library()
        assert core is not None
        self.core, self._rows, self._clocks = core, rows, clocks
        self.at = owned(self, core.tp_packets_new(seed()), core.tp_packets_free)
        self.shared = _Shared.from_address(core.tp_packets_state(self.at))
        self._stated: dict[int, _Stated] = {}
        self._asked = np.zeros(4, np.int64)

    def new_sequence(self, id: int) -> Sequence:
        """A new sequence, which the core knows from then on."""
        if id > _U64:
            return Sequence(id)
        address = self.core.tp_packets_sequence(self.at, id)
        if not address:
            raise MemoryError
        stated = self._stated[id] = _Stated.from_address(address)
        return Sequence(id, names=_NativeNames(self, stated))

    def leave(self, sequence: Sequence) -> int:
        """Fetch what the core has changed of a sequence. Return the last time that it has read, ns."""
        stated = self._stated.get(sequence.id)
        if stated is not None:
            if stated.last_ns != _limited(sequence.last_ns):  # the core leaves times beyond to Python
                sequence.last_ns = stated.last_ns
            for clock in stated.clocks:
                if clock.id != _NO_CLOCK and clock.is_incremental:
                    self._clocks.set_last(clock_of(clock.id, sequence.id), clock.last_ns)
        return int(self.shared.last_ns)

    def enter(self, sequence: Sequence, last_ns: int, *, has_snapshot: bool, has_track: bool) -> None:
        """State what is known after a packet of a sequence, and whether it has clocks or a track."""
        self.shared.last_ns = _limited(last_ns)
        self.shared.snapshots += has_snapshot
        self.shared.descriptors += has_track
        stated = self._stated.get(sequence.id)
        if stated is None:
            return
        track, thread = sequence.defaults.track, sequence.thread
        stated.is_valid, stated.last_ns = sequence.is_valid, _limited(sequence.last_ns)
        stated.has_track, stated.has_thread = track is not None, thread is not None
        stated.track, stated.thread, stated.is_negative = track or 0, (thread or 0) & _U64, (thread or 0) < 0
        counters = sequence.defaults.counters
        stated.has_counter, stated.counter = (1, counters[0]) if len(counters) == 1 else (0, 0)
        stated.clock = _limited(sequence.defaults.clock)
        for clock in stated.clocks:
            if clock.id != _NO_CLOCK and clock.is_incremental:
                clock_ns = self._clocks.last_ns(clock_of(clock.id, sequence.id))
                clock.id, clock.last_ns = (clock.id, clock_ns) if clock_ns in _I64 else (_NO_CLOCK, 0)

    def rank(self, track: int, ts_ns: int, is_whole: bool) -> int:
        """The rank of an event of a track."""
        return checked(self.core.tp_packets_rank(self.at, track & _U64, track < 0, ts_ns, is_whole))

    def note_counter(self, track: int, factor: int) -> None:
        """Note that a track is a counter whose values are multiplied by a factor."""
        if factor in _I64:
            checked(self.core.tp_packets_counter(self.at, track & _U64, track < 0, factor))

    def take(self, data: bytes, at: int) -> int:
        """Read packets from a place on. Return the place of the next one. Raises OutputError."""
        while True:
            asked = self._asked.ctypes.data
            at = checked(self.core.tp_packets_take(self.at, self._rows.at, data, len(data), at, asked))
            why, id, clock, value = self._asked.tolist()
            if why == _FULL:
                self._rows.put_away()
            elif why != _CLOCK or not self._state_clock(id & _U64, clock, value):
                return at

    def _state_clock(self, id: int, clock_id: int, value: int) -> bool:
        """State how times around one of a clock are put on the trace's clock. Return whether it is known."""
        stated, clock = self._stated[id], clock_of(clock_id, id)
        places = [one for one in stated.clocks if one.id in (clock_id, _NO_CLOCK)]
        place = places[0] if places else stated.clocks[1]
        if place.id != _NO_CLOCK and place.is_incremental:
            self._clocks.set_last(clock_of(place.id, id), place.last_ns)
        stretch = self._clocks.stretch(value, clock)
        if stretch is None or not all(number in _I64 for number in stretch):
            return False
        last_ns = self._clocks.last_ns(clock)
        if last_ns not in _I64:
            return False
        place.id, place.last_ns = clock_id, last_ns
        place.unit_ns, place.is_incremental, place.start_ns, place.end_ns, place.shift_ns = stretch
        return True


def _limited(number: int) -> int:
    """A number, or the nearest one that has 64 bits."""
    return min(max(number, _I64[0]), _I64[-1])
