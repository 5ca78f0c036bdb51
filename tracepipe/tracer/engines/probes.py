"""The engines `bcc` and `prebuilt`: one source and one loader, compiled by BCC here or ahead of time.

They attach the programs of probes.bpf.c by a plan, and read what these record. Maps, constants and field
offsets are filled into the bytecode here.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import resource
import time
import zlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import RECORDED_LAYERS, FilePlace, KernelPlace
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.bytecode import SHIPPED, Constant, Field, compiled, filled_in, import_bcc
from tracepipe.tracer.bpf.maps import Control, Maps, is_paired, spec_of
from tracepipe.tracer.engines.attaching import TEXTS, Probing
from tracepipe.tracer.engines.drain import Drain
from tracepipe.tracer.engines.engine import Attachment, Turn
from tracepipe.tracer.machine.facts import this_machine
from tracepipe.tracer.machine.processes import (
    all_threads,
    clock_ahead_ns,
    comm_of,
    own_namespace,
    running_threads,
)
from tracepipe.tracer.machine.refusals import OLDEST, SUDO, Operation, check_file_systems, explain
from tracepipe.tracer.records.record import (
    DROP_LAYERS,
    UNSEEN,
    Loss,
    unread,
    unread_error,
    window_record,
    windows_in,
)
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Cause, Notify, Plan

_COMM_BYTES = 16
_OVER = 1 << 62  # in Control.ASKED_NS: OVER of probes.bpf.c
_MISSED = "at most: the kernel skipped the probe's program, as another program was running on the processor"
_UNSEEN = (
    "wakeups and migrations in interrupts of perf or of another BPF program: the kernel runs no second one"
)


class ProbeAttachment(Attachment):
    """Attached probes and the memory that they write to."""

    def __init__(self, programs: Mapping[str, bytes], plan: Plan, notify: Notify) -> None:
        """Attach all of the plan. Raises CaptureUnavailable."""
        super().__init__(plan)
        self._programs, self._plan, self._notify = programs, plan, notify
        self._syscalls = SYSCALLS[platform.machine()]
        self._probing: Probing | None = None
        self._is_stopped = False
        self._namespace = own_namespace()
        self.is_unordered = plan.filters.min_duration_ns > 0 or self._namespace is not None
        self._start_ns = time.monotonic_ns()
        self._counted_drops: dict[int, int] = {}
        self._polled_ns = time.monotonic_ns()
        self._marks: deque[tuple[int, bytes]] = deque()  # (bytes in the ring before it, record of a window)
        self._turns: list[Turn] = []
        self._reported_refused: set[int] = set()
        triggers = plan.windows.places if plan.windows else ()
        self.probed = frozenset(trigger.begins for trigger in triggers)
        pairs = plan.filters.min_duration_ns > 0 or any(
            is_paired(probe, plan.filters) for probe in plan.probes
        )
        try:
            self._maps = Maps(plan.ring_bytes, len(plan.probes), pairs)
        except OSError as error:
            raise explain(Operation.MAP, error) from error
        self._drain = Drain(self._maps["ring"], plan.ring_bytes)
        # Where every probe needs a descriptor, libcuda and libcudart exceed the usual limit of 1024.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._constants = self._constants_of(plan)
        try:
            self._maps.put_specs(b"".join(spec_of(probe, plan.filters) for probe in plan.probes))
            if "syscall" in plan.own:
                self._maps.want_syscalls(list(self._syscalls))
            self._probing = Probing(plan, self._code)
            self._probing.attach()
            self._maps.control[Control.IS_READY] = self._is_ready
        except OSError as error:
            self.close()
            raise explain(Operation.ANY, error) from error
        except BaseException:
            self.close()
            raise
        self.cover(plan, self._say_refused(), notify)

    def start(self) -> None:
        scope = self._plan.scope
        self._drain.start()
        self._start_ns = time.monotonic_ns()
        if self._plan.windows is None:
            self._maps.control[Control.WINDOW_NS] = self._start_ns
        if scope.kind == "command":
            self._maps.control[Control.ARMED] = scope.pids[0] + 1
        elif self._namespace is not None:
            # Of running processes only the ids in this namespace are known here; the BPF programs know the
            # others.
            for thread in running_threads(scope):
                self._maps.adopt(thread.pid)
                self._names[thread.tid] = comm_of(thread.pid, thread.tid)
        else:
            for thread in all_threads(scope):
                self._maps.track(thread.tid, thread.pid)
                self._names[thread.tid] = comm_of(thread.pid, thread.tid)

    def prepare(self) -> None:
        assert self._probing is not None
        if not self._probing.is_whole:
            self._maps.control[Control.IS_BUSY] = 1
            try:
                self._probing.complete()
            except OSError as error:
                raise explain(Operation.ANY, error) from error
            self._say_refused()
            self._maps.control[Control.IS_BUSY] = 0
        self._maps.control[Control.IS_READY] = self._is_ready

    def rest(self) -> None:
        """Detach what is recorded in windows, where it can be attached again for the next one. The second
        call detaches: before it, a function that was called before the first one may have begun a window.
        """
        if self._probing is None or not self._probing.is_whole or not self._probing.rests:
            return
        control = self._maps.control
        if control[Control.IS_READY]:
            control[Control.IS_READY] = 0
        elif control[Control.WINDOW_NS]:  # a window has begun that was not collected yet
            control[Control.IS_READY] = self._is_ready
        else:
            self._probing.rest()

    @property
    def _is_ready(self) -> int:
        """1 where a call begins a window immediately, as only the probes have to follow it."""
        return int(self._plan.windows is None or not self._plan.windows.is_begin_followed)

    def hits(self) -> int:
        return self._maps.control[Control.BEGIN_HITS]

    def asked(self) -> int | None:
        asked_ns = self._maps.control[Control.ASKED_NS]
        self._maps.control[Control.SEEN_NS] = asked_ns
        return asked_ns & ~_OVER or None

    def let_go(self) -> bool:
        is_over = bool(self._maps.control[Control.ASKED_NS] & _OVER)
        self._maps.control[Control.ASKED_NS] = 0
        return is_over

    def let_end(self) -> None:
        self._maps.control[Control.END_ASKED_NS] = 0

    def open_window(self, since_ns: int, at_ns: int | None = None, *, name: str = "") -> int:
        assert self._probing is not None
        is_late = not self._probing.is_whole or self.asked() is not None
        self.prepare()
        by, left = 0, self._maps.control[Control.WINDOWS_LEFT]
        if self.asked() is not None:
            by = self._maps.control[Control.ASKED_BY]
            self._maps.control[Control.WINDOWS_LEFT] = max(left, 1) - 1
        begun_ns = time.monotonic_ns()
        now_ns = begun_ns if at_ns is None else at_ns
        waited_ns = max(begun_ns - since_ns, 0) if is_late else 0
        self._mark(window_record(now_ns, Cause.START, begins=True, by=by, waited_ns=waited_ns, name=name))
        self._maps.control[Control.WINDOW_NS] = now_ns
        return now_ns

    def close_window(self, cause: Cause, at_ns: int | None = None) -> int:
        self._maps.control[Control.WINDOW_NS] = 0
        now_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._mark(window_record(now_ns, cause, begins=False))
        return now_ns

    def arm(self, windows: int) -> None:
        self._maps.control[Control.BEGIN_HITS] = 0
        self._maps.control[Control.WINDOWS_LEFT] = windows

    def turns(self) -> list[Turn]:
        turns, self._turns = self._turns, []
        return turns

    def collect(self) -> bytes:
        chunk = self._drain.read(self._marks[0][0] if self._marks else None)
        if self._plan.windows is not None:
            self._turns += [Turn(ts_ns, begins) for ts_ns, begins in windows_in(chunk)]
        while self._marks and self._marks[0][0] <= self._drain.taken_bytes:
            chunk += self._marks.popleft()[1]
        return chunk

    def _mark(self, record: bytes) -> None:
        """Place a record after everything that is in the ring now."""
        self._marks.append((self._drain.made_bytes, record))

    def lost(self) -> list[Loss]:
        now_ns = time.monotonic_ns()
        losses, unseen = list[Loss](), 0
        processors = self._maps.processors
        for slot, total in enumerate(self._maps.drops):
            count = total - self._counted_drops.get(slot, 0)
            if not count:
                continue
            self._counted_drops[slot] = total
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
        if (found := self._drain.unread()) is not None:
            losses.append(unread(found.records, found.since_ns or self._start_ns, now_ns, found.error))
            self.error = self.error or unread_error(found.error)
        missed_of = self._probing.missed(now_ns, is_final=self._is_stopped) if self._probing else {}
        for layer, missed in missed_of.items():
            losses.append(Loss(layer, missed, self._polled_ns, now_ns, _MISSED))
        self._polled_ns = now_ns
        return losses

    def stop(self) -> None:
        """Stop recording, and detach. A second call does nothing."""
        self._is_stopped = True
        self._maps.control[Control.STOPPED] = 1
        self.let_go()
        self.let_end()
        bpf.map_clear(self._maps["tracked"], 4)
        if self._probing is not None:
            quick, slow = self._probing.detach()
            # These are closed first, and here: until then every process that calls the functions pays for
            # them.
            for link in quick:
                os.close(link)
            if slow:
                _close_in_background(slow)
        self._drain.stop()
        processors = self._maps.processors
        for slot, total in enumerate(self._maps.filtered):
            layer = DROP_LAYERS[slot // processors]
            if total and layer:
                self.filtered[layer] = self.filtered.get(layer, 0) + total
                self._maps.filtered[slot] = 0

    def close(self) -> None:
        """Detach, if that was not done, and free the ring and the maps."""
        self.stop()
        if self._probing is not None:
            self._probing.close()
        self._drain.close()
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
            **dict.fromkeys(TEXTS, 0),
            Constant.MAY_SLEEP: 0,
            Constant.BEGIN_AT: plan.windows.begin_at if plan.windows else 0,
            Constant.END_AT: plan.windows.end_at if plan.windows else 0,
            Constant.CLOCK_AHEAD_NS: clock_ahead_ns(),
        }

    def _code(self, program: str, fields: Mapping[int, Field], own: Mapping[int, int]) -> bytes:
        """The bytecode with the plan's constants, and with `own`, those of this copy alone."""
        constants = {**self._constants, **own}
        return filled_in(self._programs[program], self._maps.descriptors, constants, fields)

    def _say_refused(self) -> set[int]:
        """Report the functions that cannot be recorded, each once; returns the numbers of all such probes."""
        refused = self._probing.refused if self._probing else set()
        for places, why in (
            (FilePlace, "their first instruction cannot be probed"),
            (KernelPlace, "the kernel does not let them be probed"),
        ):
            probes = [self._plan.probes[number] for number in refused - self._reported_refused]
            names = {probe.symbol for probe in probes if isinstance(probe.place, places)}
            if names:
                self._notify(f"not recorded, {why}: {', '.join(sorted(names))}")
        self._reported_refused |= refused
        return refused


