/* SPDX-License-Identifier: MIT */
/* The tables of a recording's reader. */
#ifndef TP_LINES_H
#define TP_LINES_H

#include <stdint.h>

typedef struct tp_reader tp_reader;

/* The text of a shape, or of arguments; -1 where there is no such number. */
int64_t tp_reader_text(tp_reader *r, int args, int64_t number, const uint8_t **text);

#endif
