/* SPDX-License-Identifier: MIT */
/* Matches begins with ends: events in the order of time go in, operations on rows come out.
 *
 * A row is a layer of a thread, or a stream of a GPU. It has open slices (B, whose end is not known yet), and
 * inside the innermost of them, unfinished ones (X, whose end is known). A slice that overlaps those of its
 * row without nesting goes to an overlap row. event/nesting.py has the same rules in Python, and says when an
 * X nests in a B.
 */
#include "ops.h"
#include "tables.h"

/* Rows of slices that nest: what is open on each, and the overlap rows of slices that do not nest. */

#define OVERLAP_ROWS_MAX 64
#define ALL_OVERLAP_ROWS_MAX 512
#define DEPTH_MAX 512
#define NO_ROW (-1)

typedef struct {
    int64_t slice_id, op, flow;
    int32_t name;
} tp_open;

typedef struct {
    int64_t end, slice_id, op;
} tp_around;

typedef struct {
    int64_t last;
    tp_open *open;
    tp_around *ends;
    int64_t open_count, open_room, ends_count, ends_room;
    int64_t begun; /* the place of the last begin among the operations not yet taken, if it is there */
    int64_t met;   /* the same of the last instant */
    int32_t base, next, overlap_count; /* the row whose overlaps it takes, and its next overlap row */
    int32_t above[2];                 /* rows of calls that may have caused what begins here */
    uint8_t starts_flows, on_stream;         /* at which of its open slices a flow may start */
    uint8_t moved; /* while slices are moved: whether the last slice to begin here is one of them */
} tp_row;

typedef struct {
    tp_row *rows;
    int64_t count, room, overlaps, undrawn, all_overlap_rows;
    int64_t horizon; /* the time up to which all events are given before operations are taken */
} tp_rows;

static void tp_rows_free(tp_rows *r)
{
    for (int64_t i = 0; i < r->count; i++) {
        free(r->rows[i].open);
        free(r->rows[i].ends);
    }
    free(r->rows);
}

/* Adds a row: an overlap row of `base` unless that is NO_ROW. Returns its number, or TP_NO_MEMORY. Rows may
 * move. */
static int64_t tp_rows_add(tp_rows *r, int32_t base)
{
    if (r->count >= INT32_MAX || TP_GROW(r->rows, r->room, r->count))
        return TP_NO_MEMORY;
    r->rows[r->count] = (tp_row){
        .last = INT64_MIN, .met = -1, .base = base, .next = NO_ROW, .above = {NO_ROW, NO_ROW}};
    return r->count++;
}

/* How many of a row's X slices end after that time. They are all kept until another slice begins there: a
 * slice whose start is computed from its end's duration begins before the times that were asked for. */
static int64_t unfinished(const tp_row *row, int64_t ts)
{
    int64_t at = 0, above = row->ends_count;
    while (at < above) {
        int64_t half = (at + above) / 2;
        if (row->ends[half].end > ts)
            at = half + 1;
        else
            above = half;
    }
    return at;
}

static int takes_begin(const tp_row *row, int64_t ts)
{
    return ts >= row->last && !unfinished(row, ts) && row->open_count < DEPTH_MAX;
}

static int takes_slice(const tp_row *row, int64_t ts, int64_t end, int64_t horizon)
{
    if (ts < row->last || (row->open_count && end > horizon))
        return 0;
    int64_t depth = unfinished(row, ts);
    return row->open_count + depth < DEPTH_MAX && (!depth || end <= row->ends[depth - 1].end);
}

/* Whether a slice began or ended on a row last at that time, or an X slice ends there then. */
static int changes_at(const tp_row *row, int64_t ts)
{
    int64_t depth = unfinished(row, ts);
    return row->last == ts || (depth < row->ends_count && row->ends[depth].end == ts);
}

/* Which rows may take a slice: those that take a B, an X, or an X that is moved and keeps its place among the
 * operations. What happened on a row at the time of its begin may have a later place, and would be drawn inside
 * it. */