def _close_in_background(descriptors: list[int]) -> None:
    """Close the descriptors here immediately, while a child that may outlive this process holds them last.

    For every tracepoint and every single uprobe, the last holder's close waits 50 to 100 ms in the kernel.
    Nothing is recorded any more by then, so this process need not wait for it. If no process can be forked,
    it waits.
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
            os.setsid()  # without signals from the terminal
            # Close all others too: a reader of this process's output waits until its last holder has closed
            # it.
            for opened in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
                if opened not in (*descriptors, closed):
                    with suppress(OSError):  # the descriptor of the listing itself is closed
                        os.close(opened)
            if os.fork() == 0:
                os.read(closed, 1)  # ends when the parent has closed its copies
        finally:
            os._exit(0)
    if child > 0:
        os.waitpid(child, 0)
    for descriptor in (*descriptors, closed, closing):
        os.close(descriptor)


class BccEngine:
    """Compiles the programs with BCC when a capture starts."""

    name = "bcc"
    layers = frozenset(RECORDED_LAYERS)

    def check(self) -> str:
        """Return BCC's version. Raises CaptureUnavailable."""
        check_machine()
        return str(getattr(import_bcc(), "__version__", "unknown"))

    def attach(self, plan: Plan, notify: Notify) -> ProbeAttachment:
        return ProbeAttachment(compiled(platform.machine()), plan, notify)


