// A kernel with marks for sanitizer_standin.cpp: its module's machine code, as far as the library looks at it, and
// what one of its warps writes to the GPU's memory, which is the host's.
#pragma once
#include <atomic>

#include <tracepipe/mark.h>

#include "cubin_standin.h"
#include "marks.h"
#include "warp_record.h"

static_assert(tracepipe_mark::MARK_SLOTS == tracepipe::MARK_SLOTS && tracepipe_mark::MARK_MOST == tracepipe::MARK_MOST);
static_assert(tracepipe_mark::MARK_CLOCK_BITS == tracepipe::MARK_CLOCK_BITS);
static_assert(tracepipe_mark::MARK_RING == tracepipe::MARK_RING && tracepipe_mark::MARK_LINE == tracepipe::MARK_LINE);
static_assert(sizeof(tracepipe_mark::MarkBuffer) == sizeof(tracepipe::MarkBuffer));

constexpr char MARKED_SYMBOL[] = "_ZN14tracepipe_mark15tracepipe_marksILi1EEE";

// An ELF file with one object and one function.
struct MarkedCubin : CubinStandin<3> {
    MarkedCubin() : CubinStandin("\0k", 3) {
        symbols[1].st_name = 1, symbols[1].st_info = STT_FUNC;
        symbols[2].st_name = 3, symbols[2].st_info = STT_OBJECT;
        memcpy(names + 3, MARKED_SYMBOL, sizeof MARKED_SYMBOL);
    }
};

// One warp of a launch of one block: in slot 7 of SM 0, for 1000 cycles.
inline void run_marking_warp(uint64_t data, const tracepipe_mark::MarkBuffer &buffer) {
    static uint64_t entry_clk = 0;
    uint64_t clk = entry_clk += 5000;
    auto mark = [&](uint64_t low, uint64_t high) {
        if (!buffer.slots) return;
        auto *count = reinterpret_cast<uint32_t *>(buffer.counts + 7 * tracepipe_mark::MARK_LINE);
        auto *ring = reinterpret_cast<uint64_t *>(buffer.records) + 7 * 2 * tracepipe_mark::MARK_RING;
        uint64_t *record = ring + 2 * (*count % tracepipe_mark::MARK_RING);
        record[0] = low | (clk += 100), record[1] = high | uint64_t(*count / tracepipe_mark::MARK_RING) << 60;
        ++*count;
    };
    constexpr uint64_t END = 1ull << tracepipe_mark::MARK_CLOCK_BITS;
    mark(TRACEPIPE_MARK_LOW_(load), TRACEPIPE_MARK_HIGH_(load));
    mark(TRACEPIPE_MARK_LOW_(load) | END, TRACEPIPE_MARK_HIGH_(load));
    mark(TRACEPIPE_MARK_LOW_(mma), TRACEPIPE_MARK_HIGH_(mma));
    if (!data) return;
    auto *warp = reinterpret_cast<tracepipe::Warp *>((data << 16 >> 16 & ~(tracepipe::REGION_ALIGNMENT - 1)) +
                                                     sizeof(tracepipe::Region));
    *warp = {5000, entry_clk, 7u << 16, 0xffffffff, 0, 0, 0, entry_clk + 1000};
    // The library takes the exit's time as the sign that the warp has left.
    reinterpret_cast<std::atomic<uint64_t> *>(&warp->exit_ns)->store(5500);
}
