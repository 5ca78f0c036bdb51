// Where in a Python program a call is made: a stack is a number in the records of calls, and what it is, is sent once.
//
// Payload of KIND_STACK, innermost frame first:
//
//     0        8         12       16
//     | number | omitted | frames | of each: line u32 | function bytes u16 | file bytes u16 | function | file
//     | u64    | u32     | u32    |                                                           UTF-8
#pragma once
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string>

#include "python_frames.h"
#include "transport.h"

namespace tracepipe {

class PythonStacks {
  public:
    // Whether this process is a Python whose frames can be read. A process has one Python, and it is there before it
    // uses CUDA. At the begin of each recording: what was sent before, that one does not have.
    bool open() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!frames_.open()) return false;
        if (!numbers_) numbers_ = static_cast<std::atomic<uint64_t> *>(calloc(PLACES, sizeof *numbers_));
        for (size_t at = 0; count_ && at < PLACES; at++) numbers_[at] = 0;
        count_ = 0;
        return numbers_ != nullptr;
    }
    // The number of the calling thread's stack, which the channel has a record of; 0 where there is none.
    uint64_t here(Channel &channel) {
        PythonFrame frames[PythonFrames::FRAMES_MAX];
        unsigned count = numbers_ ? frames_.read(frames) : 0;
        if (!count) return 0;
        uint64_t number = frames_.hash(frames, count);
        if (!number || *place_of(number) == number || meet(number, channel)) return number;
        return 0;
    }

  private:
    static constexpr size_t STACKS_MAX = 1 << 16, PLACES = 2 * STACKS_MAX, PAYLOAD_MAX = 1 << 15;

    // Where a number stands, or will: at one of the places from that on which it gives.
    std::atomic<uint64_t> *place_of(uint64_t number) const {
        for (size_t at = number % PLACES;; at = (at + 1) % PLACES) {
            uint64_t other = numbers_[at].load(std::memory_order_acquire);
            if (!other || other == number) return &numbers_[at];
        }
    }
    bool meet(uint64_t number, Channel &channel) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::atomic<uint64_t> *place = place_of(number);
        if (*place == number) return true;
        if (count_ == STACKS_MAX) return channel.drop(KIND_STACK_BEYOND, 1), false;
        if (!send(number, channel)) return false;
        count_++;
        place->store(number, std::memory_order_release);
        return true;
    }
    bool send(uint64_t number, Channel &channel) {
        struct {
            uint64_t number;
            uint32_t omitted, frames;
        } head{number, 0, 0};
        PythonFrame frames[PythonFrames::FRAMES_MAX];
        unsigned count = frames_.read_all(frames, head.omitted);
        size_t room = std::min(PAYLOAD_MAX, channel.payload_limit() / 2);
        std::string text;
        for (; head.frames < count; head.frames++) {
            std::string function = frames_.function_of(frames[head.frames]), file = frames_.file_of(frames[head.frames]);
            struct {
                uint32_t line;
                uint16_t function_bytes, file_bytes;
            } frame{uint32_t(frames_.line_of(frames[head.frames])), uint16_t(function.size()), uint16_t(file.size())};
            if (text.size() + sizeof frame + function.size() + file.size() > room) break;
            text.append(reinterpret_cast<char *>(&frame), sizeof frame).append(function).append(file);
        }
        head.omitted += count - head.frames;
        return channel.put(KIND_STACK, &head, sizeof head, text);
    }

    PythonFrames frames_;
    // Numbers that were sent, 0 at a free place. Twice as many places as numbers, so that there is always one.
    std::atomic<uint64_t> *numbers_ = nullptr;
    std::mutex mutex_;
    size_t count_ = 0;  // under mutex_
};

}  // namespace tracepipe
