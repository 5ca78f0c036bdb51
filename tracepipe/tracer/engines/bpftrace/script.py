"""The bpftrace script of a plan: it does what probes.bpf.c does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tracepipe.hooks.hook import FilePlace, KernelPlace, Probe, TracepointPlace
from tracepipe.hooks.slots import slots
from tracepipe.tracer.engines.bpftrace.calls import FunctionProbe
from tracepipe.tracer.engines.bpftrace.language import (
    ARCHITECTURES,
    HEAD,
    SCHEDULER,
    SYSCALL,
    THREADS,
    Architecture,
    Language,
    LineKind,
    Order,
    comparison,
    quoted,
)
from tracepipe.tracer.records.record import DROP_LAYERS
from tracepipe.tracer.request import Plan


@dataclass(slots=True)
class Script:
    """A script while it is being written."""

    plan: Plan
    own_pid: int
    control: tuple[str, str]  # file and function of the control probe
    text_end: str
    syscalls: Iterable[int]
    without: frozenset[int] = frozenset()  # indexes of probes that cannot be attached
    tracepoint_fields: Mapping[int, list[str]] = field(default_factory=dict)  # probe → its arguments' fields
    architecture: Architecture = ARCHITECTURES["x86_64"]
    blocks: list[str] = field(default_factory=list)
    language: Language = field(init=False)

    def text(self) -> str:
        """The whole script."""
        widest = max((len(slots(probe.signature)) for probe in self.plan.probes), default=0)
        self.language = Language(self.architecture, self.plan.filters, self.text_end, widest)
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
            if index in self.without:
                continue
            if isinstance(probe.place, (FilePlace, KernelPlace)):
                for point, statements in FunctionProbe(self.language, index, probe).blocks():
                    self.add(point, *statements)
            else:
                self._tracepoint(index, probe)
        self._control(1)
        # Printed even when nothing happens: if this process has ended, the broken pipe ends bpftrace.
        self.add("interval:s:1", 'printf("\\n");')
        return "\n".join(self.blocks) + "\n"

    @property
    def attach_points(self) -> int:
        """How many attach points the script has."""
        return sum(1 + block.partition("{")[0].count(",\n") for block in self.blocks)

    def add(self, point: str, *statements: str) -> None:
        """Add a block."""
        body = "\n".join(f"  {statement}" for statement in statements if statement)
        self.blocks.append(f"{point} {{\n{body}\n}}")

    def _control(self, which: int) -> None:
        library, function = self.control
        mark = f'printf("{LineKind.MARK} {HEAD} %lx\\n", nsecs, tid, cpu, (uint64){which}, arg0);'
        orders = [f"if (arg1 == {Order.MARK}) {{ {mark} }}"]
        if which == 0:
            orders += [
                f"if (arg1 == {Order.TRACK}) "
                "{ @t[(uint64)(arg0 & 0xffffffff)] = (uint64)(arg0 >> 32) | ((uint64)2 << 32); }",
                f"if (arg1 == {Order.START}) {{ @arm = (uint64)arg0; @on = 1; }}",
                f"if (arg1 == {Order.STOP}) {{ @on = 0; clear(@t); {mark} }}",
                f"if (arg1 == {Order.COUNTS}) {{ print(@s); print(@f); {mark} }}",
            ]
        self.add(f'uprobe:"{library}":"{function}" /pid == {self.own_pid}/', *orders)

    def _following(self) -> None:
        """Blocks that follow threads: found at exec, followed through clone, forgotten at their end. @t: tid
        → running<<32|tgid.
        """
        scope = self.plan.scope
        starts = ["(@arm != 0 && @arm == (uint64)pid)"]
        if scope.kind == "comm":
            starts.append(f'comm == "{quoted(scope.comm)}"')
        if scope.kind == "system":
            starts.append(f"pid != {self.own_pid}")
        running = ""
        if "scheduler" in self.plan.own:
            line = self.language.line(
                LineKind.SWITCH_IN, SCHEDULER, ("%x", "tid"), ("%x", "pid"), ("%x", "0")
            )
            running = f"if ($starts != 0) {{ {line} }}"
        name = self.language.line(LineKind.THREAD_NAME, THREADS, ("%x", "tid"), ("%x", "pid"), text="comm")
        self.add(
            "tracepoint:sched:sched_process_exec",
            "$old = (uint64)args->old_pid; $t = @t[(uint64)tid]; $starts = 0;",
            "if ($t == 0) { $t = @t[$old]; }",
            f"if ($t == 0 && @on != 0 && ({' || '.join(starts)})) {{ $starts = 1; @arm = (uint64)0; }}",
            "if (@on != 0 && ($t != 0 || $starts != 0)) {",
            # A thread other than the leader that calls exec takes over the leader's id.
            "  if ($old != (uint64)tid) { delete(@t[$old]); }",
            "  if ($starts != 0 || $old != (uint64)tid)",
            "  { @t[(uint64)tid] = (uint64)pid | ((uint64)1 << 32); }",
            f"  {name}",
            f"  {running}",
            "}",
        )
        matches = "$t != 0"
        if scope.kind == "system":
            matches = f"($t != 0 || pid != {self.own_pid})"
        if not scope.children:
            matches += " && $is_thread != 0"
        new = self.language.line(
            LineKind.THREAD_NEW, THREADS, ("%x", "args->pid"), ("%lx", "$tgid"), text="comm"
        )
        self.add(
            "tracepoint:task:task_newtask",
            "$t = @t[(uint64)tid]; $is_thread = (uint64)args->clone_flags & 0x10000;",
            "$tgid = $is_thread != 0 ? (uint64)pid : (uint64)args->pid;",
            f"if (@on != 0 && {matches}) {{ @t[(uint64)args->pid] = $tgid; {new} }}",
        )
        name = self.language.line(
            LineKind.THREAD_NAME,
            THREADS,
            ("%x", "args->pid"),
            ("%lx", "$t & 0xffffffff"),
            text="args->newcomm",
        )
        self.add(
            "tracepoint:task:task_rename",
            f"$t = @t[(uint64)args->pid]; if ($t != 0) {{ {name} }}",
        )
        if "scheduler" not in self.plan.own:
            self.add("tracepoint:sched:sched_process_exit", "delete(@t[(uint64)tid]);")

    def _syscall_layer(self) -> None:
        number = ("%lx", "args->id")
        words = [("%lx", f"args->args[{n}]") for n in range(4)]
        tracked = "/@t[(uint64)tid] != 0 && @w[(uint64)args->id] != 0/"
        enter, leave = "tracepoint:raw_syscalls:sys_enter", "tracepoint:raw_syscalls:sys_exit"
        last = self.language.line(LineKind.SYSCALL_EXIT, SYSCALL, ("%x", "pid"), number, ("%lx", "args->ret"))
        if not self.language.defers:
            self.add(
                f"{enter} {tracked}",
                self.language.line(LineKind.SYSCALL_ENTER, SYSCALL, ("%x", "pid"), number, *words),
            )
            self.add(f"{leave} {tracked}", last)
            return
        values = ", ".join(f"(uint64){value}" for _, value in words)
        self.add(f"{enter} {tracked}", f"@y[(uint64)tid] = ((uint64)nsecs, {values});")
        kept = [("%lx", f"$y.{n}") for n in range(1, 5)]
        first = self.language.line(
            LineKind.SYSCALL_ENTER, SYSCALL, ("%x", "pid"), ("%lx", "$y.0"), number, *kept
        )
        self.add(
            f"{leave} {tracked}",
            "$y = @y[(uint64)tid]; $began = $y.0; delete(@y[(uint64)tid]);",
            f"if ($began != 0) {{ if ((uint64)nsecs - $began < {self.plan.filters.min_duration_ns}) "
            f"{{ {self.language.filtered(SYSCALL, 2)} }} else {{ {first} {last} }} }}",
        )

    def _scheduler_layer(self) -> None:
        # EXIT_DEAD or EXIT_ZOMBIE as the tracepoint shows them: the thread will not run again.
        out = self.language.line(
            LineKind.SWITCH_OUT,
            SCHEDULER,
            ("%lx", "$p & 0xffffffff"),
            ("%lx", "args->prev_state"),
            ("%x", "$ran == 0 ? 1 : ($ran == 2 ? 2 : 0)"),
        )
        came = self.language.line(
            LineKind.SWITCH_IN,
            SCHEDULER,
            ("%x", "args->next_pid"),
            ("%lx", "$n & 0xffffffff"),
            ("%x", "($n >> 32) == 1 ? 1 : 0"),
            idle=True,
        )
        self.add(
            "tracepoint:sched:sched_switch",
            "$prev = (uint64)args->prev_pid; $next = (uint64)args->next_pid; $p = @t[$prev];",
            f"if ($p != 0) {{ $ran = $p >> 32; {out}",
            "  if ((args->prev_state & 0x30) != 0) { delete(@t[$prev]); }",
            "  else { @t[$prev] = $p & 0xffffffff; } }",
            f"$n = @t[$next]; if ($n != 0) {{ {came}",
            "  @t[$next] = ($n & 0xffffffff) | ((uint64)1 << 32); }",
        )
        for point, op, fields in (
            ("sched_wakeup", LineKind.WAKEUP, ("target_cpu",)),
            ("sched_migrate_task", LineKind.MIGRATE, ("orig_cpu", "dest_cpu")),
        ):
            line = self.language.line(
                op,
                SCHEDULER,
                ("%x", "args->pid"),
                ("%lx", "$t & 0xffffffff"),
                *(("%x", f"args->{name}") for name in fields),
                idle=True,
            )
            self.add(
                f"tracepoint:sched:{point}",
                f"$t = @t[(uint64)args->pid]; if ($t != 0) {{ {line} }}",
            )

    def _tracepoint(self, index: int, probe: Probe) -> None:
        layer = DROP_LAYERS.index(probe.layer)
        names = self.tracepoint_fields[index]
        given = dict(zip(probe.signature.arguments, names, strict=True))
        line = self.language.line(
            f"{LineKind.HIT}{index:x}",
            layer,
            ("%x", "pid"),
            *(("%lx", "(uint64)0" if a.kind == "str" else f"args->{n}") for a, n in given.items()),
            idle=True,
        )
        texts = [(f"args->{n}", a.text_form) for a, n in given.items() if a.kind == "str"]
        printed = [
            # An array is already a string; a pointer's target is read as one.
            self.language.text_line(index, layer, at, n if form == "array" else f"str({n})", idle=True)
            for at, (n, form) in enumerate(texts)
        ]
        line = " ".join([*printed, line])
        tests = []
        if probe.hook.condition is not None:
            condition = probe.hook.condition
            tests.append(comparison(condition, f"(uint64)args->{given[condition.argument]}"))
        who = "@on != 0" if probe.hook.everywhere else "@t[(uint64)tid] != 0"
        statement = self.language.sampled(index, line, self.language.filtered(layer, 1, idle=True))
        if tests:  # other hits are not counted
            statement = f"if ({tests[0]}) {{ {statement} }}"
        assert isinstance(probe.place, TracepointPlace)
        self.add(f"tracepoint:{probe.place.point.replace('/', ':')} /{who}/", statement)
