// SPDX-License-Identifier: MIT
// Keeps the program's threads out of the driver for a moment, while its code on the GPU is changed.
//
// Each thread marks in its own place that it is inside, so that calls on many threads share no cache line,
// and then checks whether the gate is closed. The closing thread first closes the gate and then checks the
// places. So one of the two sees the other.
#pragma once
#include <atomic>
#include <ctime>
#include <mutex>
#include <vector>

#include "transport.h"

namespace tracepipe {

class Gate {
  public:
    // The place of a thread; never destroyed, as its thread may end at any time.
    struct Place {
        std::atomic<bool> is_inside{false};
        unsigned depth = 0;  // of nested calls
    };

    void add(Place &place) {
        std::lock_guard<std::mutex> lock(mutex_);
        places_.push_back(&place);
    }
    // At the begin of a call: waits while the gate is closed.
    void enter(Place &place) {
        if (place.depth++) return;
        for (;;) {
            place.is_inside.store(true);
            if (!is_closed_.load()) return;
            place.is_inside.store(false);
            while (is_closed_.load(std::memory_order_relaxed)) pause();
        }
    }
    void leave(Place &place) {
        if (place.depth && --place.depth == 0) place.is_inside.store(false, std::memory_order_release);
    }
    // From the library's thread: true when no thread is inside; false, and open again, if that took too long.
    bool close(uint64_t by_ns) {
        is_closed_ = true;
        while (is_anyone_inside()) {
            if (monotonic_ns() > by_ns) return open(), false;
            pause();
        }
        return true;
    }
    void open() { is_closed_ = false; }

    static void pause() {
        timespec shortly{0, 20'000};
        nanosleep(&shortly, nullptr);
    }

  private:
    bool is_anyone_inside() {
        std::lock_guard<std::mutex> lock(mutex_);
        for (Place *place : places_)
            if (place->is_inside.load()) return true;
        return false;
    }

    std::atomic<bool> is_closed_{false};
    std::mutex mutex_;
    std::vector<Place *> places_;
};

}  // namespace tracepipe
