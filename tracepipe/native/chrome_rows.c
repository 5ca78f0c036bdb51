/* SPDX-License-Identifier: MIT */
/* Makes rows of events of Chrome's trace JSON, in the usual forms of what `chrome.py` reads.
 *
 *     {"ph":"X","cat":"kernel","name":"f","pid":0,"tid":7,"ts":1.234,"dur":5.6,"args":{"stream":7,"a":[1,2]}}
 *      └───────────────── head ────────────────────┘                                └ place ─┘ └ other ┘
 *
 * The kind of an event depends only on its head and its places, which are its key. Python decides the kind of
 * a new key. From then on, events with that key become rows here: a time, a length, a launch, and the text of
 * the arguments as orjson writes it. Events of other forms are left to Python, which reads all forms.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "flow_number.h"
#include "json.h"
#include "sorted_rows.h"

/* The number made from `before`, the digits of the id, a quote and a bracket. It is below 0 where all of it is
 * longer than a block of the hash. */
static int64_t tp_flow_number(const uint8_t *before, int64_t before_size, const uint8_t *id, int64_t id_size)
{
    uint8_t block[TP_FLOW_BYTES_MAX] = {0};
    int64_t size = before_size + id_size + 2;
    if (size > TP_FLOW_BYTES_MAX)
        return -1;
    memcpy(block, before, (size_t)before_size);
    memcpy(block + before_size, id, (size_t)id_size);
    memcpy(block + size - 2, "\"]", 2);
    return tp_flow_digest(block, size);
}

/* An event of Chrome's trace JSON: the members that all events have, and its arguments. */

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
enum { DEVICE, STREAM, GRID, BLOCK, DEVICE_TYPE, DEVICE_ID, OF_KEY, BYTES = OF_KEY, ADDRESS, TOTAL, CORRELATION, XLA, ID, PLACES };

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

#define TIME_MAX (((uint64_t)1 << 62) - 1)

/* Reads microseconds with three decimals at most as nanoseconds. */
static const uint8_t *read_us(const uint8_t *at, const uint8_t *end, int64_t *ns)
{
    const uint8_t *after = tp_after_digits(at, end);
    uint64_t value = 0;
    if (after == at || after - at > 16 || (*at == '0' && after - at > 1))
        return 0;
    for (; at < after; at++)
        value = value * 10 + (uint64_t)(*at - '0');
    int decimals = 0;
    if (after < end && *after == '.') {
        at = after + 1;
        after = tp_after_digits(at, end);
        if (after == at || after - at > 3)
            return 0;
        for (; at < after; at++, decimals++)
            value = value * 10 + (uint64_t)(*at - '0');
    }
    for (; decimals < 3; decimals++)
        value *= 10;
    *ns = (int64_t)value;
    return value <= TIME_MAX ? after : 0;
}

/* Notes the place of an argument on which the kind or the row of an event depends. */
static void note_place(tp_event *e, tp_span key)
{
    int place = IS(key, "\"device\"")        ? DEVICE
                : IS(key, "\"stream\"")      ? STREAM
                : IS(key, "\"grid\"")        ? GRID
                : IS(key, "\"block\"")       ? BLOCK
                : IS(key, "\"Device Type\"") ? DEVICE_TYPE
                : IS(key, "\"Device Id\"")   ? DEVICE_ID
                : IS(key, "\"Bytes\"")       ? BYTES
                : IS(key, "\"Addr\"")        ? ADDRESS
                : IS(key, "\"Total Allocated\"") ? TOTAL
                : IS(key, "\"correlation\"") ? CORRELATION
                : IS(key, "\"correlation_id\"") ? XLA
                : IS(key, "\"id\"")          ? ID
                                             : PLACES;
    if (place < PLACES)
        e->place[place] = e->count;
}

/* Adds an argument whose value starts at `at`. Returns what follows it, or 0 where Python must read it or its
 * key comes twice. */
