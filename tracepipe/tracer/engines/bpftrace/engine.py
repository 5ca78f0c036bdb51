"""The engine `bpftrace`: the same records from a bpftrace script, at lower rates.

    this process ──function call──▶ control probe ─┐
    target ───────────────────────▶ probes ────────┴▶ a buffer a processor ─▶ bpftrace ─▶ pipe ─▶ Lines

bpftrace is a child process that is killed at the end: its own exit takes 0.1 s for each probe, in which it
prints nothing. The kernel then detaches the probes in the background. Everything that was printed is read
before that: each processor's buffer keeps its order, and a mark is put into each as its last line.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tracepipe.errors import CaptureUnavailable, OutputError, TracepipeError
from tracepipe.hooks.hook import RECORDED_LAYERS, FilePlace, Probe, TracepointPlace
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.engines.bpftrace.language import ARCHITECTURES, Order
from tracepipe.tracer.engines.bpftrace.lines import Clock, Lines
from tracepipe.tracer.engines.bpftrace.process import CONTROL, Bpftrace, Control, Progress
from tracepipe.tracer.engines.bpftrace.script import Script
from tracepipe.tracer.engines.engine import Coverage
from tracepipe.tracer.engines.probes import check_machine
from tracepipe.tracer.find.kernel import field_offsets, tracing_folder
from tracepipe.tracer.machine.facts import this_machine
from tracepipe.tracer.machine.processes import comm_of, own_namespace, running_threads
from tracepipe.tracer.machine.refusals import Operation, explain
from tracepipe.tracer.records.record import DROP_LAYERS, Loss
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Notify, Plan

_OLDEST = (0, 14)
_INSTALL = "apt install bpftrace"
_LOCKDOWN = Path("/sys/kernel/security/lockdown")
_ONLINE = Path("/sys/devices/system/cpu/online")
_BEHIND_NS = 50_000_000  # how far a processor may lag before a mark is put into its buffer
_QUIET_S = 10.0  # the longest wait for output of bpftrace
_AGAIN_S = 0.2  # then a mark is sent again, as it may be lost like any line
# bpftrace ends at the first probe that the kernel refuses.
_REFUSED = re.compile(r"Error attaching probe: '?(?:u|uret|k|kret)probe:([^'\n]*)")
_START_MARK = 1
_SOFTWARE, _BPF_OUTPUT = 1, 10  # perf_event_attr: a buffer that a program prints to
_ARRAY = 2  # enum bpf_map_type
_TRIALS: dict[Operation, Callable[[], int]] = {
    Operation.MAP: lambda: bpf.create_map("tracepipe_try", _ARRAY, 4, 8, 1),
    Operation.TRACEPOINT: lambda: bpf.perf_event(_SOFTWARE, _BPF_OUTPUT),
}


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
        """Start bpftrace and wait until every probe is attached. Raises CaptureUnavailable."""
        if plan.windows is not None:
            raise CaptureUnavailable(
                "Method bpftrace cannot record windows: it takes seconds or minutes to start and to stop.",
                "Leave out --delay, --start-on and --repeat, or choose another --method.",
            )
        return BpftraceAttachment(plan, notify)


class BpftraceAttachment:
    """A bpftrace process and what it has printed."""

    def __init__(self, plan: Plan, notify: Notify) -> None:
        """Attach all of the plan. Raises CaptureUnavailable."""
        self._plan, self._notify = plan, notify
        self._syscalls = SYSCALLS[platform.machine()]
        self._control = Control()
        self.coverage = Coverage()
        self.filtered: dict[str, int] = {}
        self.error: OutputError | None = None
        self._start_ns = time.monotonic_ns()
        self._names: dict[int, str] = {}
        self._text_end = f"\x1f{secrets.token_hex(4)}"
        self._lines = Lines(plan.probes, self._text_end, defers=plan.filters.min_duration_ns > 0)
        self._processors = _processors()
        self._marked_ns = 0
        self._word = _START_MARK
        self._stopped = False
        self._lost: list[Loss] = []
        self._collected = b""
        refused: set[int] = set()
        while True:
            self._process = Bpftrace(self._script(refused), plan.ring_bytes // max(len(self._processors), 1))
            try:
                again = self._attached(refused)
            except BaseException:
                self._process.close()
                raise
            if not again:
                break
            self._process.close()
        self._cover(refused)

    @property
    def is_unordered(self) -> bool:
        """Whether records can follow later ones: entries that are printed at their return do."""
        return self._plan.filters.min_duration_ns > 0

    def start(self) -> None:
        """Record what the plan's scope says, from now on; a command from its exec on."""
        scope = self._plan.scope
        self._start_ns = time.monotonic_ns()
        if scope.kind == "command":
            self._control.say(Order.START, scope.pids[0])
            return
        self._control.say(Order.START, 0)
        known = {self._process.pid}
        while found := [thread for thread in running_threads(scope) if thread.tid not in known]:
            for thread in found:
                known.add(thread.tid)
                self._control.say(Order.TRACK, thread.pid << 32 | thread.tid)
                self._names[thread.tid] = comm_of(thread.pid, thread.tid)

    def collect(self) -> bytes:
        """The records of the lines up to a time at which none are missing; of the last 50 ms some may be
        missing.
        """
        if self._stopped:
            records, self._collected = self._collected, b""
            return records
        self._lines.clock.follow()
        self._lines.feed(self._process.read())
        if self._process.has_ended:
            return self._lines.take()
        now_ns = time.monotonic_ns()
        if not self._lines.is_waiting:
            return b""
        if now_ns - self._marked_ns >= _BEHIND_NS:
            self._mark_those_behind(now_ns)
        return self._lines.take(min(self._lines.seen_ns.get(cpu, 0) for cpu in self._processors))

    def lost(self) -> list[Loss]:
        """The losses since the last call, exact for each layer: gaps in the sequence numbers of a thread."""
        losses, self._lines.losses = self._lines.losses, []
        return losses

    def renderer(self) -> RecordRenderer:
        """The decoder of `collect`'s chunks."""
        start_ns = 0 if self._plan.scope.kind == "command" else self._start_ns
        return RecordRenderer(self._plan.probes, self._syscalls, self._plan.values, start_ns, self._names)

    def stop(self) -> None:
        """Wait for the last output, about a tenth of a second, and kill bpftrace. A second call does
        nothing.
        """
        if self._stopped:
            return
        stopped_ns = time.monotonic_ns()
        try:
            if self._stated(Order.STOP) and self._drained() and self._stated(Order.COUNTS):
                for layer, count in self._lines.filtered.items():
                    name = DROP_LAYERS[layer]
                    if name and count:
                        self.filtered[name] = self.filtered.get(name, 0) + count
                self._collected = self._lines.take()
                self._lines.finish(self._start_ns, stopped_ns)
            else:
                self._collected = self._lines.take()
                self._lines.losses.append(
                    Loss(
                        None,
                        1,
                        self._marked_ns or self._start_ns,
                        time.monotonic_ns(),
                        "bpftrace ended before the recording did: more may be lost",
                    )
                )
        finally:
            self._stopped = True
            self._process.close()

    def close(self) -> None:
        """Stop, if that was not done."""
        if not self._stopped:
            self._stopped = True
            self._process.close()

    def _script(self, refused: set[int]) -> Script:
        plan = self._plan
        fields = {
            index: _field_names(probe)
            for index, probe in enumerate(plan.probes)
            if isinstance(probe.place, TracepointPlace)
        }
        return Script(
            plan,
            os.getpid(),
            (self._control.path, CONTROL),
            self._text_end,
            list(self._syscalls),
            frozenset(refused),
            fields,
            ARCHITECTURES[platform.machine()],
        )

    def _attached(self, refused: set[int]) -> bool:
        """Wait until everything is attached. Returns True where a probe was refused, which is then in
        `refused`.
        """
        stamps: dict[int, tuple[int, int, int, int]] = {}
        progress = Progress(self._process, self._notify)
        while True:
            self._word += 1
            before = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            self._control.say(Order.MARK, self._word)
            after = time.monotonic_ns(), time.clock_gettime_ns(time.CLOCK_BOOTTIME)
            stamps[self._word] = (*before, *after)
            output = self._process.read(wait_s=0.02)
            self._lines.feed(self._process.without_greeting(output))
            if self._process.has_ended:
                index = self._refused_probe(self._process.errors(), refused)
                if index is None:
                    raise _refused(self._process)
                refused.add(index)
                return True
            by_word: dict[int, set[int]] = {}
            for mark in self._lines.marks:
                by_word.setdefault(mark.word, set()).add(mark.which)
            for mark in self._lines.marks:
                if by_word[mark.word] == {0, 1}:
                    self._lines.clock = _clock(mark.clock_ns, stamps[mark.word])
                    self._lines.marks.clear()
                    return False
            if signal.sigpending():
                raise TracepipeError(
                    "The capture was interrupted while its probes were attached.", "Nothing was recorded."
                )
            progress.look()

    def _refused_probe(self, errors: str, refused: set[int]) -> int | None:
        found = _REFUSED.search(errors)
        if found is None:
            return None
        for index, probe in enumerate(self._plan.probes):
            shown = (
                f"{probe.place.path}:{probe.symbol}" if isinstance(probe.place, FilePlace) else probe.symbol
            )
            if shown == found[1].strip() and index not in refused:
                return index
        return None

    def _cover(self, refused: set[int]) -> None:
        """Report which layers are recorded, and which functions are not."""
        plan = self._plan
        names = sorted({plan.probes[index].symbol for index in refused})
        if names:
            self._notify(f"not recorded, the kernel does not let them be probed: {', '.join(names)}")
        missing = self._process.asked_points - self._process.found_points
        if missing > 0:
            self._notify(f"bpftrace did not find {missing} of {self._process.asked_points} places to probe")
        for layer in plan.layers:
            mine = {index for index, probe in enumerate(plan.probes) if probe.layer == layer}
            if mine and mine <= refused and layer not in plan.own:
                reason = "the kernel lets none of its functions be probed"
                self.coverage.missing[layer] = reason
                self._notify(f"no {layer} layer: {reason}")
            else:
                self.coverage.got.append(layer)

    def _mark_those_behind(self, now_ns: int) -> None:
        self._marked_ns = now_ns
        clock, seen = self._lines.clock, self._lines.seen_ns
        behind = [
            cpu for cpu in self._processors if now_ns - clock.monotonic_ns(seen.get(cpu, 0)) > _BEHIND_NS
        ]
        self._word += 1
        unreached = self._control.say_on(behind, Order.MARK, self._word)
        # These are offline, or not allowed for this process: their lines are taken as they arrive.
        self._processors = [cpu for cpu in self._processors if cpu not in unreached]
        self._lines.marks.clear()

    def _stated(self, order: Order) -> bool:
        """Give an order and wait until bpftrace has obeyed it. Returns False if it has ended."""
        return self._wait([None], order)

    def _drained(self) -> bool:
        """Wait for a mark in every processor's buffer. Returns False if bpftrace has ended."""
        self._processors = _processors()
        # bpftrace reads all buffers in turn: after two rounds it has also read those that accept no mark.
        return self._wait(self._processors, Order.MARK) and self._wait(self._processors, Order.MARK)

    def _wait(self, places: list[int] | list[None], order: Order) -> bool:
        waiting = set(places)
        words: set[int] = set()
        sent_s = progress_s = 0.0
        while waiting:
            now_s = time.monotonic()
            if now_s - sent_s > _AGAIN_S:
                sent_s = now_s
                progress_s = progress_s or now_s
                self._word += 1
                words.add(self._word)
                if None in waiting:
                    self._control.say(order, self._word)
                else:
                    cpus = [cpu for cpu in waiting if cpu is not None]
                    waiting -= self._control.say_on(cpus, order, self._word)
            output = self._process.read(wait_s=0.02)
            if output:
                progress_s = time.monotonic()
            self._lines.feed(output)
            for mark in self._lines.marks:
                if mark.word in words and mark.which == 0:
                    waiting -= {mark.cpu, None}
            self._lines.marks.clear()
            if waiting and (self._process.has_ended or time.monotonic() - progress_s > _QUIET_S):
                return False
        return True


def _clock(clock_ns: int, stamps: tuple[int, int, int, int]) -> Clock:
    """The clock of a mark that was printed between the stamps: monotonic and boot time before it, and both
    after it.
    """
    monotonic_ns, boottime_ns, monotonic_end_ns, boottime_end_ns = stamps
    if monotonic_ns <= clock_ns <= monotonic_end_ns:
        return Clock(False)
    if boottime_ns <= clock_ns <= boottime_end_ns:
        return Clock(True)
    raise CaptureUnavailable("bpftrace's times are of an unknown clock.", "--method bcc")


def _processors() -> list[int]:
    """The processors that are online, from a text such as `0-3,8`."""
    found: list[int] = []
    for part in _ONLINE.read_text().strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _field_names(probe: Probe) -> list[str]:
    """The names of the fields of a tracepoint's arguments, found by their offsets."""
    assert isinstance(probe.place, TracepointPlace)
    offsets = field_offsets(tracing_folder(), probe.place.point)
    names = {offset: name for name, offset in offsets.items()}
    return [names[argument.position] for argument in probe.signature.arguments]


def _refused(process: Bpftrace) -> CaptureUnavailable:
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
