/* SPDX-License-Identifier: MIT */
/* Rows of events that are sorted by time: sorted_rows.py. */
#ifndef TP_SORTED_ROWS_H
#define TP_SORTED_ROWS_H

#include "tables.h"

/* A row, in memory and in the file. Its two texts follow it. */
typedef struct {
    int64_t ts, dur, number;
    int32_t rank, first, second, unused; /* `first` and `second` are the sizes of the texts */
} tp_sorted_row;

typedef struct tp_sorted tp_sorted;

/* Whether the rows in memory should be written to a run before more are added. */
int tp_sorted_is_full(const tp_sorted *s);
/* Begins a row with its first text. Returns the buffer to whose end its second text is appended; NULL where
 * there is no memory. */
tp_buffer *tp_sorted_begin(tp_sorted *s, const void *first, int64_t size);
/* Removes the row that was begun. */
void tp_sorted_leave(tp_sorted *s);
/* Adds the row that was begun; the sizes of its texts are computed. Returns 0 or TP_NO_MEMORY. */
int tp_sorted_end(tp_sorted *s, tp_sorted_row row);

#endif
