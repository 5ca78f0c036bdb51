"""A GPU engine: a channel to the processes of a command, and the streams of records that it collects.

    libraries in the command ──▶ Channel ──┬─▶ GpuEngine ──▶ chunks ─┬─▶ GpuRenderer    lines and losses
    samplers of the GPUs ──▶ CounterStream ┘                         ├─▶ ChannelCarry   what later ones need
                                                                     └─▶ ChannelSpans   long calls, kernels

A stream states the layers that it adds, what the command's environment needs, and a `Decoder` for each kind
of its records, with a `Keeper` of what later records need of evicted ones, and a `Finder` of long calls,
kernels and ranges. The decoders of a renderer share a `Recording`: limits, losses, processes, GPUs and Python
stacks.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from tracepipe.event.model import AUTOGRAD, COUNT_LIMIT, INDEX_LIMIT
from tracepipe.kernel_names import short_kernel_name
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.gpu.build.driver import limits_of, uuid_text
from tracepipe.tracer.gpu.engines.channel import (
    CHANNEL_BYTES,
    CROWDED,
    ENTRY_BYTES,
    GPU,
    MALFORMED,
    PROCESS_BYTES,
    REFUSALS,
    Channel,
    Crowded,
    GpuRecord,
    Kind,
    Malformed,
    MemoryLimit,
    note,
    read_name,
    records,
    text,
)
from tracepipe.tracer.gpu.engines.failures import Failures
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.records.unrendered import CALL, KERNEL, Carried, Conditions, Span, SpanKind

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.compiled_code import CompiledCode

GPUS_MAX: Final = 256
# native/python_stacks.h describes these two.
STACK: Final = struct.Struct("<QII")
"""number, frames left out, frames; the numbers of these follow."""
FRAME: Final = struct.Struct("<QIHxx")
"""number, line, bytes of the function's name; that and the file's follow."""
_STACK_BYTES: Final = 512  # roughly, for each stack or frame without its texts and frames

_OF_AUTOGRAD: Final = 1  # STACK_OF_AUTOGRAD of native/python_stacks.h
_NO_CAPTURE: Final[Mapping[int | None, str]] = {
    None: "(capture not recorded)",
    0: "(no Python)",
    _OF_AUTOGRAD: AUTOGRAD,
}
"""In place of the stack that captured work in a graph."""

Event = dict[str, Any]
Frame = tuple[str, str, int]
"""Function, file, line."""


class PythonStacks:
    """Writes each Python stack once in the file, before the first event that refers to it.

    A process gives stacks different numbers if they differ in an instruction within a line. In the file,
    stacks with the same frames have one id, even of different processes. Raises Malformed and Crowded.
    """

    def __init__(self, memory: MemoryLimit) -> None:
        self._memory = memory
        self._frames: dict[tuple[int, int], Frame] = {}
        """Number of a process's frame → the frame, which is one object even if it has several numbers."""
        self._known_frames: dict[Frame, Frame] = {}
        self._stacks: dict[tuple[int, int], tuple[int, tuple[int, ...]]] = {}
        """Number of a process's stack → the number of frames left out, and the numbers of the others."""
        self._ids: dict[tuple[int, tuple[tuple[str | int, ...], ...]], int] = {}
        """The number of frames left out, and the others → id."""
        self._ids_of_processes: dict[tuple[int, int], int] = {}
        self._pids: set[int] = set()
        self._new: list[dict[str, Any]] = []
        self.compiled: CompiledCode | None = None

    def add_stack(self, pid: int, payload: memoryview) -> None:
        """Add a stack of a process by its record."""
        number, omitted, frames = STACK.unpack_from(payload)
        if omitted > COUNT_LIMIT or STACK.size + 8 * frames != len(payload):
            raise Malformed
        self._memory.use(_STACK_BYTES + 8 * len(payload))
        self._pids.add(pid)
        self._ids_of_processes.pop((pid, number), None)
        self._stacks[pid, number] = omitted, struct.unpack_from(f"<{frames}Q", payload, STACK.size)

    def add_frame(self, pid: int, payload: memoryview) -> None:
        """Add a frame of a process by its record."""
        number, line, function_bytes = FRAME.unpack_from(payload)
        file_at = FRAME.size + function_bytes
        if line > INDEX_LIMIT or file_at > len(payload):
            raise Malformed
        self._memory.use(_STACK_BYTES + 4 * len(payload))
        frame = text(payload[:file_at], FRAME.size), text(payload, file_at), line
        self._frames[pid, number] = self._known_frames.setdefault(frame, frame)

    def id_of(self, pid: int, number: int) -> int | None:
        """The id of a process's stack; None if there is no stack, or if a record of it was lost."""
        if number == _OF_AUTOGRAD:
            return self.id_of_capture(pid, number)
        known = self._ids_of_processes.get((pid, number))
        if known is not None or not number or (pid, number) not in self._stacks:
            return known
        omitted, numbers = self._stacks[pid, number]
        frames = [self._frames.get((pid, frame)) for frame in numbers]
        found = [frame for frame in frames if frame is not None]
        if len(found) < len(frames):
            return None
        if self.compiled is not None:
            found = [*self.compiled.behind(found), *found]
        stack = self._ids_of_processes[pid, number] = self._id_of(tuple(found), omitted)
        return stack

    def id_of_capture(self, pid: int, number: int | None) -> int | None:
        """The id of the stack that captured work in a graph: None is a capture that was not recorded, and the
        others of `_NO_CAPTURE` say why there is no stack. The only frame of such a stack says so, of a
        process that has stacks.
        """
        if number is not None and number not in _NO_CAPTURE:
            return self.id_of(pid, number)
        return self._id_of(((_NO_CAPTURE[number],),)) if pid in self._pids else None

    def _id_of(self, frames: tuple[tuple[str | int, ...], ...], omitted: int = 0) -> int:
        stack = self._ids.get((omitted, frames))
        if stack is None:
            stack = self._ids[omitted, frames] = len(self._ids) + 1
            named = [dict(zip(("function", "file", "line"), frame, strict=False)) for frame in frames]
            line = {"type": "stack", "id": stack, "frames": named}
            self._new.append(line | ({"omitted": omitted} if omitted else {}))
        return stack

    def innermost(self, pid: int, number: int) -> str:
        """The innermost line of a process's stack, "" if it is not known."""
        _, numbers = self._stacks.get((pid, number), (0, ()))
        function, file, line = (self._frames.get((pid, numbers[0])) if numbers else None) or ("", "", 0)
        return f"{file}:{line} {function}" if file else ""

    def write_new(self, lines: Lines) -> None:
        """Add the lines of the stacks whose ids were assigned since the last call."""
        for stack in self._new:
            lines.record(stack)
        self._new.clear()


