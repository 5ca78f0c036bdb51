"""The engines `bcc` and `prebuilt`: one source and one loader, compiled by BCC here or ahead of time.

They attach the programs of probes.bpf.c by a plan, and read what these record. Maps, constants and field
offsets are filled into the bytecode here.

A program stays attached for the whole capture, or for its windows only. Between windows the latter are
detached where the kernel can quickly attach them again (one link for all functions of a file, Linux 6.6).

    always                                     in windows
    ───────────────────────────────────────    ─────────────────────────────────────
    who is recorded: exec, clone, names        functions
    what begins and ends windows               system calls, the scheduler
    functions that give kernels their names    tracepoints of hooks

There is one link for all functions of a file, or of the kernel, where the kernel supports that (uprobes from
6.6, kprobes from 5.18 with CONFIG_FPROBE), and one link for each probe elsewhere. The link's cookie
identifies the probe that fired: its index in the plan.

At some hits the kernel runs no program, as another BPF program is running on the processor. It counts them
for each program (`recursion_misses`; for tracepoints from Linux 6.7 on), over all threads of the machine. The
count is therefore an upper bound of the missing events. Programs of the scheduler's tracepoints count by
thread themselves (probes.bpf.c), and those of uprobes and raw tracepoints always run.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import json
import os
import platform
import resource
import struct
import threading
import time
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import (
    HOST_SAMPLE,
    NAMING_EFFECTS,
    RECORDED_LAYERS,
    FilePlace,
    KernelPlace,
    Probe,
    TracepointPlace,
)
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.bytecode import (
    FIELDS,
    HOOK_FIELDS,
    SHIPPED,
    Constant,
    Field,
    compiled,
    filled_in,
    import_bcc,
)
from tracepipe.tracer.bpf.maps import Control, Maps, is_paired, spec_of, text_field
from tracepipe.tracer.engines.drain import Drain
from tracepipe.tracer.engines.engine import Attachment, Turn
from tracepipe.tracer.engines.host_stacks import HZ, HostStacks
from tracepipe.tracer.find.kernel import field_offsets, tracepoint_id, tracing_folder
from tracepipe.tracer.machine.facts import this_machine
from tracepipe.tracer.machine.processes import (
    all_threads,
    clock_ahead_ns,
    comm_of,
    online_processors,
    own_namespace,
    running_threads,
)
from tracepipe.tracer.machine.refusals import ENOTSUPP, OLDEST, SUDO, Operation, check_file_systems, explain
from tracepipe.tracer.records.record import (
    DROP_LAYERS,
    UNSEEN,
    Loss,
    ids_in,
    unread,
    unread_error,
    window_record,
    windows_in,
)
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Cause, Notify, Plan, TriggerPlace

_RAW_TRACEPOINTS = {"syscall_enter": "sys_enter", "syscall_exit": "sys_exit"}
_SCHEDULER = {
    "sched_switch": "sched/sched_switch",
    "sched_wakeup": "sched/sched_wakeup",
    "sched_migrate": "sched/sched_migrate_task",
}
_SAMPLING = {"sched_switch": "sched/sched_switch", "sched_waking": "sched/sched_waking"}
_FOLLOWING = {
    "process_exec": "sched/sched_process_exec",
    "thread_new": "task/task_newtask",
    "thread_rename": "task/task_rename",
}
_EXIT = {"process_exit": "sched/sched_process_exit"}
_NO_FIELD: Field = (8, 1)  # a byte that every tracepoint's record has: 0 to 8 is not for programs
TEXTS = (Constant.TEXT_0, Constant.TEXT_1, Constant.TEXT_2, Constant.TEXT_3)
"""Constants of a hooked tracepoint's own copy."""
_ALIKE_MOST = 64  # probes of a program, which looks at one after the other

# The kernel's errors for a function that cannot be probed: blacklisted, ambiguous name, or removed.
_UNPROBEABLE = {errno.EINVAL, errno.ENOENT, errno.EADDRNOTAVAIL, errno.EILSEQ, ENOTSUPP}

_DRIVER = "kernel"  # the layer of kernel functions, except for a few of the layer scheduler
_BEGINS, _ENDS = 1, 2  # enum trigger of probes.bpf.c
_CALL_NAMES = {True: "call_return", False: "call_enter"}

