"""A mark in a kernel as PTX, for inline assembly: `include/tracepipe/mark.h` has its record."""

from __future__ import annotations

import re
from typing import Final

_NAME_MOST: Final = 13
_FIRST: Final = 10
_END_SHIFT: Final = 45
_REST_SHIFT: Final = 46
_CHARACTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"

# A variable in a block of PTX belongs to the module: each mark has its own variable, which the capture finds
# by its name.
_ASM = """{
    .reg .pred p, q;
    .reg .b32 lanes, before, slot, slots, count, lap, at;
    .reg .b64 records, counted, record, low, high;
    .const .align 8 .b8 tracepipe_marks[24];
    mov.u32 $0, 0;
    ld.const.u32 slots, [tracepipe_marks + 16];
    setp.eq.u32 p, slots, 0;
    @p bra done;
    mov.u64 low, %clock64;
    mov.u32 at, %smid;
    mov.u32 slot, %warpid;
    activemask.b32 lanes;
    mov.u32 before, %lanemask_lt;
    mad.lo.u32 at, at, 64, slot;
    and.b32 lanes, lanes, before;
    setp.ne.u32 q, lanes, 0;
    setp.ge.or.u32 p, at, slots, q;
    @p bra done;
    ld.const.u64 records, [tracepipe_marks];
    ld.const.u64 counted, [tracepipe_marks + 8];
    mad.wide.u32 counted, at, 128, counted;
    ld.global.u32 count, [counted];
    and.b32 lap, count, 1023;
    mad.lo.u32 at, at, 1024, lap;
    mad.wide.u32 record, at, 16, records;
    and.b64 low, low, CLOCK_MASK;
    or.b64 low, low, LOW;
    shr.u32 lap, count, 10;
    cvt.u64.u32 high, lap;
    shl.b64 high, high, 60;
    or.b64 high, high, HIGH;
    st.global.v2.u64 [record], {low, high};
    add.u32 count, count, 1;
    st.global.u32 [counted], count;
done:
}"""


class Mark:
    """The PTX of a mark is its `text`, in which `$0` is a register that it sets to 0, as LLVM writes it.

    Raises ValueError for an invalid name. It is a class, as Triton compiles the functions that a kernel
    calls, but not classes.
    """

    def __init__(self, name: str, is_end: bool) -> None:
        if len(name) > _NAME_MOST or not re.fullmatch(r"[A-Za-z0-9_]+", name):
            raise ValueError(f"{name!r} is no mark's name: an identifier of {_NAME_MOST} characters at most")
        codes = [1 + _CHARACTERS.index(character) for character in name]
        high = sum(code << 6 * at for at, code in enumerate(codes[:_FIRST]))
        low = sum(code << 6 * at + _REST_SHIFT for at, code in enumerate(codes[_FIRST:]))
        words = {"LOW": low | is_end << _END_SHIFT, "HIGH": high, "CLOCK_MASK": (1 << _END_SHIFT) - 1}
        self.text = _ASM
        for word, value in words.items():
            self.text = self.text.replace(word, hex(value))
