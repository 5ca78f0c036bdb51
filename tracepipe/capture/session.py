"""One capture from start to end: target, probes, events, footer."""

from __future__ import annotations

import json
import platform
import signal
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, BinaryIO

from tracepipe.capture.driver import driver_functions
from tracepipe.capture.elf import Elf
from tracepipe.capture.engine import (
    CaptureRequest,
    CaptureSummary,
    DriverFunction,
    Engine,
    Function,
    Notify,
    Plan,
    Recording,
)
from tracepipe.capture.library import LIBCUDA, find_library, find_program
from tracepipe.capture.spool import Spool, cannot_write
from tracepipe.capture.target import Ending, Target
from tracepipe.errors import CaptureUnavailable, InputError
from tracepipe.model import HostInstant, new_header

_TICK_S = 0.002  # how often the ring is emptied: at 1.3 million events a second, 170 kB
_GRACE_S = 2.0  # how long an interrupted target may take to end
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
_SI_KERNEL = 0x80  # siginfo's code of a Ctrl-C from the terminal, which the target got as well


def run_session(
    engine: Engine, engine_version: str, request: CaptureRequest, sink: BinaryIO, notify: Notify
) -> CaptureSummary:
    """Run and record the request with `engine`, whose check passed. Errors as `capture` states them."""
    program = find_program(request.command)
    plan, missing = _plan(engine, request, program, notify)
    # Blocked, not handled: the loop takes them one by one, with who sent them.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        target = Target(program, request.command, {signal.Signals(number) for number in mask})
        try:
            recording = engine.attach(plan, notify)
            try:
                missing |= recording.coverage.missing
                session = _Session(
                    request, recording, target, sink, f"{engine.name} {engine_version}", missing
                )
                return session.run()
            finally:
                recording.close()
        finally:
            target.close()
    finally:
        # An interrupt that came while this one was dealt with means the same.
        while signal.sigtimedwait(_SIGNALS, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _plan(
    engine: Engine, request: CaptureRequest, program: str, notify: Notify
) -> tuple[Plan, dict[str, str]]:
    """What to attach, and the layers that cannot be: layer → why."""
    missing = {
        layer: f"the {engine.name} engine does not record it"
        for layer in request.layers
        if layer not in engine.layers
    }
    library, functions = None, list[Function]()
    if "userspace" in request.layers and "userspace" not in missing:
        library = request.library or find_library(program)
        if library is None:
            missing["userspace"] = f"{LIBCUDA} was not found for {Path(program).name}; --library names one"
        else:
            functions = _functions(library)
            if not functions:
                missing["userspace"] = f"{library} exports no cu* function"
    driver: list[DriverFunction] = []
    if "kernel" in request.layers and "kernel" not in missing:
        driver, reason = driver_functions()
        if reason:
            missing["kernel"] = reason
    for layer, reason in missing.items():
        notify(f"no {layer} layer: {reason}")
    layers = tuple(layer for layer in request.layers if layer not in missing)
    if not layers:
        raise CaptureUnavailable(
            "None of the layers that were asked for can be recorded: "
            + "; ".join(f"{layer}: {reason}" for layer, reason in missing.items())
            + ".",
            f"Layers of the {engine.name} engine: {', '.join(sorted(engine.layers))}.",
        )
    ring_bytes = 1 << (max(request.ring_bytes, 4096) - 1).bit_length()
    return Plan(layers, library, functions, ring_bytes, driver), missing


def _functions(library: str) -> list[Function]:
    try:
        with Elf(library) as elf:
            return elf.exported_functions("cu")
    except OSError as error:
        raise InputError(str(error.strerror), "--library takes a libcuda.so.1", path=library) from None


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
    """A target that is held, probes that are attached, and where the events go."""

    request: CaptureRequest
    recording: Recording
    target: Target
    sink: BinaryIO
    engine: str
    missing: dict[str, str]
    interrupts: int = 0
    kill_at_s: float = 0.0

    def run(self) -> CaptureSummary:
        start = _instant()
        self._write(self._header(start))
        spool = Spool(self.sink, self.recording.renderer())
        try:
            self.recording.arm(self.target.pid)
            self.target.release()
            ending = self._follow(spool)
            before_ns = time.monotonic_ns()
            self.recording.stop()
            detach_ns = time.monotonic_ns() - before_ns
            self._pump(spool)
            end = _instant()
            self._finish(spool)
            footer = self._footer(spool, ending, end)
            self._write(footer)
        finally:
            spool.close()
        return CaptureSummary(
            counts=footer["counts"],
            losses=footer["losses"],
            ended_by=footer["ended_by"],
            exit_code=ending.exit_code,
            wall_ns=end["monotonic_ns"] - start["monotonic_ns"],
            detach_ns=detach_ns,
            engine=self.engine,
        )

    def _follow(self, spool: Spool) -> Ending:
        """Empty the ring until the target ends or is made to."""
        while True:
            received = signal.sigtimedwait(_SIGNALS, _TICK_S)
            if received is not None and received.si_signo != signal.SIGCHLD:
                self._interrupt(received)
            if self.kill_at_s and time.monotonic() >= self.kill_at_s:
                self.target.send(signal.SIGKILL)
            self._pump(spool)
            if spool.error is not None:
                self.target.send(signal.SIGKILL)
            ending = self.target.poll()
            if ending is not None:
                spool.raise_if_failed()
                return ending

    def _interrupt(self, received: signal.struct_siginfo) -> None:
        self.interrupts += 1
        if self.interrupts > 1:
            self.target.send(signal.SIGKILL)
            return
        self.kill_at_s = time.monotonic() + _GRACE_S
        if received.si_code != _SI_KERNEL:
            self.target.send(received.si_signo)

    def _pump(self, spool: Spool) -> None:
        chunk = self.recording.collect()
        if chunk:
            spool.put(chunk)
        for loss in self.recording.lost():
            spool.put_loss(loss)

    def _finish(self, spool: Spool) -> None:
        """Wait for the lines; a Ctrl-C leaves the rest of them out."""
        spool.finish()
        while not spool.wait(0.05):
            received = signal.sigtimedwait({signal.SIGINT, signal.SIGTERM}, 0)
            if received is not None:
                self.interrupts += 1
                spool.abandon()
        spool.raise_if_failed()

    def _header(self, start: HostInstant) -> dict[str, Any]:
        header = new_header(
            tool=_tool(),
            host=platform.node(),
            kernel=platform.release(),
            machine=platform.machine(),
            command=self.request.command,
            engine=self.engine,
            clock="monotonic",
            clocks=["monotonic"],
            start=start,
            layers={
                "asked": list(self.request.layers),
                "got": self.recording.coverage.got,
                "missing": self.missing,
            },
        )
        return dict(header)

    def _footer(self, spool: Spool, ending: Ending, end: HostInstant) -> dict[str, Any]:
        return {
            "type": "footer",
            "counts": spool.counts,
            "losses": spool.losses,
            "end": end,
            "ended_by": "interrupt" if self.interrupts else ending.text,
        }

    def _write(self, record: dict[str, Any]) -> None:
        try:
            self.sink.write(json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode() + b"\n")
            self.sink.flush()
        except OSError as error:
            raise cannot_write(error) from None
