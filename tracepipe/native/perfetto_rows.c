/* SPDX-License-Identifier: MIT */
/* Makes rows of the events of Perfetto's packets, in the usual forms of what `perfetto_events.py` reads.
 *
 *     TracePacket     8 timestamp  58 timestamp_clock_id  10 sequence  13 sequence_flags  12 interned_data
 *                     11 track_event
 *     TrackEvent      9 type  11 track  10 name_iid or 23 name  3 or 22 categories  4 debug_annotations
 *                     30 value of a counter, 12 and 31 of a further one  47 flow_ids  48 terminating_flow_ids
 *
 * A packet with any other field, with a field twice, or that changes more than names is left to Python, which
 * reads all packets in the order of the file. Python states what it knows of a sequence: its defaults, its
 * thread and how its clocks are related to that of the trace. The names of all sequences are kept here.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "decimal.h"
#include "flow_number.h"
#include "json.h"
#include "sorted_rows.h"

/* Why `tp_packets_take` returned: there is no whole packet; Python must read the next one; the clock of the
 * next one must be stated; or the rows are full. */
enum { MORE, FOREIGN, CLOCK, FULL };

/* How times of a clock are put on that of the trace: perfetto_sequences.py. Those from `from` on and before
 * `until` are `shift` more there. */
typedef struct {
    int64_t id, unit, is_incremental, last, from, until, shift;
} tp_clock;

#define CLOCKS 2
#define NO_CLOCK (-1)

/* What Python knows of a sequence, and what changes here: perfetto_sequences.py. */
typedef struct {
    int64_t is_valid, has_track, has_thread, is_negative; /* the thread */
    int64_t has_counter;
    uint64_t track, thread, counter; /* the counter is that of values in slices, where there is one */
    int64_t clock, last_ns, names_bytes, snapshots;
    tp_clock clocks[CLOCKS];
} tp_stated;

typedef struct {
    uint8_t *text;
    int64_t size;
} tp_name;

typedef struct {
    tp_stated stated;
    tp_table numbers; /* of names, by their tables and numbers in the trace */
    tp_name *names;
    int64_t names_room;
} tp_sequence;

/* The last event of a track; and its factor where it is a simple counter, as it was when so many descriptors
 * of tracks were read. */
typedef struct {
    int64_t last_ns, rank, was_whole, factor, descriptors;
} tp_track;

/* A track by its number. Those without one in the trace have numbers below 0. */
typedef struct {
    uint64_t value;
    int64_t is_negative;
} tp_uuid;

typedef struct {
    int64_t last_ns, names_bytes, snapshots, descriptors; /* how many of these were read */
} tp_packets_shared;

typedef struct {
    tp_packets_shared shared;
    uint64_t key;
    tp_table ids, uuids;
    tp_sequence **sequences;
    tp_track *tracks;
    int64_t sequences_room, tracks_room;
    tp_buffer name, category, args, first;
    int64_t values, bytes; /* of the event's arguments */
    int no_memory;
} tp_packets;

/* Names ------------------------------------------------------------------------------------------------------- */

#define NAMES_BYTES_MAX (8 << 20)
#define NAME_BYTES 300

static void forget_names(tp_sequence *s)
{
    for (int64_t i = 0; s->numbers.slots && i < s->numbers.strings.count; i++)
        free(s->names[i].text);
    tp_table_free(&s->numbers);
    free(s->names);
    memset(&s->numbers, 0, sizeof s->numbers);
    s->names = 0;
    s->names_room = 0;
}

TP_EXPORT void tp_packets_free(tp_packets *p)
{
    if (!p)
        return;
    for (int64_t i = 0; p->sequences && i < p->ids.strings.count; i++) {
        forget_names(p->sequences[i]);
        free(p->sequences[i]);
    }
    tp_table_free(&p->ids);
    tp_table_free(&p->uuids);
    free(p->sequences);
    free(p->tracks);
    free(p->name.data);
    free(p->category.data);
    free(p->args.data);
    free(p->first.data);
    free(p);
}

TP_EXPORT tp_packets *tp_packets_new(uint64_t key)
{
    tp_packets *p = calloc(1, sizeof *p);
    if (!p)
        return 0;
    p->key = key;
    if (tp_table_init(&p->ids, key) || tp_table_init(&p->uuids, key)) {
        tp_packets_free(p);
        return 0;
    }
    return p;
}

/* What Python and this file both change, for all sequences. */
TP_EXPORT tp_packets_shared *tp_packets_state(tp_packets *p)
{
    return &p->shared;
}

