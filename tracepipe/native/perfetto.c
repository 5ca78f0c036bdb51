/* SPDX-License-Identifier: MIT */
/* Writes operations as Perfetto's packets: TracePacket of perfetto/trace/trace_packet.proto.
 *
 *     1 packet ─ 8 timestamp, as a step │ 11 track_event ─ 9 type │ 12 interned_data │ 10 sequence
 *                                                          11 track │ 3 category │ 10 name (23 in place)
 *                                                          4 annotations │ 30 value │ 47 flows
 *
 * Parts that are repeated are in tables of bytes, which Python fills or which are made here at their first
 * use.
 */
#include "json.h"
#include "tables.h"
#include "ops.h"
#include "shown.h"
#include "warp_names.h"
#include "wire.h"

enum { CATEGORIES, EVENT_NAMES, ARG_NAMES, STRINGS, INTERNED };
/* The bytes that Python gives. TRACKS and TOPS are by row: its track, and its track and category. LINES are
 * by frame of Python. */
enum { TRACKS, TOPS, NAMES, BEFORE, LAUNCH_KEY, AFTER, MARK, KEYS, LINES, READY };
/* Fields of the messages of a packet. */
enum { FTRACE_EVENTS = 1, TRACK_EVENT = 11, TASK_STATE = 117 };
/* Numbers of the names of annotations. */
enum { KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES, KEY_MASK };

/* A short text that was interned, as the first and the last eight bytes of it. */
typedef struct {
    uint64_t first, last;
    int32_t size, iid;
} tp_recent;
#define RECENT_BITS 6
#define RECENT_SIZE 16

/* The annotations of arguments with one recipe: for each value that differs, the bytes before it, of which those
 * from `key` on are in its annotation, and how much text stands before it. The last part has what follows. */
typedef struct {
    int32_t at, key, end, text;
} tp_step;

typedef struct {
    tp_buffer bytes;
    int32_t count, shadows;
    tp_step steps[];
} tp_pattern;
#define STEPS_MAX 16

typedef struct {
    tp_table interned[INTERNED];
    tp_recent recent[INTERNED][1 << RECENT_BITS];
    tp_strings ready[READY], args;
    uint16_t *shadows; /* by arguments: see shown.h */
    int64_t shadow_room;
    struct tp_names *names; /* of warps, see tp_names */
    tp_pattern **patterns; /* by recipe */
    int64_t pattern_room, pattern_count;
    tp_buffer pending, out, scratch, made;
    int has_own; /* whether `made` has the annotations of the operation that is written */
    int64_t last;
    int32_t sequence, clock;
} tp_perfetto;

static void tp_names_free(struct tp_names *names);

#define TABLE_MAX (1 << 14)
#define TABLE_BYTES_MAX (1 << 19)
#define STRINGS_MAX (1 << 13)
#define NOT_NATIVE 1
#define TEXT_MAX 64 /* the most characters of a string that is kept in the table */

static const uint8_t INTERNED_FIELDS[INTERNED][2] = {{0x0A, 1}, {0x12, 1}, {0x1A, 1}, {0xEA, 2}};

TP_EXPORT void tp_perfetto_free(tp_perfetto *p)
{
    if (!p)
        return;
    for (int i = 0; i < INTERNED; i++)
        tp_table_free(&p->interned[i]);
    for (int i = 0; i < READY; i++)
        tp_strings_free(&p->ready[i]);
    tp_strings_free(&p->args);
    tp_names_free(p->names);
    free(p->shadows);
    for (int64_t i = 0; i < p->pattern_count; i++) {
        if (p->patterns[i] && p->patterns[i]->count) {
            free(p->patterns[i]->bytes.data);
            free(p->patterns[i]);
        }
    }
    free(p->patterns);
    free(p->pending.data);
    free(p->out.data);
    free(p->scratch.data);
    free(p->made.data);
    free(p);
}

TP_EXPORT tp_perfetto *tp_perfetto_new(uint64_t key, int32_t sequence, int32_t clock, int64_t base)
{
    tp_perfetto *p = calloc(1, sizeof *p);
    int failed = !p;
    for (int i = 0; !failed && i < INTERNED; i++)
        failed = tp_table_init(&p->interned[i], key);
    if (failed) {
        tp_perfetto_free(p);
        return 0;
    }
    if (p) {
        p->sequence = sequence;
        p->clock = clock;
        p->last = base;
    }
    return p;
}

TP_EXPORT int tp_perfetto_set(tp_perfetto *p, int which, int64_t number, const uint8_t *bytes, int64_t size)
{
    return tp_strings_set(which < 0 ? &p->args : &p->ready[which], number, bytes, size);
}

TP_EXPORT void tp_perfetto_forget(tp_perfetto *p, int which)
{
    tp_strings_clear(which < 0 ? &p->args : &p->ready[which]);
}

