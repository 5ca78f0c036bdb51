"""One capture from start to end: whose events, probes, what they record, footer."""

from __future__ import annotations

import os
import platform
import select
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, BinaryIO

from tracepipe.capture.engines.engine import Attachment, Collector, DeviceEngine, Engine, Store
from tracepipe.capture.find.library import find_program
from tracepipe.capture.plan import plan_of
from tracepipe.capture.records.line import record_line
from tracepipe.capture.records.record import event_count
from tracepipe.capture.request import CaptureRequest, Control, Notify, Plan
from tracepipe.capture.spool import Spool, cannot_write
from tracepipe.capture.summary import CaptureSummary
from tracepipe.capture.target import Target
from tracepipe.errors import TracepipeError
from tracepipe.event.model import HostInstant, new_header

_TICK_S = 0.002  # how often the ring is emptied: at 1.3 million events a second, 170 kB
_NICE = -10
_GRACE_S = 2.0  # how long an interrupted target may take to end
_INTERRUPTS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_SIGNALS = {*_INTERRUPTS, signal.SIGCHLD}
# What a header says of the request, where it is not the usual.
_OPTIONS = (
    "gpu", "gpu_kernels", "gpu_launches", "gpu_blocks", "gpu_memory_bytes", "gpu_warps", "pids", "comm",
    "system", "children", "hooks", "only", "exclude", "libraries", "min_duration_ns", "sample",
)  # fmt: skip
_SI_KERNEL = 0x80  # siginfo's code of a Ctrl-C from the terminal, which the target got as well


