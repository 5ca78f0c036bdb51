// SPDX-License-Identifier: MIT
// The device code that Compute Sanitizer calls at every block entry and exit of a patched kernel, and with
// --warp-marks also at calls and returns of device functions.
//
// It runs for each thread; the lowest active lane of a warp writes for all. Whatever the kernel does, the
// patch touches only the launch's region, and nothing if the launch has none.
// Built with  nvcc --fatbin --compile-as-tools-patch.
#include <sanitizer_patching.h>

#include "called_table.h"
#include "warp_record.h"

using tracepipe::CalledFunction;
using tracepipe::CalledSection;
using tracepipe::CalledTable;
using tracepipe::Entry;
using tracepipe::Exit;
using tracepipe::Region;
using tracepipe::Warp;

namespace {

__device__ __forceinline__ uint64_t globaltimer() {
    uint64_t ns;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
    return ns;
}
__device__ __forceinline__ uint32_t lane_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(id));
    return id;
}
__device__ __forceinline__ uint32_t place() {
    uint32_t sm, slot;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    asm volatile("mov.u32 %0, %%warpid;" : "=r"(slot));
    return sm | slot << 16;
}

__device__ __forceinline__ uint64_t grid_id() {
    uint64_t id;
    asm volatile("mov.u64 %0, %%gridid;" : "=l"(id));
    return id;
}

struct Position {
    uint64_t warp;   // in the grid, or in its recorded blocks
    uint64_t warps;  // the number of those
    uint64_t all;    // warps of the grid
    uint32_t lanes;  // of this warp, as a mask
};
__device__ __forceinline__ Position position() {
    uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    uint32_t thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    uint32_t a_block = (threads + 31) / 32, in_block = thread / 32, rest = threads - in_block * 32;
    uint64_t block = blockIdx.x + uint64_t(gridDim.x) * (blockIdx.y + uint64_t(gridDim.y) * blockIdx.z);
    uint64_t blocks = uint64_t(gridDim.x) * gridDim.y * gridDim.z, all = blocks * a_block;
#ifdef TRACEPIPE_FIRST_BLOCK
    // Blocks before the first wrap around to numbers beyond the last.
    block -= uint64_t(TRACEPIPE_FIRST_BLOCK);
    uint64_t last = blocks - 1 < uint64_t(TRACEPIPE_LAST_BLOCK) ? blocks - 1 : uint64_t(TRACEPIPE_LAST_BLOCK);
    blocks = last + 1 > uint64_t(TRACEPIPE_FIRST_BLOCK) ? last + 1 - uint64_t(TRACEPIPE_FIRST_BLOCK) : 0;
    if (block >= blocks) return {~uint64_t(0), 0, all, 0};
#endif
    return {block * a_block + in_block, blocks * a_block, all, rest >= 32 ? ~0u : (1u << rest) - 1};
}
// The number of warps with room; 0 for the data of another launch.
__device__ __forceinline__ uint64_t recorded(const Position &at, uint64_t data) {
    if (data >> tracepipe::CHECK_SHIFT != tracepipe::check_of(at.all)) return 0;
    uint64_t bits = data & tracepipe::LIMIT_BITS;
    return bits && (uint64_t(1) << bits) < at.warps ? uint64_t(1) << bits : at.warps;
}
__device__ __forceinline__ char *region_of(uint64_t data) {
    return reinterpret_cast<char *>(data << 16 >> 16 & ~(tracepipe::REGION_ALIGNMENT - 1));
}
__device__ __forceinline__ bool is_shared(uint64_t data) {
    return (data & tracepipe::LIMIT_BITS) == tracepipe::SHARED;
}
// Some lanes of a warp exit alone after others: their exit is added to the Exits of the region.
__device__ __forceinline__ void leave_alone(char *region, uint64_t offset, uint64_t room, uint64_t warp, uint32_t mask,
                                            uint64_t ns, uint64_t clk) {
    uint32_t index = atomicAdd(&reinterpret_cast<Region *>(region)->exits, 1u);
    if (index >= room) return;
    Exit *exit = reinterpret_cast<Exit *>(region + offset) + index;
    exit->warp = warp;
    exit->mask = mask;
    *reinterpret_cast<ulonglong2 *>(&exit->exit_ns) = make_ulonglong2(ns, clk);
}
__device__ __forceinline__ void begin(Warp *warp, uint32_t mask) {
    *reinterpret_cast<uint2 *>(&warp->place) = make_uint2(place(), mask);
    *reinterpret_cast<ulonglong2 *>(&warp->entry_ns) = make_ulonglong2(globaltimer(), clock64());
}