/* Appends an entry of InternedData to those that the next packet will have. */
static int tp_put_interned(tp_perfetto *p, int table, int64_t iid, const uint8_t *text, int64_t size)
{
    int64_t entry = 2 + tp_varint_size(iid) + tp_varint_size(size) + size;
    if (tp_reserve(&p->pending, entry + 16))
        return TP_NO_MEMORY;
    uint8_t *at = p->pending.data + p->pending.size;
    for (int i = 0; i < INTERNED_FIELDS[table][1]; i++)
        *at++ = i ? 0x01 : INTERNED_FIELDS[table][0];
    at = tp_varint(at, (uint64_t)entry);
    *at++ = 0x08;
    at = tp_varint(at, (uint64_t)iid);
    *at++ = 0x12;
    p->pending.size = tp_bytes(at, text, size) - p->pending.data;
    return 0;
}

static int64_t find_or_add(tp_perfetto *p, int table, const uint8_t *text, int64_t size)
{
    tp_table *t = &p->interned[table];
    uint64_t hash = tp_hash(text, size, t->key);
    int64_t number = tp_table_find(t, text, size, hash);
    if (number >= 0)
        return number + 1;
    if (t->strings.count >= (table == STRINGS ? STRINGS_MAX : TABLE_MAX))
        return 0;
    if (size > TABLE_BYTES_MAX - t->strings.bytes.size)
        return 0;
    if ((number = tp_table_add(t, text, size, hash)) < 0)
        return TP_NO_MEMORY;
    return tp_put_interned(p, table, number + 1, text, size) ? TP_NO_MEMORY : number + 1;
}

/* The iid of a text, from 1 on; 0 where the table is full and the text must be written in place. The few keys of
 * arguments come again and again: they are found without the table. */
TP_EXPORT int64_t tp_perfetto_intern(tp_perfetto *p, int table, const uint8_t *text, int64_t size)
{
    tp_recent one = {0, 0, (int32_t)size, 0};
    if (!size || size > RECENT_SIZE)
        return find_or_add(p, table, text, size);
    int64_t some = size < 8 ? size : 8;
    memcpy(&one.first, text, (size_t)some);
    memcpy(&one.last, text + size - some, (size_t)some);
    uint64_t mixed = (one.first ^ one.last << 7 ^ (uint64_t)size) * 0x9E3779B97F4A7C15u;
    tp_recent *recent = &p->recent[table][mixed >> (64 - RECENT_BITS)];
    if (recent->size == one.size && recent->first == one.first && recent->last == one.last && recent->iid)
        return recent->iid;
    int64_t iid = find_or_add(p, table, text, size);
    if (iid > 0) {
        one.iid = (int32_t)iid;
        *recent = one;
    }
    return iid;
}

static int64_t characters(const uint8_t *at, const uint8_t *end)
{
    int64_t count = 0;
    for (; at < end; at++)
        count += (*at & 0xC0) != 0x80;
    return count;
}

/* Appends the value of an annotation: a scalar of the native grammar. */
static int put_scalar(tp_perfetto *p, tp_buffer *b, const uint8_t *at, const uint8_t *end, int may_intern)
{
    int64_t value, size = end - at - 2;
    if (tp_reserve(b, end - at + 24))
        return TP_NO_MEMORY;
    uint8_t *to = b->data + b->size;
    if (*at == '"') {
        int64_t iid = 0;
        if (may_intern && characters(at + 1, end - 1) <= TEXT_MAX)
            iid = tp_perfetto_intern(p, STRINGS, at + 1, size);
        if (iid < 0)
            return TP_NO_MEMORY;
        if (iid) {
            *to++ = 0x88;
            *to++ = 0x01;
            to = tp_varint(to, (uint64_t)iid);
        } else {
            *to++ = 0x32;
            to = tp_bytes(to, at + 1, size);
        }
    } else if (tp_integer(at, end, &value)) {
        *to++ = 0x20;
        to = tp_varint(to, (uint64_t)value);
    } else {
        *to++ = 0x10;
        *to++ = *at == 't';
    }
    b->size = to - b->data;
    return 0;
}

/* Appends the value of an annotation: a scalar, a real number, or an array or an object of such values. */
static int put_wide(tp_perfetto *p, tp_buffer *b, const uint8_t *at, const uint8_t *end, int may_intern)
{
    double real;
    if (*at != '[' && *at != '{') {
        if ((*at != '-' && (uint8_t)(*at - '0') >= 10) || !tp_real(at, end, &real))
            return put_scalar(p, b, at, end, may_intern);
        return tp_append(b, "\x29", 1) || tp_append(b, &real, sizeof real) ? TP_NO_MEMORY : 0;
    }
    int is_object = *at == '{';
    if (at[1] == *at + 2)
        return tp_append(b, is_object ? "\x32\x02{}" : "\x32\x02[]", 4);
    for (const uint8_t *item = at + 1, *after; item < end; item = after + 1) {
        int64_t head = b->size;
        if (tp_append(b, is_object ? "\x5a\0\0\0\0\0\0" : "\x62\0\0\0\0\0\0", 7))
            return TP_NO_MEMORY;
        if (is_object) {
            const uint8_t *key = item + 1;
            item = tp_string(item, end) + 1;
            int64_t key_size = item - key - 2;
            if (tp_reserve(b, key_size + 12))
                return TP_NO_MEMORY;
            uint8_t *to = b->data + b->size;
            *to++ = 0x52;
            b->size = tp_bytes(to, key, key_size) - b->data;
        }
        after = tp_wide(item, end, 0);
        if (*item == 'n' ? tp_append(b, "\x32\x04null", 6) : put_wide(p, b, item, after, 0))
            return TP_NO_MEMORY;
        int64_t size = b->size - head - 7, prefix = 1 + tp_varint_size(size);
        tp_varint(b->data + head + 1, (uint64_t)size);
        memmove(b->data + head + prefix, b->data + head + 7, (size_t)size);
        b->size = head + prefix + size;
    }
    return 0;
}

