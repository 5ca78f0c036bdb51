/* SPDX-License-Identifier: MIT */
/* An event of Chrome's trace JSON: the members that all events have, and its arguments. */
#ifndef TP_CHROME_EVENT_H
#define TP_CHROME_EVENT_H

#include <stddef.h>

#include "json_copy.h"

#define PIECES_MAX 48

/* A slice of the event's text. */
typedef struct {
    const uint8_t *at;
    int64_t size;
} tp_span;

/* An argument: its key with quotes, where its value is among `values`, and whether it is outside of `args`.
 * */
typedef struct {
    tp_span key;
    int64_t value, size;
    int is_member;
} tp_piece;

enum { PH, CAT, NAME, PID, TID, HEADS };

/* Arguments on which something depends: the kind of an event depends on the values of those before OF_KEY. */
enum { DEVICE, STREAM, GRID, BLOCK, DEVICE_TYPE, OF_KEY, BYTES = OF_KEY, ADDRESS, TOTAL, CORRELATION, ID, PLACES };

typedef struct {
    tp_span head[HEADS];
    int64_t ts_ns, dur_ns;
    int has_ts, has_dur, has_args, count, members;
    int place[PLACES]; /* the place of the argument plus one, 0: none */
    tp_piece pieces[PIECES_MAX];
} tp_event;

#define IS(span, text) ((span).size == (int64_t)sizeof text - 1 && !memcmp((span).at, text, sizeof text - 1))

static inline int tp_is_same(tp_span one, tp_span other)
{
    return one.size == other.size && !memcmp(one.at, other.at, (size_t)one.size);
}

/* The argument at one of the places, or NULL. */
static inline const tp_piece *tp_piece_at(const tp_event *e, int place)
{
    return e->place[place] ? &e->pieces[e->place[place] - 1] : 0;
}

/* Takes apart the object in [at, end) and puts the values of its arguments into `values`, as orjson writes
 * them. Returns whether it has the usual form, or TP_NO_MEMORY. */
int tp_event_read(tp_buffer *values, tp_event *e, const uint8_t *at, const uint8_t *end);

#endif