static int64_t number_in(const tp_table *t, const void *key, int64_t size)
{
    return tp_table_find(t, key, size, tp_hash(key, size, t->key));
}

static int64_t number_of(tp_table *t, const void *key, int64_t size)
{
    int64_t number = number_in(t, key, size);
    return number >= 0 ? number : tp_table_add(t, key, size, tp_hash(key, size, t->key));
}

/* Adds a sequence. Returns what Python states of it; NULL where there is no memory. */
TP_EXPORT tp_stated *tp_packets_sequence(tp_packets *p, uint64_t id)
{
    tp_sequence *s = calloc(1, sizeof *s);
    if (!s || TP_GROW(p->sequences, p->sequences_room, p->ids.strings.count)) {
        free(s);
        return 0;
    }
    p->sequences[p->ids.strings.count] = s;
    if (tp_table_add(&p->ids, (uint8_t *)&id, sizeof id, tp_hash((uint8_t *)&id, sizeof id, p->ids.key)) < 0) {
        free(s);
        return 0;
    }
    for (int i = 0; i < CLOCKS; i++)
        s->stated.clocks[i].id = NO_CLOCK;
    return &s->stated;
}

/* The name of a table with a number; NULL where there is none. */
static const tp_name *name_of(const tp_sequence *s, uint64_t table, uint64_t iid)
{
    uint64_t key[2] = {table, iid};
    int64_t number = s->numbers.slots ? number_in(&s->numbers, key, sizeof key) : -1;
    return number < 0 ? 0 : &s->names[number];
}

TP_EXPORT int64_t tp_packets_name(const tp_stated *of, uint64_t table, uint64_t iid, const uint8_t **text)
{
    const tp_name *name = name_of((const tp_sequence *)of, table, iid);
    if (!name)
        return -1;
    *text = name->text;
    return name->size;
}

/* Keeps a name. Returns 0 or TP_NO_MEMORY. */
TP_EXPORT int tp_packets_keep(tp_packets *p, tp_stated *of, uint64_t table, uint64_t iid, const uint8_t *text,
                              int64_t size)
{
    tp_sequence *s = (tp_sequence *)of;
    tp_name *name = (tp_name *)name_of(s, table, iid);
    uint8_t *kept = malloc((size_t)size + 1);
    if (!kept)
        return TP_NO_MEMORY;
    if (size)
        memcpy(kept, text, (size_t)size);
    int64_t more = size + NAME_BYTES;
    if (name) {
        more -= name->size + NAME_BYTES;
        free(name->text);
    } else {
        uint64_t key[2] = {table, iid};
        if ((!s->numbers.slots && tp_table_init_small(&s->numbers, p->key)) ||
            TP_GROW(s->names, s->names_room, s->numbers.strings.count) || number_of(&s->numbers, key, sizeof key) < 0) {
            free(kept);
            return TP_NO_MEMORY;
        }
        name = &s->names[s->numbers.strings.count - 1];
    }
    *name = (tp_name){kept, size};
    of->names_bytes += more;
    p->shared.names_bytes += more;
    return 0;
}

/* Forgets the names of a sequence. */
TP_EXPORT void tp_packets_forget(tp_packets *p, tp_stated *of)
{
    p->shared.names_bytes -= of->names_bytes;
    of->names_bytes = 0;
    forget_names((tp_sequence *)of);
}

/* Tracks ------------------------------------------------------------------------------------------------------ */

/* A track that has events, -2 where it is not known yet. */
static int64_t track_of(const tp_packets *p, tp_uuid uuid)
{
    return number_in(&p->uuids, &uuid, sizeof uuid);
}

static int64_t add_track(tp_packets *p, tp_uuid uuid)
{
    int64_t number = track_of(p, uuid);
    if (number >= 0)
        return number;
    if (TP_GROW(p->tracks, p->tracks_room, p->uuids.strings.count))
        return TP_NO_MEMORY;
    number = number_of(&p->uuids, &uuid, sizeof uuid);
    if (number >= 0)
        p->tracks[number] = (tp_track){.last_ns = -1};
    return number;
}

static int64_t next_rank(tp_track *track, int64_t ts, int is_whole)
{
    track->rank = track->last_ns != ts ? 0 : track->rank + (track->was_whole != is_whole);
    track->last_ns = ts;
    track->was_whole = is_whole;
    return track->rank;
}

