"""Removes records that cancel each other from a chunk, in the native core, before Python reads the rest.

    ENTER a  ENTER b  RETURN b  RETURN a  SWITCH_IN  SWITCH_OUT  SWITCH_IN  ENTER c   →   SWITCH_IN  ENTER c

The remaining records lead to the same open calls as all of them. Without the core nothing is removed: a
record then takes 0.25 µs instead of 0.01 µs.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from tracepipe.hooks.hook import NAMING_EFFECTS, Probe, TracepointPlace
from tracepipe.native import library
from tracepipe.tracer.records.record import FUNCTION_KINDS, RECORD_BYTES

NEVER: Final = (1 << 63) - 1
"""A limit that no call exceeds."""
_IGNORED, _MOMENTARY, _NAMING = 1, 2, 4  # of records.c
_KINDS: Final = 32
_SYSCALLS: Final = 512


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
        self._roles = bytes(_role(probe) if i in wanted else _IGNORED for i, probe in enumerate(probes))
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
        if kind in FUNCTION_KINDS:
            by_function[number] += 1
    return by_kind, by_function


def _role(probe: Probe) -> int:
    is_momentary = not probe.hook.returns or isinstance(probe.place, TracepointPlace)
    return _MOMENTARY * is_momentary | _NAMING * (probe.hook.effect in NAMING_EFFECTS)
