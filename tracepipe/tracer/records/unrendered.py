"""Reads records that are not rendered: counts them, finds long calls, and keeps what later records need.

The native core first removes the records that cancel each other from a chunk, before Python reads the rest:

    ENTER a  ENTER b  RETURN b  RETURN a  SWITCH_IN  SWITCH_OUT  SWITCH_IN  ENTER c   →   SWITCH_IN  ENTER c

The remaining records lead to the same open calls as all of them. Without the core nothing is removed: a
record then takes 0.25 µs instead of 0.01 µs.

A recording that keeps only its last records needs names, ids, and what was still open from evicted ones. It
is kept as unchanged records: a decoder that takes them first has the same state as one that took all records.

    evicted:  THREAD_NAME  TEXT CALL_ENTER  SYSCALL_ENTER SYSCALL_EXIT  CALL_ENTER CALL_RETURN │ kept: …
    carried:  THREAD_NAME  TEXT CALL_ENTER                                                     │
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple, Protocol

from tracepipe.errors import TracepipeError
from tracepipe.hooks.hook import NAMING_EFFECTS, Probe
from tracepipe.hooks.names import did_you_mean
from tracepipe.native import library
from tracepipe.tracer.records import record
from tracepipe.tracer.records.calls import MADE, teller
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES
from tracepipe.tracer.records.syscalls import ENDED
from tracepipe.units import duration_ns

NEVER: Final = (1 << 63) - 1
"""A limit that no call exceeds."""
_IGNORED, _MOMENTARY, _NAMING = 1, 2, 4  # of records.c
_KINDS: Final = 32
_SYSCALLS: Final = 512

CALL: Final = "call"
SYSCALL: Final = "syscall"
KERNEL: Final = "kernel"
NVTX: Final = "nvtx"
SpanKind = Literal["call", "syscall", "kernel", "nvtx"]

THREADS_MAX = 1 << 16
"""The most threads whose names and ids are carried, as not every end is seen: the oldest are forgotten."""
_WORDS = RECORD_BYTES // 4  # of a record, as u32; record.py draws its layout
_TID_AT, _NUMBER_AT, _KIND_AT, _CPU_AT, _A0_AT = 4, 6, 28, 30, 32
# In the order in which a decoder needs them.
_OF_THREADS = (record.THREAD_IDS, record.THREAD_NEW, record.THREAD_NAME)
_PARTS = frozenset({record.MORE, record.TEXT, record.SERVED})  # precede the record that they belong to
_UNDER_WAY = {
    record.CALL_ENTER, record.CALL_RETURN, record.SYSCALL_ENTER, record.SYSCALL_EXIT,
    record.SWITCH_IN, record.SWITCH_OUT, record.EVENT, record.THREAD_END,
}  # fmt: skip


class Sieve:
    """Keeps the records of some kinds, as far as they are needed.

    Calls of the functions in `limits_ns` are needed if they took longer than that; calls of other functions
    never are. None: only open calls are needed. The same holds for system calls, by their numbers.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        kinds: Collection[int],
        limits_ns: Mapping[int, int] | None = None,
        syscall_limits_ns: Mapping[int, int] | None = None,
    ) -> None:
        self._core = library()
        self._kinds = sum(1 << kind for kind in kinds)
        wanted = range(len(probes)) if limits_ns is None else limits_ns
        roles = bytearray([_IGNORED]) * len(probes)
        for number, probe in enumerate(probes):
            if number in wanted:
                roles[number] = _MOMENTARY * (not probe.is_span)
                roles[number] |= _NAMING * (probe.hook.effect in NAMING_EFFECTS)
        self._roles = bytes(roles)
        limits_ns, syscall_limits_ns = limits_ns or {}, syscall_limits_ns or {}
        self._limits_ns = array("q", [limits_ns.get(i, NEVER) for i in range(len(probes))]).tobytes()
        self._syscall_limits_ns = array(
            "q", [syscall_limits_ns.get(number, NEVER) for number in range(_SYSCALLS)]
        ).tobytes()

    def needed(self, chunk: bytes) -> bytes:
        """The needed records of a chunk, in order."""
        count = len(chunk) // RECORD_BYTES
        if self._core is None or not count:
            return chunk
        places = array("i", bytes(4 * count))
        found = self._core.tp_records_needed(
            chunk,
            count,
            self._kinds,
            self._roles,
            self._limits_ns,
            len(self._roles),
            self._syscall_limits_ns,
            _SYSCALLS,
            places.buffer_info()[0],
        )
        if not 0 <= found < count:  # without memory, or if all are needed
            return chunk
        return b"".join(
            [chunk[place * RECORD_BYTES : (place + 1) * RECORD_BYTES] for place in places[:found]]
        )