_INFO_BYTES = 216  # struct bpf_prog_info up to the count, as since Linux 5.12
_MISSES_AT = 208
_EVERY_NS = 10**9  # each look takes a system call for each program


class _Point(NamedTuple):
    """A tracepoint: its program's name and bytecode, its id, and the layer in which misses of the program are
    counted. None: a miss means that a thread is not followed.
    """

    name: str
    code: bytes
    identifier: int
    missed: str | None


Code = Callable[[str, Mapping[int, Field], Mapping[int, int]], bytes]
"""Returns the bytecode of a program with its field offsets, and with the constants of this copy."""
_Places = list[tuple[int, int]]
"""Cookies and offsets in a file."""


class _Links:
    """The descriptors of attached probes: closing them detaches the probes. Every close waits for the kernel,
    up to 0.1 s. A link of `multi` holds all probes of a file, one of `single` a probe, and one of `events` a
    tracepoint; `events` also has the events themselves, and `multi` their programs. `refused` gets the probes
    that the kernel refuses.
    """

    def __init__(self, refused: set[int]) -> None:
        self.refused = refused
        self.multi: list[int] = []
        self.single: list[int] = []
        self.events: list[int] = []
        self.without_multi: set[bool] = set()
        """For entries (False) or returns: the kernel has no link for several uprobes."""

    @contextmanager
    def refusing(self, index: int, numbers: Container[int | None]) -> Iterator[None]:
        """Note the probe as refused if one of these errors is raised."""
        try:
            yield
        except OSError as error:
            if error.errno not in numbers:
                raise
            self.refused.add(index)