def run_session(
    engine: Engine,
    engine_version: str,
    request: CaptureRequest,
    sink: BinaryIO | Store,
    watchers: Sequence[Collector],
    notify: Notify,
    device: DeviceEngine | None = None,
    control: Control | None = None,
) -> CaptureSummary:
    """Run and record the request with `engine`, whose check passed. Errors as `capture` states them."""
    program = find_program(request.command) if request.command else None
    # Blocked, not handled: the loop takes them one by one, with who sent them.
    # Under nohup, which ignores a closed terminal, a blocked SIGHUP would wait for the loop all the same.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS - ignored)
    try:
        target = None
        if program is not None:
            environment = device.environment() if device else {}
            target = Target(
                program, request.command, {signal.Signals(number) for number in mask}, environment
            )
        try:
            told = device.layers if device else frozenset[str]()
            plan, missing = plan_of(engine, request, target.pid if target else 0, notify, told)
            began_ns = time.monotonic_ns()
            attachment = engine.attach(plan, notify)
            attach_ns = time.monotonic_ns() - began_ns
            try:
                missing |= attachment.coverage.missing
                engines = [f"{engine.name} {engine_version}".strip(), *([device.name] if device else [])]
                name = ", ".join(engines)
                session = _Session(
                    request, plan, attachment, device, target, sink, watchers, name, missing, attach_ns
                )
                session.control = control
                return session.run(notify)
            finally:
                attachment.close()
        finally:
            if target is not None:
                target.close()
    finally:
        # An interrupt that came while this one was dealt with means the same.
        while signal.sigtimedwait(_SIGNALS, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _hurry() -> None:
    """Let this thread, which empties the ring, go before the programs that fill it, as far as that is
    allowed.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def _instant() -> HostInstant:
    """All three host clocks, read within a microsecond."""
    return {
        "monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        "boottime_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "realtime_ns": time.clock_gettime_ns(time.CLOCK_REALTIME),
    }


def _tool() -> str:
    try:
        return f"tracepipe {version('tracepipe')}"
    except PackageNotFoundError:  # run from a source tree
        return "tracepipe"


@dataclass
class _Session:
    """A target that is held, or processes that run; probes that are attached; and where the events go."""

    request: CaptureRequest
    plan: Plan
    attachment: Attachment
    device: DeviceEngine | None
    target: Target | None
    sink: BinaryIO | Store
    watchers: Sequence[Collector]
    engine: str
    missing: dict[str, str]
    attach_ns: int
    control: Control | None = None
    stopped: bool = False
    interrupts: int = 0
    kill_at_s: float = 0.0
    events: int = 0
    _processes: dict[int, int] = field(default_factory=dict)
    _spool: Spool | None = None

    def run(self, notify: Notify) -> CaptureSummary:
        start = _instant()
        try:
            self._open_processes()
            self.attachment.start()
            store = self._store()
            if self.target is not None:
                start = _instant()  # it is held until now: a timeline need not begin with the wait for probes
            try:
                for collector in (store, *self.watchers):
                    collector.begin(self.plan, start["monotonic_ns"])
                _hurry()
                if self.target is not None:
                    self.target.release()
                self._write(self._header(start))  # not before, as a program that cannot be run leaves no file
                if self.control is not None:
                    self.control.began()
                ended_by = self._follow(store, start["monotonic_ns"])
                before_ns = time.monotonic_ns()
                self.attachment.stop()
                detach_ns = time.monotonic_ns() - before_ns
                self._pump(store, is_final=True)
                end = _instant()
                self._finish(store)
                for note in self.device.renderer().notes if self.device else ():
                    notify(f"{self.device.name}: {note}" if self.device else note)
                footer = self._footer(store, ended_by, end)
                self._write(footer)
            finally:
                store.close()
        finally:
            for descriptor in self._processes.values():
                os.close(descriptor)
        return CaptureSummary(
            counts=footer["counts"],
            losses=footer["losses"],
            cpu_losses=store.cpu_losses,
            filtered=footer.get("filtered", {}),
            ended_by=footer["ended_by"],
            exit_code=self._exit_code(notify),
            wall_ns=before_ns - start["monotonic_ns"],
            attach_ns=self.attach_ns,
            detach_ns=detach_ns,
            engine=self.engine,
        )

    def _store(self) -> Store:
        """Where the records go: lines of a file, or the store that was given instead of one."""
        if isinstance(self.sink, Store):
            return self.sink
        self._spool = Spool(
            self.sink,
            self.attachment.renderer(),
            device_renderer=self.device.renderer() if self.device else None,
            is_unordered=self.attachment.is_unordered,
            limits=self.request.limits,
        )
        return self._spool

    def _open_processes(self) -> None:
        """A descriptor of every process that is recorded, which tells of its end."""
        for pid in self.request.pids:
            try:
                self._processes[pid] = os.pidfd_open(pid)
            except OSError as error:
                raise TracepipeError(
                    f"Process {pid} cannot be recorded: {error.strerror}.", "Is it still running?"
                ) from None

    def _follow(self, store: Store, start_ns: int) -> str:
        """Empty the ring until what is recorded ends, or the recording; returns why."""
        while True:
            received = signal.sigtimedwait(_SIGNALS, _TICK_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._interrupt(received.si_signo, is_sent=received.si_code == _SI_KERNEL)
            self._end_in_time()
            self._pump(store)
            if store.error is not None and self.target is not None:
                self.target.send(signal.SIGKILL)
            ended_by = self._ended() or self._limit_reached(store, start_ns)
            if ended_by:
                store.raise_if_failed()
                return ended_by

    def _ended(self) -> str:
        """Why there is nothing more to record, "" as long as there is."""
        if self.target is not None:
            ending = self.target.poll()
            return ending.text if ending is not None else ""
        if self.interrupts:
            return "interrupt"
        if self.stopped:
            return "stopped"
        if self._processes:
            poller = select.poll()
            for descriptor in self._processes.values():
                poller.register(descriptor, select.POLLIN)
            if len(poller.poll(0)) == len(self._processes):
                return "the processes ended"
        return ""

    def _limit_reached(self, store: Store, start_ns: int) -> str:
        limits = self.request.limits
        if limits.duration_ns is not None and time.monotonic_ns() - start_ns >= limits.duration_ns:
            return "duration"
        if limits.events is not None and self.events >= limits.events:
            return "number of events"
        if limits.size_bytes is not None and store.size_bytes >= limits.size_bytes:
            return "size"
        return ""

    def _end_in_time(self) -> None:
        """End what shall end now: by the control, or as it took too long after an interrupt."""
        if self.control is not None and not self.stopped and self.control.is_over():
            self.stopped = True
            if self.target is not None and not self.interrupts:
                self._interrupt(signal.SIGINT)
        if self.kill_at_s and time.monotonic() >= self.kill_at_s and self.target is not None:
            self.target.send(signal.SIGKILL)

    def _interrupt(self, number: int, *, is_sent: bool = False) -> None:
        """End the target, a second time without grace; `is_sent`: it got the signal as well."""
        self.interrupts += 1
        if self.target is None:
            return
        if self.interrupts > 1:
            self.target.send(signal.SIGKILL)
            return
        self.kill_at_s = time.monotonic() + _GRACE_S
        if not is_sent:
            self.target.send(number)

    def _pump(self, store: Store, *, is_final: bool = False) -> None:
        if self.device is not None:
            self._pump_device(self.device, is_final)
        chunk = self.attachment.collect()
        if chunk:
            if self.request.limits.events is not None:
                self.events += event_count(chunk)
            for collector in (store, *self.watchers):
                collector.put(chunk)
        for loss in self.attachment.lost():
            for collector in (store, *self.watchers):
                collector.put_loss(loss)

    def _pump_device(self, device: DeviceEngine, is_final: bool) -> None:
        if self._spool is None:
            return
        chunk = device.collect(is_final=is_final)
        if chunk:
            self._spool.put_device(chunk)
        for loss in device.lost():
            self._spool.put_loss(loss)

    def _finish(self, store: Store) -> None:
        """Wait for the lines; a Ctrl-C leaves the rest of them out."""
        for collector in (store, *self.watchers):
            collector.finish()
        while not store.wait(0.05):
            received = signal.sigtimedwait(_INTERRUPTS, 0)
            if received is not None:
                self.interrupts += 1
                store.abandon()
        store.raise_if_failed()

    def _exit_code(self, notify: Notify) -> int:
        """The target's; a target that goes on after a limit is waited for, untraced."""
        if self.target is None:
            return 0
        if self.target.poll() is None:
            notify(f"the recording is complete; {self.request.command[0]} goes on (Ctrl-C ends it)")
        while (ending := self.target.poll()) is None:
            received = signal.sigtimedwait(_SIGNALS, 1.0)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._interrupt(received.si_signo, is_sent=received.si_code == _SI_KERNEL)
            self._end_in_time()
        return ending.exit_code

    def _header(self, start: HostInstant) -> dict[str, Any]:
        told = sorted(self.device.layers) if self.device else ()
        request, usual = asdict(self.request), asdict(CaptureRequest())
        said = {**request, **request["filters"]}
        usual |= usual["filters"]
        header = new_header(
            tool=_tool(),
            host=platform.node(),
            kernel=platform.release(),
            machine=platform.machine(),
            command=self.request.command,
            engine=self.engine,
            clock="monotonic",
            clocks=["monotonic", *(self.device.clocks if self.device else ())],
            start=start,
            layers={
                "asked": list(self.request.layers),
                "got": list(dict.fromkeys((*self.attachment.coverage.got, *told))),
                "missing": self.missing,
            },
            options={name: said[name] for name in _OPTIONS if said[name] != usual[name]},
        )
        if self.device is not None and self.device.gpus:
            header["gpus"] = [dict(gpu) for gpu in self.device.gpus]
        return dict(header)

    def _footer(self, store: Store, ended_by: str, end: HostInstant) -> dict[str, Any]:
        footer: dict[str, Any] = {
            "type": "footer",
            "counts": store.counts,
            "losses": store.losses,
            "end": end,
            "ended_by": "interrupt" if self.interrupts else ended_by,
        }
        if store.cpu_losses:
            footer["cpu_losses"] = {
                layer: {str(cpu): count for cpu, count in sorted(by_cpu.items())}
                for layer, by_cpu in store.cpu_losses.items()
            }
        if self.device is not None:
            renderer = self.device.renderer()
            if renderer.gpus:
                footer["gpus"] = renderer.gpus
        if self.attachment.filtered:
            footer["filtered"] = self.attachment.filtered
        return footer

    def _write(self, record: dict[str, Any]) -> None:
        if isinstance(self.sink, Store):
            return
        try:
            self.sink.write(record_line(record).encode())
            self.sink.flush()
        except OSError as error:
            raise cannot_write(error) from None