class PrebuiltEngine:
    """Loads the bytecode that tracepipe ships, for hosts without BCC."""

    name = "prebuilt"
    layers = frozenset(RECORDED_LAYERS)

    def check(self) -> str:
        """Return the compiler that made the bytecode. Raises CaptureUnavailable."""
        check_machine()
        return str(json.loads(SHIPPED.read_text())["compiler"])

    def attach(self, plan: Plan, notify: Notify) -> ProbeAttachment:
        programs = json.loads(SHIPPED.read_text())["programs"][platform.machine()]
        return ProbeAttachment(
            {name: zlib.decompress(base64.b64decode(code)) for name, code in programs.items()}, plan, notify
        )


def check_machine() -> None:
    """Raise CaptureUnavailable where the BPF programs cannot be loaded."""
    if platform.system() != "Linux" or platform.machine() not in SYSCALLS:
        raise CaptureUnavailable(
            f"Capture does not support {platform.system()} on {platform.machine()}.",
            f"Capture on Linux on {' or '.join(SYSCALLS)}. Recordings can be converted on any machine.",
        )
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < OLDEST:
        raise CaptureUnavailable(f"Kernel {release} is too old for capture.", "Use Linux 5.15 or later.")
    check_file_systems(this_machine())
    if os.geteuid() != 0:
        raise CaptureUnavailable("Capture with eBPF needs root.", SUDO)