class GpuNumbers:
    """Gives each GPU one number, where processes number them differently. `known`: UUID → number."""

    def __init__(self, known: Mapping[str, int]) -> None:
        self._numbers = dict(known)
        self._reported: dict[int, dict[str, Any]] = {}

    @property
    def reported(self) -> list[dict[str, Any]]:
        """The GPUs that processes reported, in the form of a header: index, name, uuid, sm_count, limits."""
        return [self._reported[number] for number in sorted(self._reported)]

    def add(self, payload: memoryview) -> tuple[int, int]:
        """Add a GPU by its record; its number in its process, and in the file. May raise Crowded."""
        index, sm_count, major, minor, _, *limits, raw = GPU.unpack_from(payload)
        uuid = uuid_text(raw)
        if uuid not in self._numbers and len(self._numbers) >= GPUS_MAX:
            raise Crowded
        used = set(self._numbers.values())
        is_free = index < GPUS_MAX and index not in used
        number = self._numbers.setdefault(uuid, index if is_free else max(used, default=-1) + 1)
        about = {"index": number, "name": text(payload, GPU.size), "uuid": uuid, "sm_count": sm_count}
        self._reported[number] = about | limits_of(major, minor, *limits)
        return index, number


@dataclass(slots=True)
class Process:
    """A traced process: its number in the recording, the names that it sent, its GPUs' numbers."""

    number: int
    names: dict[int, str] = field(default_factory=dict)
    gpus: dict[int, int] = field(default_factory=dict)


