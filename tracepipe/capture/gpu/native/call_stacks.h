// SPDX-License-Identifier: MIT
// Where in a Python program the calls are made that CUPTI records, without a subscription to its callbacks, of which it
// lets one client have one.
//
//     calling thread ──clock of CUPTI's──▶ its stack, where it is another ──▶ Thread ──▶ history by thread ──▶ a call
//                                                                             (ring)     (whoever takes calls apart)
//
// CUPTI asks its client's clock on the calling thread where a call that it records begins and ends. A call's stack is
// thus the last that its thread had, by its start. A ring is written over by its own thread, which never waits: a call
// whose stack is gone then has none.
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
    // Whether there are any.
    bool open() { return is_open_ = stacks_.open(); }
    void close() { is_open_ = false; }

    // On any thread, at a time that CUPTI may give a call.
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
    // Takes in what was noted so far. This and `at` are for one thread at a time.
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
    // The stack that a thread had then, 0 where there is none or it is not known.
    uint64_t at(uint32_t tid, uint64_t time_ns) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto thread = threads_.rbegin(); thread != threads_.rend(); ++thread)
            if ((*thread)->tid == tid && (*thread)->begins_before(time_ns)) return (*thread)->at(time_ns);
        return 0;
    }

  private:
    static constexpr size_t NOTES = 1 << 14;
    static constexpr unsigned ENDED_MAX = 64;  // threads whose last calls may be to come

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
            // What was read while it may have been written over is not taken, nor what was before.
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
    // A thread's own. What it calls after this was destroyed is not noted.
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
