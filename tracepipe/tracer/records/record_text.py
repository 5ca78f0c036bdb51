"""The members of `args` of system calls and of the scheduler's events, as JSON text."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable

from tracepipe.event.vocabulary import LEFT_STATES, RUNNABLE
from tracepipe.hooks.slots import decode_command
from tracepipe.tracer.records.syscalls import FUTEX_OPERATIONS, SYSCALL_ARGUMENTS

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