class Recording:
    """The state that the decoders of a renderer share."""

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self.memory, self._refused = MemoryLimit(), Counter[str]()
        self.failures = Failures()
        self.stacks, self.gpus = PythonStacks(self.memory), GpuNumbers(gpus)
        self.processes: dict[int, Process] = {}
        self.notes: list[str] = []
        self.losses: dict[str, int] = {}
        self.stall_samples = 0
        self.resumed_ns: int | None = None
        """Set while records are rendered of what began before the recording: it begins at this time."""
        self._short_names: dict[str, str] = {}

    def process(self, pid: int) -> Process:
        """The process, which is new at its first record. May raise Crowded."""
        process = self.processes.get(pid)
        if process is None:
            self.memory.use(PROCESS_BYTES)
            process = self.processes[pid] = Process(len(self.processes))
        return process

    def refuse(self, refusal: Exception) -> None:
        """Count a skipped record, by the exception that it raised, until it is written as a loss."""
        self._refused[CROWDED if isinstance(refusal, Crowded) else MALFORMED] += 1

    def write_refused(self, lines: Lines) -> None:
        """Add the losses of the records that were skipped since the last call."""
        for reason, count in self._refused.items():
            self.count_lost("unknown", count)
            lines.record({"type": "loss", "count": count, "reason": reason})
        self._refused.clear()

    def count_lost(self, layer: str, count: int) -> None:
        """Add to the losses of a layer, up to the greatest count of a file."""
        self.losses[layer] = min(self.losses.get(layer, 0) + count, COUNT_LIMIT)

    def loss(self, layer: str, count: int, reason: str, start_ns: int, dur_ns: int | None = None) -> Event:
        """The record of a loss, which is counted; without `dur_ns` it is at an instant."""
        self.count_lost(layer, count)
        lost = {"ts_ns": start_ns} if dur_ns is None else {"ts_ns": start_ns, "dur_ns": dur_ns}
        return lost | {"type": "loss", "layer": layer, "count": count, "reason": reason}

    def note(self, words: str) -> None:
        """Add a message for the user, once. May raise Crowded."""
        if words not in self.notes:
            self.memory.use(ENTRY_BYTES + len(words))
            self.notes.append(words)

    def short_name(self, name: str) -> str:
        """The short form of a kernel's name. May raise Crowded."""
        short = self._short_names.get(name)
        if short is None:
            self.memory.use(ENTRY_BYTES + 2 * len(name))
            short = self._short_names[name] = short_kernel_name(name)
        return short


class Keeper:
    """Keeps evicted records of `kinds`, which later ones need; of equal ones only the last. Subclasses also
    keep records that become lines, in `_under_way`.
    """

    def __init__(self, memory: MemoryLimit, kinds: frozenset[int]) -> None:
        self._memory, self._kinds = memory, kinds
        self._known: dict[tuple[int, int, bytes], bytes] = {}
        self._under_way: dict[tuple[int, ...], list[tuple[int, bytes]]] = {}
        """Times and bytes of records."""

    def add(self, record: GpuRecord) -> None:
        """Add an evicted record. May raise one of REFUSALS."""
        if record.kind in self._kinds:
            self._keep(record, bytes(record.payload))

    def carried(self) -> Carried:
        """The records that later ones need now; those under way are in order of time."""
        begun = sorted((one for some in self._under_way.values() for one in some), key=itemgetter(0))
        return Carried(b"".join(self._known.values()), b"".join(content for _, content in begun))

    def _keep(self, record: GpuRecord, identity: bytes) -> None:
        """Keep a record in place of an earlier one with the same identity."""
        key, content = (record.kind, record.pid, identity), record.content
        if key not in self._known:
            self._memory.use(ENTRY_BYTES + len(content) + len(identity))
        self._known[key] = content


