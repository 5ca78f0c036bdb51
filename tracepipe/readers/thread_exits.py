"""Threads of a GPU in text formats: where they stand in a line, and exits as events."""

from __future__ import annotations

from typing import Any, Final

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import ID_LIMIT, INDEX_LIMIT, Record, ThreadExit

THREAD_EXIT: Final = "gpu_thread_exit"
"""The type of a line that is one thread's exit; `gpu_thread` is the type of what it is read as."""
UNNAMED_KERNEL: Final = "kernel"
"""What a kernel is called whose name the input does not tell."""


def event_of_exit(record: Record) -> Record:
    """The `gpu_thread` that a good record of a thread's exit is."""
    known = {name: value for name, value in record.items() if name in ThreadExit.__annotations__}
    args = {**record.get("args", {}), "event": "exit"}
    return {"name": UNNAMED_KERNEL, **known, "type": "gpu_thread", "phase": "I", "args": args}


def place_of(line: Record) -> Record | Fault:
    """`gpu`, `block` and `thread` as an event has them, of a line that may have `device`, `block` and
    `thread`: three numbers each, or that of x alone.
    """
    place: Record = {}
    for name in ("block", "thread"):
        if name in line:
            index = _index(line[name])
            if index is None:
                return name, f"must be three numbers from 0 to {INDEX_LIMIT}, not {shown(line[name])}"
            place[name] = index
    device = line.get("gpu", line.get("device", 0))
    if type(device) is not int or not 0 <= device <= ID_LIMIT:
        return "device", f"must be an integer from 0 to {ID_LIMIT}, not {shown(device)}"
    return {"gpu": device, **place}


def _index(value: Any) -> list[int] | None:
    index = value if type(value) is list else [value, 0, 0]
    good = len(index) == 3 and all(type(one) is int and 0 <= one <= INDEX_LIMIT for one in index)
    return index if good else None
