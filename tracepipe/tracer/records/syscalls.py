"""The recorded system calls: ioctl, and those that block or change mappings.

Numbers by architecture. Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
(aarch64). The calls that aarch64 lacks (poll, select, epoll_wait) are their p-variants there.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

from tracepipe.event.vocabulary import LEFT_STATES, RUNNABLE
from tracepipe.hooks.slots import decode_command

# 335 (uretprobe, since 6.11) and 336 (uprobe) must stay out: the kernel uses them at probes, so they appear
# among the target's system calls, but the target did not call them.
_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    9: "mmap",
    11: "munmap",
    16: "ioctl",
    17: "pread64",
    18: "pwrite64",
    19: "readv",
    20: "writev",
    23: "select",
    24: "sched_yield",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    45: "recvfrom",
    47: "recvmsg",
    61: "wait4",
    74: "fsync",
    75: "fdatasync",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
    288: "accept4",
    441: "epoll_pwait2",
    449: "futex_waitv",
}
_AARCH64 = {
    22: "epoll_pwait",
    29: "ioctl",
    63: "read",
    64: "write",
    65: "readv",
    66: "writev",
    67: "pread64",
    68: "pwrite64",
    72: "pselect6",
    73: "ppoll",
    82: "fsync",
    83: "fdatasync",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    124: "sched_yield",
    202: "accept",
    203: "connect",
    207: "recvfrom",
    212: "recvmsg",
    215: "munmap",
    222: "mmap",
    242: "accept4",
    260: "wait4",
    441: "epoll_pwait2",
    449: "futex_waitv",
}
SYSCALLS: dict[str, dict[int, str]] = {"x86_64": _X86_64, "aarch64": _AARCH64}

# The recorded arguments, by position; the others are addresses and flags, which tell little in a timeline.
SYSCALL_ARGUMENTS: dict[str, tuple[tuple[str, int], ...]] = {
    "read": (("fd", 0), ("count_bytes", 2)),
    "write": (("fd", 0), ("count_bytes", 2)),
    "pread64": (("fd", 0), ("count_bytes", 2)),
    "pwrite64": (("fd", 0), ("count_bytes", 2)),
    "readv": (("fd", 0),),
    "writev": (("fd", 0),),
    "recvfrom": (("fd", 0), ("count_bytes", 2)),
    "recvmsg": (("fd", 0),),
    "accept": (("fd", 0),),
    "accept4": (("fd", 0),),
    "connect": (("fd", 0),),
    "fsync": (("fd", 0),),
    "fdatasync": (("fd", 0),),
    "epoll_wait": (("fd", 0),),
    "epoll_pwait": (("fd", 0),),
    "epoll_pwait2": (("fd", 0),),
    "mmap": (("address", 0), ("size_bytes", 1)),
    "munmap": (("address", 0), ("size_bytes", 1)),
    "futex": (("address", 0),),
}

# Low bits of futex's second argument, include/uapi/linux/futex.h; 128 and 256 are flags.
FUTEX_OPERATIONS = {
    0: "WAIT",
    1: "WAKE",
    3: "REQUEUE",
    4: "CMP_REQUEUE",
    5: "WAKE_OP",
    6: "LOCK_PI",
    7: "UNLOCK_PI",
    8: "TRYLOCK_PI",
    9: "WAIT_BITSET",
    10: "WAKE_BITSET",
    11: "WAIT_REQUEUE_PI",
    12: "CMP_REQUEUE_PI",
    13: "LOCK_PI2",
}

_STATE_BITS = {text: bit for bit, text in LEFT_STATES.items()}
ENDED = 0x10 | 0x20
"""The bits of prev_state with which a thread never runs again."""
_LAST_ERROR = 4095  # by the kernel's convention, results from −4095 to −1 are errors

Arguments = Callable[[int, int, int, int], str]
"""A function that returns the members of a call's `args`, from its first four argument registers; "" for
none.
"""


def signed32(value: int) -> int:
    """The lower half of a register as an int."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def syscall_arguments(name: str) -> Arguments:
    """A function that renders the arguments of a system call."""
    if name == "ioctl":
        return _ioctl_arguments()
    if name == "futex":
        return _futex_arguments
    pieces = [
        (f"{json.dumps(argument)}:", position) for argument, position in SYSCALL_ARGUMENTS.get(name, ())
    ]

    def arguments(*registers: int) -> str:
        return ",".join([piece + str(registers[position]) for piece, position in pieces])

    return arguments if pieces else lambda *_: ""


def _ioctl_arguments() -> Arguments:
    known: dict[int, str] = {}

    def arguments(fd: int, command: int, _2: int, _3: int) -> str:
        text = known.get(command)
        if text is None:
            text = json.dumps(decode_command(command), separators=(",", ":"))[1:-1]
            known[command] = text
        return f'"fd":{signed32(fd)},{text}'

    return arguments


def _futex_arguments(address: int, operation: int, value: int, _3: int) -> str:
    name = FUTEX_OPERATIONS.get(operation & 127)
    shown = f'"{name}"' if name else str(operation & 127)
    return f'"address":{address},"op":{shown},"value":{value & 0xFFFFFFFF}'


def syscall_result(register: int) -> str:
    """Members of the `args` of a system call's end."""
    if register >> 63 and register >= (1 << 64) - _LAST_ERROR:
        code = (1 << 64) - register
        # Codes from 512 are internal to the kernel (a call that is restarted after a signal).
        name = errno.errorcode.get(code, "restarted" if code >= 512 else "")
        return f'"result":-{code},"error":"{name}"'
    return f'"result":{register}'


def state_of_text(text: object) -> int:
    """The prev_state whose `state_text` is this text; a sleeping state if there is none."""
    if text == RUNNABLE:
        return 0
    if isinstance(text, str) and text.isdecimal():
        return int(text)
    return _STATE_BITS.get(str(text), 1)
