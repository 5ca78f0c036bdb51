// SPDX-License-Identifier: MIT
// A CUDA context of the traced process: its device buffer and its launches in flight.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

#include <sanitizer.h>

#include "clock_pairs.h"
#include "device_memory.h"
#include "called.h"
#include "marked_memory.h"
#include "selection.h"
#include "shared_launch.h"

namespace tracepipe {

struct Launch {
    LaunchRecord record{};
    uint64_t sequence = 0;         // launches of the process, in order
    uint64_t offset = 0;           // of the region in the context's memory
    bool is_given_back = false;    // that is free again
    uint64_t first_warp = 0;       // the first recorded warp of the grid
    uint64_t recorded = 0;         // warps with room, or the 2^k entries of a shared region
    const void *stream = nullptr;
    std::atomic<bool> is_cancelled{false};  // the launch call failed
    bool is_over = false;                   // known to have ended
    bool is_reported = false;               // sent, whatever happens to its region
    std::atomic<bool> is_done{false};       // drained, its region zero again
    uint64_t room = 0;                      // for Exits, see exits_room
    int64_t unsent_launches = 0, unsent_warps = 0;  // see Channel::count_in_flight; kernels of a graph are many
    Kernel *kernel = nullptr;               // its needed room is raised if it was not enough

    // Of a shared region: the expected kernels, all known once it is closed.
    bool is_shared = false;
    std::vector<Node> nodes;
    uint64_t expected = 0;  // warps of the nodes; more may come if a node launches kernels
    bool launches_kernels = false;
    std::atomic<bool> is_closed{false};

    void begin(Channel &channel, uint64_t warps) {
        unsent_launches++, unsent_warps += int64_t(warps);
        channel.count_in_flight(1, int64_t(warps));
    }
    // A kernel of it was sent, or everything.
    void sent_kernel(Channel &channel) {
        if (unsent_launches) unsent_launches--, channel.count_in_flight(-1, 0);
    }
    void sent(Channel &channel) {
        channel.count_in_flight(-std::exchange(unsent_launches, 0), -std::exchange(unsent_warps, 0));
    }

    uint64_t grid_warps() const {
        const uint32_t *grid = record.grid, *block = record.block;
        return uint64_t(grid[0]) * grid[1] * grid[2] * ((uint64_t(block[0]) * block[1] * block[2] + 31) / 32);
    }
    uint64_t bytes() const { return is_shared ? shared_bytes(recorded) : region_bytes(recorded, room); }
    uint64_t exits_room() const { return is_shared ? recorded : tracepipe::exits_room(recorded, room); }
    uint64_t exits_offset() const {
        return is_shared ? shared_exits_offset(recorded) : tracepipe::exits_offset(recorded);
    }
};
using LaunchPointer = std::shared_ptr<Launch>;

class Context {
  public:
    Context(CUcontext context, CUdevice number) : handle(context), device(number) {}

    // From the drain's thread: sets the device's `memory` for regions, which is zero.
    void give_memory(CUdeviceptr memory, uint64_t bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        base_ = memory;
        memory_ = DeviceMemory(bytes);
    }

