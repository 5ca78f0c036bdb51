// SPDX-License-Identifier: MIT
// Prevents changes of code on the GPU during captures of streams.
//
// Patching a module, or unloading a patched one, invalidates open captures of streams by other threads,
// whatever their modes (error 901). If such a thread is in the driver at that moment, the program dies
// (Compute Sanitizer 13.0, driver 580). A capture by the same thread is not affected: if a kernel is first
// used in it, its module is loaded there.
#pragma once
#include <atomic>
#include <map>
#include <mutex>

#include <cuda.h>

#include "gate.h"
#include "transport.h"

namespace tracepipe {

class Captures {
  public:
    bool is_any() const { return is_any_; }

    // At the begin of the call that begins a stream's capture: waits while code is changed, which takes about
    // 0.1 ms, and gives precedence to a thread that waits to change it.
    void begin(CUstream stream) {
        for (;; Gate::pause()) {
            std::lock_guard<std::mutex> lock(mutex_);
            if (changes_ || (waiting_ && !has_own())) continue;
            streams_[stream] = thread_id();
            return void(is_any_ = true);
        }
    }
    // That call failed, or the capture is over, or the stream is destroyed.
    void end(CUstream stream) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (streams_.erase(stream)) has_waited_ = false;
        is_any_ = !streams_.empty();
    }
    // Whether this thread may change code now: then no capture begins until `changed`.
    bool may_change() {
        std::lock_guard<std::mutex> lock(mutex_);
        return try_to_change();
    }
    void changed() {
        std::lock_guard<std::mutex> lock(mutex_);
        changes_--;
    }
    // The same for a change that the program itself is about to make: waits for the captures to end. The wait
    // is limited, as the capturing thread may wait for this one, and is not repeated for the same captures.
    bool wait_to_change() {
        uint64_t by_ns = monotonic_ns() + LONGEST_WAIT_NS;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_++;
        bool may = try_to_change();
        for (; !may && !has_waited_; may = try_to_change()) {
            lock.unlock();
            Gate::pause();
            lock.lock();
            if (monotonic_ns() > by_ns) has_waited_ = true;
        }
        waiting_--;
        return may;
    }

  private:
    bool try_to_change() {
        for (auto &[stream, thread] : streams_)
            if (thread != thread_id()) return false;
        changes_++;
        return true;
    }
    bool has_own() const {
        for (auto &[stream, thread] : streams_)
            if (thread == thread_id()) return true;
        return false;
    }

    static constexpr uint64_t LONGEST_WAIT_NS = 2'000'000'000;

    std::mutex mutex_;
    std::map<CUstream, uint32_t> streams_;  // that are captured → the thread that began the capture
    std::atomic<bool> is_any_{false};
    bool has_waited_ = false;
    unsigned changes_ = 0, waiting_ = 0;
};

}  // namespace tracepipe
