"""Attaches and detaches the programs of a capture.

A program stays attached for the whole capture, or for its windows only. Between windows the latter are
detached where the kernel can quickly attach them again (one link for all functions of a file, Linux 6.6).

    standing                                   of windows
    ───────────────────────────────────────    ─────────────────────────────────────
    who is recorded: exec, clone, names        functions
    what begins and ends windows               system calls, the scheduler
    functions that give kernels their names    tracepoints of hooks
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tracepipe.hooks.hook import NAMING_EFFECTS, FilePlace, Probe, TracepointPlace
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.attach import (
    Links,
    Opened,
    attach_kprobes,
    attach_triggers,
    attach_uprobes,
    has_sleeping,
)
from tracepipe.tracer.bpf.bytecode import FIELDS, HOOK_FIELDS, Constant, Field
from tracepipe.tracer.bpf.specs import text_field
from tracepipe.tracer.find.kernel import field_offsets, tracepoint_id, tracing_folder
from tracepipe.tracer.request import Plan, TriggerPlace

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
