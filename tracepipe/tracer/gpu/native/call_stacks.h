// SPDX-License-Identifier: MIT
// Finds the Python stacks of the calls that CUPTI records, without a subscription to its callbacks, which
// only one client can have.
//
//     calling thread ──CUPTI's clock──▶ its stack, if it has changed ──▶ Thread ──▶ history by thread ──▶ a call
//                                                                        (ring)     (the translator's thread)
//
// CUPTI calls its client's clock on the calling thread when a recorded call begins and ends. So a call's
// stack is the last one of its thread at the call's start. A thread overwrites its own ring and never waits:
// a call whose stack was overwritten has none.
#pragma once
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "python_stacks.h"

namespace tracepipe {

class CallStacks {
  public:
    // Whether this process has Python stacks.
    bool open() { return is_open_ = stacks_.open(); }
    void close() { is_open_ = false; }

    // On any thread, at a time that may become that of a call.
    void note(uint64_t time_ns, Channel &channel) {
        if (!is_open_.load(std::memory_order_relaxed)) return;
        uint64_t stack = stacks_.here(channel, time_ns);
        thread_local Place place;
        if (stack == place.stack) return;
        if (!place.thread && !place.is_ended) place.thread = add();
        if (!place.thread) return;
        place.thread->put({time_ns, stack});
        place.stack = stack;
    }
    // Collects the notes so far. Only one thread at a time may call this and `at`.
    void collect() {
        std::lock_guard<std::mutex> lock(mutex_);
        unsigned ended = 0;
        for (auto &thread : threads_) ended += thread->is_ended, thread->collect();
        for (auto thread = threads_.begin(); ended > ENDED_MAX && thread != threads_.end();) {
            bool is_needless = (*thread)->is_ended;
            ended -= is_needless;
            thread = is_needless ? threads_.erase(thread) : std::next(thread);
        }
    }
    // The stack of a thread at a time, 0 if there is none or it is not known.
    uint64_t at(uint32_t tid, uint64_t time_ns) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto thread = threads_.rbegin(); thread != threads_.rend(); ++thread)
            if ((*thread)->tid == tid && (*thread)->begins_before(time_ns)) return (*thread)->at(time_ns);
        return 0;
    }

  private:
    static constexpr size_t NOTES = 1 << 14;
    static constexpr unsigned ENDED_MAX = 64;  // ended threads whose last calls may still come

    struct Note {
        uint64_t time_ns, stack;
    };
    struct Thread {
        const uint32_t tid = thread_id();
        std::atomic<bool> is_ended{false};

        void put(Note note) {
            uint64_t at = written_.load(std::memory_order_relaxed);
            times_ns_[at % NOTES].store(note.time_ns, std::memory_order_relaxed);
            stacks_[at % NOTES].store(note.stack, std::memory_order_relaxed);
            written_.store(at + 1, std::memory_order_release);
        }
        void collect() {
            uint64_t end = written_.load(std::memory_order_acquire), from = std::max(read_, end - std::min(end, NOTES));
            std::vector<Note> found;
            for (uint64_t at = from; at < end; at++)
                found.push_back({times_ns_[at % NOTES].load(std::memory_order_relaxed),
                                 stacks_[at % NOTES].load(std::memory_order_relaxed)});
            std::atomic_thread_fence(std::memory_order_acquire);
            // Notes that may have been overwritten while they were read are not taken, nor earlier ones.
            uint64_t written = written_.load(std::memory_order_relaxed) + 1;
            uint64_t safe = std::max(from, written - std::min<uint64_t>(written, NOTES));
            if (safe > read_ && !history_.empty()) history_.push_back({history_.back().time_ns + 1, 0});
            for (uint64_t at = std::min(safe, end); at < end; at++) history_.push_back(found[at - from]);
            while (history_.size() > 2 * NOTES) history_.pop_front();
            read_ = end;
        }
        bool begins_before(uint64_t time_ns) const { return !history_.empty() && history_.front().time_ns <= time_ns; }
        uint64_t at(uint64_t time_ns) const {
            auto after = std::upper_bound(history_.begin(), history_.end(), time_ns,
                                          [](uint64_t time_ns, const Note &note) { return time_ns < note.time_ns; });
            return std::prev(after)->stack;
        }

      private:
        std::atomic<uint64_t> times_ns_[NOTES], stacks_[NOTES], written_{0};
        uint64_t read_ = 0;
        std::deque<Note> history_;
    };
    // A thread's state. Calls after its destruction are not noted.
    struct Place {
        Thread *thread = nullptr;
        uint64_t stack = 0;
        bool is_ended = false;
        ~Place() {
            if (thread) thread->is_ended = true;
            thread = nullptr, is_ended = true;
        }
    };

    Thread *add() {
        std::lock_guard<std::mutex> lock(mutex_);
        return threads_.emplace_back(new Thread).get();
    }

    PythonStacks stacks_;
    std::atomic<bool> is_open_{false};
    std::mutex mutex_;
    std::vector<std::unique_ptr<Thread>> threads_;
};

}  // namespace tracepipe
