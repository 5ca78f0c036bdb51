// SPDX-License-Identifier: MIT
// Room in a context's device buffer: regions are taken one after the other and released in the same order.
#pragma once
#include <cstdint>

namespace tracepipe {

class DeviceRing {
  public:
    static constexpr uint64_t NONE = ~uint64_t(0);
    explicit DeviceRing(uint64_t bytes = 0) : bytes_(bytes) {}

    // The offset of a region, NONE if there is no room; `end` releases it, with all regions before it.
    uint64_t take(uint64_t bytes, uint64_t &end) {
        if (bytes == 0 || bytes > bytes_) return NONE;
        // An empty ring has all its room in one piece only from its beginning.
        if (head_ == tail_) head_ = tail_ = 0;
        uint64_t at = head_ % bytes_, skipped = at + bytes > bytes_ ? bytes_ - at : 0;
        if (head_ + skipped + bytes - tail_ > bytes_) return NONE;
        uint64_t start = head_ + skipped;
        end = head_ = start + bytes;
        return start % bytes_;
    }
    void give_back(uint64_t end) { tail_ = end; }
    uint64_t used() const { return head_ - tail_; }
    uint64_t bytes() const { return bytes_; }

  private:
    uint64_t bytes_, head_ = 0, tail_ = 0;  // positions over all laps
};

}  // namespace tracepipe
