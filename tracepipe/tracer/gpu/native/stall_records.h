// SPDX-License-Identifier: MIT
// The records of stall_sampler.h: kinds 49 to 52 of transport.h.
//
// All integers are little-endian, without further padding; stalls.py has the same layouts. Times are
// ns of CLOCK_MONOTONIC. Names of functions and lines are those of NAME records.
#pragma once
#include <cstdint>

namespace tracepipe {

enum StallKind : uint16_t {
    KIND_STALL_REASON = 49,  // | reason u32 | text: CUPTI's name for a number of this pid
    KIND_STALLS = 50,        // one StallsHead, then Stall[]: the samples of a stretch
    KIND_STALL_PCS = 51,     // one StallsHead, then StallPc[]: those of a longer stretch, by instruction
    KIND_STALL_LOSS = 52,    // one StallLoss, then text: why samples were lost
};

struct StallsHead {
    uint64_t start_ns, end_ns;
    uint32_t gpu, period_log2;  // 2^period_log2 cycles are between two samples on an SM
};

struct Stall {
    uint64_t function;
    uint32_t reason, samples;
};

struct StallPc {
    uint64_t function, module, offset_bytes;  // module: CUPTI's CRC of its machine code
    uint64_t line;                            // name of a source line, 0 if it is not known
    uint32_t reason, samples;
};

struct StallLoss {
    uint64_t start_ns, end_ns, samples;
};

static_assert(sizeof(StallsHead) == 24 && sizeof(Stall) == 16 && sizeof(StallPc) == 40 && sizeof(StallLoss) == 24);

}  // namespace tracepipe
