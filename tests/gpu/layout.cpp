// The host's side of the records' layout and of the device memory, for tests in Python to call.
#include <cstddef>

#include "clock_rounds.h"
#include "device_memory.h"
#include "warp_record.h"

using namespace tracepipe;

extern "C" {

// Offsets of Warp's fields in the order of their declaration, then its size; the same for Exit and Entry.
uint64_t warp_fields[] = {offsetof(Warp, entry_ns),   offsetof(Warp, entry_clk),    offsetof(Warp, place),
                                offsetof(Warp, entry_mask), offsetof(Warp, partial_mask), offsetof(Warp, exit_ns),
                                offsetof(Warp, exit_clk),   sizeof(Warp)};
uint64_t exit_fields[] = {offsetof(Exit, exit_ns), offsetof(Exit, exit_clk), offsetof(Exit, warp),
                                offsetof(Exit, mask), sizeof(Exit)};
uint64_t entry_fields[] = {offsetof(Entry, warp), offsetof(Entry, grid_id), offsetof(Entry, index), offsetof(Entry, pc),
                           offsetof(Entry, grid), offsetof(Entry, block), sizeof(Entry)};
uint64_t region_head_bytes = sizeof(Region), region_alignment = REGION_ALIGNMENT;

uint64_t exits_at(uint64_t warps) { return exits_offset(warps); }
uint64_t exits_that_fit(uint64_t warps, uint64_t room) { return exits_room(warps, room); }
uint64_t bytes_of_region(uint64_t warps, uint64_t room) { return region_bytes(warps, room); }
uint64_t shared_exits_at(uint64_t entries) { return shared_exits_offset(entries); }
uint64_t bytes_of_shared_region(uint64_t entries) { return shared_bytes(entries); }
uint64_t room_at_first(uint64_t warps) { return usual_room(warps); }

// `rounds` are triples of before, source and after; `pair` gets source, low and high.
bool pair_of(const ClockRound *rounds, uint64_t count, uint64_t *pair) {
    ClockRecord record{};
    bool is_made = clock_pair_of({rounds, rounds + count}, record);
    pair[0] = record.source_ns, pair[1] = record.host_lo_ns, pair[2] = record.host_hi_ns;
    return is_made;
}

void *memory_make(uint64_t bytes) { return new DeviceMemory(bytes); }
uint64_t memory_take(void *memory, uint64_t bytes) { return static_cast<DeviceMemory *>(memory)->take(bytes, true); }
void memory_give_back(void *memory, uint64_t at, uint64_t bytes) {
    static_cast<DeviceMemory *>(memory)->give_back(at, bytes);
}
void memory_free(void *memory) { delete static_cast<DeviceMemory *>(memory); }
}
