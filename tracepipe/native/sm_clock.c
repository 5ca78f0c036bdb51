/* SPDX-License-Identifier: MIT */
/* Computes times of warps that are finer than the steps of %globaltimer, from the cycles that their SM
 * counted.
 *
 * The reference is tracepipe/clocks/sm_clock.py, which describes how this works and why. Functions have the
 * same names there. Results are equal to the last bit. Its limits keep int64_t from overflowing.
 *
 * Right shifts of negative numbers round down, as in Python; GCC and Clang define them so.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tables.h"

/* As in tracepipe/clocks/sm_clock.py. */
#define LIMIT ((int64_t)1 << 58)
#define BASE_LIMIT_NS ((int64_t)1 << 62)
#define BOUND_LIMIT ((int64_t)1 << 62)

enum {
    RATE_BITS = 28,
    SM_LIMIT = 1 << 16,
    SLOT_BITS = 12,
    READINGS_FOR_STEP = 16,
    READINGS_PER_STRAY = 8,
    SMS_FOR_RATE = 16,
    ROUNDS = 2,
    NEAR = 8,
    SLOT_REST_NS = 64,
    APART = 4,
};

__extension__ typedef __int128 wide; /* ns << 28 and cycles * rate have more bits */

struct reading {
    int64_t clk, ns;
};

struct sm {
    struct reading first; /* since the rate last changed; ns with the base of its batch */
    uint64_t first_of;    /* the number of that rate: a reading at an earlier rate is out of date */
    uint64_t batch;       /* the last batch with this SM */
    int64_t row;          /* its place among the SMs of that batch */
};

/* When the last warp of a slot left, as read and as computed. */
struct slot {
    int64_t place; /* SM and slot, plus 1; 0 in a free entry of the table */
    int64_t read_ns, left_ns;
};

struct tp_sm_clocks {
    bool has_origin;
    int64_t origin_ns, step_ns, readings;
    uint64_t rates, batches; /* how many so far */
    struct sm sms[SM_LIMIT];
    struct slot *slots; /* a hash table, never more than half full */
    int slots_bits;
    int64_t slots_used;
    int64_t *memory; /* for the columns of a batch, reused by the next */
    int64_t memory_count;
};

/* The readings of one SM. */
struct group {
    int64_t start, count;
    int64_t low, high; /* of their distances above a line */
};

/* All entries or all exits of a batch. */
struct readings {
    int64_t count;
    const int64_t *ns, *clk; /* in the order of the batch */
    int64_t *at;             /* the place of each in the batch, SM after SM */
    struct group *of_row;    /* in `at`, for each SM */
    int64_t *off;            /* how far each is above a line, in the order of `at` */
};

/* Lower and upper limits of the rate, a pair for each two readings. */
struct spans {
    int64_t *low, *high;
    int64_t count;
};

struct batch {
    int64_t base_ns, step_ns;
    int64_t rows; /* its SMs, in the order of their first warps */
    struct readings entries, exits;
    int64_t *exit_ns, *exit_clk;     /* of each exit: the columns of `exits` */
    int64_t *warp_of;                /* of each exit */
    int64_t *row_of;                 /* of each warp */
    int64_t *sm_of, *line_of, *lags; /* of each row */
    struct spans own;                /* with room for those that reach back to earlier batches */
    int64_t *work;
};

static inline int64_t min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* How far a reading is above a line that is at 0 ns when the clock is at from_clk. */
static inline int64_t off_line(struct reading reading, int64_t rate, int64_t from_clk)
{
    return reading.ns - (int64_t)((wide)(reading.clk - from_clk) * rate >> RATE_BITS);
}

/* Times on the lines of ns over cycles, one line for each SM. */

/* The value that would be at place `at` if the values were sorted. Reorders them. */
static int64_t sm_nth(int64_t *values, int64_t count, int64_t at)
{
    int64_t low = values[0], high = values[0];
    for (int64_t i = 1; i < count; i++) {
        low = min(low, values[i]);
        high = max(high, values[i]);
    }
    /* One of the values usually divides the column well. Where it did not, the middle between the lowest and
     * the highest is used next, which limits the number of rounds for any values. */
    bool by_value = true;
    while (low < high) {
        int64_t pivot = by_value ? values[count / 2] : low + (high - low) / 2, before = count, kept = 0;
        for (int64_t i = 0; i < count; i++) { /* without branches, which would be mispredicted */
            int64_t value = values[i];
            values[i] = values[kept];
            values[kept] = value;
            kept += value <= pivot;
        }
        if (at < kept) {
            count = kept;
            high = pivot;
        } else {
            values += kept;
            count -= kept;
            at -= kept;
            low = pivot + 1;
        }
        by_value = 4 * count <= 3 * before;
    }
    return low;
}