static const uint8_t *add_piece(tp_buffer *values, tp_event *e, tp_span key, const uint8_t *at, const uint8_t *end,
                                int is_member)
{
    if (e->count == PIECES_MAX)
        return 0;
    for (int i = 0; i < e->count; i++)
        if (tp_is_same(e->pieces[i].key, key))
            return 0;
    int64_t value = values->size;
    at = tp_copy_value(values, at, end, 0);
    e->pieces[e->count++] = (tp_piece){key, value, values->size - value, is_member};
    note_place(e, key);
    return at;
}

/* Reads the key of a member at `at` and returns where its value starts. */
static const uint8_t *read_key(const uint8_t *at, const uint8_t *end, tp_span *key)
{
    if (at >= end || *at != '"')
        return 0;
    const uint8_t *after = tp_after_string(at, end);
    if (!after)
        return 0;
    *key = (tp_span){at, after - at};
    after = tp_after_blanks(after, end);
    return after < end && *after == ':' ? tp_after_blanks(after + 1, end) : 0;
}

static const uint8_t *read_args(tp_buffer *values, tp_event *e, const uint8_t *at, const uint8_t *end)
{
    if (at >= end || *at != '{')
        return 0;
    at = tp_after_blanks(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        tp_span key;
        if (!(at = read_key(at, end, &key)) || IS(key, "\"ts\"") || IS(key, "\"dur\""))
            return 0; /* Python looks for a time in all of the event's text */
        if (!(at = add_piece(values, e, key, at, end, 0)) || (at = tp_after_blanks(at, end)) >= end)
            return 0;
        if (*at == '}')
            return at + 1;
        if (*at != ',')
            return 0;
        at = tp_after_blanks(at + 1, end);
    }
}

/* Reads a string, or an integer where one is allowed. */
static const uint8_t *read_head(tp_span *head, const uint8_t *at, const uint8_t *end, int may_be_number)
{
    int64_t ignored;
    if (head->size || at >= end)
        return 0;
    const uint8_t *after = *at == '"' ? tp_after_string(at, end) : may_be_number ? tp_integer(at, end, &ignored) : 0;
    if (after)
        *head = (tp_span){at, after - at};
    return after;
}

static const uint8_t *read_member(tp_buffer *values, tp_event *e, tp_span key, const uint8_t *at, const uint8_t *end)
{
    int head = IS(key, "\"ph\"")     ? PH
               : IS(key, "\"cat\"")  ? CAT
               : IS(key, "\"name\"") ? NAME
               : IS(key, "\"pid\"")  ? PID
               : IS(key, "\"tid\"")  ? TID
                                     : HEADS;
    if (head < HEADS)
        return read_head(&e->head[head], at, end, head >= PID);
    if (IS(key, "\"ts\""))
        return e->has_ts++ ? 0 : read_us(at, end, &e->ts_ns);
    if (IS(key, "\"dur\""))
        return e->has_dur++ ? 0 : read_us(at, end, &e->dur_ns);
    if (IS(key, "\"args\""))
        return e->has_args++ ? 0 : read_args(values, e, at, end);
    e->members++;
    return e->has_args ? 0 : add_piece(values, e, key, at, end, 1); /* members after `args` would come before those in it */
}

/* Takes apart the object in [at, end) and puts the values of its arguments into `values`, as orjson writes
 * them. Returns whether it has the usual form, or TP_NO_MEMORY. */
static int tp_event_read(tp_buffer *values, tp_event *e, const uint8_t *at, const uint8_t *end)
{
    memset(e, 0, offsetof(tp_event, pieces));
    values->size = 0;
    if (tp_reserve(values, end - at))
        return TP_NO_MEMORY;
    at = tp_after_blanks(at + 1, end);
    for (;;) {
        tp_span key;
        if (!(at = read_key(at, end, &key)) || !(at = read_member(values, e, key, at, end)))
            return 0;
        at = tp_after_blanks(at, end);
        if (at >= end)
            return 0;
        if (*at == '}')
            return at + 1 == end && e->has_ts;
        if (*at != ',')
            return 0;
        at = tp_after_blanks(at + 1, end);
    }
}

