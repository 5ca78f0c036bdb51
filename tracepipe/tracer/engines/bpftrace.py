"""The engine `bpftrace`: the same records from a bpftrace script, at lower rates.

    this process ──function call──▶ control probe ─┐
    target ───────────────────────▶ probes ────────┴▶ a buffer a processor ─▶ bpftrace ─▶ pipe ─▶ Lines

bpftrace empties one processor's buffer after the other, so lines of two processors arrive in any order, and a
thread that moved has lines in both. Lines of one processor keep their order. A line is released when a later
one was seen from every processor.

bpftrace is a child process that is killed at the end: its own exit takes 0.1 s for each probe, in which it
prints nothing. The kernel then detaches the probes in the background. Everything that was printed is read
before that: a mark is put into each processor's buffer as its last line.

The script of a plan does what probes.bpf.c does. Every event is one line of hexadecimal numbers, which has
the fields of its record and what puts it in order:

    KIND LAYER CLOCK CPU WHO SEQ  AT TID TGID ID SERVED WORD …

    KIND    of record.py, or `k` for a mark, which has only CLOCK CPU WHICH WORD
    LAYER   an index into DROP_LAYERS
    CLOCK   `nsecs`, whose clock differs between versions of bpftrace
    WHO     the current thread; for a processor's idle thread IDLE plus the processor, as all have the tid 0
    SEQ     counts the lines of this thread and layer, so a gap shows how many were lost
    AT      when a call began that is printed at its return; 0: at CLOCK
    SERVED  tgid<<32|tid of the thread for which a worker of the driver runs this, or 0
    WORD    a[0] and so on, up to eight for a call

The texts of a call or hit are printed before it, in pieces: `KIND LAYER CLOCK CPU WHO SEQ PIECE TEXT`, where
SEQ is that of the line that follows. A text is the last field, unescaped, and ends with a random mark: it may
contain anything else.

bpftrace accepts no commands while it runs. The script therefore has a probe on a function of the C library
that only this process calls, with orders as arguments (`Order`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import re
import resource
import secrets
import select
import shutil
import signal
import struct
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.hook import (
    HASHED_WORDS,
    INTEGER_KINDS,
    RECORDED_LAYERS,
    Condition,
    FilePlace,
    KernelPlace,
    Probe,
    TracepointPlace,
)
from tracepipe.hooks.slots import slots
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.maps import QUEUES_ITEMS, WHOLE_EFFECTS, hashed_slot, is_paired
from tracepipe.tracer.engines.engine import Attachment
from tracepipe.tracer.engines.probes import check_machine
from tracepipe.tracer.find.kernel import field_offsets, tracing_folder
from tracepipe.tracer.find.library import mappings
from tracepipe.tracer.machine.facts import this_machine
from tracepipe.tracer.machine.processes import all_threads, comm_of, online_processors, own_namespace, stat_of
from tracepipe.tracer.machine.refusals import Operation, explain
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import DROP_LAYERS, FUNCTION_KINDS, RECORD, Loss
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Notify, Plan
from tracepipe.units import counted

TEXT_PIECE_BYTES = 124
"""The size of a piece of text; two make TEXT_BYTES. Printing needs a string twice on BPF's stack of 512 B."""
_SYSCALL, _SCHEDULER = DROP_LAYERS.index("syscall"), DROP_LAYERS.index("scheduler")
_THREADS = DROP_LAYERS.index(None)
IDLE = 1 << 32
_WHO = f"(tid == 0 ? (uint64){IDLE:#x} + cpu : (uint64)tid)"


class Order(IntEnum):
    """An order to the script: the second argument of the call; the first is the word."""

    TRACK = 1  # word: tgid<<32|tid of a thread that already exists
    START = 2  # word: process whose next exec starts the recording, or 0
    MARK = 3  # print after all earlier lines of this processor; word: the number of the mark
    STOP = 4  # stop following threads, then as MARK
    COUNTS = 5  # print the last sequence numbers and the filtered events, then as MARK
    THREADS = 6  # print the threads that are followed, then as MARK


@dataclass(frozen=True, slots=True)
class Architecture:
    """The facts about an architecture that the script needs; registers have bpftrace's names."""

    registers: int  # how many carry arguments
    stack_bytes: int  # from the stack pointer to the first argument above it, at the entry
    frame_bytes: int  # by how much the stack pointer has grown when a function has returned
    instruction: str  # the name of the instruction pointer
    breakpoint_bytes: int  # how far that register is past the start of a kprobe's function


ARCHITECTURES = {"x86_64": Architecture(6, 8, 8, "ip", 1), "aarch64": Architecture(8, 0, 0, "pc", 0)}


