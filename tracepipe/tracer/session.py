"""One capture from start to end: its target, its probes, what they record, and the footer."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from tracepipe.errors import OutputError
from tracepipe.event.model import HostInstant
from tracepipe.hooks.hook import FilePlace, Probe
from tracepipe.tracer.engines.drain import SHORT_S, Tick
from tracepipe.tracer.engines.engine import (
    Attachment,
    Collector,
    DeviceEngine,
    DeviceRenderer,
    Engine,
    Listeners,
    Store,
)
from tracepipe.tracer.find.library import find_program
from tracepipe.tracer.flight import FlightRecorder, Frame, Outputs
from tracepipe.tracer.frame import footer_of, header_of, instant
from tracepipe.tracer.machine.processes import Processes, ended_first, runs_first
from tracepipe.tracer.machine.refusals import shortage_of
from tracepipe.tracer.plan import plan_of
from tracepipe.tracer.records.record import event_count
from tracepipe.tracer.request import ENDED, SIGNAL, CaptureRequest, Plan, window_environment
from tracepipe.tracer.spool import Spool, why
from tracepipe.tracer.summary import CaptureSummary
from tracepipe.tracer.target import Interrupts, Target, blocked, check_not_interrupted
from tracepipe.tracer.windows import WindowCourse

_LAST_RECORDS_S = 4.0  # how long a GPU's last records may take: the library waits 3 s for a running kernel

_SPARE_BYTES: Final = 16 << 20  # counted by limits of address space; no page of it is ever used
_Given = TypeVar("_Given")


def run_session(
    engine: Engine,
    engine_version: str,
    request: CaptureRequest,
    sink: BinaryIO | Store | Outputs,
    listeners: Listeners,
    device: DeviceEngine | None = None,
) -> CaptureSummary:
    """Run and record the request with `engine`, whose check passed. Raises the errors that `capture`
    documents.
    """
    notify = listeners.notify
    program = find_program(request.command) if request.command else None
    by_signal = SIGNAL in (request.windows.start_on, request.windows.stop_on)
    with blocked(asking=by_signal or request.last is not None) as mask, ExitStack() as precedence:
        target: Target | None = None
        interrupts = Interrupts(listeners.control)
        if by_signal:
            notify(f"kill -USR2 {os.getpid()} begins a window; the same signal ends it")
        elif request.last is not None:
            notify(f"kill -USR2 {os.getpid()} writes the last events")
        try:
            if device is not None and request.windows.are_asked:
                device.expect_windows(window_environment(request))
            if program is not None:
                environment = device.environment() if device else {}
                interrupts.target = target = Target(
                    program, request.command, mask, environment, request.stdout
                )
            precedence.enter_context(ended_first())  # this process alone: the command is already forked
            device_layers = device.layers if device else frozenset[str]()
            plan, missing = plan_of(
                engine,
                request,
                target.pid if target else 0,
                notify,
                device_layers,
                device.sees if device else {},
            )
            windows = WindowCourse(request)
            files = ProbedFiles(plan.probes)
            began_ns = time.monotonic_ns()
            attachment = engine.attach(plan, notify)
            attach_ns = time.monotonic_ns() - began_ns
            try:
                missing |= attachment.coverage.missing
                engines = [f"{engine.name} {engine_version}".strip(), *([device.name] if device else [])]
                name = ", ".join(engines)
                session = _Session(
                    request,
                    plan,
                    attachment,
                    device,
                    target,
                    sink,
                    listeners,
                    name,
                    missing,
                    attach_ns,
                    interrupts,
                    windows,
                )
                summary = session.run()
                for path in files.replaced():
                    notify(
                        f"{path} was replaced during the recording: "
                        "programs that loaded the new file are not recorded"
                    )
                return summary
            finally:
                attachment.close()
        except BaseException:
            if program is not None and (target is None or not target.is_released):
                notify(f"{request.command[0]} was not started")
            elif target is not None and target.poll() is None:
                # A failure of the recording does not end the command, whose work is worth more than the
                # recording.
                notify(f"the recording failed; {request.command[0]} continues (Ctrl-C ends it)")
                interrupts.see_off()
            raise
        finally:
            if target is not None:
                target.close()


@dataclass
class _Session:
    """A held command or running processes, the attached probes, and the place for the events."""

    request: CaptureRequest
    plan: Plan
    attachment: Attachment
    device: DeviceEngine | None
    target: Target | None
    sink: BinaryIO | Store | Outputs
    listeners: Listeners
    engine: str
    missing: dict[str, str]
    attach_ns: int
    interrupts: Interrupts
    windows: WindowCourse
    _spool: Spool | None = None
    _stated: int = 0
    _recorder: FlightRecorder | None = None
    _answered: int = 0

    def run(self) -> CaptureSummary:
        start = instant()
        with closing(Processes(self.request.pids)) as processes:
            if self.target is None and self.device is not None:
                self.device.enter(self.request.pids)  # what waits for this until then has room
            self.attachment.start()
            store = self._store()
            if self.target is not None:
                start = instant()  # the command was held until now, while probes were attached
            pump = Pump(
                self.attachment,
                self.device,
                store,
                self.listeners.watchers,
                self.interrupts,
                counts_events=self.request.limits.events is not None,
            )
            try:
                with LastSteps(store) as last:
                    self._begin(store, start)
                    ended_by = last.attempt(lambda: self._follow(store, start, pump, processes))
                    before_ns, detach_ns = self._stop(last)
                    pump.last(last)
                footer = self._end(store, ended_by or _failure(store.error))
            finally:
                if self.device is not None:
                    self.device.stop()
                store.close()
        failure = store.error or self.attachment.error
        exit_code = self._exit_code(failure)
        wall_ns = before_ns - start["monotonic_ns"]
        return self._summary(footer, store, message_of(failure), exit_code, wall_ns, detach_ns)

    def _begin(self, store: Store, start: HostInstant) -> None:
        """Release the command, and begin to record."""
        header = self._header(start)
        for collector in (store, *self.listeners.watchers):
            collector.begin(self.plan, start["monotonic_ns"])
        runs_first()
        if self.target is not None:
            check_not_interrupted(f"{self.request.command[0]} was started")
            self.target.release()
        # Not before the release: a program that cannot be run leaves no file.
        self._write(header)

    def _stop(self, last: LastSteps) -> tuple[int, int]:
        """Stop recording; returns when that began and how long it took, in ns."""
        if self.listeners.control is not None:
            self.listeners.control.ended()
        before_ns = time.monotonic_ns()
        last.attempt(lambda: self.windows.finish(before_ns))
        if self.device is not None:
            last.attempt(self.device.stop)
        last.attempt(self.attachment.stop)
        return before_ns, time.monotonic_ns() - before_ns

    def _end(self, store: Store, ended_by: str) -> dict[str, Any]:
        """Write what was collected, and the footer."""
        end = instant()
        if self._recorder is not None:
            self._recorder.end(self._reason(ended_by))
        self._finish(store)
        self._say_notes(is_final=True)
        renderer = self.device.renderer() if self.device else None
        footer = footer_of(store, self.attachment.filtered, renderer, self._reason(ended_by), end)
        self._write(footer)
        return footer

    def _summary(
        self,
        footer: Mapping[str, Any],
        store: Store,
        stated: tuple[str, str],
        exit_code: int,
        wall_ns: int,
        detach_ns: int,
    ) -> CaptureSummary:
        error, hint = stated
        if not error and not self.windows.count:
            error, hint = self.windows.why_none()
        return CaptureSummary(
            counts=footer["counts"],
            losses=footer["losses"],
            cpu_losses=store.cpu_losses,
            filtered=footer.get("filtered", {}),
            ended_by=footer["ended_by"],
            exit_code=exit_code,
            wall_ns=wall_ns,
            attach_ns=self.attach_ns,
            detach_ns=detach_ns,
            engine=self.engine,
            windows=self.windows.recorded,
            error=error,
            hint=hint,
            recordings=tuple(self._recorder.recordings) if self._recorder else (),
            stall_samples=self.device.renderer().stall_samples if self.device else 0,
        )

    def _store(self) -> Store:
        """Where the records go: a file, the memory of a flight recorder, or the caller's own store."""
        if isinstance(self.sink, Store):
            return self.sink
        if isinstance(self.sink, Outputs):
            assert self.request.last is not None
            frame = Frame(self._header, self._footer)
            self._recorder = FlightRecorder(
                self.sink,
                self.request.last,
                self.attachment,
                self.device,
                frame,
                self.listeners.notify,
                self.listeners.control,
            )
            return self._recorder
        self._spool = Spool(
            self.sink,
            self.attachment.renderer(),
            device_renderer=self.device.renderer() if self.device else None,
            is_unordered=self.attachment.is_unordered,
            limits=self.request.limits,
        )
        return self._spool

    def _header(self, start: HostInstant) -> dict[str, Any]:
        coverage = self.attachment.coverage
        return header_of(self.request, self.engine, coverage, self.missing, self.device, start)

    def _footer(
        self,
        store: Store,
        renderer: DeviceRenderer | None,
        reason: str,
        end: HostInstant,
        evicted: Mapping[str, int],
    ) -> dict[str, Any]:
        return footer_of(store, self.attachment.filtered, renderer, reason, end, evicted)

    def _say_notes(self, *, is_final: bool = False) -> None:
        """Pass on the notes of the library in the target's processes, as they arrive."""
        if self.device is None:
            return
        renderer = self.device.renderer()
        # A flight recorder reports the notes of its recordings' renderers: this renderer gets no records.
        notes = [] if self._recorder else (renderer.notes if is_final else renderer.news)[self._stated :]
        for note in notes:
            self.listeners.notify(f"{self.device.name}: {note}")
        self._stated += len(notes)

    def _follow(self, store: Store, start: HostInstant, pump: Pump, processes: Processes) -> str:
        """Empty the ring until the target or the recording ends; returns why it ended."""
        if self.listeners.control is not None:
            self.listeners.control.began()
        self.windows.start(self.attachment, start["monotonic_ns"], self.device)
        tick = Tick(self.plan.ring_bytes, is_short=self.request.windows.are_asked)
        while True:
            self.interrupts.wait(tick.wait_s)
            over = self._step()
            tick.took(pump.step())
            self._say_notes()
            if self._recorder is not None:
                self._write_last(self._recorder)
            error = store.error or self.attachment.error
            ended_by = self._ended(processes) or _failure(error) or over or self._limit_reached(store, pump)
            if ended_by:
                return ended_by

    def _step(self) -> str:
        """Begin or end the window that is due; returns why that ends the recording, or ""."""
        control, now_ns = self.listeners.control, time.monotonic_ns()
        order = control.order() if control else None
        if control is None or order is None:
            return self.windows.step(now_ns, self.interrupts.asked)
        answer = self.windows.answer(order)
        over = self.windows.step(now_ns, self.interrupts.asked, None if answer.message else order)
        control.answer(ENDED if over and order.begins else answer)
        return over

    def _write_last(self, recorder: FlightRecorder) -> None:
        """Let the recorder process what arrived, and write what was requested."""
        if self.interrupts.asked > self._answered:
            self._answered = self.interrupts.asked
            recorder.ask(self.interrupts.asked_by)
        recorder.follow()

    def _ended(self, processes: Processes) -> str:
        """Why there is nothing more to record, or ""."""
        if self.target is not None:
            ending = self.target.poll()
            return ending.text if ending is not None else ""
        if self.interrupts.count:
            return "interrupt"
        if self.interrupts.stopped:
            return "stopped"
        return "the processes ended" if processes.have_ended() else ""

    def _limit_reached(self, store: Store, pump: Pump) -> str:
        limits = self.request.limits
        if limits.events is not None and pump.events >= limits.events:
            return "number of events"
        if limits.size_bytes is not None and store.size_bytes >= limits.size_bytes:
            return "size"
        return ""

    def _finish(self, store: Store) -> None:
        """Wait until the lines are written; a Ctrl-C leaves out the rest of them."""
        for collector in (store, *self.listeners.watchers):
            collector.finish()
        while not store.wait(0.05):
            before = self.interrupts.count
            self.interrupts.wait(0)
            if self.interrupts.count > before:
                store.abandon()

    def _reason(self, ended_by: str) -> str:
        return "interrupt" if self.interrupts.count else ended_by

    def _exit_code(self, failure: Exception | None) -> int:
        """The target's exit code; a target that is still running is waited for, without being recorded."""
        state = "complete" if failure is None else "not complete"
        if self.target is not None and self.target.poll() is None:
            self.listeners.complete()
            self.listeners.notify(
                f"the recording is {state}; {self.request.command[0]} continues (Ctrl-C ends it)"
            )
        elif self._spool is not None and failure is not None:
            self.listeners.notify(f"the recording is {state}")
        if self.target is None:
            return 0
        self.interrupts.see_off()
        return self.target.wait().exit_code

    def _write(self, record: dict[str, Any]) -> None:
        if self._spool is not None:
            self._spool.write_record(record)


