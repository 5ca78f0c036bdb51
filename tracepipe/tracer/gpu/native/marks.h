// SPDX-License-Identifier: MIT
// Reads the marks of kernels (tracepipe/mark.h describes them), decodes them, and makes ranges of warps of
// them.
//
// A mark names neither launch nor warp. It is attributed to a warp by SM, slot and clock: one warp at a time
// is in a slot, from its entry to its last exit.
#pragma once
#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "called_table.h"

namespace tracepipe {

constexpr uint64_t MARK_REST_SHIFT = 46, MARK_FIRST = 10, MARK_MOST = 13;
constexpr const char *MARK_SYMBOL = "tracepipe_marks";  // in the names of variables that get a MarkBuffer

struct MarkBuffer {
    uint64_t records, counts;
    uint32_t slots, zero;
};
static_assert(sizeof(MarkBuffer) == 24, "");

struct MarkRecord {
    uint64_t low, high;
    uint64_t clock() const { return low & ((uint64_t(1) << MARK_CLOCK_BITS) - 1); }
    bool is_end() const { return low >> MARK_CLOCK_BITS & 1; }
    uint64_t lap() const { return high >> MARK_LAP_SHIFT; }
    // A key that is equal for equal names.
    std::pair<uint64_t, uint64_t> key() const {
        return {high << (64 - MARK_LAP_SHIFT), low >> MARK_REST_SHIFT};
    }
    // Of a call of a device function, or its return: its lanes, and the number of its name.
    bool is_of_call() const { return !(high & 63); }
    uint32_t lanes() const { return is_of_call() ? uint32_t(high >> CALL_LANES_SHIFT) : 0; }
    uint64_t called() const { return high >> CALL_NAME_SHIFT & ((uint64_t(1) << CALL_NAME_BITS) - 1); }
};
static_assert(sizeof(MarkRecord) == 16, "");

// The name in a record, "" if it has none.
inline std::string mark_name(const MarkRecord &mark) {
    static constexpr char CHARACTERS[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";
    std::string name;
    for (unsigned at = 0; at < MARK_MOST; at++) {
        uint64_t code = (at < MARK_FIRST ? mark.high >> 6 * at : mark.low >> (MARK_REST_SHIFT + 6 * (at - MARK_FIRST))) & 63;
        if (!code) break;
        name += CHARACTERS[code - 1];
    }
    return name;
}

struct Mark {
    uint64_t clk, name;  // `name` is the number of its name in the channel
    uint32_t lanes;      // its lanes; 0: not known
    bool is_end;
};
struct Range {
    uint64_t name, clk, dur_clk;
    bool is_open;
    uint32_t lanes;  // lanes for which it has not ended
};

// Some lanes of a warp have exited.
inline void leave(const Mark &exit, std::vector<Range> &ranges, std::vector<size_t> &open) {
    auto is_over = [&](size_t at) {
        Range &range = ranges[at];
        if (!range.lanes || (range.lanes &= ~exit.lanes)) return false;
        range.dur_clk = exit.clk - range.clk;
        return true;
    };
    open.erase(std::remove_if(open.begin(), open.end(), is_over), open.end());
}
// Makes ranges of a warp's marks, which are in order of time. The ranges are in order of their begins, the
// longer one first. An end belongs to the last begin with its name. If lanes are known, each lane's end
// belongs to its own last begin, and the range ends with the last lane. Ends without a begin are counted. A
// begin without an end stays open until the last of `exits`, or until the last exit of its lanes.
inline std::vector<Range> ranges_of(const std::vector<Mark> &marks, const std::vector<Mark> &exits,
                                    uint64_t &ends_alone) {
    std::vector<Range> ranges;
    std::vector<size_t> open;
    auto exit = exits.begin();
    uint64_t last_clk = exits.back().clk;
    for (const Mark &mark : marks) {
        for (; exit != exits.end() && exit->clk < mark.clk; ++exit) leave(*exit, ranges, open);
        if (!mark.is_end) {
            open.push_back(ranges.size());
            ranges.push_back({mark.name, mark.clk, last_clk - mark.clk, true, mark.lanes});
            continue;
        }
        uint32_t lanes = mark.lanes;
        bool is_known = false;
        for (size_t at = open.size(); at-- > 0 && (lanes || !is_known);) {
            Range &range = ranges[open[at]];
            if (range.name != mark.name || (mark.lanes && !(range.lanes & lanes))) continue;
            uint32_t left = range.lanes & ~lanes;
            lanes &= ~range.lanes, range.lanes = left, is_known = true;
            if (left) continue;
            range.dur_clk = mark.clk - range.clk, range.is_open = false;
            open.erase(open.begin() + int64_t(at));
        }
        ends_alone += !is_known || lanes;
    }
    for (; exit != exits.end(); ++exit) leave(*exit, ranges, open);
    std::stable_sort(ranges.begin(), ranges.end(), [](const Range &a, const Range &b) {
        return a.clk != b.clk ? a.clk < b.clk : a.dur_clk > b.dur_clk;
    });
    return ranges;
}

// The rings of one GPU, whose marks are kept until they are taken. Warps come launch by launch, and
// concurrent kernels share slots, so a mark waits until no further warp can own it.
class MarkRings {
  public:
    explicit MarkRings(uint32_t slots) : slots_(slots) {}

    // Whether the count of a slot has changed.
    bool has_new(uint32_t slot, uint32_t count) const { return slots_[slot].read != count; }
    // Adds the marks of a slot's ring. `count` is the number of marks that the slot had got before the ring
    // was copied, and `count_after` afterwards: marks that may have been overwritten meanwhile are ignored.
    // `number_of` returns the number of a name.
    template <typename NumberOf>
    void add(uint32_t slot, uint32_t count, uint32_t count_after, const MarkRecord *records, NumberOf number_of) {
        Slot &into = slots_[slot];
        // Counts wrap around, so their differences are compared.
        uint32_t fresh = count - into.read, gone = count_after - into.read;
        uint32_t first = gone >= MARK_RING ? gone - MARK_RING + 1 : 0;
        if (first > fresh) first = fresh;
        lost += first;
        for (uint32_t at = first; at < fresh; at++) {
            uint32_t number = into.read + at;
            const MarkRecord &record = records[number % MARK_RING];
            // It was counted, but has not been written yet.
            if (!record.high || record.lap() != (number / MARK_RING & 15)) return void(into.read = number);
            if (into.marks.size() >= MOST_WAITING * MARK_RING) lost += into.marks.size(), into.marks.clear();
            into.marks.push_back({record.clock(), number_of(record), record.lanes(), record.is_end()});
        }
        into.read = count;
    }
    // Takes the marks of a warp that was at `place` (SM, and slot from bit 16 on) from `entry_clk` for
    // `life_clk`. Their clocks count from its entry.
    std::vector<Mark> take(uint32_t place, uint64_t entry_clk, uint64_t life_clk) {
        uint64_t slot = (place & 0xffff) * MARK_SLOTS + (place >> 16);
        std::vector<Mark> taken;
        if ((place >> 16) >= MARK_SLOTS || slot >= slots_.size()) return taken;
        auto &marks = slots_[slot].marks;
        auto after = [&](const Mark &mark) { return (mark.clk - entry_clk) & ((uint64_t(1) << MARK_CLOCK_BITS) - 1); };
        auto first = std::find_if(marks.begin(), marks.end(), [&](const Mark &mark) { return after(mark) <= life_clk; });
        auto past = std::find_if(first, marks.end(), [&](const Mark &mark) { return after(mark) > life_clk; });
        for (auto mark = first; mark != past; ++mark) taken.push_back({after(*mark), mark->name, mark->lanes, mark->is_end});
        marks.erase(first, past);
        return taken;
    }
    // No earlier warp can come: the remaining marks are of warps that are not recorded.
    void forget() {
        for (Slot &slot : slots_) slot.marks.clear();
    }
    // Marks that were overwritten before they were read, and ends without a begin.
    uint64_t lost = 0;

  private:
    static constexpr size_t MOST_WAITING = 8;  // rings of a slot, for warps that do not end

    struct Slot {
        uint32_t read = 0;
        std::vector<Mark> marks;
    };
    std::vector<Slot> slots_;
};

// The marks of one GPU: those in kernels, and those of calls. Null if nothing writes there.
struct Marks {
    MarkRings *written = nullptr, *called = nullptr;
    bool any() const { return written || called; }
    uint64_t &lost() const { return (written ? written : called)->lost; }
    // The marks of a warp, in order of time.
    std::vector<Mark> take(uint32_t place, uint64_t entry_clk, uint64_t life_clk) const {
        if (!called) return written->take(place, entry_clk, life_clk);
        std::vector<Mark> all = called->take(place, entry_clk, life_clk), more;
        if (written) more = written->take(place, entry_clk, life_clk);
        all.insert(all.end(), more.begin(), more.end());
        std::stable_sort(all.begin(), all.end(), [](const Mark &a, const Mark &b) { return a.clk < b.clk; });
        return all;
    }
};

}  // namespace tracepipe
