"""The recorded system calls: ioctl, and those that block or change mappings.

Numbers by architecture. Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
(aarch64). The calls that aarch64 lacks (poll, select, epoll_wait) are their p-variants there.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

from tracepipe.event.vocabulary import LEFT_STATES, RUNNABLE
from tracepipe.hooks.ioctl import command_text
from tracepipe.hooks.slots import Texts

_FD, _COUNT, _AREA = ("fd", 0), ("count_bytes", 2), (("address", 0), ("size_bytes", 1))
# Name → its numbers on x86_64 and aarch64, and the recorded arguments by position; the others are addresses
# and flags, which tell little in a timeline. 335 (uretprobe, since 6.11) and 336 (uprobe) of x86_64 must stay
# out: the kernel uses them at probes, so the target seems to call them, but does not.
_CALLS: dict[str, tuple[int | None, int | None, tuple[tuple[str, int], ...]]] = {
    "read": (0, 63, (_FD, _COUNT)),
    "write": (1, 64, (_FD, _COUNT)),
    "poll": (7, None, ()),
    "mmap": (9, 222, _AREA),
    "munmap": (11, 215, _AREA),
    "ioctl": (16, 29, ()),
    "pread64": (17, 67, (_FD, _COUNT)),
    "pwrite64": (18, 68, (_FD, _COUNT)),
    "readv": (19, 65, (_FD,)),
    "writev": (20, 66, (_FD,)),
    "select": (23, None, ()),
    "sched_yield": (24, 124, ()),
    "nanosleep": (35, 101, ()),
    "connect": (42, 203, (_FD,)),
    "accept": (43, 202, (_FD,)),
    "recvfrom": (45, 207, (_FD, _COUNT)),
    "recvmsg": (47, 212, (_FD,)),
    "wait4": (61, 260, ()),
    "fsync": (74, 82, (_FD,)),
    "fdatasync": (75, 83, (_FD,)),
    "futex": (202, 98, ()),
    "clock_nanosleep": (230, 115, ()),
    "epoll_wait": (232, None, (_FD,)),
    "waitid": (247, 95, ()),
    "pselect6": (270, 72, ()),
    "ppoll": (271, 73, ()),
    "epoll_pwait": (281, 22, (_FD,)),
    "accept4": (288, 242, (_FD,)),
    "epoll_pwait2": (441, 441, (_FD,)),
    "futex_waitv": (449, 449, ()),
}
SYSCALLS: dict[str, dict[int, str]] = {
    "x86_64": {number: name for name, (number, _, _) in _CALLS.items() if number is not None},
    "aarch64": {number: name for name, (_, number, _) in _CALLS.items() if number is not None},
}
"""Architecture → number → name."""

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
"""Makes the members of a call's `args`, "" for none, from its first four argument registers."""


def syscall_arguments(name: str) -> Arguments:
    """A function that renders the arguments of a system call."""
    if name == "ioctl":
        commands = Texts(command_text)
        # A descriptor is the lower half of its register, with a sign.
        return lambda fd, command, *_: f'"fd":{(fd & 0xFFFFFFFF ^ 1 << 31) - (1 << 31)},{commands[command]}'
    if name == "futex":
        # Its second argument's lower seven bits are the operation.
        operations = Texts(
            lambda number: f'"{FUTEX_OPERATIONS[number]}"' if number in FUTEX_OPERATIONS else str(number)
        )
        return lambda address, operation, value, _: (
            f'"address":{address},"op":{operations[operation & 127]},"value":{value & 0xFFFFFFFF}'
        )
    _, _, recorded = _CALLS.get(name, (0, 0, ()))
    pieces = [(f"{json.dumps(argument)}:", position) for argument, position in recorded]
    if not pieces:
        return lambda *_: ""
    return lambda *registers: ",".join([piece + str(registers[position]) for piece, position in pieces])


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
    if isinstance(text, str) and text.isdecimal() and len(text) < 10:
        return int(text)
    return _STATE_BITS.get(str(text), 1)
