/* SPDX-License-Identifier: MIT */
/* Makes rows of events of the sorted rows of a Perfetto trace, as `Ordered` of `perfetto_events.py` does.
 *
 * The first text of a row is its key, which Python numbers and describes. An event is a time, a length, a number,
 * a record that depends on the key alone, and the text of its arguments. On a stream of a GPU, a record also
 * depends on the arguments `kernel`, `grid` and `block`: then the key is another one, which Python describes too.
 * Rows of records are left to Python.
 */
#include <stdint.h>
#include <string.h>

#include "decimal.h"
#include "flow_number.h"
#include "tables.h"

/* Why `tp_order_take` returned: all rows were taken; the key of the next row, the key of the arguments of the next
 * row, or a record of its key are not known; or Python must take the row. */
enum { ALL, NEW_KEY, NEW_VARIANT, NEW_RECORD, FOREIGN };

enum { BEGIN, END, INSTANT, COUNTER, WHOLE, FLOW, NEXT_FLOW, LAST_FLOW, INSTANT_FLOW, INSTANT_NEXT, INSTANT_LAST, RECORD };
enum { IS_CALL = 1, IS_STREAM = 2, IS_SUMMARY = 4, MAY_LAUNCH = 8, HAS_GRID = 16, HAS_BLOCK = 32, IS_VARIANT = 64 };

/* The records of a key: of a slice by whether it is a call and whether it has a launch, and those of its end by
 * whether it is a call; or those of an instant and of the three kinds of ends of a flow. */
#define RECORDS 6
#define OF_ENDS 4
#define NO_RECORD (-1)

typedef struct {
    int32_t phase, flags, track, name, category; /* a name 0 is empty */
    int32_t records[RECORDS];
    int64_t ahead, ahead_size; /* the text of the argument that comes first */
    int64_t until;             /* from then on, it is another key */
} tp_order_key;

/* An open slice, and the one below it on its track. One that is free is a call below 0. */
typedef struct {
    int32_t below, name, category, is_call, end_record;
} tp_open;

#define NOTHING (-1)

typedef struct {
    int64_t begun_ns, deeper, count;
    int32_t top, is_begun;
} tp_order_track;

/* A flow, by the hash of its number, in the order of their last use. */
typedef struct {
    int64_t number, times;
    int32_t is_open, next, older, newer;
} tp_flow;

/* What is counted: begins and ends that are left out, and flows without a begin and without a slice. */
enum { NOT_OPENED, NOT_CLOSED, NOT_BEGUN, NOT_PLACED, COUNTED };

#define LOOKED_AT_MAX 512
#define FLOWS_MAX (1 << 16)
#define BUCKETS (1 << 14)

/* Rows to take, and rows of events, as columns. */
typedef struct {
    const int64_t *ts, *dur, *number, *second_end;
    const int32_t *first;
    int32_t *key; /* of each first text */
} tp_order_rows;

typedef struct {
    int64_t *ts, *dur, *number, *second_end;
    int32_t *record;
} tp_order_made;

typedef struct {
    uint64_t key;
    tp_order_key *keys;
    int64_t keys_count, keys_room;
    tp_buffer texts, seconds, part, rest;
    tp_table variants;
    int32_t *variant_keys;
    int64_t variants_room;
    tp_order_track *tracks;
    int64_t tracks_count, tracks_room;
    tp_open *open;
    int64_t open_count, open_room, opened, open_max;
    int32_t free_open;
    tp_flow *flows;
    int64_t flows_count, flows_room;
    int32_t buckets[BUCKETS], oldest, newest;
    int64_t made, counts[COUNTED], count_order[COUNTED]; /* 0: not counted yet */
    int no_memory;
} tp_order;

static void note(tp_order *o, int what)
{
    int64_t last = 0;
    for (int i = 0; i < COUNTED; i++)
        last = o->count_order[i] > last ? o->count_order[i] : last;
    if (!o->counts[what]++)
        o->count_order[what] = last + 1;
}

