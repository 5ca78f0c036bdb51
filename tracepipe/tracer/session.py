"""One capture from start to end: its target, its probes, what they record, and the footer."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

from tracepipe.errors import OutputError
from tracepipe.event.model import HostInstant, named_processes, still_running
from tracepipe.hooks.hook import FilePlace
from tracepipe.tracer.engines.drain import SHORT_S, Tick
from tracepipe.tracer.engines.engine import Attachment, Chunk, Engine, Listeners, Store
from tracepipe.tracer.find.library import find_program
from tracepipe.tracer.flight import FlightRecorder, Outputs
from tracepipe.tracer.frame import footer_of, header_of, instant
from tracepipe.tracer.machine.processes import (
    Processes,
    comm_of,
    ended_first,
    has_process,
    runs_first,
)
from tracepipe.tracer.machine.refusals import shortage_of
from tracepipe.tracer.plan import plan_of
from tracepipe.tracer.records.record import event_count
from tracepipe.tracer.request import ENDED, SIGNAL, CaptureRequest, Plan, window_environment
from tracepipe.tracer.spool import Spool, why
from tracepipe.tracer.summary import CaptureSummary
from tracepipe.tracer.target import Interrupts, Target, blocked, check_not_interrupted
from tracepipe.tracer.windows import WindowCourse
from tracepipe.units import counted

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.streams import GpuEngine

_LAST_RECORDS_S = 4.0  # how long a GPU's last records may take: the library waits 3 s for a running kernel

_LOOK_NS: Final = 50_000_000
_SPARE_BYTES: Final = 16 << 20  # counted by limits of address space; no page of it is ever used
_Given = TypeVar("_Given")


def run_session(
    engine: Engine,
    engine_version: str,
    request: CaptureRequest,
    sink: BinaryIO | Store | Outputs,
    listeners: Listeners,
    device: GpuEngine | None = None,
) -> CaptureSummary:
    """Run and record the request with an engine that works. Raises the errors of `capture`."""
    notify = listeners.notify
    program = find_program(request.command) if request.command else None
    by_signal = SIGNAL in (request.windows.start_on, request.windows.stop_on)
    with blocked(asking=by_signal or request.last is not None) as mask, ExitStack() as cleanup:
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
                target = Target(program, request.command, mask, environment, request.stdout)
                interrupts.target = target
                cleanup.callback(target.close)
            cleanup.enter_context(ended_first())  # this process alone: the command is already forked
            pid, layers = target.pid if target else 0, device.layers if device else frozenset[str]()
            plan, missing = plan_of(engine, request, pid, notify, layers, device.sees if device else {})
            paths = {probe.place.path for probe in plan.probes if isinstance(probe.place, FilePlace)}
            states = {path: _state(path) for path in sorted(paths)}
            began_ns = time.monotonic_ns()
            attachment = engine.attach(plan, notify)
            attach_ns = time.monotonic_ns() - began_ns
            with closing(attachment):
                missing |= attachment.missing
                name = f"{engine.name} {engine_version}".strip() + (f", {device.name}" if device else "")
                header = partial(header_of, request, name, attachment.layers, missing, device)
                summary = _Session(
                    request, sink, listeners, device, interrupts, plan, attachment, header, name, attach_ns
                ).run()
                for path, state in states.items():
                    if _state(path) not in (None, state):  # a probe belongs to a file, not to its name
                        notify(
                            f"{path} was replaced during the recording: "
                            "programs that loaded the new file are not recorded"
                        )
                return summary
        except BaseException:
            if program is not None and (target is None or not target.is_released):
                notify(f"{request.command[0]} was not started")
            elif target is not None and target.poll() is None:
                # A failure of the recording does not end the command, whose work is worth more than the
                # recording.
                notify(f"the recording failed; {request.command[0]} continues (Ctrl-C ends it)")
                interrupts.see_off()
            raise


@dataclass
class _Session:
    """A held command or running processes, the attached probes, and the place for the events."""

    request: CaptureRequest
    sink: BinaryIO | Store | Outputs
    listeners: Listeners
    device: GpuEngine | None
    interrupts: Interrupts
    plan: Plan
    attachment: Attachment
    header: Callable[[HostInstant], dict[str, Any]]
    engine: str
    attach_ns: int
    store: Store = field(init=False)
    windows: WindowCourse = field(init=False)
    _stated: int = 0  # notes of the device
    _answered: int = 0  # requests to write the last events
    _looked_ns: int = 0  # when children were last looked for, after the end of what started them
    _is_waiting: bool = False  # for children, which was reported
    _events: int = 0  # of the probes, where their number is limited

    def run(self) -> CaptureSummary:
        """Record until the target or the recording ends, and write everything."""
        device, attachment, interrupts = self.device, self.attachment, self.interrupts
        target, control, command = interrupts.target, self.listeners.control, self.request.command
        self.windows = WindowCourse(self.request)
        start = instant()
        with closing(Processes(self.request.pids)) as processes:
            if target is None and device is not None:
                device.enter(self.request.pids)  # what waits for this until then has room
            attachment.start()
            self.store = store = self._store()
            collectors = store, *self.listeners.watchers
            if target is not None:
                start = instant()  # the command was held until now, while probes were attached
            try:
                with LastSteps(store) as last:
                    header = self.header(start)
                    for collector in collectors:
                        collector.begin(self.plan, start["monotonic_ns"])
                    runs_first()
                    if target is not None:
                        check_not_interrupted(f"{command[0]} was started")
                        target.release()
                    # Not before the release: a program that cannot be run leaves no file.
                    store.write_record(header)
                    ended_by = last.attempt(lambda: self._follow(start, processes))
                    if control is not None:
                        control.ended()
                    before_ns = time.monotonic_ns()
                    left = last.attempt(lambda: self._running(processes)) or []
                    last.attempt(lambda: self.windows.finish(before_ns))
                    if device is not None:
                        last.attempt(device.stop)
                    last.attempt(attachment.stop)
                    detach_ns = time.monotonic_ns() - before_ns
                    last.attempt(self._move_last_of_device)
                    last.attempt(self._wait_for_room)
                    last.attempt(lambda: self._move_device(is_final=True))
                    for _ in range(2):  # if it fails without memory, the first failure has freed some
                        if last.attempt(self._move_rest):
                            break
                ended_by = ended_by or _failure(store.error)
                end = instant()
                running = _names([pid for pid in left if pid < 0 or has_process(pid)])
                if running:
                    is_told = not (self.request.wait_children or interrupts.count)
                    hint = "; --wait-children records them to their end" if is_told else ""
                    self.listeners.notify(still_running(len(running), running) + hint)
                store.end("interrupt" if interrupts.count else ended_by, running)
                for collector in collectors:
                    collector.finish()
                while not store.wait(0.05):
                    before = interrupts.count
                    interrupts.wait(0)
                    if interrupts.count > before:  # a Ctrl-C leaves out the lines that are not written yet
                        store.abandon()
                self._say_notes(is_final=True)
                renderer = device.renderer() if device else None
                reason = "interrupt" if interrupts.count else ended_by
                footer = footer_of(store, attachment.filtered, renderer, reason, end, running=running)
                store.write_record(footer)
            finally:
                if device is not None:
                    device.stop()
                store.close()
        failure = store.error or attachment.error
        exit_code, state = 0, "complete" if failure is None else "not complete"
        if target is not None and target.poll() is None:
            self.listeners.complete()
            self.listeners.notify(f"the recording is {state}; {command[0]} continues (Ctrl-C ends it)")
        elif failure is not None and store.is_file:
            self.listeners.notify(f"the recording is {state}")
        if target is not None:  # a target that is still running is waited for, without being recorded
            interrupts.see_off()
            exit_code = target.wait().exit_code
        error = hint = ""
        if failure is not None:
            stated = failure if isinstance(failure, OutputError) else shortage_of(failure)
            if stated is None:  # a bug, or what the kernel refused
                raise failure
            error, hint = stated.message, stated.hint
        if not error and not self.windows.count:
            error, hint = self.windows.why_none()
        return CaptureSummary(
            counts=footer["counts"],
            losses=footer["losses"],
            cpu_losses=store.cpu_losses,
            filtered=footer.get("filtered", {}),
            ended_by=footer["ended_by"],
            cuda_errors=tuple(footer.get("cuda_errors", ())),
            running=running,
            exit_code=exit_code,
            wall_ns=before_ns - start["monotonic_ns"],
            attach_ns=self.attach_ns,
            detach_ns=detach_ns,
            engine=self.engine,
            windows=self.windows.recorded,
            error=error,
            hint=hint,
            recordings=tuple(store.recordings),
            stall_samples=device.renderer().stall_samples if device else 0,
        )

    def _store(self) -> Store:
        """Where the records go: a file, the memory of a flight recorder, or the caller's own store."""
        if isinstance(self.sink, Store):
            return self.sink
        if isinstance(self.sink, Outputs):
            assert self.request.last is not None
            return FlightRecorder(
                self.sink,
                self.request.last,
                self.attachment,
                self.device,
                self.header,
                self.listeners.notify,
                self.listeners.control,
            )
        return Spool(
            self.sink,
            self.attachment.renderer(),
            device_renderer=self.device.renderer() if self.device else None,
            is_unordered=self.attachment.is_unordered,
            limits=self.request.limits,
        )

    def _follow(self, start: HostInstant, processes: Processes) -> str:
        """Empty the ring until the target or the recording ends; returns why it ended."""
        control, limits, store, interrupts = (
            self.listeners.control, self.request.limits, self.store, self.interrupts
        )  # fmt: skip
        if control is not None:
            control.began()
        self.windows.start(self.attachment, start["monotonic_ns"], self.device)
        tick = Tick(self.plan.ring_bytes, is_short=self.request.windows.are_asked)
        while True:
            interrupts.wait(tick.wait_s)
            now_ns = time.monotonic_ns()
            order = control.order() if control else None
            if control is None or order is None:
                is_over = self.windows.step(now_ns, interrupts.asked)
            else:
                answer = self.windows.answer(order)
                is_over = self.windows.step(now_ns, interrupts.asked, None if answer.message else order)
                control.answer(ENDED if is_over and order.begins else answer)
            tick.adapt(self._move_device() + self._move_probes() if store.takes_more() else 0)
            self._say_notes()
            if interrupts.asked > self._answered:
                self._answered = interrupts.asked
                store.ask(interrupts.asked_by)
            store.follow()
            ended_by = self._ended(processes) or _failure(store.error or self.attachment.error) or is_over
            if not ended_by and limits.events is not None and self._events >= limits.events:
                ended_by = "number of events"
            if not ended_by and limits.size_bytes is not None and store.size_bytes >= limits.size_bytes:
                ended_by = "size"
            if ended_by:
                return ended_by

    def _ended(self, processes: Processes) -> str:
        """Why there is nothing more to record, or ""."""
        if self.interrupts.target is not None:
            ending = self.interrupts.target.poll()
            return ending.text if ending is not None and not self._waits(processes) else ""
        if self.interrupts.count:
            return "interrupt"
        if self.interrupts.stopped:
            return "stopped"
        return "the processes ended" if processes.have_ended() and not self._waits(processes) else ""

    def _waits(self, processes: Processes) -> bool:
        """Whether children are waited for, and still run. A signal ends the wait."""
        now_ns = time.monotonic_ns()
        if not self.request.wait_children or self.interrupts.count:
            return False
        if now_ns - self._looked_ns >= _LOOK_NS:
            running = self._running(processes)
            self._looked_ns = time.monotonic_ns()
            if running and not self._is_waiting:
                self._is_waiting = True
                who = self.request.command[0] if self.request.command else "the processes"
                waiting = counted(len(running), "process|processes that was|were started")
                names = named_processes(len(running), _names(running))
                self.listeners.notify(
                    f"{who} ended; waiting for {waiting}: {names} (Ctrl-C ends the recording)"
                )
            return bool(running)
        return self._is_waiting

    def _running(self, processes: Processes) -> list[int]:
        """The processes that run on after what started them has ended."""
        target = self.interrupts.target
        if target.poll() is None if target is not None else not processes.have_ended():
            return []
        found = self.attachment.processes()
        if self.device is not None:
            found |= self.device.channel.processes()
        return sorted(pid for pid in found if pid < 0 or has_process(pid))

    def _say_notes(self, *, is_final: bool = False) -> None:
        """Pass on the notes of the library in the target's processes, as they arrive."""
        if self.device is None or self.store.reports_notes:
            return
        renderer = self.device.renderer()
        notes = (renderer.notes if is_final else renderer.news)[self._stated :]
        for note in notes:
            self.listeners.notify(f"{self.device.name}: {note}")
        self._stated += len(notes)

    def _move_probes(self) -> int:
        """Move what has arrived from the probes to the collectors; returns the number of bytes."""
        chunk, collectors = self.attachment.collect(), (self.store, *self.listeners.watchers)
        if chunk:
            if self.request.limits.events is not None:
                self._events += event_count(chunk)
            for collector in collectors:
                collector.put(Chunk(chunk))
        for loss in self.attachment.lost():
            for collector in collectors:
                collector.put(loss)
        return len(chunk)

    def _move_device(self, *, is_final: bool = False) -> int:
        """Move what has arrived from the library in the command to the store; returns the number of bytes."""
        if self.device is None or not self.store.takes_device:
            return 0
        chunk = self.device.collect(is_final=is_final)
        if chunk:
            self.store.put(Chunk(chunk, of_device=True))
        for loss in self.device.lost():
            self.store.put(loss)
        return len(chunk)

    def _wait_for_room(self) -> None:
        while not self.store.takes_more():
            self.interrupts.wait(SHORT_S)

    def _move_rest(self) -> bool:
        """Move everything that is left of the probes' records."""
        while self._move_probes():
            self._wait_for_room()
            self.store.follow()
        return True

    def _move_last_of_device(self) -> None:
        """Move what the command's processes send before they stop recording; a Ctrl-C ends the wait."""
        ends_s, before = time.monotonic() + _LAST_RECORDS_S, self.interrupts.count
        while self.device is not None and not self.device.is_over() and time.monotonic() < ends_s:
            self._move_device()
            self.interrupts.wait(SHORT_S)
            if self.interrupts.count > before:
                return


def _names(pids: Iterable[int]) -> dict[str, str]:
    """Processes → their names. "?" is that of one of which only the kernel's id, a negative, is known."""
    return {str(abs(pid)): comm_of(pid) if pid > 0 else "?" for pid in pids}


def _failure(error: Exception | None) -> str:
    """The error as a reason for the end of a recording, or "" without an error."""
    return f"an error: {why(error)}" if error is not None else ""


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


def _state(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
