/* SPDX-License-Identifier: MIT */
/* Shared by the two files that write Chrome's JSON. */
#ifndef TP_CHROME_H
#define TP_CHROME_H

#include "decimal.h"
#include "ops.h"
#include "tables.h"

/* The texts that Python gives. By track: PLACES has its ids, TOPS its category and ids, COUNTS the line of a
 * count up to its time. NAMES are by name; KERNELS are names of kernels after a quote. By shape: BEFORE is
 * what is shown before its arguments, LAUNCH whether its launch is shown, AFTER what is shown after that.
 * MARK is by mark, ARGS by arguments, LINES by frame of Python. Each argument starts with a comma. */
enum { PLACES, TOPS, COUNTS, NAMES, KERNELS, BEFORE, LAUNCH, AFTER, MARK, ARGS, LINES, READY };

/* Begins and ends of a track at one nanosecond: how often they alternated, and whether the last one was an
 * end. */
typedef struct {
    int64_t at;
    int32_t step, is_end;
} tp_turns;

/* Where the text of arguments is: not looked up yet, in the recording's table, or among the texts of Python.
 * */
enum { UNKNOWN, AS_RECORDED, AS_MADE };
typedef struct {
    uint8_t where;
    uint16_t shadows;
} tp_known;

typedef struct {
    tp_strings ready[READY];
    tp_turns *turns; /* by track */
    tp_known *args;  /* by arguments */
    int64_t turn_count, turn_room, args_count, args_room;
    tp_buffer out, name;
    int64_t base;
} tp_chrome;

/* When this much is written, it must be taken before more is written. */
#define OUT_FULL (1 << 18)
/* The most bytes of a line and its separator, without the texts in it. */
#define LINE_ROOM 256

/* Writes a time: µs since the base with three decimals, and three more that keep begins and ends of a track
 * apart. */
int tp_chrome_when(tp_chrome *c, int32_t track, int kind, int64_t ts, uint8_t *when);
uint8_t *tp_chrome_head(uint8_t *to, int kind);
uint8_t *tp_chrome_flow(tp_chrome *c, uint8_t *to, int64_t flow, int32_t track, const uint8_t *when, int when_size);
/* Writes the line of a count. The caller has reserved room for the texts of its track. */
int tp_chrome_count(tp_chrome *c, int32_t track, int64_t ts, int64_t value);

static inline uint8_t *tp_put(uint8_t *to, const void *from, int64_t size)
{
    memcpy(to, from, (size_t)size);
    return to + size;
}
#define TP_LITERAL(to, text) tp_put((to), (text), (int64_t)sizeof(text) - 1)

/* Completes an object of arguments, whose members were put after ARGS_ROOM bytes, each after a comma. Without
 * members, nothing is written. */
#define ARGS_ROOM 8
static inline uint8_t *tp_end_args(uint8_t *to, uint8_t *end)
{
    if (end == to + ARGS_ROOM)
        return to;
    memcpy(to, ",\"args\":{", ARGS_ROOM + 1);
    *end++ = '}';
    return end;
}

static inline uint8_t *tp_named_number(uint8_t *to, const char *name, int64_t value)
{
    *to++ = ',';
    *to++ = '"';
    to = tp_put(to, name, (int64_t)strlen(name));
    *to++ = '"';
    *to++ = ':';
    return tp_signed_decimal(to, value);
}

#endif