TP_EXPORT void tp_order_free(tp_order *o)
{
    if (!o)
        return;
    tp_table_free(&o->variants);
    free(o->keys);
    free(o->texts.data);
    free(o->seconds.data);
    free(o->part.data);
    free(o->rest.data);
    free(o->variant_keys);
    free(o->tracks);
    free(o->open);
    free(o->flows);
    free(o);
}

/* At most `open_max` slices may be open at a time. */
TP_EXPORT tp_order *tp_order_new(uint64_t key, int64_t open_max)
{
    tp_order *o = calloc(1, sizeof *o);
    if (o && tp_table_init(&o->variants, key)) {
        tp_order_free(o);
        return 0;
    }
    if (o) {
        o->key = key;
        o->open_max = open_max;
        o->free_open = o->oldest = o->newest = NOTHING;
        for (int i = 0; i < BUCKETS; i++)
            o->buckets[i] = NOTHING;
    }
    return o;
}

/* Keys -------------------------------------------------------------------------------------------------------- */

/* Adds a key; `ahead` is an object with the argument that comes first, or empty. Returns its number, or
 * TP_NO_MEMORY. */
TP_EXPORT int64_t tp_order_add_key(tp_order *o, int phase, int flags, int track, int name, int category,
                                   const uint8_t *ahead, int64_t ahead_size, int64_t until)
{
    if (TP_GROW(o->keys, o->keys_room, o->keys_count))
        return TP_NO_MEMORY;
    for (; o->tracks_count <= track; o->tracks_count++) {
        if (TP_GROW(o->tracks, o->tracks_room, o->tracks_count))
            return TP_NO_MEMORY;
        o->tracks[o->tracks_count] = (tp_order_track){.top = NOTHING};
    }
    tp_order_key made = {phase, flags, track, name, category, {0}, o->texts.size, ahead_size, until};
    for (int i = 0; i < RECORDS; i++)
        made.records[i] = NO_RECORD;
    if (tp_append(&o->texts, ahead, ahead_size))
        return TP_NO_MEMORY;
    o->keys[o->keys_count] = made;
    return o->keys_count++;
}

TP_EXPORT void tp_order_set_record(tp_order *o, int key, int slot, int record)
{
    o->keys[key].records[slot] = record;
}

/* Sets the key of the arguments that were not known. */
TP_EXPORT int tp_order_set_variant(tp_order *o, int key)
{
    int64_t number = o->variants.strings.count;
    if (TP_GROW(o->variant_keys, o->variants_room, number))
        return TP_NO_MEMORY;
    o->variant_keys[number] = key;
    uint64_t hash = tp_hash(o->part.data, o->part.size, o->key);
    return tp_table_add(&o->variants, o->part.data, o->part.size, hash) < 0 ? TP_NO_MEMORY : 0;
}

/* Forgets all keys. */
TP_EXPORT void tp_order_forget(tp_order *o)
{
    tp_table_clear(&o->variants);
    o->keys_count = o->texts.size = 0;
}

/* The open slices, of which Python changes the numbers when it numbers names and records anew. */
TP_EXPORT int64_t tp_order_open(tp_order *o, tp_open **open)
{
    *open = o->open;
    return o->open_count;
}

/* What was counted, and in which order it was counted first. */
TP_EXPORT void tp_order_counted(const tp_order *o, int64_t *counts)
{
    memcpy(counts, o->counts, sizeof o->counts);
    memcpy(counts + COUNTED, o->count_order, sizeof o->count_order);
}

/* Flows ------------------------------------------------------------------------------------------------------- */

static int32_t *bucket_of(tp_order *o, int64_t number)
{
    return &o->buckets[tp_hash((uint8_t *)&number, sizeof number, o->key) & (BUCKETS - 1)];
}

static int32_t find_flow(tp_order *o, int64_t number)
{
    int32_t at = *bucket_of(o, number);
    while (at != NOTHING && o->flows[at].number != number)
        at = o->flows[at].next;
    return at;
}