#define YEAR_NS ((int64_t)365 * 24 * 3600 * 1000000000)

/* The ranks of rows. */
enum { SLICE, MARK, FLOW };

/* Why `tp_events_take` returned. */
enum { ALL, FOREIGN, NEW, FULL };

/* What is done with the events of a key. */
enum { PASSED_OVER, LEFT_TO_PYTHON, ROW, ALLOCATION };

/* Texts of a kind: that of its rows, that of an argument that comes first, and the part of a flow's key
 * before its id. */
enum { FIRST, AHEAD, OF_FLOW, TEXTS };

typedef struct {
    int32_t what, has_launch, rules, rules_end; /* the places of its rules */
} tp_kind;

/* An old name of an argument and its new one, with quotes, as places and sizes among the texts of all rules. */
typedef struct {
    int64_t old, old_size, new, new_size;
} tp_rule;

typedef struct {
    tp_table keys;
    tp_kind *kinds;
    int64_t kinds_room;
    tp_strings texts[TEXTS];
    tp_rule *rules;
    int64_t rules_count, rules_room;
    tp_buffer rule_texts, values, key;
    int no_memory;
} tp_events;

/* The times of all events: the first above 0, the first, and the last end. */
typedef struct {
    int64_t first, least, last;
} tp_times;

TP_EXPORT void tp_events_free(tp_events *r)
{
    if (!r)
        return;
    tp_table_free(&r->keys);
    for (int i = 0; i < TEXTS; i++)
        tp_strings_free(&r->texts[i]);
    free(r->kinds);
    free(r->rules);
    free(r->rule_texts.data);
    free(r->values.data);
    free(r->key.data);
    free(r);
}

TP_EXPORT tp_events *tp_events_new(uint64_t key)
{
    tp_events *r = calloc(1, sizeof *r);
    if (r && tp_table_init(&r->keys, key)) {
        tp_events_free(r);
        return 0;
    }
    return r;
}

static void put(tp_events *r, tp_buffer *to, const void *from, int64_t size)
{
    if (tp_append(to, from, size))
        r->no_memory = 1;
}

static int is_number(const tp_events *r, const tp_piece *piece)
{
    const uint8_t *at = r->values.data + piece->value;
    return *at == '-' || (uint8_t)(*at - '0') < 10;
}

static int is_integer(const tp_events *r, const tp_piece *piece)
{
    return is_number(r, piece) && !memchr(r->values.data + piece->value, '.', (size_t)piece->size);
}

/* The number of an event's launch, 0 without one. */
static int64_t correlation_of(const tp_events *r, const tp_event *e)
{
    int64_t number;
    const tp_piece *piece = tp_piece_at(e, CORRELATION);
    if (!piece)
        return 0;
    const uint8_t *at = r->values.data + piece->value;
    return tp_unsigned(at, at + piece->size, &number) && number <= INT32_MAX ? number : 0;
}

static void put_part(tp_events *r, const uint8_t *at, int64_t size)
{
    put(r, &r->key, at, size);
    put(r, &r->key, "", 1); /* a separator: no part contains NUL */
}

/* Makes the key of an event, which is all that its kind depends on. Of the size of an allocation, that is
 * whether it is a number, and whether it is below 0. */
static void make_key(tp_events *r, const tp_event *e, int has_correlation)
{
    const tp_piece *bytes = tp_piece_at(e, BYTES);
    const char *sign = !bytes ? " " : !is_integer(r, bytes) ? "?" : r->values.data[bytes->value] == '-' ? "-" : "+";
    r->key.size = 0;
    put(r, &r->key, has_correlation ? "c" : tp_piece_at(e, XLA) ? "x" : "-", 1);
    put(r, &r->key, sign, 1);
    for (int i = 0; i < HEADS; i++)
        put_part(r, e->head[i].at, e->head[i].size);
    for (int i = 0; i < OF_KEY; i++) {
        const tp_piece *piece = tp_piece_at(e, i);
        put_part(r, piece ? r->values.data + piece->value : 0, piece ? piece->size : 0);
    }
}