/* Appends the name of an annotation. */
static int put_key(tp_perfetto *p, tp_buffer *b, const uint8_t *key, int64_t size)
{
    int64_t iid = tp_perfetto_intern(p, ARG_NAMES, key, size);
    if (iid < 0 || tp_reserve(b, size + 16))
        return TP_NO_MEMORY;
    uint8_t *to = b->data + b->size;
    *to++ = iid ? 0x08 : 0x52;
    to = iid ? tp_varint(to, (uint64_t)iid) : tp_bytes(to, key, size);
    b->size = to - b->data;
    return 0;
}

/* Appends one annotation with this key and value. A null is left out. */
static int put_annotation(tp_perfetto *p, tp_buffer *b, const uint8_t *key, int64_t key_size, const uint8_t *value,
                          const uint8_t *end)
{
    tp_buffer *body = &p->scratch;
    body->size = 0;
    if (*value == 'n')
        return 0;
    if (put_key(p, body, key, key_size) || put_wide(p, body, value, end, 1) || tp_reserve(b, body->size + 12))
        return TP_NO_MEMORY;
    uint8_t *to = b->data + b->size;
    *to++ = 0x22;
    to = tp_bytes(to, body->data, body->size);
    b->size = to - b->data;
    return 0;
}

/* Makes the annotations of an object of the native grammar, which has these of the names of shown.h. */
static int make_args(tp_perfetto *p, int64_t number, const uint8_t *text, int64_t size, int shadows)
{
    const uint8_t *at = text, *end = text + size;
    p->made.size = 0;
    int failed = number < 0 || TP_GROW(p->shadows, p->shadow_room, number);
    while (!failed && *at != '}') {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        at = tp_wide(after + 1, end, 0);
        failed = put_annotation(p, &p->made, key + 1, after - key - 2, after + 1, at);
    }
    failed = failed || tp_strings_set(&p->args, number, p->made.data, p->made.size);
    if (!failed)
        p->shadows[number] = (uint16_t)shadows;
    return failed ? TP_NO_MEMORY : 0;
}

static tp_pattern NO_PATTERN; /* of a recipe that is not plain */

/* Makes the pattern of a recipe from its text and that of arguments whose names were all interned. Waits for others
 * where one of their values is null, as it has no annotation. */
static int make_pattern(tp_perfetto *p, tp_reader *texts, int32_t recipe, const uint8_t *given, int64_t size, int shadows)
{
    if (TP_GROW(p->patterns, p->pattern_room, recipe))
        return TP_NO_MEMORY;
    for (; p->pattern_count <= recipe; p->pattern_count++)
        p->patterns[p->pattern_count] = 0;
    const uint8_t *at, *given_end = given + size;
    size = tp_reader_recipe_text(texts, recipe, &at);
    const uint8_t *end = at + size, *from = at;
    tp_pattern *made = calloc(1, sizeof *made + (STEPS_MAX + 1) * sizeof *made->steps);
    int failed = !made, waits = 0, is_whole = 0;
    while (!failed && !waits && !is_whole) {
        tp_step *step = made->steps + made->count;
        const uint8_t *key = at + 1, *value = tp_string(key, end);
        if (!value || value + 1 >= end || *value++ != ':' || made->count == STEPS_MAX)
            break;
        int64_t key_size = value - key - 3;
        if (*value == HOLE) {
            step->key = (int32_t)made->bytes.size;
            step->text = (int32_t)(value - from);
            given += value - from;
            waits = *given == 'n';
            given = tp_wide(given, given_end, 0);
            failed = !waits && put_key(p, &made->bytes, key + 1, key_size);
            step->end = step[1].at = (int32_t)made->bytes.size;
            made->count++;
            at = from = value + 2;
        } else if ((at = tp_wide(value, end, 0))) {
            failed = put_annotation(p, &made->bytes, key + 1, key_size, value, at);
        }
        if (failed || !at || !given || at >= end)
            break;
        is_whole = *at == '}' && at + 1 == end;
        if (!is_whole && *at != ',')
            break;
    }
    if (is_whole && !failed && !waits && made->count) {
        made->shadows = shadows;
        made->steps[made->count].end = (int32_t)made->bytes.size;
        p->patterns[recipe] = made;
        return 0;
    }
    if (made)
        free(made->bytes.data);
    free(made);
    if (!failed && !waits)
        p->patterns[recipe] = &NO_PATTERN;
    return failed ? TP_NO_MEMORY : 0;
}