/* Removes a flow from its place in the order of use. */
static void unlink_flow(tp_order *o, int32_t at)
{
    tp_flow *flow = &o->flows[at];
    *(flow->older == NOTHING ? &o->oldest : &o->flows[flow->older].newer) = flow->newer;
    *(flow->newer == NOTHING ? &o->newest : &o->flows[flow->newer].older) = flow->older;
}

/* The place of a flow that is not there: that of the oldest one, where there are too many. */
static int32_t new_flow(tp_order *o, int64_t number)
{
    int32_t at = (int32_t)o->flows_count;
    if (at < FLOWS_MAX) {
        if (TP_GROW(o->flows, o->flows_room, at)) {
            o->no_memory = 1;
            return NOTHING;
        }
        o->flows_count++;
    } else {
        at = o->oldest;
        unlink_flow(o, at);
        int32_t *from = bucket_of(o, o->flows[at].number);
        while (*from != at)
            from = &o->flows[*from].next;
        *from = o->flows[at].next;
    }
    int32_t *bucket = bucket_of(o, number);
    o->flows[at] = (tp_flow){.number = number, .next = *bucket};
    *bucket = at;
    return at;
}

/* The number of a flow that has ended so often. */
static int64_t number_again(int64_t number, int64_t times)
{
    uint8_t block[TP_FLOW_BYTES_MAX] = "[\"again\", ";
    uint8_t *end = tp_signed_decimal(block + strlen((char *)block), number);
    memcpy(end, ", ", 2);
    end = tp_decimal(end + 2, (uint64_t)times);
    *end++ = ']';
    return tp_flow_digest(block, end - block);
}

static int ends_flow(int phase)
{
    return phase == LAST_FLOW || phase == INSTANT_LAST;
}

/* Notes an end of a flow, whose phase and number are changed to those of the event. Returns whether there is one:
 * a flow that has not begun does not end. */
static int goes_on(tp_order *o, int *phase, int64_t *number)
{
    int32_t at = find_flow(o, *number);
    int ends = ends_flow(*phase), goes = *phase == NEXT_FLOW || *phase == INSTANT_NEXT;
    int was_open = at != NOTHING && o->flows[at].is_open;
    if ((ends || goes) && !was_open) {
        note(o, NOT_BEGUN);
        if (at != NOTHING) { /* it is forgotten: the last flow takes its place */
            unlink_flow(o, at);
            int32_t *from = bucket_of(o, *number), last = (int32_t)--o->flows_count;
            while (*from != at)
                from = &o->flows[*from].next;
            *from = o->flows[at].next;
            if (at != last) {
                tp_flow *moved = &o->flows[at];
                from = bucket_of(o, o->flows[last].number);
                while (*from != last)
                    from = &o->flows[*from].next;
                *from = at;
                *moved = o->flows[last];
                *(moved->older == NOTHING ? &o->oldest : &o->flows[moved->older].newer) = at;
                *(moved->newer == NOTHING ? &o->newest : &o->flows[moved->newer].older) = at;
            }
        }
        return 0;
    }
    if (at == NOTHING)
        at = new_flow(o, *number);
    else
        unlink_flow(o, at);
    if (at == NOTHING)
        return 0;
    tp_flow *flow = &o->flows[at];
    flow->older = o->newest;
    flow->newer = NOTHING;
    *(o->newest == NOTHING ? &o->oldest : &o->flows[o->newest].newer) = at;
    o->newest = at;
    if (flow->times)
        *number = number_again(*number, flow->times);
    flow->times += ends;
    flow->is_open = !ends;
    *phase = ends ? LAST_FLOW : was_open || goes ? NEXT_FLOW : FLOW;
    return 1;
}

