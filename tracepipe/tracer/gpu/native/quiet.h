// SPDX-License-Identifier: MIT
// Finds a moment to change a running program's code: none of its threads is in the driver, and its GPUs are
// idle.
#pragma once
#include "captures.h"
#include "context.h"
#include "driver.h"
#include "gate.h"

namespace tracepipe {

class Quiet {
  public:
    Gate gate;
    Captures captures;  // asking whether the GPU is idle would invalidate them
    std::atomic<bool> is_tried{false};

    // Whether the driver can report that a context is idle without waiting for it.
    static bool can_be_known() { return driver().ctxRecordEvent != nullptr; }

    // From the library's thread: calls `work` while no thread of the program is in the driver. False if there
    // was no such moment, or if `work` returns false. The program is held up meanwhile, and the work that is
    // waited for may need its threads in order to end. So each attempt is short, longer attempts follow
    // longer pauses, and the program is held up for at most a fiftieth of its time.
    template <typename Work> bool hold(Work work) {
        uint64_t now_ns = monotonic_ns(), by_ns = now_ns + hold_ns_;
        if (now_ns < next_ns_) return false;
        bool is_done = gate.close(by_ns);
        if (is_done) {
            is_done = work(by_ns);
            gate.open();
        }
        is_tried = true;
        if (is_done) return true;
        next_ns_ = monotonic_ns() + PAUSES * hold_ns_;
        hold_ns_ = std::min(2 * hold_ns_, LONGEST_NS);
        return false;
    }
    // The same while the GPUs are idle too.
    template <typename Work> bool take(const std::vector<std::shared_ptr<Context>> &contexts, Work work) {
        if (captures.is_any() || !can_be_known()) return false;
        return hold([&](uint64_t by_ns) {
            if (captures.is_any() || !are_idle(contexts, by_ns)) return false;
            work();
            return true;
        });
    }

  private:
    static constexpr uint64_t PAUSES = 50, SHORTEST_NS = 20'000'000, LONGEST_NS = 320'000'000;

    static bool are_idle(const std::vector<std::shared_ptr<Context>> &contexts, uint64_t by_ns) {
        for (auto &context : contexts)
            if (!context->is_dead && !is_idle(*context, by_ns)) return false;
        return true;
    }
    static bool is_idle(Context &context, uint64_t by_ns) {
        Current current(context.handle);
        CUresult result = current.result;
        if (result == CUDA_SUCCESS && !context.all_work)
            result = driver().eventCreate(&context.all_work, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS) result = driver().ctxRecordEvent(context.handle, context.all_work);
        if (result == CUDA_SUCCESS)
            while ((result = driver().eventQuery(context.all_work)) == CUDA_ERROR_NOT_READY && monotonic_ns() < by_ns)
                Gate::pause();
        return result == CUDA_SUCCESS;
    }

    uint64_t next_ns_ = 0, hold_ns_ = SHORTEST_NS;
};

}  // namespace tracepipe
