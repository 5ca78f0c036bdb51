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

void tp_row_finish_ends(tp_row *row, int64_t ts)
{
    while (row->ends_count && row->ends[row->ends_count - 1].end <= ts)
        row->ends_count--;
}

int tp_row_takes_begin(tp_row *row, int64_t ts)
{
    tp_row_finish_ends(row, ts);
    return ts >= row->last && !row->ends_count && row->open_count < DEPTH_MAX;
}

static int takes_slice(tp_row *row, int64_t ts, int64_t end)
{
    tp_row_finish_ends(row, ts);
    if (ts < row->last || row->open_count || row->ends_count >= DEPTH_MAX)
        return 0;
    return !row->ends_count || end <= row->ends[row->ends_count - 1].end;
}

int64_t tp_row_around(const tp_row *row)
{
    if (row->open_count)
        return row->open[row->open_count - 1].span;
    return row->ends_count ? row->ends[row->ends_count - 1].span : -1;
}

int32_t tp_rows_place(tp_rows *r, int32_t row, int32_t from, int64_t ts, int64_t end, int is_begin)
{
    int32_t at = from, last = row;
    for (; at != NO_ROW; last = at, at = r->rows[at].next)
        if (is_begin ? tp_row_takes_begin(&r->rows[at], ts) : takes_slice(&r->rows[at], ts, end))
            break;
    if (at != row)
        r->overlaps++;
    if (at != NO_ROW)
        return at;
    if (r->rows[row].beside_count >= BESIDE_MAX || r->all_beside >= ALL_BESIDE_MAX) {
        r->undrawn++;
        return NO_ROW;
    }
    int64_t made = tp_rows_add(r, row);
    if (made < 0)
        return NO_ROW - 1;
    r->rows[row].beside_count++;
    r->all_beside++;
    r->rows[last].next = (int32_t)made;
    return (int32_t)made;
}