/* The lower median. Reorders the values. */
static int64_t sm_median_low(int64_t *values, int64_t count)
{
    return sm_nth(values, count, (count - 1) / 2);
}

/* Computes how far each reading is above a line that is at 0 ns when the clock is at from_clk. */
static void off_lines(const struct batch *batch, struct readings *readings, int64_t rate, int64_t from_clk)
{
    for (int64_t row = 0; row < batch->rows; row++) {
        struct group *group = &readings->of_row[row];
        group->low = INT64_MAX;
        group->high = INT64_MIN;
        for (int64_t i = group->start; i < group->start + group->count; i++) {
            int64_t at = readings->at[i];
            int64_t off_ns = off_line((struct reading){readings->clk[at], readings->ns[at]}, rate, from_clk);
            group->low = min(group->low, off_ns);
            group->high = max(group->high, off_ns);
            readings->off[i] = off_ns;
        }
    }
}

/* Copies the distances of a row's readings above a line. */
static int64_t copy_off(const struct readings *readings, int64_t row, int64_t less_ns, int64_t *to)
{
    struct group group = readings->of_row[row];
    for (int64_t i = 0; i < group.count; i++)
        to[i] = readings->off[group.start + i] - less_ns;
    return group.count;
}

static int64_t median_off(const struct readings *readings, int64_t row, int64_t *work)
{
    return sm_median_low(work, copy_off(readings, row, 0, work));
}

/* How much later after its SM's clock an exit reads %globaltimer than an entry does; 0 where the readings
 * allow that. */
static int64_t lag(struct batch *batch)
{
    const struct readings *entries = &batch->entries, *exits = &batch->exits;
    int64_t low = -BASE_LIMIT_NS, high = BASE_LIMIT_NS, sms = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        struct group entered = entries->of_row[row], left = exits->of_row[row];
        if (left.count == 0)
            continue;
        low = max(low, left.high - entered.low - batch->step_ns);
        high = min(high, left.low - entered.high + batch->step_ns);
        sms++;
    }
    if (sms == 0)
        return 0;
    if (low - high <= batch->step_ns / APART)
        return max(min(low, high), min(0, max(low, high)));
    sms = 0;
    for (int64_t row = 0; row < batch->rows; row++) {
        if (exits->of_row[row].count == 0)
            continue;
        int64_t left = median_off(exits, row, batch->work);
        batch->lags[sms++] = left - median_off(entries, row, batch->work);
    }
    return sm_median_low(batch->lags, sms);
}

/* Where a line passes through the steps of most of an SM's readings, or below all of them where it passes
 * through too few. */
static int64_t median_line(struct batch *batch, int64_t row, int64_t lag_ns, int64_t low)
{
    int64_t *off = batch->work, strays = 0;
    int64_t count = copy_off(&batch->entries, row, 0, off);
    count += copy_off(&batch->exits, row, lag_ns, off + count);
    int64_t line_ns = sm_median_low(off, count) + batch->step_ns / 2;
    for (int64_t i = 0; i < count; i++)
        strays += line_ns < off[i] || line_ns - off[i] >= batch->step_ns;
    return strays * READINGS_PER_STRAY <= count ? line_ns : low - batch->step_ns;
}

/* Moves readings up to the lines of their SMs, but not out of their steps. */
static void put(const struct batch *batch, const struct readings *readings, int64_t lag_ns, int64_t *found)
{
    for (int64_t row = 0; row < batch->rows; row++) {
        struct group group = readings->of_row[row];
        int64_t line_ns = batch->line_of[row] + lag_ns;
        for (int64_t i = group.start; i < group.start + group.count; i++) {
            int64_t at = readings->at[i];
            found[at] = readings->ns[at] + max(0, min(line_ns - readings->off[i], batch->step_ns - 1));
        }
    }
}

/* Finds times of entries and exits on the lines of their SMs, each within its step, or as read where no line
 * fits. */