/* The rank of an event of a track, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_packets_rank(tp_packets *p, uint64_t uuid, int is_negative, int64_t ts, int is_whole)
{
    int64_t number = add_track(p, (tp_uuid){uuid, is_negative});
    return number < 0 ? number : next_rank(&p->tracks[number], ts, is_whole);
}

/* Sets the factor of a simple counter. */
TP_EXPORT int tp_packets_counter(tp_packets *p, uint64_t uuid, int is_negative, int64_t factor)
{
    int64_t number = add_track(p, (tp_uuid){uuid, is_negative});
    if (number >= 0) {
        p->tracks[number].factor = factor;
        p->tracks[number].descriptors = p->shared.descriptors;
    }
    return number < 0 ? TP_NO_MEMORY : 0;
}

/* Messages ---------------------------------------------------------------------------------------------------- */

enum { VARINT, FIXED64, BYTES, FIXED32 = 5 };
#define TAG(field, type) ((field) << 3 | (type))

typedef struct {
    const uint8_t *at;
    int64_t size;
} tp_span;

typedef struct {
    uint64_t tag, number; /* of a varint, or eight bytes */
    tp_span data;
} tp_field;

static const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint64_t *value)
{
    uint64_t made = 0;
    for (int shift = 0; at < end && shift < 70; shift += 7) {
        uint8_t byte = *at++;
        made |= (uint64_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            *value = made;
            return at;
        }
    }
    return 0;
}

/* Reads a field of a message from `*left`. Returns whether it is whole and has a tag. */
static int read_field(tp_span *left, tp_field *field)
{
    const uint8_t *end = left->at + left->size, *at = read_varint(left->at, end, &field->tag);
    if (!at || field->tag < 8)
        return 0;
    uint64_t size = 0;
    switch (field->tag & 7) {
    case VARINT:
        at = read_varint(at, end, &field->number);
        break;
    case BYTES:
        at = read_varint(at, end, &size);
        break;
    case FIXED64:
        size = 8;
        break;
    default: /* no field that is read here has four bytes */
        return 0;
    }
    if (!at || size > (uint64_t)(end - at))
        return 0;
    if (size == 8 && (field->tag & 7) == FIXED64)
        memcpy(&field->number, at, 8);
    field->data = (tp_span){at, (int64_t)size};
    at += size;
    *left = (tp_span){at, end - at};
    return 1;
}

/* JSON -------------------------------------------------------------------------------------------------------- */

static int put(tp_packets *p, tp_buffer *to, const void *from, int64_t size)
{
    if (tp_append(to, from, size))
        p->no_memory = 1;
    return !p->no_memory;
}

/* Appends a text without its quotes, as orjson writes it. Returns 0 where it is not UTF-8. */
static int put_inside(tp_packets *p, tp_buffer *to, tp_span text)
{
    static const char escapes[] = "btn\0fr", digits[] = "0123456789abcdef";
    if (tp_reserve(to, 6 * text.size)) {
        p->no_memory = 1;
        return 0;
    }
    uint8_t *made = to->data + to->size;
    for (const uint8_t *at = text.at, *end = at + text.size; at < end;) {
        uint8_t c = *at;
        if (c >= 0x80) {
            const uint8_t *after = tp_utf8(at, end);
            if (!after)
                return 0;
            while (at < after)
                *made++ = *at++;
            continue;
        }
        at++;
        if (c >= 0x20 && c != '"' && c != '\\') {
            *made++ = c;
            continue;
        }
        *made++ = '\\';
        if (c >= 0x20) {
            *made++ = c;
        } else if (c >= 8 && c < 14 && c != 11) {
            *made++ = (uint8_t)escapes[c - 8];
        } else {
            memcpy(made, "u00", 3);
            made[3] = (uint8_t)digits[c >> 4];
            made[4] = (uint8_t)digits[c & 15];
            made += 5;
        }
    }
    to->size = made - to->data;
    return 1;
}

static int put_text(tp_packets *p, tp_buffer *to, tp_span text)
{
    return put(p, to, "\"", 1) && put_inside(p, to, text) && put(p, to, "\"", 1);
}