class Probing:
    """The programs of a plan, and which of them are attached."""

    def __init__(self, plan: Plan, code: Code) -> None:
        self.refused: set[int] = set()
        """The probes that the kernel refused."""
        self.is_whole = False
        """Whether everything is attached."""
        self._plan, self._code = plan, code
        # Programs are loaded once, as the verifier takes some milliseconds for each. Files stay open, so that
        # probes can be attached again even after a file was renamed or replaced.
        self._programs: dict[tuple[bytes, int, int, int], int] = {}
        self._files: dict[str, int] = {}
        self._always, self._in_windows = _Links(self.refused), _Links(self.refused)
        self._detaching: list[list[int]] = []
        # Events of tracepoints stay open between windows: opening one waits until the kernel has released one
        # that any process has closed, for which it waits until no call is held: for the whole of HOLD_NS.
        # There are two sets, used by turns, as a link takes a while to be detached from its event.
        self._ready: deque[list[tuple[int, int, _Point]]] = deque()
        self._holds = False
        self._watched: dict[int, tuple[int, str | None]] = {}
        self._counted: Counter[int] = Counter()
        self._look_at_ns = 0

    @property
    def rests(self) -> bool:
        """Whether the programs of windows can be detached between them: where the kernel attaches them in one
        call, and can hold the call that begins a window meanwhile.
        """
        windows = self._plan.windows
        if windows is None or self._in_windows.single:
            return False
        return self._holds or not any(trigger.begins for trigger in windows.places)

    def attach(self) -> None:
        """Attach everything. Raises OSError, CaptureUnavailable."""
        plan, windows, folder = self._plan, self._plan.windows, tracing_folder()
        triggers = windows.places if windows else ()
        places = {trigger.place for trigger in triggers}
        # Calls in a later window need to know what a handle is.
        always = {
            index: probe
            for index, probe in enumerate(plan.probes)
            if probe.place in places
            or (probe.hook.effect in NAMING_EFFECTS and isinstance(probe.place, FilePlace))
        }
        self._functions = {n: probe for n, probe in enumerate(plan.probes) if n not in always}
        self._calls, self._driver = (
            {returns: self._plain(f"{kind}_{'return' if returns else 'enter'}") for returns in (True, False)}
            for kind in ("call", "driver")
        )
        # It reads texts, and may sleep for that.
        self._reading = self._code("call_enter", {}, {Constant.MAY_SLEEP: 1})
        points = (_SCHEDULER if "scheduler" in plan.own else {}) | (
            _SAMPLING if HOST_SAMPLE in plan.own else {}
        )
        scheduler, has_scheduler = self._points(folder, points), bool(points)
        following = self._points(folder, _FOLLOWING if has_scheduler and not windows else _FOLLOWING | _EXIT)
        # Follow threads first, so that none is found in the middle of a call without need.
        self._link_points(self._always, self._loaded(following))
        # The program that was attached last runs first, so the calls that begin and end a window are in it.
        ends, begins = [one for one in triggers if not one.begins], [one for one in triggers if one.begins]
        self._attach_triggers(ends, holds=windows is not None and windows.is_end_followed)
        self._attach_functions(self._always, always)
        self._holds = self._attach_triggers(begins, holds=bool(begins))
        in_windows = [*scheduler, *self._hooked_points(folder)]
        self._ready.extend(self._loaded(in_windows) for _ in range(2 if windows else 1))
        self.complete()

    def complete(self) -> None:
        """Attach the programs of windows, unless they are attached. Raises OSError."""
        if not self.is_whole:
            self._attach_functions(self._in_windows, self._functions)
            if "syscall" in self._plan.own:
                for name, point in _RAW_TRACEPOINTS.items():
                    loaded = self._program(name, self._plain(name), bpf.PROG_TYPE_RAW_TRACEPOINT)
                    self._in_windows.multi.append(bpf.attach_raw_tracepoint(loaded, point))
            if HOST_SAMPLE in self._plan.own:
                loaded = self._program("host_sample", self._plain("host_sample"), bpf.PROG_TYPE_PERF_EVENT)
                for processor in online_processors():
                    clock = bpf.open_clock(processor, HZ)
                    self._in_windows.multi += [clock, bpf.link_event(loaded, clock)]
            self._link_points(self._in_windows, self._ready[0])
            self._ready.rotate()
            self.is_whole = True

    def rest(self) -> None:
        """Detach the programs of windows, on threads, as every close waits for the kernel. The probes of a
        link have stopped firing when its close begins to wait.
        """
        self.is_whole = False
        links, self._in_windows = self._in_windows, _Links(self.refused)
        self._detaching = [waiting for waiting in self._detaching if waiting]
        for waiting in ([link] for link in (*links.multi, *links.events)):
            self._detaching.append(waiting)
            threading.Thread(target=_close_all, args=(waiting,), daemon=True).start()

    def detach(self) -> tuple[list[int], list[int]]:
        """The descriptors that close immediately and the slow ones. Closing them detaches all probes."""
        self.is_whole = False
        quick, slow = list[int](), list[int]()
        for links in (self._always, self._in_windows):
            quick += links.multi
            slow += links.single + links.events
            links.multi, links.single, links.events = [], [], []
        for waiting in self._detaching:
            with suppress(IndexError):
                while True:
                    slow.append(waiting.pop())
        for descriptor in (*self._programs.values(), *self._files.values()):  # links hold their programs
            os.close(descriptor)
        self._programs, self._files, self._ready = {}, {}, deque()
        return quick, slow

    def missed(self, now_ns: int, *, is_final: bool) -> Counter[str | None]:
        """Layer → hits since the last look for which the kernel ran no program; it looks once a second and at
        the end.
        """
        missed: Counter[str | None] = Counter()
        if now_ns >= self._look_at_ns or is_final:
            self._look_at_ns = now_ns + _EVERY_NS
            for descriptor, layer in self._watched.values():
                info = ctypes.create_string_buffer(_INFO_BYTES)
                #  0 program │ 4 size │ 8 info
                asked = struct.pack("<IIQ", descriptor, _INFO_BYTES, ctypes.addressof(info))
                bpf.bpf(bpf.BPF_OBJ_GET_INFO_BY_FD, asked)
                total = int(struct.unpack_from("<Q", info, _MISSES_AT)[0])
                if total > self._counted[descriptor]:
                    missed[layer] += total - self._counted[descriptor]
                    self._counted[descriptor] = total
        return missed

    def close(self) -> None:
        """Close the descriptors that count misses."""
        for descriptor, _ in self._watched.values():
            os.close(descriptor)
        self._watched = {}

    def _watch(self, program_fd: int, layer: str | None) -> None:
        """Count a program's misses as events of a layer; None: as threads that are not followed."""
        if program_fd not in self._watched:
            self._watched[program_fd] = os.dup(program_fd), layer

    def _plain(self, program: str) -> bytes:
        return self._code(program, {}, {})

    def _program(
        self, name: str, code: bytes, program_type: int, attach_type: int = 0, flags: int = 0
    ) -> int:
        """The descriptor of a program. Raises OSError."""
        key = code, program_type, attach_type, flags
        if key not in self._programs:
            self._programs[key] = bpf.load_program(name, code, program_type, attach_type, flags)
        return self._programs[key]

    def _path(self, path: str) -> str:
        """A path to the file that had this path at the first call. Raises OSError."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._files[path]}"

    def _attach_triggers(self, triggers: Sequence[TriggerPlace], *, holds: bool) -> bool:
        """Attach a trigger's program to the functions that begin or end windows; `holds`: the program may
        sleep. Returns whether the kernel supports that. Raises OSError; CaptureUnavailable where none of the
        functions can be probed.

        A cookie has what the function does in its lower 16 bits (enum trigger of probes.bpf.c), and its cause
        above them.
        """
        links, code = _Links(set()), self._plain("trigger_holding")
        for one in triggers:
            cookie = _BEGINS if one.begins else Cause.STOP << 16 | _ENDS
            path, places, returns = one.place.path, [(cookie, one.place.offset)], not one.begins
            holds = holds and self._link_sleeping(links, path, places, code, returns)
            if not holds:
                self._attach_places(links, path, places, self._plain("trigger"), returns)
        self._always.multi += links.multi
        self._always.single += links.single
        if triggers and not (links.multi or links.single):
            raise CaptureUnavailable(
                "The function that begins or ends windows cannot be probed at its first instruction.",
                "Name another function with --start-on or --stop-on.",
            )
        return holds

    def _attach_functions(self, links: _Links, probes: Mapping[int, Probe]) -> None:
        """Attach probes on functions. Returns come first: where probes are attached one by one, all returns
        are attached before any entry. Raises OSError.
        """
        by_path: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for index, probe in probes.items():
            if isinstance(probe.place, FilePlace):
                by_path[probe.place.path].append((index, probe.place.offset))
        for returns in (True, False):
            for path, places in by_path.items():
                wanted = [place for place in places if self._is_wanted(place[0], returns)]
                texts = [
                    place
                    for place in ([] if returns else wanted)
                    if any(argument.kind == "str" for argument in probes[place[0]].signature.arguments)
                ]
                if texts and self._link_sleeping(links, path, texts, self._reading, returns):
                    wanted = [place for place in wanted if place not in texts]
                self._attach_places(links, path, wanted, self._calls[returns], returns)
        in_kernel = [(n, probe.place) for n, probe in probes.items() if isinstance(probe.place, KernelPlace)]
        for returns in (True, False):
            functions = [(n, place) for n, place in in_kernel if self._is_wanted(n, returns)]
            name, code = "driver_return" if returns else "driver_enter", self._driver[returns]
            if not functions:
                continue
            if all(place.address for _, place in functions):
                addresses, cookies = [place.address for _, place in functions], [n for n, _ in functions]
                try:  # with one link, where the kernel has such links, and refuses no place
                    loaded = self._program(name, code, bpf.PROG_TYPE_KPROBE, bpf.KPROBE_MULTI)
                    links.multi.append(bpf.link_kprobes(loaded, addresses, cookies, returns))
                    self._watch(loaded, _DRIVER)
                    continue
                except OSError as error:
                    if error.errno in (errno.EPERM, errno.EACCES, errno.EMFILE):
                        raise
            loaded = self._program(name, code, bpf.PROG_TYPE_KPROBE)
            self._watch(loaded, _DRIVER)
            for index, place in functions:
                with links.refusing(index, _UNPROBEABLE):
                    link = bpf.link_one_kprobe(loaded, place.symbol, place.address, index, returns)
                    links.single.append(link)

    def _is_wanted(self, index: int, returns: bool) -> bool:
        """Whether an entry or return is probed; a return without its entry would be an end alone."""
        return index not in self.refused and (self._plan.probes[index].hook.returns or not returns)

    def _attach_places(self, links: _Links, path: str, places: _Places, code: bytes, returns: bool) -> None:
        """Attach a program to places in a file, for entries or for returns. Raises OSError."""
        if not places:
            return
        if returns not in links.without_multi:
            try:
                self._link(links, path, places, code, returns)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                links.without_multi.add(returns)
        program = self._program(_CALL_NAMES[returns], code, bpf.PROG_TYPE_KPROBE)
        for index, offset in places:
            with links.refusing(index, (ENOTSUPP, errno.EINVAL)):  # EINVAL: not in the file's code
                link = bpf.link_one_uprobe(program, self._path(path), offset, index, returns)
                links.single.append(link)

    def _link_sleeping(self, links: _Links, path: str, places: _Places, code: bytes, returns: bool) -> bool:
        """Attach a program that may sleep, if the kernel supports that; returns whether it does."""
        try:
            self._link(links, path, places, code, returns, bpf.SLEEPABLE)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EMFILE):
                raise
            return False
        return True

    def _link(
        self, links: _Links, path: str, places: _Places, code: bytes, returns: bool, flags: int = 0
    ) -> None:
        """Attach `places` with one link; where the kernel refuses that, try each half."""
        offsets, cookies = [offset for _, offset in places], [index for index, _ in places]
        try:
            program = self._program(_CALL_NAMES[returns], code, bpf.PROG_TYPE_KPROBE, bpf.UPROBE_MULTI, flags)
            link = bpf.link_uprobes(program, self._path(path), offsets, cookies, returns)
        except OSError as error:
            if error.errno != ENOTSUPP:
                raise
            if len(places) == 1:
                links.refused.add(places[0][0])
                return
            middle = len(places) // 2
            self._link(links, path, places[:middle], code, returns, flags)
            self._link(links, path, places[middle:], code, returns, flags)
        else:
            links.multi.append(link)

    def _loaded(self, points: list[_Point]) -> list[tuple[int, int, _Point]]:
        """A program of its own and an event for each tracepoint, both until `detach`. Raises OSError."""
        made = []
        for point in points:
            loaded = bpf.load_program(point.name, point.code, bpf.PROG_TYPE_TRACEPOINT)
            self._always.multi.append(loaded)
            event = bpf.open_tracepoint(point.identifier)
            self._always.events.append(event)
            if point.name not in {*_SCHEDULER, *_SAMPLING}:  # those count misses themselves, by thread
                self._watch(loaded, point.missed)
            made.append((loaded, event, point))
        return made

    def _link_points(self, links: _Links, ready: list[tuple[int, int, _Point]]) -> None:
        """Attach the programs to their events. Raises OSError."""
        for number, (loaded, event, point) in enumerate(ready):
            try:
                links.events.append(bpf.link_event(loaded, event))
            except FileExistsError:  # its last link is not detached yet
                ready[number] = loaded, event, _ = self._loaded([point])[0]
                links.events.append(bpf.link_event(loaded, event))

    def _points(self, folder: Path, points: Mapping[str, str]) -> list[_Point]:
        made = []
        for program, point in points.items():
            offsets = field_offsets(folder, point)
            fields: dict[int, Field] = {
                number: (offsets[field], 0)
                for number, (of, field) in FIELDS.items()
                if of == point and field in offsets
            }
            code = self._code(program, fields, {})
            made.append(_Point(program, code, tracepoint_id(folder, point), None))
        return made

    def _hooked_points(self, folder: Path) -> list[_Point]:
        """The tracepoints of hooks. Probes that differ in the number that they compare, such as those of the
        interrupts of a device, share a program, as the kernel runs 64 at a tracepoint, of all tools together.
        """
        hooked = [one for one in enumerate(self._plan.probes) if isinstance(one[1].place, TracepointPlace)]
        made = []
        for (_, point), found in groupby(hooked, key=_shared_program):
            alike = list(found)
            for first in range(0, len(alike), _ALIKE_MOST):
                index, probe = alike[first]
                arguments = probe.signature.arguments
                given = [_NO_FIELD if a.kind == "str" else (a.position, a.bits // 8) for a in arguments]
                fields = dict(zip(HOOK_FIELDS, given + [_NO_FIELD] * len(HOOK_FIELDS), strict=False))
                texts = [text_field(argument) for argument in arguments if argument.kind == "str"]
                own: dict[int, int] = {Constant.PROBE: index, **dict(zip(TEXTS, texts, strict=False))}
                own[Constant.PROBES] = len(alike[first : first + _ALIKE_MOST])
                code = self._code("tracepoint_hit", fields, own)
                made.append(_Point("tracepoint_hit", code, tracepoint_id(folder, point), probe.layer))
        return made


def _shared_program(one: tuple[int, Probe]) -> tuple[object, str]:
    """Equal for probes of a tracepoint of which a hit is at most of one. With the tracepoint."""
    index, probe = one
    assert isinstance(probe.place, TracepointPlace)
    condition, point = probe.hook.condition, probe.place.point
    if condition is None or condition.operator != "==":
        return index, point
    return replace(probe.hook, condition=replace(condition, value=0)), point


def _close_all(waiting: list[int]) -> None:
    """Close one after the other, until another thread has taken the rest."""
    with suppress(IndexError):
        while True:
            os.close(waiting.pop(0))


_IDS_MAX = 65536
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
        self._probing = Probing(plan, self._code)
        self._is_stopped = False
        self._namespace = own_namespace()
        self.is_unordered = plan.filters.min_duration_ns > 0 or self._namespace is not None
        self._start_ns = time.monotonic_ns()
        self._counted_drops: dict[int, int] = {}
        self._polled_ns = time.monotonic_ns()
        self._marks: deque[tuple[int, bytes]] = deque()  # (bytes in the ring before it, record of a window)
        self._turns: list[Turn] = []
        self._ids = OrderedDict[int, int]()
        """Processes by the kernel's ids → their ids in the pid namespace of this process."""
        self._reported_refused: set[int] = set()
        triggers = plan.windows.places if plan.windows else ()
        self.probed = frozenset(trigger.begins for trigger in triggers)
        pairs = plan.filters.min_duration_ns > 0 or any(
            is_paired(probe, plan.filters) for probe in plan.probes
        )
        try:
            self._maps = Maps(plan.ring_bytes, len(plan.probes), pairs, HOST_SAMPLE in plan.own)
        except OSError as error:
            raise explain(Operation.MAP, error) from error
        self._drain = Drain(self._maps["ring"], plan.ring_bytes)
        if HOST_SAMPLE in plan.own:
            self._host_stacks = HostStacks(
                self._maps.set_python,
                lambda pid: self._ids.get(pid, 0 if self._namespace else pid),
                self._maps.forget_stack,
                is_alone="scheduler" not in plan.own,
            )
        # Where every probe needs a descriptor, libcuda and libcudart exceed the usual limit of 1024.
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        device, inode = self._namespace or (0, 0)
        comm = plan.scope.comm_bytes.ljust(16, b"\0")
        self._constants: dict[int, int] = {
            Constant.PROCESSORS: self._maps.processors,
            Constant.WITH_SCHEDULER: not {"scheduler", HOST_SAMPLE}.isdisjoint(plan.own),
            Constant.WITH_SAMPLES: (HOST_SAMPLE in plan.own) * (1 if "scheduler" in plan.own else 2),
            Constant.EVERYONE: plan.scope.kind == "system" and self._namespace is None,
            Constant.CHILDREN: plan.scope.children,
            Constant.MIN_DURATION_NS: plan.filters.min_duration_ns,
            Constant.SAMPLE: plan.filters.sample,
            Constant.COMM_LOW: int.from_bytes(comm[:8], "little"),
            Constant.COMM_HIGH: int.from_bytes(comm[8:], "little"),
            Constant.NAMESPACE_DEV: device,
            Constant.NAMESPACE_INO: inode,
            Constant.PROBE: 0,
            Constant.OWN_TGID: os.getpid(),
            Constant.PROBES: 1,
            **dict.fromkeys(TEXTS, 0),
            Constant.MAY_SLEEP: 0,
            Constant.BEGIN_AT: plan.windows.begin_at if plan.windows else 0,
            Constant.END_AT: plan.windows.end_at if plan.windows else 0,
            Constant.CLOCK_AHEAD_NS: clock_ahead_ns(),
        }
        try:
            self._maps.put_specs(b"".join(spec_of(probe, plan.filters) for probe in plan.probes))
            if "syscall" in plan.own:
                self._maps.want_syscalls(list(self._syscalls))
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
                if self._host_stacks is not None:
                    self._host_stacks.look(thread.pid)

    def prepare(self) -> None:
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
        if not self._probing.is_whole or not self._probing.rests:
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

    def is_end_held(self) -> bool:
        is_held = self._maps.control[Control.END_ASKED_NS] != 0
        if is_held:
            self._maps.control[Control.END_ASKED_NS] = 1  # it is seen, so the call may wait longer
        return is_held

    def let_end(self) -> None:
        self._maps.control[Control.END_ASKED_NS] = 0

    def open_window(self, since_ns: int, at_ns: int | None = None, *, name: str = "") -> int:
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
        if self._namespace is not None:
            self._ids |= ids_in(chunk)
            while len(self._ids) > _IDS_MAX:  # those that ended are not removed before
                self._ids.popitem(last=False)
        if self._host_stacks is not None:
            self._host_stacks.add(chunk)
        if self._plan.windows is not None:
            self._turns += [Turn(ts_ns, begins) for ts_ns, begins in windows_in(chunk)]
        while self._marks and self._marks[0][0] <= self._drain.taken_bytes:
            chunk += self._marks.popleft()[1]
        return chunk

    def processes(self) -> set[int]:
        found = self._maps.processes()
        if self._namespace is None:
            return found
        return {self._ids.get(pid, -pid) for pid in found}

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
        for layer, missed in self._probing.missed(now_ns, is_final=self._is_stopped).items():
            losses.append(Loss(layer, missed, self._polled_ns, now_ns, _MISSED))
        if self._host_stacks is not None and (left_out := self._host_stacks.left_out):
            self._host_stacks.left_out = 0
            reason = "their stacks: a recording keeps 131,072 different ones"
            losses.append(Loss(HOST_SAMPLE, left_out, self._polled_ns, now_ns, reason))
        self._polled_ns = now_ns
        return losses

    def stop(self) -> None:
        """Stop recording, and detach. A second call does nothing."""
        self._is_stopped = True
        self._maps.control[Control.STOPPED] = 1
        self.let_go()
        self.let_end()
        bpf.map_clear(self._maps["tracked"], 4)
        quick, slow = self._probing.detach()
        # These are closed first, and here: until then every process that calls the functions pays for them.
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
        self._probing.close()
        self._drain.close()
        if self._host_stacks is not None:
            self._host_stacks.close()
        self._maps.close()

    def _code(self, program: str, fields: Mapping[int, Field], own: Mapping[int, int]) -> bytes:
        """The bytecode with the plan's constants, and with `own`, those of this copy alone."""
        constants = {**self._constants, **own}
        return filled_in(self._programs[program], self._maps.descriptors, constants, fields)

    def _say_refused(self) -> set[int]:
        """Report the functions that cannot be recorded, each once; returns the numbers of all such probes."""
        refused = self._probing.refused
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


