/* SPDX-License-Identifier: MIT */
/* Rows of events that are put in the order of their times: sorted_rows.py. */
#ifndef TP_SORTED_ROWS_H
#define TP_SORTED_ROWS_H

#include "tables.h"

/* A row, in memory and in the file: its two texts stand behind it. */
typedef struct {
    int64_t ts, dur, number;
    int32_t rank, first, second, unused; /* `first` and `second` are the sizes of the texts */
} tp_sorted_row;

typedef struct tp_sorted tp_sorted;

/* Whether what is at hand should be put away before more is added. */
int tp_sorted_is_full(const tp_sorted *s);
/* Begins a row with its first text. Where its second one goes, behind what is there; NULL where the memory is out. */
tp_buffer *tp_sorted_begin(tp_sorted *s, const void *first, int64_t size);
/* Takes back the row that was begun. */
void tp_sorted_leave(tp_sorted *s);
/* Takes the row that was begun; its sizes are found. 0 or TP_NO_MEMORY. */
int tp_sorted_end(tp_sorted *s, tp_sorted_row row);

#endif
