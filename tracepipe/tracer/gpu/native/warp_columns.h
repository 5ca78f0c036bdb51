// SPDX-License-Identifier: MIT
// Turns the records of a launch into columns, and counts what is recorded and what is missing.
//
// Payload of KIND_WARPS, a few thousand warps of a launch:
//
//     0        8         16      20      24        28
//     | launch | base_ns | warps | exits | columns | 0 |  columns × | id u8 | width u8 | 0 u16 | values u32 |
//
// then each column's values, `width` bytes each (2, 4 or 8), padded to a multiple of 8. Times of entries
// count from base_ns, times and clocks of exits from their warp's entry. Redundant columns are left out:
// entry_mask and exit_mask if they are of all lanes of all warps, exit_count if it is always 1, and those of
// ranges if no warp has any. A range counts from its warp's entry; its name is a number, see KIND_NAME.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "marks.h"
#include "transport.h"
#include "warp_record.h"

namespace tracepipe {

enum WarpsKind : uint16_t {
    KIND_WARPS = 16,
    KIND_KERNEL = 17,      // a launch that has ended, see LaunchRecord; before its KIND_WARPS
    KIND_CALL_ENTER = 18,  // call_arguments.h describes both
    KIND_CALL_EXIT = 19,
    KIND_LOST_WARPS = 20,  // | launch u64 | gpu u32 | why u32 | warps u64 |
    KIND_MET = 21,         // | fits u64 | text: a kernel that was launched, and whether its name is selected
    KIND_MET_CALLED = 22,  // the same for a device function that a kernel of a patched module may call
};

enum Lost : uint32_t {
    LOST_NO_MEMORY = 1,   // no room on the GPU for the launch, or for all of it
    LOST_FAILED = 2,      // the context failed (a trap, a bad address) before the records were read
    LOST_UNFINISHED = 3,  // the process ended first
    LOST_NOT_SEEN = 4,    // the launch is over and the warps wrote nothing
    LOST_EXITS = 5,       // exits that found no room
    LOST_BUDGET = 7,      // beyond TRACEPIPE_GPU_BUDGET
    LOST_PARENT = 8,      // warps of a kernel that launches kernels, whose entries are not seen
    LOST_OTHER_GPU = 9,   // the node runs on another GPU than the first node of its graph
    LOST_CAPTURE = 10,    // warps of a module that was loaded while another thread captured a stream
    LOST_MARKS = 11,      // marks of warps, not warps
};

enum ColumnId : uint8_t {
    COLUMN_WARP = 1,
    COLUMN_SM = 2,
    COLUMN_SLOT = 3,
    COLUMN_ENTRY_NS = 4,
    COLUMN_ENTRY_CLK = 5,
    COLUMN_ENTRY_MASK = 6,
    COLUMN_EXIT_COUNT = 7,
    COLUMN_EXIT_NS = 8,
    COLUMN_EXIT_CLK = 9,
    COLUMN_EXIT_MASK = 10,
    COLUMN_FIRST_WARP = 11,  // instead of COLUMN_WARP: one value, the first of consecutive warps
    COLUMN_RANGE_COUNT = 12,
    COLUMN_RANGE_NAME = 13,
    COLUMN_RANGE_CLK = 14,
    COLUMN_RANGE_DUR_CLK = 15,
    COLUMN_RANGE_OPEN = 16,
};

constexpr uint32_t WARPS_A_BATCH = 8000, RANGES_A_BATCH = 30000;
constexpr uint32_t ALL_LANES = 0xffffffff;

// The records of one kernel in host memory, or a part of them. `exits` may be unsorted; their `warp` is an
// index in `warps`.
struct Drained {
    const Warp *warps;
    uint64_t count;
    std::vector<Exit> exits;
    uint64_t first_warp = 0;          // of the grid, the one at index 0
    const uint64_t *index = nullptr;  // the warps' indices in the grid, if they are not consecutive
    uint64_t index_of(uint64_t at) const { return first_warp + (index ? index[at] : at); }
};

struct Seen {
    uint64_t begun = 0, whole = 0;  // warps with an entry; those whose lanes have all exited
    uint64_t first_ns = ~uint64_t(0), last_ns = 0;
    void add(const Seen &more) {
        begun += more.begun, whole += more.whole;
        first_ns = std::min(first_ns, more.first_ns), last_ns = std::max(last_ns, more.last_ns);
    }
};

inline void sort_exits(std::vector<Exit> &exits) {
    // An exit that was claimed and not yet written has no time.
    exits.erase(std::remove_if(exits.begin(), exits.end(), [](const Exit &exit) { return !exit.exit_ns; }),
                exits.end());
    std::sort(exits.begin(), exits.end(), [](const Exit &a, const Exit &b) {
        return a.warp != b.warp ? a.warp < b.warp : a.exit_clk < b.exit_clk;
    });
}

// `exits` must be sorted.
inline Seen look(const Drained &launch) {
    Seen seen;
    auto exit = launch.exits.begin();
    for (uint64_t at = 0; at < launch.count; at++) {
        const Warp &warp = launch.warps[at];
        uint32_t left = warp.exit_ns ? (warp.partial_mask ? warp.partial_mask : warp.entry_mask) : 0;
        uint64_t last_ns = warp.exit_ns;
        for (; exit != launch.exits.end() && exit->warp <= at; ++exit) {
            left |= exit->mask;
            last_ns = std::max(last_ns, exit->exit_ns);
        }
        if (!warp.entry_ns) continue;
        seen.begun++;
        seen.whole += left == warp.entry_mask;
        seen.first_ns = std::min(seen.first_ns, warp.entry_ns);
        seen.last_ns = std::max(seen.last_ns, std::max(last_ns, warp.entry_ns));
    }
    return seen;
}

class WarpColumns {
  public:
    // For each batch of the launch's warps that have begun: calls `reserve(bytes, warps)` for room, which may
    // be null, fills it and calls `commit(room)`. `marks`: the marks of the program.
    template <typename Reserve, typename Commit>
    void send(uint64_t launch, const Drained &drained, Reserve reserve, Commit commit, const Marks &marks = {}) {
        auto exit = drained.exits.begin(), end = drained.exits.end();
        for (uint64_t start = 0; start < drained.count; start += WARPS_A_BATCH) {
            uint64_t past = std::min<uint64_t>(start + WARPS_A_BATCH, drained.count);
            bool leaves_alone = exit != end && exit->warp < past;
            if (!leaves_alone && !marks.any() && send_plain(launch, drained, start, past, reserve, commit)) continue;
            for (uint64_t at = start; at < past; at++) {
                auto first = exit;
                while (exit != end && exit->warp <= at) ++exit;
                if (!drained.warps[at].entry_ns) continue;
                add(drained.index_of(at), drained.warps[at], first, exit);
                if (marks.any()) add_ranges(drained.warps[at], first, exit, marks);
                if (range_clk_.values.size() >= RANGES_A_BATCH) flush(launch, reserve, commit);
            }
            if (!warp_.values.empty()) flush(launch, reserve, commit);
        }
    }

