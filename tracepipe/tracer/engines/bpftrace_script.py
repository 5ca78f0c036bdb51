"""Writes the bpftrace script of a plan: it does what probes.bpf.c does.

Every event is one line of hexadecimal numbers, which has the fields of its record and what puts it in order:

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

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from tracepipe.hooks.hook import (
    HASHED_WORDS,
    INTEGER_KINDS,
    Condition,
    FilePlace,
    KernelPlace,
    Probe,
    TracepointPlace,
)
from tracepipe.hooks.slots import slots
from tracepipe.tracer.bpf.specs import QUEUES_ITEMS, WHOLE_EFFECTS, hashed_slot, is_paired
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import DROP_LAYERS
from tracepipe.tracer.request import Plan

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
    def attach_points(self) -> int:
        """How many attach points the script has."""
        return len(self.blocks)

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
            ]
        self._add(f'uprobe:"{library}":"{function}" /pid == {self.own_pid}/', *orders)

    def _following(self) -> None:
        """Add blocks that follow threads: found at exec, followed through clone, forgotten at their end. @t:
        tid → running<<32|tgid.
        """
        scope = self.plan.scope
        starts = ["(@arm != 0 && @arm == (uint64)pid)"]
        matches = "$t != 0"
        if scope.kind == "comm":
            starts.append(f'comm == "{quoted(scope.comm)}"')
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


def quoted(text: str) -> str:
    """A text for use between quotes; other bytes than plain ASCII become octal escapes."""
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode()
    )
