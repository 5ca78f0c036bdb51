// SPDX-License-Identifier: MIT
// Counts a thread's open ranges in each domain, so that the capture process can detect lost records.
#pragma once
#include <cstdint>

#include "annotation_records.h"

namespace tracepipe {

class OpenRanges {
  public:
    // The number of open ranges around one that begins, DEPTH_UNKNOWN for a thread with many domains.
    uint64_t push(uint64_t domain) {
        Open *open = find(domain);
        return open ? open->depth++ : DEPTH_UNKNOWN;
    }
    // The same for the one that ends; false if none is open.
    bool pop(uint64_t domain, uint64_t &depth) {
        Open *open = find(domain);
        if (open && !open->depth) return false;
        depth = open ? --open->depth : DEPTH_UNKNOWN;
        return true;
    }

  private:
    struct Open {
        uint64_t domain, depth;
    };
    static constexpr unsigned DOMAINS = 16;

    Open *find(uint64_t domain) {
        for (unsigned at = 0; at < count_; at++)
            if (open_[at].domain == domain) return &open_[at];
        if (count_ == DOMAINS) return nullptr;
        open_[count_] = {domain, 0};
        return &open_[count_++];
    }

    // No destructor: a thread's other destructors may call NVTX.
    Open open_[DOMAINS];
    unsigned count_;
};

}  // namespace tracepipe