// The place of this warp's SM and slot in a shared region's table; null beyond the table.
__device__ __forceinline__ volatile uint32_t *open_entry(char *region) {
    uint32_t at = place(), sm = at & 0xffff, slot = at >> 16;
    if (sm >= tracepipe::MOST_SMS || slot >= tracepipe::SLOTS) return nullptr;
    return reinterpret_cast<volatile uint32_t *>(region + sizeof(Region)) + sm * tracepipe::SLOTS + slot;
}
__device__ __noinline__ void enter_shared(uint64_t data, uint64_t pc, uint32_t mask) {
    char *region = region_of(data);
    volatile uint32_t *open = open_entry(region);
    Position at = position();
    if (!open || at.warp >= at.warps) return;
    uint32_t number = atomicAdd(&reinterpret_cast<Region *>(region)->entries, 1u);
    if (number >> (data >> tracepipe::CHECK_SHIFT)) {
        *open = tracepipe::NO_ROOM;
        return;
    }
    Entry *entry = reinterpret_cast<Entry *>(region + tracepipe::ENTRIES_OFFSET) + number;
    entry->grid_id = grid_id();
    entry->index = at.warp;
    entry->pc = pc;
    entry->grid[0] = gridDim.x, entry->grid[1] = gridDim.y, entry->grid[2] = gridDim.z;
    entry->block[0] = blockDim.x, entry->block[1] = blockDim.y, entry->block[2] = blockDim.z;
    *open = number + 1;
    __threadfence();  // another lane may exit first, and read this
    begin(&entry->warp, mask);
}
__device__ __noinline__ void leave_shared(uint64_t data, uint32_t mask, uint64_t ns, uint64_t clk) {
    char *region = region_of(data);
    volatile uint32_t *open = open_entry(region);
    Position at = position();
    if (!open || at.warp >= at.warps) return;
    uint32_t number = *open;
    if (number == tracepipe::NO_ROOM) return;
    auto *entry = reinterpret_cast<volatile Entry *>(region + tracepipe::ENTRIES_OFFSET) + (number - 1);
    if (!number || entry->grid_id != grid_id() || entry->index != at.warp) {
        atomicAdd(&reinterpret_cast<Region *>(region)->orphans, 1u);
        return;
    }
    Warp *warp = reinterpret_cast<Warp *>(region + tracepipe::ENTRIES_OFFSET + (number - 1) * sizeof(Entry));
    uint64_t room = uint64_t(1) << (data >> tracepipe::CHECK_SHIFT);
    if (mask != at.lanes && atomicCAS(&warp->partial_mask, 0u, mask) != 0)
        return leave_alone(region, tracepipe::shared_exits_offset(room), room, number - 1, mask, ns, clk);
    *reinterpret_cast<ulonglong2 *>(&warp->exit_ns) = make_ulonglong2(ns, clk);
}

// The section of an address, and the number of the function at an offset in it; null and 0 if calls of it are
// not recorded.
__device__ __forceinline__ const CalledSection *section_at(const CalledTable *table, uint64_t address) {
    uint32_t sections = *reinterpret_cast<const volatile uint32_t *>(&table->sections);
    for (uint32_t at = 0; at < sections; at++)
        if (address >= table->section[at].begin && address < table->section[at].end) return &table->section[at];
    return nullptr;
}
__device__ __forceinline__ uint32_t called_at(const CalledTable *table, const CalledSection *section, uint64_t offset) {
    if (!section) return 0;
    for (uint32_t at = section->first; at < section->first + section->count; at++) {
        const CalledFunction &function = table->functions[at];
        if (offset >= function.begin && offset < function.end) return function.name;
    }
    return 0;
}
// Writes a mark of a call or a return by the present lanes: several groups of a warp may be here at once.
__device__ __forceinline__ void mark_call(const CalledTable *table, uint32_t name, uint32_t mask, uint64_t end,
                                          uint64_t clk) {
    using namespace tracepipe;
    uint32_t at = place();
    uint64_t slot = (at & 0xffff) * MARK_SLOTS + (at >> 16);
    if (slot >= table->slots) return;
    uint32_t count = atomicAdd(reinterpret_cast<uint32_t *>(table->counts + slot * MARK_LINE), 1u);
    uint64_t high = uint64_t(mask) << CALL_LANES_SHIFT | uint64_t(name) << CALL_NAME_SHIFT |
                    uint64_t(count / MARK_RING) << MARK_LAP_SHIFT;
    // The time that recording takes is before the range of a call, and after that of a return.
    if (!end) clk = clock64();
    uint64_t low = (clk & ((uint64_t(1) << MARK_CLOCK_BITS) - 1)) | end << MARK_CLOCK_BITS;
    auto *records = reinterpret_cast<ulonglong2 *>(table->records);
    records[slot * MARK_RING + count % MARK_RING] = make_ulonglong2(low, high);
}
__device__ __forceinline__ const CalledTable *table_of(uint64_t data) {
    return reinterpret_cast<const CalledTable *>(data << 16 >> 16 & ~(tracepipe::CALLS_ALIGNMENT - 1));
}

}  // namespace