typedef enum { TAKES_BEGIN, TAKES_SLICE, TAKES_MOVED } tp_takes;

static int takes(const tp_row *row, tp_takes what, int64_t ts, int64_t end, int64_t horizon)
{
    if (what == TAKES_BEGIN)
        return takes_begin(row, ts);
    if (what == TAKES_MOVED && !row->moved && changes_at(row, ts))
        return 0;
    return takes_slice(row, ts, end, horizon);
}

/* The innermost slice of a row at that time, -1 without one. */
static int64_t tp_row_around(const tp_row *row, int64_t ts)
{
    int64_t depth = unfinished(row, ts);
    if (depth)
        return row->ends[depth - 1].slice_id;
    return row->open_count ? row->open[row->open_count - 1].slice_id : -1;
}

/* Begins a slice that nests on a row at that time. Returns the slice around it, -1 without one. */
static int64_t tp_row_take(tp_row *row, int64_t ts)
{
    int64_t around = tp_row_around(row, ts);
    row->ends_count = unfinished(row, ts);
    row->last = ts;
    return around;
}

/* The row or overlap row that takes a slice at `ts`. `from` is the first to try: the row or its first overlap
 * row. NO_ROW if none takes it, less than NO_ROW where there is no memory. Rows may move. */
static int32_t tp_rows_place(tp_rows *r, int32_t row, int32_t from, int64_t ts, int64_t end, tp_takes what)
{
    int32_t at = from, last = row;
    for (; at != NO_ROW; last = at, at = r->rows[at].next)
        if (takes(&r->rows[at], what, ts, end, r->horizon))
            break;
    if (at != row)
        r->overlaps++;
    if (at != NO_ROW)
        return at;
    if (r->rows[row].overlap_count >= OVERLAP_ROWS_MAX || r->all_overlap_rows >= ALL_OVERLAP_ROWS_MAX) {
        r->undrawn++;
        return NO_ROW;
    }
    int64_t made = tp_rows_add(r, row);
    if (made < 0)
        return NO_ROW - 1;
    r->rows[row].overlap_count++;
    r->all_overlap_rows++;
    r->rows[last].next = (int32_t)made;
    return (int32_t)made;
}

/* Joins launch calls to kernels and warps by launch id: flows, and the check of cause before effect. */

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

static int tp_launches_init(tp_launches *l)
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

static void tp_launches_free(tp_launches *l)
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

/* Each of these sets the flow: negative where it starts, 0 where there is none. */
static int tp_launch_call(tp_launches *l, int64_t launch, int64_t ts, int64_t *flow)
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

static void tp_launch_start(tp_launches *l, int64_t launch, int64_t ts, int64_t bound)
{
    tp_launch *one = launch_of(l, launch);
    if (one->called || one->started)
        return;
    one->started = 1;
    one->start = ts;
    one->bound = bound;
}

static void tp_launch_kernel(tp_launches *l, int64_t launch, int64_t ts, int64_t bound, int64_t *flow)
{
    tp_launch_start(l, launch, ts, bound);
    tp_launch *one = launch_of(l, launch);
    one->drawn = 1;
    *flow = flow_of(l, one);
}

static void tp_launch_warps(tp_launches *l, const tp_starts *s, int64_t i)
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

#define FLOWS_OF_IOCTLS 2
#define MORE_FLOWS_MAX (1 << 18)
#define OF_EVENTS ((int64_t)1 << 52) /* set in flow numbers that events have, not in those made here */
#define ON_STREAM 1 /* launches on the row are kernels, not calls */

typedef struct {
    uint8_t *kind, *mark;
    int32_t *row, *name, *event;
    int64_t *ts, *flow, *flow2, *slice_id, *parent;
} tp_ops;

typedef struct {
    const int64_t *ts, *dur, *launch, *bound;
    const int32_t *shape, *args;
} tp_events;

/* By the number of a shape. */
typedef struct {
    const int32_t *row, *name;
    const int64_t *has_dur; /* -1: no duration */
    const uint8_t *phase, *takes_flow, *has_launch;
} tp_shapes;

