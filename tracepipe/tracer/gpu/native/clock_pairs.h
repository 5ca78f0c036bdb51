// SPDX-License-Identifier: MIT
// Takes clock pairs: a kernel answers the host through shared memory, a few hundred times for a pair.
#pragma once
#include "clock_rounds.h"
#include "driver.h"

namespace tracepipe {

// answer(asked, answer, rounds, limit_ns): in each round it waits for the host's number and writes a new
// value of %globaltimer. That single word is both the answer and its time; a second word would have to wait
// until the first has arrived. The kernel ends after limit_ns whatever the host does. It is PTX, so that the
// driver compiles it for the present GPU.
constexpr const char *ANSWER_PTX = R"(
.version 6.0
.target sm_60
.address_size 64
.visible .entry tracepipe_answer(.param .u64 asked, .param .u64 answer, .param .u32 rounds, .param .u64 limit_ns)
{
    .reg .pred %p<4>;
    .reg .b32 %round, %rounds, %seen, %polls, %low;
    .reg .b64 %asked, %answer, %limit, %begin, %now, %last, %past;
    ld.param.u64 %asked, [asked];
    ld.param.u64 %answer, [answer];
    ld.param.u32 %rounds, [rounds];
    ld.param.u64 %limit, [limit_ns];
    mov.u64 %begin, %globaltimer;
    mov.u64 %last, 0;
    mov.u32 %round, 1;
    mov.u32 %polls, 0;
WAIT:
    add.u32 %polls, %polls, 1;
    and.b32 %low, %polls, 63;
    setp.ne.u32 %p1, %low, 0;
    @%p1 bra POLL;
    mov.u64 %now, %globaltimer;
    sub.s64 %past, %now, %begin;
    setp.gt.u64 %p1, %past, %limit;
    @%p1 bra END;
POLL:
    ld.volatile.global.u32 %seen, [%asked];
    setp.lt.u32 %p2, %seen, %round;
    @%p2 bra WAIT;
READ:
    mov.u64 %now, %globaltimer;
    setp.eq.u64 %p2, %now, %last;
    @%p2 bra READ;
    st.volatile.global.u64 [%answer], %now;
    mov.u64 %last, %now;
    add.u32 %round, %round, 1;
    setp.le.u32 %p3, %round, %rounds;
    @%p3 bra WAIT;
END:
    ret;
}
)";

class ClockPairs {
  public:
    // Call it while the context is current. False if the driver refuses.
    bool open(CUstream stream) {
        stream_ = stream;
        void *flags = nullptr;
        if (driver().moduleLoadData(&module_, ANSWER_PTX) != CUDA_SUCCESS) return false;
        if (driver().moduleGetFunction(&answer_, module_, "tracepipe_answer") != CUDA_SUCCESS) return false;
        if (driver().memHostAlloc(&flags, 256, CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE) != CUDA_SUCCESS)
            return false;
        if (driver().memHostGetDevicePointer(&device_, flags, 0) != CUDA_SUCCESS) return false;
        flags_ = static_cast<volatile char *>(flags);
        return true;
    }
    bool is_open() const { return flags_ != nullptr; }

    // False if the GPU was too busy to answer in time.
    bool take(uint32_t rounds, ClockRecord &pair) {
        auto asked = reinterpret_cast<volatile uint32_t *>(flags_);
        auto answer = reinterpret_cast<volatile uint64_t *>(flags_ + 64);
        *asked = 0, *answer = 0;
        CUdeviceptr device_asked = device_, device_answer = device_ + 64;
        uint64_t limit_ns = 50'000'000;
        void *arguments[] = {&device_asked, &device_answer, &rounds, &limit_ns};
        if (driver().launchKernel(answer_, 1, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr) != CUDA_SUCCESS)
            return false;
        uint64_t give_up_ns = monotonic_ns() + 100'000'000;
        std::vector<ClockRound> taken;
        taken.reserve(rounds);
        bool is_late = false;
        uint64_t last_ns = 0, source_ns = 0;
        for (uint32_t round = 1; round <= rounds && !is_late; round++) {
            uint64_t before_ns = monotonic_ns(), after_ns;
            __atomic_store_n(const_cast<uint32_t *>(asked), round, __ATOMIC_RELEASE);
            do {
                after_ns = monotonic_ns();
                is_late = after_ns > give_up_ns;
            } while ((source_ns = *answer) == last_ns && !is_late);
            // The last reading of the clock may precede the answer, so it is read again.
            after_ns = monotonic_ns();
            if (!is_late) taken.push_back({before_ns, source_ns, after_ns});
            last_ns = source_ns;
        }
        if (is_late) *asked = rounds;  // so that the kernel ends at once when it runs
        if (driver().streamSynchronize(stream_) != CUDA_SUCCESS) return false;
        return clock_pair_of(taken, pair);
    }

  private:
    CUstream stream_ = nullptr;
    CUmodule module_ = nullptr;
    CUfunction answer_ = nullptr;
    CUdeviceptr device_ = 0;
    volatile char *flags_ = nullptr;
};

}  // namespace tracepipe
