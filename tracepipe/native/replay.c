/* SPDX-License-Identifier: MIT */
/* A graph of times: each node begins some time after others have ended. analyses/replay.py does the same in Python.
 *
 * Work that overlaps communication on its GPU is slower meanwhile, so what communicates and what it slows take place
 * in the order of time. Everything else is as long as it is, and has its time at once. */
#include "tables.h"

enum { PLAIN, SLOWED, COMMUNICATES, COMES, LEAVES };
enum { BEGINS, ENDS };
/* A GPU runs so many kernels at once. More of them, which no GPU has, are as long as if nothing communicated. */
enum { RUNNING_MOST = 128 };

/* `first` has, for each node and past the last, the first of its edges, which lead to the nodes `target`, `lag` later.
 * A node lasts for `weight`; `waits` is how many edges lead to it. `role` says what it is on its `gpu`, and `slow` by
 * what share it is slower there while anything communicates. */
typedef struct {
    const int32_t *first, *target;
    const int64_t *lag, *weight;
    const int32_t *waits;
    const uint8_t *role;
    const int32_t *gpu;
    const double *slow;
} tp_graph;

typedef struct {
    int64_t ts;
    int32_t node, what;
} tp_due;

typedef struct {
    const tp_graph *g;
    int64_t *begin, *end; /* of each node */
    int32_t *left;        /* how many edges each still waits for */
    int32_t *ready;       /* nodes whose end is known, and whose edges are not followed yet */
    int64_t ready_count, done;
    tp_due *due;
    int64_t due_count, due_room;
    int32_t *running, *next, *previous; /* the slowed work of each GPU, as a list */
    int32_t *count, *active;            /* how long it is, and how much communicates on each GPU */
    int64_t *since;                     /* when the rest of each node's work was reckoned */
    double *rest;
} tp_replaying;

/* A time and so many ns later, the first or the last one where there is none so early or late. */
static int64_t later(int64_t ts, int64_t ns)
{
    int64_t sum;
    if (__builtin_add_overflow(ts, ns, &sum))
        return ns < 0 ? INT64_MIN : INT64_MAX;
    return sum;
}

static int sooner(const tp_due *a, const tp_due *b)
{
    if (a->ts != b->ts)
        return a->ts < b->ts;
    return a->node != b->node ? a->node < b->node : a->what < b->what;
}

static int put(tp_replaying *r, int64_t ts, int32_t node, int32_t what)
{
    if (tp_grow((void **)&r->due, &r->due_room, r->due_count, sizeof *r->due))
        return TP_NO_MEMORY;
    tp_due one = {ts, node, what};
    int64_t at = r->due_count++;
    for (int64_t above; at && sooner(&one, &r->due[above = (at - 1) / 2]); at = above)
        r->due[at] = r->due[above];
    r->due[at] = one;
    return 0;
}

static tp_due taken(tp_replaying *r)
{
    tp_due first = r->due[0], last = r->due[--r->due_count];
    int64_t at = 0;
    for (int64_t below = 1; below < r->due_count; below = 2 * at + 1) {
        if (below + 1 < r->due_count && sooner(&r->due[below + 1], &r->due[below]))
            below++;
        if (!sooner(&r->due[below], &last))
            break;
        r->due[at] = r->due[below];
        at = below;
    }
    r->due[at] = last;
    return first;
}

static double speed(const tp_replaying *r, int32_t node)
{
    return r->active[r->g->gpu[node]] ? 1 - r->g->slow[node] : 1;
}

static int plan_end(tp_replaying *r, int32_t node, int64_t ts)
{
    double ns = r->rest[node] / speed(r, node) + 0.5;
    r->since[node] = ts;
    r->end[node] = later(ts, ns < 0x1p63 ? (int64_t)ns : INT64_MAX);
    return put(r, r->end[node], node, ENDS);
}

/* Something begins (1) or ends (-1) to communicate on a GPU. */
static int communicate(tp_replaying *r, int32_t gpu, int64_t ts, int more)
{
    int32_t before = r->active[gpu], after = before + more;
    if (!before == !after) {
        r->active[gpu] = after;
        return 0;
    }
    for (int32_t node = r->running[gpu]; node >= 0; node = r->next[node]) {
        double rest = r->rest[node] - ((double)ts - (double)r->since[node]) * speed(r, node);
        r->rest[node] = rest > 0 ? rest : 0;
    }
    r->active[gpu] = after;
    for (int32_t node = r->running[gpu]; node >= 0; node = r->next[node])
        if (plan_end(r, node, ts))
            return TP_NO_MEMORY;
    return 0;
}