typedef struct {
    tp_rows rows;
    int64_t flow, slice_id, unclosed, no_begin, open_count;
    int32_t ioctl;
    tp_launches launches;
    tp_ops ops;
    int64_t op_count, op_room;
    tp_more_flows *more;
    int64_t more_count, more_room;
} tp_nest;

TP_EXPORT void tp_nest_free(tp_nest *n)
{
    if (!n)
        return;
    tp_rows_free(&n->rows);
    tp_launches_free(&n->launches);
    free(n->more);
    free(n);
}

TP_EXPORT tp_nest *tp_nest_new(int32_t ioctl)
{
    tp_nest *n = calloc(1, sizeof *n);
    if (n && tp_launches_init(&n->launches)) {
        tp_nest_free(n);
        return 0;
    }
    if (n) {
        n->ioctl = ioctl;
        n->flow = 1;
        n->rows.horizon = INT64_MIN;
    }
    return n;
}

/* Adds a row: an overlap row of `base` unless that is NO_ROW. Returns its number, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_nest_row(tp_nest *n, int32_t base, int32_t on_stream)
{
    int64_t made = tp_rows_add(&n->rows, base);
    if (made >= 0)
        n->rows.rows[made].on_stream = on_stream == ON_STREAM;
    return made;
}

/* Forgets all rows, on which nothing may be open. The counts stay. */
TP_EXPORT void tp_nest_forget_rows(tp_nest *n)
{
    tp_rows_free(&n->rows);
    n->rows.rows = 0;
    n->rows.count = n->rows.room = 0;
}

/* Sets which rows may have caused what begins on a row, the nearer first, and whether it may be a cause
 * itself. */
TP_EXPORT void tp_nest_above(tp_nest *n, int32_t row, int32_t near, int32_t far, int32_t starts_flows)
{
    n->rows.rows[row].above[0] = near;
    n->rows.rows[row].above[1] = far;
    n->rows.rows[row].starts_flows = (uint8_t)starts_flows;
}

TP_EXPORT int64_t tp_nest_count(const tp_nest *n, int what)
{
    const int64_t counts[] = {n->rows.count,   n->unclosed, n->no_begin,            n->rows.overlaps,
                              n->rows.undrawn, n->op_count, n->launches.early_count, n->more_count};
    return counts[what];
}

/* Copies the further flows, of which there are `tp_nest_count` now. */
TP_EXPORT void tp_nest_more(const tp_nest *n, tp_more_flows *out)
{
    memcpy(out, n->more, (size_t)n->more_count * sizeof *out);
}

TP_EXPORT int32_t tp_nest_base(const tp_nest *n, int32_t row)
{
    return n->rows.rows[row].base;
}

/* Returns and forgets the kernels that started before their calls. */
TP_EXPORT int64_t tp_nest_early(tp_nest *n, tp_early *out, int64_t room)
{
    int64_t count = n->launches.early_count < room ? n->launches.early_count : room;
    if (count)
        memcpy(out, n->launches.early, (size_t)count * sizeof *out);
    n->launches.early_count = 0;
    return count;
}

static int64_t put(tp_nest *n, int kind, int32_t row, int64_t ts, int32_t name, int32_t event, int mark, int64_t slice_id)
{
    tp_ops *o = &n->ops;
    int64_t at = n->op_count++;
    o->kind[at] = (uint8_t)kind;
    o->mark[at] = (uint8_t)mark;
    o->row[at] = row;
    o->name[at] = name;
    o->event[at] = event;
    o->ts[at] = ts;
    o->flow[at] = o->flow2[at] = 0;
    o->slice_id[at] = slice_id;
    o->parent[at] = -1;
    return at;
}

