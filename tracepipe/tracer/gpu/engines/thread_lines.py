"""Makes a line for each thread's exit from a batch of warps and the masks of their exits.

{"ts_ns":1795,"type":"gpu_thread","name":"k","phase":"I","clock":"globaltimer:0","gpu":0,"launch":7,"pid":11,
 "block":[0,0,0],"thread":[31,0,0],"args":{"event":"exit"}}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tracepipe.tracer.records.bounds import INDEX_LIMIT, TIME_LIMIT_NS

_LANES: Final = 32
_THREADS_MAX: Final = 1024
_FULL_MASK: Final = (1 << _LANES) - 1
_WARPS_AT_ONCE: Final = 256
_KEPT: Final = ("clock", "gpu", "launch", "pid")
_END: Final = ',"args":{"event":"exit"}}\n'


def thread_lines(batch: Mapping[str, Any]) -> Iterator[list[str]]:
    """The lines of a record of warps, for a few hundred warps at a time; none if the record has no sizes."""
    grid, block = batch.get("grid", ()), batch.get("block", ())
    threads = block[0] * block[1] * block[2] if block else 0
    # The input is untrusted. No CUDA block has more threads, and every line must be valid.
    if not grid or 0 in grid or max(grid) > INDEX_LIMIT or not 0 < threads <= _THREADS_MAX:
        return
    known = {"type": "gpu_thread", "name": batch["name"], "phase": "I"}
    known |= {name: batch[name] for name in _KEPT if name in batch}
    head = json.dumps(known, separators=(",", ":"))[1:-1]
    # The part of each thread's line that follows the block.
    ends = [f',"thread":{_index(thread, block)}{_END}' for thread in range(threads)]
    warps_a_block = -(-threads // _LANES)
    lines: list[str] = []
    for done, (number, exits) in enumerate(_exits(batch), 1):
        block_number, warp = divmod(number, warps_a_block)
        if block_number >= grid[0] * grid[1] * grid[2]:
            continue
        of_warp = ends[warp * _LANES : (warp + 1) * _LANES]
        where = f',{head},"block":{_index(block_number, grid)}'
        for ts_ns, mask in exits:
            if ts_ns > TIME_LIMIT_NS:
                continue
            start = f'{{"ts_ns":{ts_ns}{where}'
            lines += [start + end for lane, end in enumerate(of_warp) if mask >> lane & 1]
        if done % _WARPS_AT_ONCE == 0:
            yield lines
            lines = []
    yield lines


def _exits(batch: Mapping[str, Any]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The number of each warp, and its exits: time and mask."""
    warps = batch["warp"]
    counts = batch.get("exit_count") or [1] * len(warps)
    entry_masks = batch.get("entry_mask") or [_FULL_MASK] * len(warps)
    masks = batch.get("exit_mask")
    at = 0
    for number, entry_ns, entered, count in zip(warps, batch["entry_ns"], entry_masks, counts, strict=True):
        entry_ns += batch["ts_ns"]
        yield (
            number,
            [
                (entry_ns + batch["exit_ns"][exit], masks[exit] if masks else entered)
                for exit in range(at, at + count)
            ],
        )
        at += count


def _index(number: int, size: Sequence[int]) -> str:
    """x, y and z of a linear index in a box of `size`; x varies fastest."""
    x, y, _ = size
    return f"[{number % x},{number // x % y},{number // (x * y)}]"
