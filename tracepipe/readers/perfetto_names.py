"""The state of a packet sequence of a Perfetto trace: names by their numbers, defaults, its thread.

    TracePacket           12 interned_data  13 sequence_flags  42 previous_packet_dropped
                          59 trace_packet_defaults
    InternedData          FIELD entries {1 iid  2 text}…
    TracePacketDefaults   58 timestamp_clock_id  11 track_event_defaults {11 track  31, 45 tracks of counters}

A packet whose flags clear the state starts a new state. After a lost packet, packets that need the state
cannot be used until then. Source: protos/perfetto/trace/interned_data/interned_data.proto,
trace_packet_defaults.proto.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tracepipe.readers.wire_fields import BYTES, VARINT, tagged, varints

CATEGORIES, EVENT_NAMES, ARG_NAMES, LOCATIONS, FUNCTIONS, FRAMES, CALLSTACKS = range(1, 8)
SOURCE_PATHS, BODIES, GPU_CONTEXTS, GPU_STAGES, STRINGS, CORRELATIONS = 18, 20, 23, 24, 29, 43
GPU_KERNELS: Final = 1000
"""Tables of names: the fields of InternedData."""
_TABLES: Final = frozenset(
    {
        CATEGORIES, EVENT_NAMES, ARG_NAMES, LOCATIONS, FUNCTIONS, FRAMES, CALLSTACKS, SOURCE_PATHS, BODIES,
        GPU_CONTEXTS, GPU_STAGES, GPU_KERNELS, STRINGS, CORRELATIONS,
    }
)  # fmt: skip
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


@dataclass(slots=True)
class Sequence:
    """One packet sequence. `thread` is the track of the thread that writes it, where the sequence
    states it.
    """

    id: int
    defaults: Defaults = field(default_factory=Defaults)
    names: dict[tuple[int, int], bytes] = field(default_factory=dict)
    is_valid: bool = False
    is_begun: bool = False
    thread: int | None = None
    time_ns: int | None = None
    """The last time, for times that are differences, ns."""
    last_ns: int = 0
    """The time of its last packet that has one."""
    totals: dict[int, int | float] = field(default_factory=dict)
    """The totals of counters whose values are differences, by track."""
    names_bytes: int = 0

    def name(self, table: int, iid: int) -> bytes | None:
        """The whole entry of a table. For tables of texts, use `text_of`."""
        return self.names.get((table, iid))

    def text_of(self, table: int, iid: int) -> str | None:
        """The text of a table's entry; None where it is not there."""
        entry = self.names.get((table, iid))
        return None if entry is None else entry.decode("utf-8", "replace")


# Tables of texts. The entries of the other tables are kept as messages.
_TEXTS: Final = frozenset(
    {CATEGORIES, EVENT_NAMES, ARG_NAMES, FUNCTIONS, SOURCE_PATHS, BODIES, STRINGS, CORRELATIONS}
)


class Sequences:
    """All packet sequences."""

    def __init__(self) -> None:
        self.left_out = 0
        self._all: dict[int, Sequence] = {}
        self._bytes = 0

    def of(self, id: int) -> Sequence:
        """A sequence by its id. If there are too many, it is one that is not kept."""
        found = self._all.get(id)
        if found is None:
            found = Sequence(id)
            if len(self._all) >= _SEQUENCES_MAX:
                self.left_out += 1
                return found
            self._all[id] = found
        return found

    def forget(self) -> None:
        """Forget all names, when all packets were read."""
        for sequence in self._all.values():
            sequence.names.clear()
        self._all.clear()

    def clear(self, sequence: Sequence) -> None:
        """Clear the state of a sequence."""
        self._bytes -= sequence.names_bytes
        sequence.names, sequence.names_bytes = {}, 0
        sequence.defaults, sequence.totals = Defaults(), {}
        sequence.thread, sequence.time_ns = None, None
        sequence.is_valid = True

    def intern(self, sequence: Sequence, data: bytes) -> None:
        """Take an InternedData. Raises WireError."""
        for tag, value in tagged(data):
            table = tag >> 3
            if tag & 7 != BYTES or table not in _TABLES:
                continue
            fields = dict(tagged(value))
            entry = fields.get(_TEXT, b"") if table in _TEXTS else value
            size = len(entry) + _ENTRY_BYTES
            if self._bytes + size > _NAMES_BYTES_MAX:
                self.left_out += 1
                continue
            key = (table, fields.get(_IID, 0))
            if (old := sequence.names.get(key)) is not None:
                size -= len(old) + _ENTRY_BYTES
            sequence.names[key] = entry
            sequence.names_bytes += size
            self._bytes += size


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