class ChannelCarry:
    """A `Carry` of what later records of a channel need from records that are evicted."""

    def __init__(self, decoders: Iterable[Decoder]) -> None:
        self.memory = MemoryLimit()
        keepers = {decoder: decoder.keeper(self.memory, decoder.kept) for decoder in decoders}
        self._keepers = list(keepers.values())
        self._by_kind = {kind: keeper for decoder, keeper in keepers.items() for kind in decoder.kinds}
        self._whole = {kind for decoder in keepers for kind in decoder.whole}

    def add(self, chunk: bytes) -> None:
        for record in records(chunk):
            keeper = self._by_kind.get(record.kind)
            if keeper is not None and record.is_plausible:
                with suppress(*REFUSALS):  # a decoder would keep nothing of such records either
                    keeper.add(record)

    def divide(self, chunk: bytes, start_ns: int) -> tuple[bytes, bytes]:
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        at, was_late = 0, False
        for record in records(chunk):
            is_late = record.time_ns >= start_ns or record.kind in self._whole
            if is_late != was_late:
                parts[was_late].append(chunk[at : record.at])
                at, was_late = record.at, is_late
        parts[was_late].append(chunk[at:])
        return b"".join(parts[0]), b"".join(parts[1])

    def carried(self) -> Carried:
        carried = [keeper.carried() for keeper in self._keepers]
        return Carried(*(b"".join(parts) for parts in zip(*carried, strict=True))) if carried else Carried()


class WantedName(NamedTuple):
    """A name of a process, and the limits of the calls and of the kernels that have it; None: not wanted."""

    name: str
    call_limit_ns: int | None = None
    kernel_limit_ns: int | None = None


WantedNames = Mapping[tuple[int, int], WantedName]
"""Process, number of a name → the name, if it is wanted."""


@dataclass(slots=True)
class OpenSpan:
    """A span that has begun. `limit_ns`: the length beyond which it is reported; None: it is not wanted."""

    name: str
    began_ns: int
    limit_ns: int | None = None
    is_reported: bool = False

    def is_longer(self, now_ns: int) -> bool:
        """Whether it is wanted and takes longer than its limit."""
        return self.limit_ns is not None and now_ns - self.began_ns > self.limit_ns


@dataclass(eq=False)
class Finder:
    """Finds long spans among records of some kinds; none by itself."""

    wanted: Conditions
    names: WantedNames
    memory: MemoryLimit
    kind: ClassVar[SpanKind] = CALL
    """The kind of open spans."""

    def spans_in(self, record: GpuRecord) -> Iterator[Span]:
        """The spans that ended with a record and took longer than their limits. May raise REFUSALS."""
        return iter(())

    def open_spans(self) -> Iterator[OpenSpan]:
        """The spans that are open."""
        return iter(())

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """The open spans that have already taken longer than their limits, each once."""
        for span in self.open_spans():
            if span.is_longer(now_ns) and not span.is_reported:
                span.is_reported = True
                yield Span(span.name, now_ns - span.began_ns, self.kind, is_over=False)


class ChannelSpans:
    """Finds long calls, kernels and ranges in a channel's records, like `RecordSpans`."""

    def __init__(self, wanted: Conditions, decoders: Iterable[Decoder]) -> None:
        self._wanted, self._memory = wanted, MemoryLimit()
        self._names: dict[tuple[int, int], WantedName] = {}
        finders = {decoder: decoder.finder(wanted, self._names, self._memory) for decoder in decoders}
        self._finders = list(finders.values())
        self._by_kind = {kind: finder for decoder, finder in finders.items() for kind in decoder.kinds}

    def ended(self, chunk: bytes) -> Iterator[Span]:
        for record in records(chunk):
            with suppress(*REFUSALS):  # they are counted when the records are rendered
                if record.kind == Kind.NAME:
                    number, name = read_name(record.payload)
                    limits_ns = self._wanted.limit_ns(name, CALL), self._wanted.limit_ns(name, KERNEL)
                    if limits_ns != (None, None):
                        self._memory.use(ENTRY_BYTES + len(name))
                        self._names[record.pid, number] = WantedName(name, *limits_ns)
                elif (finder := self._by_kind.get(record.kind)) is not None:
                    yield from finder.spans_in(record)

    def under_way(self, now_ns: int) -> Iterator[Span]:
        for finder in self._finders:
            yield from finder.under_way(now_ns)