/* Makes the annotations of arguments by their pattern in `made`. Returns whether all values are plain. */
static int follow(tp_perfetto *p, const tp_pattern *pattern, const uint8_t *text, int64_t size)
{
    const uint8_t *at = text, *end = text + size, *ends[STEPS_MAX];
    int64_t values[STEPS_MAX];
    const tp_step *step = pattern->steps;
    for (int i = 0; i < pattern->count; i++) {
        at += step[i].text;
        ends[i] = *at == '"' ? tp_string(at, end) : tp_integer(at, end, &values[i]);
        if (!(at = ends[i]))
            return 0;
    }
    p->made.size = 0;
    /* Each value needs at most 22 bytes more than its text. */
    if (tp_reserve(&p->made, pattern->bytes.size + size + 24 * STEPS_MAX))
        return TP_NO_MEMORY;
    const uint8_t *bytes = pattern->bytes.data;
    uint8_t *to = p->made.data;
    at = text;
    for (int i = 0;; i++, step++) {
        const uint8_t *value = at + step->text;
        int64_t before = step->key - step->at, key = step->end - step->key;
        if (i == pattern->count) {
            memcpy(to, bytes + step->at, (size_t)(step->end - step->at));
            to += step->end - step->at;
            break;
        }
        memcpy(to, bytes + step->at, (size_t)before);
        to += before;
        *to++ = 0x22;
        if (*value == '"') {
            p->scratch.size = 0;
            if (put_scalar(p, &p->scratch, value, ends[i], 1))
                return TP_NO_MEMORY;
            to = tp_varint(to, (uint64_t)(key + p->scratch.size));
        } else {
            to = tp_varint(to, (uint64_t)(key + 1 + tp_varint_size(values[i])));
        }
        memcpy(to, bytes + step->key, (size_t)key);
        to += key;
        if (*value == '"') {
            memcpy(to, p->scratch.data, (size_t)p->scratch.size);
            to += p->scratch.size;
        } else {
            *to++ = 0x20;
            to = tp_varint(to, (uint64_t)values[i]);
        }
        at = ends[i];
    }
    p->made.size = to - p->made.data;
    return 1;
}

/* Makes the annotations of arguments, given as JSON. Returns 0, NOT_NATIVE where Python must do it, or
 * TP_NO_MEMORY. */
TP_EXPORT int tp_perfetto_args(tp_perfetto *p, int64_t number, const uint8_t *text, int64_t size)
{
    int shadows = tp_shadows(text, size);
    return shadows < 0 ? NOT_NATIVE : make_args(p, number, text, size, shadows);
}

/* Appends a packet up to the fields of its message, TRACK_EVENT or another, which have `body` bytes. Returns
 * where to write these. */
static uint8_t *tp_put_packet(tp_perfetto *p, int64_t ts, int field, int64_t body)
{
    /* The difference of two times may need 64 unsigned bits. */
    int64_t back = ts < p->last, when = back ? (ts > 0 ? ts : 0) : (int64_t)((uint64_t)ts - (uint64_t)p->last);
    int64_t size = 1 + tp_varint_size(when) + (back ? 2 + tp_varint_size(p->clock) : 0);
    size += tp_varint_size(field << 3) + tp_varint_size(body) + body + 1 + tp_varint_size(p->sequence);
    if (p->pending.size)
        size += 1 + tp_varint_size(p->pending.size) + p->pending.size;
    if (tp_reserve(&p->out, size + 16))
        return 0;
    uint8_t *to = p->out.data + p->out.size;
    *to++ = 0x0A;
    to = tp_varint(to, (uint64_t)size);
    *to++ = 0x40;
    to = tp_varint(to, (uint64_t)when);
    if (back) {
        *to++ = 0xD0;
        *to++ = 0x03;
        to = tp_varint(to, (uint64_t)p->clock);
    } else {
        p->last = ts;
    }
    return tp_varint(tp_varint(to, (uint64_t)field << 3 | 2), (uint64_t)body);
}

static void tp_end_packet(tp_perfetto *p, uint8_t *to)
{
    if (p->pending.size) {
        *to++ = 0x62;
        to = tp_bytes(to, p->pending.data, p->pending.size);
        p->pending.size = 0;
    }
    *to++ = 0x50;
    to = tp_varint(to, (uint64_t)p->sequence);
    p->out.size = to - p->out.data;
}

/* Writes a packet whose message Python made. */
TP_EXPORT int tp_perfetto_packet(tp_perfetto *p, int64_t ts, int field, const uint8_t *body, int64_t size)
{
    uint8_t *to = tp_put_packet(p, ts, field, size);
    if (!to)
        return TP_NO_MEMORY;
    memcpy(to, body, (size_t)size);
    tp_end_packet(p, to + size);
    return 0;
}

static uint8_t *tp_put_flow(uint8_t *to, int64_t flow)
{
    if (!flow)
        return to;
    uint64_t id = flow < 0 ? -(uint64_t)flow : (uint64_t)flow;
    *to++ = 0xF9;
    *to++ = 0x02;
    for (int i = 0; i < 8; i++)
        *to++ = (uint8_t)(id >> 8 * i);
    return to;
}

/* Writes an integer annotation; `key` is the number of its name's bytes. */
static int64_t tp_annotated_size(int64_t key, int64_t value)
{
    int64_t size = key + 1 + tp_varint_size(value);
    return 1 + tp_varint_size(size) + size;
}

