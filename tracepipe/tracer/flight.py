"""A flight recorder: keeps the last records in memory, unrendered, and writes them on request.

    collect ─▶ segment │ segment │ … │ segment ─▶ too old, or no room ─▶ carry: what later records need
                 └─────────── asked ──────────┘
                       carried, then all ─▶ Spool ─▶ lines of a file, on a separate thread

Only what is written is rendered to lines. Evicted records are read once, for names and open calls, which
takes a quarter of the time of rendering them. Conditions of `--when` are `[KIND:]NAME > TIME`, as in
`cudaStreamSynchronize > 50ms` and `nvtx:step* > 200ms`.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, runtime_checkable

from tracepipe.errors import OutputError, TracepipeError
from tracepipe.event.model import HostInstant
from tracepipe.hooks.names import did_you_mean
from tracepipe.tracer.engines.engine import Attachment, Chunk, Store
from tracepipe.tracer.frame import footer_of, instant
from tracepipe.tracer.machine.processes import own_namespace
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES, Loss
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.records.unrendered import (
    CALL,
    KERNEL,
    NVTX,
    SYSCALL,
    Carried,
    Condition,
    Conditions,
    RecordSpans,
    Span,
)
from tracepipe.tracer.request import Control, Last, Notify, Plan
from tracepipe.tracer.spool import Spool, decoders_of
from tracepipe.tracer.summary import Recording
from tracepipe.units import duration_text

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.streams import GpuEngine, GpuRenderer

_SEGMENTS: Final = 100  # how many parts the kept time and size have; each is evicted as a whole
_ITEM_BYTES: Final = 128  # the memory of each item in addition to its content


@dataclass(eq=False)
class FlightRecorder(Store):
    """Takes what a recording collects. `ask` and the end of the recording write the last part of it."""

    takes_device = reports_notes = True

    outputs: Outputs
    last: Last
    attachment: Attachment
    device: GpuEngine | None
    header: Callable[[HostInstant], Mapping[str, Any]]
    notify: Notify
    control: Control | None = None
    cpu_losses: dict[str, dict[int, int]] = field(default_factory=dict)
    """The losses of the last recording by processor."""
    recordings: list[Recording] = field(default_factory=list)
    """The recordings that were written."""
    error: Exception | None = None
    """A bug, or at the end the reason why a recording is not complete."""
    _ring: Ring = field(init=False)
    _plan: Plan = field(init=False)
    _watch: Watch | None = None
    _never_followed: Counter[str] = field(default_factory=Counter)
    _no_room: deque[tuple[int, Mapping[str, int]]] = field(default_factory=deque)
    _asked: str = ""
    _reason: str = ""
    _running: Mapping[str, str] = field(default_factory=dict)
    _dump: _Dump | None = None
    _notes: set[str] = field(default_factory=set)
    _failure: OutputError | None = None

    def __post_init__(self) -> None:
        self._device_renderer = self.device.renderer() if self.device else None
        # They render no lines.
        self._decoders = decoders_of(self.attachment.renderer(), self._device_renderer)
        self._carries = {of_device: decoder.carry() for of_device, decoder in self._decoders.items()}

    def begin(self, plan: Plan, start_ns: int) -> None:
        """Called first. Raises TracepipeError for a condition that can never be true."""
        self._plan = plan
        self._watch = Watch(self.last, plan, self.device) if self.last.when else None
        self._ring = Ring(self.last, is_unordered=self.attachment.is_unordered)

    def put(self, item: Chunk | Loss) -> None:
        self._ring.put(item)
        if self._watch is not None and isinstance(item, Chunk):
            self._watch.add(item.content, of_device=item.of_device)

    def ask(self, reason: str) -> None:
        self._asked = self._asked or reason

    def follow(self) -> None:
        """Called at each step: evict what is too old or does not fit, and write what was requested."""
        now_ns = self._ring.turn()["monotonic_ns"]
        while (dropped := self._ring.drop(now_ns)) is not None:
            segment, end_ns, has_no_room = dropped
            evicted: Counter[str] = Counter()
            for item in segment.items:
                if isinstance(item, Chunk):
                    self._carries[item.of_device].add(item.content)
                    if has_no_room:
                        evicted.update(self._decoders[item.of_device].counts(item.content))
                elif item.layer is None:  # a thread that is not followed is missing from then on
                    self._never_followed[item.reason] += item.count
            if evicted:
                self._no_room.append((end_ns, evicted))
        while self._no_room and self._no_room[0][0] <= now_ns - self.last.duration_ns:
            self._no_room.popleft()
        if self._watch is not None and (reason := self._watch.due(now_ns)):
            self.ask(reason)
        if self._dump is not None and not self._dump.thread.is_alive():
            self._finish_dump(self._dump)
        if self._asked and self._dump is None:
            self._dump = self._begin_dump(self._asked)
            self._asked = ""

    def end(self, reason: str, running: Mapping[str, str]) -> None:
        """Set why the recording ends: what is kept is written a last time by `finish`."""
        self._reason, self._running = reason, running

    def finish(self) -> None:
        """Called at the end: write what is kept."""
        self._asked = self._reason
        self.follow()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the requested recordings for at most `timeout_s`; returns whether all are written."""
        if self._dump is not None:
            self._dump.thread.join(timeout_s)
        self.follow()
        is_done = self._dump is None
        if is_done and self.error is None:
            self.error = self._failure
        return is_done

    def abandon(self) -> None:
        if self._dump is not None:
            self._dump.abandon()

    def close(self) -> None:
        self._asked = ""
        if self._dump is not None:
            self._dump.abandon()
            self._dump.thread.join()

    @property
    def counts(self) -> dict[str, int]:
        return self.recordings[-1].counts if self.recordings else {}

    @property
    def losses(self) -> dict[str, int]:
        return self.recordings[-1].losses if self.recordings else {}

    def _finish_dump(self, dump: _Dump) -> None:
        """Report a recording that is written."""
        self._dump = None
        if dump.recording is not None:
            self.recordings.append(dump.recording)
            self.cpu_losses = dump.recording.cpu_losses
            if not self._reason:  # those at the end are in the summary
                self.notify(dump.recording.text)
        for note in dump.device.notes if dump.device else ():
            if note not in self._notes:
                self._notes.add(note)
                name = self.device.name if self.device else ""
                self.notify(f"{name}: {note}" if name else note)
        if self.control is not None and (dump.error is None or isinstance(dump.error, OutputError)):
            path = dump.recording.path if dump.recording else ""
            self.control.wrote(dump.asked, path, dump.error)
        if isinstance(dump.error, OutputError):
            self._failure = self._failure or dump.error
            self.notify(f"{dump.error.message} {dump.error.hint}")
        elif dump.error is not None:
            self.error = dump.error

    def _begin_dump(self, reason: str) -> _Dump:
        """Begin to write what is kept now, on a separate thread."""
        lost = [Loss(None, count, 0, 0, why) for why, count in self._never_followed.items()]
        end, begin = instant(), self._ring.begin
        too_early_ns = end["monotonic_ns"] - self.last.duration_ns - begin["monotonic_ns"]
        dump = _Dump(
            later(begin, max(too_early_ns, 0)),
            end,
            self._ring.items(),
            lost,
            {of_device: carry.carried() for of_device, carry in self._carries.items()},
            dict(sum((Counter(counts) for _, counts in self._no_room), Counter())),
            reason,
            self.attachment.renderer(),
            self._device_renderer.anew() if self._device_renderer else None,
            self.control.asked if self.control else 0,
        )
        dump.thread = threading.Thread(target=self._write, args=(dump,), name="tracepipe-last", daemon=True)
        dump.thread.start()
        return dump

    def _write(self, dump: _Dump) -> None:
        """Write a recording; sets its `recording` or `error`."""
        try:
            with self.outputs.another() as (path, sink):
                sizes_bytes = Counter[bool]()
                for item in dump.items:
                    if isinstance(item, Chunk):
                        sizes_bytes[item.of_device] += len(item.content)
                dump.spool = Spool(
                    sink,
                    dump.renderer,
                    device_renderer=dump.device,
                    is_unordered=self.attachment.is_unordered,
                    sizes_bytes=(sizes_bytes[False], sizes_bytes[True]),
                )
                with closing(dump.spool):
                    self._write_lines(path, dump, dump.spool)
        except Exception as error:  # a bug: raised by the code that waits for the end
            dump.error = dump.error or error

    def _write_lines(self, path: str, dump: _Dump, spool: Spool) -> None:
        began_ns, start_ns = time.monotonic_ns(), dump.start["monotonic_ns"]
        spool.write_record(self.header(dump.start))
        # Records from before the start may follow later ones.
        decoders = decoders_of(dump.renderer, dump.device)
        dividing = {of_device: decoder.carry() for of_device, decoder in decoders.items()}
        early: dict[bool, list[bytes]] = {False: [], True: []}
        late: list[Chunk | Loss] = []
        for item in dump.items:
            if isinstance(item, Loss):
                late.append(item)
                continue
            before, after = dividing[item.of_device].divide(item.content, start_ns)
            early[item.of_device].append(before)
            if after:
                late.append(Chunk(after, item.of_device) if before else item)
        dump.items.clear()
        if self.attachment.is_unordered:
            for item in late:
                if isinstance(item, Chunk) and not item.of_device:
                    dump.renderer.learn(item.content)
        for of_device, decoder in decoders.items():
            carry = decoder.carry()
            for chunk in (*dump.carried[of_device], *early[of_device]):
                carry.add(chunk)
            spool.write_first(decoder.resume(carry.carried(), start_ns))
        spool.begin(self._plan, start_ns)
        if dump.is_abandoned:
            spool.abandon()
        for loss in dump.never_followed:
            spool.put(Loss(None, loss.count, start_ns, start_ns, loss.reason))
        late.reverse()
        while late:  # frees each item as soon as it is put
            spool.put(late.pop())
        spool.finish()
        while not spool.wait(1.0):
            pass
        filtered = self.attachment.filtered
        footer = footer_of(spool, filtered, dump.device, dump.reason, dump.end, dump.evicted, self._running)
        spool.write_record(footer)
        dump.error = spool.error
        dump.recording = Recording(
            path,
            footer["counts"],
            footer["losses"],
            spool.cpu_losses,
            dump.evicted,
            dump.end["monotonic_ns"] - start_ns,
            dump.reason,
            time.monotonic_ns() - began_ns,
            dump.device.stall_samples if dump.device else 0,
        )