def _failure(error: Exception | None) -> str:
    """The error as a reason for the end of a recording, or "" without an error."""
    return f"an error: {why(error)}" if error is not None else ""


class Pump:
    """Moves what has arrived at each `step`, and at the end everything that is left."""

    def __init__(
        self,
        attachment: Attachment,
        device: DeviceEngine | None,
        store: Store,
        watchers: Sequence[Collector],
        interrupts: Interrupts,
        *,
        counts_events: bool,
    ) -> None:
        self._attachment, self._device, self._interrupts = attachment, device, interrupts
        self._store, self._collectors = store, (store, *watchers)
        self._counts_events = counts_events
        self.events = 0
        """How many events came from the probes, if `counts_events`."""

    def step(self) -> int:
        """Move what has arrived, if the store can take it; returns the number of bytes."""
        return self._take_device() + self._take_probes() if self._takes_more() else 0

    def last(self, steps: LastSteps) -> None:
        """Move what is left, after everything has stopped."""
        steps.attempt(self._take_last_of_device)
        steps.attempt(self._wait_for_room)
        steps.attempt(lambda: self._take_device(is_final=True))
        for _ in range(2):  # if it fails without memory, the first failure has freed some
            if steps.attempt(self._take_rest):
                break

    def _takes_more(self) -> bool:
        return not isinstance(self._store, Spool) or self._store.takes_more()

    def _wait_for_room(self) -> None:
        """Wait until the store can take more."""
        while not self._takes_more():
            self._interrupts.wait(SHORT_S)

    def _take_rest(self) -> bool:
        while self._take_probes():
            self._wait_for_room()
            if isinstance(self._store, FlightRecorder):
                self._store.follow()
        return True

    def _take_probes(self) -> int:
        chunk = self._attachment.collect()
        if chunk:
            if self._counts_events:
                self.events += event_count(chunk)
            for collector in self._collectors:
                collector.put(chunk)
        for loss in self._attachment.lost():
            for collector in self._collectors:
                collector.put_loss(loss)
        return len(chunk)

    def _take_device(self, *, is_final: bool = False) -> int:
        if self._device is None or not isinstance(self._store, (Spool, FlightRecorder)):
            return 0
        chunk = self._device.collect(is_final=is_final)
        if chunk:
            self._store.put_device(chunk)
        for loss in self._device.lost():
            self._store.put_loss(loss)
        return len(chunk)

    def _take_last_of_device(self) -> None:
        """Move the records that the target's processes send before they stop recording; a Ctrl-C ends the
        wait.
        """
        ends_s = time.monotonic() + _LAST_RECORDS_S
        before = self._interrupts.count
        while self._device is not None and not self._device.is_over() and time.monotonic() < ends_s:
            self._take_device()
            self._interrupts.wait(SHORT_S)
            if self._interrupts.count > before:
                return