def kinds_and_functions(chunk: bytes, functions: int) -> tuple[Sequence[int], Sequence[int]]:
    """The number of records of each kind, and of each function (its entries, returns and hits)."""
    core, kinds = library(), chunk[28::RECORD_BYTES]
    by_kind, by_function = array("q", bytes(8 * _KINDS)), array("q", bytes(8 * functions))
    if core is not None:
        core.tp_records_count(
            chunk, len(kinds), functions, by_kind.buffer_info()[0], by_function.buffer_info()[0]
        )
        return by_kind, by_function
    numbers = memoryview(chunk).cast("I")[6 :: RECORD_BYTES // 4]
    for number, kind in zip(numbers, kinds, strict=True):
        by_kind[kind] += 1
        if kind in record.FUNCTION_KINDS:
            by_function[number] += 1
    return by_kind, by_function


class Span(NamedTuple):
    """A call of a function, a system call, a kernel on a GPU or a range of NVTX. `is_over`: it has ended."""

    name: str
    length_ns: int
    kind: SpanKind = CALL
    is_over: bool = True


FORMS: Final[dict[SpanKind, str]] = {
    CALL: "FUNCTION > 50ms",
    SYSCALL: "syscall:NAME > 50ms",
    NVTX: "nvtx:RANGE > 200ms",
    KERNEL: "kernel:REGEX > 5ms",
}
"""Kind → its form. A function may also be written as `call:FUNCTION`."""
_KIND: Final = re.compile(r"([A-Za-z]\w*):(?!:)\s*(.*)", re.DOTALL)
_HINT: Final = f"Write {', '.join(FORMS.values())}; names are patterns."


@dataclass(frozen=True, slots=True)
class Condition:
    """True of a span of this kind, with a fitting name, that took longer than the limit."""

    text: str
    kind: SpanKind
    pattern: str
    limit_ns: int

    def fits(self, name: str, kind: SpanKind) -> bool:
        """Whether the condition applies to a span of this name and kind."""
        if kind != self.kind:
            return False
        if kind == KERNEL:
            return bool(re.search(self.pattern, name))
        return name == self.pattern or fnmatchcase(name, self.pattern)


class Conditions:
    """All given conditions. Raises TracepipeError for one that cannot be understood."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.all = [_condition(text) for text in texts]
        self.kinds = frozenset(one.kind for one in self.all)

    def limit_ns(self, name: str, kind: SpanKind) -> int | None:
        """The least limit that applies to a span of this name and kind; None if no condition applies."""
        return min((one.limit_ns for one in self.all if one.fits(name, kind)), default=None)


def _condition(text: str) -> Condition:
    named, sign, time = text.rpartition(">")
    if not sign:
        raise _refused(text, "it has no '>' and time")
    kind: SpanKind = CALL
    name = named.strip()
    if found := _KIND.fullmatch(name):
        word, name = found[1], found[2]
        if word not in FORMS:
            hint = did_you_mean(word, FORMS)
            raise _refused(text, f"{word!r} is not a known condition", hint)
        kind = word
    if not name:
        raise _refused(text, "there is no name before '>'")
    try:
        limit_ns = duration_ns(time.strip())
    except TracepipeError as error:
        raise _refused(text, error.message.rstrip("."), error.hint) from None
    if kind == KERNEL:
        try:
            re.compile(name)
        except re.error as error:
            raise _refused(text, f"{name!r} is not a regular expression: {error}") from None
    return Condition(text.strip(), kind, name, limit_ns)


def _refused(text: str, why: str, hint: str = "") -> TracepipeError:
    return TracepipeError(f"--when {text!r} cannot be understood: {why}.", hint or _HINT)


class RecordSpans:
    """Finds long calls and system calls in records of probes.bpf.c."""

    def __init__(
        self,
        probes: Sequence[Probe],
        wanted: Conditions,
        syscalls: Mapping[int, str],
        is_there: Callable[[int], bool],
    ) -> None:
        """`is_there`: whether a thread still exists, which records do not always show."""
        self._is_there = is_there
        # Keys are numbers of functions and ids of threads; ~number and ~tid of system calls.
        self._name_of = {n: probe.name for n, probe in enumerate(probes)}
        self._name_of |= {~number: name for number, name in syscalls.items()}
        limits_ns: dict[int, int] = {}
        for number, probe in enumerate(probes):
            found_ns = [wanted.limit_ns(name, CALL) for name in {probe.name, probe.symbol}]
            known_ns = [limit_ns for limit_ns in found_ns if limit_ns is not None]
            if known_ns and probe.is_span:
                limits_ns[number] = min(known_ns)
        of_syscalls_ns = {
            number: limit_ns
            for number, name in syscalls.items()
            if (limit_ns := wanted.limit_ns(name, SYSCALL)) is not None
        }
        self._limits_ns = limits_ns | {~number: limit_ns for number, limit_ns in of_syscalls_ns.items()}
        self._kinds = {record.CALL_ENTER, record.CALL_RETURN} if limits_ns else set()
        self._kinds |= {record.SYSCALL_ENTER, record.SYSCALL_EXIT} if of_syscalls_ns else set()
        self._sieve = Sieve(probes, {*self._kinds, record.THREAD_END}, limits_ns, of_syscalls_ns)
        self._open: dict[int, list[tuple[int, int]]] = {}
        self._reported: set[tuple[int, int, int]] = set()

    def ended(self, chunk: bytes) -> Iterator[Span]:
        """The spans that ended in a chunk and exceed their limit."""
        if not self._kinds:
            return
        chunk = self._sieve.needed(chunk)
        words, times = memoryview(chunk).cast("I"), memoryview(chunk).cast("Q")[1 :: RECORD_BYTES // 8]
        deep = set()
        for tid, number, kind, ts_ns in zip(
            words[_TID_AT::_WORDS],
            words[_NUMBER_AT::_WORDS],
            chunk[_KIND_AT::RECORD_BYTES],
            times,
            strict=True,
        ):
            is_syscall = kind in (record.SYSCALL_ENTER, record.SYSCALL_EXIT)
            key, who = (~number, ~tid) if is_syscall else (number, tid)
            if kind == record.THREAD_END:
                self._forget(tid, 0)
                self._forget(~tid, 0)
            if kind not in self._kinds or not (is_syscall or key in self._limits_ns):
                continue
            if is_syscall and kind == record.SYSCALL_ENTER:
                self._forget(who, 0)  # the exit of another one was lost
            calls = self._open.setdefault(who, [])
            if kind in (record.CALL_ENTER, record.SYSCALL_ENTER):
                calls.append((key, ts_ns))
                if len(calls) > OPEN_CALLS_MAX:
                    deep.add(who)
                continue
            place = len(calls) - 1
            while place >= 0 and calls[place][0] != key and not is_syscall:
                place -= 1
            entered, began_ns = calls[place] if place >= 0 else (None, 0)
            if entered is not None or not calls:
                self._forget(who, max(place, 0))  # those inside it have lost their returns
            if entered == key and ts_ns - began_ns > self._limits_ns.get(key, NEVER):
                yield Span(self._name_of[key], ts_ns - began_ns, SYSCALL if is_syscall else CALL)
        for who in deep:
            if calls := self._open.get(who, []):
                self._reported.difference_update((who, *call) for call in calls[:-OPEN_CALLS_MAX])
                del calls[:-OPEN_CALLS_MAX]  # the returns of some were lost

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """The open spans that exceed their limit, each reported once."""
        gone = set()
        for who, calls in self._open.items():
            tid = max(who, ~who)
            for key, began_ns in calls:
                length_ns, call = now_ns - began_ns, (who, key, began_ns)
                if length_ns <= self._limits_ns.get(key, NEVER) or call in self._reported:
                    continue
                if not self._is_there(tid):
                    gone.add(tid)
                    continue
                self._reported.add(call)
                yield Span(self._name_of[key], length_ns, SYSCALL if key < 0 else CALL, is_over=False)
        for tid in gone:
            self._forget(tid, 0)
            self._forget(~tid, 0)

    def _forget(self, who: int, place: int) -> None:
        """Forget open calls from the one at `place` inwards."""
        calls = self._open.get(who, [])
        self._reported.difference_update((who, *call) for call in calls[place:])
        del calls[place:]
        if not calls:
            self._open.pop(who, None)


class Carried(NamedTuple):
    """The records that a decoder begins with."""

    known: bytes = b""
    """Records that make no line: names and ids."""
    under_way: bytes = b""
    """Records of what has begun and not ended, in the order in which it began."""


class Carry(Protocol):
    """Takes evicted records, and keeps what the following ones need. Another carry that takes what this one
    carried, the known records first, carries the same.
    """

    def add(self, chunk: bytes) -> None:
        """Take whole evicted records, in their order."""

    def divide(self, chunk: bytes, start_ns: int) -> tuple[bytes, bytes]:
        """The records of a chunk before `start_ns`, and the others."""

    def carried(self) -> Carried:
        """The records that are needed now."""


class RecordCarry:
    """Carries records of probes.bpf.c."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self._naming = frozenset(i for i, probe in enumerate(probes) if probe.hook.effect in NAMING_EFFECTS)
        self._making = frozenset(i for i, probe in enumerate(probes) if probe.hook.effect == "communicator")
        self._momentary = frozenset(i for i, probe in enumerate(probes) if not probe.is_span)
        self._sieve = Sieve(probes, {*_UNDER_WAY, *_PARTS, *_OF_THREADS})
        self._deep: set[int] = set()
        self._threads = OrderedDict[int, dict[int, bytes]]()
        self._named: dict[tuple[object, ...], bytes] = {}
        self._calls: dict[int, list[tuple[int, bytes]]] = {}
        self._syscalls: dict[int, bytes] = {}
        self._running: dict[int, bytes] = {}
        self._parts: dict[int, list[bytes]] = {}

    def add(self, chunk: bytes) -> None:
        chunk = self._sieve.needed(chunk)
        words = memoryview(chunk).cast("I")
        places = range(0, len(chunk), RECORD_BYTES)
        kinds = chunk[_KIND_AT::RECORD_BYTES]
        syscalls, running = self._syscalls, self._running
        for at, tid, number, kind in zip(
            places, words[_TID_AT::_WORDS], words[_NUMBER_AT::_WORDS], kinds, strict=True
        ):
            if kind == record.SYSCALL_EXIT:
                syscalls.pop(tid, None)
            elif kind == record.SYSCALL_ENTER:
                syscalls[tid] = chunk[at : at + RECORD_BYTES]
            elif kind == record.CALL_ENTER:
                self._enter(tid, number, chunk[at : at + RECORD_BYTES])
            elif kind == record.CALL_RETURN:
                self._leave(tid, number, chunk[at : at + RECORD_BYTES])
            elif kind == record.SWITCH_IN:
                running[tid] = chunk[at : at + RECORD_BYTES]
            elif kind == record.SWITCH_OUT:
                running.pop(tid, None)
                if chunk[at + _A0_AT] & ENDED:
                    self._forget(tid)
            elif kind in _PARTS or kind == record.EVENT:
                by = teller(tid, int.from_bytes(chunk[at + _CPU_AT : at + _CPU_AT + 2], "little"))
                if kind == record.EVENT:
                    self._parts.pop(by, None)
                else:
                    self._parts.setdefault(by, []).append(chunk[at : at + RECORD_BYTES])
            elif kind == record.THREAD_END:
                self._forget(tid)
            elif kind in _OF_THREADS:
                known = self._threads.get(tid)
                if known is None:
                    if len(self._threads) >= THREADS_MAX:
                        self._forget(next(iter(self._threads)))
                    known = self._threads[tid] = {}
                elif kind == record.THREAD_NEW:
                    known.pop(record.THREAD_NAME, None)
                known[kind] = chunk[at : at + RECORD_BYTES]
        for tid in self._deep:
            del self._calls.get(tid, [])[:-OPEN_CALLS_MAX]  # the returns of some were lost
        self._deep.clear()

    def divide(self, chunk: bytes, start_ns: int) -> tuple[bytes, bytes]:
        times = memoryview(chunk).cast("Q")[1 :: RECORD_BYTES // 8].tolist()
        if min(times, default=start_ns) >= start_ns:
            return b"", chunk
        before, after = list[bytes](), list[bytes]()
        for at, ts_ns in enumerate(times):
            (before if ts_ns < start_ns else after).append(chunk[at * RECORD_BYTES : (at + 1) * RECORD_BYTES])
        return b"".join(before), b"".join(after)

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

    def _enter(self, tid: int, number: int, content: bytes) -> None:
        if self._parts:
            content = b"".join(self._parts.pop(tid, ())) + content
        if number not in self._momentary:
            entries = self._calls.setdefault(tid, [])
            entries.append((number, content))
            if len(entries) > OPEN_CALLS_MAX:
                self._deep.add(tid)
        elif number in self._naming:
            self._name(content, b"")

    def _leave(self, tid: int, number: int, content: bytes) -> None:
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
        result = RECORD.unpack(content)[7] & 0xFFFFFFFF
        if number in self._naming and (not result or (number in self._making and result in MADE)):
            self._name(entry, content)

    def _name(self, entry: bytes, leave: bytes) -> None:
        """Keep the call that named a handle, instead of an older call that named it."""
        _, _, tgid, number, _, _, _, *words = RECORD.unpack_from(entry, len(entry) - RECORD_BYTES)
        # Communicators are counted, also those with the address of one that was destroyed.
        key = (tgid, number, *words, leave[_A0_AT:], len(self._named) if number in self._making else 0)
        self._named.pop(key, None)
        self._named[key] = entry + leave

    def _forget(self, tid: int) -> None:
        for of_thread in (self._threads, self._calls, self._syscalls, self._running, self._parts):
            of_thread.pop(tid, None)