/* Notes an end of a flow for Python. Returns whether there is one, or TP_NO_MEMORY. */
TP_EXPORT int tp_order_flow(tp_order *o, int phase, int64_t number, int64_t *made)
{
    o->no_memory = 0;
    int goes = goes_on(o, &phase, &number);
    made[0] = phase;
    made[1] = number;
    return o->no_memory ? TP_NO_MEMORY : goes;
}

/* Arguments --------------------------------------------------------------------------------------------------- */

typedef struct {
    const uint8_t *at;
    int64_t size;
} tp_span;

/* Where a value of an object that orjson wrote ends. */
static const uint8_t *after_value(const uint8_t *at, const uint8_t *end)
{
    int depth = 0;
    for (; at < end; at++) {
        if (*at == '"') {
            for (at++; at < end && *at != '"'; at++)
                at += *at == '\\';
        } else if (*at == '[' || *at == '{') {
            depth++;
        } else if ((*at == ']' || *at == '}') && !depth--) {
            return at;
        } else if (*at == ',' && !depth) {
            return at;
        }
    }
    return end;
}

/* Whether a member of an object has this key, with its colon. */
#define HAS_KEY(at, end, key) ((end) - (at) > (int64_t)sizeof key - 1 && !memcmp(at, key, sizeof key - 1))

enum { OTHER, KERNEL, GRID, BLOCK };

static int kind_of(const uint8_t *at, const uint8_t *end)
{
    return HAS_KEY(at, end, "\"kernel\":") ? KERNEL : HAS_KEY(at, end, "\"grid\":") ? GRID : HAS_KEY(at, end, "\"block\":") ? BLOCK : OTHER;
}

static void put(tp_order *o, tp_buffer *to, const void *from, int64_t size)
{
    if (tp_append(to, from, size))
        o->no_memory = 1;
}

/* Puts the members of an object that `is_in` selects into `to`, as an object; nothing where there are none. */
static void select_members(tp_order *o, tp_buffer *to, tp_span text, const uint8_t *is_in)
{
    int64_t start = to->size;
    const uint8_t *end = text.at + text.size;
    for (const uint8_t *at = text.at + 1, *after; at < end - 1; at = after + 1) {
        const uint8_t *value = at + 1;
        while (value < end && *value != '"')
            value += 1 + (*value == '\\');
        after = after_value(value + 1 < end ? value + 1 : end, end);
        if (is_in[kind_of(at, end)]) {
            put(o, to, to->size == start ? "{" : ",", 1);
            put(o, to, at, after - at);
        }
    }
    if (to->size > start)
        put(o, to, "}", 1);
}

/* The key of a slice of a stream with these arguments; NOTHING where it is not known yet. */
static int32_t variant_of(tp_order *o, int32_t key, tp_span second)
{
    static const uint8_t is_in[] = {0, 1, 1, 1};
    o->part.size = 0;
    put(o, &o->part, &key, sizeof key);
    if (memmem(second.at, (size_t)second.size, "\"kernel\":", 9) || memmem(second.at, (size_t)second.size, "\"grid\":", 7) ||
        memmem(second.at, (size_t)second.size, "\"block\":", 8))
        select_members(o, &o->part, second, is_in);
    if (o->no_memory)
        return NOTHING;
    int64_t number = tp_table_find(&o->variants, o->part.data, o->part.size, tp_hash(o->part.data, o->part.size, o->key));
    return number < 0 ? NOTHING : o->variant_keys[number];
}

/* The arguments that decide the key which was not known. */
TP_EXPORT int64_t tp_order_part(tp_order *o, const uint8_t **text)
{
    *text = o->part.data + sizeof(int32_t);
    return o->part.size - (int64_t)sizeof(int32_t);
}

/* Rows -------------------------------------------------------------------------------------------------------- */

