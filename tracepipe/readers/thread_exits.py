"""Threads of a GPU in text formats: the fields of a line that identify them, and exits as events."""

from __future__ import annotations

from typing import Any, Final

from tracepipe.event.checks import Fault, shown
from tracepipe.event.model import ID_LIMIT, INDEX_LIMIT, Record, ThreadExit

THREAD_EXIT: Final = "gpu_thread_exit"
"""The type of a line that is the exit of a thread. It is read as a `gpu_thread`."""
UNNAMED_KERNEL: Final = "kernel"
"""The name of a kernel whose name is not in the input."""


def event_of_exit(record: Record) -> Record:
    """The `gpu_thread` for a good record of a thread's exit."""
    known = {name: value for name, value in record.items() if name in ThreadExit.__annotations__}
    args = {**record.get("args", {}), "event": "exit"}
    return {"name": UNNAMED_KERNEL, **known, "type": "gpu_thread", "phase": "I", "args": args}


def place_of(line: Record) -> Record | Fault:
    """The fields `gpu`, `block` and `thread` of an event, from a line that may have `device`, `block` and
    `thread`. The latter two are three numbers, or only x.
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


def _index(value: object) -> list[int] | None:
    index: list[Any] = value if type(value) is list else [value, 0, 0]
    good = len(index) == 3 and all(type(one) is int and 0 <= one <= INDEX_LIMIT for one in index)
    return index if good else None