@runtime_checkable
class Outputs(Protocol):
    """Provides a file for each recording."""

    def another(self) -> AbstractContextManager[tuple[str, BinaryIO]]:
        """The name and the stream of a file for the next recording. Raises OutputError."""


@dataclass(slots=True)
class _Dump:
    """A recording that is written: what was kept at the time of the request, and what was carried. `asked`:
    the number of requests of the control so far, of which it answers the last one.
    """

    start: HostInstant
    end: HostInstant
    items: list[Chunk | Loss]
    never_followed: list[Loss]
    carried: dict[bool, Carried]  # by whether it is of the device
    evicted: dict[str, int]
    reason: str
    renderer: RecordRenderer
    device: GpuRenderer | None
    asked: int
    thread: threading.Thread = field(init=False)
    spool: Spool | None = None
    is_abandoned: bool = False
    recording: Recording | None = None
    error: Exception | None = None

    def abandon(self) -> None:
        """Write no more lines."""
        self.is_abandoned = True
        if self.spool is not None:
            self.spool.abandon()


@dataclass(slots=True)
class Segment:
    """The items between the begin of this segment and that of the next one, in order."""

    begin: HostInstant
    items: list[Chunk | Loss] = field(default_factory=list)
    size_bytes: int = 0


class Ring:
    """Segments, oldest first; the last one is being filled."""

    def __init__(self, last: Last, *, is_unordered: bool = False) -> None:
        """`is_unordered`: later records may have earlier times than the first one."""
        self._last, self._is_unordered = last, is_unordered
        self._turned = instant()
        self._segments = deque([Segment(self._turned)])
        self._size_bytes = 0
        self._piece_bytes = max(last.size_bytes // _SEGMENTS // RECORD_BYTES, 1) * RECORD_BYTES

    def put(self, item: Chunk | Loss) -> None:
        """Add an item. A large chunk is divided into segments, which can be evicted one by one."""
        if not isinstance(item, Chunk) or item.of_device:
            self._put(item)
            return
        for at in range(0, len(item.content), self._piece_bytes):
            piece, newest = item.content[at : at + self._piece_bytes], self._segments[-1]
            later_ns = RECORD.unpack_from(piece)[0] - newest.begin["monotonic_ns"]
            if at:
                self._segments.append(Segment(later(newest.begin, max(later_ns, 0))))
            elif not newest.items and not self._is_unordered:
                newest.begin = later(newest.begin, later_ns)
            self._put(Chunk(piece))

    def _put(self, item: Chunk | Loss) -> None:
        size_bytes = _ITEM_BYTES + (len(item.content) if isinstance(item, Chunk) else 0)
        newest = self._segments[-1]
        newest.items.append(item)
        newest.size_bytes += size_bytes
        self._size_bytes += size_bytes

    def turn(self) -> HostInstant:
        """Begin a new segment if the last one is long enough; returns the present instant."""
        now, newest = instant(), self._segments[-1]
        passed_ns = now["monotonic_ns"] - newest.begin["monotonic_ns"]
        is_full = newest.size_bytes * _SEGMENTS >= self._last.size_bytes
        if passed_ns * _SEGMENTS >= self._last.duration_ns or is_full:
            newest.items = list(_joined(newest.items))
            # The next records may have been made just after the last turn, while the present ones were
            # collected.
            self._segments.append(Segment(self._turned))
        self._turned = now
        return now

    def drop(self, now_ns: int) -> tuple[Segment, int, bool] | None:
        """Evict a segment that is too old or has no room; returns it, its end, whether it had no room."""
        if len(self._segments) < 2:
            return None
        end_ns = self._segments[1].begin["monotonic_ns"]
        is_old = end_ns <= now_ns - self._last.duration_ns
        has_room = self._size_bytes <= max(self._last.size_bytes, self._segments[0].size_bytes)
        if not is_old and has_room:  # a device's chunk is not divided, and may exceed the size alone
            return None
        oldest = self._segments.popleft()
        self._size_bytes -= oldest.size_bytes
        return oldest, end_ns, not is_old

    @property
    def begin(self) -> HostInstant:
        """The begin of the oldest segment."""
        return self._segments[0].begin

    def items(self) -> list[Chunk | Loss]:
        """All kept items, in order."""
        return [item for segment in self._segments for item in segment.items]


def _joined(items: list[Chunk | Loss]) -> Iterator[Chunk | Loss]:
    """Join adjacent chunks; those of a device stay separate, as each is decoded as a whole."""
    for can_be_joined, some in groupby(items, lambda item: isinstance(item, Chunk) and not item.of_device):
        if can_be_joined:
            yield Chunk(b"".join(item.content for item in some if isinstance(item, Chunk)))
        else:
            yield from some


def later(at: HostInstant, passed_ns: int) -> HostInstant:
    """The instant that is `passed_ns` later."""
    return {
        "monotonic_ns": at["monotonic_ns"] + passed_ns,
        "boottime_ns": at["boottime_ns"] + passed_ns,
        "realtime_ns": at["realtime_ns"] + passed_ns,
    }


AFTER_NS: Final = 10**9
"""How long after a condition became true a recording is written, but at most a quarter of the kept time. It
then has what followed, and the GPU's work, which is reported up to 25 ms late.
"""


class Watch:
    """Reads everything that is collected, and reports when one of the conditions becomes true."""

    def __init__(self, last: Last, plan: Plan, device: GpuEngine | None) -> None:
        """Raises TracepipeError for a condition that can never be true in this recording."""
        self._conditions = Conditions(last.when)
        self._last_ns = last.duration_ns
        syscalls = SYSCALLS.get(platform.machine(), {}) if "syscall" in plan.own else {}
        # The open calls of a thread that has ended do not continue. In its own pid namespace a capture does
        # not know the kernel's thread ids.
        is_known = own_namespace() is None
        self._records = RecordSpans(
            plan.probes,
            self._conditions,
            syscalls,
            is_there=lambda tid: not is_known or Path(f"/proc/{tid}").exists(),
        )
        self._channel = device.renderer().spans(self._conditions) if device else None
        for condition in self._conditions.all:
            _check(condition, plan, device.layers if device else (), syscalls.values())
        self._found: tuple[Condition, Span] | None = None
        self._write_at_ns = self._again_at_ns = 0

    def add(self, chunk: bytes, *, of_device: bool = False) -> None:
        """Read records."""
        reader = self._channel if of_device else self._records
        self._look(reader.ended(chunk) if reader is not None else ())

    def due(self, now_ns: int) -> str:
        """Why a recording is to be written now; "" if none is."""
        if now_ns < self._again_at_ns:  # most of what has ended by now is in the last recording
            self._found = None
            return ""
        self._look(self._records.under_way(now_ns))
        if self._channel is not None:
            self._look(self._channel.under_way(now_ns))
        if self._found is None:
            return ""
        self._write_at_ns = self._write_at_ns or now_ns + min(AFTER_NS, self._last_ns // 4)
        if now_ns < self._write_at_ns:
            return ""
        (condition, span), self._found, self._write_at_ns = self._found, None, 0
        self._again_at_ns = now_ns + self._last_ns
        lasted = "took" if span.is_over else "still runs after"
        return f"{condition.text}: {span.name} {lasted} {duration_text(span.length_ns)}"

    def _look(self, spans: Iterable[Span]) -> None:
        for span in spans:
            true = (one for one in self._conditions.all if span.length_ns > one.limit_ns)
            condition = next((one for one in true if one.fits(span.name, span.kind)), None)
            if condition is None:
                continue
            # The first one is the reason; if it was still open then, its end shows how long it took.
            if self._found is None or (not self._found[1].is_over and self._found[1].name == span.name):
                self._found = condition, span


# Kind → the layer of the engine in the command that records it, and message and hint where it is not
# recorded.
_OF_DEVICE: Final = {
    KERNEL: ("gpu_kernel", "no kernels are recorded", "Give --gpu kernels."),
    NVTX: ("annotation", "no ranges of NVTX are recorded", "Record the layer annotation, of a command."),
}


def _check(condition: Condition, plan: Plan, layers: Collection[str], syscalls: Collection[str]) -> None:
    """Raise TracepipeError for a condition on something that is not recorded."""

    def refused(why: str, hint: str) -> TracepipeError:
        return TracepipeError(f"--when {condition.text!r}: {why}.", hint)

    if condition.kind in _OF_DEVICE:
        layer, why, hint = _OF_DEVICE[condition.kind]
        if layer not in layers:
            raise refused(why, hint)
    elif condition.kind == SYSCALL:
        if not syscalls:
            raise refused("no system calls are recorded", "Record the layer syscall.")
        if not any(condition.fits(name, SYSCALL) for name in syscalls):
            near = did_you_mean(condition.pattern, syscalls)
            recorded = f"These are recorded: {', '.join(sorted(syscalls))}."
            raise refused("no recorded system call has such a name", near or recorded)
    elif "userspace" not in layers:
        names = {name for probe in plan.probes for name in (probe.name, probe.symbol)}
        if not any(condition.fits(name, CALL) for name in names):
            near = did_you_mean(condition.pattern, names)
            hint = near or "--hook records functions of any library."
            raise refused("no recorded function has such a name", hint)
