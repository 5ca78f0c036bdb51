"""The records of the `warps` engine, byte by byte: see `native/warp_columns.h`, which draws them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

KIND_WARPS: Final = 16
KIND_KERNEL: Final = 17
KIND_CALL_ENTER: Final = 18
KIND_CALL_EXIT: Final = 19
KIND_LOST_WARPS: Final = 20

CLOCK: Final = struct.Struct("<IxxxxQQQ")
HAS_ARGUMENTS: Final = 1 << 62
"""Of a function's name: its records have its arguments."""
# native/call_arguments.h draws these two.
CALL_ENTER: Final = struct.Struct("<QQQIHH")  # name, launch, kernel's name, cpu, words, bytes of text
CALL_EXIT: Final = struct.Struct("<QIIQ")  # name, result, cpu, what the out argument points to
LOST_WARPS: Final = struct.Struct("<QIIQ")  # launch, gpu, why, warps
KERNEL: Final = struct.Struct("<QQQI3I3I3IQIIQQQQQ")
WARPS: Final = struct.Struct("<QQIIIxxxx")  # launch, base_ns, warps, exits, columns
COLUMN: Final = struct.Struct("<BBxxI")  # id, bytes a value, values

LOST_WHY: Final = {
    1: "no memory on the GPU for its records",
    2: "the context failed before the records were read",
    3: "the process ended first",
    4: "it is over and these warps wrote nothing",
    5: "exits beyond the room for warps that diverge",
    7: "beyond the budget of --gpu-warps",
    8: "of a kernel that launches kernels, whose entries Compute Sanitizer does not see",
    9: "of a graph's node on another GPU than its first node's",
}
COLUMN_NAMES: Final = {
    1: "warp",
    2: "sm",
    3: "slot",
    4: "entry_ns",
    5: "entry_clk",
    6: "entry_mask",
    7: "exit_count",
    8: "exit_ns",
    9: "exit_clk",
    10: "exit_mask",
    11: "first_warp",
}
LAUNCHED_BY: Final = ("", "graph", "kernel")


class Kernel(NamedTuple):
    """A launch that has ended. `begun` of its `warps` were seen, `whole` of them with the exit of every lane.

    `call_ns` is CLOCK_MONOTONIC, `start_ns` and `end_ns` the GPU's clock; `launched_by` indexes LAUNCHED_BY.
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


def read_words(payload: memoryview, count: int) -> tuple[int, ...]:
    """The words of arguments of a call's entry."""
    return struct.unpack_from(f"<{count}Q", payload, CALL_ENTER.size)


def read_kernel(payload: memoryview) -> Kernel:
    """The payload of a launch's record."""
    v = KERNEL.unpack_from(payload)
    return Kernel._make((*v[:4], v[4:7], v[7:10], v[10:13], *v[13:]))


def read_warp_count(payload: memoryview) -> int:
    """Warps of a batch."""
    return int(WARPS.unpack_from(payload)[2])


def read_warps(payload: memoryview) -> tuple[int, int, int, Iterator[tuple[str, int, memoryview]]]:
    """Launch, base in ns, warps, and the columns: name, bytes a value, values."""
    launch, base_ns, warps, _, columns = WARPS.unpack_from(payload)
    return launch, base_ns, warps, _columns(payload, columns)


def _columns(payload: memoryview, count: int) -> Iterator[tuple[str, int, memoryview]]:
    at = WARPS.size + count * COLUMN.size
    for number, width, values in COLUMN.iter_unpack(payload[WARPS.size : at]):
        size_bytes = width * values
        if number in COLUMN_NAMES:
            yield COLUMN_NAMES[number], width, payload[at : at + size_bytes]
        at += (size_bytes + 7) // 8 * 8
