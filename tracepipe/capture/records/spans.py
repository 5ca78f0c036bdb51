"""How long calls took, seen in records as they come: nothing else is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tracepipe.capture.records.effects import OPEN_CALLS_MAX
from tracepipe.capture.records.record import CALL_ENTER, CALL_RETURN, RECORD_BYTES
from tracepipe.capture.records.sieve import Sieve
from tracepipe.hooks.hook import Probe, TracepointPlace

_KIND_AT = 28


class Span(NamedTuple):
    """A call of a function or, with `is_kernel`, a kernel on a GPU. `is_over`: it has ended."""

    name: str
    length_ns: int
    is_kernel: bool = False
    is_over: bool = True


Wanted = Callable[[str, bool], int | None]
"""Name, and whether it is a kernel's → how long one must take to be of interest; None: never."""


class SpanReader(Protocol):
    """Finds what took long among the records of a recording, from the first one on."""

    def take(self, chunk: bytes) -> Iterator[Span]:
        """What ended in a chunk and took longer than is wanted of it."""
        ...

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """What has not ended and lasts longer than is wanted of it, each once."""
        ...


class RecordSpans:
    """Finds calls among records of probes.bpf.c. `names` has those of the functions that are looked at."""

    def __init__(self, probes: Sequence[Probe], wanted: Wanted) -> None:
        self.names: set[str] = set()
        self._limits_ns: dict[int, int] = {}
        self._probes = probes
        self._open: dict[int, list[tuple[int, int]]] = {}
        self._reported: set[tuple[int, int, int]] = set()
        self._deep: set[int] = set()
        for number, probe in enumerate(probes):
            limits_ns = [wanted(name, False) for name in {probe.name, probe.symbol}]
            found_ns = [limit_ns for limit_ns in limits_ns if limit_ns is not None]
            if found_ns and probe.hook.returns and not isinstance(probe.place, TracepointPlace):
                self._limits_ns[number] = min(found_ns)
                self.names.add(probe.name)
        self._sieve = Sieve(probes, {CALL_ENTER, CALL_RETURN}, self._limits_ns)

    def take(self, chunk: bytes) -> Iterator[Span]:
        """What ended in a chunk and took longer than is wanted of it."""
        if not self._limits_ns:
            return
        chunk = self._sieve.needed(chunk)
        words, kinds = memoryview(chunk).cast("I"), chunk[_KIND_AT::RECORD_BYTES]
        looked_at = self._limits_ns
        for at, number in enumerate(words[6 :: RECORD_BYTES // 4]):
            if number in looked_at and kinds[at] in (CALL_ENTER, CALL_RETURN):
                place = at * RECORD_BYTES
                ts_ns = int.from_bytes(chunk[place + 8 : place + 16], "little")
                tid = words[place // 4 + 4]
                if kinds[at] == CALL_ENTER:
                    self._enter(tid, number, ts_ns)
                elif (span := self._leave(tid, number, ts_ns)) is not None:
                    yield span
        for tid in self._deep:
            if calls := self._open.get(tid):
                self._forget(tid, calls, slice(0, -OPEN_CALLS_MAX))  # the returns of some were lost
        self._deep.clear()

    def under_way(self, now_ns: int) -> Iterator[Span]:
        """What has not ended and lasts longer than is wanted of it, each once."""
        for tid, calls in self._open.items():
            for number, began_ns in calls:
                key = tid, number, began_ns
                if now_ns - began_ns > self._limits_ns[number] and key not in self._reported:
                    self._reported.add(key)
                    yield Span(self._probes[number].name, now_ns - began_ns, is_over=False)

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

    def _forget(self, tid: int, calls: list[tuple[int, int]], which: slice) -> None:
        self._reported.difference_update((tid, *entered) for entered in calls[which])
        del calls[which]
