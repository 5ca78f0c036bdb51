// SPDX-License-Identifier: MIT
// The Python stacks of calls: records of calls have a stack's number; each stack and each frame is sent once.
//
// Payload of KIND_FRAME, and of KIND_STACK, innermost frame first:
//
//     0        8      12               14
//     | number | line | function bytes | 0   | function … | file …                texts in UTF-8
//     | u64    | u32  | u16            | u16 |
//
//     0        8         12       16
//     | number | omitted | frames | number of each, u64 …
//     | u64    | u32     | u32    |
#pragma once
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/prctl.h>

#include "python_frames.h"
#include "transport.h"

namespace tracepipe {

// A set of numbers, which any thread may search.
class NumberSet {
  public:
    static constexpr size_t NUMBERS_MAX = 1 << 16;

    // Whether there is memory. All of it is touched, so that adding a number causes no page fault.
    bool clear() {
        if (!numbers_) numbers_ = static_cast<std::atomic<uint64_t> *>(malloc(PLACES * sizeof *numbers_));
        for (size_t at = 0; numbers_ && at < PLACES; at++) numbers_[at].store(0, std::memory_order_relaxed);
        count_ = 0;
        return numbers_ != nullptr;
    }
    bool has(uint64_t number) const { return *place_of(number) == number; }
    bool is_full() const { return count_ == NUMBERS_MAX; }
    // Only one thread at a time may call this.
    void add(uint64_t number) {
        count_++;
        place_of(number)->store(number, std::memory_order_release);
    }

  private:
    // Twice as many as numbers, so that one is always free.
    static constexpr size_t PLACES = 2 * NUMBERS_MAX;

    // Where a number is or belongs: the first fitting place from the one that the number itself selects.
    std::atomic<uint64_t> *place_of(uint64_t number) const {
        for (size_t at = number % PLACES;; at = (at + 1) % PLACES) {
            uint64_t other = numbers_[at].load(std::memory_order_acquire);
            if (!other || other == number) return &numbers_[at];
        }
    }

    std::atomic<uint64_t> *numbers_ = nullptr;
    size_t count_ = 0;
};

// In place of the stack of a thread of PyTorch's autograd, which has none.
constexpr uint64_t STACK_OF_AUTOGRAD = 1;

class PythonStacks {
  public:
    // Whether this process is a Python whose frames can be read. A process has one Python, which is loaded
    // before it uses CUDA. Call it at the begin of each recording, which does not have what was sent to an
    // earlier one.
    bool open() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = frames_.open() && stacks_.clear() && sent_.clear();
        return is_open_;
    }
    bool is_open() const { return is_open_.load(std::memory_order_relaxed); }
    // The number of the calling thread's stack, which was sent before; 0 if there is none, or STACK_OF_AUTOGRAD.
    uint64_t here(Channel &channel, uint64_t now_ns) {
        PythonFrame frames[PythonFrames::FRAMES_MAX];
        unsigned count = is_open() ? frames_.read(frames) : 0;
        if (!count) return is_open() && is_of_autograd() ? STACK_OF_AUTOGRAD : 0;
        // Frames of the same code as a moment ago are the same: no code can be replaced in that time.
        thread_local Last last;
        bool is_same = now_ns - last.time_ns < SAME_NS && count == last.count &&
                       memcmp(frames, last.frames, count * sizeof *frames) == 0;
        uint64_t number = is_same ? last.number : 0;
        if (!number) {
            uint64_t numbers[PythonFrames::FRAMES_MAX];
            number = frames_.hash(frames, count, numbers);
            if (!number || !(stacks_.has(number) || add(number, frames, numbers, count, channel))) return 0;
            last.number = number, last.count = count;
            memcpy(last.frames, frames, count * sizeof *frames);
        }
        last.time_ns = now_ns;
        return number;
    }

  private:
    static constexpr uint64_t SAME_NS = 10'000;
    // Whether the calling thread is one of PyTorch's autograd, which has its name before it launches anything.
    static bool is_of_autograd() {
        thread_local int is = -1;
        if (is < 0) {
            char name[16] = "";
            prctl(PR_GET_NAME, name);
            is = strncmp(name, "pt_autograd_", strlen("pt_autograd_")) == 0;
        }
        return is;
    }
    struct Last {
        uint64_t time_ns, number;
        unsigned count;
        PythonFrame frames[PythonFrames::FRAMES_MAX];
    };

    bool add(uint64_t number, const PythonFrame *frames, const uint64_t *numbers, unsigned count, Channel &channel) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stacks_.has(number)) return true;
        for (unsigned at = 0; at < count && !stacks_.is_full(); at++)
            if (!sent_.has(numbers[at]) && !send(frames[at], numbers[at], channel)) return false;
        if (stacks_.is_full()) return channel.drop(KIND_STACK_BEYOND, 1), false;
        struct {
            uint64_t number;
            uint32_t omitted, frames;
        } head{number, 0, count};
        PythonFrame all[PythonFrames::FRAMES_MAX];
        if (count == PythonFrames::FRAMES_MAX) frames_.read_all(all, head.omitted);
        std::string_view of_frames(reinterpret_cast<const char *>(numbers), count * sizeof *numbers);
        if (!channel.put(KIND_STACK, &head, sizeof head, of_frames)) return false;
        stacks_.add(number);
        return true;
    }
    bool send(const PythonFrame &frame, uint64_t number, Channel &channel) {
        if (sent_.is_full()) return channel.drop(KIND_STACK_BEYOND, 1), false;
        std::string function = frames_.function_of(frame);
        struct {
            uint64_t number;
            uint32_t line;
            uint16_t function_bytes, zero;
        } head{number, uint32_t(frames_.line_of(frame)), uint16_t(function.size()), 0};
        if (!channel.put(KIND_FRAME, &head, sizeof head, function + frames_.file_of(frame))) return false;
        sent_.add(number);
        return true;
    }

    PythonFrames frames_;
    std::atomic<bool> is_open_{false};
    std::mutex mutex_;
    NumberSet stacks_, sent_;  // sent_: frames; both change only under mutex_
};

}  // namespace tracepipe