@dataclass(slots=True)
class Script:
    """A script. `without` has the indexes of probes that cannot be attached, `tracepoint_fields` the names of
    the fields of a tracepoint's arguments, by the index of its probe.
    """

    plan: Plan
    own_pid: int
    control: tuple[str, str]  # file and function of the control probe
    text_end: str
    syscalls: Iterable[int]
    without: frozenset[int] = frozenset()
    tracepoint_fields: Mapping[int, list[str]] = field(default_factory=dict)
    architecture: Architecture = ARCHITECTURES["x86_64"]
    blocks: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The whole script."""
        wanted = "".join(f" @w[(uint64){number}] = 1;" for number in self.syscalls)
        # bpftrace takes a map's type from its first use.
        one = " ".join(f"@{name}[(uint64)0] = (uint64)0;" for name in ("t", "w", "u", "ui"))
        two = " ".join(f"@{name}[(uint64)0, (uint64)0] = (uint64)0;" for name in ("s", "q"))
        counts = "@ud[(uint64)0] = 0; @f[(uint64)0, (uint64)0] = 0; @k[(uint64)0, (uint64)0] = 0;"
        self.blocks = [f"BEGIN {{ @on = 0; @arm = (uint64)0; {one} {two} {counts}{wanted} }}"]
        # bpftrace attaches in the order of the script or in reverse. With a control probe at each end, marks
        # from both show that everything between is attached.
        self._control(0)
        self._following()
        if "syscall" in self.plan.own:
            self._syscall_layer()
        if "scheduler" in self.plan.own:
            self._scheduler_layer()
        for index, probe in enumerate(self.plan.probes):
            if index not in self.without:
                is_call = isinstance(probe.place, (FilePlace, KernelPlace))
                (self._function if is_call else self._tracepoint)(index, probe)
        self._control(1)
        # Printed even when nothing happens: if this process has ended, the broken pipe ends bpftrace.
        self._add("interval:s:1", 'printf("\\n");')
        return "\n".join(self.blocks) + "\n"

    @property
    def _defers(self) -> bool:
        """Whether entries are printed at the return, when the call's duration is known."""
        return self.plan.filters.min_duration_ns > 0

    def _add(self, point: str, *statements: str) -> None:
        body = "\n".join(f"  {statement}" for statement in statements if statement)
        self.blocks.append(f"{point} {{\n{body}\n}}")

    def _line(
        self,
        kind: int,
        layer: int,
        *words: str | int,
        number: str | int = 0,
        at: str | int = 0,
        who: tuple[str | int, str | int] = ("tid", "pid"),
        served: str | int = 0,
        text: str = "",
    ) -> str:
        """A statement that prints a line. Fields are expressions, or numbers that are known."""
        count = f"@s[{_WHO}, (uint64){layer}]++"
        fields = ("nsecs", "cpu", _WHO, count, at, *who, number, served, *words)
        return self._printf(f"{kind:x} {layer:x}", fields, text)

    def _piece(self, layer: int, piece: int, text: str) -> str:
        """A statement that prints a piece of a text of the line that follows."""
        fields = ("nsecs", "cpu", _WHO, f"@s[{_WHO}, (uint64){layer}]", piece)
        return self._printf(f"{record.TEXT:x} {layer:x}", fields, text)

    def _printf(self, head: str, fields: Iterable[str | int], text: str = "") -> str:
        form, values = head, []
        for value in fields:
            form += " %lx" if isinstance(value, str) else f" {value:x}"
            values += [value] if isinstance(value, str) else []
        if text:
            form, values = f"{form} %s{self.text_end}", [*values, text]
        return f'printf("{form}\\n", {", ".join(values)});'

    def _filtered(self, layer: int, events: int) -> str:
        """A statement that counts events that a filter left out."""
        return f"@f[{_WHO}, (uint64){layer}] += {events};"

    def _sampled(self, index: int, statement: str, refused: str) -> str:
        """`statement` for every Nth call on each processor, as the filter says, `refused` for the others."""
        if self.plan.filters.sample <= 1:
            return statement
        key = f"@k[(uint64){index}, (uint64)cpu]"
        test = f"$k % {self.plan.filters.sample} == 0"
        return f"$k = {key}; {key} = $k + 1; if ({test}) {{ {statement} }} else {{ {refused} }}"

    def _control(self, which: int) -> None:
        library, function = self.control
        mark = self._printf("k", ("nsecs", "cpu", which, "arg0"))
        orders = [f"if (arg1 == {Order.MARK}) {{ {mark} }}"]
        if which == 0:
            orders += [
                f"if (arg1 == {Order.TRACK}) "
                "{ @t[(uint64)(arg0 & 0xffffffff)] = (uint64)(arg0 >> 32) | ((uint64)2 << 32); }",
                f"if (arg1 == {Order.START}) {{ @arm = (uint64)arg0; @on = 1; }}",
                f"if (arg1 == {Order.STOP}) {{ @on = 0; clear(@t); {mark} }}",
                f"if (arg1 == {Order.COUNTS}) {{ print(@s); print(@f); {mark} }}",
                f"if (arg1 == {Order.THREADS}) {{ print(@t); {mark} }}",
            ]
        self._add(f'uprobe:"{library}":"{function}" /pid == {self.own_pid}/', *orders)

    def _following(self) -> None:
        """Follow threads: found at exec, through clone, until their end. @t: tid → running<<32|tgid."""
        scope = self.plan.scope
        starts = ["(@arm != 0 && @arm == (uint64)pid)"]
        matches = "$t != 0"
        if scope.kind == "comm":
            starts.append(f'comm == "{quoted(scope.comm_bytes)}"')
        if scope.kind == "system":
            starts.append(f"pid != {self.own_pid}")
            matches = f"($t != 0 || pid != {self.own_pid})"
        if not scope.children:
            matches += " && $is_thread != 0"
        has_scheduler = "scheduler" in self.plan.own
        running = self._line(record.SWITCH_IN, _SCHEDULER, 0, 0)
        self._add(
            "tracepoint:sched:sched_process_exec",
            "$old = (uint64)args->old_pid; $t = @t[(uint64)tid]; $starts = 0;",
            "if ($t == 0) { $t = @t[$old]; }",
            f"if ($t == 0 && @on != 0 && ({' || '.join(starts)})) {{ $starts = 1; @arm = (uint64)0; }}",
            "if (@on != 0 && ($t != 0 || $starts != 0)) {",
            # A thread other than the leader that calls exec takes over the leader's id.
            "  if ($old != (uint64)tid) { delete(@t[$old]); }",
            "  if ($starts != 0 || $old != (uint64)tid)",
            "  { @t[(uint64)tid] = (uint64)pid | ((uint64)1 << 32); }",
            f"  {self._line(record.THREAD_NAME, _THREADS, text='comm')}",
            f"  if ($starts != 0) {{ {running} }}" if has_scheduler else "",
            "}",
        )
        new = self._line(record.THREAD_NEW, _THREADS, number="tid", who=("args->pid", "$tgid"), text="comm")
        self._add(
            "tracepoint:task:task_newtask",
            "$t = @t[(uint64)tid]; $is_thread = (uint64)args->clone_flags & 0x10000;",
            "$tgid = $is_thread != 0 ? (uint64)pid : (uint64)args->pid;",
            f"if (@on != 0 && {matches}) {{ @t[(uint64)args->pid] = $tgid; {new} }}",
        )
        who = ("args->pid", "$t & 0xffffffff")
        name = self._line(record.THREAD_NAME, _THREADS, who=who, text="args->newcomm")
        self._add("tracepoint:task:task_rename", f"$t = @t[(uint64)args->pid]; if ($t != 0) {{ {name} }}")
        if not has_scheduler:
            self._add("tracepoint:sched:sched_process_exit", "delete(@t[(uint64)tid]);")

    def _syscall_layer(self) -> None:
        words = [f"args->args[{n}]" for n in range(4)]
        tracked = "/@t[(uint64)tid] != 0 && @w[(uint64)args->id] != 0/"
        enter, leave = "tracepoint:raw_syscalls:sys_enter", "tracepoint:raw_syscalls:sys_exit"
        last = self._line(record.SYSCALL_EXIT, _SYSCALL, "args->ret", number="args->id")
        if not self._defers:
            first = self._line(record.SYSCALL_ENTER, _SYSCALL, *words, number="args->id")
            self._add(f"{enter} {tracked}", first)
            self._add(f"{leave} {tracked}", last)
            return
        values = ", ".join(f"(uint64){word}" for word in words)
        self._add(f"{enter} {tracked}", f"@y[(uint64)tid] = ((uint64)nsecs, {values});")
        entered = [f"$y.{n}" for n in range(1, 5)]
        first = self._line(record.SYSCALL_ENTER, _SYSCALL, *entered, number="args->id", at="$y.0")
        self._add(
            f"{leave} {tracked}",
            "$y = @y[(uint64)tid]; $began = $y.0; delete(@y[(uint64)tid]);",
            f"if ($began != 0) {{ if ((uint64)nsecs - $began < {self.plan.filters.min_duration_ns}) "
            f"{{ {self._filtered(_SYSCALL, 2)} }} else {{ {first} {last} }} }}",
        )

    def _scheduler_layer(self) -> None:
        note = "$ran == 0 ? 1 : ($ran == 2 ? 2 : 0)"
        who = ("tid", "$p & 0xffffffff")
        out = self._line(record.SWITCH_OUT, _SCHEDULER, "args->prev_state", note, who=who)
        who = ("args->next_pid", "$n & 0xffffffff")
        came = self._line(record.SWITCH_IN, _SCHEDULER, 0, "($n >> 32) == 1 ? 1 : 0", who=who)
        self._add(
            "tracepoint:sched:sched_switch",
            "$prev = (uint64)args->prev_pid; $next = (uint64)args->next_pid; $p = @t[$prev];",
            f"if ($p != 0) {{ $ran = $p >> 32; {out}",
            # EXIT_DEAD or EXIT_ZOMBIE as the tracepoint shows them: the thread will not run again.
            "  if ((args->prev_state & 0x30) != 0) { delete(@t[$prev]); }",
            "  else { @t[$prev] = $p & 0xffffffff; } }",
            f"$n = @t[$next]; if ($n != 0) {{ {came}",
            "  @t[$next] = ($n & 0xffffffff) | ((uint64)1 << 32); }",
        )
        who = ("args->pid", "$t & 0xffffffff")
        for point, line in (
            ("sched_wakeup", self._line(
                record.WAKEUP, _SCHEDULER, "args->target_cpu", number="tid", who=who)),
            ("sched_migrate_task", self._line(
                record.MIGRATE, _SCHEDULER, "args->orig_cpu", "args->dest_cpu", who=who)),
        ):  # fmt: skip
            self._add(f"tracepoint:sched:{point}", f"$t = @t[(uint64)args->pid]; if ($t != 0) {{ {line} }}")

    def _tracepoint(self, index: int, probe: Probe) -> None:
        layer, hook = DROP_LAYERS.index(probe.layer), probe.hook
        names = self.tracepoint_fields[index]
        given = dict(zip(probe.signature.arguments, names, strict=True))
        words = [0 if a.kind == "str" else f"args->{n}" for a, n in given.items()]
        who: tuple[str | int, str | int] = (0, 0) if hook.everywhere else ("tid", "pid")
        # An array is already a string; a pointer's target is read as one.
        texts = [
            f"args->{n}" if a.text_form == "array" else f"str(args->{n})"
            for a, n in given.items()
            if a.kind == "str"
        ]
        statement = " ".join(
            [
                *(self._piece(layer, at, text) for at, text in enumerate(texts)),
                self._line(record.EVENT, layer, *words, number=index, who=who),
            ]
        )
        statement = self._sampled(index, statement, self._filtered(layer, 1))
        if hook.condition is not None:  # other hits are not counted
            test = comparison(hook.condition, f"(uint64)args->{given[hook.condition.argument]}")
            statement = f"if ({test}) {{ {statement} }}"
        filter_ = "@on != 0" if hook.everywhere else "@t[(uint64)tid] != 0"
        assert isinstance(probe.place, TracepointPlace)
        self._add(f"tracepoint:{probe.place.point.replace('/', ':')} /{filter_}/", statement)

    def _function(self, index: int, probe: Probe) -> None:
        """Add the blocks of a function's entry and return. @o: a call → what its return needs of its entry.

        The key of a call is its thread and stack pointer; in the kernel its thread and function.
        """
        architecture, filters, hook, place = self.architecture, self.plan.filters, probe.hook, probe.place
        layer, in_kernel = DROP_LAYERS.index(probe.layer), isinstance(place, KernelPlace)
        space, served = ("kptr", "$v") if in_kernel else ("uptr", 0)
        out = next((argument for argument in probe.signature.arguments if argument.out), None)
        text = next((argument for argument in probe.signature.arguments if argument.kind == "str"), None)
        is_whole, paired = hook.effect in WHOLE_EFFECTS, is_paired(probe, filters)
        waits = self._defers and paired and not is_whole
        entry_key, return_key = f'(uint64)reg("sp") + {architecture.frame_bytes}', '(uint64)reg("sp")'
        if in_kernel:
            entry_key = return_key = f"(uint64){index}"

        def on_stack(position: int) -> str:
            bytes_above = architecture.stack_bytes + 8 * (position - architecture.registers)
            return f'(uint64)reg("sp") + {bytes_above}'

        def word(position: int) -> str:
            if position < architecture.registers:
                return f"(uint64)arg{position}"
            return f"*(uint64*){space}({on_stack(position)})"

        def printed(words: list[str], pointer: str, began: str | int) -> str:
            """The statements that print an entry: its text in two pieces, then the line."""
            pieces = [
                self._piece(layer, n, f"str({space}({pointer} + {n * TEXT_PIECE_BYTES}))")
                for n in range(2 if text else 0)
            ]
            line = self._line(record.CALL_ENTER, layer, *words, number=index, at=began, served=served)
            return " ".join([*pieces, line])

        places = slots(probe.signature)
        words = [
            word(slot.low)
            if slot.high is None
            else f"(({word(slot.low)} & 0xffffffff) | ({word(slot.high)} << 32))"
            for slot in places
        ]
        pointer = word(text.position) if text else "(uint64)0"
        enter = ""
        hashed, stack_position = hashed_slot(probe)
        if hashed:  # as hash_of of probes.bpf.c hashes a structure; a constant of bpftrace has 63 bits
            steps = "".join(
                f"$h = ($h ^ *(uint64*)uptr($at + {8 * n})) * (uint64)0x100000001b3; $h = $h ^ ($h >> 32); "
                for n in range(HASHED_WORDS)
            )
            address = on_stack(stack_position - 1) if stack_position else words[hashed - 1]
            enter = f"$at = {address}; $h = ((uint64)0xcbf29ce4 << 32) | (uint64)0x84222325; {steps}"
            words[hashed - 1] = "$h"
        if paired:
            parts = ["(uint64)nsecs", word(out.position) if out else "(uint64)0"]
            if self._defers:  # all values of a map have the same type
                widest = max(len(slots(other.signature)) for other in self.plan.probes)
                parts += [pointer, *words, *["(uint64)0"] * (widest - len(words))]
            enter += f"@o[{entry_key}, (uint64)tid] = ({', '.join(parts)}); "
        enter += "" if waits else printed(words, pointer, 0)
        if not is_whole:
            enter = self._sampled(index, enter, self._filtered(layer, 2 if hook.returns else 1))
        if hook.condition is not None:  # other calls are not counted
            test = comparison(hook.condition, word(hook.condition.argument.position))
            enter = f"if ({test}) {{ {enter} }}"

        results = ["retval"]
        if out is not None:
            results.append(f"$out == 0 ? (uint64)0 : (uint64)*(uint{out.bits}*){space}($out)")
        leave = self._line(record.CALL_RETURN, layer, *results, number=index, served=served)
        if waits:
            first = printed([f"$o.{3 + n}" for n in range(len(places))], "$o.2", "$o.0")
            leave = (
                f"if ((uint64)nsecs - $o.0 < {filters.min_duration_ns}) "
                f"{{ {self._filtered(layer, 2)} }} else {{ {first} {leave} }}"
            )
        if paired:  # its entry may have been filtered, which counted the return too
            key = f"@o[{return_key}, (uint64)tid]"
            leave = f"$o = {key}; $out = $o.1; delete({key}); if ($o.0 != 0) {{ {leave} }}"

        if isinstance(place, KernelPlace):
            target = f'probe:"{quoted(probe.symbol)}"'
            self._add(f"k{target}", *self._serving(index, probe.symbol, place.address, enter))
            if hook.returns:
                self._add(
                    f"kret{target}",
                    "$t = @t[(uint64)tid]; $v = (uint64)0;",
                    "if ($t == 0 && tid != 0) { $v = @u[(uint64)tid];",
                    f"  if ($v != 0 && @ui[(uint64)tid] == (uint64){index + 1}) {{",
                    "    @ud[(uint64)tid] += -1; if (@ud[(uint64)tid] == 0) { delete(@u[(uint64)tid]); } } }",
                    f"if ($t != 0 || $v != 0) {{ {leave} }}",
                )
        elif isinstance(place, FilePlace):
            target = f'probe:"{quoted(place.path)}":"{quoted(probe.symbol)}" /@t[(uint64)tid] != 0/'
            self._add(f"u{target}", enter)
            if hook.returns:
                self._add(f"uret{target}", leave)

    def _serving(self, index: int, symbol: str, known_address: int, enter: str) -> list[str]:
        """The statements at the entry of a driver's function: find the thread for which a worker of the
        driver runs this, from the queue's items, as in probes.bpf.c.

        @q: function, argument → the thread that queued it. By worker: @u the served thread, @ui the function
        that began to serve it, @ud how deeply that function is nested.
        """
        address = f"(uint64){known_address:#x}"
        if not known_address:
            architecture = self.architecture
            address = f'(uint64)reg("{architecture.instruction}") - {architecture.breakpoint_bytes}'
        name = self._line(record.THREAD_NAME, _THREADS, who=("tid", "tid"), text="comm")
        queues = ""
        if symbol == QUEUES_ITEMS:
            # struct nv_kthread_q_item: the function is at 16, its argument at 24.
            queues = (
                "@q[*(uint64*)kptr((uint64)arg1 + 16), *(uint64*)kptr((uint64)arg1 + 24)] = "
                "$v != 0 ? $v : ((uint64)pid << 32 | (uint64)tid);"
            )
        own = f"(uint64){index + 1}"
        return [
            "$t = @t[(uint64)tid]; $v = (uint64)0;",
            "if ($t == 0 && tid != 0) {",
            "  $v = @u[(uint64)tid];",
            f"  if ($v != 0) {{ if (@ui[(uint64)tid] == {own}) {{ @ud[(uint64)tid] += 1; }} }}",
            f"  else {{ $q = @q[{address}, (uint64)arg0]; if ($q != 0 && @on != 0) {{",
            f"    delete(@q[{address}, (uint64)arg0]); $v = $q; @u[(uint64)tid] = $q;",
            f"    @ui[(uint64)tid] = {own}; @ud[(uint64)tid] = 1; {name} }} }}",
            "}",
            f"if ($t != 0 || $v != 0) {{ {queues} {enter} }}",
        ]


