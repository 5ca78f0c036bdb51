/* SPDX-License-Identifier: MIT */
/* The input of the writers: operations in the order of time, and the events that they draw. */
#ifndef TP_OPS_H
#define TP_OPS_H

#include <stdint.h>

enum { OP_BEGIN = 1, OP_END, OP_INSTANT, OP_COUNTER };
enum { MARK_NONE, MARK_UNCLOSED, MARK_NO_BEGIN, MARK_FROM_DURATION, MARKS };
#define NO_EVENT (-1)
#define MORE_FLOWS ((int64_t)1 << 60) /* a `flow2` from here on counts pairs of further flows */

/* Further flows of an operation: one, and what `flow2` was before. */
typedef struct {
    int64_t flow, before;
} tp_more_flows;

/* `order` has the places of the operations in the order of time. `value` is that of a counter. */
typedef struct {
    const int64_t *order;
    const uint8_t *kind, *mark;
    const int32_t *row, *name, *event;
    const int64_t *ts, *flow, *flow2, *value;
    const tp_more_flows *more;
} tp_drawn;

/* The next of the flows of an operation, of which `left` are left, first its `flow2`; 0 for no more. */
static inline int64_t tp_next_flow(const tp_drawn *d, int64_t *left)
{
    int64_t flow = *left;
    *left = 0;
    if (flow < MORE_FLOWS)
        return flow;
    const tp_more_flows *more = &d->more[flow - MORE_FLOWS];
    *left = more->before;
    return more->flow;
}

/* By event: what the arguments of its slice show that is not of its shape. `source` and `line`, the number of
 * the Python frame that is shown, are below 0 where there is none, and NULL where no event has any. */
typedef struct {
    const int32_t *shape, *args;
    const int64_t *launch, *source, *line;
} tp_given;

/* Changes of the warps of one GPU, in the order of time: begins, ends and exits of slices. Where `value` is
 * not below 0, it is how many warps run from then on. */
enum { WARP_BEGIN = 1, WARP_END, WARP_EXIT, WARP_COUNT };
typedef struct {
    const int64_t *ts, *value, *mask;
    const int32_t *slice;
    const uint8_t *kind;
} tp_changes;

/* By slice. A value below 0 is not known, or need not be shown. */
typedef struct {
    const int64_t *number, *cycles, *source, *exits, *lanes, *flow;
    const int32_t *row, *kernel;
    const uint8_t *unclosed;
} tp_slices;

#endif