/* A decimal, with a fraction, that is this double and no other of so few digits. */
static int put_double(tp_packets *p, double value)
{
    static const double tens[] = {1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6};
    uint8_t text[64], *end = text;
    double size = fabs(value);
    if (!(size < 1e9) || (size < 1e-4 && (value != 0 || signbit(value)))) /* Python writes those with an exponent */
        return 0;
    for (int digits = 0; digits < 7; digits++) {
        uint64_t whole = (uint64_t)(size * tens[digits] + 0.5);
        if ((double)whole / tens[digits] != size)
            continue;
        if (value < 0)
            *end++ = '-';
        uint64_t unit = (uint64_t)tens[digits], rest = whole % unit;
        end = tp_decimal(end, whole / unit);
        *end++ = '.';
        for (int i = digits; i > 1 && rest < (uint64_t)tens[i - 1]; i--)
            *end++ = '0';
        return put(p, &p->args, text, tp_decimal(end, rest) - text);
    }
    int exponent;
    if (frexp(size, &exponent) == 0.5) /* the nearest doubles are not as far on both sides */
        return 0;
    for (int digits = 15; digits < 18; digits++) {
        int length = snprintf((char *)text, sizeof text, "%.*g", digits, value);
        if (digits == 17 || strtod((char *)text, 0) == value) {
            uint8_t *point = text;
            while (*point == '-' || (uint8_t)(*point - '0') < 10)
                point++;
            if (*point != '.') /* a locale with another sign, or an integer */
                return 0;
            return put(p, &p->args, text, length);
        }
    }
    return 0;
}

/* Arguments --------------------------------------------------------------------------------------------------- */

enum { CATEGORIES = 1, EVENT_NAMES = 2, ARG_NAMES = 3, STRINGS = 29 };
#define VALUES_MAX (1 << 12)
#define TEXT_BYTES_MAX (1 << 20)
#define NAME_MAX (1 << 12)
#define KEYS_MAX 64
#define DEPTH_MAX 8

/* The keys of an object, with quotes, as places and sizes among the arguments. */
typedef struct {
    int64_t at[KEYS_MAX], size[KEYS_MAX];
    int count;
} tp_keys;

static int fits(tp_packets *p, int64_t size)
{
    p->bytes += size;
    return ++p->values <= VALUES_MAX && p->bytes <= TEXT_BYTES_MAX;
}

/* Appends a key. Returns 0 where the object has it already. */
static int put_key(tp_packets *p, tp_keys *keys, tp_span name)
{
    if (keys->count == KEYS_MAX || (keys->count && !put(p, &p->args, ",", 1)))
        return 0;
    int64_t at = p->args.size;
    if (!put_text(p, &p->args, name))
        return 0;
    int64_t size = p->args.size - at;
    for (int i = 0; i < keys->count; i++)
        if (keys->size[i] == size && !memcmp(p->args.data + keys->at[i], p->args.data + at, (size_t)size))
            return 0;
    keys->at[keys->count] = at;
    keys->size[keys->count++] = size;
    return put(p, &p->args, ":", 1);
}

enum { ARG_IID = TAG(1, VARINT), BOOL = TAG(2, VARINT), UINT = TAG(3, VARINT), INT = TAG(4, VARINT),
       DOUBLE = TAG(5, FIXED64), STRING = TAG(6, BYTES), POINTER = TAG(7, VARINT), ARG_NAME = TAG(10, BYTES),
       ENTRIES = TAG(11, BYTES), ELEMENTS = TAG(12, BYTES), STRING_IID = TAG(17, VARINT) };

static int put_annotation(tp_packets *p, const tp_sequence *s, tp_span data, tp_keys *keys, int depth);

/* Appends the elements of an array, or the entries of an object. */
static int put_many(tp_packets *p, const tp_sequence *s, tp_span data, uint64_t tag, int depth)
{
    tp_field field;
    tp_keys keys = {.count = 0};
    int count = 0, is_object = tag == ENTRIES;
    if (depth > DEPTH_MAX || !put(p, &p->args, is_object ? "{" : "[", 1))
        return 0;
    while (data.size) {
        if (!read_field(&data, &field))
            return 0;
        if (field.tag != tag)
            continue;
        if (!is_object && count++ && !put(p, &p->args, ",", 1))
            return 0;
        if (!put_annotation(p, s, field.data, is_object ? &keys : 0, depth))
            return 0;
    }
    return put(p, &p->args, is_object ? "}" : "]", 1);
}

static int put_plain(tp_packets *p, const tp_sequence *s, tp_field field)
{
    uint8_t text[24];
    const tp_name *name;
    switch (field.tag) {
    case INT:
        return put(p, &p->args, text, tp_signed_decimal(text, (int64_t)field.number) - text);
    case UINT:
        return put(p, &p->args, text, tp_decimal(text, field.number) - text);
    case BOOL:
        return put(p, &p->args, field.number ? "true" : "false", field.number ? 4 : 5);
    case POINTER:
        return put(p, &p->args, text, snprintf((char *)text, sizeof text, "\"0x%llx\"", (unsigned long long)field.number));
    case STRING:
        return put_text(p, &p->args, field.data);
    case STRING_IID:
        name = name_of(s, STRINGS, field.number);
        return name && fits(p, name->size) && put_text(p, &p->args, (tp_span){name->text, name->size});
    default: {
        double value;
        memcpy(&value, &field.number, sizeof value);
        return put_double(p, value);
    }
    }
}

