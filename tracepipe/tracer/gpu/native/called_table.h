// SPDX-License-Identifier: MIT
// The device functions that the patches of CALL and RET record, the places of their code, and a call's
// record.
//
// The table precedes the regions of a context, at a multiple of CALLS_ALIGNMENT: a patch finds it by the
// address of its launch's region. While kernels run, only the part after `sections` is extended.
//
// The records have the form of marks (tracepipe/mark.h), in separate rings. They have no name, which is never
// empty in a mark, but:
//
//     0 ........ 45    46 ... 64     0   6       38     60    64
//     | clock64() | end | 0     |    | 0 | lanes | name | lap |
//
// Diverged lanes of a warp call separately, and lanes that called together may return one after the other.
#pragma once
#include <cstdint>

namespace tracepipe {

struct CalledSection {
    uint64_t begin, end;    // addresses of its code
    uint32_t first, count;  // of CalledTable::functions
};
struct CalledFunction {
    uint32_t begin, end;  // offsets in its section
    uint32_t name, zero;  // a number of KIND_NAME
};
constexpr uint32_t MOST_CALLED_SECTIONS = 256, MOST_CALLED = 2048;
struct CalledTable {
    uint64_t records, counts;  // as in MarkBuffer
    uint32_t slots, sections;
    CalledSection section[MOST_CALLED_SECTIONS];
    CalledFunction functions[MOST_CALLED];
};
constexpr uint64_t CALLS_ALIGNMENT = 1u << 28, CALLED_TABLE_BYTES = 40960;
static_assert(sizeof(CalledTable) <= CALLED_TABLE_BYTES && CALLED_TABLE_BYTES % 256 == 0, "");

// The same as in tracepipe/mark.h.
constexpr uint64_t MARK_SLOTS = 64, MARK_CLOCK_BITS = 45, MARK_LAP_SHIFT = 60;
constexpr uint32_t MARK_RING = 1024, MARK_LINE = 128;

constexpr uint64_t CALL_LANES_SHIFT = 6, CALL_NAME_SHIFT = 38, CALL_NAME_BITS = 22;

}  // namespace tracepipe