class Decoder(ABC):
    """Makes lines of the records of some kinds."""

    kinds: ClassVar[frozenset[int]]
    layers: ClassVar[Mapping[int, str]] = MappingProxyType({})
    """The kinds of records that are events → the layer of these."""
    kept: ClassVar[frozenset[int]] = frozenset()
    """The kinds of which evicted records are kept as they are."""
    whole: ClassVar[frozenset[int]] = frozenset()
    """The kinds whose records are complete without earlier ones."""
    keeper: ClassVar[type[Keeper]] = Keeper
    finder: ClassVar[type[Finder]] = Finder

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    @abstractmethod
    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Add the lines of a record, or keep it until `end_chunk`. Raises one of REFUSALS."""

    def end_chunk(self, lines: Lines) -> None:  # noqa: B027
        """Add the lines of records that were kept until the end of the chunk."""

    def rest(self) -> Iterator[Lines]:
        """More lines of the last chunk, a few thousand at a time."""
        return iter(())

    def last(self, lines: Lines) -> None:  # noqa: B027
        """At the end, add the lines of what waited for something that did not come."""

    def find_unended(self) -> None:  # noqa: B027
        """At the end, find the launches that errors are of."""

    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events and their number, 0 for a record that is no event."""
        return self.layers.get(record.kind, ""), int(record.kind in self.layers)

    @property
    def last_notes(self) -> list[str]:
        """Messages for the user that are known only at the end."""
        return []

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The processor time of GPU samplers, in the form of a footer: gpu, cpu_ns, elapsed_ns."""
        return []


MakeDecoder = Callable[[Recording], Decoder]


class ProcessDecoder(Decoder):
    """Takes what each library for GPUs tells of its process: names, GPUs, messages, Python stacks."""

    kinds = kept = frozenset({Kind.NAME, Kind.GPU, Kind.NOTE, Kind.STACK, Kind.FRAME})

    def add(self, lines: Lines, record: GpuRecord) -> None:
        recording, kind, payload = self._recording, record.kind, record.payload
        process = recording.process(record.pid)
        if kind == Kind.NAME:
            number, name = read_name(payload)
            recording.memory.use(ENTRY_BYTES + len(name))
            process.names[number] = name
        elif kind == Kind.GPU:
            index, number = recording.gpus.add(payload)
            recording.memory.use(ENTRY_BYTES)
            process.gpus[index] = number
        elif kind == Kind.NOTE:
            recording.note(note(payload))
        elif kind == Kind.STACK:
            recording.stacks.add_stack(record.pid, payload)
        else:
            recording.stacks.add_frame(record.pid, payload)


class GpuRenderer:
    """A `Decoder` of what libraries in a command recorded; each chunk is decoded as a whole. Records that no
    decoder of their kind takes are refused.
    """

    def __init__(self, makers: Sequence[MakeDecoder], gpus: Mapping[str, int] | None = None) -> None:
        """`makers` make the decoders. `gpus`: UUID → number, as in the header."""
        self._makers, self._gpus = makers, dict(gpus or {})
        self.recording = Recording(self._gpus)
        self.news, self.losses = self.recording.notes, self.recording.losses
        self._decoders = [make(self.recording) for make in makers]
        self._by_kind = {kind: decoder for decoder in self._decoders for kind in decoder.kinds}

    @property
    def notes(self) -> list[str]:
        """The messages for the user. They begin with `news`, those that are known before the end."""
        return self.recording.notes + [note for decoder in self._decoders for note in decoder.last_notes]

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs of the records so far, in the form of a header."""
        return self.recording.gpus.reported

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The processor time of processes that sample GPUs so far, in the form of a footer."""
        return [one for decoder in self._decoders for one in decoder.sampling]

    @property
    def cuda_errors(self) -> list[str]:
        """Errors that kernels caused, in sentences."""
        for decoder in self._decoders:
            decoder.find_unended()
        return self.recording.failures.texts

    @property
    def stall_samples(self) -> int:
        """Samples of what warps wait for so far, which are not counted as events."""
        return self.recording.stall_samples

    def render(self, chunk: bytes) -> Lines:
        lines = Lines()
        for record in records(chunk):
            decoder = self._by_kind.get(record.kind)
            try:
                if decoder is None or not record.is_plausible:
                    raise Malformed
                decoder.add(lines, record)
            except REFUSALS as refusal:
                self.recording.refuse(refusal)
        for decoder in self._decoders:
            decoder.end_chunk(lines)
        self.recording.write_refused(lines)
        return lines

    def rest(self) -> Iterator[Lines]:
        """The other lines of the last chunk, a few thousand at a time: all may take hundreds of MB."""
        for decoder in self._decoders:
            yield from decoder.rest()

    def last(self) -> Lines:
        """Called after the last chunk: the lines of records that were waiting for others."""
        lines = Lines()
        for decoder in self._decoders:
            decoder.last(lines)
        return lines

    def resume(self, carried: Carried, start_ns: int) -> Lines:
        self.render(carried.known)
        self.recording.resumed_ns = start_ns
        lines = self.render(carried.under_way)
        self.recording.resumed_ns = None
        return lines

    def counts(self, chunk: bytes) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for record in records(chunk):
            if (decoder := self._by_kind.get(record.kind)) is not None:
                layer, events = decoder.counted(record)
                counts[layer] += events
        return {layer: events for layer, events in counts.items() if events}

    def anew(self) -> GpuRenderer:
        """A new renderer with the settings of this one."""
        return GpuRenderer(self._makers, self._gpus)

    def carry(self) -> ChannelCarry:
        return ChannelCarry(self._decoders)

    def spans(self, wanted: Conditions) -> ChannelSpans:
        """A reader that finds long calls and kernels in such records."""
        return ChannelSpans(wanted, self._decoders)


STACKS_VARIABLE: Final = "TRACEPIPE_GPU_STACKS"
"""The variable that is `off` if the libraries are to read no Python frames."""
_NONE: Final[Mapping[int, str]] = MappingProxyType({})


class RecordStream:
    """Records of one origin: a library in the command's processes, or processes of tracepipe."""

    name: str
    layers: frozenset[str]
    decoders: Sequence[MakeDecoder]
    """The functions that make the decoders of its records."""
    clocks: Sequence[str] = ()
    """Clocks other than CLOCK_MONOTONIC that its times can be on."""
    counters: Sequence[Mapping[str, Any]] = ()
    """The sampled hardware counters, in the form of a header."""
    sees: Mapping[str, Path] = MappingProxyType({})
    """Kind of trigger that a library in the command sees → the library."""
    lost_layers: Mapping[int, str] = _NONE
    """Kind of record → the layer of its losses."""
    lost_reasons: Mapping[int, str] = _NONE
    """Kind of record → reason, for kinds that are lost for other reasons than a full channel."""

    def environment(self) -> dict[str, str]:
        """Variables for the command's environment."""
        return {}

    def enter(self, pids: Sequence[int], settings: Mapping[str, str], meanwhile: Callable[[], None]) -> None:
        """Record running processes, as far as it can; `settings` are those of the engine, and `meanwhile` is
        to be called while it waits for a process. Raises CaptureUnavailable, TracepipeError.
        """

    def expect_windows(self) -> None:
        """Called before a process starts: events are recorded only in windows."""

    def turned(self, turn: Turn) -> None:
        """Called when a window of the recording begins or ends, or the recording itself if it has none."""

    def collect(self, news: list[str], *, is_final: bool) -> bytes:
        """New records that are not from the channel; never waits. Adds messages for the user to `news`."""
        return b""

    def lost(self) -> list[Loss]:
        """Losses of such records since the last call."""
        return []

    def stop(self) -> None:
        """Record no more; what is still sent is collected until `is_over`."""

    def is_over(self) -> bool:
        """Whether nothing more comes but what is in the channel."""
        return True

    def close(self) -> None:
        """Free what it uses."""


