/* SPDX-License-Identifier: MIT */
/* Computes times of warps that are finer than the steps of %globaltimer, from the cycles that their SM
 * counted.
 *
 * The reference is tracepipe/clocks/sm_clock.py, which describes how this works and why. Functions have the
 * same names there. Results are equal to the last bit. Its limits keep int64_t from overflowing.
 *
 * Right shifts of negative numbers round down, as in Python; GCC and Clang define them so.
 */

#include <stdlib.h>
#include <string.h>

#include "sm_clock.h"
#include "tables.h"

#define COUNT_LIMIT ((int64_t)1 << 40) /* of warps in a batch: sizes in bytes cannot overflow */

enum { GROUP_SIZE = sizeof(struct group) / sizeof(int64_t) };

enum outcome { REFINED = 1, AS_READ = 0, BAD_LENGTHS = -1, NO_MEMORY = -2 };

/* Whether all are from 0 to below a limit, which is a power of two: their bits are combined without branches.
 * */
static bool are_below(const int64_t *values, int64_t count, int64_t limit)
{
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; i++)
        bits |= (uint64_t)values[i];
    return bits < (uint64_t)limit;
}

/* Whether all are from -LIMIT to below LIMIT. */
static bool are_small(const int64_t *values, int64_t count)
{
    uint64_t bits = 0;
    for (int64_t i = 0; i < count; i++)
        bits |= (uint64_t)(values[i] < 0 ? ~values[i] : values[i]);
    return bits < (uint64_t)LIMIT;
}

static bool counts_agree(const int64_t *exit_count, int64_t warps, int64_t exits)
{
    if (warps < 0 || exits < 0 || warps > COUNT_LIMIT || exits > COUNT_LIMIT)
        return false;
    if (!exit_count)
        return warps == exits;
    for (int64_t i = 0; i < warps; i++) {
        if (exit_count[i] < 0 || exit_count[i] > exits)
            return false;
        exits -= exit_count[i];
    }
    return exits == 0;
}

static int64_t *take(int64_t **memory, int64_t count)
{
    int64_t *taken = *memory;
    *memory += count;
    return taken;
}

/* Finds room for the columns of a batch, whose entries and exits are known. */
static bool allocate(struct tp_sm_clocks *clocks, struct batch *batch)
{
    struct readings *entries = &batch->entries, *exits = &batch->exits;
    int64_t rows = min(entries->count, SM_LIMIT);
    int64_t spans = 4 * rows + 2 * SMS_FOR_RATE * ROUNDS;
    int64_t work = max(entries->count + exits->count, spans);
    int64_t count = 3 * entries->count + 5 * exits->count + (2 * GROUP_SIZE + 3) * rows + 2 * spans + work;
    if (count > clocks->memory_count) {
        if ((uint64_t)count > SIZE_MAX / sizeof(int64_t))
            return false;
        free(clocks->memory);
        clocks->memory = malloc((size_t)count * sizeof(int64_t));
        clocks->memory_count = clocks->memory ? count : 0;
        if (!clocks->memory)
            return false;
    }
    int64_t *memory = clocks->memory;
    entries->at = take(&memory, entries->count);
    entries->off = take(&memory, entries->count);
    batch->row_of = take(&memory, entries->count);
    exits->at = take(&memory, exits->count);
    exits->off = take(&memory, exits->count);
    exits->ns = batch->exit_ns = take(&memory, exits->count);
    exits->clk = batch->exit_clk = take(&memory, exits->count);
    batch->warp_of = take(&memory, exits->count);
    entries->of_row = (struct group *)take(&memory, GROUP_SIZE * rows);
    exits->of_row = (struct group *)take(&memory, GROUP_SIZE * rows);
    batch->sm_of = take(&memory, rows);
    batch->line_of = take(&memory, rows);
    batch->lags = take(&memory, rows);
    batch->own.low = take(&memory, spans);
    batch->own.high = take(&memory, spans);
    batch->work = take(&memory, work);
    return true;
}

/* Computes the readings of each exit, whose columns count from the entry of its warp. */
static void read_exits(struct batch *batch, const int64_t *exit_ns, const int64_t *exit_clk,
                       const int64_t *exit_count)
{
    int64_t at = 0;
    for (int64_t warp = 0; warp < batch->entries.count; warp++) {
        int64_t end = at + (exit_count ? exit_count[warp] : 1);
        for (; at < end; at++) {
            batch->warp_of[at] = warp;
            batch->exit_ns[at] = batch->entries.ns[warp] + exit_ns[at];
            batch->exit_clk[at] = batch->entries.clk[warp] + exit_clk[at];
        }
    }
}

