"""Makes the event of one JSON line of a layered tracer: its layer, name, time, length and arguments."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Final

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import COUNT_LIMIT, ID_LIMIT, TIME_LIMIT_NS, Problem, Record
from tracepipe.event.vocabulary import COPY_KINDS, direction_named
from tracepipe.hooks.effects import MEMORY_EFFECTS, effect_of
from tracepipe.hooks.ioctl import decode_command
from tracepipe.readers.thread_exits import THREAD_EXIT, UNNAMED_KERNEL, event_of_exit, place_of
from tracepipe.readers.undated import NO_TIME, PLACED

# The `type` of a line → the layer it belongs to. Names that only one variant of the scripts prints:
# kernel_memory (BCC), kernel_mem, ioctl, gpu_complete (dma_fence_signaled) and gpu_mem (gpu_mem_total).
LAYER_OF_TYPE: Final = {
    "userspace": "userspace",
    "hook": "hook",
    "syscall": "syscall",
    "ioctl": "syscall",
    "kernel": "kernel",
    "kernel_memory": "kernel",
    "kernel_mem": "kernel",
    "gpu_complete": "kernel",
    "scheduler": "scheduler",
    "memory": "memory",
    "gpu_mem": "memory",
    "transfer": "transfer",
    "gpu_thread": "gpu_thread",
    THREAD_EXIT: "gpu_thread",
}
# Lines of these types have neither a name nor an `op`.
NAMED_BY_TYPE: Final = frozenset({"ioctl", "gpu_complete", "gpu_mem"})
_OF_THREADS = frozenset({"gpu_thread", THREAD_EXIT})
_NAMED_BY = {"transfer": ("name", "op", "direction"), **dict.fromkeys(_OF_THREADS, ("name", "kernel"))}

# Names of the sum in a line of gpu_mem → its unit, bytes. A bare `total` is the guide's name for the field
# `total_mem_kb`.
BARE_TOTAL: Final = "total"
_TOTALS = {
    "total_bytes": 1,
    "size_bytes": 1,
    "size": 1,
    "total_kb": 1024,
    "total_mem_kb": 1024,
    BARE_TOTAL: 1024,
}

START: Final = "start_ts"
"""The start of an event, as `tracepipe convert` writes it in a single line at the event's end."""
_FIELDS = frozenset({"type", "ts", "phase", "name", "pid", "tid", "cpu", "comm", START})
_OF_PLACES = frozenset({"kernel", "gpu", "device", "block", "thread"})
_NS = {"duration_us": 1_000, "duration_ms": 1_000_000}
# Below 2^51 ns (26 days) the two roundings of `ms * 1e6` stay under half a nanosecond in sum.
_FLOAT_IS_EXACT_MS = (1 << 51) / 1e6
_HEXADECIMAL = re.compile(r"0[xX][0-9a-fA-F]{1,16}")
_TS_TEXT = re.compile(rb'"ts"\s*:\s*(-?[0-9.]+(?:[eE][-+]?[0-9]+)?)')


def ns_of_ms(ms: int | float, text: bytes = b"") -> int:
    """Nanoseconds of `ms` milliseconds, exact to the six decimals that the scripts print.

    Up to 26 days, `round(ms * 1e6)` is exact. Beyond that, a double cannot represent every nanosecond, and
    the decimal digits are taken from `text`, the line from which `ms` was parsed. Further decimals are
    rounded.
    """
    if isinstance(ms, int):
        return ms * 1_000_000
    if abs(ms) >= _FLOAT_IS_EXACT_MS:
        for match in _TS_TEXT.finditer(text):
            if float(match[1]) == ms:
                return round(Decimal(match[1].decode()) * 1_000_000)
    return round(ms * 1e6)


def _number_fault(value: object, limit: int) -> str:
    """The message for a wrong time or duration, which may be at most `limit`; "" for a valid one."""
    if not (type(value) is int or type(value) is float):
        return f"must be a number, not {shown(value)}"
    if value < 0:
        return f"must not be negative, but is {shown(value)}"
    return "" if value <= limit else f"must be at most {limit}, not {shown(value)}"


def _who_fault(line: Record) -> Fault | None:
    """The fault of the first identity field with a wrong type, or None."""
    for name in ("pid", "tid", "cpu"):
        if name in line and (type(line[name]) is not int or not 0 <= line[name] <= ID_LIMIT):
            return name, f"must be an integer from 0 to {ID_LIMIT}, not {shown(line[name])}"
    if "comm" in line and type(line["comm"]) is not str:
        return "comm", f"must be a string, not {shown(line['comm'])}"
    return None


def _name_of(line: Record) -> str | Fault:
    """The name of an event: `name`, else `op`, else the direction of a transfer or the type."""
    kind = line["type"]
    for key in _NAMED_BY.get(kind, ("name", "op")):
        if key in line:
            name = line[key]
            return name if type(name) is str else (key, f"must be a string, not {shown(name)}")
    if kind in _OF_THREADS:
        return UNNAMED_KERNEL
    return str(kind) if kind in NAMED_BY_TYPE else ("name", "is missing, and so is op")


def _layer_of(kind: str, line: Record) -> str:
    # "kernel" is the operating system's, except in the line that the BCC tool writes from its uprobe on
    # cuLaunchKernel: that is the call that launches a CUDA kernel, and not the time at which the kernel ran.
    if kind == "kernel" and (line.get("op") == "launch" or line.get("name") == "cuLaunchKernel"):
        return "userspace"
    return LAYER_OF_TYPE.get(kind, "hook")