/* Appends a DebugAnnotation with one value: with its key where it is of an object with these keys. Returns
 * whether it is of that form. */
static int put_annotation(tp_packets *p, const tp_sequence *s, tp_span data, tp_keys *keys, int depth)
{
    tp_field field, value = {0};
    tp_span name = {0}, left = data;
    if (!fits(p, data.size))
        return 0;
    while (left.size) {
        if (!read_field(&left, &field))
            return 0;
        switch (field.tag) {
        case ARG_IID:
        case ARG_NAME: {
            if (name.at)
                return 0;
            name = field.data;
            const tp_name *kept = field.tag == ARG_IID ? name_of(s, ARG_NAMES, field.number) : 0;
            if (kept)
                name = (tp_span){kept->text, kept->size};
            if (field.tag == ARG_IID && (!kept || !kept->size || !fits(p, kept->size)))
                return 0;
            break;
        }
        case ENTRIES:
        case ELEMENTS:
            if (value.tag && value.tag != field.tag)
                return 0;
            value = field;
            break;
        case BOOL:
        case UINT:
        case INT:
        case DOUBLE:
        case STRING:
        case POINTER:
        case STRING_IID:
            if (value.tag)
                return 0;
            value = field;
            break;
        default:
            return 0;
        }
    }
    if (!value.tag || (keys && (!name.at || !put_key(p, keys, name))))
        return 0;
    int is_many = value.tag == ENTRIES || value.tag == ELEMENTS;
    return is_many ? put_many(p, s, data, value.tag, depth + 1) : put_plain(p, s, value);
}

/* Events ------------------------------------------------------------------------------------------------------ */

enum { TYPE = TAG(9, VARINT), TRACK = TAG(11, VARINT), NAME_IID = TAG(10, VARINT), NAME = TAG(23, BYTES),
       CATEGORY_IIDS = TAG(3, VARINT), CATEGORY = TAG(22, BYTES), ANNOTATION = TAG(4, BYTES), VALUE = TAG(30, VARINT),
       MORE_VALUE = TAG(12, VARINT), MORE_COUNTER = TAG(31, VARINT), FLOW = TAG(47, FIXED64), LAST_FLOW = TAG(48, FIXED64) };
enum { BEGIN = 1, END, INSTANT, COUNTER };
#define FLOWS_MAX 8
#define TIME_LIMIT_NS (((int64_t)1 << 62) - 1)

typedef struct {
    int type, has_track, has_name, has_value, has_more_value, has_counter, has_args, categories, flows_count, last_count;
    uint64_t track, counter, category_tag;
    int64_t flows[FLOWS_MAX], last[FLOWS_MAX], value; /* of the event, or of a further counter */
} tp_event;

static int add_category(tp_packets *p, tp_event *e, const tp_sequence *s, tp_field field)
{
    tp_span text = field.data;
    if (e->category_tag && e->category_tag != field.tag)
        return 0;
    e->category_tag = field.tag;
    if (field.tag == CATEGORY_IIDS) {
        const tp_name *name = name_of(s, CATEGORIES, field.number);
        if (!name)
            return 0;
        text = (tp_span){name->text, name->size};
    }
    if (e->categories++ && !put(p, &p->category, ",", 1))
        return 0;
    return e->categories <= FLOWS_MAX && p->category.size + text.size <= NAME_MAX && put_inside(p, &p->category, text);
}

/* The number of a flow by its id. */
static int64_t flow_of(uint64_t id)
{
    uint8_t block[TP_FLOW_BYTES_MAX] = "[\"flow\", ";
    if (id <= TP_FLOW_LIMIT)
        return (int64_t)id;
    uint8_t *end = tp_decimal(block + strlen((char *)block), id);
    *end++ = ']';
    return tp_flow_digest(block, end - block);
}

static int set_name(tp_packets *p, tp_event *e, tp_span name)
{
    return !e->has_name++ && name.size <= NAME_MAX && put_inside(p, &p->name, name);
}