static uint8_t *tp_put_annotated(uint8_t *to, const tp_strings *keys, int64_t key, int64_t value, int is_unsigned)
{
    *to++ = 0x22;
    to = tp_varint(to, (uint64_t)(tp_size_of(keys, key) + 1 + tp_varint_size(value)));
    to = tp_copy(to, keys, key);
    *to++ = is_unsigned ? 0x18 : 0x20;
    return tp_varint(to, (uint64_t)value);
}

static int write_one(tp_perfetto *p, const tp_drawn *d, const tp_given *g, int64_t at)
{
    int32_t row = d->row[at], event = d->event[at], shape = event < 0 ? -1 : g->shape[event];
    int32_t args = event < 0 ? -1 : g->args[event];
    int kind = d->kind[at], named = kind == OP_BEGIN || kind == OP_INSTANT;
    int64_t source = event >= 0 && g->source ? g->source[event] : -1, launch = 0;
    int64_t line = event >= 0 && g->line ? g->line[event] : -1;
    const tp_strings *tracks = &p->ready[named ? TOPS : TRACKS];
    int shows_launch = tp_strings_has(&p->ready[LAUNCH_KEY], shape);
    int64_t size = 2 + tp_size_of(tracks, row);
    if (kind == OP_COUNTER) {
        size += 2 + tp_varint_size(d->value[at]);
    } else {
        size += (named ? tp_size_of(&p->ready[NAMES], d->name[at]) : 0) + tp_size_of(&p->ready[BEFORE], shape);
        size += (p->has_own ? p->made.size : tp_size_of(&p->args, args)) + tp_size_of(&p->ready[LINES], line);
        size += tp_size_of(&p->ready[AFTER], shape) + tp_size_of(&p->ready[MARK], d->mark[at]);
        size += source < 0 ? 0 : tp_annotated_size(tp_size_of(&p->ready[KEYS], KEY_SOURCE), source);
        size += d->flow[at] ? 10 : 0;
        for (int64_t left = d->flow2[at]; tp_next_flow(d, &left);)
            size += 10;
        if (shows_launch) {
            launch = g->launch[event];
            size += tp_annotated_size(tp_size_of(&p->ready[LAUNCH_KEY], shape), launch);
        }
    }
    uint8_t *to = tp_put_packet(p, d->ts[at], TRACK_EVENT, size);
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = (uint8_t)kind;
    to = tp_copy(to, tracks, row);
    if (kind == OP_COUNTER) {
        *to++ = 0xF0;
        *to++ = 0x01;
        to = tp_varint(to, (uint64_t)d->value[at]);
    } else {
        if (named)
            to = tp_copy(to, &p->ready[NAMES], d->name[at]);
        to = tp_copy(to, &p->ready[BEFORE], shape);
        if (p->has_own)
            memcpy(to, p->made.data, (size_t)p->made.size);
        to = p->has_own ? to + p->made.size : tp_copy(to, &p->args, args);
        to = tp_copy(to, &p->ready[LINES], line);
        if (source >= 0)
            to = tp_put_annotated(to, &p->ready[KEYS], KEY_SOURCE, source, 0);
        if (shows_launch)
            to = tp_put_annotated(to, &p->ready[LAUNCH_KEY], shape, launch, launch < 0);
        to = tp_copy(to, &p->ready[AFTER], shape);
        to = tp_copy(to, &p->ready[MARK], d->mark[at]);
        to = tp_put_flow(to, d->flow[at]);
        for (int64_t left = d->flow2[at], flow; (flow = tp_next_flow(d, &left));)
            to = tp_put_flow(to, flow);
    }
    tp_end_packet(p, to);
    return 0;
}

/* What is shown of an operation in addition to its arguments, as bits of shown.h. */
static int shown_of(const tp_perfetto *p, const tp_drawn *d, const tp_given *g, int64_t at)
{
    int32_t event = d->event[at], shape = g->shape[event];
    int shown = tp_strings_has(&p->ready[LAUNCH_KEY], shape) ? SHOWS_LAUNCH : 0;
    shown |= tp_size_of(&p->ready[BEFORE], shape) ? SHOWS_CPU : 0;
    shown |= tp_size_of(&p->ready[AFTER], shape) ? SHOWS_SIZES : 0;
    shown |= g->source && g->source[event] >= 0 ? SHOWS_SOURCE : 0;
    shown |= g->line && g->line[event] >= 0 ? SHOWS_LINE : 0;
    shown |= d->mark[at] ? SHOWS_MARK << d->mark[at] : 0;
    return shown;
}

/* Whether Python must write an operation: it has arguments of its own, they cannot be made here, or one of
 * them replaces something that is shown in addition to arguments. Nothing is interned for those, as their
 * names may not be used. */
