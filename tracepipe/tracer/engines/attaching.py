"""Attaches and detaches the programs of a capture.

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

import ctypes
import errno
import os
import struct
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import NAMING_EFFECTS, FilePlace, KernelPlace, Probe, TracepointPlace
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.bytecode import FIELDS, HOOK_FIELDS, Constant, Field
from tracepipe.tracer.bpf.specs import text_field
from tracepipe.tracer.find.kernel import field_offsets, tracepoint_id, tracing_folder
from tracepipe.tracer.request import Cause, Plan, TriggerPlace

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
_EXIT = {"process_exit": "sched/sched_process_exit"}
_NO_FIELD: Field = (8, 1)  # a byte that every tracepoint's record has: 0 to 8 is not for programs
TEXTS = (Constant.TEXT_0, Constant.TEXT_1, Constant.TEXT_2, Constant.TEXT_3)
"""Constants of a hooked tracepoint's own copy."""

# The kernel's errors for a function that cannot be probed: blacklisted, ambiguous name, or removed.
_UNPROBEABLE = {errno.EINVAL, errno.ENOENT, errno.EADDRNOTAVAIL, errno.EILSEQ, bpf.ENOTSUPP}

_DRIVER = "kernel"  # the layer of kernel functions, except for a few of the layer scheduler
_BEGINS, _ENDS = 1, 2  # enum trigger of probes.bpf.c

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