/* Reads the fields of an event. Returns whether it has the usual form. */
static int read_event(tp_packets *p, tp_event *e, const tp_sequence *s, tp_span data)
{
    tp_field field;
    tp_keys keys = {.count = 0};
    const tp_name *name;
    p->name.size = p->category.size = p->args.size = p->values = p->bytes = 0;
    while (data.size) {
        if (!read_field(&data, &field))
            return 0;
        switch (field.tag) {
        case TYPE:
            if (e->type || !field.number || field.number > COUNTER)
                return 0;
            e->type = (int)field.number;
            break;
        case TRACK:
            if (e->has_track++)
                return 0;
            e->track = field.number;
            break;
        case NAME:
            if (!set_name(p, e, field.data))
                return 0;
            break;
        case NAME_IID:
            name = name_of(s, EVENT_NAMES, field.number);
            if (!name || !set_name(p, e, (tp_span){name->text, name->size}))
                return 0;
            break;
        case CATEGORY:
        case CATEGORY_IIDS:
            if (!add_category(p, e, s, field))
                return 0;
            break;
        case ANNOTATION:
            e->has_args = 1;
            if ((!keys.count && !put(p, &p->args, "{", 1)) || !put_annotation(p, s, field.data, &keys, 0))
                return 0;
            break;
        case VALUE:
        case MORE_VALUE:
            if (e->has_value || e->has_more_value)
                return 0;
            *(field.tag == VALUE ? &e->has_value : &e->has_more_value) = 1;
            e->value = (int64_t)field.number;
            break;
        case MORE_COUNTER:
            if (e->has_counter++)
                return 0;
            e->counter = field.number;
            break;
        case FLOW:
        case LAST_FLOW: {
            int *count = field.tag == FLOW ? &e->flows_count : &e->last_count;
            if (*count == FLOWS_MAX)
                return 0;
            (field.tag == FLOW ? e->flows : e->last)[(*count)++] = flow_of(field.number);
            break;
        }
        default:
            return 0;
        }
    }
    for (int i = 0; e->type == END && i < keys.count; i++)
        if (keys.size[i] == sizeof "\"callstack\"" - 1 && !memcmp(p->args.data + keys.at[i], "\"callstack\"", sizeof "\"callstack\"" - 1))
            return 0; /* it has another name there */
    if (e->type == COUNTER)
        return e->has_value && !e->has_name && !e->categories && !e->has_args && !e->flows_count && !e->last_count;
    return e->type && !e->has_value && (!keys.count || put(p, &p->args, "}", 1));
}

/* Adds a row whose first text is [phase, track, name, category]. */
static void add_row(tp_packets *p, tp_sorted *sorted, tp_sorted_row row, const char *phase, tp_uuid track, int is_named,
                    int has_category, int has_args)
{
    uint8_t digits[24];
    tp_buffer *first = &p->first;
    first->size = 0;
    put(p, first, "[\"", 2);
    put(p, first, phase, (int64_t)strlen(phase));
    put(p, first, "\",", 2);
    uint8_t *end = track.is_negative ? tp_signed_decimal(digits, (int64_t)track.value) : tp_decimal(digits, track.value);
    put(p, first, digits, end - digits);
    put(p, first, ",\"", 2);
    put(p, first, p->name.data, is_named ? p->name.size : 0);
    put(p, first, "\",\"", 3);
    put(p, first, p->category.data, has_category ? p->category.size : 0);
    put(p, first, "\"]", 2);
    row.first = (int32_t)first->size;
    tp_buffer *args = p->no_memory ? 0 : tp_sorted_begin(sorted, first->data, first->size);
    if (!args) {
        p->no_memory = 1;
    } else if (has_args && !put(p, args, p->args.data, p->args.size)) {
        tp_sorted_leave(sorted);
    } else if (tp_sorted_end(sorted, row)) {
        p->no_memory = 1;
    }
}

/* Multiplies the value of a simple counter. Returns 0 where it is none, or the value has over 64 bits. */
static int counted(const tp_packets *p, tp_uuid uuid, int64_t *value)
{
    int64_t number = track_of(p, uuid);
    const tp_track *track = number < 0 ? 0 : &p->tracks[number];
    return track && track->descriptors == p->shared.descriptors && track->factor &&
           !__builtin_mul_overflow(*value, track->factor, value) && *value != INT64_MIN;
}

static void add_value(tp_packets *p, tp_sorted *sorted, int64_t ts, tp_uuid uuid, int64_t value)
{
    uint8_t digits[24];
    p->args.size = 0;
    put(p, &p->args, "{\"value\":", 9);
    put(p, &p->args, digits, tp_signed_decimal(digits, value) - digits);
    put(p, &p->args, "}", 1);
    add_row(p, sorted, (tp_sorted_row){.ts = ts}, "C", uuid, 0, 0, 1);
}

