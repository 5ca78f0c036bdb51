/* SPDX-License-Identifier: MIT */
/* Joins launch calls to kernels and warps by launch id: flows, and the check of cause before effect. */
#ifndef TP_LAUNCHES_H
#define TP_LAUNCHES_H

#include "tables.h"

/* This many launches are remembered, then the oldest is forgotten. */
#define LAUNCHES_MAX (1 << 16)
#define LAUNCH_BUCKETS (1 << 16)

typedef struct {
    int64_t launch, start, bound, flow;
    int32_t next; /* in the same bucket, or -1 */
    uint8_t called, drawn, started;
} tp_launch;

/* A kernel that started before its call, by more than the bound. */
typedef struct {
    int64_t launch, start, bound, call;
} tp_early;

typedef struct {
    tp_launch *launches;
    int32_t *buckets;
    int64_t count; /* of all launches so far */
    int64_t last_flow;
    tp_early *early;
    int64_t early_count, early_room;
} tp_launches;

/* Batches of warps among events, by column: the place of each there, its launch, the time at which its first
 * warp enters, by how much that may be wrong, and what is done with its warps. `flow` is set to its flow. */
enum { WARPS_NO_LAUNCH, WARPS_COUNTED, WARPS_DRAWN, WARPS_STARTS };
typedef struct {
    const int64_t *place, *launch, *ts, *bound;
    const uint8_t *done;
    int64_t *flow;
} tp_starts;

int tp_launches_init(tp_launches *l);
void tp_launches_free(tp_launches *l);
/* Each of these sets the flow: negative where it starts, 0 where there is none. */
int tp_launch_call(tp_launches *l, int64_t launch, int64_t ts, int64_t *flow);
void tp_launch_start(tp_launches *l, int64_t launch, int64_t ts, int64_t bound);
void tp_launch_kernel(tp_launches *l, int64_t launch, int64_t ts, int64_t bound, int64_t *flow);
void tp_launch_warps(tp_launches *l, const tp_starts *s, int64_t i);

#endif
