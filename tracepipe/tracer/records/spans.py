"""Finds long calls in records as they arrive, without rendering the records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from tracepipe.hooks.hook import Probe, TracepointPlace
from tracepipe.tracer.records.effects import OPEN_CALLS_MAX
from tracepipe.tracer.records.record import (
    CALL_ENTER,
    CALL_RETURN,
    RECORD_BYTES,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    THREAD_END,
)
from tracepipe.tracer.records.sieve import Sieve

CALL: Final = "call"
SYSCALL: Final = "syscall"
KERNEL: Final = "kernel"
NVTX: Final = "nvtx"
_KIND_AT = 28


class Span(NamedTuple):
    """A call of a function, a system call, a kernel on a GPU or a range of NVTX. `is_over`: it has ended."""

    name: str
    length_ns: int
    kind: str = CALL
    is_over: bool = True


class Wanted(Protocol):
    """The calls and kernels that are looked for."""

    @property
    def kinds(self) -> Collection[str]:
        """The kinds that are looked for; others can be ignored."""
        ...

    def limit_ns(self, name: str, kind: str) -> int | None:
        """The duration beyond which a span with this name is reported; None: it never is."""
        ...


class SpanReader(Protocol):
    """Finds long spans among the records of a recording, from its first record on."""

    def take(self, chunk: bytes) -> Iterator[Span]:
        """The spans that ended in a chunk and exceed their limit."""
        ...

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """The open spans that exceed their limit, each reported once."""
        ...


class RecordSpans:
    """Finds long calls and system calls among records of probes.bpf.c. `names` has the names of the functions
    that it looks for.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        wanted: Wanted,
        syscalls: Mapping[int, str],
        is_there: Callable[[int], bool],
    ) -> None:
        """`is_there`: whether a thread still exists, which records do not always show."""
        self.names: set[str] = set()
        self._probes, self._syscalls, self._is_there = probes, syscalls, is_there
        self._limits_ns: dict[int, int] = {}
        for number, probe in enumerate(probes):
            limits_ns = [wanted.limit_ns(name, CALL) for name in {probe.name, probe.symbol}]
            found_ns = [limit_ns for limit_ns in limits_ns if limit_ns is not None]
            if found_ns and probe.hook.returns and not isinstance(probe.place, TracepointPlace):
                self._limits_ns[number] = min(found_ns)
                self.names.add(probe.name)
        of_syscalls = {number: wanted.limit_ns(name, SYSCALL) for number, name in syscalls.items()}
        self._syscall_limits_ns = {n: limit_ns for n, limit_ns in of_syscalls.items() if limit_ns is not None}
        kinds = [CALL_ENTER, CALL_RETURN] if self._limits_ns else []
        kinds += [SYSCALL_ENTER, SYSCALL_EXIT] if self._syscall_limits_ns else []
        looked_at = {*kinds, THREAD_END}
        self._sieve = Sieve(probes, looked_at, self._limits_ns, self._syscall_limits_ns) if kinds else None
        self._open: dict[int, list[tuple[int, int]]] = {}
        self._in_syscall: dict[int, tuple[int, int]] = {}
        self._reported: set[tuple[int, int, int]] = set()
        self._deep: set[int] = set()

    def take(self, chunk: bytes) -> Iterator[Span]:
        """The spans that ended in a chunk and exceed their limit."""
        if self._sieve is None:
            return
        chunk = self._sieve.needed(chunk)
        words, kinds = memoryview(chunk).cast("I"), chunk[_KIND_AT::RECORD_BYTES]
        functions, syscalls = self._limits_ns, self._syscall_limits_ns
        for at, number in enumerate(words[6 :: RECORD_BYTES // 4]):
            kind = kinds[at]
            if kind == THREAD_END:
                self._end(words[at * RECORD_BYTES // 4 + 4])
                continue
            is_call = kind in (CALL_ENTER, CALL_RETURN) and number in functions
            if not is_call and not (kind in (SYSCALL_ENTER, SYSCALL_EXIT) and syscalls):
                continue
            place = at * RECORD_BYTES
            ts_ns = int.from_bytes(chunk[place + 8 : place + 16], "little")
            tid = words[place // 4 + 4]
            span = None
            if kind == CALL_ENTER:
                self._enter(tid, number, ts_ns)
            elif kind == CALL_RETURN:
                span = self._leave(tid, number, ts_ns)
            elif kind == SYSCALL_ENTER:
                self._in_syscall[tid] = number, ts_ns
            else:
                span = self._leave_syscall(tid, number, ts_ns)
            if span is not None:
                yield span
        for tid in self._deep:
            if calls := self._open.get(tid):
                self._forget(tid, calls, slice(0, -OPEN_CALLS_MAX))  # the returns of some were lost
        self._deep.clear()

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """The open spans that exceed their limit, each reported once."""
        gone = set()
        for tid, number, began_ns, is_call in self._begun():
            limit_ns = (self._limits_ns if is_call else self._syscall_limits_ns).get(number)
            key = tid, number if is_call else ~number, began_ns
            if limit_ns is None or now_ns - began_ns <= limit_ns or key in self._reported:
                continue
            if not self._is_there(tid):
                gone.add(tid)
                continue
            self._reported.add(key)
            name = self._probes[number].name if is_call else self._syscalls[number]
            yield Span(name, now_ns - began_ns, CALL if is_call else SYSCALL, is_over=False)
        for tid in gone:
            self._end(tid)

    def _begun(self) -> Iterator[tuple[int, int, int, bool]]:
        for tid, calls in self._open.items():
            for number, began_ns in calls:
                yield tid, number, began_ns, True
        for tid, (number, began_ns) in self._in_syscall.items():
            yield tid, number, began_ns, False

    def _enter(self, tid: int, number: int, ts_ns: int) -> None:
        calls = self._open.setdefault(tid, [])
        calls.append((number, ts_ns))
        if len(calls) > OPEN_CALLS_MAX:
            self._deep.add(tid)

    def _leave(self, tid: int, number: int, ts_ns: int) -> Span | None:
        calls = self._open.get(tid, [])
        place = next((at for at in reversed(range(len(calls))) if calls[at][0] == number), None)
        if place is None:
            return None
        began_ns = calls[place][1]
        self._forget(tid, calls, slice(place, None))  # those inside it have lost their returns
        if not calls:
            del self._open[tid]
        length_ns = ts_ns - began_ns
        return Span(self._probes[number].name, length_ns) if length_ns > self._limits_ns[number] else None

    def _leave_syscall(self, tid: int, number: int, ts_ns: int) -> Span | None:
        entered, began_ns = self._in_syscall.pop(tid, (-1, 0))
        self._reported.discard((tid, ~entered, began_ns))
        limit_ns = self._syscall_limits_ns.get(number)
        if entered != number or limit_ns is None or ts_ns - began_ns <= limit_ns:
            return None
        return Span(self._syscalls[number], ts_ns - began_ns, SYSCALL)

    def _end(self, tid: int) -> None:
        """Forget the open calls of a thread that has ended."""
        number, began_ns = self._in_syscall.pop(tid, (0, 0))
        self._reported.discard((tid, ~number, began_ns))
        self._forget(tid, self._open.pop(tid, []), slice(None))

    def _forget(self, tid: int, calls: list[tuple[int, int]], which: slice) -> None:
        self._reported.difference_update((tid, *entered) for entered in calls[which])
        del calls[which]