static int is_odd(tp_perfetto *p, const tp_drawn *d, const tp_given *g, tp_reader *texts, int64_t at)
{
    int32_t event = d->event[at], args = event < 0 ? -1 : g->args[event], recipe = 0;
    const uint8_t *text = 0;
    p->has_own = 0;
    if (event < NO_EVENT)
        return 1;
    if (args < 0)
        return 0;
    int is_made = tp_strings_has(&p->args, args);
    int64_t size = is_made || !texts ? -1 : tp_reader_text(texts, 1, args, &text);
    if (size > 0 && (recipe = tp_reader_recipe_of(texts, args)) && recipe < p->pattern_count && p->patterns[recipe] &&
        p->patterns[recipe]->count) {
        if (p->patterns[recipe]->shadows & shown_of(p, d, g, at))
            return 1;
        if ((p->has_own = follow(p, p->patterns[recipe], text, size)))
            return p->has_own < 0 ? TP_NO_MEMORY : 0;
    }
    int shadows = is_made ? p->shadows[args] : size < 0 ? -1 : tp_shadows(text, size);
    if (shadows < 0 || (shadows && (shadows & shown_of(p, d, g, at))))
        return 1;
    if (is_made)
        return 0;
    if (make_args(p, args, text, size, shadows))
        return TP_NO_MEMORY;
    int is_known = recipe < p->pattern_count && p->patterns[recipe];
    return recipe && !is_known ? make_pattern(p, texts, recipe, text, size, shadows) : 0;
}

/* Writes operations from place `from` of their order on. `texts` has those of their arguments, or is NULL.
 * Stops at an operation that `is_odd`. Returns where it stopped, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_perfetto_write(tp_perfetto *p, const tp_drawn *d, const tp_given *g, tp_reader *texts,
                                    int64_t from, int64_t to)
{
    for (int64_t i = from; i < to; i++) {
        int64_t at = d->order ? d->order[i] : i;
        int odd = is_odd(p, d, g, texts, at);
        if (odd)
            return odd < 0 ? odd : i;
        if (write_one(p, d, g, at))
            return TP_NO_MEMORY;
    }
    return to;
}

/* Returns what was written. It is valid until the next call. */
TP_EXPORT int64_t tp_perfetto_take(tp_perfetto *p, const uint8_t **bytes)
{
    int64_t size = p->out.size;
    *bytes = p->out.data;
    p->out.size = 0;
    return size;
}

/* Writes warps of one GPU as Perfetto's packets, in a packet sequence of their own.
 *
 * The count of running warps has no packets. It is a field of the begin or end that changes it,
 * TrackEvent.extra_counter_values, whose track is the default of the sequence.
 */

/* At most MET_MAX names of KERNELS_MAX kernels are remembered as used once. At most NAMED_MAX that are used
 * again get a number. */
#define MET_MAX (1 << 17)
#define KERNELS_MAX 256
#define NAMED_MAX (1 << 16)
#define FIRST_IID 2 /* 1 is that of an exit */

enum { NAME_NEW, NAME_MET };

/* By kernel and warp: NAME_NEW, NAME_MET, or the number of a name. */
typedef struct tp_names {
    int32_t *of[KERNELS_MAX];
    int64_t rooms[KERNELS_MAX];
    int64_t met, named;
} tp_names;

static void tp_names_free(tp_names *names)
{
    for (int i = 0; names && i < KERNELS_MAX; i++)
        free(names->of[i]);
    free(names);
}

/* Finds where a warp's name is remembered, NULL where it is not. Returns 0 or TP_NO_MEMORY. */
static int find_name(tp_perfetto *p, int32_t kernel, int64_t number, int32_t **found)
{
    *found = 0;
    if (kernel < 0 || kernel >= KERNELS_MAX || number < 0 || number >= MET_MAX)
        return 0;
    if (!p->names && !(p->names = calloc(1, sizeof *p->names)))
        return TP_NO_MEMORY;
    tp_names *names = p->names;
    int64_t before = names->rooms[kernel];
    if (TP_GROW(names->of[kernel], names->rooms[kernel], number))
        return TP_NO_MEMORY;
    for (int64_t i = before; i < names->rooms[kernel]; i++)
        names->of[kernel][i] = NAME_NEW;
    *found = &names->of[kernel][number];
    return 0;
}

/* The number of a warp's name, 0 where the name is to be written in place. The text is put into `p->scratch`
 * unless it has a number already. */
static int64_t name_of(tp_perfetto *p, const tp_kernel *kernels, int32_t kernel, int64_t number)
{
    int32_t *found;
    if (find_name(p, kernel, number, &found))
        return TP_NO_MEMORY;
    if (found && *found > NAME_MET)
        return *found;
    if (tp_warp_name(&p->scratch, &p->ready[NAMES], &kernels[kernel], number))
        return TP_NO_MEMORY;
    if (!found)
        return 0;
    tp_names *names = p->names;
    if (*found == NAME_NEW) {
        if (names->met < MET_MAX) {
            names->met++;
            *found = NAME_MET;
        }
        return 0;
    }
    if (names->named >= NAMED_MAX)
        return 0;
    int64_t iid = FIRST_IID + names->named++;
    *found = (int32_t)iid;
    return tp_put_interned(p, EVENT_NAMES, iid, p->scratch.data, p->scratch.size) ? TP_NO_MEMORY : iid;
}

typedef struct {
    tp_perfetto *p;
    const tp_slices *s;
    const tp_kernel *kernels;
    int64_t offset;
} tp_job;

static int64_t value_size(int64_t value)
{
    return value < 0 ? 0 : 1 + tp_varint_size(value);
}

static uint8_t *put_value(uint8_t *to, int64_t value)
{
    if (value < 0)
        return to;
    *to++ = 0x60;
    return tp_varint(to, (uint64_t)value);
}