static int64_t begin(tp_nest *n, int32_t on, int64_t ts, int32_t name, int32_t event, int64_t flow)
{
    int32_t row = tp_rows_place(&n->rows, on, on, ts, 0, TAKES_BEGIN);
    if (row < NO_ROW)
        return TP_NO_MEMORY;
    int64_t slice_id = n->slice_id++, at = put(n, OP_BEGIN, row, ts, name, event, MARK_NONE, slice_id);
    if (row == NO_ROW)
        return at;
    tp_row *r = &n->rows.rows[row];
    n->ops.parent[at] = tp_row_take(r, ts);
    if (TP_GROW(r->open, r->open_room, r->open_count))
        return TP_NO_MEMORY;
    r->begun = at;
    r->open[r->open_count++] = (tp_open){slice_id, at, flow, name};
    n->open_count++;
    return at;
}

static int64_t complete(tp_nest *n, int32_t on, int64_t ts, int64_t dur, int32_t name, int32_t event, int mark)
{
    int64_t end = tp_after(ts, dur);
    int32_t row = tp_rows_place(&n->rows, on, on, ts, end, TAKES_SLICE);
    if (row < NO_ROW)
        return TP_NO_MEMORY;
    int64_t slice_id = n->slice_id++, at = put(n, OP_BEGIN, row, ts, name, event, mark, slice_id);
    put(n, OP_END, row, end, name, -1, MARK_NONE, slice_id);
    if (row == NO_ROW)
        return at;
    tp_row *r = &n->rows.rows[row];
    n->ops.parent[at] = tp_row_take(r, ts);
    if (TP_GROW(r->ends, r->ends_room, r->ends_count))
        return TP_NO_MEMORY;
    r->begun = at;
    r->ends[r->ends_count++] = (tp_around){end, slice_id, at};
    return at;
}

static int has_open(const tp_row *row, int32_t name)
{
    for (int64_t i = row->open_count; i-- > 0;)
        if (row->open[i].name == name)
            return 1;
    return 0;
}

/* The row of an E: the row or an overlap row of it where a B of that name is open, preferably as the
 * innermost. */
static int32_t row_of_end(const tp_nest *n, int32_t row, int64_t ts, int32_t name)
{
    /* The innermost calls of a full row are on its overlap rows: the last of those are looked at first. */
    int full = n->rows.rows[row].open_count >= DEPTH_MAX;
    int32_t top = NO_ROW, any = NO_ROW;
    for (int pass = 0; pass < 2; pass++) {
        int32_t at = pass == full ? row : n->rows.rows[row].next;
        for (; at != NO_ROW; at = n->rows.rows[at].next) {
            const tp_row *r = &n->rows.rows[at];
            if (r->open_count && ts >= r->last) {
                if (r->open[r->open_count - 1].name == name && (top == NO_ROW || (full && at != row)))
                    top = at;
                if ((any == NO_ROW || (full && at != row)) && has_open(r, name))
                    any = at;
            }
            if (pass == full)
                break;
        }
    }
    return top != NO_ROW ? top : any;
}

/* Puts the X slices of a row that end after that time, when an open slice around them ends, on overlap rows
 * of `on`. Rows may move. */
static int set_aside(tp_nest *n, int32_t row, int32_t on, int64_t ts)
{
    int64_t count = unfinished(&n->rows.rows[row], ts);
    n->rows.rows[row].ends_count = 0;
    n->rows.rows[row].last = INT64_MAX; /* so that it takes none of them */
    for (int64_t i = 0; i < count; i++) {
        tp_around moved = n->rows.rows[row].ends[i];
        if (moved.op < 0 || moved.op >= n->op_count - 1 || n->ops.slice_id[moved.op] != moved.slice_id)
            continue;
        int64_t start = n->ops.ts[moved.op];
        int32_t at = tp_rows_place(&n->rows, on, n->rows.rows[on].next, start, moved.end, TAKES_MOVED);
        if (at < NO_ROW)
            return -1;
        n->ops.row[moved.op] = n->ops.row[moved.op + 1] = at;
        n->ops.parent[moved.op] = -1;
        if (at == NO_ROW)
            continue;
        tp_row *r = &n->rows.rows[at];
        n->ops.parent[moved.op] = tp_row_take(r, start);
        if (TP_GROW(r->ends, r->ends_room, r->ends_count))
            return -1;
        r->ends[r->ends_count++] = moved;
        r->begun = moved.op;
        r->moved = 1;
    }
    for (int32_t at = on; count && at != NO_ROW; at = n->rows.rows[at].next)
        n->rows.rows[at].moved = 0;
    n->rows.rows[row].last = ts;
    return 0;
}

