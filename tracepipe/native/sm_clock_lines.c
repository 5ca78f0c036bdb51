/* SPDX-License-Identifier: MIT */
/* Finds times on the lines of ns over cycles, one line for each SM. */

#include "sm_clock.h"

int64_t sm_nth(int64_t *values, int64_t count, int64_t at)
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

int64_t sm_median_low(int64_t *values, int64_t count)
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

void sm_on_lines(struct batch *batch, int64_t rate, int64_t *entered, int64_t *left)
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