static int write_begin(tp_job *j, int64_t ts, int32_t slice, int64_t value)
{
    tp_perfetto *p = j->p;
    const tp_slices *s = j->s;
    const tp_strings *keys = &p->ready[KEYS];
    int64_t iid = name_of(p, j->kernels, s->kernel[slice], s->number[slice]);
    if (iid < 0)
        return TP_NO_MEMORY;
    int64_t name = iid ? 1 + tp_varint_size(iid) : 2 + tp_varint_size(p->scratch.size) + p->scratch.size;
    const int64_t known[] = {s->source[slice], s->exits[slice], s->cycles[slice], s->lanes[slice]};
    /* A protobuf integer is modulo 2^64. */
    int64_t source = (int64_t)((uint64_t)known[0] - (uint64_t)ts - (uint64_t)j->offset);
    const int64_t shown[] = {source, known[1], known[2], known[3]};
    const int key[] = {KEY_SOURCE, KEY_EXITS, KEY_CYCLES, KEY_LANES};
    int64_t flow = s->flow[slice], mark = s->unclosed[slice] ? MARK_UNCLOSED : MARK_NONE;
    int64_t size = 2 + tp_size_of(&p->ready[TOPS], s->row[slice]) + name + (flow ? 10 : 0);
    size += tp_size_of(&p->ready[MARK], mark) + value_size(value);
    for (int i = 0; i < 4; i++)
        size += known[i] < 0 ? 0 : tp_annotated_size(tp_size_of(keys, key[i]), shown[i]);
    uint8_t *to = tp_put_packet(p, ts, TRACK_EVENT, size);
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_BEGIN;
    to = tp_copy(to, &p->ready[TOPS], s->row[slice]);
    if (iid) {
        *to++ = 0x50;
        to = tp_varint(to, (uint64_t)iid);
    } else {
        *to++ = 0xBA;
        *to++ = 0x01;
        to = tp_bytes(to, p->scratch.data, p->scratch.size);
    }
    for (int i = 0; i < 4; i++)
        if (known[i] >= 0)
            to = tp_put_annotated(to, keys, key[i], shown[i], 0);
    to = tp_copy(to, &p->ready[MARK], mark);
    to = put_value(to, value);
    tp_end_packet(p, tp_put_flow(to, flow));
    return 0;
}

static int write_end(tp_perfetto *p, int64_t ts, int32_t row, int64_t value)
{
    uint8_t *to = tp_put_packet(p, ts, TRACK_EVENT, 2 + tp_size_of(&p->ready[TRACKS], row) + value_size(value));
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_END;
    tp_end_packet(p, put_value(tp_copy(to, &p->ready[TRACKS], row), value));
    return 0;
}

static int write_count(tp_perfetto *p, int64_t ts, int32_t row, int64_t value)
{
    if (value < 0)
        return 0;
    uint8_t *to = tp_put_packet(p, ts, TRACK_EVENT, 2 + tp_size_of(&p->ready[TRACKS], row) + 2 + tp_varint_size(value));
    if (!to)
        return TP_NO_MEMORY;
    *to++ = 0x48;
    *to++ = OP_COUNTER;
    to = tp_copy(to, &p->ready[TRACKS], row);
    *to++ = 0xF0;
    *to++ = 0x01;
    tp_end_packet(p, tp_varint(to, (uint64_t)value));
    return 0;
}

/* Writes changes of warps from `from` on and stops at an exit, which Python writes. `counter` is the row of
 * the count. Source times are written as differences from `offset`. Returns where it stopped, or
 * TP_NO_MEMORY. */
TP_EXPORT int64_t tp_perfetto_warps(tp_perfetto *p, const tp_changes *c, const tp_slices *s, const tp_kernel *kernels,
                                    int32_t counter, int64_t offset, int64_t from, int64_t to)
{
    tp_job job = {p, s, kernels, offset};
    int64_t i = from;
    for (int failed = 0; i < to && c->kind[i] != WARP_EXIT; i++) {
        int32_t slice = c->slice[i];
        if (c->kind[i] == WARP_BEGIN)
            failed = write_begin(&job, c->ts[i], slice, c->value[i]);
        else if (c->kind[i] == WARP_END)
            failed = write_end(p, c->ts[i], s->row[slice], c->value[i]);
        else
            failed = write_count(p, c->ts[i], counter, c->value[i]);
        if (failed) {
            i = TP_NO_MEMORY;
            break;
        }
    }
    return i;
}

/* Writes when threads run: task states of TracePacket.generic_kernel_task_state_event, and sched_waking in
 * ftrace's bundles.
 *
 *     117 ─ 1 cpu │ 3 tid │ 4 state            1 ─ 1 cpu │ 2 event ─ 1 timestamp │ 2 pid of the waker
 *                                                                    20 ─ 2 pid │ 5 target_cpu
 */

#define ID_LIMIT INT32_MAX
#define NOBODY (-1)

enum { UNKNOWN, RUNS, LEAVES, WOKEN };
enum { RUNNABLE = 2, RUNNING, SLEEPS, WAITS, STOPPED, DESTROYED = 8 };

