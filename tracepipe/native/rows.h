/* SPDX-License-Identifier: MIT */
/* Rows of slices that nest: what is open on each, and where a slice goes that does not fit. */
#ifndef TP_ROWS_H
#define TP_ROWS_H

#include "tables.h"

#define BESIDE_MAX 64
#define ALL_BESIDE_MAX 512
#define DEPTH_MAX 512
#define NO_ROW (-1)

typedef struct {
    int64_t span, op, flow;
    int32_t name;
} tp_open;

typedef struct {
    int64_t end, span;
} tp_around;

typedef struct {
    int64_t last;
    tp_open *open;
    tp_around *ends;
    int64_t open_count, open_room, ends_count, ends_room;
    int64_t begun; /* the place of the last begin among the operations at hand, if that is among them */
    int32_t base, next, beside_count; /* the row that it stands beside, the next one beside that */
    int32_t above[2];                 /* rows of calls that may have caused what begins here */
    uint8_t gives, on_stream;         /* whether its open slices may be asked for an arrow */
} tp_row;

typedef struct {
    tp_row *rows;
    int64_t count, room, overlaps, undrawn, all_beside;
} tp_rows;

void tp_rows_free(tp_rows *r);
/* A new row beside `base`, or beside none; its number, or TP_NO_MEMORY. Rows may move. */
int64_t tp_rows_add(tp_rows *r, int32_t base);
/* Lets a slice that nests on a row begin at that time; the span around it, -1 where there is none. */
int64_t tp_row_take(tp_row *row, int64_t ts);
/* The span around what is on a row at that time, -1 where there is none. */
int64_t tp_row_around(const tp_row *row, int64_t ts);
/* The row, or one beside it, that takes a B at `ts` (`is_begin`) or an X, `from` being the row or the first
 * beside it; NO_ROW where none does, below that where the memory is out. Rows may move. */
int32_t tp_rows_place(tp_rows *r, int32_t row, int32_t from, int64_t ts, int64_t end, int is_begin);

#endif