static int64_t end(tp_nest *n, int32_t on, int64_t ts, int64_t dur, int32_t name, int32_t event)
{
    int32_t row = on, any = 0;
    for (int32_t at = on; at != NO_ROW && !any; at = n->rows.rows[at].next)
        any = has_open(&n->rows.rows[at], name);
    if (!any && dur >= 0) {
        /* Its begin was lost, or its writer records exits only: the duration gives the begin. */
        int64_t start = ts > dur ? ts - dur : ts < 0 ? ts : 0;
        return complete(n, on, start, ts - start, name, event, MARK_FROM_DURATION);
    }
    row = row_of_end(n, on, ts, name);
    if (row == NO_ROW) {
        n->no_begin++;
        return put(n, OP_INSTANT, on, ts, name, event, MARK_NO_BEGIN, -1);
    }
    if (set_aside(n, row, on, ts))
        return TP_NO_MEMORY;
    tp_row *r = &n->rows.rows[row];
    for (;;) {
        tp_open *ended = &r->open[--r->open_count];
        n->open_count--;
        if (ended->name == name)
            return put(n, OP_END, row, ts, name, event, MARK_NONE, ended->slice_id);
        /* longjmp, an exception or a lost record: the caller has returned, so this call has too. */
        put(n, OP_END, row, ts, ended->name, -1, MARK_UNCLOSED, ended->slice_id);
        n->unclosed++;
    }
}

/* Adds a flow to an operation. Returns whether there is room for it. */
static int add_flow(tp_nest *n, int64_t at, int64_t flow)
{
    int64_t *first = &n->ops.flow[at], *second = &n->ops.flow2[at];
    if (!*first || !*second) {
        *(*first ? second : first) = flow;
        return 1;
    }
    if (n->more_count == MORE_FLOWS_MAX || TP_GROW(n->more, n->more_room, n->more_count))
        return 0;
    n->more[n->more_count] = (tp_more_flows){flow, *second};
    *second = MORE_FLOWS + n->more_count++;
    return 1;
}

static int64_t give_flow(tp_nest *n, tp_open *open)
{
    /* Odd: the flows of launches are even. */
    open->flow = n->flow;
    n->flow += 2;
    if (open->op < n->op_count)
        add_flow(n, open->op, -open->flow);
    return open->flow;
}

/* The flow from the call that caused what begins on a row now, 0 if there is none. */
static int64_t caller(tp_nest *n, const tp_row *row)
{
    if (row->open_count)
        return 0; /* another driver function called it, as the nesting shows */
    for (int i = 0; i < 2; i++) {
        if (row->above[i] == NO_ROW)
            continue;
        tp_row *above = &n->rows.rows[row->above[i]];
        if (!above->open_count)
            continue;
        tp_open *open = &above->open[above->open_count - 1];
        /* No system call but ioctl runs the driver. */
        if (above->starts_flows != FLOWS_OF_IOCTLS || open->name == n->ioctl)
            return open->flow ? open->flow : give_flow(n, open);
    }
    return 0;
}

/* Gives an end of a flow to the slice that begins at that time, or else makes an instant of it. If it has no
 * arguments, the instant before takes it, if that has the same time and name. */
