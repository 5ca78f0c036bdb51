"""Attaching the programs of probes.bpf.c by a plan, and reading what they record.

Whoever compiled them gives bytecode by program; maps, constants and field offsets are filled in here.
"""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tracepipe.capture.bpf import bpf
from tracepipe.capture.bpf.attach import Links, attach_kprobes, attach_triggers, attach_uprobes
from tracepipe.capture.bpf.bytecode import FIELDS, HOOK_FIELDS, Constant, Field, filled_in
from tracepipe.capture.bpf.maps import Control, Maps
from tracepipe.capture.bpf.ring import Ring
from tracepipe.capture.bpf.specs import is_paired, spec_of, text_field
from tracepipe.capture.engines.engine import Coverage, Turn
from tracepipe.capture.find.tracefs import field_offsets, tracepoint_id, tracing_folder
from tracepipe.capture.machine.refusals import Operation, explain
from tracepipe.capture.machine.threads import comm_of, own_namespace, running_threads
from tracepipe.capture.records.loss import Loss
from tracepipe.capture.records.record import DROP_LAYERS, UNSEEN, window_record, windows_in
from tracepipe.capture.records.render import RecordRenderer
from tracepipe.capture.records.syscalls import SYSCALLS
from tracepipe.capture.request import Cause, Notify, Plan
from tracepipe.hooks.hook import RECORDED_LAYERS, FilePlace, KernelPlace, TracepointPlace

_RAW_TRACEPOINTS = {"syscall_enter": "sys_enter", "syscall_exit": "sys_exit"}
_SCHEDULER = {
    "sched_switch": "sched/sched_switch",
    "sched_wakeup": "sched/sched_wakeup",
    "sched_migrate": "sched/sched_migrate_task",
}
_FOLLOWING = {
    "process_exec": "sched/sched_process_exec",
    "thread_new": "task/task_newtask",
    "thread_rename": "task/task_rename",
}
_NO_FIELD: Field = (8, 1)  # a byte that every tracepoint's record has: 0 to 8 is not for programs
_COMM_BYTES = 16
_MISSED = "at most: the kernel ran no program, as another was under way on the processor"
_UNSEEN = "wakeups and migrations in interrupts of perf or of another BPF program, where the kernel runs none"
_NO_TEXTS: dict[int, int] = {Constant.TEXT_0: 0, Constant.TEXT_1: 0, Constant.TEXT_2: 0, Constant.TEXT_3: 0}


