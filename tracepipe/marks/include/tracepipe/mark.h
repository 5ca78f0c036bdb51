// SPDX-License-Identifier: MIT
// Marks in a CUDA kernel: what each warp does, by name, for `tracepipe capture --gpu warps`.
//
//     #include <tracepipe/mark.h>                        nvcc -I"$(tracepipe include)"
//
//     TRACEPIPE_MARK_BEGIN(load);                        a range of the warp, until …_END of that name
//     tile[threadIdx.x] = a[at];
//     TRACEPIPE_MARK_END(load);
//     { TRACEPIPE_MARK_SCOPE(mma); … }                   the same to the end of the block, on every exit from it
//
// A name is an identifier of at most 13 characters. The lowest active lane marks for its warp. The compiler moves no
// read or write of memory across a mark. Without a capture a mark is a load from constant memory and a
// branch. Needs C++14.
//
// A capture finds `tracepipe_marks` in a module and sets its buffer, which has a ring of records for each hardware slot:
// a slot has one warp at a time, so no other warp writes to its ring. A record is two words, little-endian:
//
//     0           45    46                    64        124   128
//     | clock64() | end | characters 11 to 13 | 1 to 10 | lap |      six bits each: 0 none, a–z, A–Z, 0–9, _
//
// `lap` counts the rounds of the ring, and distinguishes an old record from a new one.
#pragma once

#ifdef __CUDACC__
#define TRACEPIPE_MARK_BOTH_ __host__ __device__
#else
#define TRACEPIPE_MARK_BOTH_
#endif

namespace tracepipe_mark {

struct MarkBuffer {
    unsigned long long records;  // address of MARK_RING records for each slot
    unsigned long long counts;   // address of a u32 for each slot, MARK_LINE bytes apart: how many marks it had
    unsigned int slots;          // greater than any SM × MARK_SLOTS + slot; 0: no capture
    unsigned int zero;
};
#ifdef __CUDACC__
template <int version> __constant__ MarkBuffer tracepipe_marks;
#endif

constexpr unsigned int MARK_SLOTS = 64, MARK_CLOCK_BITS = 45, MARK_REST_SHIFT = 46, MARK_FIRST = 10, MARK_MOST = 13,
                       MARK_LAP_SHIFT = 60, MARK_RING = 1024, MARK_LINE = 128;

TRACEPIPE_MARK_BOTH_ constexpr unsigned long long mark_code(char c) {
    return c >= 'a' && c <= 'z'   ? 1 + (c - 'a')
           : c >= 'A' && c <= 'Z' ? 27 + (c - 'A')
           : c >= '0' && c <= '9' ? 53 + (c - '0')
           : c == '_'             ? 63
                                  : 0;
}
TRACEPIPE_MARK_BOTH_ constexpr bool mark_fits(const char *name) {
    unsigned int at = 0;
    for (; name[at]; at++)
        if (!mark_code(name[at])) return false;
    return at >= 1 && at <= MARK_MOST;
}
// The codes of `count` characters of a name, from `at` on.
TRACEPIPE_MARK_BOTH_ constexpr unsigned long long mark_part(const char *name, unsigned int at, unsigned int count) {
    unsigned long long part = 0;
    bool is_over = false;
    for (unsigned int i = 0; i < at + count; i++) {
        is_over = is_over || !name[i];
        if (i >= at && !is_over) part |= mark_code(name[i]) << 6 * (i - at);
    }
    return part;
}

#ifdef __CUDA_ARCH__
__device__ __forceinline__ void mark(unsigned long long low, unsigned long long high) {
    if (!tracepipe_marks<1>.slots) return;
    unsigned int lanes, before, sm, slot, count;
    unsigned long long clock;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(clock)::"memory");
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(slot));
    asm volatile("activemask.b32 %0;" : "=r"(lanes));
    asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(before));
    unsigned int at = sm * MARK_SLOTS + slot;
    if (at >= tracepipe_marks<1>.slots || lanes & before) return;
    unsigned long long counted = tracepipe_marks<1>.counts + (unsigned long long)at * MARK_LINE;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(count) : "l"(counted));
    unsigned int in_rings = at * MARK_RING + count % MARK_RING;
    unsigned long long record = tracepipe_marks<1>.records + in_rings * 16ull;
    low |= clock & ((1ull << MARK_CLOCK_BITS) - 1);
    high |= (unsigned long long)(count / MARK_RING) << MARK_LAP_SHIFT;
    asm volatile("st.global.v2.u64 [%0], {%1, %2};" ::"l"(record), "l"(low), "l"(high) : "memory");
    asm volatile("st.global.u32 [%0], %1;" ::"l"(counted), "r"(count + 1) : "memory");
}
#else
TRACEPIPE_MARK_BOTH_ inline void mark(unsigned long long, unsigned long long) {}
#endif

template <unsigned long long low, unsigned long long high> struct MarkScope {
    TRACEPIPE_MARK_BOTH_ inline MarkScope() { mark(low, high); }
    TRACEPIPE_MARK_BOTH_ inline ~MarkScope() { mark(low | 1ull << MARK_CLOCK_BITS, high); }
    MarkScope(const MarkScope &) = delete;
    MarkScope &operator=(const MarkScope &) = delete;
};

}  // namespace tracepipe_mark

#define TRACEPIPE_MARK_CHECK_(name)                                                                            \
    static_assert(::tracepipe_mark::mark_fits(#name), "a mark's name is an identifier of 13 characters at most")
#define TRACEPIPE_MARK_LOW_(name)                                                                              \
    (::tracepipe_mark::mark_part(#name, ::tracepipe_mark::MARK_FIRST, 3) << ::tracepipe_mark::MARK_REST_SHIFT)
#define TRACEPIPE_MARK_HIGH_(name) ::tracepipe_mark::mark_part(#name, 0, ::tracepipe_mark::MARK_FIRST)
#define TRACEPIPE_MARK_(name, end)                                                                             \
    do {                                                                                                       \
        TRACEPIPE_MARK_CHECK_(name);                                                                           \
        constexpr unsigned long long low_ = TRACEPIPE_MARK_LOW_(name) | end << ::tracepipe_mark::MARK_CLOCK_BITS;   \
        constexpr unsigned long long high_ = TRACEPIPE_MARK_HIGH_(name);                                       \
        ::tracepipe_mark::mark(low_, high_);                                                                        \
    } while (0)
#define TRACEPIPE_MARK_BEGIN(name) TRACEPIPE_MARK_(name, 0ull)
#define TRACEPIPE_MARK_END(name) TRACEPIPE_MARK_(name, 1ull)
#define TRACEPIPE_MARK_SCOPE(name)                                                                             \
    TRACEPIPE_MARK_CHECK_(name);                                                                               \
    ::tracepipe_mark::MarkScope<TRACEPIPE_MARK_LOW_(name), TRACEPIPE_MARK_HIGH_(name)> tracepipe_scope_##name
