// SPDX-License-Identifier: MIT
// Computes a clock pair, a reading of %globaltimer with its host time, from rounds of question and answer.
//
//     host   asks ────────────────╮                  ╭──▶ sees the answer
//     GPU    ·····polls···········╰▶ reads its clock ╯
//
// The clock was read after the host asked and before it saw the answer. The time of each way differs from
// round to round. So the latest question and the earliest answer, each minus the reading, bound the offset
// more closely than the fastest round does. Of two rounds, one can have read the clock at the start of its
// step (32 ns on an H200, 1 µs on older GPUs) and the other at its end, so the bounds are widened by a step.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "warp_columns.h"

namespace tracepipe {

// One answer: a reading of %globaltimer between two of CLOCK_MONOTONIC.
struct ClockRound {
    uint64_t before_ns, source_ns, after_ns;
};

// The pair that results from rounds within milliseconds; false without rounds. Between rounds, a clock is
// assumed to drift by up to 100 ppm. The fastest round alone is used if its bounds are closer, if the rounds
// contradict each other, as a clock was set meanwhile, and if all are in the same step, whose length is then
// not known.
inline bool clock_pair_of(const std::vector<ClockRound> &rounds, ClockRecord &pair) {
    if (rounds.empty()) return false;
    const ClockRound &middle = rounds[rounds.size() / 2], *fastest = &middle;
    int64_t low_ns = INT64_MIN, high_ns = INT64_MAX, step_ns = 0;  // low, high: host's clock minus the GPU's
    for (const ClockRound &round : rounds) {
        int64_t apart_ns = std::abs(int64_t(round.source_ns - middle.source_ns)), drift_ns = apart_ns / 10'000 + 1;
        step_ns = std::gcd(step_ns, apart_ns);
        low_ns = std::max(low_ns, int64_t(round.before_ns - round.source_ns) - drift_ns);
        high_ns = std::min(high_ns, int64_t(round.after_ns - round.source_ns) + drift_ns);
        if (round.after_ns - round.before_ns < fastest->after_ns - fastest->before_ns) fastest = &round;
    }
    low_ns -= step_ns, high_ns += step_ns;
    bool is_closer = high_ns - low_ns < int64_t(fastest->after_ns - fastest->before_ns);
    if (is_closer && low_ns <= high_ns && step_ns)
        pair.source_ns = middle.source_ns, pair.host_lo_ns = middle.source_ns + uint64_t(low_ns),
        pair.host_hi_ns = middle.source_ns + uint64_t(high_ns);
    else
        pair.source_ns = fastest->source_ns, pair.host_lo_ns = fastest->before_ns, pair.host_hi_ns = fastest->after_ns;
    return true;
}

}  // namespace tracepipe
