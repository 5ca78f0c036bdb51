"""Turns bpftrace's output into records: lines are parsed and sorted, and their gaps counted as losses.

bpftrace empties one processor's buffer after the other, so lines of two processors arrive in any order, and a
thread that moved has lines in both. Lines of one processor keep their order. A line is released when a later
one was seen from every processor.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple

from tracepipe.hooks.hook import KernelPlace, Probe
from tracepipe.hooks.slots import slots
from tracepipe.tracer.engines.bpftrace.language import (
    IDLE,
    SCHEDULER,
    SYSCALL,
    TEXT_PIECE_BYTES,
    THREADS,
    LineKind,
)
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import DROP_LAYERS, RECORD, Loss

# An interrupt's line can precede a line with an earlier time. No probe takes longer than this.
_SLACK_NS = 1_000_000
_SUSPENDED_NS = 1_000_000  # the least by which the two clocks differ after a suspend
_TEXT_RECORD_BYTES = 31
_COUNTED = "bpftrace's buffers were full"


class Mark(NamedTuple):
    """A printed mark: its control probe, its word, its processor, and its time."""

    which: int
    word: int
    cpu: int
    clock_ns: int


class PrintedLine(NamedTuple):
    """A line: when it was printed, its records, and its number in the sequence of its thread and layer."""

    printed_ns: int
    records: bytes
    sequence: int
    number: int


class Clock:
    """bpftrace's `nsecs` as CLOCK_MONOTONIC.

    In some versions it is CLOCK_BOOTTIME, which continues while the machine is suspended.
    """

    def __init__(self, is_boottime: bool) -> None:
        self._is_boottime = is_boottime
        self._seen_ns = time.monotonic_ns()
        self._ahead_ns = [self._now_ahead_ns()]
        self._from_ns: list[int] = []  # in `nsecs`: from when the second and later offsets apply

    def follow(self) -> None:
        """Check whether the machine was suspended since the last call."""
        now_ns, ahead_ns = time.monotonic_ns(), self._now_ahead_ns()
        if ahead_ns - self._ahead_ns[-1] > _SUSPENDED_NS:
            # It resumed after the last call. The time since then on CLOCK_MONOTONIC is the time that it was
            # awake.
            self._from_ns.append(self._seen_ns + ahead_ns)
            self._ahead_ns.append(ahead_ns)
        self._seen_ns = now_ns

    def monotonic_ns(self, clock_ns: int) -> int:
        """Convert a time of `nsecs` to CLOCK_MONOTONIC."""
        for from_ns, ahead_ns in zip(reversed(self._from_ns), reversed(self._ahead_ns), strict=False):
            if clock_ns >= from_ns:
                return clock_ns - ahead_ns
        return clock_ns - self._ahead_ns[0]

    def _now_ahead_ns(self) -> int:
        if not self._is_boottime:
            return 0
        return min(_boottime_ahead_ns() for _ in range(5))


def _boottime_ahead_ns() -> int:
    before_ns = time.monotonic_ns()
    boottime_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return boottime_ns - (before_ns + time.monotonic_ns()) // 2


class Lines:
    """Takes bpftrace's output, and returns records and losses."""

    def __init__(self, probes: Sequence[Probe], text_end: str, *, defers: bool) -> None:
        """`defers`: entries have an extra field with the time at which they began."""
        self.marks: list[Mark] = []
        self.losses: list[Loss] = []
        self.unread = 0
        self.an_unread_line = b""
        self.counts: dict[int, int] = {}  # sequence → its next number, as printed at the end
        self.filtered: dict[int, int] = {}  # layer → events
        self.clock = Clock(False)
        self.seen_ns: dict[int, int] = {}  # processor → time of its last line
        self._text_end = text_end.encode()
        self._began_at = int(defers)
        self._probes = [_Shape(probe) for probe in probes]
        self._rest = b""
        self._open_text: list[bytes] = []
        self._events: list[PrintedLine] = []
        self._next: dict[int, int] = {}
        self._last_ns: dict[int, int] = {}
        # tid → number of the entry that follows, piece → text
        self._texts: dict[int, dict[int, bytes]] = {}
        self._parsers: dict[bytes, Callable[[_Head, list[bytes]], bytes]] = {
            LineKind.ENTER.encode(): self._enter,
            LineKind.RETURN.encode(): self._leave,
            LineKind.HIT.encode(): self._hit,
            LineKind.SYSCALL_ENTER.encode(): self._syscall_enter,
            LineKind.SYSCALL_EXIT.encode(): self._syscall_exit,
            LineKind.SWITCH_OUT.encode(): self._switch_out,
            LineKind.SWITCH_IN.encode(): self._switch_in,
            LineKind.WAKEUP.encode(): self._wakeup,
            LineKind.MIGRATE.encode(): self._migrate,
            LineKind.THREAD_NEW.encode(): self._thread,
            LineKind.THREAD_NAME.encode(): self._thread,
        }
        self._with_text = tuple(
            op.encode() for op in (LineKind.TEXT, LineKind.THREAD_NEW, LineKind.THREAD_NAME)
        )
        self._layer_of = {
            op.encode(): layer
            for layer, ops in (
                (SYSCALL, (LineKind.SYSCALL_ENTER, LineKind.SYSCALL_EXIT)),
                (SCHEDULER, (LineKind.SWITCH_OUT, LineKind.SWITCH_IN, LineKind.WAKEUP, LineKind.MIGRATE)),
                (THREADS, (LineKind.THREAD_NEW, LineKind.THREAD_NAME)),
            )
            for op in ops
        }

    @property
    def is_waiting(self) -> bool:
        """Whether lines wait for earlier ones of other processors."""
        return bool(self._events)

    def feed(self, output: bytes) -> None:
        """Take some output; it may end within a line."""
        lines = (self._rest + output).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self._open_text or line.startswith(self._with_text):
                # A text may contain newlines.
                self._open_text.append(line)
                if not line.endswith(self._text_end):
                    continue
                line = b"\n".join(self._open_text)
                self._open_text = []
            try:
                self._read(line)
            except (ValueError, IndexError, KeyError, struct.error):
                if not self.unread:
                    self.an_unread_line = line
                self.unread += 1

    def take(self, until_ns: int | None = None) -> bytes:
        """The records of all lines that were printed before `until_ns`, a time of `nsecs`; of all lines if
        None.
        """
        events = self._events
        events.sort(key=itemgetter(0))
        ready = len(events)
        if until_ns is not None:
            horizon_ns = until_ns - _SLACK_NS
            while ready and events[ready - 1].printed_ns > horizon_ns:
                ready -= 1
        taken, self._events = events[:ready], events[ready:]
        for event in taken:
            if event.number != self._next.get(event.sequence, 0):
                self._gap(event)
            self._next[event.sequence] = event.number + 1
            self._last_ns[event.sequence] = event.printed_ns
        return b"".join([event.records for event in taken])

    def finish(self, start_ns: int, end_ns: int) -> None:
        """Count what was lost after the last line of every sequence, from the counts that were printed at the
        end.
        """
        for sequence, number in self.counts.items():
            missing = number - self._next.get(sequence, 0)
            if missing > 0:
                last_ns = self._last_ns.get(sequence)
                since_ns = start_ns if last_ns is None else self.clock.monotonic_ns(last_ns)
                self._lose(sequence, missing, since_ns, end_ns)
        if self.unread:
            shown = self.an_unread_line[:60].decode(errors="replace")
            reason = f"bpftrace wrote lines that cannot be read; the first: {shown}"
            self.losses.append(Loss(None, self.unread, start_ns, end_ns, reason))

    def _gap(self, event: PrintedLine) -> None:
        expected = self._next.get(event.sequence, 0)
        if event.number > expected:
            end_ns = self.clock.monotonic_ns(event.printed_ns)
            last_ns = self._last_ns.get(event.sequence)
            since_ns = end_ns if last_ns is None else self.clock.monotonic_ns(last_ns)
            self._lose(event.sequence, event.number - expected, since_ns, end_ns)

    def _lose(self, sequence: int, count: int, start_ns: int, end_ns: int) -> None:
        layer = DROP_LAYERS[sequence & 7]
        reason = _COUNTED if layer else f"a thread's start or name was lost: {_COUNTED}"
        self.losses.append(Loss(layer, count, start_ns, end_ns, reason))

    def _read(self, line: bytes) -> None:
        if not line:
            return
        first = line[:1]
        if first == b"@":
            self._read_count(line)
            return
        if first == b"L" and line.startswith(b"Lost "):
            return  # the sequence numbers are more exact
        if first == LineKind.MARK.encode():
            _, clock_ns, _, cpu, which, word = (int(field, 16) for field in (b"0", *line.split(b" ")[1:]))
            self.marks.append(Mark(which, word, cpu, clock_ns))
            self.seen_ns[cpu] = clock_ns
            return
        if first in self._with_text:
            op, clock_text, tid_text, cpu_text, number_text, rest = line.split(b" ", 5)
            rest = rest[: -len(self._text_end)]
            fields = rest.split(b" ", 1 if first == LineKind.TEXT.encode() else 2)
        else:
            op, clock_text, tid_text, cpu_text, number_text, *fields = line.split(b" ")
        clock_ns, tid, cpu = int(clock_text, 16), int(tid_text, 16), int(cpu_text, 16)
        number = int(number_text, 16)
        self.seen_ns[cpu] = clock_ns
        if first == LineKind.TEXT.encode():
            self._texts.setdefault(tid or IDLE + cpu, {})[number << 2 | int(fields[0])] = fields[1]
            return
        probe = int(op[1:], 16) if len(op) > 1 else 0
        head = _Head(first, clock_ns, self.clock.monotonic_ns(clock_ns), tid, cpu, probe, number)
        records = self._parsers[first](head, fields)
        layer = self._layer_of.get(first)
        if layer is None:
            layer = self._probes[probe].layer
        self._events.append(PrintedLine(clock_ns, records, (tid or IDLE + cpu) << 3 | layer, number))

    def _read_count(self, line: bytes) -> None:
        """`@s[1234, 3]: 17`."""
        key, _, value = line.partition(b"]: ")
        sequence, layer = (int(part) for part in key[3:].split(b", "))
        if line.startswith(b"@s["):
            self.counts[sequence << 3 | layer] = int(value)
        elif line.startswith(b"@f["):
            self.filtered[layer] = self.filtered.get(layer, 0) + int(value)
        else:
            raise ValueError(line)

    def _enter(self, head: _Head, fields: list[bytes]) -> bytes:
        shape = self._probes[head.probe]
        tgid, *values = [int(field, 16) for field in fields]
        at_ns = head.at_ns
        if self._began_at:
            at_ns = self.clock.monotonic_ns(values.pop(0))
        parts = []
        if len(values) != shape.values:
            raise ValueError(fields)
        served = values.pop(0) if shape.in_kernel else 0
        if len(values) > 4:
            more = values[4:]
            parts.append(_pack(at_ns, head, tgid, record.MORE, *more))
            del values[4:]
        torn = 0
        if shape.texts:
            kept = self._texts.pop(head.tid or IDLE + head.cpu, {})
            pieces = [kept[key] for key in (head.number << 2, head.number << 2 | 1) if key in kept]
            torn = int(len(pieces) != 2)
            if not torn:
                parts += [_pack_text(at_ns, head, tgid, part) for part in _text_parts(*pieces)]
        if served:
            parts.append(_pack(at_ns, head, tgid, record.SERVED, served))
        values += [0] * (4 - len(values))
        parts.append(
            RECORD.pack(at_ns, head.tid, tgid, head.probe, record.CALL_ENTER, torn, head.cpu, *values)
        )
        return b"".join(parts)

    def _leave(self, head: _Head, fields: list[bytes]) -> bytes:
        shape = self._probes[head.probe]
        tgid, *values = [int(field, 16) for field in fields]
        served = values.pop(0) if shape.in_kernel else 0
        if len(values) != 1 + shape.has_out:
            raise ValueError(fields)
        prefix = _pack(head.at_ns, head, tgid, record.SERVED, served) if served else b""
        return prefix + _pack(head.at_ns, head, tgid, record.CALL_RETURN, *values)

    def _hit(self, head: _Head, fields: list[bytes]) -> bytes:
        tgid, *values = [int(field, 16) for field in fields]
        shape = self._probes[head.probe]
        parts, torn = [], 0
        if shape.texts:
            kept = self._texts.pop(head.tid or IDLE + head.cpu, {})
            keys = [head.number << 2 | at for at in range(shape.texts)]
            torn = int(not kept.keys() >= set(keys))
            parts = [] if torn else [part for key in keys for part in _text_parts(kept[key], b"")]
        if shape.everywhere:
            head, tgid = head._replace(tid=0), 0
        a0, a1, a2, a3 = (*values, 0, 0, 0, 0)[:4]
        return b"".join(_pack_text(head.at_ns, head, tgid, part) for part in parts) + RECORD.pack(
            head.at_ns, head.tid, tgid, head.probe, record.EVENT, torn, head.cpu, a0, a1, a2, a3
        )

    def _syscall_enter(self, head: _Head, fields: list[bytes]) -> bytes:
        tgid, *values = [int(field, 16) for field in fields]
        at_ns = self.clock.monotonic_ns(values.pop(0)) if self._began_at else head.at_ns
        number, a0, a1, a2, a3 = values
        return RECORD.pack(at_ns, head.tid, tgid, number, record.SYSCALL_ENTER, 0, head.cpu, a0, a1, a2, a3)

    def _syscall_exit(self, head: _Head, fields: list[bytes]) -> bytes:
        tgid, number, result = [int(field, 16) for field in fields]
        return RECORD.pack(
            head.at_ns, head.tid, tgid, number, record.SYSCALL_EXIT, 0, head.cpu, result, 0, 0, 0
        )

    def _switch_out(self, head: _Head, fields: list[bytes]) -> bytes:
        tgid, state, note = [int(field, 16) for field in fields]
        return RECORD.pack(head.at_ns, head.tid, tgid, 0, record.SWITCH_OUT, 0, head.cpu, state, note, 0, 0)

    def _switch_in(self, head: _Head, fields: list[bytes]) -> bytes:
        tid, tgid, note = [int(field, 16) for field in fields]
        return RECORD.pack(head.at_ns, tid, tgid, 0, record.SWITCH_IN, 0, head.cpu, 0, note, 0, 0)

    def _wakeup(self, head: _Head, fields: list[bytes]) -> bytes:
        tid, tgid, target = [int(field, 16) for field in fields]
        return RECORD.pack(head.at_ns, tid, tgid, head.tid, record.WAKEUP, 0, head.cpu, target, 0, 0, 0)

    def _migrate(self, head: _Head, fields: list[bytes]) -> bytes:
        tid, tgid, origin, target = [int(field, 16) for field in fields]
        return RECORD.pack(head.at_ns, tid, tgid, 0, record.MIGRATE, 0, head.cpu, origin, target, 0, 0)

    def _thread(self, head: _Head, fields: list[bytes]) -> bytes:
        tid, tgid, name = int(fields[0], 16), int(fields[1], 16), fields[2]
        is_new = head.op == LineKind.THREAD_NEW.encode()
        low, high = struct.unpack("<QQ", name[:15].ljust(16, b"\0"))
        kind, creator = (record.THREAD_NEW, head.tid) if is_new else (record.THREAD_NAME, 0)
        return RECORD.pack(head.at_ns, tid, tgid, creator, kind, 0, head.cpu, low, high, 0, 0)