static void flow_end(tp_nest *n, int32_t on, int64_t ts, int32_t name, int32_t event, int64_t number, int starts,
                     int has_args)
{
    int64_t flow = (number & (OF_EVENTS - 1)) | OF_EVENTS;
    flow = starts ? -flow : flow;
    for (int32_t row = on; row != NO_ROW; row = n->rows.rows[row].next) {
        int64_t at = n->rows.rows[row].begun;
        if (at < 0 || at >= n->op_count || n->ops.kind[at] != OP_BEGIN || n->ops.row[at] != row ||
            n->ops.ts[at] != ts || !add_flow(n, at, flow))
            continue;
        return;
    }
    tp_row *r = &n->rows.rows[on];
    int64_t at = r->met;
    if (!has_args && at >= 0 && at < n->op_count && n->ops.kind[at] == OP_INSTANT && n->ops.row[at] == on &&
        n->ops.ts[at] == ts && n->ops.name[at] == name && add_flow(n, at, flow))
        return;
    at = r->met = put(n, OP_INSTANT, on, ts, name, event, MARK_NONE, -1);
    n->ops.flow[at] = flow;
    n->ops.parent[at] = tp_row_around(r, ts);
}

/* The most operations that this many events may make. */
TP_EXPORT int64_t tp_nest_most(const tp_nest *n, int64_t events)
{
    return 2 * events + n->open_count;
}

static int one(tp_nest *n, const tp_events *e, const tp_shapes *s, int64_t i)
{
    int32_t shape = e->shape[i], on = s->row[shape], name = s->name[shape], event = (int32_t)i;
    int64_t ts = e->ts[i], dur = s->has_dur[shape] < 0 ? -1 : e->dur[i], flow = 0, launched = 0;
    uint8_t phase = s->phase[shape];
    tp_row *row = &n->rows.rows[on];
    if (phase == 'E') {
        if (row->open_count && row->open_count < DEPTH_MAX && ts >= row->last &&
            row->open[row->open_count - 1].name == name && !unfinished(row, ts)) {
            row->last = ts;
            n->open_count--;
            put(n, OP_END, on, ts, name, event, MARK_NONE, row->open[--row->open_count].slice_id);
            return 0;
        }
        return end(n, on, ts, dur, name, event) < 0 ? TP_NO_MEMORY : 0;
    }
    if (phase == 's' || phase == 't' || phase == 'f') {
        flow_end(n, on, ts, name, event, e->launch[i], phase == 's', e->args[i] >= 0);
        return 0;
    }
    if (s->takes_flow[shape])
        flow = caller(n, row);
    if (s->has_launch[shape] && phase != 'I') {
        if (row->on_stream)
            tp_launch_kernel(&n->launches, e->launch[i], ts, e->bound ? e->bound[i] : 0, &launched);
        else if (tp_launch_call(&n->launches, e->launch[i], ts, &launched))
            return TP_NO_MEMORY;
    }
    int64_t at;
    if (phase == 'I') {
        at = row->met = put(n, OP_INSTANT, on, ts, name, event, MARK_NONE, -1);
        n->ops.parent[at] = tp_row_around(row, ts);
    } else if (phase == 'B') {
        at = begin(n, on, ts, name, event, flow);
    } else {
        at = complete(n, on, ts, dur < 0 ? 0 : dur, name, event, MARK_NONE);
    }
    if (at < 0)
        return TP_NO_MEMORY;
    n->ops.flow[at] = flow ? flow : launched;
    n->ops.flow2[at] = flow ? launched : 0;
    return 0;
}

/* Sets the time up to which all events are given before operations are taken. */
TP_EXPORT void tp_nest_horizon(tp_nest *n, int64_t ts)
{
    n->rows.horizon = ts;
}

/* Nests events in the order of time into `ops`, which have room for `tp_nest_most` operations. Returns how
 * many there are then, or TP_NO_MEMORY. Every shape has a row. Rows that are not events are ignored, but
 * `batches` of warps get their flows. */
TP_EXPORT int64_t tp_nest_events(tp_nest *n, const tp_events *e, const tp_shapes *s, const tp_starts *warps,
                                 int64_t batches, int64_t from, int64_t to, const tp_ops *ops, int64_t op_count)
{
    n->ops = *ops;
    n->op_count = op_count;
    for (int64_t i = from, batch = 0; i < to; i++) {
        if (batch < batches && warps->place[batch] == i)
            tp_launch_warps(&n->launches, warps, batch++);
        else if (e->shape[i] >= 0 && one(n, e, s, i))
            return TP_NO_MEMORY;
    }
    return n->op_count;
}

