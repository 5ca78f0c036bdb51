"""Records of probes.bpf.c as lines of an event file.

One record, little-endian, bytes from the start; the first eight are the ring's own header:

    0       8        16     20     24   28   29   30    32      40      48      56      64
    ┌───────┬────────┬──────┬──────┬────┬────┬────┬─────┬───────┬───────┬───────┬───────┐
    │ ring  │ ts_ns  │ tid  │ tgid │ id │kind│ 0  │ cpu │ a[0]  │ a[1]  │ a[2]  │ a[3]  │
    └───────┴────────┴──────┴──────┴────┴────┴────┴─────┴───────┴───────┴───────┴───────┘

Lines are put together from ready pieces: a dict and a JSON encoder an event would take three times as long.
"""

from __future__ import annotations

import errno
import json
import struct
from collections import Counter
from collections.abc import Callable, Sequence

from tracepipe.capture.cuda_calls import RESULT_NAMES, arguments_of
from tracepipe.capture.engine import DriverFunction, Loss
from tracepipe.capture.ioctl import decode_command
from tracepipe.capture.ring import RECORD_BYTES
from tracepipe.capture.syscalls import FUTEX_OPERATIONS, SYSCALL_ARGUMENTS

RECORD = struct.Struct("<8xQIIIBxHQQQQ")
assert RECORD.size == RECORD_BYTES

(
    CALL_ENTER,
    LAUNCH_ENTER,
    CALL_RETURN,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    SWITCH_OUT,
    SWITCH_IN,
    WAKEUP,
    DRIVER_ENTER,
    DRIVER_RETURN,
    THREAD_NEW,
    THREAD_NAME,
) = range(1, 13)

# Order of the drop counters. The last counts threads that were not followed: their events are of any layer.
DROP_LAYERS: tuple[str | None, ...] = ("userspace", "syscall", "kernel", "scheduler", None)

_LAYER_OF_KIND = {
    CALL_ENTER: "userspace",
    LAUNCH_ENTER: "userspace",
    CALL_RETURN: "userspace",
    SYSCALL_ENTER: "syscall",
    SYSCALL_EXIT: "syscall",
    SWITCH_OUT: "scheduler",
    SWITCH_IN: "scheduler",
    WAKEUP: "scheduler",
    DRIVER_ENTER: "kernel",
    DRIVER_RETURN: "kernel",
}

# prev_state of sched_switch as kernels since 4.14 report it: bit → why the thread left the processor.
_STATES = {
    0x1: "sleeping",
    0x2: "disk",
    0x4: "stopped",
    0x8: "traced",
    0x10: "dead",
    0x20: "zombie",
    0x40: "parked",
    0x80: "idle",
    0x100: "preempted",
}
_LAST_ERROR = 4095  # results from −4095 to −1 are errors, in the kernel's convention

Arguments = Callable[[int, int, int, int], str]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _named(fields: tuple[tuple[str, int], ...]) -> Arguments | None:
    """A formatter of the registers that `fields` names; None where there is nothing to write."""
    if not fields:
        return None
    pieces = [(f"{_quoted(name)}:", position) for name, position in fields]

    def arguments(*registers: int) -> str:
        inner = ",".join([piece + str(registers[position]) for piece, position in pieces])
        return f',"args":{{{inner}}}'

    return arguments


def _driver_arguments(names: tuple[str, ...]) -> Callable[[int, int, int], str]:
    """A formatter of a driver function's first arguments: `cmd` is an ioctl's command, `_` is left out."""

    def arguments(*registers: int) -> str:
        values: dict[str, object] = {}
        for name, register in zip(names, registers, strict=False):
            if name != "_":
                values |= decode_command(register) if name == "cmd" else {name: register}
        return json.dumps(values, separators=(",", ":"))[1:-1]

    return arguments


