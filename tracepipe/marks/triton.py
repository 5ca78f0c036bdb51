"""Marks in a Triton kernel: what each warp does, by name, for `tracepipe capture --gpu warps`.

    from tracepipe.marks import triton as marks

    @triton.jit
    def kernel(...):
        marks.begin("load")
        x = tl.load(pointers)
        marks.end("load")

A name is an identifier of at most 13 characters. Without a capture a mark is a load from constant memory and
a branch. A mark does not wait for values that were loaded before it, unless code between the marks uses them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tracepipe.marks.ptx import Mark


@triton.constexpr_function  # type: ignore[untyped-decorator]
def _asm(name: str, is_end: bool) -> str:
    return Mark(name, is_end).text


@triton.jit  # type: ignore[untyped-decorator]
def begin(name: tl.constexpr) -> None:
    """A range of the warp begins."""
    asm: tl.constexpr = _asm(name, False)
    tl.inline_asm_elementwise(asm, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def end(name: tl.constexpr) -> None:
    """The range of that name ends."""
    asm: tl.constexpr = _asm(name, True)
    tl.inline_asm_elementwise(asm, "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)
