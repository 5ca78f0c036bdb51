/* Events of Chrome's trace JSON into rows: the usual forms of what `chrome_events.py` reads.
 *
 *     {"ph":"X","cat":"kernel","name":"f","pid":0,"tid":7,"ts":1.234,"dur":5.6,"args":{"stream":7,"a":[1,2]}}
 *      └───────────────── head ────────────────────┘                                └ place ─┘ └ other ┘
 *
 * What an event is depends on its head and its places alone, which are its key. Of a key that is new Python says
 * what it is, its kind; from then on events of that key become rows here: a time, a length, a launch, and the text
 * of the arguments as orjson writes it. An event of another form is left to Python, which reads all of them.
 */
#include <stddef.h>

#include "json_copy.h"

#define PIECES_MAX 48
#define TIME_MAX (((uint64_t)1 << 62) - 1)
#define YEAR_NS ((int64_t)365 * 24 * 3600 * 1000000000)
#define SLICE 0
#define MARK 1

/* Why `tp_events_take` came back. */
enum { ALL, FOREIGN, NEW, FULL };

/* What becomes of the events of a key. */
enum { PASSED_OVER, LEFT_TO_PYTHON, ROW };

typedef struct {
    int32_t what, has_launch, rules;
} tp_kind;

/* A slice of the event's text. */
typedef struct {
    const uint8_t *at;
    int64_t size;
} tp_span;

/* An argument: its key, with quotes, and where its value lies among `values`. */
typedef struct {
    tp_span key;
    int64_t value, size;
} tp_piece;

enum { PH, CAT, NAME, PID, TID, HEADS };
enum { DEVICE, STREAM, GRID, BLOCK, PLACES };

typedef struct {
    tp_span head[HEADS];
    int64_t ts_ns, dur_ns;
    int has_ts, has_dur, has_args, count;
    tp_piece pieces[PIECES_MAX];
} tp_event;

typedef struct {
    tp_table keys;
    tp_kind *kinds;
    int64_t kinds_room;
    tp_strings rules, ahead;
    tp_buffer values, key, texts;
    uint64_t launch_bits;
    int no_memory;
} tp_events;

typedef struct {
    int64_t *ts, *rank, *dur, *number, *end;
    int32_t *kind;
} tp_event_rows;

TP_EXPORT void tp_events_free(tp_events *r)
{
    if (!r)
        return;
    tp_table_free(&r->keys);
    tp_strings_free(&r->rules);
    tp_strings_free(&r->ahead);
    free(r->kinds);
    free(r->values.data);
    free(r->key.data);
    free(r->texts.data);
    free(r);
}

TP_EXPORT tp_events *tp_events_new(uint64_t key, uint64_t launch_bits)
{
    tp_events *r = calloc(1, sizeof *r);
    if (r && tp_table_init(&r->keys, key)) {
        tp_events_free(r);
        return 0;
    }
    if (r)
        r->launch_bits = launch_bits;
    return r;
}

static void put(tp_events *r, tp_buffer *to, const void *from, int64_t size)
{
    if (tp_append(to, from, size))
        r->no_memory = 1;
}

/* Microseconds with three decimals at most, as nanoseconds. */
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

/* The event --------------------------------------------------------------------------------------------------- */

static int is_text(tp_span span, const char *text)
{
    int64_t size = (int64_t)strlen(text);
    return span.size == size && !memcmp(span.at, text, (size_t)size);
}

static int is_same(tp_span one, tp_span other)
{
    return one.size == other.size && !memcmp(one.at, other.at, (size_t)one.size);
}

/* Adds an argument whose value stands at `at`. What follows it, 0 where it is another's, or comes twice. */
static const uint8_t *add_piece(tp_events *r, tp_event *e, tp_span key, const uint8_t *at, const uint8_t *end)
{
    if (e->count == PIECES_MAX)
        return 0;
    for (int i = 0; i < e->count; i++)
        if (is_same(e->pieces[i].key, key))
            return 0;
    int64_t value = r->values.size;
    at = tp_copy_value(&r->values, at, end, 0);
    e->pieces[e->count++] = (tp_piece){key, value, r->values.size - value};
    return at;
}

/* Reads the key of a member at `at`, and goes to its value. */
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

static const uint8_t *read_args(tp_events *r, tp_event *e, const uint8_t *at, const uint8_t *end)
{
    if (at >= end || *at != '{')
        return 0;
    at = tp_after_blanks(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;;) {
        tp_span key;
        if (!(at = read_key(at, end, &key)) || is_text(key, "\"ts\"") || is_text(key, "\"dur\""))
            return 0; /* a time is looked for in all of the event's text */
        if (!(at = add_piece(r, e, key, at, end)) || (at = tp_after_blanks(at, end)) >= end)
            return 0;
        if (*at == '}')
            return at + 1;
        if (*at != ',')
            return 0;
        at = tp_after_blanks(at + 1, end);
    }
}