class LastSteps:
    """Runs steps that may fail, and keeps spare memory for the steps after a failure, so that a recording
    that ran out of memory is still ended properly. The first failure becomes the error of the store, which
    from then on only counts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._spare: mmap.mmap | None = None

    def __enter__(self) -> LastSteps:
        with suppress(OSError):
            self._spare = mmap.mmap(-1, _SPARE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def attempt(self, step: Callable[[], _Given]) -> _Given | None:
        """The result of a step; None if it fails."""
        try:
            return step()
        except Exception as error:
            self.__exit__()
            self._store.error = self._store.error or error
            return None


def message_of(error: Exception | None) -> tuple[str, str]:
    """The message and the hint for the error that ended a recording. Raises any other error: a bug, or what
    the kernel refused.
    """
    if error is None:
        return "", ""
    stated = error if isinstance(error, OutputError) else shortage_of(error)
    if stated is None:
        raise error
    return stated.message, stated.hint


class ProbedFiles:
    """The files of some probes, and their state when the object was made."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        paths = {probe.place.path for probe in probes if isinstance(probe.place, FilePlace)}
        self._states = {path: _state(path) for path in paths}

    def replaced(self) -> list[str]:
        """The paths that are now another file, or have changed contents; without those that no longer
        exist.
        """
        now = {path: _state(path) for path in self._states}
        return sorted(path for path, before in self._states.items() if now[path] not in (None, before))


def _state(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
