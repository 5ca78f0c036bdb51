"""The bpftrace process, and the call that gives it orders."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import resource
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.engines.bpftrace.language import TEXT_PIECE_BYTES, Order
from tracepipe.tracer.engines.bpftrace.script import Script
from tracepipe.tracer.request import Notify
from tracepipe.units import counted

# A function that takes two 64-bit integers, is in every C library, and is hardly ever called.
CONTROL = "lldiv"
_MAP_KEYS = 65536
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
_READ_BYTES = 1 << 20
_SCRIPT = 3  # the descriptor of the script in bpftrace
_FOUND = re.compile(rb"Attaching (\d+) probes?\.\.\.\n?")
_SLOW_S = 5.0  # then a message states why nothing happens
# While the kernel detaches probes of another bpftrace, attaching one takes 0.1 s.
_STUCK_S = 60.0


class Control:
    """The function that has the script's control probe."""

    def __init__(self) -> None:
        self._call = ctypes.CDLL(None)[CONTROL]
        self._call.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
        self._call.restype = ctypes.c_int64
        self.path = _file_at(ctypes.cast(self._call, ctypes.c_void_p).value or 0)

    def say(self, order: Order, word: int) -> None:
        """Give an order."""
        self._call(word, order)

    def say_on(self, processors: list[int], order: Order, word: int) -> set[int | None]:
        """Give an order on each of the processors; returns those where this process may not run."""
        unreached: set[int | None] = set()
        allowed = os.sched_getaffinity(0)
        for cpu in processors:
            try:
                os.sched_setaffinity(0, {cpu})
            except OSError:
                unreached.add(cpu)
                continue
            self._call(word, order)
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)
        return unreached


class Bpftrace:
    """The process, and the pipe that it prints to."""

    def __init__(self, script: Script, buffer_bytes: int) -> None:
        # In memory, so nothing is left behind when this process is killed.
        self._source, self._errors = os.memfd_create("capture.bt"), os.memfd_create("errors")
        with os.fdopen(self._source, "w", closefd=False) as source:
            source.write(script.text())
        self.asked_points = script.attach_points
        self.found_points = self.asked_points
        self.has_ended = False
        self._greeted = False
        pages = max(buffer_bytes // resource.getpagesize(), 8)
        environment = {
            **os.environ,
            "BPFTRACE_MAX_PROBES": str(2 * self.asked_points + 64),
            "BPFTRACE_MAX_BPF_PROGS": str(2 * self.asked_points + 64),
            "BPFTRACE_MAP_KEYS_MAX": str(_MAP_KEYS),
            "BPFTRACE_MAX_MAP_KEYS": str(_MAP_KEYS),
            "BPFTRACE_PERF_RB_PAGES": str(1 << (pages - 1).bit_length()),
            "BPFTRACE_STRLEN": str(TEXT_PIECE_BYTES + 1),
            "BPFTRACE_MAX_STRLEN": str(TEXT_PIECE_BYTES + 1),
            "BPFTRACE_STR_TRUNC_TRAILER": "",  # 0.20 ends a text that it cuts with ".."
            "BPFTRACE_NO_CPP_DEMANGLE": "1",
        }
        read, write = os.pipe()
        os.set_blocking(read, False)
        with suppress(OSError):  # above the user's limit the pipe stays smaller
            fcntl.fcntl(write, _F_SETPIPE_SZ, _PIPE_BYTES)
        self._output = read
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            # Each probe needs two descriptors.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            self.pid = os.posix_spawnp(
                "bpftrace",
                ["bpftrace", f"/proc/self/fd/{_SCRIPT}"],
                environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, write, 1),
                    (os.POSIX_SPAWN_DUP2, self._errors, 2),
                    (os.POSIX_SPAWN_DUP2, self._source, _SCRIPT),
                ],
                setsid=True,  # without signals from the terminal
                setsigmask=[],
                # It must die of SIGPIPE when this process ends; Python ignores that signal.
                setsigdef=[signal.SIGPIPE, signal.SIGINT, signal.SIGTERM],
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(write)
        # Every line wakes bpftrace. It must not preempt the target each time: those switches would dominate
        # the scheduler layer.
        with suppress(OSError):
            os.sched_setscheduler(self.pid, os.SCHED_BATCH, os.sched_param(0))

    def read(self, wait_s: float = 0.0) -> bytes:
        """Read what was printed; waits for output for at most `wait_s`."""
        if self.has_ended:
            return b""
        if wait_s and not select.select([self._output], [], [], wait_s)[0]:
            return b""
        try:
            output = os.read(self._output, _READ_BYTES)
        except BlockingIOError:
            return b""
        self.has_ended = not output
        return output

    def without_greeting(self, output: bytes) -> bytes:
        """The output without bpftrace's first line, whose number of probes is kept."""
        found = _FOUND.match(output)
        if found is None or self._greeted:
            return output
        self._greeted = True
        self.found_points = int(found[1])
        return output[found.end() :]

    def errors(self) -> str:
        """Its error output."""
        size_bytes = os.fstat(self._errors).st_size
        return os.pread(self._errors, size_bytes, 0).decode(errors="replace")

    def ending(self) -> str:
        """How it ended by itself; "" if it has not ended yet."""
        with suppress(ProcessLookupError):
            descriptor = os.pidfd_open(self.pid)
            select.select([descriptor], [], [], 1.0)
            os.close(descriptor)
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid:
            return ""
        if os.WIFSIGNALED(status):
            return f"it was killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return f"it ended with exit code {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """Kill it, and let the kernel detach its probes in the background."""
        if self._output < 0:
            return
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        for descriptor in (self._output, self._source, self._errors):
            os.close(descriptor)
        self._output = -1
        _dying.append(self.pid)
        _reap()


class Progress:
    """Checks that bpftrace makes progress while it attaches."""

    def __init__(self, process: Bpftrace, notify: Notify) -> None:
        self._process, self._notify = process, notify
        self._began_s = self._changed_s = time.monotonic()
        self._is_reported = False
        self._state: tuple[int, str] = 0, ""

    def look(self) -> None:
        """Look at its open descriptors and its processor time. Raises CaptureUnavailable if neither has
        changed for a minute.
        """
        now_s = time.monotonic()
        if now_s - self._began_s > _SLOW_S and not self._is_reported:
            self._is_reported = True
            probes = counted(self._process.asked_points, "probe|probes")
            self._notify(f"bpftrace is attaching {probes}; this takes a while")
        folder = Path("/proc", str(self._process.pid))
        with suppress(OSError):
            times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            state = len(list((folder / "fd").iterdir())), " ".join(times)
            if state != self._state:
                self._state, self._changed_s = state, now_s
        if now_s - self._changed_s > _STUCK_S:
            raise CaptureUnavailable(
                "bpftrace made no progress while it attached its probes.",
                "Check whether another bpftrace is still detaching, or choose fewer functions with --only.",
            )


_dying: list[int] = []
"""Killed processes whose probes the kernel is still detaching; each is reaped when a later one is killed."""


def _reap() -> None:
    for pid in list(_dying):
        try:
            ended = os.waitpid(pid, os.WNOHANG)[0]
        except ChildProcessError:
            ended = pid
        if ended:
            _dying.remove(pid)


def _file_at(address: int) -> str:
    """The path of the file that is mapped at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, rest = line.partition(" ")
        start, _, end = span.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return rest.split(maxsplit=4)[4]
    raise CaptureUnavailable("The C library's file cannot be found.", "--method bcc")
