"""The byte layout of the `warps` engine's records, which `native/warp_columns.h` describes."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from enum import IntEnum
from itertools import islice
from typing import Final, NamedTuple

from tracepipe.event.model import (
    COLUMN_LIMIT,
    INDEX_LIMIT,
    MASK_LIMIT,
    OFFSET_LIMIT_NS,
    SLOT_LIMIT,
    SM_LIMIT,
    TIME_LIMIT_NS,
)
from tracepipe.tracer.gpu.engines.transport import Malformed


class WarpKind(IntEnum):
    """Kinds of the records."""

    WARPS = 16
    KERNEL = 17
    CALL_ENTER = 18
    CALL_EXIT = 19
    LOST_WARPS = 20
    MET = 21
    MET_CALLED = 22


CLOCK: Final = struct.Struct("<IxxxxQQQ")
HAS_ARGUMENTS: Final = 1 << 62
"""A flag in the number of a function's name: its records have its arguments."""
# native/call_arguments.h describes these two.
CALL_ENTER: Final = struct.Struct("<QQQQIHH")  # name, launch, kernel's name, stack, cpu, words, bytes of text
CALL_EXIT: Final = struct.Struct("<QIIQ")  # name, result, cpu, what the out argument points to
LOST_WARPS: Final = struct.Struct("<QIIQ")  # launch, gpu, why, warps
KERNEL: Final = struct.Struct("<QQQI3I3I3IQIIQQQQQII")
WARPS: Final = struct.Struct("<QQIIIxxxx")  # launch, base_ns, warps, exits, columns
COLUMN: Final = struct.Struct("<BBxxI")  # id, bytes a value, values

LOST_WHY: Final = {
    1: "no memory on the GPU for its records",
    2: "the context failed before the records were read",
    3: "the process ended first",
    4: "the launch is over and these warps wrote nothing",
    5: "no room was left for the exits of warps that diverge",
    7: "the budget of --gpu-warps was used up",
    8: "the kernel launches kernels, and Compute Sanitizer does not see their entries",
    9: "the node runs on another GPU than the first node of its graph",
    10: "its module was loaded while a stream was captured",
    11: "marks were overwritten before they were read, or end a range that did not begin",
}
# Column → its name, and the greatest value in it.
_COLUMNS: Final = {
    1: ("warp", COLUMN_LIMIT),
    2: ("sm", SM_LIMIT),
    3: ("slot", SLOT_LIMIT),
    4: ("entry_ns", OFFSET_LIMIT_NS),
    5: ("entry_clk", COLUMN_LIMIT),
    6: ("entry_mask", MASK_LIMIT),
    7: ("exit_count", MASK_LIMIT),
    8: ("exit_ns", OFFSET_LIMIT_NS),
    9: ("exit_clk", COLUMN_LIMIT),
    10: ("exit_mask", MASK_LIMIT),
    11: ("first_warp", COLUMN_LIMIT - MASK_LIMIT),  # MASK_LIMIT warps may follow it
    12: ("range_count", MASK_LIMIT),
    13: ("range_name", (1 << 64) - 1),  # the number of a name in the process
    14: ("range_clk", COLUMN_LIMIT),
    15: ("range_dur_clk", COLUMN_LIMIT),
    16: ("range_open", 1),
}
COLUMN_NAMES: Final = {number: name for number, (name, _) in _COLUMNS.items()}
LAUNCHED_BY: Final = ("", "graph", "kernel")
_TYPES: Final = {2: "H", 4: "I", 8: "Q"}  # width in bytes → array's type of a column
_NEEDED: Final = {"warp", "entry_ns", "exit_ns"}
_OF_EXITS: Final = ("exit_ns", "exit_clk", "exit_mask")
_OF_RANGES: Final = ("range_name", "range_clk", "range_dur_clk", "range_open")
MARKS_LOST: Final = 11


