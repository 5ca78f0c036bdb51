// Clock pairs: a kernel answers the host through memory that both see, and the fastest of some hundred
// rounds says when %globaltimer showed what.
#pragma once
#include "driver.h"
#include "warp_columns.h"

namespace tracepipe {

// answer(asked, answered, ns, rounds, limit_ns): in each round waits for the host's number, writes
// %globaltimer, then the number. It ends after limit_ns whatever the host does. PTX, so that the driver
// compiles it for the GPU at hand.
constexpr const char *ANSWER_PTX = R"(
.version 6.0
.target sm_60
.address_size 64
.visible .entry tracepipe_answer(.param .u64 asked, .param .u64 answered, .param .u64 ns, .param .u32 rounds,
                                 .param .u64 limit_ns)
{
    .reg .pred %p<4>;
    .reg .b32 %round, %rounds, %seen, %polls, %low;
    .reg .b64 %asked, %answered, %ns, %limit, %begin, %now, %past;
    ld.param.u64 %asked, [asked];
    ld.param.u64 %answered, [answered];
    ld.param.u64 %ns, [ns];
    ld.param.u32 %rounds, [rounds];
    ld.param.u64 %limit, [limit_ns];
    mov.u64 %begin, %globaltimer;
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
    mov.u64 %now, %globaltimer;
    st.volatile.global.u64 [%ns], %now;
    membar.sys;
    st.volatile.global.u32 [%answered], %round;
    add.u32 %round, %round, 1;
    setp.le.u32 %p3, %round, %rounds;
    @%p3 bra WAIT;
END:
    ret;
}
)";

class ClockPairs {
  public:
    // With the context current. False where the driver refuses.
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

    // The fastest of `rounds`; false if the GPU was too busy to answer in time.
    bool take(uint32_t rounds, ClockRecord &best) {
        auto asked = reinterpret_cast<volatile uint32_t *>(flags_);
        auto answered = reinterpret_cast<volatile uint32_t *>(flags_ + 64);
        auto answer_ns = reinterpret_cast<volatile uint64_t *>(flags_ + 128);
        *asked = *answered = 0;
        CUdeviceptr device_asked = device_, device_answered = device_ + 64, device_ns = device_ + 128;
        uint64_t limit_ns = 50'000'000;
        void *arguments[] = {&device_asked, &device_answered, &device_ns, &rounds, &limit_ns};
        if (driver().launchKernel(answer_, 1, 1, 1, 1, 1, 1, 0, stream_, arguments, nullptr) != CUDA_SUCCESS)
            return false;
        uint64_t give_up_ns = monotonic_ns() + 100'000'000, width_ns = ~uint64_t(0);
        bool is_late = false;
        for (uint32_t round = 1; round <= rounds && !is_late; round++) {
            uint64_t before_ns = monotonic_ns(), after_ns;
            __atomic_store_n(const_cast<uint32_t *>(asked), round, __ATOMIC_RELEASE);
            do {
                after_ns = monotonic_ns();
                is_late = after_ns > give_up_ns;
            } while (*answered < round && !is_late);
            // The answer was seen after a reading of the clock that may be older than it.
            after_ns = monotonic_ns();
            if (!is_late && after_ns - before_ns < width_ns) {
                width_ns = after_ns - before_ns;
                best.source_ns = *answer_ns;
                best.host_lo_ns = before_ns;
                best.host_hi_ns = after_ns;
            }
        }
        if (is_late) *asked = rounds;  // lets the kernel end at once, when it comes to run
        if (driver().streamSynchronize(stream_) != CUDA_SUCCESS) return false;
        return width_ns != ~uint64_t(0);
    }

  private:
    CUstream stream_ = nullptr;
    CUmodule module_ = nullptr;
    CUfunction answer_ = nullptr;
    CUdeviceptr device_ = 0;
    volatile char *flags_ = nullptr;
};

}  // namespace tracepipe
