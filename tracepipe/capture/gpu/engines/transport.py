"""The records that come out of a channel, as `native/transport.h` draws them; kinds that all engines have.

They are a traced process's, so a payload may be anything; `records` takes what `Channel.collect` checked.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

INJECTION_VARIABLE: Final = "CUDA_INJECTION64_PATH"
"""What CUDA's driver takes the library from that it loads into a program."""
STACKS_VARIABLE: Final = "TRACEPIPE_GPU_STACKS"
"""What the libraries find `off` in where they are to read no frames of Python."""
NVTX_VARIABLE: Final = "NVTX_INJECTION64_PATH"
"""What NVTX takes the library from that it loads into a program."""
KIND_NAME: Final = 1
KIND_GPU: Final = 2
KIND_CLOCK: Final = 3
KIND_NOTE: Final = 4
KIND_STACK: Final = 5
KIND_FRAME: Final = 6
KIND_STACK_BEYOND: Final = 7
KIND_SAMPLE: Final = 64
"""Of the GPU's counters: the capture's own (`counters.py`), and no library's."""

NAME: Final = struct.Struct("<Q")
"""What stands for a name in its process; the name follows."""
GPU: Final = struct.Struct("<6I16s")
"""index, SMs, major, minor, clock in kHz, 0, UUID; the name follows."""
NOTE_BYTES: Final = 400
NAME_BYTES: Final = 1 << 16
"""Of a text that names something; the longest names of kernels have some thousand."""

# tag, length, kind, pid, tid, time_ns; see native/transport.h
RECORD: Final = struct.Struct("<QIHxxIIQ")
ALIGNMENT: Final = 16


class GpuRecord(NamedTuple):
    """One record as a traced process put it; `time_ns` is CLOCK_MONOTONIC when room was taken for it."""

    kind: int
    pid: int
    tid: int
    time_ns: int
    payload: memoryview


def records(chunk: bytes) -> Iterator[GpuRecord]:
    """The records of what `Channel.collect` gave."""
    view, at = memoryview(chunk), 0
    while at < len(chunk):
        _, length, kind, pid, tid, time_ns = RECORD.unpack_from(chunk, at)
        start = at + RECORD.size
        yield GpuRecord(kind, pid, tid, time_ns, view[start : start + length])
        at += whole_bytes(length)


def text(payload: memoryview, start: int = 0) -> str:
    """The text that ends a payload, as far as it can be a name."""
    return bytes(payload[start : start + NAME_BYTES]).decode(errors="replace")


def read_name(payload: memoryview) -> tuple[int, str]:
    """The payload of KIND_NAME: the number that stands for a name in its process, and the name."""
    return NAME.unpack_from(payload)[0], text(payload, NAME.size)


def note(payload: memoryview) -> str:
    """The payload of KIND_NOTE, as it may be shown on a terminal."""
    return printable(text(payload[:NOTE_BYTES]))


def printable(words: str) -> str:
    """What a process claims, as it may be shown on a terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in words)


def whole_bytes(length: int) -> int:
    """What a record with a payload of so many bytes takes in the ring."""
    return (RECORD.size + length + ALIGNMENT - 1) & -ALIGNMENT