def _joined(members: str, served: int) -> str:
    """The `args` of a driver function, with the thread that a worker runs it for."""
    if served:
        for_whom = f'"for_pid":{served >> 32},"for_tid":{served & 0xFFFFFFFF}'
        members = f"{members},{for_whom}" if members else for_whom
    return f',"args":{{{members}}}' if members else ""


def _ioctl_arguments() -> Arguments:
    known: dict[int, str] = {}

    def arguments(fd: int, command: int, _2: int, _3: int) -> str:
        text = known.get(command)
        if text is None:
            text = json.dumps(decode_command(command), separators=(",", ":"))[1:]
            known[command] = text
        return f',"args":{{"fd":{_signed32(fd)},{text}'

    return arguments


def _futex_arguments(address: int, operation: int, value: int, _3: int) -> str:
    name = FUTEX_OPERATIONS.get(operation & 127)
    shown = f'"{name}"' if name else str(operation & 127)
    return f',"args":{{"address":{address},"op":{shown},"value":{value & 0xFFFFFFFF}}}'


def _signed32(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def _state(value: int) -> str:
    # More than one bit: the lowest is what the scheduler's own state letter shows.
    return _STATES.get(value & -value, str(value)) if value else "runnable"


class RecordRenderer:
    """Writes records as JSON lines: names from `functions` and `driver` by index, system calls by number."""

    def __init__(
        self, functions: list[str], syscalls: dict[int, str], driver: Sequence[DriverFunction] = ()
    ) -> None:
        self.counts: dict[str, int] = {}
        self._call_enter = [self._opening("userspace", name, "B") for name in functions]
        self._call_return = [self._opening("userspace", name, "E") for name in functions]
        self._call_arguments = [_named(arguments_of(name)) for name in functions]
        self._syscall_enter = {
            number: self._opening("syscall", name, "B") for number, name in syscalls.items()
        }
        self._syscall_exit = {
            number: self._opening("syscall", name, "E") for number, name in syscalls.items()
        }
        self._syscall_arguments: dict[int, Arguments | None] = {
            number: _named(SYSCALL_ARGUMENTS.get(name, ())) for number, name in syscalls.items()
        }
        for number, name in syscalls.items():
            if name == "ioctl":
                self._syscall_arguments[number] = _ioctl_arguments()
            elif name == "futex":
                self._syscall_arguments[number] = _futex_arguments
        self._driver_enter = [self._opening("kernel", function.name, "B") for function in driver]
        self._driver_return = [self._opening("kernel", function.name, "E") for function in driver]
        self._driver_arguments = [_driver_arguments(function.arguments) for function in driver]
        self._driver_has_result = [function.has_result for function in driver]
        self._switch_in = self._opening("scheduler", "running", "B")
        self._switch_out = self._opening("scheduler", "running", "E")
        self._wakeup = self._opening("scheduler", "wakeup", "I")
        self._results: dict[int, str] = {}
        self._states: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._unwritten_names: dict[int, str] = {}

    @staticmethod
    def _opening(layer: str, name: str, phase: str) -> str:
        return f'"type":"{layer}","name":{_quoted(name)},"phase":"{phase}","pid":'

    def render(self, chunk: bytes) -> bytes:
        """Lines of the records in `chunk`, which is a whole number of them."""
        lines: list[str] = []
        add = lines.append
        kinds: Counter[int] = Counter()
        unwritten = self._unwritten_names
        for ts_ns, tid, tgid, number, kind, cpu, a0, a1, a2, a3 in RECORD.iter_unpack(chunk):
            if kind >= THREAD_NEW:
                self._name_thread(tid, struct.pack("<QQ", a0, a1))
                continue
            opening, arguments = self._pieces(kind, number, a0, a1, a2, a3)
            comm = f',"comm":{unwritten.pop(tid)}' if tid in unwritten else ""
            # The time first: the rest of a line then repeats, and readers parse it once.
            add(f'{{"ts_ns":{ts_ns},{opening}{tgid},"tid":{tid},"cpu":{cpu}{comm}{arguments}}}\n')
            kinds[kind] += 1
        for kind, count in kinds.items():
            layer = _LAYER_OF_KIND[kind]
            self.counts[layer] = self.counts.get(layer, 0) + count
        return "".join(lines).encode()

    def count(self, chunk: bytes) -> int:
        """Records in `chunk`."""
        return len(chunk) // RECORD_BYTES

    def _pieces(self, kind: int, number: int, a0: int, a1: int, a2: int, a3: int) -> tuple[str, str]:
        """Start of the line up to its time, and its `args` with the comma before."""
        if kind == CALL_RETURN:
            return self._call_return[number], self._results.get(a0) or self._result(a0)
        if kind == CALL_ENTER:
            form = self._call_arguments[number]
            return self._call_enter[number], form(a0, a1, a2, a3) if form else ""
        if kind == SYSCALL_ENTER:
            form = self._syscall_arguments[number]
            return self._syscall_enter[number], form(a0, a1, a2, a3) if form else ""
        if kind == SYSCALL_EXIT:
            return self._syscall_exit[number], _syscall_result(a0)
        if kind == SWITCH_IN:
            return self._switch_in, ""
        if kind == SWITCH_OUT:
            return self._switch_out, self._states.get(a0) or self._left(a0)
        if kind == DRIVER_ENTER:
            return self._driver_enter[number], _joined(self._driver_arguments[number](a0, a1, a2), a3)
        if kind == DRIVER_RETURN:
            result = f'"result":{_signed32(a0)}' if self._driver_has_result[number] else ""
            return self._driver_return[number], _joined(result, a3)
        if kind == WAKEUP:
            return self._wakeup, f',"args":{{"by_tid":{number},"target_cpu":{a0}}}'
        return self._call_enter[number], _launch_arguments(a0, a1, a2, a3)

    def _result(self, register: int) -> str:
        # CUresult is an int: the upper half of the register is undefined.
        code = _signed32(register)
        name = RESULT_NAMES.get(code)
        text = (
            f',"args":{{"result":{code},"result_name":"{name}"}}' if name else f',"args":{{"result":{code}}}'
        )
        self._results[register] = text
        return text

    def _left(self, prev_state: int) -> str:
        text = f',"args":{{"prev_state":"{_state(prev_state)}"}}'
        self._states[prev_state] = text
        return text

    def _name_thread(self, tid: int, comm: bytes) -> None:
        name = _quoted(comm.split(b"\0", 1)[0].decode(errors="replace"))
        if self._names.get(tid) != name:
            self._names[tid] = self._unwritten_names[tid] = name


def _syscall_result(register: int) -> str:
    if register >> 63 and register >= (1 << 64) - _LAST_ERROR:
        code = (1 << 64) - register
        # Codes from 512 are the kernel's own (a call that a signal interrupts and restarts).
        name = errno.errorcode.get(code, "restarted" if code >= 512 else "")
        return f',"args":{{"result":-{code},"error":"{name}"}}'
    return f',"args":{{"result":{register}}}'


def _launch_arguments(function: int, grid_xy: int, grid_z_block_x: int, block_yz: int) -> str:
    low = 0xFFFFFFFF
    grid = f"{grid_xy & low},{grid_xy >> 32},{grid_z_block_x & low}"
    block = f"{grid_z_block_x >> 32},{block_yz & low},{block_yz >> 32}"
    return f',"args":{{"function":{function},"grid":[{grid}],"block":[{block}]}}'


def loss_line(loss: Loss) -> bytes:
    """The loss as a line."""
    record: dict[str, str | int] = {"type": "loss"}
    if loss.layer:
        record["layer"] = loss.layer
    record |= {
        "ts_ns": loss.start_ns,
        "dur_ns": loss.end_ns - loss.start_ns,
        "count": loss.count,
        "reason": loss.reason,
    }
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
