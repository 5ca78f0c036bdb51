/* SPDX-License-Identifier: MIT */
/* Shared by the files that write Perfetto's packets. */
#ifndef TP_PERFETTO_H
#define TP_PERFETTO_H

#include "ops.h"
#include "tables.h"
#include "wire.h"

enum { CATEGORIES, EVENT_NAMES, ARG_NAMES, STRINGS, INTERNED };
/* The bytes that Python gives. TRACKS and TOPS are by row: its track, and its track and category. LINES are
 * by frame of Python. */
enum { TRACKS, TOPS, NAMES, BEFORE, LAUNCH_KEY, AFTER, MARK, KEYS, LINES, READY };
/* Fields of the messages of a packet. */
enum { FTRACE_EVENTS = 1, TRACK_EVENT = 11, TASK_STATE = 117 };
/* Numbers of the names of annotations. */
enum { KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES, KEY_MASK };

typedef struct {
    tp_table interned[INTERNED];
    tp_strings ready[READY], args;
    uint16_t *shadows; /* by arguments: see shown.h */
    int64_t shadow_room;
    struct tp_names *names; /* of warps, see perfetto_warps.c */
    tp_buffer pending, out, scratch;
    int64_t last;
    int32_t sequence, clock;
} tp_perfetto;

void tp_names_free(struct tp_names *names);
/* Appends an entry of InternedData to those that the next packet will have. */
int tp_put_interned(tp_perfetto *p, int table, int64_t iid, const uint8_t *text, int64_t size);
int64_t tp_perfetto_intern(tp_perfetto *p, int table, const uint8_t *text, int64_t size);
/* Appends a packet up to the fields of its message, TRACK_EVENT or another, which have `body` bytes. Returns
 * where to write these. */
uint8_t *tp_put_packet(tp_perfetto *p, int64_t ts, int field, int64_t body);
void tp_end_packet(tp_perfetto *p, uint8_t *to);
uint8_t *tp_put_flow(uint8_t *to, int64_t flow);
/* Writes an integer annotation; `key` is the number of its name's bytes. */
int64_t tp_annotated_size(int64_t key_size, int64_t value);
uint8_t *tp_put_annotated(uint8_t *to, const tp_strings *keys, int64_t key, int64_t value, int is_unsigned);

#endif
