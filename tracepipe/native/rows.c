/* SPDX-License-Identifier: MIT */
/* Rows of slices that nest. */
#include "rows.h"

void tp_rows_free(tp_rows *r)
{
    for (int64_t i = 0; i < r->count; i++) {
        free(r->rows[i].open);
        free(r->rows[i].ends);
    }
    free(r->rows);
}

int64_t tp_rows_add(tp_rows *r, int32_t base)
{
    if (r->count >= INT32_MAX || TP_GROW(r->rows, r->room, r->count))
        return TP_NO_MEMORY;
    r->rows[r->count] = (tp_row){.last = INT64_MIN, .base = base, .next = NO_ROW, .above = {NO_ROW, NO_ROW}};
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

static int takes_slice(const tp_row *row, int64_t ts, int64_t end)
{
    if (ts < row->last || row->open_count)
        return 0;
    int64_t depth = unfinished(row, ts);
    return depth < DEPTH_MAX && (!depth || end <= row->ends[depth - 1].end);
}

int64_t tp_row_take(tp_row *row, int64_t ts)
{
    int64_t around = tp_row_around(row, ts);
    row->ends_count = unfinished(row, ts);
    row->last = ts;
    return around;
}

int64_t tp_row_around(const tp_row *row, int64_t ts)
{
    if (row->open_count)
        return row->open[row->open_count - 1].slice_id;
    int64_t depth = unfinished(row, ts);
    return depth ? row->ends[depth - 1].slice_id : -1;
}

int32_t tp_rows_place(tp_rows *r, int32_t row, int32_t from, int64_t ts, int64_t end, int is_begin)
{
    int32_t at = from, last = row;
    for (; at != NO_ROW; last = at, at = r->rows[at].next)
        if (is_begin ? takes_begin(&r->rows[at], ts) : takes_slice(&r->rows[at], ts, end))
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
