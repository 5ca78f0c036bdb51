// SPDX-License-Identifier: MIT
// Windows of a recording: events are recorded only in them. All processes of a recording and the capture
// process read and increment the same word of the channel's memory: it is odd while a window is open, and
// always 1 in a recording without windows.
//
// Hits of triggers begin and end windows here: an NVTX range, a profiler function, a launch. The triggers are
// in TRACEPIPE_WINDOW_BEGIN and TRACEPIPE_WINDOW_END: `NUMBER KIND NAME`.
#pragma once
#include <climits>
#include <cstdlib>
#include <linux/futex.h>
#include <string>

#include "settings.h"
#include "transport.h"

// The capture process may attach probes to these, to see that a window begins or ends.
extern "C" {
__attribute__((noinline, used, visibility("default"))) void tracepipe_window_begins() { asm volatile("nop"); }
__attribute__((noinline, used, visibility("default"))) void tracepipe_window_ends() { asm volatile("nop"); }
}

namespace tracepipe {

struct Trigger {
    uint32_t number = 0;
    std::string kind, name;

    void read(const char *variable) {
        const char *text = settings().get(variable);
        char *rest = nullptr;
        if (!text) return;
        number = uint32_t(strtoul(text, &rest, 10));
        std::string words = *rest ? rest + 1 : rest;
        size_t end = words.find(' ');
        kind = words.substr(0, end), name = end == std::string::npos ? "" : words.substr(end + 1);
    }
    bool is(std::string_view what) const { return kind == what; }
};

class Windows {
  public:
    Trigger begins, ends;

    explicit Windows(Channel &channel) : channel_(channel) {}
    // Call it when the channel is open.
    void open() {
        header_ = channel_.shared();
        if (!header_->has_windows) return;
        begins.read("TRACEPIPE_WINDOW_BEGIN"), ends.read("TRACEPIPE_WINDOW_END");
    }
    // Whether the recording has windows.
    bool are_asked() const { return header_->has_windows; }
    bool is_open() const { return turns() & 1; }
    // The number of begins and ends of windows.
    uint32_t turns() const { return header_->turns.load(std::memory_order_acquire); }
    // Waits until that differs from `seen`, or for `limit_ms`.
    void wait(uint32_t seen, long limit_ms) const {
        timespec limit{limit_ms / 1000, limit_ms % 1000 * 1'000'000};
        syscall(SYS_futex, &header_->turns, FUTEX_WAIT, seen, &limit, nullptr, 0);
    }
    // A hit of the trigger that begins windows; whether it began one.
    bool begin() {
        uint32_t seen = turns();
        if (seen & 1 || !header_->windows_left) return false;
        if (header_->begin_hits.fetch_add(1) + 1 < begins.number) return false;
        if (!turn(seen)) return false;
        header_->begin_hits = header_->end_hits = 0;
        header_->windows_left--;
        tracepipe_window_begins();
        return true;
    }
    // A hit of the trigger that ends them; whether the window is to end with it.
    bool is_last_hit() { return is_open() && header_->end_hits.fetch_add(1) + 1 >= ends.number; }
    // Ends the window; whether this call did.
    bool end() {
        uint32_t seen = turns();
        bool is_ended = seen & 1 && turn(seen);
        if (is_ended) tracepipe_window_ends();
        return is_ended;
    }

  private:
    // Ends the waiting of all threads, of any process.
    void wake() const { syscall(SYS_futex, &header_->turns, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
    bool turn(uint32_t seen) {
        header_->turned_ns[(seen + 1) % 16] = monotonic_ns();
        if (!header_->turns.compare_exchange_strong(seen, seen + 1)) return false;
        wake();
        return true;
    }

    Channel &channel_;
    ChannelHeader *header_ = nullptr;
};

}  // namespace tracepipe
