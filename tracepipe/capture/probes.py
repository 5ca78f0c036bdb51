"""Loading and attaching the programs of probes.bpf.c, and reading what they record.

Whoever compiles them (a `Source`) gives bytecode and maps. All functions of a library are attached in one
link each for entry and return, where the kernel can (6.6), and one by one elsewhere (from 5.15).
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tracepipe.capture import bpf
from tracepipe.capture.cuda_calls import is_launch
from tracepipe.capture.engine import ALL_LAYERS, Coverage, Function, Loss, Notify, Plan
from tracepipe.capture.kprobes import Kprobes
from tracepipe.capture.record import DROP_LAYERS, RecordRenderer
from tracepipe.capture.ring import Ring
from tracepipe.capture.syscalls import SYSCALLS
from tracepipe.capture.tracefs import tracepoint_id, tracing_folder
from tracepipe.errors import CaptureUnavailable

_LAUNCH_COOKIE = 1 << 32
_ARMED, _STOPPED = 0, 1  # elements of the map `control`
_TRACEPOINTS = {
    "syscall": {"syscall_enter": "raw_syscalls/sys_enter", "syscall_exit": "raw_syscalls/sys_exit"},
    "scheduler": {"sched_switch": "sched/sched_switch", "sched_wakeup": "sched/sched_wakeup"},
}
_FOLLOWING = {
    "process_exec": "sched/sched_process_exec",
    "thread_new": "task/task_newtask",
    "thread_rename": "task/task_rename",
}


@dataclass(frozen=True, slots=True)
class Maps:
    """File descriptors of the maps of probes.bpf.c, by their names there."""

    ring: int
    tracked: int
    control: int
    drops: int
    wanted: int


class Source(Protocol):
    """Compiled programs and created maps."""

    maps: Maps

    def instructions(self, program: str) -> bytes:
        """Bytecode of a program, its map references resolved."""
        ...

    def close(self) -> None:
        """Give the maps back."""
        ...


class ProbeRecording:
    """Attached probes and the memory that they write to."""

    def __init__(self, source: Source, plan: Plan, notify: Notify) -> None:
        self._source, self._plan, self._notify = source, plan, notify
        self._maps = source.maps
        self._syscalls = SYSCALLS[platform.machine()]
        self._multi_links: list[int] = []
        self._single_probes: list[int] = []
        self.coverage = Coverage()
        self._control_map, self._control = _words(self._maps.control, 2)
        self._processors = possible_processors()
        self._drops_map, self._drops = _words(self._maps.drops, len(DROP_LAYERS) * self._processors)
        self._dropped = [0] * len(DROP_LAYERS)
        self._polled_ns = time.monotonic_ns()
        self._ring = Ring(self._maps.ring, max(plan.ring_bytes, mmap.PAGESIZE))
        try:
            self._attach()
        except BaseException:
            self.close()
            raise

    def arm(self, pid: int) -> None:
        """Record `pid` and its children from its next exec on."""
        self._control[_ARMED] = pid + 1

    def collect(self) -> bytes:
        """Whole records since the last call, each with its ring header."""
        return self._ring.take()

    def lost(self) -> list[Loss]:
        """Records that found the ring full since the last call."""
        now_ns = time.monotonic_ns()
        losses = []
        for index, layer in enumerate(DROP_LAYERS):
            start = index * self._processors
            total = sum(self._drops[start : start + self._processors])
            if total != self._dropped[index]:
                reason = (
                    "the ring buffer was full"
                    if layer
                    else "a thread's start or name was lost: ring or table full"
                )
                losses.append(Loss(layer, total - self._dropped[index], self._polled_ns, now_ns, reason))
                self._dropped[index] = total
        self._polled_ns = now_ns
        return losses

    def renderer(self) -> RecordRenderer:
        """The decoder of `collect`'s chunks."""
        names = [function.name for function in self._plan.functions]
        return RecordRenderer(names, self._syscalls, self._plan.driver)

    def stop(self) -> None:
        """Record no more, and detach. Again: does nothing."""
        self._control[_STOPPED] = 1
        bpf.map_clear(self._maps.tracked, 4)
        # First and here: as long as these exist, every process that calls the library pays for them.
        for link in self._multi_links:
            os.close(link)
        if self._single_probes:
            _close_in_background(self._single_probes)
        self._multi_links, self._single_probes = [], []

    def close(self) -> None:
        """Detach, if that was not done, and give the ring and the maps back."""
        self.stop()
        self._ring.close()
        for words, mapped in ((self._control, self._control_map), (self._drops, self._drops_map)):
            words.release()
            mapped.close()
        self._source.close()

    def _attach(self) -> None:
        try:
            if "userspace" in self._plan.layers:
                self._attach_functions()
            if "kernel" in self._plan.layers:
                self._attach_driver()
            if "syscall" in self._plan.layers:
                for number in self._syscalls:
                    bpf.map_update(self._maps.wanted, struct.pack("=I", number), b"\1")
            points = dict(_FOLLOWING)
            for layer in ("syscall", "scheduler"):
                if layer in self._plan.layers:
                    points |= _TRACEPOINTS[layer]
                    self.coverage.got.append(layer)
            if "scheduler" not in self._plan.layers:
                points["process_exit"] = "sched/sched_process_exit"
            self._attach_tracepoints(points)
            self.coverage.got.sort(key=ALL_LAYERS.index)
        except OSError as error:
            raise _refused(error) from error

    def _attach_tracepoints(self, points: dict[str, str]) -> None:
        folder = tracing_folder()
        for program, name in points.items():
            code = self._source.instructions(program)
            loaded = bpf.load_program(program, code, bpf.PROG_TYPE_TRACEPOINT)
            try:
                self._single_probes.append(bpf.attach_tracepoint(loaded, tracepoint_id(folder, name)))
            finally:
                os.close(loaded)  # the event holds it

    def _attach_functions(self) -> None:
        assert self._plan.library is not None
        uprobes = _Uprobes(self._source, self._plan.library, self._plan.functions)
        try:
            # Returns first: where every probe is attached singly, all returns are there before any entry.
            uprobes.attach("call_return", returns=True)
            uprobes.attach("call_enter", returns=False)
        finally:
            self._multi_links += uprobes.multi_links
            self._single_probes += uprobes.single_links
        refused = sorted(self._plan.functions[index].name for index in uprobes.refused)
        if refused:
            self._notify(f"not recorded, their first instruction cannot be probed: {', '.join(refused)}")
        if len(refused) < len(self._plan.functions):
            self.coverage.got.append("userspace")
        else:
            self.coverage.missing["userspace"] = f"no function of {self._plan.library} can be probed"

    def _attach_driver(self) -> None:
        kprobes = Kprobes(self._plan.driver)
        try:
            for program, returns in (("driver_return", True), ("driver_enter", False)):
                kprobes.attach(program, self._source.instructions(program), returns=returns)
        finally:
            self._multi_links += kprobes.multi_links
            self._single_probes += kprobes.single_links
        if kprobes.refused:
            names = sorted(self._plan.driver[index].name for index in kprobes.refused)
            self._notify(f"not recorded, the kernel does not let them be probed: {', '.join(names)}")
        if len(kprobes.refused) < len(self._plan.driver):
            self.coverage.got.append("kernel")
        else:
            reason = "the kernel refused every function of the NVIDIA driver"
            self.coverage.missing["kernel"] = reason
            self._notify(f"no kernel layer: {reason}")


