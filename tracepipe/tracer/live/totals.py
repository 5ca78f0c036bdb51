"""Totals of a recording while it is made: computed directly from the records, without lines.

    ring ──chunk──▶ Totals.add ──▶ open calls by thread ──▶ durations by function ──▶ histograms

In plain Python a record costs 0.45 µs, which is 2.2 million a second on one core. At higher rates chunks are
only counted (0.13 µs a record), and the totals state how many latencies that left out.
"""

from __future__ import annotations

import platform
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from queue import Empty, SimpleQueue

from tracepipe.event.vocabulary import state_text
from tracepipe.hooks.hook import HOST_SAMPLE, NAMING_EFFECTS, Probe
from tracepipe.tracer.engines.engine import Chunk, ThreadStore
from tracepipe.tracer.machine.processes import comm_of
from tracepipe.tracer.records.effects import Effects
from tracepipe.tracer.records.record import (
    CALL_ENTER,
    CALL_RETURN,
    EVENT,
    MET_RUNNING,
    MIGRATE,
    MORE,
    NUMBER_AND_KIND,
    SWITCH_IN,
    SWITCH_OUT,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    THREAD_END,
    THREAD_IDS,
    THREAD_NAME,
    THREAD_NEW,
    UNREPORTED,
    WAKEUP,
    Loss,
)
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Plan

# ts_ns │ tid │ tgid │ id │ kind │ a[0] … a[3] of a record; record.py draws the whole record.
_READ = struct.Struct("<8xQIIIB3xQQQQ")
_SCHEDULER = frozenset({SWITCH_OUT, SWITCH_IN, WAKEUP, MIGRATE})
_SETTLE = 4096  # durations of a function that are moved into its histogram together
_DEPTH_MAX = 256  # a thread nests at most 64 uretprobes, and some kprobes; deeper calls never return
_TRIM_BYTES = 4 << 20  # bytes of records between checks for calls that never return

WHOLE = 0
"""The kind of a row for a whole call, whose a[0] is its duration. No record has this kind."""
Row = tuple[int, int, int, int, int, int, int, int, int]
"""ts_ns, tid, tgid, id, kind and a[0] to a[3] of a record, or of an event that is treated like one."""
_Open = tuple[int, int]
"""A call in progress: its function or number, and when it was entered."""

_RUNNABLE, _ENDED = (0, 0x100), 0x30  # prev_state: not waiting; EXIT_DEAD or EXIT_ZOMBIE
_ENDED_KEPT = 1024  # about how many threads are kept before those that ended are summed up
_THREADS_MAX = 65536  # as many as the BPF programs follow; beyond that, ends were lost

PREEMPTED = "preempted"
FOR_A_PROCESSOR = "for a processor"
"""The wait from the wakeup to the switch-in."""

Words = tuple[int, int, int, int]
_ALLOCATING = ("alloc", "alloc_host")

_SUB_BITS = 4  # 16 buckets for each power of two: a bucket's middle is within 1/32 of all its values
_SUB = 1 << _SUB_BITS


@dataclass(frozen=True, slots=True)
class Function:
    """A function or tracepoint, whose index is the id in records. `own`: the name of a hook's own layer."""

    layer: str
    name: str
    is_instant: bool = False
    own: str = ""
    probe: Probe | None = field(default=None, compare=False)
    """The probe, where its calls have an effect on memory."""


def function_of(probe: Probe) -> Function:
    """The function that a probe records."""
    has_effect = probe.hook.effect not in ("", *NAMING_EFFECTS)
    own = probe.hook.layer_name
    return Function(probe.layer, probe.name, not probe.is_span, own, probe if has_effect else None)