/* Adds the rows of an event at a time. Returns whether Python need not do it. */
static int add_event(tp_packets *p, tp_sorted *sorted, const tp_event *e, const tp_stated *of, int64_t ts)
{
    static const char *phases[] = {"", "B", "E", "I"};
    tp_uuid uuid = {0}, counter = {e->has_counter ? e->counter : of->counter, 0};
    int64_t value = e->value;
    if (e->has_track)
        uuid.value = e->track;
    else if (of->has_track)
        uuid.value = of->track;
    else if (of->has_thread)
        uuid = (tp_uuid){of->thread, of->is_negative};
    if (ts < 0 || ts > TIME_LIMIT_NS)
        return 0;
    if (e->type == COUNTER) {
        if (!counted(p, uuid, &value))
            return 0;
        add_value(p, sorted, ts, uuid, value);
        return 1;
    }
    int64_t number = track_of(p, uuid);
    if (number < 0 || (e->has_more_value && ((!e->has_counter && !of->has_counter) || !counted(p, counter, &value))))
        return 0;
    tp_track *track = &p->tracks[number];
    tp_sorted_row row = {.ts = ts};
    row.rank = (int32_t)next_rank(track, ts, 0);
    const char *phase = phases[e->type];
    int flow = 0, last = 0;
    if (e->type == INSTANT && e->flows_count) {
        phase = "Is";
        row.number = e->flows[flow++];
    } else if (e->type == INSTANT && e->last_count) {
        phase = "Isf";
        row.number = e->last[last++];
    }
    add_row(p, sorted, row, phase, uuid, 1, 1, 1);
    for (; flow < e->flows_count; flow++) {
        row.number = e->flows[flow];
        add_row(p, sorted, row, "s", uuid, 1, 0, 0);
    }
    for (; last < e->last_count; last++) {
        row.number = e->last[last];
        add_row(p, sorted, row, "f", uuid, 1, 0, 0);
    }
    if (e->has_more_value)
        add_value(p, sorted, ts, counter, value);
    return 1;
}

/* Packets ----------------------------------------------------------------------------------------------------- */

enum { P_TIME = TAG(8, VARINT), P_CLOCK = TAG(58, VARINT), P_SEQUENCE = TAG(10, VARINT), P_FLAGS = TAG(13, VARINT),
       P_EVENT = TAG(11, BYTES), P_INTERNED = TAG(12, BYTES), P_UID = TAG(3, VARINT), P_PID = TAG(79, VARINT) };
#define NEEDS_STATE 2
#define PACKET_BYTES_MAX (1 << 20)
#define PACKET_HEAD_BYTES 4 /* a tag, and three bytes of a length */

/* Reads an InternedData, and keeps its names where `is_kept`. Returns their bytes, below 0 where Python must
 * read it. */
static int64_t read_names(tp_packets *p, tp_sequence *s, tp_span data, int is_kept)
{
    tp_field table, field;
    int64_t bytes = 0;
    while (data.size) {
        uint64_t iid = 0;
        tp_span text = {0};
        int has_iid = 0;
        if (!read_field(&data, &table) || (table.tag & 7) != BYTES)
            return -1;
        uint64_t number = table.tag >> 3;
        if (number != CATEGORIES && number != EVENT_NAMES && number != ARG_NAMES && number != STRINGS)
            return -1;
        while (table.data.size) {
            if (!read_field(&table.data, &field))
                return -1;
            if (field.tag == TAG(1, VARINT) && !has_iid++)
                iid = field.number;
            else if (field.tag == TAG(2, BYTES) && !text.at)
                text = field.data;
            else
                return -1;
        }
        bytes += text.size + NAME_BYTES;
        if (is_kept && tp_packets_keep(p, &s->stated, number, iid, text.at, text.size)) {
            p->no_memory = 1;
            return -1;
        }
    }
    return bytes;
}

/* Puts a time on the clock of the trace. Returns 0, FOREIGN, or CLOCK where `*clock` must be stated. */
static int place(const tp_stated *of, int64_t id, int64_t value, tp_clock **clock, int64_t *ns, int64_t *placed)
{
    *clock = 0;
    *ns = *placed = value;
    if (!id)
        return 0;
    for (int i = 0; i < CLOCKS && !*clock; i++)
        if (of->clocks[i].id == id)
            *clock = (tp_clock *)&of->clocks[i];
    if (!*clock)
        return CLOCK;
    if (__builtin_mul_overflow(value, (*clock)->unit, ns) ||
        ((*clock)->is_incremental && __builtin_add_overflow(*ns, (*clock)->last, ns)) ||
        __builtin_add_overflow(*ns, (*clock)->shift, placed))
        return FOREIGN;
    return *ns >= (*clock)->from && *ns < (*clock)->until ? 0 : CLOCK;
}