  private:
    struct Column {
        ColumnId id;
        std::vector<uint64_t> values{};
        uint64_t bits = 0;  // of all values
        void add(uint64_t value) {
            values.push_back(value);
            bits |= value;
        }
        void clear() { values.clear(), bits = 0; }
        uint8_t width() const { return bits >> 32 ? 8 : 4; }
        size_t bytes() const { return whole_words(values.size() * width()); }
        char *write(char *to) const {
            if (width() == 8) {
                memcpy(to, values.data(), values.size() * 8);
            } else {
                auto *words = reinterpret_cast<uint32_t *>(to);
                for (size_t at = 0; at < values.size(); at++) words[at] = uint32_t(values[at]);
                if (values.size() % 2) words[values.size()] = 0;
            }
            return to + bytes();
        }
    };
    using ExitIterator = std::vector<Exit>::const_iterator;

    static size_t whole_words(size_t bytes) { return (bytes + 7) / 8 * 8; }

    // The usual case: every warp from `start` on has begun, and all its lanes have exited together. Copies
    // directly from the records to the room, at a tenth of the cost. False in any other case.
    template <typename Reserve, typename Commit>
    bool send_plain(uint64_t launch, const Drained &drained, uint64_t start, uint64_t past, Reserve reserve,
                    Commit commit) {
        if (drained.index) return false;
        const Warp *warps = drained.warps + start;
        size_t count = past - start;
        uint64_t base_ns = ~uint64_t(0), last_ns = 0, longest_ns = 0, longest_clk = 0;
        uint32_t lanes = ALL_LANES, partial = 0;
        bool is_missing = false;
        for (size_t at = 0; at < count; at++) {
            const Warp &warp = warps[at];
            is_missing |= !warp.entry_ns | !warp.exit_ns;
            lanes &= warp.entry_mask, partial |= warp.partial_mask;
            base_ns = std::min(base_ns, warp.entry_ns), last_ns = std::max(last_ns, warp.entry_ns);
            longest_ns = std::max(longest_ns, warp.exit_ns - std::min(warp.exit_ns, warp.entry_ns));
            longest_clk = std::max(longest_clk, warp.exit_clk - std::min(warp.exit_clk, warp.entry_clk));
        }
        if (is_missing || partial) return false;
        if (((last_ns - base_ns) | longest_ns | longest_clk) >> 32) return false;
        struct Head {
            uint64_t launch, base_ns;
            uint32_t warps, exits, columns, zero;
        } head{launch, base_ns, uint32_t(count), uint32_t(count), lanes == ALL_LANES ? 7u : 9u, 0};
        struct Place {
            uint8_t id, width;
            uint16_t zero;
            uint32_t values;
        } places[9];
        const ColumnId ids[9] = {COLUMN_FIRST_WARP, COLUMN_SM, COLUMN_SLOT, COLUMN_ENTRY_NS, COLUMN_ENTRY_CLK,
                                 COLUMN_EXIT_NS, COLUMN_EXIT_CLK, COLUMN_ENTRY_MASK, COLUMN_EXIT_MASK};
        const uint8_t widths[9] = {8, 2, 2, 4, 8, 4, 4, 4, 4};
        size_t bytes = sizeof head + head.columns * sizeof *places, offsets[9] = {};
        for (uint32_t at = 0; at < head.columns; at++) {
            places[at] = {ids[at], widths[at], 0, at ? uint32_t(count) : 1};
            offsets[at] = bytes;
            bytes += whole_words(size_t(widths[at]) * places[at].values);
        }
        char *room = static_cast<char *>(reserve(bytes, count));
        if (!room) return true;
        memcpy(room, &head, sizeof head);
        memcpy(room + sizeof head, places, head.columns * sizeof *places);
        uint64_t first = drained.index_of(start);
        memcpy(room + offsets[0], &first, 8);
        auto *sm = reinterpret_cast<uint16_t *>(room + offsets[1]);
        auto *slot = reinterpret_cast<uint16_t *>(room + offsets[2]);
        auto *entry_ns = reinterpret_cast<uint32_t *>(room + offsets[3]);
        auto *entry_clk = reinterpret_cast<uint64_t *>(room + offsets[4]);
        auto *exit_ns = reinterpret_cast<uint32_t *>(room + offsets[5]);
        auto *exit_clk = reinterpret_cast<uint32_t *>(room + offsets[6]);
        for (size_t at = 0; at < count; at++) {
            const Warp &warp = warps[at];
            sm[at] = uint16_t(warp.place), slot[at] = uint16_t(warp.place >> 16);
            entry_ns[at] = uint32_t(warp.entry_ns - base_ns), entry_clk[at] = warp.entry_clk;
            exit_ns[at] = uint32_t(warp.exit_ns - std::min(warp.exit_ns, warp.entry_ns));
            exit_clk[at] = uint32_t(warp.exit_clk - std::min(warp.exit_clk, warp.entry_clk));
        }
        if (lanes != ALL_LANES)
            for (int column : {7, 8}) {
                auto *masks = reinterpret_cast<uint32_t *>(room + offsets[column]);
                for (size_t at = 0; at < count; at++) masks[at] = warps[at].entry_mask;
            }
        commit(room);
        return true;
    }