@dataclass(frozen=True, slots=True)
class FunctionTotal:
    """Calls of one function, or hits of a tracepoint, which have no durations.

    `count` calls were entered. `latencies` has those that were measured, `open_count` are in progress, the
    oldest of them since `oldest_ns`, and `unmeasured` are the rest: their returns were lost, not recorded, or
    only counted.
    """

    layer: str
    name: str
    count: int
    latencies: Histogram
    open_count: int = 0
    oldest_ns: int = 0
    unmeasured: int = 0
    size_bytes: int = 0
    """How many bytes they allocated, copied or set."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All totals at one instant of CLOCK_MONOTONIC. `counts` are events by layer, as a file has them;
    `allocated` and `copied` are by the names of their events (`alloc`, `HtoD`); `is_memory_partial`: some
    calls were not examined.
    """

    now_ns: int
    start_ns: int
    layers: tuple[str, ...] = ()
    functions: list[FunctionTotal] = field(default_factory=list)
    threads: list[ThreadTotal] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    losses: dict[str, int] = field(default_factory=dict)
    allocated: dict[str, MemoryTotal] = field(default_factory=dict)
    copied: dict[str, MemoryTotal] = field(default_factory=dict)
    is_memory_partial: bool = False

    @property
    def unmeasured(self) -> int:
        """How many calls without a latency have ended or were forgotten."""
        return sum(function.unmeasured for function in self.functions)


class _Calls:
    """Entries and returns of one kind: functions by probe, or system calls by number."""

    def __init__(self) -> None:
        self.entered: defaultdict[int, int] = defaultdict(int)
        self.durations: defaultdict[int, list[int]] = defaultdict(list)
        self.unpaired: defaultdict[int, int] = defaultdict(int)  # returns whose entry is unknown
        self.latencies: defaultdict[int, Histogram] = defaultdict(Histogram)

    def settle(self, at_least: int) -> None:
        """Move durations into the histograms, for functions that have at least this many."""
        for number, durations in self.durations.items():
            if len(durations) >= at_least:
                if min(durations, default=0) < 0:  # records of some methods are out of order
                    ordered = [duration_ns for duration_ns in durations if duration_ns >= 0]
                    self.unpaired[number] += len(durations) - len(ordered)
                    durations[:] = ordered
                self.latencies[number].add(durations)
                durations.clear()


