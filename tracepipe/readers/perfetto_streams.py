"""Streams of a GPU in traces that tracepipe wrote: their slices are kernels and copies again.

A trace of tracepipe has a group `tracepipe` with the track `capture`. A GPU is a group `GPU N NAME`, whose
own slices are a summary of what is on its streams, as are those of a group `SM N` in it of its warps, and the
counter of how busy it is; so is the `CPU use` of a process of when its threads run. `stream N` is a track in
a GPU. `stream N (overlap M)` has those that overlap others: it becomes a stream of its own, so that each ends
where it did.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import orjson

from tracepipe.event.model import ID_LIMIT, INDEX_LIMIT, Record
from tracepipe.event.vocabulary import CPU_USE, CPU_USE_UNIT, GPU_BUSY
from tracepipe.readers.event_rows import cut_text

OWN: Final = ("tracepipe", "capture")
"""The names of the group, and of its track."""
_GPU = re.compile(r"GPU (\d{1,4})( .*)?")
_STREAM = re.compile(r"stream (\d{1,18})(?: \(overlap (\d{1,4})\))?")
_SM = re.compile(r"SM \d{1,18}")
_COPY = re.compile(r"[HDAP]to[HDAP]|memset|set|default")
# Streams of what overlaps stand so far above those that there are.
_OVERLAPS_APART: Final = 1_000_000


class Stream(NamedTuple):
    """A stream, by the number of its GPU and its own; a number of -1 stands for a summary."""

    gpu: int
    number: int

    @property
    def is_summary(self) -> bool:
        """Whether what is there is on other tracks too."""
        return self.number < 0


def stream_of(names: tuple[str, ...]) -> Stream | None:
    """The stream that tracks of these names are, the topmost first; None where they are none."""
    gpu = _GPU.fullmatch(names[0]) if 0 < len(names) < 3 else None
    if gpu is None:
        return None
    if len(names) == 1 or names[1] == GPU_BUSY or _SM.fullmatch(names[1]):
        return Stream(int(gpu[1]), -1)
    found = _STREAM.fullmatch(names[1])
    if found is None:
        return None
    number = int(found[1]) + int(found[2] or 0) * _OVERLAPS_APART
    return Stream(int(gpu[1]), number) if number <= ID_LIMIT else None


def is_cpu_use(name: str, unit: str) -> bool:
    """Whether a counter says how much of processors a process takes."""
    return name == CPU_USE and unit == CPU_USE_UNIT


def kernel_name(name: str, second: bytes) -> str:
    """The whole name of what a slice of a stream is, which its arguments have where its own is shorter."""
    whole = orjson.loads(second).get("kernel") if b'"kernel":' in second else None
    return cut_text(whole) if type(whole) is str and whole else name


def begun(fields: Record, second: bytes) -> tuple[bytes, bytes]:
    """The record of a slice of a stream with these fields, and its arguments without what the record says."""
    args: dict[str, Any] = orjson.loads(second) if second else {}
    record = {**fields, "type": kind_of(fields["name"])}
    args.pop("kernel", None)
    for key in ("grid", "block"):
        size = args.get(key)
        if type(size) is list and len(size) == 3 and all(map(_is_size, size)):
            record[key] = args.pop(key)
    first, rest = (bytes(memoryview(orjson.dumps(one))) if one else b"" for one in (record, args))
    return first, rest


def kind_of(name: str) -> str:
    """Whether a slice of a stream of that name is a copy or a kernel."""
    return "transfer" if _COPY.fullmatch(name) else "gpu_kernel"


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= INDEX_LIMIT