/* The new name of an argument by the rules of a kind. Its size is 0 where the argument is left out. */
static tp_span renamed(const tp_events *r, const tp_kind *kind, tp_span key)
{
    const uint8_t *texts = r->rule_texts.data;
    for (int32_t i = kind->rules; i < kind->rules_end; i++) {
        const tp_rule *rule = &r->rules[i];
        if (tp_is_same((tp_span){texts + rule->old, rule->old_size}, key))
            return (tp_span){texts + rule->new, rule->new_size};
    }
    return key;
}

/* Adds an argument to those from `start` on, with a comma unless it is the first. */
static void put_argument(tp_events *r, tp_buffer *to, int64_t start, tp_span name, const uint8_t *value, int64_t size)
{
    if (to->size > start + 1)
        put(r, to, ",", 1);
    put(r, to, name.at, name.size);
    put(r, to, ":", 1);
    put(r, to, value, size);
}

/* Whether an argument is not among the arguments of its row: the id of a flow, that an instant is its thread's,
 * and what comes last for an allocation. */
static int is_elsewhere(const tp_events *r, const tp_event *e, const tp_piece *piece, int rank, int what)
{
    if (rank == MARK && piece->is_member && IS(piece->key, "\"s\""))
        return piece->size == 3 && !memcmp(r->values.data + piece->value, "\"t\"", 3);
    if (what == ALLOCATION && (piece == tp_piece_at(e, BYTES) || piece == tp_piece_at(e, ADDRESS)))
        return 1;
    return rank == FLOW && piece->is_member && (IS(piece->key, "\"id\"") || IS(piece->key, "\"bp\""));
}

/* Adds the last arguments of an allocation of PyTorch, as `_instant` of chrome.py does. Returns whether
 * they have the usual form. */
static int write_allocation(tp_events *r, const tp_event *e, tp_buffer *to, int64_t start)
{
    static const struct {
        int of;
        const char *name;
    } LAST[] = {{BYTES, "\"size\""}, {ADDRESS, "\"address\""}, {TOTAL, "\"total_allocated\""}};
    const tp_piece *type = tp_piece_at(e, DEVICE_TYPE);
    int is_of_host = type && type->size == 1 && r->values.data[type->value] == '0';
    for (int i = 0; i < 3; i++) {
        const tp_piece *piece = tp_piece_at(e, LAST[i].of);
        tp_span name = {(const uint8_t *)LAST[i].name, (int64_t)strlen(LAST[i].name)};
        for (int j = 0; j < e->count; j++)
            if (tp_is_same(e->pieces[j].key, name))
                return 0;
        if (!piece || (LAST[i].of == TOTAL && is_of_host))
            continue;
        if (!is_integer(r, piece))
            return 0;
        int is_negative = LAST[i].of == BYTES && r->values.data[piece->value] == '-';
        put_argument(r, to, start, name, r->values.data + piece->value + is_negative, piece->size - is_negative);
    }
    return 1;
}

/* Adds the text of the arguments to `to`. Returns false where two arguments get the same name. */
static int write_args(tp_events *r, const tp_event *e, int64_t number, int rank, tp_buffer *to)
{
    const tp_strings *ahead = &r->texts[AHEAD];
    const tp_kind *kind = &r->kinds[number];
    int64_t first_size = tp_size_of(ahead, number), start = to->size;
    const uint8_t *first = first_size ? ahead->bytes.data + ahead->places[number].at : 0;
    put(r, to, "{", 1);
    put(r, to, first, first_size);
    for (int i = 0; i < e->count; i++) {
        const tp_piece *piece = &e->pieces[i];
        if (is_elsewhere(r, e, piece, rank, kind->what))
            continue;
        tp_span name = renamed(r, kind, piece->key);
        if (first_size > name.size && name.size && first[name.size] == ':' && !memcmp(first, name.at, (size_t)name.size))
            return 0;
        for (int j = 0; name.at != piece->key.at && j < e->count; j++)
            if (tp_is_same(e->pieces[j].key, name))
                return 0;
        if (name.size)
            put_argument(r, to, start, name, r->values.data + piece->value, piece->size);
    }
    if (kind->what == ALLOCATION && !write_allocation(r, e, to, start))
        return 0;
    if (to->size == start + 1)
        to->size = start;
    else
        put(r, to, "}", 1);
    return 1;
}

