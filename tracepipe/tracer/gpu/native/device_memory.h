// SPDX-License-Identifier: MIT
// Room in a context's device buffer. Regions are taken one after the other, so that those of launches that follow each
// other are adjacent, and released in any order: a kernel that runs for long, or whose end is not known, holds only its
// own. A part is for small regions, which many large ones would otherwise leave no room.
#pragma once
#include <cstdint>
#include <iterator>
#include <map>

namespace tracepipe {

class DeviceMemory {
  public:
    static constexpr uint64_t NONE = ~uint64_t(0);
    static constexpr uint64_t SMALL_BYTES = 64u << 10, SHARE_OF_SMALL = 16;
    explicit DeviceMemory(uint64_t bytes = 0) : bytes_(bytes), left_(bytes) {
        if (bytes) free_[0] = bytes;
    }

    // The offset of a region, NONE if there is no room. `is_whole`: it has room for everything of its launch.
    uint64_t take(uint64_t bytes, bool is_whole) {
        uint64_t kept = bytes > SMALL_BYTES || !is_whole ? bytes_ / SHARE_OF_SMALL : 0;
        if (bytes == 0 || bytes + kept > left_) return NONE;
        auto from = free_.lower_bound(next_);
        for (size_t looked = 0; looked < free_.size(); looked++, ++from) {
            if (from == free_.end()) from = free_.begin();
            auto [at, length] = *from;
            if (length < bytes) continue;
            free_.erase(from);
            if (length > bytes) free_[at + bytes] = length - bytes;
            next_ = at + bytes, left_ -= bytes;
            return at;
        }
        return NONE;
    }
    void give_back(uint64_t at, uint64_t bytes) {
        left_ += bytes;
        auto after = free_.lower_bound(at);
        if (after != free_.end() && after->first == at + bytes) {
            bytes += after->second;
            after = free_.erase(after);
        }
        if (after != free_.begin() && std::prev(after)->first + std::prev(after)->second == at)
            std::prev(after)->second += bytes;
        else
            free_[at] = bytes;
    }
    uint64_t used() const { return bytes_ - left_; }
    uint64_t bytes() const { return bytes_; }

  private:
    uint64_t bytes_, left_, next_ = 0;
    std::map<uint64_t, uint64_t> free_;  // offset → bytes, no two adjacent
};

}  // namespace tracepipe
