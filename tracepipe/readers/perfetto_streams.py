"""Recognizes the streams of GPUs in traces that tracepipe wrote, whose slices become kernels and copies
again.

A trace of tracepipe has a group `tracepipe` with the track `capture`. A GPU is a group `GPU N NAME`. The
slices on that group, those on a group `SM N` in it, the counter of how busy the GPU is, and the `CPU use` of
a process are summaries of other tracks. `stream N` is a track in a GPU. `stream N (overlap M)` is an overlap
track: it becomes a separate stream, so that each slice keeps its end.
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
# This is added to the numbers of streams for their overlap tracks.
_OVERLAPS_APART: Final = 1_000_000


class Stream(NamedTuple):
    """A stream, by the number of its GPU and its own. The number of a summary is -1."""

    gpu: int
    number: int

    @property
    def is_summary(self) -> bool:
        """Whether it only summarizes other tracks."""
        return self.number < 0


def stream_of(names: tuple[str, ...]) -> Stream | None:
    """The stream of a track with these names from the top down; None where it is not a stream."""
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
    """Whether a counter is the processor time of a process."""
    return name == CPU_USE and unit == CPU_USE_UNIT


def kernel_name(name: str, second: bytes) -> str:
    """The whole name of a slice of a stream, which is in its arguments if its own is shorter."""
    whole = orjson.loads(second).get("kernel") if b'"kernel":' in second else None
    return cut_text(whole) if type(whole) is str and whole else name


def begun(fields: Record, second: bytes) -> tuple[bytes, bytes]:
    """The record of a slice of a stream with these fields, and its arguments without those in the record."""
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


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= INDEX_LIMIT