/* The rank of rows of a phase, -1 where they are left to Python. */
static int rank_of(int phase)
{
    return phase == 'X' ? SLICE : phase && strchr("iIRPC", phase) ? MARK : phase && strchr("stf", phase) ? FLOW : -1;
}

/* Whether an event has what its phase requires, in the usual form. */
static int is_usual(const tp_events *r, const tp_event *e, int phase, int rank)
{
    for (int i = 0; rank != FLOW && i < e->members; i++) /* a flow that the event states itself */
        if (IS(e->pieces[i].key, "\"bind_id\""))
            return 0;
    if (rank == SLICE)
        return e->has_dur && e->dur_ns <= YEAR_NS;
    if (e->has_dur)
        return 0;
    if (rank == FLOW) { /* only with a numeric `id`: `id2` and `scope` are left to Python */
        int others = 0;
        for (int i = 0; i < e->count; i++)
            others += e->pieces[i].is_member && !IS(e->pieces[i].key, "\"id\"") && !IS(e->pieces[i].key, "\"bp\"");
        const tp_piece *id = tp_piece_at(e, ID);
        return !others && id && id->is_member && is_integer(r, id);
    }
    if (phase != 'C')
        return 1;
    for (int i = 0; i < e->count; i++)
        if (!is_number(r, &e->pieces[i]))
            return 0;
    return e->count && !e->members;
}

/* The number of a flow, below 0 where Python must compute it. */
static int64_t flow_of(tp_events *r, const tp_event *e, int64_t kind)
{
    const tp_piece *id = tp_piece_at(e, ID);
    const tp_strings *flows = &r->texts[OF_FLOW];
    return tp_flow_number(flows->bytes.data + flows->places[kind].at, tp_size_of(flows, kind),
                          r->values.data + id->value, id->size);
}

static void note_times(tp_times *times, int64_t ts, int64_t dur)
{
    if (ts > 0 && ts < times->first)
        times->first = ts;
    if (ts < times->least)
        times->least = ts;
    if (ts + dur > times->last)
        times->last = ts + dur;
}

/* Adds the row of an event of a kind. Returns ALL, or FOREIGN where it cannot. */
static int add_row(tp_events *r, tp_sorted *sorted, const tp_event *e, int64_t kind, int rank, int64_t correlation)
{
    const tp_strings *firsts = &r->texts[FIRST];
    tp_sorted_row row = {.ts = e->ts_ns, .rank = rank, .first = (int32_t)tp_size_of(firsts, kind)};
    if (rank == SLICE)
        row.dur = e->dur_ns;
    if (r->kinds[kind].has_launch)
        row.number = correlation;
    if (rank == FLOW && (row.number = flow_of(r, e, kind)) < 0)
        return FOREIGN;
    tp_buffer *args = tp_sorted_begin(sorted, firsts->bytes.data + firsts->places[kind].at, row.first);
    if (!args) {
        r->no_memory = 1;
    } else if (!write_args(r, e, kind, rank, args) || r->no_memory) {
        tp_sorted_leave(sorted);
        return FOREIGN;
    } else if (tp_sorted_end(sorted, row)) {
        r->no_memory = 1;
    }
    return ALL;
}