/* All edges to a node are followed: it begins. */
static int start(tp_replaying *r, int32_t node)
{
    const tp_graph *g = r->g;
    if (g->role[node] == PLAIN) {
        r->end[node] = later(r->begin[node], g->weight[node]);
        r->ready[r->ready_count++] = node;
        return 0;
    }
    return put(r, r->begin[node], node, BEGINS);
}

static int happen(tp_replaying *r, tp_due one)
{
    const tp_graph *g = r->g;
    int32_t node = one.node, gpu = g->gpu[node];
    int role = g->role[node];
    if (one.what == ENDS && role == SLOWED) {
        int32_t next = r->next[node], previous = r->previous[node];
        if (one.ts != r->end[node] || previous == -2)
            return 0; /* it was planned anew */
        if (previous >= 0)
            r->next[previous] = next;
        else
            r->running[gpu] = next;
        if (next >= 0)
            r->previous[next] = previous;
        r->previous[node] = -2;
        r->count[gpu]--;
        r->ready[r->ready_count++] = node;
        return 0;
    }
    if (role == SLOWED && r->count[gpu] == RUNNING_MOST) {
        r->end[node] = later(one.ts, g->weight[node]);
        r->ready[r->ready_count++] = node;
        return 0;
    }
    if (role == SLOWED) {
        r->count[gpu]++;
        r->rest[node] = (double)g->weight[node];
        r->next[node] = r->running[gpu];
        r->previous[node] = -1;
        if (r->running[gpu] >= 0)
            r->previous[r->running[gpu]] = node;
        r->running[gpu] = node;
        return plan_end(r, node, one.ts);
    }
    if (role == COMMUNICATES && one.what == BEGINS) {
        r->end[node] = later(one.ts, g->weight[node]);
        return communicate(r, gpu, one.ts, 1) || put(r, r->end[node], node, ENDS) ? TP_NO_MEMORY : 0;
    }
    r->end[node] = one.ts;
    r->ready[r->ready_count++] = node;
    return communicate(r, gpu, one.ts, role == COMES ? 1 : -1);
}

static int replay(tp_replaying *r, int64_t nodes)
{
    const tp_graph *g = r->g;
    memcpy(r->left, g->waits, (size_t)nodes * sizeof *r->left);
    for (int64_t node = 0; node < nodes; node++) {
        r->begin[node] = g->waits[node] ? INT64_MIN : 0;
        if (!g->waits[node] && start(r, (int32_t)node))
            return TP_NO_MEMORY;
    }
    while (r->ready_count || r->due_count) {
        if (!r->ready_count) {
            if (happen(r, taken(r)))
                return TP_NO_MEMORY;
            continue;
        }
        int32_t node = r->ready[--r->ready_count];
        r->done++;
        for (int32_t edge = g->first[node]; edge < g->first[node + 1]; edge++) {
            int32_t target = g->target[edge];
            int64_t ts = later(r->end[node], g->lag[edge]);
            if (ts > r->begin[target])
                r->begin[target] = ts;
            if (!--r->left[target] && start(r, target))
                return TP_NO_MEMORY;
        }
    }
    return 0;
}

/* Finds when each node begins and ends. Returns how many do, which is less than `nodes` where some wait for themselves,
 * or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_replay(const tp_graph *g, int64_t nodes, int64_t gpus, int64_t *begin, int64_t *end)
{
    size_t n = (size_t)(nodes ? nodes : 1), of_gpus = (size_t)(gpus ? gpus : 1);
    tp_replaying r = {.g = g, .begin = begin, .end = end};
    r.left = malloc(n * sizeof *r.left);
    r.ready = malloc(n * sizeof *r.ready);
    r.running = malloc(of_gpus * sizeof *r.running);
    r.count = calloc(of_gpus, sizeof *r.count);
    r.active = calloc(of_gpus, sizeof *r.active);
    r.next = malloc(n * sizeof *r.next);
    r.previous = malloc(n * sizeof *r.previous);
    r.since = malloc(n * sizeof *r.since);
    r.rest = malloc(n * sizeof *r.rest);
    int64_t found = TP_NO_MEMORY;
    if (r.left && r.ready && r.running && r.count && r.active && r.next && r.previous && r.since && r.rest) {
        for (int64_t gpu = 0; gpu < gpus; gpu++)
            r.running[gpu] = -1;
        found = replay(&r, nodes) ? TP_NO_MEMORY : r.done;
    }
    free(r.left);
    free(r.ready);
    free(r.running);
    free(r.count);
    free(r.active);
    free(r.next);
    free(r.previous);
    free(r.since);
    free(r.rest);
    free(r.due);
    return found;
}