class _Uprobes:
    """Links of the functions of one library; `refused` are the indices that the kernel would not probe."""

    def __init__(self, source: Source, library: str, functions: list[Function]) -> None:
        self._source, self._library, self._functions = source, library, functions
        self._single = False  # the kernel has no multi link: one link a probe
        self.multi_links: list[int] = []
        self.single_links: list[int] = []
        self.refused: set[int] = set()

    def attach(self, program: str, *, returns: bool) -> None:
        """Attach `program` to all functions. Raises OSError."""
        indices = list(range(len(self._functions)))
        code = self._source.instructions(program)
        if not self._single:
            loaded = bpf.load_program(program, code, bpf.PROG_TYPE_KPROBE, bpf.UPROBE_MULTI)
            try:
                self._link(loaded, indices, returns)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._single = True
            finally:
                os.close(loaded)
        loaded = bpf.load_program(program, code, bpf.PROG_TYPE_KPROBE)
        try:
            for index in indices:
                self._link_one(loaded, index, returns)
        finally:
            os.close(loaded)

    def _link(self, loaded: int, indices: list[int], returns: bool) -> None:
        """One link for `indices`; where the kernel refuses one of them, halves, down to the one."""
        offsets = [self._functions[index].offset for index in indices]
        cookies = [self._cookie(index) for index in indices]
        try:
            self.multi_links.append(bpf.link_uprobes(loaded, self._library, offsets, cookies, returns))
        except OSError as error:
            if error.errno != bpf.ENOTSUPP:
                raise
            if len(indices) == 1:
                self.refused.add(indices[0])
                return
            middle = len(indices) // 2
            self._link(loaded, indices[:middle], returns)
            self._link(loaded, indices[middle:], returns)

    def _link_one(self, loaded: int, index: int, returns: bool) -> None:
        place = self._functions[index].offset
        try:
            link = bpf.link_one_uprobe(loaded, self._library, place, self._cookie(index), returns)
        except OSError as error:
            if error.errno != bpf.ENOTSUPP:
                raise
            self.refused.add(index)
        else:
            self.single_links.append(link)

    def _cookie(self, index: int) -> int:
        return index | (_LAUNCH_COOKIE if is_launch(self._functions[index].name) else 0)