class Kernel(NamedTuple):
    """A launch that has ended. Of its `warps`, `begun` were recorded, `whole` with the exit of every lane.

    `call_ns` is CLOCK_MONOTONIC, `start_ns` and `end_ns` the GPU's clock; `launched_by` indexes LAUNCHED_BY.
    `registers` are those of a thread, 0 where neither they nor the static shared memory are known.
    """

    launch: int
    name: int
    stream: int
    gpu: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    cluster: tuple[int, ...]
    call_ns: int
    call_tid: int
    launched_by: int
    start_ns: int
    end_ns: int
    warps: int
    begun: int
    whole: int
    registers: int
    static_shared_bytes: int


def read_words(payload: memoryview, count: int) -> tuple[int, ...]:
    """The words of arguments of a call's entry."""
    return struct.unpack_from(f"<{count}Q", payload, CALL_ENTER.size)


def read_kernel(payload: memoryview) -> Kernel:
    """The payload of a launch's record. Raises Malformed."""
    v = KERNEL.unpack_from(payload)
    kernel = Kernel._make((*v[:4], v[4:7], v[7:10], v[10:13], *v[13:]))
    if not kernel.start_ns <= kernel.end_ns <= TIME_LIMIT_NS or kernel.launched_by >= len(LAUNCHED_BY):
        raise Malformed
    if max(kernel.block) > INDEX_LIMIT:
        raise Malformed
    return kernel


def read_warp_count(payload: memoryview) -> int:
    """The number of warps in a batch, at most its number of bytes, whatever it states."""
    return min(int(WARPS.unpack_from(payload)[2]), len(payload)) if len(payload) >= WARPS.size else 0


def read_warps(payload: memoryview) -> tuple[int, int, int, dict[str, list[int]]]:
    """Launch, base in ns, number of warps, and each column's values. Raises Malformed if inconsistent."""
    launch, base_ns, warps, exits, count = WARPS.unpack_from(payload)
    columns = dict(_columns(payload, count))
    if len(columns.get("first_warp", ())) == 1 and warps == len(columns.get("entry_ns", ())):
        (first,) = columns.pop("first_warp")
        columns = {"warp": list(range(first, first + warps))} | columns
    _check(columns, base_ns, warps, exits)
    return launch, base_ns, warps, columns


def _check(columns: dict[str, list[int]], base_ns: int, warps: int, exits: int) -> None:
    """Raise Malformed unless the columns match the numbers of warps and exits, and their values are valid."""
    if base_ns > TIME_LIMIT_NS or not warps or any(name not in columns for name in _NEEDED):
        raise Malformed
    ranges = sum(columns.get("range_count", ()))
    for name, values in columns.items():
        if len(values) != (exits if name in _OF_EXITS else ranges if name in _OF_RANGES else warps):
            raise Malformed
    if exits != (sum(columns["exit_count"]) if "exit_count" in columns else warps):
        raise Malformed
    if ranges and not _are_within(columns):
        raise Malformed


def _are_within(columns: dict[str, list[int]]) -> bool:
    """Whether the ranges are within the lifetimes of their warps, and in order of their begins."""
    if not columns.keys() >= {"range_name", "range_clk", "range_dur_clk", "exit_clk"}:
        return False
    left, begins, lengths = map(iter, (columns["exit_clk"], columns["range_clk"], columns["range_dur_clk"]))
    exit_counts = columns.get("exit_count") or [1] * len(columns["warp"])
    for ranges, exits in zip(columns["range_count"], exit_counts, strict=True):
        last_clk, before_clk = max(islice(left, exits), default=-1), 0
        for clk in islice(begins, ranges):
            if clk < before_clk or clk + next(lengths) > last_clk:
                return False
            before_clk = clk
    return True


def _columns(payload: memoryview, count: int) -> Iterator[tuple[str, list[int]]]:
    at = WARPS.size + count * COLUMN.size
    if at > len(payload):
        raise Malformed
    for number, width, values in COLUMN.iter_unpack(payload[WARPS.size : at]):
        size_bytes = width * values
        if number not in _COLUMNS or width not in _TYPES or at + size_bytes > len(payload):
            raise Malformed
        column = array(_TYPES[width])
        column.frombytes(payload[at : at + size_bytes])
        name, greatest = _COLUMNS[number]
        if column and greatest >> 8 * width == 0 and max(column) > greatest:
            raise Malformed
        yield name, column.tolist()
        at += (size_bytes + 7) // 8 * 8
