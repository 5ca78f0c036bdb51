"""What events of XLA's profiler are, which JAX and TensorFlow write as an XSpace and as Chrome's JSON."""

from __future__ import annotations

import re
from typing import Any, Final

from tracepipe.event.model import COLUMN_LIMIT
from tracepipe.event.vocabulary import direction_named
from tracepipe.mangled_names import demangled
from tracepipe.readers.ids import LAUNCHES

Stats = dict[str, Any]
GPU: Final = re.compile(r"/device:GPU:(\d{1,9})")
STREAM: Final = re.compile(r"Stream #(\d{1,18})")
_NUMBER = re.compile(r"[0-9]{1,18}")
_SIZE = re.compile(r"[0-9]{1,9}(?:,[0-9]{1,9}){2}")
_FUNCTION = re.compile(r"(cu|cuda|hip)[A-Z]")
_DETAIL = re.compile(r"(\w+):(\S*)")
_DETAILS: Final = {
    "kernel_details": "kernel",
    "memcpy_details": "copy",
    "Memset_details": "set",
    "memset_details": "set",
    "memalloc_details": "alloc",
    "MemFree_details": "free",
    "memfree_details": "free",
}
_RENAMED: Final = {"regs": "registers", "static_shared": "shared_bytes", "num_bytes": "size"}


def work_fields(name: str, args: Stats) -> dict[str, Any]:
    """The fields of work of a stream, by the details in its arguments, which are divided into arguments."""
    fields: dict[str, Any] = {"name": demangled(name), "type": "gpu_kernel"}
    detail = next((key for key in _DETAILS if type(args.get(key)) is str), "")
    kind = _DETAILS.get(detail, "kernel")
    for key, value in _DETAIL.findall(args.pop(detail, "")):
        if key in ("grid", "block") and _SIZE.fullmatch(value):
            if kind == "kernel":
                fields[key] = tuple(int(part) for part in value.split(","))
        else:
            args[_RENAMED.get(key, key)] = int(value) if _NUMBER.fullmatch(value) else value
    if kind in ("alloc", "free"):
        return {"type": "memory", "name": kind}
    if kind != "kernel":
        called = "memset" if kind == "set" else direction_named(name.removeprefix("Memcpy"))
        fields |= {"type": "transfer", "name": called}
    return fields


def call_fields(name: str) -> dict[str, Any]:
    """The fields of an event of the host that has no launch."""
    if name.startswith("$"):
        return {"type": "hook", "layer": "python", "name": name[1:]}
    return {"type": "annotation", "domain": "xla"}


def launches(name: str) -> bool:
    """Whether a call of the host launches work. On NVIDIA's GPUs, XLA names a launch after its kernel."""
    return LAUNCHES.search(name) is not None or not _FUNCTION.match(name)


def launch_of(args: Stats) -> int | None:
    """The number of a launch, which calls share with their work; None where there is none."""
    number = args.get("correlation_id")
    return number if type(number) is int and 0 < number <= COLUMN_LIMIT else None
