/* SPDX-License-Identifier: MIT */
/* Launches by their ids, the last LAUNCHES_MAX of them. */
#include "launches.h"
#include "times.h"

int tp_launches_init(tp_launches *l)
{
    memset(l, 0, sizeof *l);
    l->launches = malloc(LAUNCHES_MAX * sizeof *l->launches);
    l->buckets = malloc(LAUNCH_BUCKETS * sizeof *l->buckets);
    if (!l->launches || !l->buckets)
        return TP_NO_MEMORY;
    for (int i = 0; i < LAUNCH_BUCKETS; i++)
        l->buckets[i] = -1;
    return 0;
}

void tp_launches_free(tp_launches *l)
{
    free(l->launches);
    free(l->buckets);
    free(l->early);
}

static int32_t *bucket_of(tp_launches *l, int64_t launch)
{
    return &l->buckets[(uint64_t)launch * 0x9E3779B97F4A7C15u >> 48];
}

static tp_launch *launch_of(tp_launches *l, int64_t launch)
{
    int32_t *bucket = bucket_of(l, launch);
    for (int32_t at = *bucket; at >= 0; at = l->launches[at].next)
        if (l->launches[at].launch == launch)
            return &l->launches[at];
    int32_t place = (int32_t)(l->count % LAUNCHES_MAX);
    tp_launch *one = &l->launches[place];
    if (l->count >= LAUNCHES_MAX) {
        int32_t *link = bucket_of(l, one->launch);
        while (*link != place)
            link = &l->launches[*link].next;
        *link = one->next;
    }
    *one = (tp_launch){.launch = launch, .next = *bucket_of(l, launch)};
    *bucket_of(l, launch) = place;
    l->count++;
    return one;
}

static int64_t flow_of(tp_launches *l, tp_launch *one)
{
    if (one->flow)
        return one->flow;
    /* Even: the flows of calls through the layers are odd. */
    l->last_flow += 2;
    one->flow = l->last_flow;
    return -one->flow;
}

int tp_launch_call(tp_launches *l, int64_t launch, int64_t ts, int64_t *flow)
{
    tp_launch *one = launch_of(l, launch);
    if (one->called) { /* the id is used again for a new launch */
        one->drawn = one->started = 0;
        one->flow = 0;
    }
    if (one->started && tp_after(one->start, one->bound) < ts) {
        if (TP_GROW(l->early, l->early_room, l->early_count))
            return TP_NO_MEMORY;
        l->early[l->early_count++] = (tp_early){launch, one->start, one->bound, ts};
    }
    one->started = 0;
    one->called = 1;
    *flow = flow_of(l, one);
    return 0;
}

void tp_launch_start(tp_launches *l, int64_t launch, int64_t ts, int64_t bound)
{
    tp_launch *one = launch_of(l, launch);
    if (one->called || one->started)
        return;
    one->started = 1;
    one->start = ts;
    one->bound = bound;
}

void tp_launch_kernel(tp_launches *l, int64_t launch, int64_t ts, int64_t bound, int64_t *flow)
{
    tp_launch_start(l, launch, ts, bound);
    tp_launch *one = launch_of(l, launch);
    one->drawn = 1;
    *flow = flow_of(l, one);
}

void tp_launch_warps(tp_launches *l, const tp_starts *s, int64_t i)
{
    uint8_t done = s->done[i];
    s->flow[i] = 0;
    if (done == WARPS_NO_LAUNCH)
        return;
    tp_launch *one = launch_of(l, s->launch[i]);
    if (done != WARPS_COUNTED && one->drawn)
        return;
    if (done == WARPS_STARTS || (done == WARPS_DRAWN && one->flow))
        tp_launch_kernel(l, s->launch[i], s->ts[i], s->bound[i], &s->flow[i]);
    else
        tp_launch_start(l, s->launch[i], s->ts[i], s->bound[i]);
}
