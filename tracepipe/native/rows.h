/* SPDX-License-Identifier: MIT */
/* Rows of slices that nest: what is open on each, and the overlap rows of slices that do not nest. */
#ifndef TP_ROWS_H
#define TP_ROWS_H

#include "tables.h"

#define OVERLAP_ROWS_MAX 64
#define ALL_OVERLAP_ROWS_MAX 512
#define DEPTH_MAX 512
#define NO_ROW (-1)

typedef struct {
    int64_t slice_id, op, flow;
    int32_t name;
} tp_open;

typedef struct {
    int64_t end, slice_id;
} tp_around;

typedef struct {
    int64_t last;
    tp_open *open;
    tp_around *ends;
    int64_t open_count, open_room, ends_count, ends_room;
    int64_t begun; /* the place of the last begin among the operations not yet taken, if it is there */
    int32_t base, next, overlap_count; /* the row whose overlaps it takes, and its next overlap row */
    int32_t above[2];                 /* rows of calls that may have caused what begins here */
    uint8_t starts_flows, on_stream;         /* at which of its open slices a flow may start */
} tp_row;

typedef struct {
    tp_row *rows;
    int64_t count, room, overlaps, undrawn, all_overlap_rows;
} tp_rows;

void tp_rows_free(tp_rows *r);
/* Adds a row: an overlap row of `base` unless that is NO_ROW. Returns its number, or TP_NO_MEMORY. Rows may
 * move. */
int64_t tp_rows_add(tp_rows *r, int32_t base);
/* Begins a slice that nests on a row at that time. Returns the slice around it, -1 without one. */
int64_t tp_row_take(tp_row *row, int64_t ts);
/* The innermost slice of a row at that time, -1 without one. */
int64_t tp_row_around(const tp_row *row, int64_t ts);
/* The row or overlap row that takes a B at `ts` (`is_begin`) or an X. `from` is the first to try: the row or
 * its first overlap row. NO_ROW if none takes it, less than NO_ROW where there is no memory. Rows may move.
 * */
int32_t tp_rows_place(tp_rows *r, int32_t row, int32_t from, int64_t ts, int64_t end, int is_begin);

#endif