/* A string, or an integer where that may be one. */
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

static const uint8_t *read_member(tp_events *r, tp_event *e, tp_span key, const uint8_t *at, const uint8_t *end)
{
    static const char *heads[] = {"\"ph\"", "\"cat\"", "\"name\"", "\"pid\"", "\"tid\""};
    for (int i = 0; i < HEADS; i++)
        if (is_text(key, heads[i]))
            return read_head(&e->head[i], at, end, i >= PID);
    if (is_text(key, "\"ts\""))
        return e->has_ts++ ? 0 : read_us(at, end, &e->ts_ns);
    if (is_text(key, "\"dur\""))
        return e->has_dur++ ? 0 : read_us(at, end, &e->dur_ns);
    if (!is_text(key, "\"args\""))
        return e->has_args ? 0 : add_piece(r, e, key, at, end); /* what stands behind comes first all the same */
    return e->has_args++ ? 0 : read_args(r, e, at, end);
}

/* Takes an object apart; whether it is of the usual form. */
static int read_event(tp_events *r, tp_event *e, const uint8_t *at, const uint8_t *end)
{
    memset(e, 0, offsetof(tp_event, pieces));
    r->values.size = 0;
    if (tp_reserve(&r->values, end - at)) {
        r->no_memory = 1;
        return 0;
    }
    at = tp_after_blanks(at + 1, end);
    for (;;) {
        tp_span key;
        if (!(at = read_key(at, end, &key)) || !(at = read_member(r, e, key, at, end)))
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

static const tp_piece *piece_of(const tp_event *e, const char *key)
{
    for (int i = 0; i < e->count; i++)
        if (is_text(e->pieces[i].key, key))
            return &e->pieces[i];
    return 0;
}

/* The number of the launch that an event names, 0 where it names none. */
static int64_t correlation_of(const tp_events *r, const tp_event *e)
{
    int64_t number;
    const tp_piece *piece = piece_of(e, "\"correlation\"");
    if (!piece)
        return 0;
    const uint8_t *at = r->values.data + piece->value;
    return tp_unsigned(at, at + piece->size, &number) && number <= INT32_MAX ? number : 0;
}

static void put_part(tp_events *r, const uint8_t *at, int64_t size)
{
    put(r, &r->key, at, size);
    put(r, &r->key, "", 1); /* no part has a NUL */
}

/* Makes the key of an event: whatever its kind depends on. */
static void make_key(tp_events *r, const tp_event *e, int is_arrow, int has_correlation)
{
    static const char *places[] = {"\"device\"", "\"stream\"", "\"grid\"", "\"block\""};
    r->key.size = 0;
    put(r, &r->key, has_correlation ? "c" : "-", 1);
    for (int i = 0; i < (is_arrow ? NAME : HEADS); i++)
        put_part(r, e->head[i].at, e->head[i].size);
    for (int i = 0; i < (is_arrow ? 0 : PLACES); i++) {
        const tp_piece *piece = piece_of(e, places[i]);
        put_part(r, piece ? r->values.data + piece->value : 0, piece ? piece->size : 0);
    }
}

/* The new name of an argument by the rules `at`: an old name and a new one each, with quotes, NUL behind both. Of
 * size 0 where it is left out. */
static tp_span renamed(const uint8_t *at, int64_t size, tp_span key)
{
    for (const uint8_t *end = at + size; at < end;) {
        tp_span old = {at, (int64_t)strlen((const char *)at)};
        tp_span new = {at + old.size + 1, (int64_t)strlen((const char *)at + old.size + 1)};
        if (is_same(old, key))
            return new;
        at = new.at + new.size + 1;
    }
    return key;
}

/* Adds the text of the arguments to `texts`. Whether it could: not where two get the same name. */
static int write_args(tp_events *r, const tp_event *e, int64_t number)
{
    const tp_strings *rules = &r->rules, *ahead = &r->ahead;
    int64_t of_rules = r->kinds[number].rules, first_size = tp_size_of(ahead, number), start = r->texts.size;
    const uint8_t *first = first_size ? ahead->bytes.data + ahead->places[number].at : 0;
    int64_t rules_size = tp_size_of(rules, of_rules);
    const uint8_t *rule = rules_size ? rules->bytes.data + rules->places[of_rules].at : 0;
    put(r, &r->texts, "{", 1);
    put(r, &r->texts, first, first_size);
    for (int i = 0; i < e->count; i++) {
        const tp_piece *piece = &e->pieces[i];
        tp_span name = renamed(rule, rules_size, piece->key);
        if (first_size > name.size && name.size && first[name.size] == ':' && !memcmp(first, name.at, (size_t)name.size))
            return 0;
        for (int j = 0; name.at != piece->key.at && j < e->count; j++)
            if (is_same(e->pieces[j].key, name))
                return 0;
        if (!name.size)
            continue;
        if (r->texts.size > start + 1)
            put(r, &r->texts, ",", 1);
        put(r, &r->texts, name.at, name.size);
        put(r, &r->texts, ":", 1);
        put(r, &r->texts, r->values.data + piece->value, piece->size);
    }
    if (r->texts.size == start + 1)
        r->texts.size = start;
    else
        put(r, &r->texts, "}", 1);
    return 1;
}

/* Takes one event: a row more or none, or why not. */
static int take(tp_events *r, const uint8_t *at, const uint8_t *end, tp_event_rows *rows, int64_t *count)
{
    tp_event e;
    if (!read_event(r, &e, at, end) || e.head[PH].size != 3)
        return FOREIGN;
    int phase = e.head[PH].at[1], is_arrow = phase == 's' || phase == 't' || phase == 'f', is_slice = phase == 'X';
    if (!is_arrow && !is_slice && !strchr("iIRP", phase))
        return FOREIGN;
    if (is_slice ? !e.has_dur || e.dur_ns > YEAR_NS : e.has_dur || (is_arrow && !piece_of(&e, "\"id\"")))
        return FOREIGN;
    int64_t correlation = correlation_of(r, &e);
    make_key(r, &e, is_arrow, correlation > 0);
    int64_t number = tp_table_find(&r->keys, r->key.data, r->key.size, tp_hash(r->key.data, r->key.size, r->keys.key));
    if (number < 0)
        return NEW;
    const tp_kind *kind = &r->kinds[number];
    if (kind->what == PASSED_OVER)
        return ALL;
    int64_t start = r->texts.size;
    if (kind->what == LEFT_TO_PYTHON || !write_args(r, &e, number)) {
        r->texts.size = start;
        return FOREIGN;
    }
    rows->ts[*count] = e.ts_ns;
    rows->rank[*count] = is_slice ? SLICE : MARK;
    rows->dur[*count] = is_slice ? e.dur_ns : 0;
    rows->number[*count] = kind->has_launch ? (int64_t)((uint64_t)correlation | r->launch_bits) : 0;
    rows->end[*count] = r->texts.size;
    rows->kind[*count] = (int32_t)number;
    ++*count;
    return ALL;
}

/* Takes the objects from `first` on, of which each is in text[starts[i], ends[i]), into rows from `made[0]` on, at
 * most `room`; moves `made[0]` and says in `made[1]` why it came back. The object that it came to, or
 * TP_NO_MEMORY. */
TP_EXPORT int64_t tp_events_take(tp_events *r, const uint8_t *text, const int64_t *starts, const int64_t *ends,
                                 int64_t first, int64_t count, tp_event_rows *rows, int64_t *made, int64_t room)
{
    r->no_memory = 0;
    made[1] = ALL;
    for (; first < count; first++) {
        made[1] = made[0] == room ? FULL : take(r, text + starts[first], text + ends[first], rows, &made[0]);
        if (made[1] != ALL)
            break;
    }
    return r->no_memory ? TP_NO_MEMORY : first;
}

/* Says what becomes of the events of the key that was NEW; the number of their kind, or TP_NO_MEMORY. `ahead` is the
 * text of an argument that comes first. */
TP_EXPORT int64_t tp_events_kind(tp_events *r, int what, int has_launch, int rules, const uint8_t *ahead, int64_t size)
{
    int64_t number = r->keys.strings.count;
    if (TP_GROW(r->kinds, r->kinds_room, number) || tp_strings_set(&r->ahead, number, ahead, size))
        return TP_NO_MEMORY;
    r->kinds[number] = (tp_kind){what, has_launch, rules};
    return tp_table_add(&r->keys, r->key.data, r->key.size, tp_hash(r->key.data, r->key.size, r->keys.key));
}

/* Gives the rules of a number: see `renamed`. */
TP_EXPORT int tp_events_rules(tp_events *r, int64_t number, const uint8_t *rules, int64_t size)
{
    return tp_strings_set(&r->rules, number, rules, size);
}

/* How many bytes the keys of all kinds have. */
TP_EXPORT int64_t tp_events_bytes(const tp_events *r)
{
    return r->keys.strings.bytes.size + r->ahead.bytes.size;
}

/* The texts of the rows since the last call: of each up to its `end`. They are gone with the next event. */
TP_EXPORT int64_t tp_events_texts(tp_events *r, const uint8_t **texts)
{
    int64_t size = r->texts.size;
    *texts = r->texts.data;
    r->texts.size = 0;
    return size;
}

/* Forgets all kinds. */
TP_EXPORT void tp_events_forget(tp_events *r)
{
    tp_table_clear(&r->keys);
    tp_strings_clear(&r->ahead);
}