/* Reads one packet. Returns 0, FOREIGN or CLOCK. `asked` gets the sequence, the clock and the time for which
 * the clock must be stated. */
static int take(tp_packets *p, tp_sorted *sorted, tp_span data, int64_t *asked)
{
    tp_field field;
    tp_span event = {0}, names = {0};
    uint64_t time = 0, id = 0, clock_id = 0, flags = 0;
    int has_time = 0, has_clock = 0, has_id = 0, has_flags = 0;
    while (data.size) {
        if (!read_field(&data, &field))
            return FOREIGN;
        tp_span *span = field.tag == P_EVENT ? &event : field.tag == P_INTERNED ? &names : 0;
        int *has = field.tag == P_TIME       ? &has_time
                   : field.tag == P_SEQUENCE ? &has_id
                   : field.tag == P_CLOCK    ? &has_clock
                   : field.tag == P_FLAGS    ? &has_flags
                                             : 0;
        if (span && !span->at) {
            *span = field.data;
        } else if (has && !*has) {
            *has = 1;
            *(field.tag == P_TIME ? &time : field.tag == P_SEQUENCE ? &id : field.tag == P_CLOCK ? &clock_id : &flags) = field.number;
        } else if (field.tag != P_UID && field.tag != P_PID) {
            return FOREIGN;
        }
    }
    int64_t number = number_in(&p->ids, &id, sizeof id), ns, placed;
    if (number < 0 || !event.at || !has_time || flags & ~(uint64_t)NEEDS_STATE)
        return FOREIGN;
    tp_sequence *s = p->sequences[number];
    tp_stated *of = &s->stated;
    tp_clock *clock;
    if (flags && !of->is_valid)
        return FOREIGN;
    if (of->snapshots != p->shared.snapshots) {
        for (int i = 0; i < CLOCKS; i++)
            of->clocks[i].until = INT64_MIN; /* no time is before it */
        of->snapshots = p->shared.snapshots;
    }
    if (!has_clock)
        clock_id = (uint64_t)of->clock;
    if (clock_id > INT32_MAX)
        return FOREIGN;
    int why = place(of, (int64_t)clock_id, (int64_t)time, &clock, &ns, &placed);
    if (why) {
        asked[0] = (int64_t)id;
        asked[1] = (int64_t)clock_id;
        asked[2] = (int64_t)time;
        return why;
    }
    if (names.at) {
        int64_t bytes = read_names(p, s, names, 0);
        /* Where the event is left to Python, these are kept again. */
        if (bytes < 0 || p->shared.names_bytes + 2 * bytes > NAMES_BYTES_MAX || read_names(p, s, names, 1) < 0)
            return FOREIGN;
    }
    tp_event e = {0};
    if (!read_event(p, &e, s, event) || p->no_memory || !add_event(p, sorted, &e, of, placed))
        return FOREIGN;
    if (clock && clock->is_incremental)
        clock->last = ns;
    of->last_ns = placed;
    if (placed > p->shared.last_ns)
        p->shared.last_ns = placed;
    return 0;
}

/* Reads the packets from data[at] on. `asked[0]` is why it returned, and the others are those of `take`. Returns
 * the place of the next packet, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_packets_take(tp_packets *p, tp_sorted *sorted, const uint8_t *data, int64_t size, int64_t at,
                                  int64_t *asked)
{
    const uint8_t *end = data + size;
    p->no_memory = 0;
    for (;;) {
        uint64_t bytes;
        const uint8_t *start = 0;
        if (size - at >= PACKET_HEAD_BYTES && data[at] == TAG(1, BYTES))
            start = read_varint(data + at + 1, data + at + PACKET_HEAD_BYTES, &bytes);
        if (!start || bytes > PACKET_BYTES_MAX || (int64_t)bytes > end - start)
            asked[0] = MORE;
        else if (tp_sorted_is_full(sorted))
            asked[0] = FULL;
        else if (!(asked[0] = take(p, sorted, (tp_span){start, (int64_t)bytes}, asked + 1)) && !p->no_memory) {
            at = start + bytes - data;
            continue;
        }
        return p->no_memory ? TP_NO_MEMORY : at;
    }
}
