"""Matches calls with the work that they launched, by the numbers that profilers give both, process by
process.
"""

from __future__ import annotations

from typing import Final, TypeGuard

_CORRELATION_BITS: Final = 32
# A page has a bit for each of 64 Ki calls: whether it launched something. A capture has 10⁴ calls a second.
_PAGE_BITS, _PAGES_MAX = 16, 1 << 10
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
        page, bit = correlation >> _PAGE_BITS, correlation & ((1 << _PAGE_BITS) - 1)
        key = process if self._by_process else 0, page
        bits = self._pages.get(key)
        if bits is None:
            if len(self._pages) >= _PAGES_MAX:
                self._is_full = True
                return
            bits = self._pages[key] = bytearray(1 << (_PAGE_BITS - 3))
        bits[bit >> 3] |= 1 << (bit & 7)

    def of(self, process: int, correlation: object, *, is_call: bool) -> int | None:
        """The launch of a call that launched work, or of work; None where there is none."""
        if not _is_correlation(correlation):
            return None
        process = process if self._by_process else 0
        if is_call and not self._has_work(process, correlation):
            return None
        number = self._processes.get(process)
        if number is None:
            if len(self._processes) >= _PROCESSES_MAX:
                return None
            number = self._processes[process] = len(self._processes)
        return number << _CORRELATION_BITS | correlation

    def _has_work(self, process: int, correlation: int) -> bool:
        bits = self._pages.get((process, correlation >> _PAGE_BITS))
        if bits is None:
            return self._is_full
        bit = correlation & ((1 << _PAGE_BITS) - 1)
        return bool(bits[bit >> 3] >> (bit & 7) & 1)


def _is_correlation(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 1 << _CORRELATION_BITS
