// SPDX-License-Identifier: MIT
// The open ranges of a recording with windows: ranges that are open when a window begins are reported then,
// and in the recording they end when the window ends.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "annotation_records.h"
#include "windows.h"

namespace tracepipe {

class WindowRanges {
  public:
    WindowRanges(Channel &channel, Windows &windows) : channel_(channel), windows_(windows) {}

    // On the thread that begins the range; `put` records it if a window is open.
    template <typename Put>
    void begin(uint16_t kind, const Begun &begun, std::string_view text, std::string name, Put put) {
        Ranges *ranges = ranges_of(kind);
        if (!ranges) return;
        std::lock_guard<std::mutex> lock(ranges->mutex);
        report(*ranges);
        if (ranges->turns & 1) put(kind, begun, text);
        ranges->open.push_back({begun, std::string(text), std::move(name), thread_id(), kind});
    }
    // On the thread that ends a range; returns its name, "" if it is not known.
    std::string end(uint16_t kind, const Ended &ended) {
        bool is_pop = kind == KIND_POP;
        Ranges *ranges = ranges_of(is_pop ? KIND_PUSH : KIND_START);
        if (!ranges) return "";
        std::lock_guard<std::mutex> lock(ranges->mutex);
        report(*ranges);
        for (size_t at = ranges->open.size(); at--;) {
            Open &range = ranges->open[at];
            if (is_pop ? range.begun.domain != ended.domain : range.begun.number != ended.number) continue;
            std::string name = std::move(range.name);
            ranges->open.erase(ranges->open.begin() + long(at));
            if (ranges->turns & 1) channel_.put(kind, &ended, sizeof ended);
            return name;
        }
        return "";
    }
    // Reports the ranges of all threads, also of those that no longer call NVTX.
    void report_all() {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto &ranges : threads_) lock_and_report(*ranges);
        lock_and_report(process_);
    }
    // In a child after a fork: the other threads do not exist there, and may have held the locks.
    void forget_other_threads() {
        new (&mutex_) std::mutex;
        new (&process_.mutex) std::mutex;
        process_.open.clear();
        Ranges *mine = own().ranges;
        for (auto &ranges : threads_) ranges.release();
        threads_.clear();
        if (mine) mine->open.clear(), threads_.emplace_back(mine);
    }

  private:
    struct Open {
        Begun begun;
        std::string text, name;
        uint32_t tid;
        uint16_t kind;
    };
    struct Ranges {
        std::mutex mutex;
        uint32_t turns = 0;  // begins and ends of windows that were reported
        std::vector<Open> open;
    };
    // A thread's state. Ranges that its destructors make after this one are not kept.
    struct Own {
        WindowRanges *all = nullptr;
        Ranges *ranges = nullptr;
        bool is_ended = false;
        ~Own() {
            is_ended = true;
            if (ranges) all->remove(std::exchange(ranges, nullptr));
        }
    };
    static Own &own() {
        static thread_local Own own;
        return own;
    }

    Ranges *ranges_of(uint16_t kind) {
        if (kind == KIND_START) return &process_;
        if (!own().ranges && !own().is_ended) {
            std::lock_guard<std::mutex> lock(mutex_);
            own().all = this, own().ranges = threads_.emplace_back(new Ranges).get();
        }
        return own().ranges;
    }
    void remove(Ranges *ended) {
        lock_and_report(*ended);
        std::lock_guard<std::mutex> lock(mutex_);
        for (size_t at = 0; at < threads_.size(); at++)
            if (threads_[at].get() == ended) return void(threads_.erase(threads_.begin() + long(at)));
    }
    void lock_and_report(Ranges &ranges) {
        std::lock_guard<std::mutex> lock(ranges.mutex);
        report(ranges);
    }
    // Ends and begins these ranges as the windows since the last call require.
    void report(Ranges &ranges) {
        uint32_t turns = windows_.turns();
        if (ranges.turns == turns) return;
        if (ranges.turns & 1)
            for (size_t at = ranges.open.size(); at--;) {
                const Open &range = ranges.open[at];
                Ended ended{range.begun.domain, range.begun.number};
                channel_.put(range.kind == KIND_PUSH ? KIND_POP : KIND_END, &ended, sizeof ended, {}, 1, range.tid);
            }
        if (turns & 1)
            for (const Open &range : ranges.open) {
                Begun begun = range.begun;
                begun.flags |= BEGAN_BEFORE;
                channel_.put(range.kind, &begun, sizeof begun, range.text, 1, range.tid);
            }
        ranges.turns = turns;
    }

    Channel &channel_;
    Windows &windows_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Ranges>> threads_;
    Ranges process_;
};

}  // namespace tracepipe
