// SPDX-License-Identifier: MIT
// Divides the records of a shared region among the kernels that wrote there.
//
// The nodes of a graph are known from its launch, by %gridid. Any other kernel was launched by a kernel, and
// is known only from its records.
#pragma once
#include <map>

#include "warp_columns.h"

namespace tracepipe {

// A kernel that is expected in a shared region.
struct Node {
    LaunchRecord record{};
    uint64_t grid_id = 0;
    bool is_selected = false;
    bool launches_kernels = false;  // then its own entries are not seen
    size_t place = 0;               // among the kernels of its graph
};

// The records of one kernel.
struct SharedKernel {
    const Node *node = nullptr;  // null: launched by a kernel
    uint64_t grid_id = 0, pc = 0;
    uint32_t grid[3] = {}, block[3] = {};
    std::vector<Warp> warps;
    std::vector<uint64_t> index;  // of each warp in its grid
    std::vector<Exit> exits;      // by position in `warps`
};

// `exits` refer to entries by number. Entries that were not written yet are skipped. If a node ran several
// times in one launch, as in a loop of the graph, each run is a kernel.
inline std::vector<SharedKernel> kernels_of(const Entry *entries, uint64_t count, const std::vector<Exit> &exits,
                                            const std::vector<Node> &nodes) {
    std::vector<uint64_t> order;
    for (uint64_t at = 0; at < count; at++)
        if (entries[at].warp.entry_ns) order.push_back(at);
    std::sort(order.begin(), order.end(), [&](uint64_t a, uint64_t b) {
        const Entry &left = entries[a], &right = entries[b];
        if (left.grid_id != right.grid_id) return left.grid_id < right.grid_id;
        if (left.index != right.index) return left.index < right.index;
        return left.warp.entry_ns < right.warp.entry_ns;
    });
    std::map<std::pair<uint64_t, uint64_t>, SharedKernel> found;  // by grid and by how often it ran before
    std::vector<std::pair<SharedKernel *, uint64_t>> place_of(count, {nullptr, 0});
    uint64_t times = 0;
    for (size_t at = 0; at < order.size(); at++) {
        const Entry &entry = entries[order[at]];
        const Entry *before = at ? &entries[order[at - 1]] : nullptr;
        bool is_again = before && before->grid_id == entry.grid_id && before->index == entry.index;
        times = is_again ? times + 1 : 0;
        SharedKernel &kernel = found[{entry.grid_id, times}];
        if (kernel.warps.empty()) {
            kernel.grid_id = entry.grid_id, kernel.pc = entry.pc;
            memcpy(kernel.grid, entry.grid, sizeof kernel.grid);
            memcpy(kernel.block, entry.block, sizeof kernel.block);
            for (const Node &node : nodes)
                if (node.grid_id == entry.grid_id) kernel.node = &node;
        }
        place_of[order[at]] = {&kernel, kernel.warps.size()};
        kernel.warps.push_back(entry.warp);
        kernel.index.push_back(entry.index);
    }
    for (const Exit &exit : exits) {
        if (exit.warp >= count || !place_of[exit.warp].first) continue;
        place_of[exit.warp].first->exits.push_back(exit);
        place_of[exit.warp].first->exits.back().warp = place_of[exit.warp].second;
    }
    std::vector<SharedKernel> kernels;
    for (auto &[key, kernel] : found) {
        sort_exits(kernel.exits);
        kernels.push_back(std::move(kernel));
    }
    return kernels;
}

}  // namespace tracepipe