/* Nests one event on a row that is given, not its shape's. Returns how many operations there are then, or
 * TP_NO_MEMORY. */
TP_EXPORT int64_t tp_nest_one(tp_nest *n, int32_t row, int phase, int64_t ts, int64_t dur, int32_t name,
                              int32_t event, const tp_ops *ops, int64_t op_count)
{
    int64_t at;
    n->ops = *ops;
    n->op_count = op_count;
    if (phase == 'I')
        at = put(n, OP_INSTANT, row, ts, name, event, MARK_NONE, -1);
    else if (phase == 'B')
        at = begin(n, row, ts, name, event, 0);
    else if (phase == 'E')
        at = end(n, row, ts, dur, name, event);
    else
        at = complete(n, row, ts, dur < 0 ? 0 : dur, name, event, MARK_NONE);
    return at < 0 ? TP_NO_MEMORY : n->op_count;
}

/* Puts a slice on an overlap row of `row` and returns that; NO_ROW if none takes it. */
TP_EXPORT int64_t tp_nest_overlap_row(tp_nest *n, int32_t row, int64_t ts, int64_t end)
{
    int32_t on = tp_rows_place(&n->rows, row, n->rows.rows[row].next, ts, end, TAKES_SLICE);
    if (on < 0)
        return on;
    tp_row *r = &n->rows.rows[on];
    tp_row_take(r, ts);
    if (TP_GROW(r->ends, r->ends_room, r->ends_count))
        return NO_ROW - 1;
    r->ends[r->ends_count++] = (tp_around){end, -1, -1};
    return on;
}

/* Gives each open call its flow at the end of a batch, while its begin, among these operations, can still be
 * changed. */
TP_EXPORT void tp_nest_settle(tp_nest *n, const tp_ops *ops, int64_t op_count)
{
    n->ops = *ops;
    n->op_count = op_count;
    for (int64_t i = 0; i < n->rows.count; i++) {
        tp_row *row = &n->rows.rows[i];
        for (int64_t k = 0; row->starts_flows && k < row->open_count; k++)
            if (!row->open[k].flow && (row->starts_flows != FLOWS_OF_IOCTLS || row->open[k].name == n->ioctl))
                give_flow(n, &row->open[k]);
    }
}

/* Ends the slices that are still open on a row and its overlap rows. Returns how many operations there are
 * then. */
TP_EXPORT int64_t tp_nest_close(tp_nest *n, int32_t row, int64_t ts, const tp_ops *ops, int64_t op_count)
{
    n->ops = *ops;
    n->op_count = op_count;
    for (; row != NO_ROW; row = n->rows.rows[row].next) {
        tp_row *r = &n->rows.rows[row];
        int64_t at = ts > r->last ? ts : r->last;
        n->unclosed += r->open_count;
        n->open_count -= r->open_count;
        while (r->open_count) {
            tp_open *open = &r->open[--r->open_count];
            put(n, OP_END, row, at, open->name, -1, MARK_UNCLOSED, open->slice_id);
        }
    }
    return n->op_count;
}

/* Marks the names of slices that are open. */
TP_EXPORT void tp_nest_names(const tp_nest *n, uint8_t *used)
{
    for (int64_t i = 0; i < n->rows.count; i++)
        for (int64_t k = 0; k < n->rows.rows[i].open_count; k++)
            used[n->rows.rows[i].open[k].name] = 1;
}

/* Gives the names of open slices their new numbers; `to` has these by the old numbers. */
TP_EXPORT void tp_nest_rename(tp_nest *n, const int32_t *to)
{
    for (int64_t i = 0; i < n->rows.count; i++)
        for (int64_t k = 0; k < n->rows.rows[i].open_count; k++)
            n->rows.rows[i].open[k].name = to[n->rows.rows[i].open[k].name];
}
