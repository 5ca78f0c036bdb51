"""The bytecode of the programs of probes.bpf.c, and the places in it that are filled in at load time.

One instruction (include/uapi/linux/bpf.h):

    0      1         2        4            8
    ┌──────┬─────────┬────────┬────────────┐
    │ code │ dst│src │ offset │ immediate  │      src in the upper four bits
    └──────┴─────────┴────────┴────────────┘

A 64-bit constant takes two instructions; the immediate of the second has its upper half. Three kinds of
places are filled in. A constant with src 1 is a map, by its number in maps.py. One with src 9 is a constant,
by its number in `Constant`. A load from an offset of 0x4000 or more is a field of the tracepoint's record, by
its number in `FIELDS`.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

from tracepipe.errors import CaptureUnavailable

PROGRAMS = (
    "call_enter",
    "call_return",
    "trigger",
    "trigger_holding",
    "driver_enter",
    "driver_return",
    "tracepoint_hit",
    "syscall_enter",
    "syscall_exit",
    "sched_switch",
    "sched_wakeup",
    "sched_migrate",
    "process_exec",
    "thread_new",
    "thread_rename",
    "process_exit",
)


class Constant(IntEnum):
    """CONFIG(n) of probes.bpf.c."""

    PROCESSORS = 0
    WITH_SCHEDULER = 1
    EVERYONE = 2
    CHILDREN = 3
    MIN_DURATION_NS = 4
    SAMPLE = 5
    COMM_LOW = 6
    COMM_HIGH = 7
    NAMESPACE_DEV = 8
    NAMESPACE_INO = 9
    PROBE = 10
    OWN_TGID = 11
    TEXT_0 = 12
    TEXT_1 = 13
    TEXT_2 = 14
    TEXT_3 = 15
    MAY_SLEEP = 16
    BEGIN_AT = 17
    END_AT = 18
    CLOCK_AHEAD_NS = 19


# FIELD(n) of probes.bpf.c: (tracepoint, field).
FIELDS: dict[int, tuple[str, str]] = {
    4: ("sched/sched_switch", "prev_pid"),
    5: ("sched/sched_switch", "next_pid"),
    6: ("sched/sched_switch", "prev_state"),
    7: ("sched/sched_wakeup", "pid"),
    8: ("sched/sched_wakeup", "target_cpu"),
    9: ("sched/sched_migrate_task", "pid"),
    10: ("sched/sched_migrate_task", "orig_cpu"),
    11: ("sched/sched_migrate_task", "dest_cpu"),
    12: ("sched/sched_process_exec", "old_pid"),
    13: ("task/task_newtask", "pid"),
    14: ("task/task_newtask", "clone_flags"),
    15: ("task/task_rename", "pid"),
    16: ("task/task_rename", "newcomm"),
}
HOOK_FIELDS = range(32, 36)
"""FIELD(n) of a hook's tracepoint: its arguments."""

_INSTRUCTION = struct.Struct("<BBhi")
_LOAD_CONSTANT = 0x18  # BPF_LD | BPF_IMM | BPF_DW
_LOAD, _CLASS = 0x01, 0x07  # BPF_LDX
_SIZE = 0x18  # the bits of a load's code that have its size
_SIZES = {1: 0x10, 2: 0x08, 4: 0x00, 8: 0x18}
_PSEUDO_MAP, _PSEUDO_CONSTANT = 1, 9
_FIELD_BASE, _FIELD_BYTES = 0x4000, 64

Field = tuple[int, int]
"""Offset in the tracepoint's record and size, both in bytes; size 0: the size that the program reads."""


def filled_in(
    instructions: bytes, maps: Sequence[int], constants: Mapping[int, int], fields: Mapping[int, Field]
) -> bytes:
    """Return the bytecode with map descriptors, constants and field offsets filled in.

    `maps[n - 1]` is map n. Raises CaptureUnavailable for a field that is not in `fields`.
    """
    out = bytearray(instructions)
    at = 0
    while at < len(out):
        code, registers, offset, immediate = _INSTRUCTION.unpack_from(out, at)
        if code == _LOAD_CONSTANT:
            if registers >> 4 == _PSEUDO_MAP:
                struct.pack_into("<i", out, at + 4, maps[immediate - 1])
            elif registers >> 4 == _PSEUDO_CONSTANT:
                value = constants[immediate] & (1 << 64) - 1
                out[at + 1] = registers & 15
                struct.pack_into("<I", out, at + 4, value & 0xFFFFFFFF)
                struct.pack_into("<I", out, at + 12, value >> 32)
            at += 8
        elif code & _CLASS == _LOAD and offset >= _FIELD_BASE:
            number, byte = divmod(offset - _FIELD_BASE, _FIELD_BYTES)
            if number not in fields:
                raise CaptureUnavailable(
                    f"The kernel's tracepoint {'/'.join(FIELDS.get(number, ('', str(number))))} has changed.",
                    "Report this kernel's version: a field that tracepipe reads by its name is gone.",
                )
            place, size_bytes = fields[number]
            if size_bytes:
                out[at] = code & ~_SIZE | _SIZES[size_bytes]
            struct.pack_into("<h", out, at + 2, place + byte)
        at += 8
    return bytes(out)