static void sm_on_lines(struct batch *batch, int64_t rate, int64_t *entered, int64_t *left)
{
    int64_t from_clk = batch->entries.clk[0], step_ns = batch->step_ns;
    for (int64_t i = 0; i < batch->entries.count; i++)
        from_clk = min(from_clk, batch->entries.clk[i]);
    off_lines(batch, &batch->entries, rate, from_clk);
    off_lines(batch, &batch->exits, rate, from_clk);
    int64_t lag_ns = lag(batch);
    for (int64_t row = 0; row < batch->rows; row++) {
        struct group entries = batch->entries.of_row[row], exits = batch->exits.of_row[row];
        int64_t low = exits.count ? min(entries.low, exits.low - lag_ns) : entries.low;
        int64_t high = exits.count ? max(entries.high, exits.high - lag_ns) : entries.high;
        bool fits = high - low < step_ns + step_ns / APART;
        batch->line_of[row] = fits ? (low + high + step_ns - 1) >> 1 : median_line(batch, row, lag_ns, low);
    }
    put(batch, &batch->entries, 0, entered);
    put(batch, &batch->exits, lag_ns, left);
}

/* The rate of the SM clocks in a batch, ns per 2^28 cycles. */

struct agreed {
    int64_t low, best, high;
};

/* A reading of a row, counted in the order of the batch. */
static struct reading reading_of(const struct readings *readings, int64_t row, int64_t which)
{
    int64_t at = readings->at[readings->of_row[row].start + which];
    return (struct reading){readings->clk[at], readings->ns[at]};
}

/* Adds the limits of the rates of lines through two readings, each of which may be up to slack_ns off the
 * line. Adds none where the readings are at the same cycle. */
static void add_span(struct spans *spans, struct reading first, struct reading last, int64_t slack_ns)
{
    int64_t clk = last.clk - first.clk, ns = last.ns - first.ns;
    if (clk <= 1)
        return;
    wide high = ((wide)max(ns + slack_ns, 0) << RATE_BITS) / (clk - 1);
    if (high >= BOUND_LIMIT)
        return;
    spans->low[spans->count] = (int64_t)(((wide)max(ns - slack_ns, 0) << RATE_BITS) / (clk + 1));
    spans->high[spans->count++] = (int64_t)high;
}

/* The lowest, best and highest rate that all limits allow, or that are between limits which contradict each
 * other. */
static struct agreed agreed(const struct spans *spans, int64_t *work)
{
    int64_t low = spans->low[0], high = spans->high[0], closest = spans->count / 2 + 1, kept = 0;
    for (int64_t i = 0; i < spans->count; i++) {
        low = max(low, spans->low[i]);
        high = min(high, spans->high[i]);
        work[i] = spans->high[i] - spans->low[i];
    }
    if (low <= high)
        return (struct agreed){low, (low + high) / 2, high};
    /* The narrowest half. Of limits as narrow as the last of them, the first ones are taken. */
    int64_t width = sm_nth(work, spans->count, closest - 1), ties = closest;
    for (int64_t i = 0; i < spans->count; i++)
        ties -= spans->high[i] - spans->low[i] < width;
    for (int64_t i = 0; i < spans->count; i++) {
        int64_t wider = spans->high[i] - spans->low[i] - width;
        if (wider < 0 || (wider == 0 && ties-- > 0))
            work[kept++] = (spans->low[i] + spans->high[i]) / 2;
    }
    return (struct agreed){high, sm_median_low(work, kept), low};
}

/* Adds the limits from the first and the last readings of each SM. */
static void own_spans(struct batch *batch)
{
    struct readings *entries = &batch->entries, *exits = &batch->exits;
    for (int64_t row = 0; row < batch->rows; row++) {
        int64_t entered = entries->of_row[row].count, left = exits->of_row[row].count;
        struct reading first = reading_of(entries, row, 0);
        add_span(&batch->own, first, reading_of(entries, row, entered - 1), batch->step_ns);
        if (left == 0)
            continue;
        struct reading last = reading_of(exits, row, left - 1);
        add_span(&batch->own, reading_of(exits, row, 0), last, batch->step_ns);
        /* An exit may read its two clocks in a different order than an entry. */
        add_span(&batch->own, first, last, 2 * batch->step_ns);
    }
}

/* Adds the limits from readings of earlier batches, where the limits of this batch allow them. The first
 * readings are kept for later batches. */
static void add_since(struct tp_sm_clocks *clocks, struct batch *batch)
{
    struct spans *own = &batch->own, since = {own->low + own->count, own->high + own->count, 0};
    for (int64_t row = 0; row < batch->rows; row++) {
        struct sm *sm = &clocks->sms[batch->sm_of[row]];
        struct reading first = reading_of(&batch->entries, row, 0);
        first.ns += batch->base_ns;
        if (sm->first_of == clocks->rates)
            add_span(&since, sm->first, first, batch->step_ns);
    }
    struct agreed mine = agreed(own, batch->work), longer = {0, 0, 0};
    if (since.count > 0)
        longer = agreed(&since, batch->work);
    if (longer.low <= mine.high && mine.low <= longer.high)
        own->count += since.count;
    else
        clocks->rates++;
    for (int64_t row = 0; row < batch->rows; row++) {
        struct sm *sm = &clocks->sms[batch->sm_of[row]];
        if (sm->first_of == clocks->rates)
            continue;
        sm->first_of = clocks->rates;
        sm->first = reading_of(&batch->entries, row, 0);
        sm->first.ns += batch->base_ns;
    }
}