static int64_t divisor(int64_t a, int64_t b)
{
    while (b) {
        int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a < 0 ? -a : a;
}

static int64_t divisor_of_all(int64_t step_ns, const struct readings *readings)
{
    for (int64_t i = 0; i < readings->count; i++)
        if (step_ns == 0 || readings->ns[i] % step_ns != 0)
            step_ns = divisor(readings->ns[i], step_ns);
    return step_ns;
}

/* How many different numbers two columns have, counted up to `most`. */
static int64_t different(const struct readings *entries, const struct readings *exits, int64_t most)
{
    int64_t seen[READINGS_FOR_STEP], count = 0;
    for (int64_t i = 0; i < entries->count + exits->count && count < most; i++) {
        int64_t ns = i < entries->count ? entries->ns[i] : exits->ns[i - entries->count], at = 0;
        while (at < count && seen[at] != ns)
            at++;
        if (at == count)
            seen[count++] = ns;
    }
    return count;
}

/* The step of %globaltimer that all readings so far show; 0 while there are too few. */
static int64_t step(struct tp_sm_clocks *clocks, const struct batch *batch)
{
    if (!clocks->has_origin)
        clocks->origin_ns = batch->base_ns;
    clocks->has_origin = true;
    int64_t step_ns = divisor(clocks->step_ns, batch->base_ns - clocks->origin_ns);
    step_ns = divisor_of_all(step_ns, &batch->entries);
    clocks->step_ns = divisor_of_all(step_ns, &batch->exits);
    clocks->readings += different(&batch->entries, &batch->exits, READINGS_FOR_STEP - clocks->readings);
    return clocks->readings < READINGS_FOR_STEP ? 0 : clocks->step_ns;
}

/* Puts readings in the order of their rows, whose counts are known. */
static void sort_by_row(struct readings *readings, int64_t rows, const int64_t *row_of,
                        const int64_t *warp_of)
{
    int64_t start = 0;
    for (int64_t row = 0; row < rows; row++) {
        struct group *group = &readings->of_row[row];
        group->start = start;
        start += group->count;
        group->count = 0;
    }
    for (int64_t i = 0; i < readings->count; i++) {
        struct group *group = &readings->of_row[row_of[warp_of ? warp_of[i] : i]];
        readings->at[group->start + group->count++] = i;
    }
}

/* Finds the rows of a batch, which are its SMs in the order of their first warps, and what each has. */
static void group_by_sm(struct tp_sm_clocks *clocks, struct batch *batch, const int64_t *sm_of_warp,
                        bool one_each)
{
    struct readings *entries = &batch->entries, *exits = &batch->exits;
    clocks->batches++;
    batch->rows = 0;
    for (int64_t warp = 0; warp < entries->count; warp++) {
        struct sm *sm = &clocks->sms[sm_of_warp[warp]];
        if (sm->batch != clocks->batches) {
            sm->batch = clocks->batches;
            sm->row = batch->rows++;
            batch->sm_of[sm->row] = sm_of_warp[warp];
            entries->of_row[sm->row].count = exits->of_row[sm->row].count = 0;
        }
        batch->row_of[warp] = sm->row;
        entries->of_row[sm->row].count++;
    }
    sort_by_row(entries, batch->rows, batch->row_of, NULL);
    if (one_each) {
        exits->at = entries->at;
        memcpy(exits->of_row, entries->of_row, (size_t)batch->rows * sizeof *exits->of_row);
        return;
    }
    for (int64_t i = 0; i < exits->count; i++)
        exits->of_row[batch->row_of[batch->warp_of[i]]].count++;
    sort_by_row(exits, batch->rows, batch->row_of, batch->warp_of);
}

/* Returns the clocks of one GPU's SMs; NULL where there is no memory. */
TP_EXPORT struct tp_sm_clocks *tp_sm_clocks_new(void)
{
    struct tp_sm_clocks *clocks = calloc(1, sizeof *clocks);
    if (!clocks)
        return NULL;
    clocks->rates = 1;
    clocks->slots_bits = 10;
    clocks->slots = calloc((size_t)1 << clocks->slots_bits, sizeof *clocks->slots);
    if (!clocks->slots) {
        free(clocks);
        return NULL;
    }
    return clocks;
}

TP_EXPORT void tp_sm_clocks_free(struct tp_sm_clocks *clocks)
{
    if (!clocks)
        return;
    free(clocks->slots);
    free(clocks->memory);
    free(clocks);
}

/* Finds finer times of entries and lengths of stays than were read. Columns have a value for each warp or for
 * each exit; slot and exit_count may be NULL. `entered` has room for the warps and `stayed` for the exits;
 * neither may be one of the other columns. Returns an outcome; both are valid only after REFINED. */
TP_EXPORT int tp_sm_clocks_refine(struct tp_sm_clocks *clocks, int64_t base_ns, int64_t warps, int64_t exits,
                        const int64_t *entry_ns, const int64_t *exit_ns, const int64_t *sm,
                        const int64_t *slot, const int64_t *entry_clk, const int64_t *exit_clk,
                        const int64_t *exit_count, int64_t *entered, int64_t *stayed)
{
    struct batch batch = {.base_ns = base_ns, .exits = {.count = exits}};
    batch.entries = (struct readings){.count = warps, .ns = entry_ns, .clk = entry_clk};
    if (!counts_agree(exit_count, warps, exits))
        return BAD_LENGTHS;
    if (!are_small(entry_ns, warps) || !are_small(entry_clk, warps) || !are_small(exit_ns, exits) ||
        !are_small(exit_clk, exits) || !are_below(sm, warps, SM_LIMIT) ||
        (slot && !are_below(slot, warps, 1 << SLOT_BITS)) || !are_below(&base_ns, 1, BASE_LIMIT_NS))
        return AS_READ;
    if (!allocate(clocks, &batch))
        return NO_MEMORY;
    read_exits(&batch, exit_ns, exit_clk, exit_count);
    batch.step_ns = step(clocks, &batch);
    if (batch.step_ns <= 1 || batch.step_ns >= LIMIT || warps == 0)
        return AS_READ;
    group_by_sm(clocks, &batch, sm, exit_count == NULL);
    int64_t rate = sm_rate(clocks, &batch);
    if (rate < 0)
        return AS_READ;
    sm_on_lines(&batch, rate, entered, stayed);
    if (slot && batch.step_ns > SLOT_REST_NS) {
        int64_t *place_of = batch.row_of; /* reuses the memory of row_of, which is not needed any more */
        for (int64_t warp = 0; warp < warps; warp++)
            place_of[warp] = 1 + (sm[warp] << SLOT_BITS | slot[warp]);
        sm_take_turns(clocks, &batch, place_of, entered);
        if (!sm_leave(clocks, &batch, place_of, stayed))
            return NO_MEMORY;
    }
    for (int64_t i = 0; i < exits; i++)
        stayed[i] = max(stayed[i] - entered[batch.warp_of[i]], 0);
    return REFINED;
}

/* Batches as columns, one after the other: how many warps and exits each has, and which columns. */
struct tp_batches {
    const int64_t *base_ns, *warps, *exits;
    const uint8_t *has;
    const int64_t *entry_ns, *exit_ns, *sm, *slot, *entry_clk, *exit_clk, *exit_count;
};

enum { HAS_CLOCKS = 1, HAS_SLOT = 2, HAS_COUNTS = 4 };

/* Does the same with several batches. `entered` and `stayed` have the readings of a batch that is not
 * `refined`. Returns REFINED, or what is wrong. */
TP_EXPORT int tp_sm_clocks_refine_all(struct tp_sm_clocks *clocks, int64_t batches, const struct tp_batches *b,
                                      int64_t *entered, int64_t *stayed, uint8_t *refined)
{
    int64_t warp = 0, exit = 0;
    for (int64_t i = 0; i < batches; i++) {
        int64_t warps = b->warps[i], exits = b->exits[i];
        int done = AS_READ;
        if (b->has[i] & HAS_CLOCKS)
            done = tp_sm_clocks_refine(clocks, b->base_ns[i], warps, exits, b->entry_ns + warp, b->exit_ns + exit,
                                       b->sm + warp, b->has[i] & HAS_SLOT ? b->slot + warp : NULL,
                                       b->entry_clk + warp, b->exit_clk + exit,
                                       b->has[i] & HAS_COUNTS ? b->exit_count + warp : NULL, entered + warp,
                                       stayed + exit);
        if (done < 0)
            return done;
        refined[i] = done == REFINED;
        if (!refined[i]) {
            memcpy(entered + warp, b->entry_ns + warp, (size_t)warps * sizeof *entered);
            memcpy(stayed + exit, b->exit_ns + exit, (size_t)exits * sizeof *stayed);
        }
        warp += warps;
        exit += exits;
    }
    return REFINED;
}
