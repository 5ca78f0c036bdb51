"""Numbers of processes and threads whose ids are texts, of flows, and of launches: profilers give a call and
the work that it launched the same number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from hashlib import blake2b
from heapq import heappop, heappush
from typing import Any, Final, TypeGuard

from tracepipe.event.model import FLOW_LIMIT, ID_LIMIT, RANGE_LIMIT, Problem
from tracepipe.event.origins import IDS_PER_HOST
from tracepipe.units import MADE_UP

LAUNCHES = re.compile(r"Launch|[Mm]emcpy|[Mm]emset|MemPrefetch|^urEnqueue(?!EventsWait)|AppendMemory")
"""Calls that put work on a stream, or on a queue of Intel's runtimes."""


def is_id(value: object) -> TypeGuard[int]:
    """Whether a value is a number that a process, a thread, a GPU or a block may have."""
    return type(value) is int and 0 <= value <= ID_LIMIT


def is_size(value: object) -> TypeGuard[list[int]]:
    """Whether a value is the size of a grid or a block: three numbers."""
    return type(value) is list and len(value) == 3 and all(map(is_id, value))


class Ids:
    """Numbers of processes and threads. An id that is not a valid number gets the highest free number, and
    its text becomes the name.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._names: dict[int, str] = {}
        self._used: dict[tuple[int, int | None], None] = {}
        self.process_of: dict[int, int] = {}
        """The process of a thread whose ids are numbers, as far as they are kept."""
        self._next, self._next_real = ID_LIMIT, _REAL_LIMIT
        self._text_length = 0
        self._is_full = False

    def number(self, id: object) -> int | None:
        """The number of an id, None where there is none."""
        if is_id(id):
            return id
        if id is None:
            return None
        if type(id) is str and id.isascii() and id.isdigit() and len(id) < 11 and int(id) <= ID_LIMIT:
            return int(id)
        if type(id) is float and id.is_integer():  # as columns with gaps are written
            return self.number(int(id))
        key = id if type(id) is int or type(id) is str else json.dumps(id, default=str)
        return self.number_for(key, is_real=isinstance(id, tuple))

    def thread(self, event: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Add the numbers of an event's process and thread to `fields`."""
        pid, tid = event.get("pid"), event.get("tid")
        if type(pid) is int and type(tid) is int and 0 <= pid <= ID_LIMIT and 0 <= tid <= ID_LIMIT:
            fields["pid"], fields["tid"] = pid, tid
            if len(self.process_of) < _IDS_MAX:
                self.process_of[tid] = pid
            return fields
        if (process := self.number(pid)) is not None:
            fields["pid"] = process
            if process in self._names:
                self._used[process, None] = None
        if (thread := self.number(tid)) is not None:
            fields["tid"] = thread
            if thread in self._names and process is not None and len(self._used) < 2 * _IDS_MAX:
                self._used[process, thread] = None
        return fields

    def text(self, number: int | None) -> str:
        """The id that has a number."""
        return self._names.get(number, str(number)) if number is not None else ""

    def stay_below(self, number: int) -> None:
        """Use only lower numbers from now on, as the higher ones are in use."""
        self._next = min(self._next, number - 1)

    def named(self) -> Iterator[tuple[tuple[int, int | None], str]]:
        """The processes and threads that got such numbers, with their names."""
        for process, thread in self._used:
            yield (process, thread), self._names[process if thread is None else thread]

    def number_for(self, key: int | str, *, is_real: bool = False) -> int:
        """The number for a process or thread whose id is not one of the system, or is that of another one
        (`is_real`).
        """
        number = self._numbers.get(key)
        if number is None:
            name = str(key)
            if len(self._numbers) >= _IDS_MAX or self._text_length + len(name) > _TEXT_MAX:
                self._is_full = True
                return self._next
            self._text_length += len(name)
            number = self._next_real if is_real else self._next
            self._numbers[key] = number
            self._names[number] = name
            self._next, self._next_real = self._next - (not is_real), self._next_real - is_real
        return number

    def problems(self) -> Iterator[Problem]:
        """A problem if there are more ids than can be distinguished."""
        if self._is_full:
            words = (
                "too many processes and threads have ids that are not numbers: some of them are shown as one"
            )
            yield Problem(0, "", words, skipped=False)


