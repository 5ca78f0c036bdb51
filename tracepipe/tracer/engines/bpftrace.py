"""The engine `bpftrace`: the same records from a bpftrace script, at lower rates.

    this process ──function call──▶ control probe ─┐
    target ───────────────────────▶ probes ────────┴▶ a buffer a processor ─▶ bpftrace ─▶ pipe ─▶ Lines

bpftrace empties one processor's buffer after the other, so lines of two processors arrive in any order, and a
thread that moved has lines in both. Lines of one processor keep their order. A line is released when a later
one was seen from every processor.

bpftrace is a child process that is killed at the end: its own exit takes 0.1 s for each probe, in which it
prints nothing. The kernel then detaches the probes in the background. Everything that was printed is read
before that: a mark is put into each processor's buffer as its last line.
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
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.hook import RECORDED_LAYERS, FilePlace, Probe, TracepointPlace
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.engines.bpftrace_script import ARCHITECTURES, TEXT_PIECE_BYTES, Order, Script
from tracepipe.tracer.engines.engine import Attachment
from tracepipe.tracer.engines.probes import check_machine
from tracepipe.tracer.find.kernel import field_offsets, tracing_folder
from tracepipe.tracer.find.library import mappings
from tracepipe.tracer.machine.facts import this_machine
from tracepipe.tracer.machine.processes import all_threads, comm_of, own_namespace
from tracepipe.tracer.machine.refusals import Operation, explain
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import DROP_LAYERS, FUNCTION_KINDS, RECORD, Loss
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Notify, Plan
from tracepipe.units import counted

_OLDEST = (0, 14)
_INSTALL = "apt install bpftrace"
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
_ONLINE = Path("/sys/devices/system/cpu/online")
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
        if _LOCKDOWN.exists() and "[confidentiality]" in _LOCKDOWN.read_text():
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
        self._processors = _processors()
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
                and self._obeys(Order.MARK, _processors())
                and self._obeys(Order.MARK, _processors())
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
        self.asked_points = self.found_points = script.attach_points
        self.has_ended = self._is_greeted = self._is_closed = False
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
        folder = Path("/proc", str(self.pid))
        with suppress(OSError):
            times = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            return len(list((folder / "fd").iterdir())), " ".join(times)
        return 0, ""

    def errors(self) -> str:
        """Its error output."""
        return os.pread(self._errors, os.fstat(self._errors).st_size, 0).decode(errors="replace")

    def ending(self) -> str:
        """How it ended by itself; "" if it has not ended yet."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return ""
        return (
            f"it was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"it ended with exit code {code}"
        )

    def close(self) -> None:
        """Kill it, and let the kernel detach its probes in the background."""
        if self._is_closed:
            return
        self._is_closed = True
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
    """bpftrace's `nsecs` as CLOCK_MONOTONIC.

    In some versions it is CLOCK_BOOTTIME, which continues while the machine is suspended.
    """

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


def _processors() -> list[int]:
    """The processors that are online, from a text such as `0-3,8`."""
    found: list[int] = []
    for part in _ONLINE.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _unavailable(process: Bpftrace) -> CaptureUnavailable:
    """The error for a bpftrace that ended before it had attached its probes."""
    messages = [line for line in process.errors().splitlines() if line and "RLIMIT_MEMLOCK" not in line]
    first = next(
        (line for line in messages if "ERROR" in line), messages[0] if messages else process.ending()
    )
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