def _attached(programs: Mapping[str, bytes], plan: Plan, notify: Notify) -> ProbeAttachment:
    """Attach all of a plan, without stacks where the kernel refuses their programs. Raises
    CaptureUnavailable.
    """
    try:
        return ProbeAttachment(programs, plan, notify)
    except CaptureUnavailable as error:
        others = tuple(layer for layer in plan.layers if layer != HOST_SAMPLE)
        if len(others) == len(plan.layers) or not others:
            raise
        own = tuple(layer for layer in plan.own if layer != HOST_SAMPLE)
        attachment = ProbeAttachment(programs, replace(plan, layers=others, own=own), notify)
        attachment.missing[HOST_SAMPLE] = error.message
        notify(f"no {HOST_SAMPLE} layer: {error.message}")
        return attachment


class BccEngine:
    """Compiles the programs with BCC when a capture starts."""

    name = "bcc"
    layers = frozenset((*RECORDED_LAYERS, HOST_SAMPLE))

    def check(self) -> str:
        """Return BCC's version. Raises CaptureUnavailable."""
        check_machine()
        return str(getattr(import_bcc(), "__version__", "unknown"))

    def attach(self, plan: Plan, notify: Notify) -> ProbeAttachment:
        return _attached(compiled(platform.machine()), plan, notify)


class PrebuiltEngine:
    """Loads the bytecode that tracepipe ships, for hosts without BCC."""

    name = "prebuilt"
    layers = frozenset((*RECORDED_LAYERS, HOST_SAMPLE))

    def check(self) -> str:
        """Return the compiler that made the bytecode. Raises CaptureUnavailable."""
        check_machine()
        return str(json.loads(SHIPPED.read_text())["compiler"])

    def attach(self, plan: Plan, notify: Notify) -> ProbeAttachment:
        programs = json.loads(SHIPPED.read_text())["programs"][platform.machine()]
        return _attached(
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