class Probing:
    """What a plan attaches, and which of it is attached."""

    def __init__(self, plan: Plan, code: Code) -> None:
        """Prepare the programs. Raises CaptureUnavailable."""
        self.refused: set[int] = set()
        """The probes that the kernel refused."""
        self.is_whole = False
        """Whether everything is attached."""
        self._plan, self._code = plan, code
        self._opened = Opened()
        self._standing, self._windowed = Links(self.refused), Links(self.refused)
        self._detaching: list[list[int]] = []
        self._ready: list[tuple[int, _Point]] = []
        self._holds = False
        windows, folder = plan.windows, tracing_folder()
        turning = {trigger.place for trigger in windows.places} if windows else set()
        probes = dict(enumerate(plan.probes))
        standing = {n: probe for n, probe in probes.items() if _names(probe) or probe.place in turning}
        self._functions = standing, {n: probe for n, probe in probes.items() if n not in standing}
        self._calls, self._driver = self._pair("call"), self._pair("driver")
        self._patient = code("call_enter", {}, {Constant.MAY_SLEEP: 1})
        following = _FOLLOWING if "scheduler" in plan.own and windows is None else _FOLLOWING | _EXIT
        scheduler = self._points(folder, _SCHEDULER) if "scheduler" in plan.own else []
        self._following = self._points(folder, following)
        self._of_windows = [*scheduler, *self._hooked(folder)]
        self._missed: Counter[str | None] = Counter()

    @property
    def rests(self) -> bool:
        """Whether the programs of windows can be detached between them: where the kernel attaches them in one
        call, and can hold the call that begins a window meanwhile.
        """
        windows = self._plan.windows
        if windows is None or self._windowed.single:
            return False
        return self._holds or not any(trigger.begins for trigger in windows.places)

    def attach(self) -> None:
        """Attach everything. Raises OSError, CaptureUnavailable."""
        triggers = self._plan.windows.places if self._plan.windows else ()
        # Follow threads first, so that none is found in the middle of a call without need.
        self._load(self._following)
        self._attach_points(self._standing)
        # The program that was attached last runs first, so the calls that begin and end a window are in it.
        ends, begins = [one for one in triggers if not one.begins], [one for one in triggers if one.begins]
        may_hold = bool(triggers) and has_sleeping(self._opened, self._plain("trigger_holding"))
        is_end_held = may_hold and self._plan.windows is not None and self._plan.windows.is_end_followed
        self._attach_triggers(ends, is_end_held)
        self._attach_functions(self._standing, self._functions[0])
        self._holds = bool(begins) and may_hold
        self._attach_triggers(begins, self._holds)
        self._load(self._of_windows)
        self.complete()

    def _attach_triggers(self, triggers: Sequence[TriggerPlace], holds: bool) -> None:
        code = self._plain("trigger_holding" if holds else "trigger")
        attach_triggers(self._standing, self._opened, triggers, code, holds=holds)

    def complete(self) -> None:
        """Attach the programs of windows, unless they are attached. Raises OSError."""
        if not self.is_whole:
            self._attach_functions(self._windowed, self._functions[1])
            if "syscall" in self._plan.own:
                for name, point in _RAW_TRACEPOINTS.items():
                    loaded = self._opened.program(name, self._plain(name), bpf.PROG_TYPE_RAW_TRACEPOINT)
                    self._windowed.multi.append(bpf.attach_raw_tracepoint(loaded, point))
            self._attach_points(self._windowed)
            self.is_whole = True

    def rest(self) -> None:
        """Detach the programs of windows, on threads, as every close waits for the kernel. The probes of a
        link have stopped firing when its close begins to wait.
        """
        self.is_whole = False
        links, self._windowed = self._windowed, Links(self.refused)
        self._missed.update(links.misses.take(0, is_final=True))
        links.misses.close()
        self._detaching = [waiting for waiting in self._detaching if waiting]
        for waiting in (*([link] for link in links.multi), links.events):
            self._detaching.append(waiting)
            threading.Thread(target=_close_all, args=(waiting,), daemon=True).start()
        self._load(self._of_windows)

    def take(self) -> tuple[list[int], list[int]]:
        """The descriptors that close immediately, and those that are slow to close. The caller closes them,
        which detaches all probes.
        """
        self.is_whole = False
        quick, slow = list[int](), list[int]()
        for links in (self._standing, self._windowed):
            quick += links.multi
            slow += links.single + links.events
            links.multi, links.single, links.events = [], [], []
        for waiting in self._detaching:
            with suppress(IndexError):
                while True:
                    slow.append(waiting.pop())
        quick += [loaded for loaded, _ in self._ready]
        self._ready = []
        self._opened.close()
        return quick, slow

    def missed(self, now_ns: int, *, is_final: bool) -> dict[str | None, int]:
        """Layer → hits since the last call for which the kernel ran no program. `Misses` explains when."""
        missed, self._missed = self._missed, Counter()
        for links in (self._standing, self._windowed):
            missed.update(links.misses.take(now_ns, is_final=is_final))
        return missed

    def close(self) -> None:
        """Close the descriptors that count misses."""
        self._standing.misses.close()
        self._windowed.misses.close()

    def _plain(self, program: str) -> bytes:
        return self._code(program, {}, {})

    def _pair(self, kind: str) -> dict[bool, bytes]:
        return {True: self._plain(f"{kind}_return"), False: self._plain(f"{kind}_enter")}

    def _attach_functions(self, links: Links, probes: Mapping[int, Probe]) -> None:
        attach_uprobes(links, self._opened, probes, self._calls, self._patient)
        attach_kprobes(links, self._opened, probes, self._driver)

    def _load(self, points: list[_Point]) -> None:
        """Load programs of tracepoints, each for one use: a program cannot be attached again while its last
        event is being detached.
        """
        for point in points:
            loaded = bpf.load_program(point.name, point.code, bpf.PROG_TYPE_TRACEPOINT)
            self._ready.append((loaded, point))

    def _attach_points(self, links: Links) -> None:
        while self._ready:
            loaded, point = self._ready[0]
            links.events.append(bpf.attach_tracepoint(loaded, point.identifier))
            if point.name not in _SCHEDULER:  # those count misses themselves, by thread
                links.misses.watch(loaded, point.missed)
            os.close(loaded)  # the event holds it
            del self._ready[0]

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

    def _hooked(self, folder: Path) -> list[_Point]:
        made = []
        for index, probe in enumerate(self._plan.probes):
            if isinstance(probe.place, TracepointPlace):
                arguments = probe.signature.arguments
                given = [_NO_FIELD if a.kind == "str" else (a.position, a.bits // 8) for a in arguments]
                fields = dict(zip(HOOK_FIELDS, given + [_NO_FIELD] * len(HOOK_FIELDS), strict=False))
                texts = [text_field(argument) for argument in arguments if argument.kind == "str"]
                own: dict[int, int] = {Constant.PROBE: index, **dict(zip(TEXTS, texts, strict=False))}
                code = self._code("tracepoint_hit", fields, own)
                identifier = tracepoint_id(folder, probe.place.point)
                made.append(_Point("tracepoint_hit", code, identifier, probe.layer))
        return made


def _names(probe: Probe) -> bool:
    """Whether it says what a handle is, which calls in a later window need."""
    return probe.hook.effect in NAMING_EFFECTS and isinstance(probe.place, FilePlace)


def _close_all(waiting: list[int]) -> None:
    """Close one after the other, until another thread has taken the rest."""
    with suppress(IndexError):
        while True:
            os.close(waiting.pop(0))


class Opened:
    """The open descriptors of one capture: programs, each loaded once, as the verifier takes some
    milliseconds for each, and files, so that probes can be attached again even after a file was renamed or
    replaced.
    """

    def __init__(self) -> None:
        self._programs: dict[tuple[bytes, int, int, int], int] = {}
        self._files: dict[str, int] = {}

    def program(self, name: str, code: bytes, program_type: int, attach_type: int = 0, flags: int = 0) -> int:
        """The descriptor of a program. Raises OSError."""
        key = code, program_type, attach_type, flags
        if key not in self._programs:
            self._programs[key] = bpf.load_program(name, code, program_type, attach_type, flags)
        return self._programs[key]

    def path(self, path: str) -> str:
        """A path to the file that had this path at the first call. Raises OSError."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_PATH | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._files[path]}"

    def close(self) -> None:
        """Close all; links hold the programs that are attached."""
        for descriptor in (*self._programs.values(), *self._files.values()):
            os.close(descriptor)
        self._programs, self._files = {}, {}


class Links:
    """The descriptors of attached probes: closing them detaches the probes. `refused` are the probes that the
    kernel refused, `misses` counts the hits that programs miss.

    A link of `multi` holds all probes of a file, one of `single` a probe, and one of `events` a tracepoint.
    Every close waits for the kernel, up to 0.1 s.
    """

    def __init__(self, refused: set[int]) -> None:
        self.multi: list[int] = []
        self.single: list[int] = []
        self.events: list[int] = []
        self.refused = refused
        self.misses = Misses()


def attach_uprobes(
    links: Links, opened: Opened, probes: Mapping[int, Probe], code: dict[bool, bytes], patient: bytes
) -> None:
    """Attach those of `probes` (number → probe) that are in a file. `code` is the program for returns (True)
    and for entries. `patient` is the program for entries that may sleep: it reads texts, where the kernel
    supports such programs. Raises OSError.

    Returns come first: where probes are attached one by one, all returns are attached before any entry.
    """
    by_path: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for index, probe in probes.items():
        if isinstance(probe.place, FilePlace):
            by_path[probe.place.path].append((index, probe.place.offset))
    for returns in (True, False):
        attacher = _Uprobes(links, opened, code[returns], returns)
        reader = _Uprobes(links, opened, patient, returns)
        for path, places in by_path.items():
            # A return without its entry would be an end without a begin.
            wanted = [place for place in places if _is_wanted(probes, place[0], returns, links)]
            texts = [] if returns else [place for place in wanted if _has_text(probes[place[0]])]
            if texts and reader.attach_sleeping(path, texts):
                wanted = [place for place in wanted if place not in texts]
            attacher.attach(path, wanted)


def attach_triggers(
    links: Links, opened: Opened, triggers: Sequence[TriggerPlace], code: bytes, *, holds: bool = False
) -> None:
    """Attach a trigger's program to the functions that begin or end windows; `holds`: the program may sleep.
    Raises OSError.

    A cookie has what the function does in its lower 16 bits (enum trigger of probes.bpf.c), and its cause
    above them. Raises CaptureUnavailable where none of the functions can be probed.
    """
    own = Links(set())
    for begins in (True, False):
        attacher = _Uprobes(own, opened, code, returns=not begins)
        cookie = _BEGINS if begins else Cause.STOP << 16 | _ENDS
        for one in triggers:
            if one.begins == begins:
                places = [(cookie, one.place.offset)]
                if not (holds and attacher.attach_sleeping(one.place.path, places)):
                    attacher.attach(one.place.path, places)
    links.multi += own.multi
    links.single += own.single
    if triggers and not (own.multi or own.single):
        raise CaptureUnavailable(
            "The function that begins or ends windows cannot be probed at its first instruction.",
            "Name another function with --start-on or --stop-on.",
        )


def has_sleeping(opened: Opened, code: bytes) -> bool:
    """Whether the kernel accepts this program as one of uprobes that may sleep. Raises OSError for other
    errors.
    """
    try:
        opened.program("trigger", code, bpf.PROG_TYPE_KPROBE, bpf.UPROBE_MULTI, bpf.SLEEPABLE)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMFILE):
            raise
        return False
    return True


def _has_text(probe: Probe) -> bool:
    return any(argument.kind == "str" for argument in probe.signature.arguments)


def attach_kprobes(
    links: Links, opened: Opened, probes: Mapping[int, Probe], code: dict[bool, bytes]
) -> None:
    """Attach those of `probes` that are in the kernel. Otherwise as `attach_uprobes`."""
    places = [(index, probe.place) for index, probe in probes.items() if isinstance(probe.place, KernelPlace)]
    for returns in (True, False):
        wanted = [place for place in places if _is_wanted(probes, place[0], returns, links)]
        name = "driver_return" if returns else "driver_enter"
        if not wanted or _link_kprobes_at_once(links, opened, name, code[returns], wanted, returns):
            continue
        loaded = opened.program(name, code[returns], bpf.PROG_TYPE_KPROBE)
        links.misses.watch(loaded, _DRIVER)
        for index, place in wanted:
            try:
                links.single.append(bpf.link_one_kprobe(loaded, place.symbol, place.address, index, returns))
            except OSError as error:
                if error.errno not in _UNPROBEABLE:
                    raise
                links.refused.add(index)


def _is_wanted(probes: Mapping[int, Probe], index: int, returns: bool, links: Links) -> bool:
    return index not in links.refused and (probes[index].hook.returns or not returns)


def _link_kprobes_at_once(
    links: Links,
    opened: Opened,
    name: str,
    code: bytes,
    places: list[tuple[int, KernelPlace]],
    returns: bool,
) -> bool:
    """Attach all with one link; returns False where the kernel has no such links or refuses a function."""
    if not all(place.address for _, place in places):
        return False
    try:
        loaded = opened.program(name, code, bpf.PROG_TYPE_KPROBE, bpf.KPROBE_MULTI)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES):
            raise
        return False
    try:
        addresses, cookies = [place.address for _, place in places], [index for index, _ in places]
        links.multi.append(bpf.link_kprobes(loaded, addresses, cookies, returns))
        links.misses.watch(loaded, _DRIVER)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EMFILE):
            raise
        return False
    return True


class _Uprobes:
    """Attaches one program, for entries or for returns."""

    def __init__(self, links: Links, opened: Opened, code: bytes, returns: bool) -> None:
        self._links, self._opened, self._code, self._returns = links, opened, code, returns
        self._single = False  # the kernel has no multi links: one link for each probe

    def attach(self, path: str, places: list[tuple[int, int]]) -> None:
        """Attach to places in a file, as (probe, offset). Raises OSError."""
        if not places:
            return
        if not self._single:
            try:
                self._link(path, places)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._single = True
        program = self._program(0)
        for index, offset in places:
            try:
                link = bpf.link_one_uprobe(program, self._opened.path(path), offset, index, self._returns)
            except OSError as error:
                if error.errno not in (bpf.ENOTSUPP, errno.EINVAL):  # EINVAL: not in the file's code
                    raise
                self._links.refused.add(index)
            else:
                self._links.single.append(link)

    def attach_sleeping(self, path: str, places: list[tuple[int, int]]) -> bool:
        """Attach a program that may sleep, with one link; returns whether the kernel supports that. Raises
        OSError.
        """
        try:
            self._link(path, places, bpf.SLEEPABLE)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EMFILE):
                raise
            return False
        return True

    def _program(self, attach_type: int, flags: int = 0) -> int:
        name = "call_return" if self._returns else "call_enter"
        return self._opened.program(name, self._code, bpf.PROG_TYPE_KPROBE, attach_type, flags)

    def _link(self, path: str, places: list[tuple[int, int]], flags: int = 0) -> None:
        """Attach `places` with one link; where the kernel refuses that, try each half, down to the refused
        place.
        """
        offsets, cookies = [offset for _, offset in places], [index for index, _ in places]
        try:
            program = self._program(bpf.UPROBE_MULTI, flags)
            link = bpf.link_uprobes(program, self._opened.path(path), offsets, cookies, self._returns)
        except OSError as error:
            if error.errno != bpf.ENOTSUPP:
                raise
            if len(places) == 1:
                self._links.refused.add(places[0][0])
                return
            middle = len(places) // 2
            self._link(path, places[:middle], flags)
            self._link(path, places[middle:], flags)
        else:
            self._links.multi.append(link)


class Misses:
    """The attached programs, and how many hits each has missed so far."""

    def __init__(self) -> None:
        self._programs: list[tuple[int, str | None]] = []
        self._seen: dict[int, int] = {}
        self._look_at_ns = 0

    def watch(self, program_fd: int, layer: str | None) -> None:
        """Count a program's misses as events of a layer; None: as threads that are not followed."""
        self._programs.append((os.dup(program_fd), layer))

    def take(self, now_ns: int, *, is_final: bool) -> dict[str | None, int]:
        """Layer → hits that were missed since the last look; it looks once a second and at the end."""
        missed: dict[str | None, int] = {}
        if now_ns < self._look_at_ns and not is_final:
            return missed
        self._look_at_ns = now_ns + _EVERY_NS
        for descriptor, layer in self._programs:
            total = _misses_of(descriptor)
            if total > self._seen.get(descriptor, 0):
                missed[layer] = missed.get(layer, 0) + total - self._seen.get(descriptor, 0)
                self._seen[descriptor] = total
        return missed

    def close(self) -> None:
        """Close the programs."""
        for descriptor, _ in self._programs:
            os.close(descriptor)
        self._programs.clear()


def _misses_of(program_fd: int) -> int:
    info = ctypes.create_string_buffer(_INFO_BYTES)
    #  0 program │ 4 size │ 8 info
    bpf.bpf(bpf.BPF_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", program_fd, _INFO_BYTES, ctypes.addressof(info)))
    return int(struct.unpack_from("<Q", info, _MISSES_AT)[0])