/* By event, and by shape. */
typedef struct {
    const int64_t *ts;
    const int32_t *shape, *args;
    const uint8_t *kind;
    const int32_t *cpu, *tid;
} tp_switches;

typedef struct {
    int64_t waker, target;
    int state;
} tp_switch_args;

static int is_text(const uint8_t *at, const uint8_t *end, const char *text)
{
    return (size_t)(end - at) == strlen(text) && !memcmp(at, text, (size_t)(end - at));
}

/* The state of a thread that left its processor, by its text. */
static int state_of(const uint8_t *at, const uint8_t *end)
{
    static const struct {
        const char *text;
        int state;
    } states[] = {{"\"runnable\"", RUNNABLE}, {"\"preempted\"", RUNNABLE}, {"\"disk\"", WAITS},
                  {"\"parked\"", WAITS},      {"\"idle\"", WAITS},         {"\"stopped\"", STOPPED},
                  {"\"traced\"", STOPPED},    {"\"dead\"", DESTROYED},     {"\"zombie\"", DESTROYED}};
    for (size_t i = 0; i < sizeof states / sizeof *states; i++)
        if (is_text(at, end, states[i].text))
            return states[i].state;
    return SLEEPS;
}

static int64_t id_of(const uint8_t *at, const uint8_t *end)
{
    int64_t value;
    return tp_unsigned(at, end, &value) && value <= ID_LIMIT ? value : NOBODY;
}

/* Reads arguments. Returns 0, or -1 where Python must read their text. */
static int read_args(tp_reader *texts, int32_t args, tp_switch_args *found)
{
    const uint8_t *at = 0, *end;
    int64_t size = texts ? tp_reader_text(texts, 1, args, &at) : -1;
    if (size < 2 || *at != '{')
        return -1;
    for (end = at + size; *at != '}';) {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':')
            return -1;
        const uint8_t *value = after + 1;
        if (!(at = tp_wide(value, end, 0)) || at >= end || (*at != ',' && *at != '}'))
            return -1;
        if (is_text(key, after, "\"by_tid\""))
            found->waker = id_of(value, at);
        else if (is_text(key, after, "\"target_cpu\""))
            found->target = id_of(value, at);
        else if (is_text(key, after, "\"prev_state\""))
            found->state = state_of(value, at);
    }
    return at + 1 == end ? 0 : -1;
}

static uint8_t *put_field(uint8_t *to, uint8_t tag, int64_t value)
{
    *to++ = tag;
    return tp_varint(to, (uint64_t)value);
}

static int write_state(tp_perfetto *p, int64_t ts, int32_t cpu, int32_t tid, int state)
{
    uint8_t *to = tp_put_packet(p, ts, TASK_STATE, 4 + tp_varint_size(cpu) + tp_varint_size(tid));
    if (!to)
        return TP_NO_MEMORY;
    tp_end_packet(p, put_field(put_field(put_field(to, 0x08, cpu), 0x18, tid), 0x20, state));
    return 0;
}

static int write_waking(tp_perfetto *p, int64_t ts, int64_t when, int32_t cpu, int32_t tid, const tp_switch_args *a)
{
    int64_t waking = 1 + tp_varint_size(tid) + (a->target < 0 ? 0 : 1 + tp_varint_size(a->target));
    int64_t event = 2 + tp_varint_size(when) + tp_varint_size(a->waker) + 2 + tp_varint_size(waking) + waking;
    uint8_t *to = tp_put_packet(p, ts, FTRACE_EVENTS, 2 + tp_varint_size(cpu) + tp_varint_size(event) + event);
    if (!to)
        return TP_NO_MEMORY;
    to = put_field(put_field(to, 0x08, cpu), 0x12, event);
    to = put_field(put_field(to, 0x08, when), 0x10, a->waker);
    *to++ = 0xA2;
    to = put_field(to, 0x01, waking);
    to = put_field(to, 0x10, tid);
    tp_end_packet(p, a->target < 0 ? to : put_field(to, 0x28, a->target));
    return 0;
}

/* Writes events from `from` on and stops at one whose arguments Python must read. `ahead` is by how much
 * CLOCK_BOOTTIME is ahead of their times, ns. Returns where it stopped, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_perfetto_switches(tp_perfetto *p, const tp_switches *s, tp_reader *texts, int64_t ahead, int64_t from,
                                       int64_t to)
{
    for (int64_t i = from; i < to; i++) {
        int32_t shape = s->shape[i], args = s->args[i];
        int kind = s->kind[shape];
        tp_switch_args found = {NOBODY, NOBODY, SLEEPS};
        if (args >= 0 && kind != RUNS && read_args(texts, args, &found))
            return i;
        int failed;
        if (kind == WOKEN && found.waker != NOBODY) {
            int64_t when = (int64_t)((uint64_t)s->ts[i] + (uint64_t)ahead);
            failed = write_waking(p, s->ts[i], when > 0 ? when : 0, s->cpu[shape], s->tid[shape], &found);
        } else {
            int state = kind == RUNS ? RUNNING : kind == WOKEN ? RUNNABLE : found.state;
            failed = write_state(p, s->ts[i], s->cpu[shape], s->tid[shape], state);
        }
        if (failed)
            return TP_NO_MEMORY;
    }
    return to;
}
