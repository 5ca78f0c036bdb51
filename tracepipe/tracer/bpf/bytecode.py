"""The bytecode of probes.bpf.c: how it is compiled, and the places in it that are filled in at load time.

iovisor's BCC compiles it, which comes from the distribution (python3-bpfcc). It needs no kernel headers here:
the programs read no kernel structures, and the few headers that BCC's own helpers include are in
stub_headers/.

    python -m tracepipe.tracer.bpf.bytecode > tracepipe/tracer/bpf/probes.json

writes the bytecode for every architecture, which tracepipe ships for hosts without BCC.

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

import base64
import hashlib
import importlib
import json
import os
import struct
import sys
import warnings
import zlib
from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.records.syscalls import SYSCALLS

if TYPE_CHECKING:
    from types import ModuleType


_HERE = Path(__file__).parent
_SOURCE = _HERE / "probes.bpf.c"
SHIPPED = _HERE / "probes.json"
_DISTRIBUTION = "/usr/lib/python3/dist-packages"
_INSTALL = (
    "apt install python3-bpfcc   (Fedora: dnf install python3-bcc; never pip: PyPI's bcc is another program)"
)

PROGRAMS = (
    "host_sample",
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
    "sched_waking",
    "sched_migrate",
    "process_exec",
    "thread_new",
    "thread_rename",
    "process_exit",
)


def import_bcc() -> ModuleType:
    """Import iovisor's module, also from a virtual environment. Raises CaptureUnavailable."""
    if _DISTRIBUTION not in sys.path:
        sys.path.append(_DISTRIBUTION)
    try:
        with warnings.catch_warnings():
            # Newer Pythons warn about its regular expressions, each version with another warning.
            warnings.simplefilter("ignore")
            module = importlib.import_module("bcc")
    except ImportError as error:
        raise CaptureUnavailable(f"BCC's Python module cannot be loaded: {error}.", _INSTALL) from None
    if not hasattr(module, "BPF"):
        raise CaptureUnavailable(
            "The Python module bcc here is PyPI's, not iovisor's.", f"pip uninstall bcc; {_INSTALL}"
        )
    return module


def compiled(machine: str) -> dict[str, bytes]:
    """Compile every program for an architecture of SYSCALLS. Raises CaptureUnavailable."""
    module = import_bcc()
    previous = os.environ.get("BCC_KERNEL_SOURCE")
    os.environ["BCC_KERNEL_SOURCE"] = str(_HERE / "stub_headers")
    try:
        program = module.BPF(src_file=str(_SOURCE).encode(), cflags=[f"-DTRACEPIPE_{machine.upper()}"])
        try:
            return {name: bytes(program.dump_func(name.encode())) for name in PROGRAMS}
        finally:
            program.cleanup()
    except Exception as error:  # BCC raises Exception itself
        raise CaptureUnavailable(
            f"BCC could not compile the probes: {error}.",
            "Its messages are above. --method prebuilt uses the bytecode that tracepipe ships.",
        ) from error
    finally:
        if previous is None:
            del os.environ["BCC_KERNEL_SOURCE"]
        else:
            os.environ["BCC_KERNEL_SOURCE"] = previous


def source_digest() -> str:
    """The SHA-256 of the sources of the bytecode: the program and the stub headers."""
    digest = hashlib.sha256()
    for path in [_SOURCE, *sorted((_HERE / "stub_headers").rglob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _main() -> None:
    shipped = {
        "source_sha256": source_digest(),
        "compiler": f"bcc {getattr(import_bcc(), '__version__', 'unknown')}",
        "programs": {
            machine: {
                name: base64.b64encode(zlib.compress(code, 9)).decode()
                for name, code in compiled(machine).items()
            }
            for machine in SYSCALLS
        },
    }
    json.dump(shipped, sys.stdout, indent=1)
    print()


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
    PROBES = 20
    WITH_SAMPLES = 21


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
    17: ("sched/sched_waking", "pid"),
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


if __name__ == "__main__":
    _main()
