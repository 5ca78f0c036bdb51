/* SPDX-License-Identifier: MIT */
/* What the files of the SM clocks share; see sm_clock.c. */

#ifndef TRACEPIPE_SM_CLOCK_H
#define TRACEPIPE_SM_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

/* As in tracepipe/sm_clock.py. */
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
    uint64_t first_of;    /* which rate: the first of an earlier rate is out of date */
    uint64_t batch;       /* the last batch that it was in */
    int64_t row;          /* its place among the SMs of that batch */
};

/* What the last warp of a slot left at, as read and as found. */
struct slot {
    int64_t place; /* 1 + SM and slot; 0 where the table is free */
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
    int64_t *memory; /* for the columns of one batch, kept for the next */
    int64_t memory_count;
};

/* The readings of one SM. */
struct group {
    int64_t start, count;
    int64_t low, high; /* of how far they are above a line */
};

/* All entries or all exits of a batch. */
struct readings {
    int64_t count;
    const int64_t *ns, *clk; /* in the order of the batch */
    int64_t *at;             /* where in the batch each stands, SM after SM */
    struct group *of_row;    /* in `at`, for each SM */
    int64_t *off;            /* how far each is above a line, in the order of `at` */
};

/* Rates at least and at most, each pair as two readings allow. */
struct spans {
    int64_t *low, *high;
    int64_t count;
};

struct batch {
    int64_t base_ns, step_ns;
    int64_t rows; /* its SMs, in the order of their first warps */
    struct readings entries, exits;
    int64_t *exit_ns, *exit_clk;     /* of each exit: what `exits` reads */
    int64_t *warp_of;                /* of each exit */
    int64_t *row_of;                 /* of each warp */
    int64_t *sm_of, *line_of, *lags; /* of each row */
    struct spans own;                /* with room for those since earlier batches */
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

/* How far a reading is above a line that is at 0 ns at from_clk. */
static inline int64_t off_line(struct reading reading, int64_t rate, int64_t from_clk)
{
    return reading.ns - (int64_t)((wide)(reading.clk - from_clk) * rate >> RATE_BITS);
}

#pragma GCC visibility push(hidden)

/* The one that would stand at `at` if the values were in order; reorders them. */
int64_t sm_nth(int64_t *values, int64_t count, int64_t at);

/* The lower median; reorders the values. */
int64_t sm_median_low(int64_t *values, int64_t count);

/* The rate of a batch, -1 where it shows none. */
int64_t sm_rate(struct tp_sm_clocks *clocks, struct batch *batch);

/* Finds times of entries and exits on the lines of their SMs, each in its step; as read where none fits. */
void sm_on_lines(struct batch *batch, int64_t rate, int64_t *entered, int64_t *left);

/* Lets no warp enter before the one left that an earlier batch has in its slot, in the same step. */
void sm_take_turns(const struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
                   int64_t *entered);

/* Keeps what the last exit of the batch from each slot read, and the time found for it; false where memory is
 * out. */
bool sm_leave(struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
              const int64_t *left);

#pragma GCC visibility pop

#endif