def possible_processors() -> int:
    """Number of the last processor that may ever be online, plus one: numbers may have gaps."""
    text = Path("/sys/devices/system/cpu/possible").read_text()
    return int(text.strip().replace("-", ",").split(",")[-1]) + 1


def _words(map_fd: int, count: int) -> tuple[mmap.mmap, memoryview]:
    """A mappable array map of u64 as memory, read and written a word at a time."""
    size_bytes = -(-8 * count // mmap.PAGESIZE) * mmap.PAGESIZE
    mapped = mmap.mmap(map_fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return mapped, memoryview(mapped)[: 8 * count].cast("Q")


def _close_in_background(descriptors: list[int]) -> None:
    """Close them here at once, and let a child that may outlive this process be the last to hold them.

    For every tracepoint and every single uprobe, the last holder's close waits 50 to 100 ms in the kernel.
    Nothing is recorded any more by then, so nobody has to wait for it.
    """
    closed, closing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setsid()  # no signal of the terminal
            # All others too: whoever reads this process's output waits for its last holder.
            for opened in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if opened not in (*descriptors, closed):
                    with suppress(OSError):  # the listing's own is closed already
                        os.close(opened)
            if os.fork() == 0:
                os.read(closed, 1)  # ends when the parent has closed its copies
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for descriptor in (*descriptors, closed, closing):
        os.close(descriptor)


def _refused(error: OSError) -> CaptureUnavailable:
    if error.errno in (errno.EPERM, errno.EACCES):
        return CaptureUnavailable(
            f"The kernel does not let this process attach probes: {error.strerror}.",
            "Run as root; a container needs --privileged --pid=host.",
        )
    if error.errno == errno.EMFILE:
        return CaptureUnavailable("There are too few file descriptors.", "ulimit -n 8192")
    return CaptureUnavailable(
        f"The kernel refused a probe: {error.strerror} (errno {error.errno}).",
        "Check the kernel: it needs CONFIG_UPROBES, CONFIG_BPF_EVENTS, CONFIG_FTRACE_SYSCALLS.",
    )
