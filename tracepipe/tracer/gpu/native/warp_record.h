// SPDX-License-Identifier: MIT
// The memory that the patches write and the host reads: a region for each launch in flight.
//
//     region, zero before the launch
//     0          64                        align 16 of 64 + 48 n
//     | Region   | n × Warp, 48 B          | Exit, 32 B, exits_room(n) of them
//
//     Warp, one for every warp of the grid, at (linear block) × warps a block + warp in its block
//     0          8           16      20           24             28       32        40
//     | entry_ns | entry_clk | place | entry_mask | partial_mask | 0      | exit_ns | exit_clk |
//
// If all lanes of a warp exit together, as nearly always, only exit_ns and exit_clk are written. If some
// lanes exit alone, the first ones claim the place with partial_mask, and later ones are added to the Exits.
// A user data pointer is the region's address; bits 0 to 5 are k if only the first 2^k warps have room, else
// 0; bits 6 and 7 are the room for Exits, 0 to 3; bits 48 to 63 are a check of the grid's warps. A kernel
// that gets another launch's data finds the check wrong and writes nothing.
//
// Some kernels get data that they share with others: all nodes of a graph get that of the last one, and
// kernels launched by a kernel get that of their parent. They share a region, and bits 0 to 5 are SHARED, 48
// to 63 k:
//
//     0          64                          64 + OPEN_BYTES
//     | Region   | u32 for each SM and slot  | 2^k × Entry, 96 B  | 2^k × Exit
//
// A warp takes the next Entry and stores its number, counted from 1, at its SM and slot: at most one warp is
// there at a time, and reads the number when it exits. %gridid distinguishes the kernels.
//
// With -DTRACEPIPE_FIRST_BLOCK and -DTRACEPIPE_LAST_BLOCK, only the warps of these blocks count.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define TRACEPIPE_BOTH __host__ __device__
#else
#define TRACEPIPE_BOTH
#endif

namespace tracepipe {

struct alignas(16) Warp {
    uint64_t entry_ns;      // %globaltimer; 0: the warp has not begun
    uint64_t entry_clk;     // %clock64
    uint32_t place;         // %smid | %warpid << 16
    uint32_t entry_mask;    // lanes
    uint32_t partial_mask;  // lanes of the exit that is recorded here; 0: all of entry_mask
    uint32_t zero;
    uint64_t exit_ns;  // 0: the warp has not ended
    uint64_t exit_clk;
};
static_assert(sizeof(Warp) == 48, "");

struct alignas(16) Exit {
    uint64_t exit_ns;
    uint64_t exit_clk;
    uint64_t warp;  // in the grid, or the number of its Entry
    uint32_t mask;
    uint32_t zero;
};
static_assert(sizeof(Exit) == 32, "");

struct alignas(16) Entry {
    Warp warp;
    uint64_t grid_id;  // %gridid; its highest bit is set if a kernel launched it
    uint64_t index;    // of the warp in its grid
    uint64_t pc;       // the address of the kernel
    uint32_t grid[3], block[3];
};
static_assert(sizeof(Entry) == 96, "");

struct alignas(16) Region {
    uint32_t exits;    // all exits, also those that found no room
    uint32_t entries;  // of a shared region, likewise
    uint32_t orphans;  // exits in a shared region without a known entry
    uint32_t zero[13];
};
static_assert(sizeof(Region) == 64, "");

constexpr uint64_t REGION_ALIGNMENT = 256;
constexpr uint64_t LIMIT_BITS = 63, ROOM_SHIFT = 6, MOST_ROOM = 3, SHARED = 63;

constexpr uint64_t CHECK_SHIFT = 48;
TRACEPIPE_BOTH inline uint64_t check_of(uint64_t warps) {
    return (warps ^ warps >> 16 ^ warps >> 32 ^ 0x5a5a) & 0xffff;
}

// Room for exits other than the first of each warp: few, two for each warp (three returns), seven, or 31, the
// most that 32 lanes can make.
TRACEPIPE_BOTH inline uint64_t exits_room(uint64_t warps, uint64_t room) {
    return room == 0 ? warps / 4 + 64 : room == 1 ? 2 * warps + 64 : room == 2 ? 7 * warps + 64 : 31 * warps;
}
TRACEPIPE_BOTH inline uint64_t exits_offset(uint64_t warps) { return sizeof(Region) + warps * sizeof(Warp); }
TRACEPIPE_BOTH inline uint64_t whole_regions(uint64_t bytes) {
    return (bytes + REGION_ALIGNMENT - 1) / REGION_ALIGNMENT * REGION_ALIGNMENT;
}
TRACEPIPE_BOTH inline uint64_t region_bytes(uint64_t warps, uint64_t room) {
    return whole_regions(exits_offset(warps) + exits_room(warps, room) * sizeof(Exit));
}
// The room that costs almost nothing: any divergence of a small launch, three exits a warp of a larger one.
TRACEPIPE_BOTH inline uint64_t usual_room(uint64_t warps) { return warps <= 1024 ? 3 : warps <= 1 << 19 ? 1 : 0; }

// The slots of the largest SM so far, and more SMs than any GPU has.
constexpr uint64_t SLOTS = 64, MOST_SMS = 512, OPEN_BYTES = SLOTS * MOST_SMS * sizeof(uint32_t);
constexpr uint32_t NO_ROOM = ~uint32_t(0);  // instead of an Entry's number
constexpr uint64_t ENTRIES_OFFSET = sizeof(Region) + OPEN_BYTES;
TRACEPIPE_BOTH inline uint64_t shared_exits_offset(uint64_t entries) {
    return ENTRIES_OFFSET + entries * sizeof(Entry);
}
TRACEPIPE_BOTH inline uint64_t shared_bytes(uint64_t entries) {
    return whole_regions(shared_exits_offset(entries) + entries * sizeof(Exit));
}

}  // namespace tracepipe