    // Takes room for all warps of a launch or for the first 2^k; the user data of its patches, null if there
    // is none.
    const void *take(const LaunchPointer &launch) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_dead || !base_) return nullptr;
        uint64_t warps = launch->record.warps;
        launch->recorded = warps;
        launch->room = std::max<uint64_t>(usual_room(warps), launch->kernel->needed_room.load(std::memory_order_relaxed));
        // If there is not enough room for all, the first warps of the grid are recorded.
        for (uint64_t bits = 64 - uint64_t(__builtin_clzll(warps)); bits >= LEAST_BITS; bits--) {
            if (launch->recorded > uint64_t(1) << bits) launch->recorded = uint64_t(1) << bits;
            launch->offset = memory_.take(launch->bytes(), launch->recorded == warps);
            if (launch->offset == DeviceMemory::NONE) continue;
            pending_.push_back(launch);
            uint64_t limit = launch->recorded < warps ? bits : 0;
            return reinterpret_cast<const void *>((base_ + launch->offset) | limit | launch->room << ROOM_SHIFT |
                                                  check_of(launch->grid_warps()) << CHECK_SHIFT);
        }
        return nullptr;
    }
    // Takes a shared region with room for `entries` warps, or fewer; the user data, null if there is no room.
    const void *take_shared(const LaunchPointer &launch, uint64_t entries) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_dead || !base_) return nullptr;
        launch->is_shared = true;
        uint64_t bits = LEAST_SHARED_BITS;
        while (bits < MOST_SHARED_BITS && uint64_t(1) << bits < entries) bits++;
        for (; bits >= LEAST_SHARED_BITS; bits--) {
            launch->recorded = uint64_t(1) << bits;
            launch->offset = memory_.take(launch->bytes(), launch->recorded >= entries);
            if (launch->offset == DeviceMemory::NONE) continue;
            pending_.push_back(launch);
            return reinterpret_cast<const void *>((base_ + launch->offset) | SHARED | bits << CHECK_SHIFT);
        }
        return nullptr;
    }
    // Launches that are not drained, oldest first.
    std::vector<LaunchPointer> pending(size_t most) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<LaunchPointer> found;
        for (const LaunchPointer &launch : pending_) {
            if (found.size() == most) break;
            if (launch->is_done) continue;
            launch->is_over |= is_synchronized(*launch);
            found.push_back(launch);
        }
        return found;
    }
    // Makes room where launches that were pending are done.
    void give_back(const LaunchPointer *launches, size_t count) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (size_t at = 0; at < count; at++) {
            Launch &launch = *launches[at];
            if (!launch.is_done || std::exchange(launch.is_given_back, true)) continue;
            memory_.give_back(launch.offset, launch.bytes());
            drained++, given_back_++;
        }
        auto is_given_back = [](const LaunchPointer &launch) { return launch->is_given_back; };
        for (; !pending_.empty() && is_given_back(pending_.front()); given_back_--) pending_.pop_front();
        // Behind one that is not done, they go together.
        if (given_back_ > MANY && given_back_ > pending_.size() / 2) {
            pending_.erase(std::remove_if(pending_.begin(), pending_.end(), is_given_back), pending_.end());
            given_back_ = 0;
        }
        if (pending_.empty()) synced_streams_.clear();
    }
    // All launches up to `sequence` on a stream, or on any if it is null, have ended.
    void synchronized(const void *stream, uint64_t sequence) {
        std::lock_guard<std::mutex> lock(mutex_);
        uint64_t &known = stream ? synced_streams_[stream] : synced_all_;
        known = std::max(known, sequence);
    }
    // Whether one of the oldest launches is known to have ended and was not read.
    bool is_behind() {
        std::lock_guard<std::mutex> lock(mutex_);
        size_t most = std::min<size_t>(pending_.size(), 64);
        return std::any_of(pending_.begin(), pending_.begin() + ptrdiff_t(most),
                           [&](const LaunchPointer &launch) { return !launch->is_done && is_synchronized(*launch); });
    }
    bool is_empty() {
        std::lock_guard<std::mutex> lock(mutex_);
        return pending_.empty();
    }
    uint64_t memory_bytes() {
        std::lock_guard<std::mutex> lock(mutex_);
        return memory_.bytes();
    }
    bool is_filling() {
        std::lock_guard<std::mutex> lock(mutex_);
        return memory_.used() > memory_.bytes() / 2;
    }

    const CUcontext handle;
    const CUdevice device;
    std::atomic<bool> is_dead{false}, is_open{false};
    CUdeviceptr base() const { return base_; }
    std::atomic<uint64_t> drained{0};  // launches
    // For the drain only, under `in_use`, during which the context is not destroyed.
    std::timed_mutex in_use;
    CUstream stream = nullptr;
    CUevent all_work = nullptr;
    char *staging = nullptr;
    ClockPairs clocks;
    MarkedMemory marks, calls;
    Called called;
    uint64_t clock_taken_ns = 0, clock_width_ns = 0;  // time of the last pair, width of the narrowest

  private:
    static constexpr uint64_t LEAST_BITS = 1, LEAST_SHARED_BITS = 8, MOST_SHARED_BITS = 22;
    static constexpr size_t MANY = 64;
    bool is_synchronized(const Launch &launch) const {
        auto synced = synced_streams_.find(launch.stream);
        return launch.sequence <= synced_all_ || (synced != synced_streams_.end() && launch.sequence <= synced->second);
    }

    std::mutex mutex_;  // never held while the driver is called
    CUdeviceptr base_ = 0;
    DeviceMemory memory_;
    std::deque<LaunchPointer> pending_;
    size_t given_back_ = 0;  // of them
    std::unordered_map<const void *, uint64_t> synced_streams_;
    uint64_t synced_all_ = 0;
};

}  // namespace tracepipe
