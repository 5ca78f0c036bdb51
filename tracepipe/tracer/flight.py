"""A flight recorder: keeps the last records in memory, unrendered, and writes them on request.

    collect ─▶ segment │ segment │ … │ segment ─▶ too old, or no room ─▶ carry: what later records need
                 └─────────── asked ──────────┘
                       carried, then all ─▶ Spool ─▶ lines of a file, on a separate thread

Only what is written is rendered to lines. Evicted records are read once, for names and open calls, which
takes a quarter of the time of rendering them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, Protocol, runtime_checkable

from tracepipe.errors import OutputError
from tracepipe.event.model import HostInstant
from tracepipe.tracer.engines.engine import Attachment, DeviceEngine, DeviceRenderer, Store
from tracepipe.tracer.frame import instant
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES, Loss
from tracepipe.tracer.records.unrendered import Carried, Carry
from tracepipe.tracer.request import Control, Last, Notify, Plan
from tracepipe.tracer.spool import Spool
from tracepipe.tracer.summary import Recording
from tracepipe.tracer.watch import Watch

_SEGMENTS: Final = 100  # how many parts the kept time and size have; each is evicted as a whole
_ITEM_BYTES: Final = 128  # the memory of each item in addition to its content


class FlightRecorder(Store):
    """Takes what a recording collects. `ask` and the end of the recording write the last part of it."""

    takes_device = reports_notes = True

    def __init__(
        self,
        outputs: Outputs,
        last: Last,
        attachment: Attachment,
        device: DeviceEngine | None,
        frame: Frame,
        notify: Notify,
        control: Control | None = None,
    ) -> None:
        self._outputs, self._last, self._frame, self._notify = outputs, last, frame, notify
        self._attachment, self._device, self._control = attachment, device, control
        self._ring = Ring(last, is_unordered=attachment.is_unordered)
        self._renderer = attachment.renderer()  # it only counts, and renders no lines
        self._device_renderer = device.renderer() if device else None
        self._carry = self._renderer.carry()
        self._device_carry = self._device_renderer.carry() if self._device_renderer else None
        self._never_followed: dict[str, int] = {}
        self._no_room: deque[tuple[int, Mapping[str, int]]] = deque()
        self._plan: Plan | None = None
        self._watch: Watch | None = None
        self.cpu_losses: dict[str, dict[int, int]] = {}
        """The losses of the last recording by processor."""
        self._asked = ""
        self._reason = ""
        self._dump: Dump | None = None
        self._notes: set[str] = set()
        self.recordings: list[Recording] = []
        """The recordings that were written."""
        self.error: Exception | None = None
        """A bug, or at the end the reason why a recording is not complete."""
        self._failure: OutputError | None = None

    def begin(self, plan: Plan, start_ns: int) -> None:
        """Called first: records of this plan follow. Raises TracepipeError for a condition that can never be
        true.
        """
        self._plan = plan
        self._watch = Watch(self._last, plan, self._device) if self._last.when else None
        self._ring = Ring(self._last, is_unordered=self._attachment.is_unordered)

    def put(self, chunk: bytes) -> None:
        """Keep a chunk."""
        self._ring.put(Chunk(chunk, of_device=False))
        if self._watch is not None:
            self._watch.take(chunk)

    def put_device(self, chunk: bytes) -> None:
        """Keep a chunk of the GPU's records."""
        self._ring.put(Chunk(chunk, of_device=True))
        if self._watch is not None:
            self._watch.take_device(chunk)

    def put_loss(self, loss: Loss) -> None:
        """Keep a loss, after the chunks that precede it."""
        self._ring.put(loss)

    def ask(self, reason: str) -> None:
        """Request a recording, which is written now or after the one that is being written."""
        self._asked = self._asked or reason

    def follow(self) -> None:
        """Evict what is too old or does not fit, and write what was requested; called at each step of the
        recording.
        """
        now_ns = self._ring.turn()["monotonic_ns"]
        while (dropped := self._ring.drop(now_ns)) is not None:
            self._take(*dropped)
        while self._no_room and self._no_room[0][0] <= now_ns - self._last.duration_ns:
            self._no_room.popleft()
        if self._watch is not None and (reason := self._watch.due(now_ns)):
            self.ask(reason)
        if self._dump is not None and not self._dump.is_alive():
            self._take_written(self._dump)
        if self._asked and self._dump is None:
            self._dump = self._dump_of(self._asked)
            self._asked = ""
            self._dump.start()

    def end(self, reason: str) -> None:
        """Set why the recording ends: what is kept is written a last time by `finish`."""
        self._reason = reason

    def finish(self) -> None:
        """Called at the end: write what is kept."""
        self._asked = self._reason
        self.follow()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the requested recordings for at most `timeout_s`; returns whether all are written."""
        if self._dump is not None:
            self._dump.join(timeout_s)
        self.follow()
        is_done = self._dump is None
        if is_done and self.error is None:
            self.error = self._failure
        return is_done

    def abandon(self) -> None:
        """Leave out the rest of the recording that is being written."""
        if self._dump is not None:
            self._dump.abandon()

    def close(self) -> None:
        """End the writing."""
        self._asked = ""
        if self._dump is not None:
            self._dump.abandon()
            self._dump.join()

    @property
    def counts(self) -> dict[str, int]:
        """Layer → events of the last recording."""
        return self.recordings[-1].counts if self.recordings else {}

    @property
    def losses(self) -> dict[str, int]:
        """Layer → events lost, as the last recording has it."""
        return self.recordings[-1].losses if self.recordings else {}

    @property
    def evicted(self) -> dict[str, int]:
        """Layer → events of the kept time that did not fit into memory."""
        return dict(sum((Counter(counts) for _, counts in self._no_room), Counter()))

    def _take(self, segment: Segment, end_ns: int, has_no_room: bool) -> None:
        """Carry what later records need of an evicted segment, and count its events if it did not fit."""
        evicted: Counter[str] = Counter()
        for item in segment.items:
            if isinstance(item, Loss):
                if item.layer is None:  # a thread that is not followed is missing from then on
                    self._never_followed[item.reason] = self._never_followed.get(item.reason, 0) + item.count
                continue
            if item.of_device and self._device_renderer is not None and self._device_carry is not None:
                renderer, carry = self._device_renderer, self._device_carry
                carry.take(item.content)
                evicted.update(renderer.counts(item.content) if has_no_room else {})
            else:
                self._carry.take(item.content)
                evicted.update(self._renderer.counts(item.content) if has_no_room else {})
        if evicted:
            self._no_room.append((end_ns, evicted))

    def _take_written(self, dump: Dump) -> None:
        self._dump = None
        if dump.recording is not None:
            self.recordings.append(dump.recording)
            self.cpu_losses = dump.recording.cpu_losses
            if not self._reason:  # those at the end are in the summary
                self._notify(dump.recording.text)
        for note in dump.notes:
            if note not in self._notes:
                self._notes.add(note)
                name = self._device.name if self._device else ""
                self._notify(f"{name}: {note}" if name else note)
        if self._control is not None and (dump.error is None or isinstance(dump.error, OutputError)):
            path = dump.recording.path if dump.recording else ""
            self._control.wrote(dump.asked, path, dump.error)
        if isinstance(dump.error, OutputError):
            self._failure = self._failure or dump.error
            self._notify(f"{dump.error.message} {dump.error.hint}")
        elif dump.error is not None:
            self.error = dump.error

    def _dump_of(self, reason: str) -> Dump:
        assert self._plan is not None
        lost = [Loss(None, count, 0, 0, why) for why, count in self._never_followed.items()]
        end, begin = instant(), self._ring.begin
        too_early_ns = end["monotonic_ns"] - self._last.duration_ns - begin["monotonic_ns"]
        return Dump(
            self._outputs,
            self._frame,
            self._plan,
            self._attachment,
            self._device_renderer.anew() if self._device_renderer else None,
            self._control.asked if self._control else 0,
            Kept(
                later(begin, max(too_early_ns, 0)),
                end,
                self._ring.items(),
                lost,
                self._carry.carried(),
                self._device_carry.carried() if self._device_carry else Carried(),
                self.evicted,
                reason,
            ),
        )


@runtime_checkable
class Outputs(Protocol):
    """Provides a file for each recording."""

    def another(self) -> AbstractContextManager[tuple[str, BinaryIO]]:
        """The name and the stream of a file for the next recording. Raises OutputError."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The functions that make the header and the footer of a recording."""

    header: Callable[[HostInstant], Mapping[str, Any]]
    footer: Callable[[Spool, DeviceRenderer | None, str, HostInstant, Mapping[str, int]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Kept:
    """The contents of a recording: what was kept at the time of the request, and what was carried."""

    start: HostInstant
    end: HostInstant
    items: list[Chunk | Loss]
    never_followed: list[Loss]
    carried: Carried
    of_device: Carried
    evicted: Mapping[str, int]
    reason: str


class Dump(threading.Thread):
    """Writes a recording; the thread ends when the file has its final name."""

    def __init__(
        self,
        outputs: Outputs,
        frame: Frame,
        plan: Plan,
        attachment: Attachment,
        device: DeviceRenderer | None,
        asked: int,
        kept: Kept,
    ) -> None:
        """`asked`: the number of requests of the control so far; this recording answers the last one."""
        super().__init__(name="tracepipe-last", daemon=True)
        self._outputs, self._frame, self._plan, self._kept = outputs, frame, plan, kept
        self._attachment, self._device = attachment, device
        self._renderer = attachment.renderer()
        self._start_ns = kept.start["monotonic_ns"]
        self._spool: Spool | None = None
        self._is_abandoned = False
        self.asked = asked
        self.recording: Recording | None = None
        self.error: Exception | None = None

    @property
    def notes(self) -> list[str]:
        """The notes of the renderer of the GPUs' records."""
        return self._device.notes if self._device else []

    def abandon(self) -> None:
        """Write no more lines."""
        self._is_abandoned = True
        if self._spool is not None:
            self._spool.abandon()

    def run(self) -> None:
        """Write the recording; sets `recording` or `error`."""
        try:
            with self._outputs.another() as (path, sink):
                self._spool = Spool(
                    sink,
                    self._renderer,
                    device_renderer=self._device,
                    is_unordered=self._attachment.is_unordered,
                    sizes_bytes=(self._size_bytes(of_device=False), self._size_bytes(of_device=True)),
                )
                try:
                    self._write(path, self._spool)
                finally:
                    self._spool.close()
        except Exception as error:  # a bug: raised by the code that waits for the end
            self.error = self.error or error

    def _size_bytes(self, *, of_device: bool) -> int:
        chunks = (item for item in self._kept.items if isinstance(item, Chunk))
        return sum(len(chunk.content) for chunk in chunks if chunk.of_device == of_device)

    def _write(self, path: str, spool: Spool) -> None:
        began_ns = time.monotonic_ns()
        kept = self._kept
        spool.write_record(self._frame.header(kept.start))
        early, late = self._divided()
        if self._attachment.is_unordered:
            for item in late:
                if isinstance(item, Chunk) and not item.of_device:
                    self._renderer.learn(item.content)
        carried = _with(self._renderer.carry(), kept.carried, early[False])
        spool.write_first(self._renderer.resume(carried, self._start_ns))
        if self._device is not None:
            of_device = _with(self._device.carry(), kept.of_device, early[True])
            spool.write_first(self._device.resume(of_device, self._start_ns))
        spool.begin(self._plan, self._start_ns)
        if self._is_abandoned:
            spool.abandon()
        for loss in kept.never_followed:
            spool.put_loss(Loss(None, loss.count, self._start_ns, self._start_ns, loss.reason))
        late.reverse()
        while late:  # frees each item as soon as it is put
            item = late.pop()
            if isinstance(item, Loss):
                spool.put_loss(item)
            elif item.of_device:
                spool.put_device(item.content)
            else:
                spool.put(item.content)
        spool.finish()
        while not spool.wait(1.0):
            pass
        footer = self._frame.footer(spool, self._device, kept.reason, kept.end, kept.evicted)
        spool.write_record(footer)
        self.error = spool.error
        self.recording = Recording(
            path,
            footer["counts"],
            footer["losses"],
            spool.cpu_losses,
            dict(kept.evicted),
            kept.end["monotonic_ns"] - self._start_ns,
            kept.reason,
            time.monotonic_ns() - began_ns,
            self._device.stall_samples if self._device else 0,
        )

    def _divided(self) -> tuple[dict[bool, list[bytes]], list[Chunk | Loss]]:
        """Divide the kept items into records from before the start, which may follow later ones, and the
        rest.
        """
        early: dict[bool, list[bytes]] = {False: [], True: []}
        late: list[Chunk | Loss] = []
        carries: dict[bool, Carry] = {False: self._renderer.carry()}
        if self._device is not None:
            carries[True] = self._device.carry()
        for item in self._kept.items:
            if isinstance(item, Loss):
                late.append(item)
                continue
            before, after = carries[item.of_device].divide(item.content, self._start_ns)
            early[item.of_device].append(before)
            if after:
                late.append(Chunk(after, item.of_device) if before else item)
        self._kept.items.clear()
        return early, late


def _with(carry: Carry, carried: Carried, early: list[bytes]) -> Carried:
    """The carried records, after more records were evicted."""
    for chunk in (*carried, *early):
        carry.take(chunk)
    return carry.carried()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole records, as they were collected."""

    content: bytes
    of_device: bool


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
        """Add a collected item. A large chunk is divided into several segments, which can be evicted one by
        one.
        """
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
            self._put(Chunk(piece, of_device=False))

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
            newest.items = _joined(newest.items)
            # The next records may have been made just after the last turn, while the present ones were
            # collected.
            self._segments.append(Segment(self._turned))
        self._turned = now
        return now

    def drop(self, now_ns: int) -> tuple[Segment, int, bool] | None:
        """Evict the oldest segment if it is too old or does not fit; returns it with its end, and whether it
        did not fit.
        """
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


def _joined(items: list[Chunk | Loss]) -> list[Chunk | Loss]:
    """Join adjacent chunks; those of a device stay separate, as each is decoded as a whole."""
    joined: list[Chunk | Loss] = []
    parts: list[bytes] = []
    for item in [*items, None]:
        if isinstance(item, Chunk) and not item.of_device:
            parts.append(item.content)
            continue
        if parts:
            joined.append(Chunk(b"".join(parts), of_device=False))
            parts = []
        if item is not None:
            joined.append(item)
    return joined


def later(at: HostInstant, passed_ns: int) -> HostInstant:
    """The instant that is `passed_ns` later."""
    return {
        "monotonic_ns": at["monotonic_ns"] + passed_ns,
        "boottime_ns": at["boottime_ns"] + passed_ns,
        "realtime_ns": at["realtime_ns"] + passed_ns,
    }