/* Adds a row of an event. The argument that comes first is that of a key, if it has one. */
static void add(tp_order *o, const tp_order_made *to, int64_t ts, int64_t dur, int64_t number, int32_t record,
                const tp_order_key *ahead, tp_span second)
{
    int64_t size = ahead ? ahead->ahead_size : 0;
    if (size)
        put(o, &o->seconds, o->texts.data + ahead->ahead, size);
    if (size && second.size && !o->no_memory) {
        o->seconds.data[o->seconds.size - 1] = ',';
        second = (tp_span){second.at + 1, second.size - 1};
    }
    put(o, &o->seconds, second.at, second.size);
    to->ts[o->made] = ts;
    to->dur[o->made] = dur;
    to->number[o->made] = number;
    to->record[o->made] = record;
    to->second_end[o->made++] = o->seconds.size;
}

/* Adds a row for Python. */
TP_EXPORT int tp_order_add(tp_order *o, const tp_order_made *to, int64_t ts, int64_t dur, int64_t number, int record,
                           const uint8_t *second, int64_t size)
{
    o->no_memory = 0;
    add(o, to, ts, dur, number, record, 0, (tp_span){second, size});
    return o->no_memory ? TP_NO_MEMORY : 0;
}

static int need(int64_t *asked, int32_t key, int slot)
{
    asked[1] = key;
    asked[2] = slot;
    return NEW_RECORD;
}

/* Takes an end of a flow. Returns ALL, or why it cannot. */
static int take_flow(tp_order *o, const tp_order_made *to, int32_t number, int64_t ts, int64_t flow, tp_span second, int64_t *asked)
{
    const tp_order_key *key = &o->keys[number];
    const tp_order_track *track = &o->tracks[key->track];
    int is_instant = key->phase >= INSTANT_FLOW, is_at_slice = track->is_begun && track->begun_ns == ts;
    const tp_order_key *ahead = is_instant ? key : 0;
    for (int slot = 0; slot < 4; slot++)
        if (key->records[slot] == NO_RECORD)
            return need(asked, number, slot);
    if ((key->flags & IS_STREAM) && !is_at_slice) {
        note(o, NOT_PLACED);
        if (is_instant)
            add(o, to, ts, 0, 0, key->records[0], ahead, second);
        return ALL;
    }
    int phase = key->phase;
    int goes = goes_on(o, &phase, &flow);
    if (!goes || (is_instant && is_at_slice)) {
        if (is_instant)
            add(o, to, ts, 0, 0, key->records[0], ahead, second);
        if (!goes)
            return ALL;
        ahead = 0;
        second.size = 0;
    }
    add(o, to, ts, 0, flow, key->records[1 + phase - FLOW], ahead, second);
    return ALL;
}

static void begin(tp_order *o, const tp_order_key *key, int64_t ts, int is_call)
{
    int32_t at = o->free_open;
    if (at != NOTHING) {
        o->free_open = o->open[at].below;
    } else if (TP_GROW(o->open, o->open_room, o->open_count)) {
        o->no_memory = 1;
        return;
    } else {
        at = (int32_t)o->open_count++;
    }
    tp_order_track *track = &o->tracks[key->track];
    o->open[at] = (tp_open){track->top, key->name, key->category, is_call, key->records[OF_ENDS + is_call]};
    track->top = at;
    track->begun_ns = ts;
    track->is_begun = 1;
    track->count++;
    o->opened++;
}

/* Closes the slice that an end belongs to, and those above. Returns the record of the end, or NO_RECORD. */
static int32_t end(tp_order *o, const tp_order_key *key)
{
    tp_order_track *track = &o->tracks[key->track];
    int32_t at = track->top;
    int count = 1;
    if (at == NOTHING)
        return key->records[0];
    for (;; count++, at = o->open[at].below) {
        if (at == NOTHING || count > LOOKED_AT_MAX) {
            note(o, NOT_CLOSED);
            return NO_RECORD;
        }
        const tp_open *open = &o->open[at];
        if ((!key->name || !open->name || key->name == open->name) && (!key->category || key->category == open->category))
            break;
    }
    int32_t record = o->open[at].end_record, above = track->top;
    track->top = o->open[at].below;
    track->count -= count;
    o->opened -= count;
    for (int i = 0; i < count; i++) {
        int32_t below = o->open[above].below;
        o->open[above] = (tp_open){o->free_open, 0, 0, -1, NO_RECORD};
        o->free_open = above;
        above = below;
    }
    return record;
}