class _Head(NamedTuple):
    """The fields that every line begins with."""

    op: bytes
    clock_ns: int
    at_ns: int
    tid: int
    cpu: int
    probe: int
    number: int


class _Shape:
    """The form of a probe's lines."""

    def __init__(self, probe: Probe) -> None:
        arguments = probe.signature.arguments
        self.layer = DROP_LAYERS.index(probe.layer)
        self.in_kernel = isinstance(probe.place, KernelPlace)
        self.values = len(slots(probe.signature)) + self.in_kernel
        self.texts = sum(argument.kind == "str" for argument in arguments)
        self.has_out = any(argument.out for argument in arguments)
        self.everywhere = probe.hook.everywhere


def _pack(at_ns: int, head: _Head, tgid: int, kind: int, *values: int) -> bytes:
    a = (*values, 0, 0, 0, 0)[:4]
    return RECORD.pack(at_ns, head.tid, tgid, head.probe, kind, 0, head.cpu, *a)


def _pack_text(at_ns: int, head: _Head, tgid: int, part: bytes) -> bytes:
    return _pack(at_ns, head, tgid, record.TEXT, *struct.unpack("<4Q", part.ljust(32, b"\0")))


def _text_parts(text: bytes, rest: bytes) -> list[bytes]:
    """A text in parts of 31 bytes, one for each record; `rest` continues it only if its first piece
    is full.
    """
    if len(text) >= TEXT_PIECE_BYTES:
        text += rest
    parts = range(0, len(text) + 1, _TEXT_RECORD_BYTES)
    return [text[at : at + _TEXT_RECORD_BYTES] for at in parts][:8]
