/* SPDX-License-Identifier: MIT */
/* Matches begins with ends: events in the order of time go in, operations on rows come out.
 *
 * A row is a layer of a thread, or a stream of a GPU. At any time it has open slices (B, whose end is not
 * known yet) or unfinished ones (X, whose end is known), never both. A slice that overlaps those of its row
 * without nesting goes to an overlap row. event/nesting.py has the same rules in Python.
 */
#include "launches.h"
#include "ops.h"
#include "rows.h"
#include "times.h"

#define FLOWS_OF_IOCTLS 2
#define OF_EVENTS ((int64_t)1 << 52) /* set in flow numbers that events have, not in those made here */
#define ON_STREAM 1 /* launches on the row are kernels, not calls */

typedef struct {
    uint8_t *kind, *mark;
    int32_t *row, *name, *event;
    int64_t *ts, *flow, *flow2, *slice_id, *parent;
} tp_ops;

typedef struct {
    const int64_t *ts, *dur, *launch, *bound;
    const int32_t *shape;
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
} tp_nest;

TP_EXPORT void tp_nest_free(tp_nest *n)
{
    if (!n)
        return;
    tp_rows_free(&n->rows);
    tp_launches_free(&n->launches);
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
                              n->rows.undrawn, n->op_count, n->launches.early_count};
    return counts[what];
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
    int32_t row = tp_rows_place(&n->rows, on, on, ts, 0, 1);
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
    int32_t row = tp_rows_place(&n->rows, on, on, ts, end, 0);
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
    r->ends[r->ends_count++] = (tp_around){end, slice_id};
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
    tp_row *r = &n->rows.rows[row];
    r->last = ts;
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

static int64_t give_flow(tp_nest *n, tp_open *open)
{
    /* Odd: the flows of launches are even. */
    open->flow = n->flow;
    n->flow += 2;
    if (open->op >= n->op_count)
        return open->flow;
    if (n->ops.flow[open->op])
        n->ops.flow2[open->op] = -open->flow;
    else
        n->ops.flow[open->op] = -open->flow;
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

/* Gives an end of a flow to the slice that begins at that time, or else makes an instant of it. */
static void flow_end(tp_nest *n, int32_t on, int64_t ts, int32_t name, int32_t event, int64_t number, int starts)
{
    int64_t flow = (number & (OF_EVENTS - 1)) | OF_EVENTS;
    flow = starts ? -flow : flow;
    for (int32_t row = on; row != NO_ROW; row = n->rows.rows[row].next) {
        int64_t at = n->rows.rows[row].begun;
        if (at < 0 || at >= n->op_count || n->ops.kind[at] != OP_BEGIN || n->ops.row[at] != row ||
            n->ops.ts[at] != ts || (n->ops.flow[at] && n->ops.flow2[at]))
            continue;
        *(n->ops.flow[at] ? &n->ops.flow2[at] : &n->ops.flow[at]) = flow;
        return;
    }
    int64_t at = put(n, OP_INSTANT, on, ts, name, event, MARK_NONE, -1);
    n->ops.flow[at] = flow;
    n->ops.parent[at] = tp_row_around(&n->rows.rows[on], ts);
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
            row->open[row->open_count - 1].name == name) {
            row->last = ts;
            n->open_count--;
            put(n, OP_END, on, ts, name, event, MARK_NONE, row->open[--row->open_count].slice_id);
            return 0;
        }
        return end(n, on, ts, dur, name, event) < 0 ? TP_NO_MEMORY : 0;
    }
    if (phase == 's' || phase == 't' || phase == 'f') {
        flow_end(n, on, ts, name, event, e->launch[i], phase == 's');
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
        at = put(n, OP_INSTANT, on, ts, name, event, MARK_NONE, -1);
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
    int32_t on = tp_rows_place(&n->rows, row, n->rows.rows[row].next, ts, end, 0);
    if (on < 0)
        return on;
    tp_row *r = &n->rows.rows[on];
    tp_row_take(r, ts);
    if (TP_GROW(r->ends, r->ends_room, r->ends_count))
        return NO_ROW - 1;
    r->ends[r->ends_count++] = (tp_around){end, -1};
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