class Totals:
    """Adds up records. Only one thread may use it at a time."""

    def __init__(
        self,
        functions: Iterable[Function],
        syscalls: Mapping[int, str],
        start_ns: int,
        layers: tuple[str, ...],
        *,
        values: Mapping[str, Mapping[int, str]] | None = None,
        name_of: Callable[[int, int], str] = comm_of,
    ) -> None:
        """`values` are those of the plan; `name_of(pid, tid)` names threads whose names are in no record."""
        self._known: list[Function] = []
        self._instants: set[int] = set()
        self._with_effects: dict[int, Probe] = {}
        self.memory = MemoryTotals(values or {})
        for function in functions:
            self.add_function(function)
        self._syscalls, self._start_ns, self._layers = syscalls, start_ns, layers
        self._functions, self._system_calls = _Calls(), _Calls()
        self._stacks: dict[int, list[_Open]] = {}
        self._in_syscall: dict[int, _Open] = {}
        self._has_scheduler = "scheduler" in layers
        self.scheduler = SchedulerTotals(start_ns, name_of)
        self._losses: Counter[str] = Counter()
        self._untrimmed_bytes = 0

    def add_function(self, function: Function) -> int:
        """Add a function; returns its id."""
        number = len(self._known)
        self._known.append(function)
        if function.is_instant:
            self._instants.add(number)
        if function.probe is not None:
            self._with_effects[number] = function.probe
        return number

    def add(self, chunk: bytes) -> None:
        """Count and measure whole records."""
        self.add_rows(_READ.iter_unpack(chunk), len(chunk))

    def add_rows(self, rows: Iterable[Row], size_bytes: int) -> None:
        """Count and measure rows, whose records have `size_bytes`."""
        entered, durations = self._functions.entered, self._functions.durations
        numbers, spans = self._system_calls.entered, self._system_calls.durations
        stacks, in_syscall, instants = self._stacks, self._in_syscall, self._instants
        with_effects, memory = self._with_effects, self.memory
        for ts_ns, tid, tgid, number, kind, a0, a1, a2, a3 in rows:
            if kind == CALL_ENTER:
                entered[number] += 1
                if number in with_effects:
                    memory.enter(tid, number, with_effects[number], ts_ns, (a0, a1, a2, a3))
                if number in instants:
                    continue
                if tid in stacks:
                    stacks[tid].append((number, ts_ns))
                else:
                    stacks[tid] = [(number, ts_ns)]
            elif kind == CALL_RETURN:
                stack = stacks.get(tid)
                if stack and stack[-1][0] == number:
                    durations[number].append(ts_ns - stack.pop()[1])
                else:
                    self._return_below(stack, number, ts_ns)
                if number in with_effects:
                    memory.leave(tid, number, with_effects[number], ts_ns, a0, a1)
            elif kind == SYSCALL_ENTER:
                numbers[number] += 1
                in_syscall[tid] = number, ts_ns
            elif kind == SYSCALL_EXIT:
                begun = in_syscall.pop(tid, None)
                if begun is not None and begun[0] == number:
                    spans[number].append(ts_ns - begun[1])
                else:
                    self._system_calls.unpaired[number] += 1
            elif kind in _SCHEDULER:
                if self.scheduler.add(kind, ts_ns, tid, tgid, a0, a1):
                    self._forget_thread(tid)
            elif kind == EVENT:
                entered[number] += 1
            elif kind == MORE:
                if number in with_effects:
                    memory.more(tid, number, (a0, a1, a2, a3))
            elif kind == WHOLE:
                entered[number] += 1
                durations[number].append(a0)
            elif kind == THREAD_END:
                self._forget_thread(tid)
            elif kind in (THREAD_NEW, THREAD_NAME, THREAD_IDS):
                if kind == THREAD_NEW:
                    self._forget_thread(tid)  # its id is used again
                if self._has_scheduler:
                    self.scheduler.learn(kind, tid, tgid, a0, a1)
        self._functions.settle(_SETTLE)
        self._system_calls.settle(_SETTLE)
        self._untrimmed_bytes += size_bytes
        if self._untrimmed_bytes > _TRIM_BYTES:
            self._untrimmed_bytes = 0
            self._trim()

    def count(self, chunk: bytes) -> None:
        """Count whole records without measuring them; calls in progress are forgotten."""
        for (number, kind), times in Counter(NUMBER_AND_KIND.iter_unpack(chunk)).items():
            if kind in (CALL_ENTER, EVENT):
                self._functions.entered[number] += times
            elif kind == CALL_RETURN:
                self._functions.unpaired[number] += times
            elif kind == SYSCALL_ENTER:
                self._system_calls.entered[number] += times
            elif kind == SYSCALL_EXIT:
                self._system_calls.unpaired[number] += times
            elif kind in _SCHEDULER:
                self.scheduler.events += times
        self.forget(None)

    def lose(self, loss: Loss) -> None:
        """Note a loss between the earlier and the later records.

        A full ring has its gap where the reader stopped. Calls that were open there may have returned unseen,
        and must not be paired with a later return.
        """
        self._losses[loss.layer or "unknown"] += loss.count
        self.forget(loss.layer)

    def forget(self, layer: str | None) -> None:
        """Forget what is in progress in a layer, or in all layers if None."""
        if layer in (None, "syscall"):
            self._in_syscall.clear()
        if layer in (None, "scheduler"):
            self.scheduler.forget()
        if layer in (None, "userspace"):
            self.memory.forget()
        others = {
            tid: [call for call in stack if self._function(self._functions, call[0]).layer != layer]
            for tid, stack in (self._stacks.items() if layer else ())
        }
        self._stacks = {tid: stack for tid, stack in others.items() if stack}

    def counts(self) -> dict[str, int]:
        """Layer → events."""
        counts: defaultdict[str, int] = defaultdict(int)
        for calls in (self._functions, self._system_calls):
            calls.settle(1)
            for number in {*calls.entered, *calls.unpaired}:
                returned = calls.unpaired[number] + calls.latencies[number].count
                counts[self._function(calls, number).layer] += calls.entered[number] + returned
        if self.scheduler.events:
            counts["scheduler"] += self.scheduler.events
        return dict(counts)

    def snapshot(self, now_ns: int) -> Snapshot:
        """All totals as of now."""
        counts = self.counts()
        self._trim()
        functions = list[FunctionTotal]()
        for calls, in_progress in (
            (self._functions, chain.from_iterable(self._stacks.values())),
            (self._system_calls, self._in_syscall.values()),
        ):
            since_ns: defaultdict[int, list[int]] = defaultdict(list)
            for number, entered_ns in in_progress:
                since_ns[number].append(entered_ns)
            sizes_bytes = self.memory.bytes_of if calls is self._functions else {}
            for number, count in calls.entered.items():
                function, latencies = self._function(calls, number), calls.latencies[number].copy()
                open_ns = since_ns.get(number, [])
                functions.append(
                    FunctionTotal(
                        function.own or function.layer,
                        function.name,
                        count,
                        latencies,
                        len(open_ns),
                        min(open_ns, default=0),
                        0 if function.is_instant else count - latencies.count - len(open_ns),
                        sizes_bytes.get(number, 0),
                    )
                )
        return Snapshot(
            now_ns,
            self._start_ns,
            self._layers,
            functions,
            self.scheduler.threads(now_ns),
            counts,
            dict(self._losses),
            dict(self.memory.allocated),
            dict(self.memory.copied),
            self.memory.is_partial,
        )

    def _return_below(self, stack: list[_Open] | None, number: int, ts_ns: int) -> None:
        """Take the return of an outer call: the calls inside it have ended unseen."""
        for depth in range(len(stack or ()) - 1, -1, -1):
            assert stack is not None
            if stack[depth][0] == number:
                self._functions.durations[number].append(ts_ns - stack[depth][1])
                del stack[depth:]
                return
        self._functions.unpaired[number] += 1

    def _trim(self) -> None:
        """Drop threads without open calls, and the outermost calls of threads that have too many."""
        for tid, stack in list(self._stacks.items()):
            if not stack:
                del self._stacks[tid]
            elif len(stack) > _DEPTH_MAX:
                del stack[:-_DEPTH_MAX]

    def _forget_thread(self, tid: int) -> None:
        self._stacks.pop(tid, None)
        self._in_syscall.pop(tid, None)

    def _function(self, calls: _Calls, number: int) -> Function:
        if calls is self._system_calls:
            return Function("syscall", self._syscalls.get(number, f"syscall {number}"))
        known = number < len(self._known)
        return self._known[number] if known else Function("userspace", f"probe {number}")


