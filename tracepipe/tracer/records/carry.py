"""What the kept records need from evicted records before them: names, ids, and what was still open.

It is kept as unchanged records: a decoder that takes them first has the same state as one that took all
records.

    evicted:  THREAD_NAME  TEXT CALL_ENTER  SYSCALL_ENTER SYSCALL_EXIT  CALL_ENTER CALL_RETURN │ kept: …
    carried:  THREAD_NAME  TEXT CALL_ENTER                                                     │
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tracepipe.hooks.hook import NAMING_EFFECTS, Probe, TracepointPlace
from tracepipe.tracer.records.calls import teller
from tracepipe.tracer.records.communicators import MADE
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX
from tracepipe.tracer.records.record import (
    CALL_ENTER,
    CALL_RETURN,
    EVENT,
    MORE,
    RECORD,
    RECORD_BYTES,
    SERVED,
    SWITCH_IN,
    SWITCH_OUT,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    TEXT,
    THREAD_END,
    THREAD_IDS,
    THREAD_NAME,
    THREAD_NEW,
)
from tracepipe.tracer.records.record_text import ENDED
from tracepipe.tracer.records.sieve import Sieve

THREADS_MAX = 1 << 16
"""The most threads whose names and ids are carried; the oldest are forgotten first, as not every end is seen.
"""
_WORDS = RECORD_BYTES // 4  # of a record, as u32; record.py draws its layout
_TID_AT, _NUMBER_AT, _KIND_AT, _CPU_AT, _A0_AT = 4, 6, 28, 30, 32
_OF_THREADS = (THREAD_IDS, THREAD_NEW, THREAD_NAME)  # in the order in which a decoder needs them
_PARTS = frozenset({MORE, TEXT, SERVED})  # precede the record that they belong to
_UNDER_WAY = {CALL_ENTER, CALL_RETURN, SYSCALL_ENTER, SYSCALL_EXIT, SWITCH_IN, SWITCH_OUT, EVENT, THREAD_END}


class Carried(NamedTuple):
    """The records that a decoder begins with."""

    known: bytes = b""
    """Records that make no line: names and ids."""
    under_way: bytes = b""
    """Records of what has begun and not ended, in the order in which it began."""


class Carry(Protocol):
    """Takes evicted records, and keeps what the following ones need.

    Another carry that takes what this one carried, the known records first, carries the same.
    """

    def take(self, chunk: bytes) -> None:
        """Take whole evicted records, in their order."""
        ...

    def divide(self, chunk: bytes, start_ns: int) -> tuple[bytes, bytes]:
        """The records of a chunk before `start_ns`, and the others."""
        ...

    def carried(self) -> Carried:
        """The records that are needed now."""
        ...


class RecordCarry:
    """Carries records of probes.bpf.c."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._naming = frozenset(i for i, probe in enumerate(probes) if probe.hook.effect in NAMING_EFFECTS)
        self._making = frozenset(i for i, probe in enumerate(probes) if probe.hook.effect == "communicator")
        self._momentary = frozenset(
            i
            for i, probe in enumerate(probes)
            if not probe.hook.returns or isinstance(probe.place, TracepointPlace)
        )
        self._sieve = Sieve(probes, {*_UNDER_WAY, *_PARTS, *_OF_THREADS})
        self._deep: set[int] = set()
        self._threads: dict[int, dict[int, bytes]] = {}
        self._named: dict[tuple[object, ...], bytes] = {}
        self._calls: dict[int, list[tuple[int, bytes]]] = {}
        self._syscalls: dict[int, bytes] = {}
        self._running: dict[int, bytes] = {}
        self._parts: dict[int, list[bytes]] = {}

    def take(self, chunk: bytes) -> None:
        """Take whole evicted records, in their order."""
        chunk = self._sieve.needed(chunk)
        words = memoryview(chunk).cast("I")
        places = range(0, len(chunk), RECORD_BYTES)
        kinds = chunk[_KIND_AT::RECORD_BYTES]
        syscalls, running = self._syscalls, self._running
        for at, tid, number, kind in zip(
            places, words[_TID_AT::_WORDS], words[_NUMBER_AT::_WORDS], kinds, strict=True
        ):
            if kind == SYSCALL_EXIT:
                syscalls.pop(tid, None)
            elif kind == SYSCALL_ENTER:
                syscalls[tid] = chunk[at : at + RECORD_BYTES]
            elif kind == CALL_ENTER:
                self._enter(tid, number, chunk[at : at + RECORD_BYTES])
            elif kind == CALL_RETURN:
                self._leave(tid, number, chunk[at : at + RECORD_BYTES])
            elif kind == SWITCH_IN:
                running[tid] = chunk[at : at + RECORD_BYTES]
            elif kind == SWITCH_OUT:
                running.pop(tid, None)
                if chunk[at + _A0_AT] & ENDED:
                    self._forget(tid)
            elif kind in _PARTS or kind == EVENT:
                by = teller(tid, int.from_bytes(chunk[at + _CPU_AT : at + _CPU_AT + 2], "little"))
                if kind == EVENT:
                    self._parts.pop(by, None)
                else:
                    self._parts.setdefault(by, []).append(chunk[at : at + RECORD_BYTES])
            elif kind == THREAD_END:
                self._forget(tid)
            elif kind in _OF_THREADS:
                self._meet(tid, kind, chunk[at : at + RECORD_BYTES])
        for tid in self._deep:
            del self._calls.get(tid, [])[:-OPEN_CALLS_MAX]  # the returns of some were lost
        self._deep.clear()

    def divide(self, chunk: bytes, start_ns: int) -> tuple[bytes, bytes]:
        """The records of a chunk before `start_ns`, and the others."""
        times = memoryview(chunk).cast("Q")[1 :: RECORD_BYTES // 8].tolist()
        if min(times, default=start_ns) >= start_ns:
            return b"", chunk
        return _joined(chunk, times, start_ns, True), _joined(chunk, times, start_ns, False)

    def carried(self) -> Carried:
        """The known records are calls that named handles, then names and ids of threads, as a thread's first
        line has its name.

        The others are open calls, open system calls, running threads, and parts of records that are still to
        come.
        """
        threads = (kept[kind] for kept in self._threads.values() for kind in _OF_THREADS if kind in kept)
        calls = (entry for entries in self._calls.values() for _, entry in entries)
        begun = [*self._running.values(), *self._syscalls.values(), *calls]
        begun.sort(key=lambda entry: RECORD.unpack_from(entry, len(entry) - RECORD_BYTES)[:2])  # time, tid
        parts = (part for by in sorted(self._parts) for part in self._parts[by])
        return Carried(b"".join([*self._named.values(), *threads]), b"".join([*begun, *parts]))

    def _enter(self, tid: int, number: int, record: bytes) -> None:
        if self._parts:
            record = b"".join(self._parts.pop(tid, ())) + record
        if number not in self._momentary:
            entries = self._calls.setdefault(tid, [])
            entries.append((number, record))
            if len(entries) > OPEN_CALLS_MAX:
                self._deep.add(tid)
        elif number in self._naming:
            self._name(record, b"")

    def _leave(self, tid: int, number: int, record: bytes) -> None:
        self._parts.pop(tid, None)
        entries = self._calls.get(tid, [])
        place = len(entries) - 1
        while place >= 0 and entries[place][0] != number:
            place -= 1
        if place < 0:
            return
        entry = entries[place][1]
        del entries[place:]  # calls inside it have lost their returns
        if not entries:
            del self._calls[tid]
        result = RECORD.unpack(record)[7] & 0xFFFFFFFF
        if number in self._naming and (not result or (number in self._making and result in MADE)):
            self._name(entry, record)

    def _name(self, entry: bytes, leave: bytes) -> None:
        """Keep the call that named a handle, instead of an older call that named it."""
        _, _, tgid, number, _, _, _, *words = RECORD.unpack_from(entry, len(entry) - RECORD_BYTES)
        # Communicators are counted, also those with the address of one that was destroyed.
        key = (tgid, number, *words, leave[_A0_AT:], len(self._named) if number in self._making else 0)
        self._named.pop(key, None)
        self._named[key] = entry + leave

    def _meet(self, tid: int, kind: int, record: bytes) -> None:
        kept = self._threads.get(tid)
        if kept is None:
            if len(self._threads) >= THREADS_MAX:
                self._forget(next(iter(self._threads)))
            kept = self._threads[tid] = {}
        elif kind == THREAD_NEW:
            kept.pop(THREAD_NAME, None)
        kept[kind] = record

    def _forget(self, tid: int) -> None:
        for of_thread in (self._threads, self._calls, self._syscalls, self._running, self._parts):
            of_thread.pop(tid, None)


def _joined(chunk: bytes, times: Iterable[int], start_ns: int, is_before: bool) -> bytes:
    return b"".join(
        chunk[at * RECORD_BYTES : (at + 1) * RECORD_BYTES]
        for at, ts_ns in enumerate(times)
        if (ts_ns < start_ns) == is_before
    )