class ProbeAttachment:
    """Attached probes and the memory that they write to."""

    def __init__(self, programs: Mapping[str, bytes], plan: Plan, notify: Notify) -> None:
        """Attach all of the plan. Raises CaptureUnavailable."""
        self._programs, self._plan, self._notify = programs, plan, notify
        self._syscalls = SYSCALLS[platform.machine()]
        self._links = Links()
        self._is_stopped = False
        self._namespace = own_namespace()
        self.coverage = Coverage()
        self.filtered: dict[str, int] = {}
        self._start_ns = time.monotonic_ns()
        self._names: dict[int, str] = {}
        self._seen_drops: dict[int, int] = {}
        self._polled_ns = time.monotonic_ns()
        self._pending: list[bytes] = []
        self._turns: list[Turn] = []
        triggers = plan.windows.places if plan.windows else ()
        self.probed = frozenset(trigger.begins for trigger in triggers)
        pairs = plan.filters.min_duration_ns > 0 or any(
            is_paired(probe, plan.filters) for probe in plan.probes
        )
        try:
            self._maps = Maps(plan.ring_bytes, len(plan.probes), pairs)
        except OSError as error:
            raise explain(Operation.MAP, error) from error
        self._ring = Ring(self._maps["ring"], plan.ring_bytes)
        _make_room_for_links()
        self._constants = self._constants_of(plan)
        try:
            self._attach()
        except OSError as error:
            self.close()
            raise explain(Operation.ANY, error) from error
        except BaseException:
            self.close()
            raise

    @property
    def is_unordered(self) -> bool:
        """Whether records can stand after later ones, or need what comes after them."""
        return self._plan.filters.min_duration_ns > 0 or self._namespace is not None

    def start(self) -> None:
        """Record what the plan's scope says, from now on; a command from its exec on."""
        scope = self._plan.scope
        self._start_ns = time.monotonic_ns()
        if self._plan.windows is None:
            self._maps.control[Control.WINDOW_NS] = self._start_ns
        if scope.kind == "command":
            self._maps.control[Control.ARMED] = scope.pids[0] + 1
        elif self._namespace is not None:
            # Of processes that run already only the ids here are known; the kernel side knows the others.
            for thread in running_threads(scope):
                self._maps.adopt(thread.pid)
                self._names[thread.tid] = comm_of(thread.pid, thread.tid)
        else:
            known: set[int] = set()
            while found := [thread for thread in running_threads(scope) if thread.tid not in known]:
                for thread in found:
                    self._maps.track(thread.tid, thread.pid)
                    known.add(thread.tid)
                    self._names[thread.tid] = comm_of(thread.pid, thread.tid)

    def open_window(self, at_ns: int | None = None) -> int:
        """Begin a window now, which began elsewhere at `at_ns`: its time on CLOCK_MONOTONIC."""
        # What stands in the ring yet comes before the window, and before what says so.
        now_ns = self._tell_window(Cause.START, at_ns, begins=True)
        self._maps.control[Control.WINDOW_NS] = now_ns
        return now_ns

    def close_window(self, cause: Cause, at_ns: int | None = None) -> int:
        """End the window that is open, now, which ended elsewhere at `at_ns`: the time."""
        self._maps.control[Control.WINDOW_NS] = 0
        return self._tell_window(cause, at_ns, begins=False)

    def _tell_window(self, cause: Cause, at_ns: int | None, *, begins: bool) -> int:
        self._take()
        now_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._pending.append(window_record(now_ns, cause, begins=begins))
        return now_ns

    def arm(self, windows: int) -> None:
        """From now on the plan's functions begin windows, so many, and end them."""
        self._maps.control[Control.BEGIN_HITS] = 0
        self._maps.control[Control.WINDOWS_LEFT] = windows

    def turns(self) -> list[Turn]:
        """Windows that functions began and ended, in what was collected since the last call."""
        turns, self._turns = self._turns, []
        return turns

    def collect(self) -> bytes:
        """Whole records since the last call, each with its ring header."""
        self._take()
        chunk = b"".join(self._pending)
        self._pending.clear()
        return chunk

    def _take(self) -> None:
        chunk = self._ring.take()
        if self._plan.windows is not None:
            self._turns += [Turn(ts_ns, begins) for ts_ns, begins in windows_in(chunk)]
        self._pending.append(chunk)

    def lost(self) -> list[Loss]:
        """Records that found the ring full since the last call, by layer and processor."""
        now_ns = time.monotonic_ns()
        losses, unseen = list[Loss](), 0
        processors = self._maps.processors
        for slot, total in enumerate(self._maps.drops):
            count = total - self._seen_drops.get(slot, 0)
            if not count:
                continue
            self._seen_drops[slot] = total
            which, cpu = divmod(slot, processors)
            if which == UNSEEN:
                unseen += count
                continue
            layer = DROP_LAYERS[which]
            reason = (
                "the ring buffer was full"
                if layer
                else "a thread's start or name was lost: ring or table full"
            )
            losses.append(Loss(layer, count, self._polled_ns, now_ns, reason, cpu))
        if unseen:
            losses.append(Loss("scheduler", unseen, self._polled_ns, now_ns, _UNSEEN))
        for layer, missed in self._links.misses.take(now_ns, is_final=self._is_stopped).items():
            losses.append(Loss(layer, missed, self._polled_ns, now_ns, _MISSED))
        self._polled_ns = now_ns
        return losses

    def renderer(self) -> RecordRenderer:
        """The decoder of `collect`'s chunks, for a recording that was started."""
        start_ns = 0 if self._plan.scope.kind == "command" else self._start_ns
        causes = self._plan.windows.causes if self._plan.windows else ()
        return RecordRenderer(
            self._plan.probes, self._syscalls, self._plan.values, start_ns, self._names, causes=causes
        )

    def stop(self) -> None:
        """Record no more, and detach. Again: does nothing."""
        self._is_stopped = True
        self._maps.control[Control.STOPPED] = 1
        bpf.map_clear(self._maps["tracked"], 4)
        # First and here: as long as these exist, every process that calls the functions pays for them.
        for link in self._links.multi:
            os.close(link)
        if self._links.single:
            _close_in_background(self._links.single)
        self._links.multi, self._links.single = [], []
        processors = self._maps.processors
        for slot, total in enumerate(self._maps.filtered):
            layer = DROP_LAYERS[slot // processors]
            if total and layer:
                self.filtered[layer] = self.filtered.get(layer, 0) + total
                self._maps.filtered[slot] = 0

    def close(self) -> None:
        """Detach, if that was not done, and give the ring and the maps back."""
        self.stop()
        self._links.misses.close()
        self._ring.close()
        self._maps.close()

    def _constants_of(self, plan: Plan) -> dict[int, int]:
        device, inode = self._namespace or (0, 0)
        comm = plan.scope.comm.encode()[: _COMM_BYTES - 1].ljust(_COMM_BYTES, b"\0")
        is_system = plan.scope.kind == "system"
        return {
            Constant.PROCESSORS: self._maps.processors,
            Constant.WITH_SCHEDULER: "scheduler" in plan.own,
            Constant.EVERYONE: is_system and self._namespace is None,
            Constant.CHILDREN: plan.scope.children,
            Constant.MIN_DURATION_NS: plan.filters.min_duration_ns,
            Constant.SAMPLE: plan.filters.sample,
            Constant.COMM_LOW: int.from_bytes(comm[:8], "little"),
            Constant.COMM_HIGH: int.from_bytes(comm[8:], "little"),
            Constant.NAMESPACE_DEV: device,
            Constant.NAMESPACE_INO: inode,
            Constant.PROBE: 0,
            Constant.OWN_TGID: os.getpid(),
            **_NO_TEXTS,
            Constant.MAY_SLEEP: 0,
            Constant.BEGIN_AT: plan.windows.begin_at if plan.windows else 0,
            Constant.END_AT: plan.windows.end_at if plan.windows else 0,
        }

    def _code(self, program: str, fields: Mapping[int, Field], own: Mapping[int, int] | None = None) -> bytes:
        """The bytecode with the plan's constants, and those of this copy of it alone."""
        constants = {**self._constants, **(own or {})}
        return filled_in(self._programs[program], self._maps.descriptors, constants, fields)

    def _attach(self) -> None:
        plan = self._plan
        self._maps.put_specs(b"".join(spec_of(probe, plan.filters) for probe in plan.probes))
        if "syscall" in plan.own:
            self._maps.want_syscalls(list(self._syscalls))
        folder = tracing_folder()
        points = {**_FOLLOWING}
        if "scheduler" not in plan.own:
            points["process_exit"] = "sched/sched_process_exit"
        else:
            points |= _SCHEDULER
        # Who is followed first, so that nobody is met in the middle of a call without need.
        self._attach_tracepoints(folder, points)
        if "syscall" in plan.own:
            for program, point in _RAW_TRACEPOINTS.items():
                self._attach_raw_tracepoint(program, point)
        self._attach_hooked_tracepoints(folder)
        patient = self._code("call_enter", {}, {Constant.MAY_SLEEP: 1})
        triggers = plan.windows.places if plan.windows else ()
        code = self._code("trigger", {})
        # What was attached last runs first: the call that begins a window is in it, and the one that ends it.
        attach_triggers(self._links, [one for one in triggers if not one.begins], code)
        attach_uprobes(self._links, plan.probes, self._pair("call"), patient)
        attach_triggers(self._links, [one for one in triggers if one.begins], code)
        if any(isinstance(probe.place, KernelPlace) for probe in plan.probes):
            attach_kprobes(self._links, plan.probes, self._pair("driver"))
        self._cover()

    def _pair(self, kind: str) -> dict[bool, bytes]:
        return {True: self._code(f"{kind}_return", {}), False: self._code(f"{kind}_enter", {})}

    def _attach_tracepoints(self, folder: Path, points: dict[str, str]) -> None:
        fields: dict[int, Field] = {}
        offsets = {point: field_offsets(folder, point) for point in points.values()}
        for number, (point, name) in FIELDS.items():
            if name in offsets.get(point, {}):
                fields[number] = (offsets[point][name], 0)
        for program, point in points.items():
            code, identifier = self._code(program, fields), tracepoint_id(folder, point)
            self._attach_tracepoint(program, code, identifier, None)

    def _attach_hooked_tracepoints(self, folder: Path) -> None:
        for index, probe in enumerate(self._plan.probes):
            if isinstance(probe.place, TracepointPlace):
                arguments = probe.signature.arguments
                given = [_NO_FIELD if a.kind == "str" else (a.position, a.bits // 8) for a in arguments]
                fields = dict(zip(HOOK_FIELDS, given + [_NO_FIELD] * len(HOOK_FIELDS), strict=False))
                texts = [text_field(argument) for argument in arguments if argument.kind == "str"]
                own: dict[int, int] = {Constant.PROBE: index, **dict(zip(_NO_TEXTS, texts, strict=False))}
                code = self._code("tracepoint_hit", fields, own)
                identifier = tracepoint_id(folder, probe.place.point)
                self._attach_tracepoint("tracepoint_hit", code, identifier, probe.layer)

    def _attach_tracepoint(self, name: str, code: bytes, identifier: int, missed: str | None) -> None:
        """`missed`: the layer of what the program misses; None: threads are not followed then."""
        loaded = bpf.load_program(name, code, bpf.PROG_TYPE_TRACEPOINT)
        try:
            self._links.single.append(bpf.attach_tracepoint(loaded, identifier))
            if name not in _SCHEDULER:  # whose programs count by thread
                self._links.misses.watch(loaded, missed)
        finally:
            os.close(loaded)  # the event holds it

    def _attach_raw_tracepoint(self, name: str, point: str) -> None:
        loaded = bpf.load_program(name, self._code(name, {}), bpf.PROG_TYPE_RAW_TRACEPOINT)
        try:
            self._links.multi.append(bpf.attach_raw_tracepoint(loaded, point))
        finally:
            os.close(loaded)  # the link holds it

    def _cover(self) -> None:
        """Say which layers are recorded, and which functions are not."""
        refused = self._links.refused
        for places, why in (
            (FilePlace, "their first instruction cannot be probed"),
            (KernelPlace, "the kernel does not let them be probed"),
        ):
            names = {
                p.symbol
                for i, p in enumerate(self._plan.probes)
                if i in refused and isinstance(p.place, places)
            }
            if names:
                self._notify(f"not recorded, {why}: {', '.join(sorted(names))}")
        for layer in self._plan.layers:
            mine = {index for index, probe in enumerate(self._plan.probes) if probe.layer == layer}
            if mine and mine <= refused and layer not in self._plan.own:
                reason = "the kernel lets none of its functions be probed"
                self.coverage.missing[layer] = reason
                self._notify(f"no {layer} layer: {reason}")
            else:
                self.coverage.got.append(layer)
        self.coverage.got.sort(key=RECORDED_LAYERS.index)


def _make_room_for_links() -> None:
    """Where every probe is a descriptor, libcuda and libcudart have more than the usual limit of 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _close_in_background(descriptors: list[int]) -> None:
    """Close them here at once, and let a child that may outlive this process be the last to hold them.

    For every tracepoint and every single uprobe, the last holder's close waits 50 to 100 ms in the kernel.
    Nothing is recorded any more by then, so nobody has to wait for it. Without room for a process, we wait.
    """
    try:
        closed, closing = os.pipe()
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        return
    try:
        child = os.fork()
    except OSError:
        child = -1
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
    if child > 0:
        os.waitpid(child, 0)
    for descriptor in (*descriptors, closed, closing):
        os.close(descriptor)