def comparison(condition: Condition, word: str) -> str:
    """The test of a condition on a machine word, whose bits above the value's are undefined."""
    bits, signed = INTEGER_KINDS.get(condition.argument.kind, (32, True))
    mask = (1 << bits) - 1
    value = f"({word} & {_number(mask)})" if bits < 64 else f"({word})"
    want = condition.value & mask
    if condition.operator == "&":
        return f"({value} & {_number(want)}) != 0"
    if signed and condition.operator not in ("==", "!="):
        # With the sign bit inverted, signed numbers have the order of unsigned ones.
        sign = 1 << (bits - 1)
        value, want = f"({value} ^ {_number(sign)})", want ^ sign
    return f"{value} {condition.operator} {_number(want)}"


def _number(value: int) -> str:
    """An unsigned constant; plain constants of bpftrace are signed."""
    if value < 1 << 63:
        return f"(uint64){value:#x}"
    return f"(((uint64){value >> 32:#x} << 32) | (uint64){value & 0xFFFFFFFF:#x})"


def quoted(text: str | bytes) -> str:
    """A text for use between quotes; other bytes than plain ASCII become octal escapes."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in os.fsencode(text)
    )


_OLDEST = (0, 14)
_INSTALL = "apt install bpftrace"
# A function that takes two 64-bit integers, is in every C library, and is hardly ever called.
_CONTROL = "lldiv"
_START_MARK = 1
_BEHIND_NS = 50_000_000  # how far a processor may lag before a mark is put into its buffer
_QUIET_S = 10.0  # the longest wait for output of bpftrace
_AGAIN_S = 0.2  # then a mark is sent again, as it may be lost like any line
_SLOW_S = 5.0  # how long attaching takes before a message states why nothing happens
_STUCK_S = 60.0  # while the kernel detaches probes of another bpftrace, attaching one takes 0.1 s
# bpftrace ends at the first probe that the kernel refuses.
_REFUSED = re.compile(r"Error attaching probe: '?(?:u|uret|k|kret)probe:([^'\n]*)")
_GREETING = re.compile(rb"Attaching (\d+) probes?\.\.\.\n?")
_MAP_KEYS = 65536
_PIPE_BYTES = 1 << 20
_SOFTWARE, _BPF_OUTPUT = 1, 10  # perf_event_attr: a buffer that a program prints to
_ARRAY = 2  # enum bpf_map_type
_TRIALS: dict[Operation, Callable[[], int]] = {
    Operation.MAP: lambda: bpf.create_map("tracepipe_try", _ARRAY, 4, 8, 1),
    Operation.TRACEPOINT: lambda: bpf.perf_event(_SOFTWARE, _BPF_OUTPUT),
}
# An interrupt's line can precede a line with an earlier time. No probe takes longer than this.
_SLACK_NS = 1_000_000
_SUSPENDED_NS = 1_000_000  # the least by which the two clocks differ after a suspend
_TEXT_RECORD_BYTES = 31
_FULL = "bpftrace's buffers were full"
_WITH_TEXT = {record.THREAD_NEW: 11, record.THREAD_NAME: 11, record.TEXT: 7}
"""Kinds of lines that end with a text → how many fields precede it."""
_TEXT_KINDS = b"".join(b"%x" % kind for kind in _WITH_TEXT)
_SPECIAL = b"@Lk" + _TEXT_KINDS
"""The first letters of lines that are not an event without a text: few lines have them."""
_dying: list[subprocess.Popen[bytes]] = []
"""Killed processes whose probes the kernel still detaches; each is reaped when a later one is killed."""


class BpftraceEngine:
    """Attaches probes by running bpftrace."""

    name = "bpftrace"
    layers = frozenset(RECORDED_LAYERS)

    def check(self) -> str:
        """Return bpftrace's version. Raises CaptureUnavailable."""
        check_machine()
        if own_namespace() is not None:
            raise CaptureUnavailable(
                "This container has its own process ids, which bpftrace does not see.",
                "Run the container with --pid=host, or choose another --method.",
            )
        program = shutil.which("bpftrace")
        if program is None:
            raise CaptureUnavailable("bpftrace is not installed.", _INSTALL)
        shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
        found = re.search(r"v?(\d+)\.(\d+)[.\d]*", shown)
        if found is None:
            raise CaptureUnavailable(f"bpftrace does not show its version: {shown[:60]!r}.", _INSTALL)
        version = found[0].lstrip("v")
        if (int(found[1]), int(found[2])) < _OLDEST:
            raise CaptureUnavailable(f"bpftrace {version} is too old for capture.", "Use 0.14 or later.")
        if this_machine().lockdown == "confidentiality":
            raise CaptureUnavailable(
                "The kernel is locked down: no program may read its memory.", "Boot with lockdown=integrity."
            )
        tracing_folder()
        return version

    def attach(self, plan: Plan, notify: Notify) -> BpftraceAttachment:
        if plan.windows is not None:
            raise CaptureUnavailable(
                "Method bpftrace cannot record windows: it takes seconds or minutes to start and to stop.",
                "Leave out --delay, --start-on and --repeat, or choose another --method.",
            )
        return BpftraceAttachment(plan, notify)