/* Adds the limits from the two readings of an SM that are furthest from a line of that rate. */
static void add_tightest(struct spans *spans, const struct readings *readings, int64_t row, int64_t rate,
                         int64_t step_ns)
{
    int64_t count = readings->of_row[row].count, low_ns = 0, high_ns = 0;
    struct reading low = {0, 0}, high = {0, 0};
    for (int64_t i = 0; i < count; i++) {
        struct reading reading = reading_of(readings, row, i);
        int64_t off_ns = off_line(reading, rate, 0);
        if (i == 0 || off_ns < low_ns) {
            low_ns = off_ns;
            low = reading;
        }
        if (i == 0 || off_ns > high_ns) {
            high_ns = off_ns;
            high = reading;
        }
    }
    if (count < 2)
        return;
    int64_t batch_clk = reading_of(readings, row, count - 1).clk - reading_of(readings, row, 0).clk;
    if (llabs(high.clk - low.clk) * NEAR < llabs(batch_clk))
        return;
    if (low.clk < high.clk)
        add_span(spans, low, high, step_ns);
    else
        add_span(spans, high, low, step_ns);
}

/* The rate from which on values on a line would exceed the limits. */
static int64_t rate_limit(const struct batch *batch)
{
    int64_t longest_clk = 0;
    for (int64_t i = 0; i < batch->entries.count; i++)
        longest_clk = max(longest_clk, llabs(batch->entries.clk[i]));
    for (int64_t i = 0; i < batch->exits.count; i++)
        longest_clk = max(longest_clk, llabs(batch->exits.clk[i]));
    return LIMIT / ((2 * longest_clk >> RATE_BITS) + 1);
}

/* The rate of a batch, -1 where its readings do not show one. */
static int64_t sm_rate(struct tp_sm_clocks *clocks, struct batch *batch)
{
    struct spans *own = &batch->own;
    own_spans(batch);
    if (own->count == 0)
        return -1;
    add_since(clocks, batch);
    int64_t limit = rate_limit(batch), rate = agreed(own, batch->work).best;
    for (int round = 0; round < ROUNDS && rate < limit; round++) {
        for (int64_t row = 0; row < min(batch->rows, SMS_FOR_RATE); row++) {
            add_tightest(own, &batch->entries, row, rate, batch->step_ns);
            add_tightest(own, &batch->exits, row, rate, batch->step_ns);
        }
        rate = agreed(own, batch->work).best;
    }
    return rate < limit ? rate : -1;
}

/* When the warps of earlier batches left their slots. */

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

/* Moves the entry of a warp to after the exit of the warp that an earlier batch has in its slot, where both
 * are in the same step. */
static void sm_take_turns(const struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
                   int64_t *entered)
{
    for (int64_t warp = 0; warp < batch->entries.count; warp++) {
        const struct slot *slot = find_slot(clocks, place_of[warp]);
        if (slot->place != 0 && slot->read_ns == batch->entries.ns[warp] + batch->base_ns)
            entered[warp] = max(entered[warp], slot->left_ns - batch->base_ns);
    }
}

/* Remembers the reading of the last exit from each slot in the batch, and the time found for it. Returns
 * false where there is no memory. */
static bool sm_leave(struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
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
static int refine(struct tp_sm_clocks *clocks, int64_t base_ns, int64_t warps, int64_t exits,
                  const int64_t *entry_ns, const int64_t *exit_ns, const int64_t *sm, const int64_t *slot,
                  const int64_t *entry_clk, const int64_t *exit_clk, const int64_t *exit_count, int64_t *entered,
                  int64_t *stayed)
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
            done = refine(clocks, b->base_ns[i], warps, exits, b->entry_ns + warp, b->exit_ns + exit, b->sm + warp,
                          b->has[i] & HAS_SLOT ? b->slot + warp : NULL, b->entry_clk + warp, b->exit_clk + exit,
                          b->has[i] & HAS_COUNTS ? b->exit_count + warp : NULL, entered + warp, stayed + exit);
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