@dataclass(slots=True)
class ThreadTotal:
    """A thread's time. `waits`: reason → ns; `switches`: how often it left a processor. `tid` is 0 for the
    sum of `ended` threads, which are not kept separately.
    """

    tid: int
    pid: int
    name: str
    running_ns: int = 0
    switches: int = 0
    waits: dict[str, int] = field(default_factory=dict)
    ended: int = 0


@dataclass(slots=True)
class _Thread(ThreadTotal):
    in_ns: int | None = None
    out_ns: int | None = None
    woken_ns: int | None = None
    reason: str = ""
    has_ended: bool = False

    def wait(self, reason: str, duration_ns: int) -> None:
        if duration_ns > 0:
            self.waits[reason] = self.waits.get(reason, 0) + duration_ns


class SchedulerTotals:
    """Adds up switches and wakeups by thread."""

    def __init__(self, start_ns: int, name_of: Callable[[int, int], str]) -> None:
        self.events = 0
        self._start_ns, self._name_of = start_ns, name_of
        self._threads: dict[int, _Thread] = {}
        self._rest = _Thread(0, 0, "threads that ended")
        self._sum_up_at = _ENDED_KEPT

    def add(self, kind: int, ts_ns: int, tid: int, tgid: int, a0: int, a1: int) -> bool:
        """Take a switch, wakeup or migration; returns whether the thread ended with it."""
        self.events += 1
        thread = self._threads.get(tid)
        if thread is None or thread.has_ended:
            thread = self._thread(tid, tgid)
        if kind == SWITCH_OUT:
            thread.switches += 1
            if a1 == MET_RUNNING:
                thread.running_ns += max(0, ts_ns - self._start_ns)
            elif a1 != UNREPORTED and thread.in_ns is not None:
                thread.running_ns += max(0, ts_ns - thread.in_ns)
            thread.in_ns, thread.out_ns, thread.woken_ns = None, ts_ns, None
            thread.reason = PREEMPTED if a0 in _RUNNABLE else state_text(a0)
            thread.has_ended = bool(a0 & _ENDED)
            return thread.has_ended
        if kind == SWITCH_IN:
            if a1 != UNREPORTED and thread.out_ns is not None:
                woken_ns = thread.woken_ns
                thread.wait(thread.reason, (ts_ns if woken_ns is None else woken_ns) - thread.out_ns)
                if woken_ns is not None:
                    thread.wait(FOR_A_PROCESSOR, ts_ns - woken_ns)
            thread.in_ns, thread.out_ns, thread.woken_ns = ts_ns, None, None
        elif kind == WAKEUP and thread.out_ns is not None and thread.woken_ns is None:
            thread.woken_ns = ts_ns
        return False

    def learn(self, kind: int, tid: int, tgid: int, a0: int, a1: int) -> None:
        """Take a thread's start, name, or ids in the capture's pid namespace."""
        thread = self._thread(tid, tgid)
        if kind == THREAD_IDS:
            thread.pid, thread.tid = a0 >> 32, a0 & 0xFFFFFFFF
        else:
            thread.name = struct.pack("<QQ", a0, a1).split(b"\0", 1)[0].decode(errors="replace")

    def name(self, tid: int, tgid: int, name: str) -> None:
        """Take a thread's name."""
        self._thread(tid, tgid).name = name

    def forget(self) -> None:
        """Forget which threads run and which wait."""
        for thread in self._threads.values():
            thread.in_ns = thread.out_ns = thread.woken_ns = None

    def threads(self, now_ns: int) -> list[ThreadTotal]:
        """Every thread that had a switch; running threads are counted until now."""
        totals = []
        for thread in (*self._threads.values(), self._rest):
            if not thread.switches and thread.in_ns is None and not thread.ended:
                continue
            name = thread.name = thread.name or self._name_of(thread.pid, thread.tid)
            running_ns, waits = thread.running_ns, dict(thread.waits)
            if thread.in_ns is not None:
                running_ns += max(0, now_ns - thread.in_ns)
            totals.append(
                ThreadTotal(thread.tid, thread.pid, name, running_ns, thread.switches, waits, thread.ended)
            )
        return totals

    def _thread(self, tid: int, tgid: int) -> _Thread:
        """A thread that has not ended: its id may be that of one that has."""
        if (known := self._threads.get(tid)) is not None and not known.has_ended:
            return known
        old = self._threads.pop(tid, None)
        if old is not None:
            self._sum_up(old)
        elif len(self._threads) >= self._sum_up_at:
            gone = [ended for ended, thread in self._threads.items() if thread.has_ended]
            if len(self._threads) - len(gone) >= _THREADS_MAX:
                gone = list(self._threads)[: _THREADS_MAX // 2]
            for ended in gone:
                self._sum_up(self._threads.pop(ended))
            self._sum_up_at = max(_ENDED_KEPT, min(2 * len(self._threads), _THREADS_MAX))
        thread = self._threads[tid] = _Thread(tid, tgid, "")
        return thread

    def _sum_up(self, thread: _Thread) -> None:
        rest = self._rest
        rest.running_ns += thread.running_ns
        rest.switches += thread.switches
        for reason, duration_ns in thread.waits.items():
            rest.wait(reason, duration_ns)
        rest.ended += 1


@dataclass(frozen=True, slots=True)
class MemoryTotal:
    """How often an operation was done, and its total size."""

    count: int = 0
    size_bytes: int = 0


class MemoryTotals:
    """Adds up the effects of calls. A runtime call and the driver call inside it count once."""

    def __init__(self, value_names: Mapping[str, Mapping[int, str]]) -> None:
        self._names = {name: dict(values) for name, values in value_names.items()}
        self.allocated: dict[str, MemoryTotal] = {}
        """Name of the event → what was allocated."""
        self.copied: dict[str, MemoryTotal] = {}
        """Direction → what was copied."""
        self.bytes_of: defaultdict[int, int] = defaultdict(int)
        """Function id → bytes."""
        self.is_partial = False
        """Whether some calls were not examined."""
        self._effects = Effects(self._names)
        self._more: dict[int, tuple[int, Words]] = {}

    def more(self, tid: int, number: int, words: Words) -> None:
        """Take the slots that did not fit into the record of the next entry."""
        self._more[tid] = number, words

    def enter(self, tid: int, number: int, probe: Probe, ts_ns: int, words: Words) -> None:
        """Called when a thread enters a call."""
        of, more = self._more.pop(tid, (-1, (0, 0, 0, 0)))
        self._effects.enter(tid, probe, ts_ns, words + (more if of == number else (0, 0, 0, 0)))

    def leave(self, tid: int, number: int, probe: Probe, ts_ns: int, result: int, out: int) -> None:
        """Called when the call returns."""
        if done := self._effects.leave(tid, probe, ts_ns, result, out):
            self.add(done.name, done.size_bytes or 0, is_copy=done.is_copy, number=number)

    def add(self, name: str, size_bytes: int, *, is_copy: bool, number: int | None) -> None:
        """Add an operation, by a call of function `number` if that is known."""
        if number is not None:
            self.bytes_of[number] += size_bytes
        if not is_copy and name not in _ALLOCATING:
            return
        totals = self.copied if is_copy else self.allocated
        known = totals.get(name, MemoryTotal())
        totals[name] = MemoryTotal(known.count + 1, known.size_bytes + size_bytes)

    def forget(self) -> None:
        """Forget the calls in progress."""
        self.is_partial = True
        self._effects = Effects(self._names)
        self._more.clear()


@dataclass(slots=True)
class Histogram:
    """Counts of durations in ns. Values up to 31 have a bucket each."""

    buckets: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total_ns: int = 0
    max_ns: int = 0

    def add(self, durations_ns: list[int]) -> None:
        """Count durations, none of them negative. They repeat, so each distinct one is placed once."""
        self.count += len(durations_ns)
        self.total_ns += sum(durations_ns)
        self.max_ns = max(self.max_ns, max(durations_ns, default=0))
        buckets = self.buckets
        for duration_ns, times in Counter(durations_ns).items():
            buckets[bucket_of(duration_ns)] += times

    def copy(self) -> Histogram:
        """A copy, which later additions do not change."""
        return replace(self, buckets=self.buckets.copy())

    def percentile_ns(self, percent: float) -> int:
        """The duration that `percent` of all do not exceed: the middle of its bucket; 0 if there are none."""
        rank = max(1, -(-self.count * percent // 100))
        for bucket in sorted(self.buckets):
            rank -= self.buckets[bucket]
            if rank <= 0:
                low_ns, high_ns = bounds_ns(bucket)
                return min((low_ns + high_ns - 1) // 2, self.max_ns)
        return 0

    def spread(self, edges_ns: tuple[int, ...]) -> list[int]:
        """How many durations are below the first edge, between two edges, and from the last edge on. Edges
        are powers of two, which divide no bucket.
        """
        counts = [0] * (len(edges_ns) + 1)
        for bucket, times in self.buckets.items():
            low_ns = bounds_ns(bucket)[0]
            counts[sum(low_ns >= edge_ns for edge_ns in edges_ns)] += times
        return counts


def bucket_of(duration_ns: int) -> int:
    """The bucket of a duration: its leading five bits, and the number of the bits after them."""
    shift = duration_ns.bit_length() - _SUB_BITS - 1
    return (shift << _SUB_BITS) + (duration_ns >> shift) if shift > 0 else duration_ns


def bounds_ns(bucket: int) -> tuple[int, int]:
    """The first duration of a bucket and the first after it."""
    shift = (bucket >> _SUB_BITS) - 1
    if shift <= 0:
        return bucket, bucket + 1
    leading = _SUB + (bucket & (_SUB - 1))
    return leading << shift, (leading + 1) << shift


_BEHIND_BYTES = 32 << 20  # half a million records, a fifth of a second of work

_Reply = SimpleQueue[Snapshot]


class LiveSink(ThreadStore):
    """Takes chunks and losses in order; `snapshot` gives the totals at any time, on any thread."""

    def __init__(self, *, behind_bytes: int = _BEHIND_BYTES) -> None:
        """`behind_bytes`: how far the totals may lag before chunks are only counted."""
        super().__init__(self._add_up, "tracepipe-totals")
        self._behind_limit_bytes = behind_bytes
        self._put_bytes = self._added_bytes = 0  # each written on one thread
        self._totals: Totals | None = None
        self._end_ns: int | None = None
        self._items: SimpleQueue[Chunk | Loss | _Reply | None] = SimpleQueue()
        self.cpu_losses: dict[str, dict[int, int]] = {}

    def begin(self, plan: Plan, start_ns: int) -> None:
        syscalls = SYSCALLS.get(platform.machine(), {})
        layers = tuple(layer for layer in plan.layers if layer != HOST_SAMPLE)  # their stacks are in the file
        self._totals = Totals(map(function_of, plan.probes), syscalls, start_ns, layers, values=plan.values)
        super().begin(plan, start_ns)

    def put(self, item: Chunk | Loss) -> None:
        if isinstance(item, Chunk):
            self._put_bytes += len(item.content)
        self._items.put(item)

    def finish(self) -> None:
        """Called at the end; later snapshots are those of now."""
        self._end_ns = self._end_ns or time.monotonic_ns()
        self._items.put(None)

    def abandon(self) -> None:
        """Only count what is left."""
        self._behind_limit_bytes = -1

    @property
    def counts(self) -> dict[str, int]:
        found = self.snapshot()
        return found.counts if found else {}

    @property
    def losses(self) -> dict[str, int]:
        found = self.snapshot()
        return found.losses if found else {}

    def snapshot(self) -> Snapshot | None:
        """The totals of everything that was put before this call; None before `begin`."""
        if self._totals is None:
            return None
        reply: _Reply = SimpleQueue()
        self._items.put(reply)
        while self._thread.is_alive():
            try:
                return reply.get(timeout=0.1)
            except Empty:
                continue
        return self._totals.snapshot(self._end_ns or time.monotonic_ns())  # no other thread uses them now

    def _add_up(self) -> None:
        totals = self._totals
        assert totals is not None
        while (item := self._items.get()) is not None:
            if isinstance(item, Chunk):
                chunk = item.content
                behind_bytes = self._put_bytes - self._added_bytes - len(chunk)
                (totals.count if behind_bytes > self._behind_limit_bytes else totals.add)(chunk)
                self._added_bytes += len(chunk)
            elif isinstance(item, Loss):
                totals.lose(item)
                if item.cpu is not None:
                    self.cpu_losses.setdefault(item.layer or "unknown", Counter())[item.cpu] += item.count
            else:
                item.put(totals.snapshot(time.monotonic_ns()))