/* Takes one row. Returns ALL, or why it cannot. */
static int take(tp_order *o, const tp_order_rows *rows, const tp_order_made *to, int64_t row, tp_span second, int64_t *asked)
{
    int32_t number = rows->key[rows->first[row]];
    int64_t ts = rows->ts[row];
    const tp_order_key *key = number == NOTHING ? 0 : &o->keys[number];
    if (!key || ts >= key->until)
        return NEW_KEY;
    if (key->phase == RECORD)
        return FOREIGN;
    if (key->flags & IS_SUMMARY)
        return ALL;
    if (key->phase >= FLOW)
        return take_flow(o, to, number, ts, rows->number[row], second, asked);
    if (key->flags & IS_STREAM) {
        int32_t variant = variant_of(o, number, second);
        asked[1] = number;
        if (variant == NOTHING)
            return NEW_VARIANT;
        number = variant;
        key = &o->keys[number];
    }
    tp_order_track *track = &o->tracks[key->track];
    int is_slice = key->phase == BEGIN || key->phase == WHOLE;
    int is_call = is_slice && (rows->number[row] || (key->flags & IS_CALL));
    int has_launch = rows->number[row] && (key->flags & MAY_LAUNCH);
    int slot = key->phase == END ? 0 : 2 * is_call + has_launch;
    if (key->records[slot] == NO_RECORD)
        return need(asked, number, slot);
    if (key->phase == BEGIN && key->records[OF_ENDS + is_call] == NO_RECORD)
        return need(asked, number, OF_ENDS + is_call);
    int32_t record = key->records[slot];
    if (key->phase == BEGIN) {
        if (o->opened >= o->open_max) {
            track->deeper++;
            note(o, NOT_OPENED);
            return ALL;
        }
        begin(o, key, ts, is_call);
    } else if (key->phase == END) {
        if (track->deeper) {
            track->deeper--;
            return ALL;
        }
        if ((record = end(o, key)) == NO_RECORD)
            return ALL;
    } else if (key->phase == WHOLE) {
        track->begun_ns = ts;
        track->is_begun = 1;
    }
    const tp_order_key *ahead = key->phase == END ? 0 : key;
    if (key->phase != END && (key->flags & IS_VARIANT)) {
        const uint8_t is_in[] = {1, 0, !(key->flags & HAS_GRID), !(key->flags & HAS_BLOCK)};
        o->rest.size = 0;
        select_members(o, &o->rest, second, is_in);
        second = (tp_span){o->rest.data, o->rest.size};
    }
    add(o, to, ts, rows->dur[row], has_launch ? rows->number[row] : 0, record, ahead, second);
    return ALL;
}

/* Takes rows from place `at` on. `asked[0]` is why it returned, and `asked[1]` and `asked[2]` are a key and which
 * record of it. Returns the place of the next row, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_order_take(tp_order *o, const tp_order_rows *rows, const uint8_t *seconds, int64_t at,
                                int64_t count, const tp_order_made *to, int64_t *asked)
{
    o->no_memory = 0;
    if (!at)
        o->made = o->seconds.size = 0;
    for (asked[0] = ALL; at < count; at++) {
        int64_t start = at ? rows->second_end[at - 1] : 0;
        asked[0] = take(o, rows, to, at, (tp_span){seconds + start, rows->second_end[at] - start}, asked);
        if (asked[0] != ALL || o->no_memory)
            break;
    }
    return o->no_memory ? TP_NO_MEMORY : at;
}

/* The texts of the rows that were made, and how many rows that are. */
TP_EXPORT int64_t tp_order_made_rows(const tp_order *o, const uint8_t **seconds, int64_t *size)
{
    *seconds = o->seconds.data;
    *size = o->seconds.size;
    return o->made;
}