def _effect_of(name: str, args: Record, phase: str) -> str:
    """The effect of the call that a line of memory names, such as `alloc` for cuMemAlloc; "" where it names
    no call. If the name does not show it, `op` may have it. A call that failed has no effect. A begin and its
    end must have the same name.
    """
    effect = effect_of(name)[0] or args.get("op")
    failed = phase == "I" and args.get("result", args.get("retval", 0)) != 0
    return effect if effect in MEMORY_EFFECTS and not failed else ""


def time_of(line: Record, text: bytes) -> int | Fault:
    """The time of a line, ns, or its fault."""
    if "ts" not in line:
        return NO_TIME
    if wrong := _number_fault(line["ts"], TIME_LIMIT_NS // 1_000_000):
        return "ts", wrong
    return ns_of_ms(line["ts"], text)


def event_of(kind: str, line: Record, ts_ns: int, problems: list[Problem], number: int) -> Record | Fault:
    """The event at `ts_ns` on line `number`, or the fault of the line. An unknown type becomes a layer of its
    own.
    """
    phase = line.get("phase", "I")
    if type(phase) is not str or phase not in ("B", "E", "I"):
        return "phase", f"must be B, E or I or absent, not {shown(phase)}"
    name = _name_of(line)
    if isinstance(name, tuple):
        return name
    if fault := _who_fault(line):
        return fault
    record: Record = {"type": _layer_of(kind, line), "name": name, "phase": phase, "ts_ns": ts_ns}
    for key in ("pid", "tid", "cpu", "comm"):
        if key in line:
            record[key] = line[key]
    args = {key: value for key, value in line.items() if key not in _FIELDS}
    if kind == "hook" and type(args.get("layer")) is str:
        record["layer"] = args.pop("layer")
    elif kind not in LAYER_OF_TYPE:
        record["layer"] = kind
    # Six decimals can be restored from the nanoseconds. A finer time is kept as it was written.
    if "ts" not in line:
        args["placed"] = PLACED
    elif ts_ns / 1e6 != line["ts"]:
        args["source_ts_ms"] = line["ts"]
    if kind == "gpu_mem":
        _take_total(record, args)
    elif record["type"] == "memory" and (effect := _effect_of(name, args, phase)):
        record["name"] = effect
        if effect != name:
            args["call"] = name
    elif record["type"] == "transfer":
        _take_direction(record, args)
    elif "cmd" in args or "ioctl_cmd" in args:
        args |= _command_of(args, is_ioctl=kind == "ioctl" or "ioctl" in name)
    if kind in _OF_THREADS:
        place = place_of(line)
        if isinstance(place, tuple):
            return place
        record |= place
        args = {key: value for key, value in args.items() if key not in _OF_PLACES}
    if kind != THREAD_EXIT and (fault := _take_duration(record, line, args, problems, number)):
        return fault
    if args:
        record["args"] = args
    return event_of_exit(record) if kind == THREAD_EXIT else record


def _take_direction(record: Record, args: Record) -> None:
    """Name a copy by its direction. If it was named by its call, that is kept as an argument."""
    given = args.get("direction")
    if type(given) is str:
        given = args["direction"] = direction_named(given)
    effect, direction = effect_of(record["name"])
    if effect == "transfer":
        kind = args.get("kind")
        if type(kind) is int and 0 <= kind < len(COPY_KINDS):
            direction = direction or COPY_KINDS[kind]
        args["call"] = record["name"]
        record["name"] = given if type(given) is str else direction or "copy"
    record["name"] = direction_named(record["name"])


def _take_total(record: Record, args: Record) -> None:
    """Put the memory in use on a GPU that the driver reports into the record: `total_bytes`, and the GPU."""
    for key, unit_bytes in _TOTALS.items():
        if type(total := args.get(key)) is int and 0 <= total < COUNT_LIMIT:
            args["total_bytes"] = total * unit_bytes
            break
    if type(gpu := args.get("gpu_id")) is int and 0 <= gpu <= ID_LIMIT:
        record["gpu"] = gpu


def _command_of(args: Record, is_ioctl: bool) -> Record:
    """An ioctl's command taken apart: `{dir, type, nr, size_bytes}`, and `request` where it has a name."""
    command = args.get("ioctl_cmd", args.get("cmd") if is_ioctl else None)
    if type(command) is str and _HEXADECIMAL.fullmatch(command):
        command = int(command, 16)
    if type(command) is not int or not 0 <= command < 1 << 64:
        return {}
    return {key: value for key, value in decode_command(command).items() if key not in {"cmd", *args}}


def _take_duration(
    record: Record, line: Record, args: Record, problems: list[Problem], number: int
) -> Fault | None:
    """Take the length of a record from its arguments, if it has one. Return the fault of a wrong one."""
    if record["phase"] != "E" and "phase" in line:
        return None
    for key, ns in _NS.items():
        if key not in args:
            continue
        if wrong := _number_fault(args[key], TIME_LIMIT_NS // ns):
            return key, wrong
        if not _add_duration(record, round(args[key] * ns)):
            message = "begins before the start of tracing; the slice is drawn from 0"
            problems.append(Problem(number, key, message, skipped=False))
        else:
            del args[key]
        break
    return None


def _add_duration(record: Record, dur_ns: int) -> bool:
    """Set the length of a record. Return whether it begins after the start of tracing.

    An E keeps its time. A line without a phase is written at the end of what it describes, and becomes an X.
    """
    if record["phase"] == "E":
        record["dur_ns"] = dur_ns
        return True
    end_ns: int = record["ts_ns"]
    record.update(phase="X", ts_ns=max(0, end_ns - dur_ns), dur_ns=min(dur_ns, end_ns))
    return dur_ns <= end_ns