# Ids that are no pids of any host, and are shown as such: a viewer has no process without one.
_REAL_LIMIT: Final = MADE_UP // IDS_PER_HOST * IDS_PER_HOST - 1
_IDS_MAX: Final = 1 << 16
_TEXT_MAX: Final = 1 << 22
_ENCODER: Final = json.JSONEncoder(default=str)


def flow_text(*parts: object) -> bytes:
    """The key from which the number of a flow is made."""
    return _ENCODER.encode(parts).encode("utf-8", "replace")


def flow_number(*parts: object) -> int:
    """The number of a flow, by the parts of its key, which all of its ends share. `flow_number.h` of the core
    does the same.
    """
    text = flow_text(*parts)
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") & FLOW_LIMIT


# Tools give the streams of no program numbers below 0, which some write as numbers of 64 bits without a sign.
_BELOW_0: Final = 10**9


NO_STREAMS: Final = (_BELOW_0 - 1, (1 << 32) - 1)
"""The numbers of -1, which tools give to what belongs to no stream."""


def stream_number(stream: int) -> int | None:
    """The number of a stream: 999,999,999 for -1, as for 2⁶⁴ - 1. None where there can be no such stream."""
    stream -= (1 << 64) * (1 << 63 <= stream < 1 << 64)
    stream += _BELOW_0 * (-_BELOW_0 // 2 <= stream < 0)
    return stream if 0 <= stream < 1 << 62 else None


class RangeNumbers:
    """The numbers of the open ranges of a process and a domain. The lowest free number is used next."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._count = 0

    def lowest(self) -> int | None:
        """The lowest free number, which is used from now on; None where all are used."""
        if self._free:
            return heappop(self._free)
        if self._count > RANGE_LIMIT:
            return None
        self._count += 1
        return self._count - 1

    def free(self, number: int) -> None:
        """Free a number again."""
        heappush(self._free, number)


_CORRELATION_BITS: Final = 32
# A page has a bit for each of 64 Ki calls: whether it launched something. A capture has 10⁴ calls a second.
_PAGE_BITS, _PAGE_MASK, _PAGES_MAX = 16, (1 << 16) - 1, 1 << 10
_PROCESSES_MAX: Final = 1 << 14


class Launches:
    """Gives launches their numbers: that of the call, with the process above it, counted from 0. `note` must
    be called for all work first. Without `by_process`, only the call's number is used.
    """

    def __init__(self, *, by_process: bool = True) -> None:
        self._by_process = by_process
        self._pages: dict[tuple[int, int], bytearray] = {}
        self._processes: dict[int, int] = {}
        self._is_full = False

    def note(self, process: int, correlation: object) -> None:
        """Note that a call with that number launched work."""
        if not _is_correlation(correlation):
            return
        page, bit = correlation >> _PAGE_BITS, correlation & _PAGE_MASK
        key = process if self._by_process else 0, page
        bits = self._pages.get(key)
        if bits is None:
            if len(self._pages) >= _PAGES_MAX:
                self._is_full = True
                return
            bits = self._pages[key] = bytearray(1 << (_PAGE_BITS - 3))
        bits[bit >> 3] |= 1 << (bit & 7)

    def launch(self, process: int, correlation: object, *, is_call: bool) -> int | None:
        """The launch of a call that launched work, or of work; None where there is none."""
        if not _is_correlation(correlation):
            return None
        process = process if self._by_process else 0
        if is_call:
            bits, bit = self._pages.get((process, correlation >> _PAGE_BITS)), correlation & _PAGE_MASK
            has_work = self._is_full if bits is None else bits[bit >> 3] >> (bit & 7) & 1
            if not has_work:
                return None
        number = self._processes.get(process)
        if number is None:
            if len(self._processes) >= _PROCESSES_MAX:
                return None
            number = self._processes[process] = len(self._processes)
        return number << _CORRELATION_BITS | correlation


def _is_correlation(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << _CORRELATION_BITS
