/* SPDX-License-Identifier: MIT */
/* Remembers when the warps of earlier batches left their slots. */

#include <stdlib.h>

#include "sm_clock.h"

/* The entry of a slot in the table, or a free entry for it. */
static struct slot *find_slot(const struct tp_sm_clocks *clocks, int64_t place)
{
    uint64_t size = (uint64_t)1 << clocks->slots_bits;
    uint64_t at = (uint64_t)place * 0x9E3779B97F4A7C15u >> (64 - clocks->slots_bits);
    while (clocks->slots[at].place != 0 && clocks->slots[at].place != place)
        at = (at + 1) & (size - 1);
    return &clocks->slots[at];
}

/* Makes the table larger where it is half full. */
static bool grow_slots(struct tp_sm_clocks *clocks)
{
    int64_t size = (int64_t)1 << clocks->slots_bits;
    if (2 * clocks->slots_used < size)
        return true;
    struct slot *old = clocks->slots, *larger = calloc(2 * (size_t)size, sizeof *larger);
    if (!larger)
        return false;
    clocks->slots = larger;
    clocks->slots_bits++;
    for (int64_t i = 0; i < size; i++)
        if (old[i].place != 0)
            *find_slot(clocks, old[i].place) = old[i];
    free(old);
    return true;
}

void sm_take_turns(const struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
                   int64_t *entered)
{
    for (int64_t warp = 0; warp < batch->entries.count; warp++) {
        const struct slot *slot = find_slot(clocks, place_of[warp]);
        if (slot->place != 0 && slot->read_ns == batch->entries.ns[warp] + batch->base_ns)
            entered[warp] = max(entered[warp], slot->left_ns - batch->base_ns);
    }
}

bool sm_leave(struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
              const int64_t *left)
{
    for (int64_t i = 0; i < batch->exits.count; i++) {
        if (!grow_slots(clocks))
            return false;
        struct slot *slot = find_slot(clocks, place_of[batch->warp_of[i]]);
        clocks->slots_used += slot->place == 0;
        slot->place = place_of[batch->warp_of[i]];
        slot->read_ns = batch->exits.ns[i] + batch->base_ns;
        slot->left_ns = left[i] + batch->base_ns;
    }
    return true;
}
