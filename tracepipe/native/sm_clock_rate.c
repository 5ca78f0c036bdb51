/* SPDX-License-Identifier: MIT */
/* Finds the rate of the SM clocks in a batch, ns per 2^28 cycles. */

#include <stdlib.h>

#include "sm_clock.h"

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

int64_t sm_rate(struct tp_sm_clocks *clocks, struct batch *batch)
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