/* Takes one event. Returns ALL, or why it cannot. */
static int take(tp_events *r, tp_sorted *sorted, const uint8_t *at, const uint8_t *end, tp_times *times)
{
    tp_event e;
    int is_read = tp_event_read(&r->values, &e, at, end);
    r->no_memory |= is_read < 0;
    if (is_read <= 0 || e.head[PH].size != 3)
        return FOREIGN;
    int phase = e.head[PH].at[1], rank = rank_of(phase);
    if (rank < 0 || !is_usual(r, &e, phase, rank))
        return FOREIGN;
    int64_t correlation = correlation_of(r, &e);
    make_key(r, &e, correlation > 0);
    int64_t kind = tp_table_find(&r->keys, r->key.data, r->key.size, tp_hash(r->key.data, r->key.size, r->keys.key));
    if (kind < 0)
        return NEW;
    if (r->kinds[kind].what == PASSED_OVER)
        return ALL;
    if (r->kinds[kind].what == LEFT_TO_PYTHON || add_row(r, sorted, &e, kind, rank, correlation) == FOREIGN)
        return FOREIGN;
    note_times(times, e.ts_ns, rank == SLICE ? e.dur_ns : 0);
    return ALL;
}

/* Makes rows of the objects from `first` on, each of which is in text[starts[i], ends[i]). Sets `why[0]` to
 * the reason why it returned. Returns the place of the next object, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_events_take(tp_events *r, tp_sorted *sorted, const uint8_t *text, const int64_t *starts,
                                 const int64_t *ends, int64_t first, int64_t count, tp_times *times, int64_t *why)
{
    r->no_memory = 0;
    for (why[0] = ALL; first < count; first++) {
        why[0] = tp_sorted_is_full(sorted) ? FULL : take(r, sorted, text + starts[first], text + ends[first], times);
        if (why[0] != ALL || r->no_memory)
            break;
    }
    return r->no_memory ? TP_NO_MEMORY : first;
}

/* Sets what is done with the events of the key that was NEW. Their rules are those from place `rules` to
 * before `rules_end`. Returns the number of their kind, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_events_kind(tp_events *r, int what, int has_launch, int rules, int rules_end,
                                 const uint8_t *const *texts, const int64_t *sizes)
{
    int64_t number = r->keys.strings.count;
    if (TP_GROW(r->kinds, r->kinds_room, number))
        return TP_NO_MEMORY;
    for (int i = 0; i < TEXTS; i++)
        if (tp_strings_set(&r->texts[i], number, texts[i], sizes[i]))
            return TP_NO_MEMORY;
    r->kinds[number] = (tp_kind){what, has_launch, rules, rules_end};
    return tp_table_add(&r->keys, r->key.data, r->key.size, tp_hash(r->key.data, r->key.size, r->keys.key));
}

/* Adds a rule: the new name of an argument, empty to leave the argument out. Returns the place after it, or
 * TP_NO_MEMORY. */
TP_EXPORT int64_t tp_events_rule(tp_events *r, const uint8_t *old, int64_t old_size, const uint8_t *new, int64_t new_size)
{
    int64_t at = r->rule_texts.size;
    if (TP_GROW(r->rules, r->rules_room, r->rules_count) || tp_append(&r->rule_texts, old, old_size) ||
        tp_append(&r->rule_texts, new, new_size))
        return TP_NO_MEMORY;
    r->rules[r->rules_count++] = (tp_rule){at, old_size, at + old_size, new_size};
    return r->rules_count;
}

/* How many bytes the texts of all kinds have. */
TP_EXPORT int64_t tp_events_bytes(const tp_events *r)
{
    int64_t size = r->keys.strings.bytes.size;
    for (int i = 0; i < TEXTS; i++)
        size += r->texts[i].bytes.size;
    return size;
}

/* Forgets all kinds. */
TP_EXPORT void tp_events_forget(tp_events *r)
{
    tp_table_clear(&r->keys);
    for (int i = 0; i < TEXTS; i++)
        tp_strings_clear(&r->texts[i]);
}
