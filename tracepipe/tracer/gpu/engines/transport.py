"""Parses the records of a channel, which `native/transport.h` describes, and the kinds that all engines have.

A traced process wrote them, so a payload may be anything; `records` takes what `Channel.collect` checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

INJECTION_VARIABLE: Final = "CUDA_INJECTION64_PATH"
"""The variable that names the library which the CUDA driver loads into a program."""
STACKS_VARIABLE: Final = "TRACEPIPE_GPU_STACKS"
"""The variable that is `off` if the libraries are to read no Python frames."""
NVTX_VARIABLE: Final = "NVTX_INJECTION64_PATH"
"""The variable that names the library which NVTX loads into a program."""
KIND_NAME: Final = 1
KIND_GPU: Final = 2
KIND_CLOCK: Final = 3
KIND_NOTE: Final = 4
KIND_STACK: Final = 5
KIND_FRAME: Final = 6
KIND_STACK_BEYOND: Final = 7
KIND_SAMPLE: Final = 64
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


class GpuRecord(NamedTuple):
    """A record of a traced process; `time_ns` is CLOCK_MONOTONIC when room was reserved for it."""

    kind: int
    pid: int
    tid: int
    time_ns: int
    payload: memoryview


def records(chunk: bytes) -> Iterator[GpuRecord]:
    """The records in a result of `Channel.collect`."""
    view, at = memoryview(chunk), 0
    while at < len(chunk):
        _, length, kind, pid, tid, time_ns = RECORD.unpack_from(chunk, at)
        start = at + RECORD.size
        yield GpuRecord(kind, pid, tid, time_ns, view[start : start + length])
        at += whole_bytes(length)


def text(payload: memoryview, start: int = 0) -> str:
    """The text at the end of a payload, up to the greatest length of a name."""
    return bytes(payload[start : start + NAME_BYTES]).decode(errors="replace")


def read_name(payload: memoryview) -> tuple[int, str]:
    """The payload of KIND_NAME: the number of a name in its process, and the name."""
    return NAME.unpack_from(payload)[0], text(payload, NAME.size)


def note(payload: memoryview) -> str:
    """The payload of KIND_NOTE, safe for a terminal."""
    return printable(text(payload[:NOTE_BYTES]))


def printable(words: str) -> str:
    """A process's text, safe for a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in words)


def whole_bytes(length: int) -> int:
    """The size in the ring of a record with a payload of `length` bytes."""
    return (RECORD.size + length + ALIGNMENT - 1) & -ALIGNMENT
