/* SPDX-License-Identifier: MIT */
/* Shared by the files of the SM clocks; see sm_clock.c. */

#ifndef TRACEPIPE_SM_CLOCK_H
#define TRACEPIPE_SM_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

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

#pragma GCC visibility push(hidden)

/* The value that would be at place `at` if the values were sorted. Reorders them. */
int64_t sm_nth(int64_t *values, int64_t count, int64_t at);

/* The lower median. Reorders the values. */
int64_t sm_median_low(int64_t *values, int64_t count);

/* The rate of a batch, -1 where its readings do not show one. */
int64_t sm_rate(struct tp_sm_clocks *clocks, struct batch *batch);

/* Finds times of entries and exits on the lines of their SMs, each within its step, or as read where no line
 * fits. */
void sm_on_lines(struct batch *batch, int64_t rate, int64_t *entered, int64_t *left);

/* Moves the entry of a warp to after the exit of the warp that an earlier batch has in its slot, where both
 * are in the same step. */
void sm_take_turns(const struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
                   int64_t *entered);

/* Remembers the reading of the last exit from each slot in the batch, and the time found for it. Returns
 * false where there is no memory. */
bool sm_leave(struct tp_sm_clocks *clocks, const struct batch *batch, const int64_t *place_of,
              const int64_t *left);

#pragma GCC visibility pop

#endif
