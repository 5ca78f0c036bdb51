"""A Triton kernel with marks, to be recorded: it doubles a vector."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tracepipe.marks import triton as marks

COUNT, BLOCK = 1 << 16, 1024


@triton.jit
def doubled(source, target, count, block: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * block + tl.arange(0, block)
    marks.begin("load")
    values = tl.load(source + at, mask=at < count)
    marks.end("load")
    marks.begin("Store_0123456")
    tl.store(target + at, values * 2, mask=at < count)
    marks.end("Store_0123456")


def main() -> None:
    source = torch.arange(COUNT, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    for _ in range(3):
        doubled[(COUNT // BLOCK,)](source, target, COUNT, BLOCK, num_warps=4)
    print(bool((target == 2 * source).all()))


if __name__ == "__main__":
    main()
