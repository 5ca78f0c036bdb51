"""Records of probes.bpf.c as lines of an event file.

One record, little-endian, bytes from the start; the first eight are the ring's own header:

    0       8        16     20     24   28   29     30    32      40      48      56      64
    ┌───────┬────────┬──────┬──────┬────┬────┬──────┬─────┬───────┬───────┬───────┬───────┐
    │ ring  │ ts_ns  │ tid  │ tgid │ id │kind│ torn │ cpu │ a[0]  │ a[1]  │ a[2]  │ a[3]  │
    └───────┴────────┴──────┴──────┴────┴────┴──────┴─────┴───────┴───────┴───────┴───────┘

Lines are put together from ready pieces: a dict and a JSON encoder an event would take three times as long.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence

from tracepipe.capture.records.calls import Calls, opening
from tracepipe.capture.records.loss import Loss, loss_line
from tracepipe.capture.records.record_text import state_text, syscall_arguments, syscall_result
from tracepipe.hooks.hook import Probe

RECORD = struct.Struct("<8xQIIIBBHQQQQ")
RECORD_BYTES = RECORD.size

(
    CALL_ENTER,
    MORE,
    CALL_RETURN,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    SWITCH_OUT,
    SWITCH_IN,
    WAKEUP,
    MIGRATE,
    SERVED,
    THREAD_NEW,
    THREAD_NAME,
    TEXT,
    EVENT,
    THREAD_IDS,
) = range(1, 16)

# Order of the counters of losses. The last counts threads that were not followed: their events are of any
# layer.
DROP_LAYERS: tuple[str | None, ...] = (
    "userspace",
    "syscall",
    "kernel",
    "scheduler",
    "memory",
    "transfer",
    None,
)
_UNREPORTED, _MET_RUNNING = 1, 2  # a[1] of a switch
_SWITCHES = frozenset({SWITCH_OUT, SWITCH_IN})
_STATEFUL = frozenset({*_SWITCHES, SYSCALL_ENTER, SYSCALL_EXIT, CALL_ENTER, CALL_RETURN})
_KIND_AT = 28
_NO_EVENTS = bytes({MORE, SERVED, THREAD_NEW, THREAD_NAME, TEXT, THREAD_IDS})
_WARPS, _COLUMN = b'"type":"gpu_warp"', b'"warp":['
# In a text of JSON such a mark stands for itself only: the quotes of a value inside a string are escaped.
_MARKS = {layer: f'"type":"{layer}"'.encode() for layer in (*DROP_LAYERS, "gpu_kernel") if layer}
_NO_SWITCH_IN = "the kernel did not report that the thread was switched in"
_NO_SWITCH_OUT = "the kernel did not report that the thread was switched out"


class RecordRenderer:
    """Writes records as JSON lines: probes by index, system calls by number.

    `start_ns`: when recording began, which is when what was under way then is said to begin. `names` are
    those of the threads that ran before, by their ids in the capture's pid namespace.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        syscalls: Mapping[int, str],
        values: Mapping[str, Mapping[int, str]],
        start_ns: int = 0,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self.losses: dict[str, int] = {}
        self._calls = Calls(probes, values)
        self._start_ns = start_ns
        self._syscall_enter = {n: opening("syscall", name, "B") for n, name in syscalls.items()}
        self._syscall_exit = {n: opening("syscall", name, "E") for n, name in syscalls.items()}
        self._syscall_arguments = {n: syscall_arguments(name) for n, name in syscalls.items()}
        self._switch_in = opening("scheduler", "running", "B")
        self._switch_out = opening("scheduler", "running", "E")
        self._wakeup = opening("scheduler", "wakeup", "I")
        self._migrate = opening("scheduler", "migrate", "I")
        self._states: dict[int, str] = {}
        self._last_out_ns: dict[int, int] = {}
        self._in_syscall: set[int] = set()
        self._depths: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._unwritten_names = {tid: json.dumps(name) for tid, name in (names or {}).items() if name}
        self._ids: dict[int, tuple[int, int]] = {}

    def learn(self, chunk: bytes) -> None:
        """Take from a chunk what lines before it need: the ids of threads in the capture's pid namespace."""
        for _, tid, _, _, kind, _, _, ids, _, _, _ in RECORD.iter_unpack(chunk):
            if kind == THREAD_IDS:
                shown_tid = ids & 0xFFFFFFFF
                self._ids[tid] = ids >> 32, shown_tid
                if shown_tid in self._unwritten_names:
                    self._unwritten_names[tid] = self._unwritten_names.pop(shown_tid)

    def render(self, chunk: bytes) -> bytes:
        """Lines of the records in `chunk`, which is a whole number of them."""
        lines: list[str] = []
        add = lines.append
        calls, ids, unwritten = self._calls, self._ids, self._unwritten_names
        for ts_ns, tid, tgid, number, kind, torn, cpu, a0, a1, a2, a3 in RECORD.iter_unpack(chunk):
            if kind == CALL_ENTER:
                head, arguments = calls.enter(ts_ns, tid, tgid, number, torn, a0, a1, a2, a3)
            elif kind == CALL_RETURN:
                head, arguments = calls.leave(tid, tgid, number, torn, a0, a1)
            elif kind == SYSCALL_ENTER:
                head, arguments = self._syscall_enter[number], self._syscall_arguments[number](a0, a1, a2, a3)
            elif kind == SYSCALL_EXIT:
                head, arguments = self._syscall_exit[number], syscall_result(a0)
            elif kind == SWITCH_IN:
                head, arguments = self._switch_in, ""
            elif kind == SWITCH_OUT:
                head, arguments = self._switch_out, self._states.get(a0) or self._left(a0)
            elif kind == WAKEUP:
                # Who is outside of the namespace is 0 there, as the kernel shows it.
                by_tid = ids.get(number, (0, 0))[1] if ids else number
                head, arguments = self._wakeup, f',"args":{{"by_tid":{by_tid},"target_cpu":{a0}}}'
            elif kind == MIGRATE:
                head, arguments = self._migrate, f',"args":{{"from_cpu":{a0},"to_cpu":{a1}}}'
            elif kind == EVENT:
                head, arguments = calls.hit(number, a0, a1, a2, a3)
            else:
                self._belongs(kind, tid, number, a0, a1, a2, a3)
                continue
            pid, shown_tid = ids.get(tid, (tgid, tid)) if ids else (tgid, tid)
            where = f'"pid":{pid},"tid":{shown_tid},"cpu":{cpu}' if pid else f'"cpu":{cpu}'
            if kind in _STATEFUL and (self._start_ns or (a1 and kind in _SWITCHES)):
                self._continue(add, kind, ts_ns, tid, a1, head, where)
            if tid in unwritten:
                where += f',"comm":{unwritten.pop(tid)}'
            # The time first: the rest of a line then repeats, and readers parse it once.
            add(f'{{"ts_ns":{ts_ns},{head},{where}{arguments}}}\n')
            if kind == SWITCH_OUT:
                self._last_out_ns[tid] = ts_ns
            elif kind == CALL_RETURN and number in calls.effective:
                effect = calls.effect(ts_ns, tid, pid, shown_tid, cpu, number, a0, a1)
                if effect:
                    add(effect)
        return "".join(lines).encode()

    def count(self, chunk: bytes) -> int:
        """Events in `chunk`."""
        return event_count(chunk)

    def _continue(
        self, add: Callable[[str], None], kind: int, ts_ns: int, tid: int, note: int, head: str, where: str
    ) -> None:
        """Before a record that does not follow from the thread's last one: what is known of the time
        between.
        """
        if kind == CALL_ENTER:
            self._depths[tid] = self._depths.get(tid, 0) + ('"phase":"B"' in head)
        elif kind == CALL_RETURN:
            depth = self._depths.get(tid, 0)
            if depth:
                self._depths[tid] = depth - 1
            else:
                self._began_before(add, head, where)
        elif kind == SYSCALL_ENTER:
            self._in_syscall.add(tid)
        elif kind == SYSCALL_EXIT:
            if tid not in self._in_syscall:
                self._in_syscall.add(tid)
                self._began_before(add, head, where)
        elif note == _MET_RUNNING:
            self._began_before(add, self._switch_in, where)
        elif note == _UNREPORTED and kind == SWITCH_OUT:
            self._unreported(add, self._last_out_ns.get(tid, ts_ns), ts_ns, _NO_SWITCH_IN)
        elif note == _UNREPORTED:
            self._unreported(add, ts_ns, ts_ns, _NO_SWITCH_OUT)
            add(f'{{"ts_ns":{ts_ns},{self._switch_out},{where},"args":{{"prev_state":"not reported"}}}}\n')

    def _began_before(self, add: Callable[[str], None], head: str, where: str) -> None:
        begin = head.replace('"phase":"E"', '"phase":"B"')
        add(f'{{"ts_ns":{self._start_ns},{begin},{where},"args":{{"began":"before the recording"}}}}\n')

    def _unreported(self, add: Callable[[str], None], start_ns: int, end_ns: int, reason: str) -> None:
        self.losses["scheduler"] = self.losses.get("scheduler", 0) + 1
        add(loss_line(Loss("scheduler", 1, start_ns, end_ns, reason)).decode())

    def _belongs(self, kind: int, tid: int, number: int, *a: int) -> None:
        """Keep what belongs to a record that follows."""
        if kind in (THREAD_NEW, THREAD_NAME):
            name = json.dumps(struct.pack("<QQ", *a[:2]).split(b"\0", 1)[0].decode(errors="replace"))
            if self._names.get(tid) != name:
                self._names[tid] = self._unwritten_names[tid] = name
            self._in_syscall.add(tid)
        elif kind == MORE:
            self._calls.more[tid] = number, a
        elif kind == TEXT:
            self._calls.texts.setdefault(tid, []).append(struct.pack("<4Q", *a))
        elif kind == SERVED:
            self._calls.served[tid] = a[0]

    def _left(self, prev_state: int) -> str:
        text = f',"args":{{"prev_state":"{state_text(prev_state)}"}}'
        self._states[prev_state] = text
        return text


def event_count(chunk: bytes) -> int:
    """Records in `chunk` that become a line."""
    return len(chunk[_KIND_AT::RECORD_BYTES].translate(None, _NO_EVENTS))


def layer_counts(lines: bytes) -> dict[str, int]:
    """Layer → events in lines that a renderer made; a warp counts one."""
    counts = {layer: lines.count(mark) for layer, mark in _MARKS.items()}
    if _WARPS in lines:
        counts["gpu_warp"] = sum(_warp_count(line) for line in lines.split(b"\n") if _WARPS in line)
    return {layer: count for layer, count in counts.items() if count}


def _warp_count(line: bytes) -> int:
    """Warps in a line of them: values of its first column."""
    start = line.index(_COLUMN) + len(_COLUMN)
    end = line.index(b"]", start)
    return line.count(b",", start, end) + (end > start)