    void add(uint64_t index, const Warp &warp, ExitIterator more, ExitIterator end) {
        warp_.add(index);
        sm_.add(warp.place & 0xffff);
        slot_.add(warp.place >> 16);
        entry_ns_.values.push_back(warp.entry_ns);
        entry_clk_.add(warp.entry_clk);
        entry_mask_.add(warp.entry_mask);
        whole_lanes_ &= warp.entry_mask == ALL_LANES;
        uint64_t count = warp.exit_ns != 0;
        if (count) leave(warp, warp.exit_ns, warp.exit_clk, warp.partial_mask ? warp.partial_mask : warp.entry_mask);
        for (; more != end; ++more, ++count) leave(warp, more->exit_ns, more->exit_clk, more->mask);
        exit_count_.add(count);
        one_exit_ &= count == 1;
    }
    void add_ranges(const Warp &warp, ExitIterator more, ExitIterator end, const Marks &marks) {
        std::vector<Mark> exits;
        auto leave = [&](uint64_t clk, uint32_t lanes) {
            if (clk >= warp.entry_clk) exits.push_back({clk - warp.entry_clk, 0, lanes, true});
        };
        if (warp.exit_ns) leave(warp.exit_clk, warp.partial_mask ? warp.partial_mask : warp.entry_mask);
        for (; more != end; ++more) leave(more->exit_clk, more->mask);
        std::sort(exits.begin(), exits.end(), [](const Mark &a, const Mark &b) { return a.clk < b.clk; });
        std::vector<Range> ranges;
        if (!exits.empty())
            ranges = ranges_of(marks.take(warp.place, warp.entry_clk, exits.back().clk), exits, marks.lost());
        range_count_.add(ranges.size());
        for (const Range &range : ranges) {
            range_name_.add(range.name), range_clk_.add(range.clk), range_dur_clk_.add(range.dur_clk);
            range_open_.add(range.is_open);
        }
    }
    void leave(const Warp &warp, uint64_t ns, uint64_t clk, uint32_t mask) {
        // %globaltimer advances in steps, so an exit can have a time before its entry, which was rounded up.
        exit_ns_.add(ns > warp.entry_ns ? ns - warp.entry_ns : 0);
        exit_clk_.add(clk > warp.entry_clk ? clk - warp.entry_clk : 0);
        exit_mask_.add(mask);
        whole_exits_ &= mask == ALL_LANES;
    }
    template <typename Reserve, typename Commit> void flush(uint64_t launch, Reserve reserve, Commit commit) {
        std::vector<uint64_t> &entries = entry_ns_.values;
        uint64_t base_ns = *std::min_element(entries.begin(), entries.end());
        for (uint64_t &ns : entries) entry_ns_.bits |= ns -= base_ns;
        Column *columns[15] = {&warp_, &sm_, &slot_, &entry_ns_, &entry_clk_, &exit_ns_, &exit_clk_};
        uint32_t count = 7;
        if (!whole_lanes_) columns[count++] = &entry_mask_;
        if (!one_exit_) columns[count++] = &exit_count_;
        if (!whole_exits_) columns[count++] = &exit_mask_;
        if (!range_clk_.values.empty())
            for (Column *column : {&range_count_, &range_name_, &range_clk_, &range_dur_clk_}) columns[count++] = column;
        if (range_open_.bits) columns[count++] = &range_open_;
        size_t bytes = 32 + 8 * count;
        for (uint32_t at = 0; at < count; at++) bytes += columns[at]->bytes();
        uint32_t sizes[4] = {uint32_t(entries.size()), uint32_t(exit_ns_.values.size()), count, 0};
        if (char *room = static_cast<char *>(reserve(bytes, entries.size()))) {
            memcpy(room, &launch, 8);
            memcpy(room + 8, &base_ns, 8);
            memcpy(room + 16, sizes, 16);
            char *to = room + 32 + 8 * count;
            for (uint32_t at = 0; at < count; at++) {
                uint8_t head[4] = {columns[at]->id, columns[at]->width(), 0, 0};
                uint32_t values = uint32_t(columns[at]->values.size());
                memcpy(room + 32 + 8 * at, head, 4);
                memcpy(room + 36 + 8 * at, &values, 4);
                to = columns[at]->write(to);
            }
            commit(room);
        }
        for (Column *column : {&warp_, &sm_, &slot_, &entry_ns_, &entry_clk_, &entry_mask_, &exit_count_, &exit_ns_,
                               &exit_clk_, &exit_mask_, &range_count_, &range_name_, &range_clk_, &range_dur_clk_,
                               &range_open_})
            column->clear();
        whole_lanes_ = whole_exits_ = one_exit_ = true;
    }