// A call within a section has its target's offset there, any other call its address.
extern "C" __device__ __noinline__ SanitizerPatchResult tracepipe_call(void *userdata, uint64_t pc, uint64_t target,
                                                                       uint32_t) {
    // With a function pointer, lanes may call different functions at once.
    uint32_t mask = __match_any_sync(__activemask(), target);
    if (!userdata || lane_id() != __ffs(mask) - 1) return SANITIZER_PATCH_SUCCESS;
    const CalledTable *table = table_of(uint64_t(userdata));
    bool is_offset = target >> 32 == 0;
    const CalledSection *section = section_at(table, is_offset ? pc : target);
    uint32_t name = called_at(table, section, is_offset || !section ? target : target - section->begin);
    if (name) mark_call(table, name, mask, 0, 0);
    return SANITIZER_PATCH_SUCCESS;
}

extern "C" __device__ __noinline__ SanitizerPatchResult tracepipe_return(void *userdata, uint64_t pc) {
    uint64_t clk = clock64();
    uint32_t mask = __activemask();
    if (!userdata || lane_id() != __ffs(mask) - 1) return SANITIZER_PATCH_SUCCESS;
    const CalledTable *table = table_of(uint64_t(userdata));
    const CalledSection *section = section_at(table, pc);
    uint32_t name = called_at(table, section, section ? pc - section->begin : 0);
    if (name) mark_call(table, name, mask, 1, clk);
    return SANITIZER_PATCH_SUCCESS;
}

extern "C" __device__ __noinline__ SanitizerPatchResult tracepipe_enter(void *userdata, uint64_t pc) {
#ifndef TRACEPIPE_EMPTY
    uint32_t mask = __activemask();
    if (!userdata || lane_id() != __ffs(mask) - 1) return SANITIZER_PATCH_SUCCESS;
    uint64_t data = uint64_t(userdata);
    if (is_shared(data)) {
        enter_shared(data, pc, mask);
        return SANITIZER_PATCH_SUCCESS;
    }
    Position at = position();
    if (at.warp >= recorded(at, data)) return SANITIZER_PATCH_SUCCESS;
    begin(reinterpret_cast<Warp *>(region_of(data) + sizeof(Region)) + at.warp, mask);
#endif
    return SANITIZER_PATCH_SUCCESS;
}

extern "C" __device__ __noinline__ SanitizerPatchResult tracepipe_exit(void *userdata, uint64_t) {
#ifndef TRACEPIPE_EMPTY
    uint32_t mask = __activemask();
    if (!userdata || lane_id() != __ffs(mask) - 1) return SANITIZER_PATCH_SUCCESS;
    uint64_t clk = clock64(), ns = globaltimer(), data = uint64_t(userdata);
    if (is_shared(data)) {
        leave_shared(data, mask, ns, clk);
        return SANITIZER_PATCH_SUCCESS;
    }
    Position at = position();
    uint64_t warps = recorded(at, data);
    if (at.warp >= warps) return SANITIZER_PATCH_SUCCESS;
    char *region = region_of(data);
    Warp *warp = reinterpret_cast<Warp *>(region + sizeof(Region)) + at.warp;
    if (mask != at.lanes && atomicCAS(&warp->partial_mask, 0u, mask) != 0) {
        uint64_t room = tracepipe::exits_room(warps, data >> tracepipe::ROOM_SHIFT & tracepipe::MOST_ROOM);
        leave_alone(region, tracepipe::exits_offset(warps), room, at.warp, mask, ns, clk);
        return SANITIZER_PATCH_SUCCESS;
    }
    *reinterpret_cast<ulonglong2 *>(&warp->exit_ns) = make_ulonglong2(ns, clk);
#endif
    return SANITIZER_PATCH_SUCCESS;
}
