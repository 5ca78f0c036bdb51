"""Stacks of Python without root: this process reads the frames of the command, which is its child.

    199 times a second:  interpreter ──▶ thread state ──▶ frame ──previous──▶ frame …

The program is neither stopped nor changed, and gets no signal. It may call and return while its frames are
read: a walk whose innermost frame has changed meanwhile is counted. Its outer frames are right; the inner
ones are of the microseconds of the walk.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

from tracepipe.hooks.hook import HOST_SAMPLE
from tracepipe.tracer.engines.engine import Attachment
from tracepipe.tracer.engines.host_stacks import FRAME_BYTES, HZ, NONE, OF_C, HostStacks, Process
from tracepipe.tracer.records.record import ON_CPU_SAMPLE, RECORD
from tracepipe.tracer.request import Cause, Notify, Plan

_THREADS_MAX: Final = 16  # of a process, the newest
_PROCESSES_MAX: Final = 16
_DEEPEST: Final = 128
_STATE_BYTES: Final = 192  # of a thread state, with all that is read of it
_LOOK_S: Final = 0.1  # between two looks for child processes
_TORN_SHARE: Final = 0.05  # of the walks, from which on it is reported


class PythonSampler(Attachment):
    """Samples the Python of a command and of its children."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        super().__init__(plan)
        self.layers = [HOST_SAMPLE]
        self._notify, self._scope = notify, plan.scope
        self._host_stacks: HostStacks = HostStacks(
            lambda *_: None, lambda pid: pid, lambda _: None, is_alone=True
        )
        self._records: deque[bytes] = deque()
        self._is_open = plan.windows is None
        self._is_over = threading.Event()
        self._bug: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="tracepipe-stacks", daemon=True)
        self._children: set[int] = set()
        self._found: list[int] = []
        self._look_s = 0.0
        self.walks = self.torn = 0

    def start(self) -> None:
        super().start()
        self._thread.start()

    def collect(self) -> bytes:
        if self._bug is not None:
            raise self._bug
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._records.popleft())
        return b"".join(found) + super().collect()

    def processes(self) -> set[int]:
        return set(self._children)

    def open_window(self, since_ns: int, at_ns: int | None = None, *, name: str = "") -> int:
        self._is_open = True
        return super().open_window(since_ns, at_ns, name=name)

    def close_window(self, cause: Cause, at_ns: int | None = None) -> int:
        self._is_open = False
        return super().close_window(cause, at_ns)

    def stop(self) -> None:
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            if self.torn > _TORN_SHARE * self.walks:
                share = 100 * self.torn / self.walks
                self._notify(
                    f"in {share:.0f}% of the stacks, the innermost frame changed while they were read"
                )

    def close(self) -> None:
        self.stop()
        self._host_stacks.close()

    def _work(self) -> None:
        try:
            self._sample()
        except Exception as error:  # a bug: raised where records are collected
            self._bug = error

    def _sample(self) -> None:
        next_s = time.monotonic()
        own = Path("/proc/self/cmdline").read_bytes()
        while not self._is_over.is_set():
            next_s = max(next_s + 1 / HZ, time.monotonic())
            self._is_over.wait(next_s - time.monotonic())
            if not self._is_open:
                continue
            for pid in self._running():
                with suppress(OSError, struct.error):
                    # Until it executes the command, a child of this process is a copy of it.
                    if pid in self._children or Path(f"/proc/{pid}/cmdline").read_bytes() != own:
                        self._children.add(pid)
                        self._sample_process(pid)

    def _running(self) -> list[int]:
        """The command, and its children where they are recorded."""
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s, found = now_s + _LOOK_S, list(self._scope.pids)
            for pid in found if self._scope.children else ():
                with suppress(OSError):
                    for thread in Path(f"/proc/{pid}/task").iterdir():
                        found += map(int, (thread / "children").read_bytes().split())
                if len(found) >= _PROCESSES_MAX:
                    break
            self._found = found[:_PROCESSES_MAX]
        return self._found

    def _sample_process(self, pid: int) -> None:
        process = self._host_stacks.look(pid)
        layout = process.layout
        if layout is None:
            return
        state = process.word(process.word(process.interpreter_at) + layout.threads)
        for _ in range(_THREADS_MAX):
            if not state:
                break
            now_ns = time.monotonic_ns()
            data = process.read(state, _STATE_BYTES)
            tid, where = _word(data, layout.id), state + layout.frame
            if layout.in_pthread != NONE:
                tid = process.word(tid + layout.in_pthread)
            if layout.between != NONE:
                where = process.word(where) + layout.between
            self._walk(process, now_ns, tid & 0xFFFFFFFF, where)
            state = _word(data, layout.next)

    def _walk(self, process: Process, now_ns: int, tid: int, where: int) -> None:
        """Sample a thread. The pointer to its innermost frame is at `where`."""
        layout = process.layout
        assert layout is not None
        frames, innermost = list[tuple[int, int]](), process.word(where)
        frame = innermost
        while frame and len(frames) < _DEEPEST:
            data = process.read(frame, FRAME_BYTES[process.minor])
            if layout.owner == NONE or data[layout.owner] != OF_C:
                frames.append((_word(data, layout.code), _word(data, layout.at)))
            frame = _word(data, layout.previous)
        if not frames:
            return
        self.walks += 1
        self.torn += process.word(where) != innermost
        number = self._host_stacks.put(process, frames, is_cut=bool(frame))
        self._records.append(RECORD.pack(now_ns, tid, process.pid, 0, ON_CPU_SAMPLE, 0, 0, number, 1, 0, 0))


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def check_readable() -> str:
    """Why this process cannot read the memory of its children, or ""."""
    with suppress(OSError, ValueError):
        if int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text()) >= 2 and os.geteuid() != 0:
            return "kernel.yama.ptrace_scope forbids to read the memory of other processes"
    return ""