class GpuEngine:
    """Records what the GPUs of a command do. It has a channel, which the command's processes find by their
    environment, and streams of records: some come through the channel, others from processes of tracepipe.
    """

    def __init__(
        self,
        streams: Sequence[RecordStream] = (),
        *,
        owner: tuple[int, int] | None = None,
        stacks: str = "python",
        gpus: Sequence[Mapping[str, Any]] = (),
        ring_bytes: int = CHANNEL_BYTES,
    ) -> None:
        """`owner` (user, group): whom the command runs as. `stacks`: of STACKS. `gpus`: those of the machine,
        in the form of a header. The streams are closed with the engine. Raises CaptureUnavailable.
        """
        self.streams: list[RecordStream] = []
        self.name, self.gpus = "", gpus
        self.layers: frozenset[str] = frozenset()
        """The layers that it records; with `userspace`, no probes are attached for calls."""
        self.clocks: Sequence[str] = ()
        self.counters: Sequence[Mapping[str, Any]] = ()
        self.sees: Mapping[str, Path] = {}
        self._renderer: GpuRenderer | None = None
        try:
            self.channel = Channel(ring_bytes, owner=owner)
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        self._settings = {STACKS_VARIABLE: stacks} | self.channel.environment()
        for stream in streams:
            self.add(stream)

    def add(self, stream: RecordStream) -> None:
        """Add a stream, before `renderer` is called."""
        self.streams.append(stream)
        self.name = ", ".join(one.name for one in self.streams)
        self.layers |= stream.layers
        self.clocks = [*self.clocks, *stream.clocks]
        self.counters = [*self.counters, *stream.counters]
        self.sees = {**self.sees, **stream.sees}

    def environment(self) -> dict[str, str]:
        """The variables to add to the command's environment."""
        others = (stream.environment().items() for stream in self.streams)
        return self._settings | {name: text for variables in others for name, text in variables}

    def enter(self, pids: Sequence[int]) -> None:
        """Record running processes from now on. Raises CaptureUnavailable, TracepipeError."""
        for stream in self.streams:
            stream.enter(pids, self._settings, self.channel.accept)

    def collect(self, *, is_final: bool = False) -> bytes:
        """The records since the last call; never waits. `is_final`: the command has ended."""
        chunks = [self.channel.collect(is_final=is_final)]
        chunks += (stream.collect(self.renderer().news, is_final=is_final) for stream in self.streams)
        return b"".join(chunks)

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        layers = {kind: layer for stream in self.streams for kind, layer in stream.lost_layers.items()}
        reasons = {kind: reason for stream in self.streams for kind, reason in stream.lost_reasons.items()}
        losses = self.channel.losses(layers, reasons)
        return losses + [loss for stream in self.streams for loss in stream.lost()]

    def renderer(self) -> GpuRenderer:
        """The decoder of what `collect` returns; used on another thread."""
        if self._renderer is None:
            numbers = {gpu["uuid"]: gpu["index"] for gpu in self.gpus if "uuid" in gpu}
            self._renderer = GpuRenderer(
                [make for stream in self.streams for make in stream.decoders], numbers
            )
        return self._renderer

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Called before a process begins: record only in windows, which the environment describes."""
        self._settings |= waited_for
        self.channel.expect_windows()
        for stream in self.streams:
            stream.expect_windows()

    def turned(self, turn: Turn) -> None:
        """Called in order of time when a window begins or ends, or a recording without windows."""
        for stream in self.streams:
            stream.turned(turn)

    def stop(self) -> None:
        """Ask the processes to stop recording and to undo what the library did; never waits. Their last
        records are collected until `is_over`.
        """
        for stream in self.streams:
            stream.stop()
        self.channel.stop()

    def is_over(self) -> bool:
        """Whether every process has sent its last records and stopped, or has ended."""
        return self.channel.is_over() and all(stream.is_over() for stream in self.streams)

    def close(self) -> None:
        """Free the memory; what the processes still send is not read."""
        for stream in self.streams:
            stream.close()
        self.channel.close()