    bool whole_lanes_ = true, whole_exits_ = true, one_exit_ = true;
    Column warp_{COLUMN_WARP}, sm_{COLUMN_SM}, slot_{COLUMN_SLOT}, entry_ns_{COLUMN_ENTRY_NS},
        entry_clk_{COLUMN_ENTRY_CLK}, entry_mask_{COLUMN_ENTRY_MASK}, exit_count_{COLUMN_EXIT_COUNT},
        exit_ns_{COLUMN_EXIT_NS}, exit_clk_{COLUMN_EXIT_CLK}, exit_mask_{COLUMN_EXIT_MASK},
        range_count_{COLUMN_RANGE_COUNT}, range_name_{COLUMN_RANGE_NAME}, range_clk_{COLUMN_RANGE_CLK},
        range_dur_clk_{COLUMN_RANGE_DUR_CLK}, range_open_{COLUMN_RANGE_OPEN};
};

enum LaunchedBy : uint32_t { BY_CALL = 0, BY_GRAPH = 1, BY_KERNEL = 2 };

// Payload of KIND_KERNEL.
struct LaunchRecord {
    uint64_t launch, name, stream;
    uint32_t gpu, grid[3], block[3], cluster[3];
    uint64_t call_ns;  // CLOCK_MONOTONIC when it was launched
    uint32_t call_tid, launched_by;
    uint64_t start_ns, end_ns;     // %globaltimer of the first entry and the last exit
    uint64_t warps, begun, whole;  // warps of the recorded blocks
    uint32_t registers, static_shared_bytes;  // of the unpatched kernel; no registers: neither is known
    uint64_t stack;  // of a kernel of a graph: that captured it (captured_graphs.h)
};
static_assert(sizeof(LaunchRecord) == 24 + 40 + 16 + 16 + 24 + 8 + 8, "");

struct LostRecord {
    uint64_t launch;
    uint32_t gpu, why;
    uint64_t warps;
};

struct ClockRecord {
    uint32_t gpu, zero;
    uint64_t source_ns, host_lo_ns, host_hi_ns;
};

}  // namespace tracepipe