class BpftraceAttachment(Attachment):
    """A bpftrace process and what it has printed."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        """Attach all of the plan. Raises CaptureUnavailable."""
        super().__init__(plan)
        self._plan, self._notify = plan, notify
        # Entries that are printed at their return follow later records.
        self.is_unordered = plan.filters.min_duration_ns > 0
        self._syscalls = SYSCALLS[platform.machine()]
        self._start_ns = time.monotonic_ns()
        self._text_end = f"\x1f{secrets.token_hex(4)}"
        self._lines = Lines(plan.probes, self._text_end)
        self._processors = online_processors()
        self._marked_ns = 0
        self._word = _START_MARK
        self._is_stopped = False
        self._last_records = b""
        self._order = ctypes.CDLL(None)[_CONTROL]
        self._order.argtypes, self._order.restype = [ctypes.c_uint64, ctypes.c_uint64], ctypes.c_int64
        refused: set[int] = set()
        while not self._attach(refused):
            pass
        if names := sorted({plan.probes[index].symbol for index in refused}):
            notify(f"not recorded, the kernel does not let them be probed: {', '.join(names)}")
        asked = self._process.asked_points
        if missing := max(asked - self._process.found_points, 0):
            notify(f"bpftrace did not find {missing} of {asked} places to probe")
        self.cover(plan, refused, notify)

    def start(self) -> None:
        scope = self._plan.scope
        self._start_ns = time.monotonic_ns()
        if scope.kind == "command":
            self._order(scope.pids[0], Order.START)
            return
        self._order(0, Order.START)
        for thread in all_threads(scope):
            if thread.tid != self._process.pid:
                self._order(thread.pid << 32 | thread.tid, Order.TRACK)
                self._names[thread.tid] = comm_of(thread.pid, thread.tid)

    def collect(self) -> bytes:
        """The records of the lines up to a time at which none are missing, 50 ms ago or later."""
        if self._is_stopped:
            records, self._last_records = self._last_records, b""
            return records
        lines = self._lines
        lines.clock.follow()
        lines.feed(self._process.read())
        if self._process.has_ended:
            return lines.release()
        now_ns = time.monotonic_ns()
        if not lines.waiting:
            return b""
        if now_ns - self._marked_ns >= _BEHIND_NS:
            self._marked_ns = now_ns
            behind = [
                cpu
                for cpu in self._processors
                if now_ns - lines.clock.monotonic_ns(lines.newest_ns.get(cpu, 0)) > _BEHIND_NS
            ]
            self._word += 1
            unreached = self._order_on(behind, Order.MARK)
            # These are offline, or not allowed for this process: their lines are taken as they arrive.
            self._processors = [cpu for cpu in self._processors if cpu not in unreached]
            lines.marks.clear()
        return lines.release(min(lines.newest_ns.get(cpu, 0) for cpu in self._processors))

    def processes(self) -> set[int]:
        self._lines.followed.clear()
        return self._lines.followed if self._obeys(Order.THREADS) else set()

    def lost(self) -> list[Loss]:
        """The losses since the last call, exact for each layer: gaps in the sequence numbers of a thread."""
        losses, self._lines.losses = self._lines.losses, []
        return losses

    def stop(self) -> None:
        """Wait for the last output, about 0.1 s, and kill bpftrace. A second call does nothing."""
        if self._is_stopped:
            return
        stopped_ns = time.monotonic_ns()
        try:
            # bpftrace reads all buffers in turn: after two rounds it has also read those that accept no mark.
            is_whole = (
                self._obeys(Order.STOP)
                and self._obeys(Order.MARK, online_processors())
                and self._obeys(Order.MARK, online_processors())
                and self._obeys(Order.COUNTS)
            )
            self._last_records = self._lines.release()
            if is_whole:
                for layer, count in self._lines.filtered.items():
                    if (name := DROP_LAYERS[layer]) and count:
                        self.filtered[name] = count
                self._lines.finish(self._start_ns, stopped_ns)
            else:
                since_ns, now_ns = self._marked_ns or self._start_ns, time.monotonic_ns()
                reason = "bpftrace ended before the recording did: more may be lost"
                self._lines.losses.append(Loss(None, 1, since_ns, now_ns, reason))
        finally:
            self.close()

    def close(self) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            self._process.close()

    def _attach(self, refused: set[int]) -> bool:
        """Start bpftrace without the `refused` probes, and wait until everything is attached. Returns False
        where another probe was refused, which is then in `refused`.
        """
        plan, lines = self._plan, self._lines
        fields: dict[int, list[str]] = {}
        for number, probe in enumerate(plan.probes):
            if isinstance(probe.place, TracepointPlace):
                offsets = field_offsets(tracing_folder(), probe.place.point)
                named = {offset: name for name, offset in offsets.items()}
                fields[number] = [named[argument.position] for argument in probe.signature.arguments]
        address = ctypes.cast(self._order, ctypes.c_void_p).value or 0
        file = next((one.path for one in mappings("self") if one.start <= address < one.end), None)
        if file is None:
            raise CaptureUnavailable("The C library's file cannot be found.", "--method bcc")
        script = Script(
            plan,
            os.getpid(),
            (file, _CONTROL),
            self._text_end,
            list(self._syscalls),
            frozenset(refused),
            fields,
            ARCHITECTURES[platform.machine()],
        )
        self._process = process = Bpftrace(script, plan.ring_bytes // max(len(self._processors), 1))
        clocks = time.CLOCK_MONOTONIC, time.CLOCK_BOOTTIME
        stamps_ns: dict[int, list[tuple[int, int]]] = {}  # word → by clock, before and after its mark
        began_s = changed_s = time.monotonic()
        is_reported, state = False, (0, "")
        try:
            while True:
                self._word += 1
                before_ns = [time.clock_gettime_ns(clock) for clock in clocks]
                self._order(self._word, Order.MARK)
                after_ns = [time.clock_gettime_ns(clock) for clock in clocks]
                stamps_ns[self._word] = [*zip(before_ns, after_ns, strict=True)]
                lines.feed(process.read(wait_s=0.02))
                if process.has_ended:
                    symbol = _REFUSED.search(process.errors())
                    names = [
                        f"{probe.place.path}:{probe.symbol}"
                        if isinstance(probe.place, FilePlace)
                        else probe.symbol
                        for probe in plan.probes
                    ]
                    which = [n for n, name in enumerate(names) if symbol and name == symbol[1].strip()]
                    if not set(which) - refused:
                        raise _unavailable(process)
                    refused.add(min(set(which) - refused))
                    process.close()
                    return False
                for mark in lines.marks:
                    if {0, 1} == {other.which for other in lines.marks if other.word == mark.word}:
                        fitting = [start <= mark.clock_ns <= end for start, end in stamps_ns[mark.word]]
                        if not any(fitting):
                            raise CaptureUnavailable(
                                "bpftrace's times are of an unknown clock.", "--method bcc"
                            )
                        lines.clock = Clock(is_boottime=not fitting[0])
                        lines.marks.clear()
                        return True
                if signal.sigpending():
                    raise TracepipeError(
                        "The capture was interrupted while its probes were attached.", "Nothing was recorded."
                    )
                now_s = time.monotonic()
                if now_s - began_s > _SLOW_S and not is_reported:
                    is_reported = True
                    probes = counted(process.asked_points, "probe|probes")
                    self._notify(f"bpftrace is attaching {probes}; this takes a while")
                if (now := process.progress()) != state:
                    state, changed_s = now, now_s
                if now_s - changed_s > _STUCK_S:
                    raise CaptureUnavailable(
                        "bpftrace made no progress while it attached its probes.",
                        "Check whether another bpftrace is still detaching, or choose fewer functions "
                        "with --only.",
                    )
        except BaseException:
            process.close()
            raise

    def _order_on(self, processors: Iterable[int], order: Order) -> set[int]:
        """Give an order on each of the processors; returns those where this process may not run."""
        unreached = set()
        allowed = os.sched_getaffinity(0)
        for cpu in processors:
            try:
                os.sched_setaffinity(0, {cpu})
            except OSError:
                unreached.add(cpu)
                continue
            self._order(self._word, order)
        with suppress(OSError):
            os.sched_setaffinity(0, allowed)
        return unreached

    def _obeys(self, order: Order, processors: Sequence[int] = ()) -> bool:
        """Give an order, on all the processors if there are any; returns whether bpftrace obeyed it."""
        waiting: set[int] = set(processors) or {-1}
        words: set[int] = set()
        sent_s = progress_s = 0.0
        while waiting:
            now_s = time.monotonic()
            if now_s - sent_s > _AGAIN_S:
                sent_s, progress_s = now_s, progress_s or now_s
                self._word += 1
                words.add(self._word)
                if processors:
                    waiting -= self._order_on(waiting, order)
                else:
                    self._order(self._word, order)
            output = self._process.read(wait_s=0.02)
            if output:
                progress_s = time.monotonic()
            self._lines.feed(output)
            for mark in self._lines.marks:
                if mark.word in words and mark.which == 0:
                    waiting -= {mark.cpu, -1}
            self._lines.marks.clear()
            if waiting and (self._process.has_ended or time.monotonic() - progress_s > _QUIET_S):
                return False
        return True


class Bpftrace:
    """The process, and the pipe that it prints to."""

    def __init__(self, script: Script, buffer_bytes: int) -> None:
        # In memory, so nothing is left behind when this process is killed.
        self._errors, source = os.memfd_create("errors"), os.memfd_create("capture.bt")
        os.write(source, script.text().encode())
        self.asked_points = self.found_points = len(script.blocks)  # each has one attach point
        self.has_ended = self._is_greeted = False
        pages = max(buffer_bytes // resource.getpagesize(), 8)
        several = {
            ("MAX_PROBES", "MAX_BPF_PROGS"): 2 * self.asked_points + 64,
            ("MAP_KEYS_MAX", "MAX_MAP_KEYS"): _MAP_KEYS,
            ("STRLEN", "MAX_STRLEN"): TEXT_PIECE_BYTES + 1,
            ("PERF_RB_PAGES",): 1 << (pages - 1).bit_length(),
            ("STR_TRUNC_TRAILER",): "",  # 0.20 ends a text that it cuts with ".."
            ("NO_CPP_DEMANGLE",): 1,
        }
        settings = {f"BPFTRACE_{name}": str(value) for names, value in several.items() for name in names}
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            # Each probe needs two descriptors.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            # It dies of SIGPIPE when this process ends: Popen restores that signal, which Python ignores.
            self._process = subprocess.Popen(
                ["bpftrace", f"/proc/self/fd/{source}"],
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                pass_fds=[source],
                start_new_session=True,  # without signals from the terminal
            )
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(source)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        with suppress(OSError):  # above the user's limit the pipe stays smaller
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        # Every line wakes bpftrace. It must not preempt the target each time: those switches would dominate
        # the scheduler layer.
        with suppress(OSError):
            os.sched_setscheduler(self.pid, os.SCHED_BATCH, os.sched_param(0))

    def read(self, wait_s: float = 0.0) -> bytes:
        """Read what was printed; waits for output for at most `wait_s`."""
        if self.has_ended or (wait_s and not select.select([self._output], [], [], wait_s)[0]):
            return b""
        try:
            output = os.read(self._output, _PIPE_BYTES)
        except BlockingIOError:
            return b""
        self.has_ended = not output
        # Its first line has the number of probes.
        if not self._is_greeted and (found := _GREETING.match(output)) is not None:
            self._is_greeted, self.found_points = True, int(found[1])
            return output[found.end() :]
        return output

    def progress(self) -> tuple[int, str]:
        """Its number of open descriptors and its processor time: one of them changes while it attaches."""
        with suppress(OSError):
            files = list(Path(f"/proc/{self.pid}/fd").iterdir())
            return len(files), " ".join(stat_of(self.pid)[11:13])
        return 0, ""

    def errors(self) -> str:
        """Its error output."""
        return os.pread(self._errors, os.fstat(self._errors).st_size, 0).decode(errors="replace")

    def ending(self) -> str:
        """How it ended by itself; "" if it has not ended yet."""
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            by = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return f"it {by}"
        return ""

    def close(self) -> None:
        """Kill it, and let the kernel detach its probes in the background."""
        self._process.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._errors)
        _dying[:] = [process for process in [*_dying, self._process] if process.poll() is None]


class Mark(NamedTuple):
    """A printed mark: its control probe, its word, its processor, and its time."""

    which: int
    word: int
    cpu: int
    clock_ns: int


class Clock:
    """bpftrace's `nsecs`, in some versions CLOCK_BOOTTIME, which goes on in a suspend, as CLOCK_MONOTONIC."""

    def __init__(self, is_boottime: bool) -> None:
        self._is_boottime = is_boottime
        self._looked_ns = time.monotonic_ns()
        self._ahead = [(0, self._ahead_ns())]  # since when in `nsecs`, and by how much it is ahead

    def follow(self) -> None:
        """Check whether the machine was suspended since the last call."""
        now_ns, ahead_ns = time.monotonic_ns(), self._ahead_ns()
        if ahead_ns - self._ahead[-1][1] > _SUSPENDED_NS:
            # It resumed after the last call. The time since then on CLOCK_MONOTONIC is the time that it was
            # awake.
            self._ahead.append((self._looked_ns + ahead_ns, ahead_ns))
        self._looked_ns = now_ns

    def monotonic_ns(self, clock_ns: int) -> int:
        """Convert a time of `nsecs` to CLOCK_MONOTONIC."""
        since_ns, ahead_ns = self._ahead[-1]
        if clock_ns < since_ns:  # it was printed before a suspend
            ahead_ns = next(ahead for since, ahead in reversed(self._ahead) if clock_ns >= since)
        return clock_ns - ahead_ns

    def _ahead_ns(self) -> int:
        ahead_ns = []
        for _ in range(5 if self._is_boottime else 0):
            before_ns = time.monotonic_ns()
            boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            ahead_ns.append(boottime_ns - (before_ns + time.monotonic_ns()) // 2)
        return min(ahead_ns, default=0)


class Lines:
    """Takes bpftrace's output, and returns records and losses."""

    def __init__(self, probes: Sequence[Probe], text_end: str) -> None:
        self.marks: list[Mark] = []
        self.losses: list[Loss] = []
        self.counts: dict[int, int] = {}  # sequence → its next number, as printed at the end
        self.filtered: Counter[int] = Counter()  # layer → events
        self.followed: set[int] = set()  # processes whose threads were printed
        self.clock = Clock(False)
        self.newest_ns: dict[int, int] = {}  # processor → time of its last line
        self._text_end = text_end.encode()
        self._text_counts = [sum(a.kind == "str" for a in probe.signature.arguments) for probe in probes]
        self._rest = b""
        self._open_text: list[bytes] = []
        self.waiting: list[tuple[int, bytes, int, int]] = []
        """Lines that wait for earlier ones of other processors: when each was printed, its records, the
        sequence of its thread and layer, and its number there.
        """
        self._next: dict[int, int] = {}  # sequence → the number that follows
        self._last_ns: dict[int, int] = {}
        self._texts: dict[
            int, dict[tuple[int, int], bytes]
        ] = {}  # thread → (number of the line, piece) → text
        self._unread, self._unread_line = 0, b""

    def feed(self, output: bytes) -> None:
        """Take some output; it may end within a line."""
        lines = (self._rest + output).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self._open_text or (line[:1] in _TEXT_KINDS and line[1:2] == b" "):
                # A text may contain newlines.
                self._open_text.append(line)
                if not line.endswith(self._text_end):
                    continue
                line = b"\n".join(self._open_text)
                self._open_text = []
            try:
                self._read(line)
            except (ValueError, IndexError, KeyError, struct.error):
                self._unread += 1
                self._unread_line = self._unread_line or line[:60]

    def release(self, until_ns: int | None = None) -> bytes:
        """The records of the lines printed before `until_ns`, a time of `nsecs`; of all lines if None."""
        waiting = self.waiting
        waiting.sort(key=itemgetter(0))
        ready = len(waiting)
        if until_ns is not None:
            while ready and waiting[ready - 1][0] > until_ns - _SLACK_NS:
                ready -= 1
        taken, self.waiting = waiting[:ready], waiting[ready:]
        for printed_ns, _, sequence, number in taken:
            missing = number - self._next.get(sequence, 0)
            if missing > 0:
                end_ns = self.clock.monotonic_ns(printed_ns)
                self._lose(sequence, missing, end_ns, end_ns)
            self._next[sequence], self._last_ns[sequence] = number + 1, printed_ns
        return b"".join([records for _, records, _, _ in taken])

    def finish(self, start_ns: int, end_ns: int) -> None:
        """Count what was lost after the last line of every sequence, by the counts printed at the end."""
        for sequence, number in self.counts.items():
            missing = number - self._next.get(sequence, 0)
            if missing > 0:
                self._lose(sequence, missing, start_ns, end_ns)
        if self._unread:
            shown = self._unread_line.decode(errors="replace")
            reason = f"bpftrace wrote lines that cannot be read; the first: {shown}"
            self.losses.append(Loss(None, self._unread, start_ns, end_ns, reason))

    def _lose(self, sequence: int, count: int, start_ns: int, end_ns: int) -> None:
        """Count a loss since the last line of the sequence, or since `start_ns` if it is the first."""
        if sequence in self._last_ns:
            start_ns = self.clock.monotonic_ns(self._last_ns[sequence])
        layer = DROP_LAYERS[sequence & 7]
        reason = _FULL if layer else f"a thread's start or name was lost: {_FULL}"
        self.losses.append(Loss(layer, count, start_ns, end_ns, reason))

    def _read(self, line: bytes) -> None:
        if not line:
            return
        parts, text = line.split(b" "), b""
        if line[:1] in _SPECIAL:
            if line.startswith(b"Lost "):  # the sequence numbers are more exact
                return
            if line.startswith(b"@t["):  # `@t[1234]: 8589935826`
                self.followed.add(int(line.partition(b"]: ")[2]) & 0xFFFFFFFF)
                return
            if line.startswith((b"@s[", b"@f[")):  # `@s[1234, 3]: 17`
                key, _, count = line.partition(b"]: ")
                who, layer = (int(part) for part in key[3:].split(b", "))
                if line.startswith(b"@s"):
                    self.counts[who << 3 | layer] = int(count)
                else:
                    self.filtered[layer] += int(count)
                return
            if parts[0] == b"k":
                clock_ns, cpu, which, word = (int(part, 16) for part in parts[1:])
                self.marks.append(Mark(which, word, cpu, clock_ns))
                self.newest_ns[cpu] = clock_ns
                return
            field_count = _WITH_TEXT[int(parts[0], 16)]
            *parts, text = line.removesuffix(self._text_end).split(b" ", field_count)
        kind, layer, clock_ns, cpu, who, number, *fields = [int(part, 16) for part in parts]
        self.newest_ns[cpu] = clock_ns
        if kind == record.TEXT:
            self._texts.setdefault(who, {})[number, fields[0]] = text
            return
        at_ns, tid, tgid, identifier, served, *words = fields
        head = self.clock.monotonic_ns(at_ns or clock_ns), tid, tgid, identifier
        records, torn = b"", 0
        if len(words) > 4:
            records += _packed(head, record.MORE, cpu, words[4:])
        text_count = self._text_counts[identifier] if kind in FUNCTION_KINDS else 0
        if text_count and kind != record.CALL_RETURN:
            printed = self._texts.pop(who, {})
            pieces = [(number, piece) for piece in range(2 if kind == record.CALL_ENTER else text_count)]
            torn = int(not printed.keys() >= set(pieces))
            texts = [] if torn else [printed[piece] for piece in pieces]
            if texts and kind == record.CALL_ENTER:  # the second piece continues the first if that is full
                texts = [b"".join(texts) if len(texts[0]) >= TEXT_PIECE_BYTES else texts[0]]
            for whole in texts:
                for at in range(0, len(whole) + 1, _TEXT_RECORD_BYTES)[:8]:
                    part = whole[at : at + _TEXT_RECORD_BYTES].ljust(32, b"\0")
                    records += _packed(head, record.TEXT, cpu, struct.unpack("<4Q", part))
        if served:
            records += _packed(head, record.SERVED, cpu, [served])
        if kind in _WITH_TEXT:
            words = [*struct.unpack("<QQ", text[:15].ljust(16, b"\0"))]
        records += _packed(head, kind, cpu, words, torn)
        self.waiting.append((clock_ns, records, who << 3 | layer, number))


def _packed(
    head: tuple[int, int, int, int], kind: int, cpu: int, words: Sequence[int], torn: int = 0
) -> bytes:
    """A record. `head` has its time, tid, tgid and id."""
    a0, a1, a2, a3 = (*words, 0, 0, 0, 0)[:4]
    return RECORD.pack(*head, kind, torn, cpu, a0, a1, a2, a3)


def _unavailable(process: Bpftrace) -> CaptureUnavailable:
    """The error for a bpftrace that ended before it had attached its probes."""
    messages = [line for line in process.errors().splitlines() if line and "RLIMIT_MEMLOCK" not in line]
    messages = messages or [process.ending()]
    first = next((line for line in messages if "ERROR" in line), messages[0])
    for operation, trial in _TRIALS.items():  # bpftrace reports only their consequences
        try:
            os.close(trial())
        except OSError as error:
            return explain(operation, error)
    if not this_machine().has("CAP_SYS_ADMIN"):
        return CaptureUnavailable(
            f"bpftrace could not start without CAP_SYS_ADMIN: {first}.",
            "--method prebuilt records the same with CAP_BPF and CAP_PERFMON.",
        )
    return CaptureUnavailable(
        f"bpftrace could not start: {first or 'it gave no reason'}.", "--method bcc records the same."
    )
