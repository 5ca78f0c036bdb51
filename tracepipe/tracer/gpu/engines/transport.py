"""Parses the records of a channel, which `native/transport.h` describes, and bounds what they can cause.

A traced process wrote them, so a payload may be anything: `records` takes what `Channel.collect` checked. A
record with impossible contents raises Malformed, and one for which there is no memory raises Crowded. Both
are skipped and counted, and the counts become losses in the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

from tracepipe.event.model import COUNT_LIMIT, ID_LIMIT, TIME_LIMIT_NS

INJECTION_VARIABLE: Final = "CUDA_INJECTION64_PATH"
"""The variable that names the library which the CUDA driver loads into a program."""
NVTX_VARIABLE: Final = "NVTX_INJECTION64_PATH"
"""The variable that names the library which NVTX loads into a program."""


class Kind(IntEnum):
    """Kinds of records that several libraries write. The streams have enums of their own kinds."""

    NAME = 1
    GPU = 2
    CLOCK = 3
    NOTE = 4
    STACK = 5
    FRAME = 6
    STACK_BEYOND = 7
    SAMPLE = 64
    """A sample of GPU counters. The capture makes it (`counters.py`), not a library."""


NAME: Final = struct.Struct("<Q")
"""The number of a name in its process; the name follows."""
GPU: Final = struct.Struct("<10I16s")
"""index, SMs, major, minor, clock in kHz, then the most that an SM holds: warps, blocks, registers, bytes of
shared memory, those that are reserved in each block; UUID; the name follows."""
NOTE_BYTES: Final = 400
NAME_BYTES: Final = 1 << 16
"""The longest name that is read; the longest kernel names have a few thousand bytes."""
# tag, length, kind, pid, tid, time_ns; see native/transport.h
RECORD: Final = struct.Struct("<QIHxxIIQ")
ALIGNMENT: Final = 16

MEMORY_BYTES: Final = 256 << 20
"""The limit of all names, processes, threads and similar that a recording keeps until its end."""
ENTRY_BYTES: Final = 256
"""The memory that an entry takes besides its texts, roughly."""
PROCESS_BYTES: Final = 2048
"""The memory that a process takes, roughly."""
MALFORMED: Final = "records that the traced process wrote with invalid contents"
CROWDED: Final = "the recording had more processes, threads or names than are kept"

Key = TypeVar("Key")
Value = TypeVar("Value")


class Malformed(Exception):
    """A record that tracepipe's libraries never write."""


class Crowded(Exception):
    """A record with something new to keep, for which there is no memory."""


REFUSALS: Final = (Malformed, Crowded, struct.error)


class GpuRecord(NamedTuple):
    """A record of a traced process; `time_ns` is CLOCK_MONOTONIC when room was reserved for it."""

    kind: int
    pid: int
    tid: int
    time_ns: int
    payload: memoryview

    @property
    def is_plausible(self) -> bool:
        """Whether the process, the thread and the time are within their limits."""
        return self.pid <= ID_LIMIT and self.tid <= ID_LIMIT and self.time_ns <= TIME_LIMIT_NS


def records(chunk: bytes) -> Iterator[GpuRecord]:
    """The records in a result of `Channel.collect`."""
    for record, _, _ in placed_records(chunk):
        yield record


def placed_records(chunk: bytes) -> Iterator[tuple[GpuRecord, int, int]]:
    """The records in a result of `Channel.collect`, each with its place in it: where it begins and ends."""
    view, at = memoryview(chunk), 0
    while at < len(chunk):
        _, length, kind, pid, tid, time_ns = RECORD.unpack_from(chunk, at)
        start, end = at + RECORD.size, at + whole_bytes(length)
        yield GpuRecord(kind, pid, tid, time_ns, view[start : start + length]), at, end
        at = end


def text(payload: memoryview, start: int = 0) -> str:
    """The text at the end of a payload, up to the greatest length of a name."""
    return bytes(payload[start : start + NAME_BYTES]).decode(errors="replace")


def read_name(payload: memoryview) -> tuple[int, str]:
    """The payload of Kind.NAME: the number of a name in its process, and the name."""
    return NAME.unpack_from(payload)[0], text(payload, NAME.size)


def note(payload: memoryview) -> str:
    """The payload of Kind.NOTE, safe for a terminal."""
    return printable(text(payload[:NOTE_BYTES]))


def printable(words: str) -> str:
    """A process's text, safe for a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in words)


def whole_bytes(length: int) -> int:
    """The size in the ring of a record with a payload of `length` bytes."""
    return (RECORD.size + length + ALIGNMENT - 1) & -ALIGNMENT


class MemoryLimit:
    """The memory for what a recording keeps of traced processes."""

    def __init__(self, size_bytes: int = MEMORY_BYTES) -> None:
        self.left_bytes = size_bytes

    def use(self, size_bytes: int) -> None:
        """Count memory as used. Raises Crowded if there is not enough."""
        if size_bytes > self.left_bytes:
            raise Crowded
        self.left_bytes -= size_bytes

    def release(self, size_bytes: int) -> None:
        """Count memory as free again."""
        self.left_bytes += size_bytes


class RefusedRecords:
    """Counts skipped records until they are written as losses."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def count(self, refusal: Exception) -> None:
        """Count a record by the exception that it raised."""
        reason = CROWDED if isinstance(refusal, Crowded) else MALFORMED
        self._counts[reason] = self._counts.get(reason, 0) + 1

    def new_losses(self, losses: dict[str, int]) -> Iterator[dict[str, Any]]:
        """The losses since the last call, as records of an event file; they are added to `losses`."""
        counts, self._counts = self._counts, {}
        for reason, count in counts.items():
            add_loss(losses, "unknown", count)
            yield {"type": "loss", "count": count, "reason": reason}


def add_loss(losses: dict[str, int], layer: str, count: int) -> None:
    """Add to the losses of a layer, up to the greatest count of a file."""
    losses[layer] = min(losses.get(layer, 0) + count, COUNT_LIMIT)


def check_span(start_ns: int, end_ns: int) -> None:
    """Raise Malformed for times beyond the limit."""
    if start_ns > TIME_LIMIT_NS or end_ns > TIME_LIMIT_NS:
        raise Malformed


def put_bounded(entries: dict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Add an entry, in place of the oldest one if there are `most`."""
    if len(entries) >= most:
        del entries[next(iter(entries))]
    entries[key] = value
