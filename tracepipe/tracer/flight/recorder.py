"""A flight recorder: keeps the last records in memory, unrendered, and writes them on request.

    collect ─▶ segment │ segment │ … │ segment ─▶ too old, or no room ─▶ carry: what later records need
                 └─────────── asked ──────────┘
                       carried, then all ─▶ Spool ─▶ lines of a file

Only what is written is rendered to lines. Evicted records are read once, for names and open calls, which
takes a quarter of the time of rendering them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from tracepipe.errors import OutputError
from tracepipe.tracer.engines.engine import Attachment, DeviceEngine
from tracepipe.tracer.flight.dump import Dump, Frame, Kept, Outputs
from tracepipe.tracer.flight.ring import Chunk, Ring, Segment, later
from tracepipe.tracer.flight.watch import Watch
from tracepipe.tracer.frame import instant
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.records.unrendered import Carried
from tracepipe.tracer.request import Control, Last, Notify, Plan
from tracepipe.tracer.summary import Recording


class FlightRecorder:
    """Takes what a recording collects. `ask` and the end of the recording write the last part of it."""

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
    def size_bytes(self) -> int:
        """0, as nothing is written until it is requested."""
        return 0

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
