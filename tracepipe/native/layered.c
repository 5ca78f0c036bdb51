/* SPDX-License-Identifier: MIT */
/* Reads the lines of layered tracers, and joins the lines of calls: readers/layered.py.
 *
 *     {"event_id":7,"ts":1.5,"pid":7,"tid":7,"type":"userspace","name":"f","phase":"E","retval":0}
 *      └ argument   └ time   └ place ┘       └ of the form ──┘        └ fields ┘ ┘        └ argument
 *
 * The form is the line without its values, but with its type. Most lines have the form that came after the form
 * before at the last time, so they are compared with it first. A form, its fields and a place are a stem. Python
 * reads each stem once, and gives its recipe: the text of the arguments, with the numbers of those values that
 * only become arguments.
 */
#include "json.h"
#include "tables.h"

#define HOLES_MAX 48
#define PARTS_MAX 64
#define LINE_MAX 2048
#define INDEX 6
#define PLACE 3
#define ID_LIMIT INT32_MAX
#define FOREIGN (-1)
#define NS_OF_MS 1000000
/* Below 2^51 ns, six decimals of a millisecond are exact: layered.py. */
#define EXACT_NS ((int64_t)1 << 51)
#define DIGITS_MAX 15
#define LENGTH_MAX 1e12
/* Where so many arguments of a form in a row were new, only one after so many others is looked up. */
#define UNIQUE 8
#define LOOK_EVERY 16

#define KEYS_MAX (1 << 12)
#define OPEN_MAX 16
#define APART_NS 100000
#define SURELY 10

typedef struct {
    int64_t ts, batch;
    int32_t place;
    uint8_t says_so, is_begin;
} tp_entry;

typedef struct {
    tp_entry entries[OPEN_MAX];
    int64_t exits, missing; /* of the function with this number */
    int32_t count;
} tp_calls;

/* What stands before a value, in the text of its form, and what the value means. */
typedef struct {
    uint16_t at, size;
    uint8_t means;
} tp_part;

typedef struct {
    int64_t parts;
    int32_t count, next, unique; /* the form that came next; arguments in a row that were new */
} tp_form;

typedef struct {
    tp_table forms, stems;
    tp_strings recipes;
    tp_form *known;
    tp_part *parts, scanned[PARTS_MAX];
    int64_t known_room, parts_count, parts_room;
    tp_buffer form, key, stem, holes, args;
    int64_t hole_ends[HOLES_MAX];
    const uint8_t *literal;
    int32_t last;           /* form */
    int count, size, group; /* of holes; of parts; of types */
    tp_calls *calls;
} tp_layered;

typedef struct {
    int64_t *ts;
    int32_t *stem, *args;
    int64_t *dur;
    int32_t *index;
} tp_layered_rows;

typedef struct {
    int64_t ts, dur;
    int has_ts, has_dur, has_type;
    int32_t place[PLACE], index[INDEX];
} tp_layered_row;

enum group { OTHER, MEMORY, TRANSFER, THREAD }; /* of types: what the values of their keys decide differs */

TP_EXPORT void tp_layered_free(tp_layered *l)
{
    if (!l)
        return;
    tp_table_free(&l->forms);
    tp_table_free(&l->stems);
    tp_strings_free(&l->recipes);
    free(l->known);
    free(l->parts);
    free(l->form.data);
    free(l->key.data);
    free(l->stem.data);
    free(l->holes.data);
    free(l->args.data);
    free(l->calls);
    free(l);
}

TP_EXPORT tp_layered *tp_layered_new(uint64_t key)
{
    tp_layered *l = calloc(1, sizeof *l);
    int failed = !l || tp_table_init(&l->forms, key) || tp_table_init(&l->stems, key);
    failed = failed || tp_reserve(&l->form, 2 * LINE_MAX) || tp_reserve(&l->key, 2 * LINE_MAX);
    failed = failed || tp_reserve(&l->stem, 2 * LINE_MAX) || tp_reserve(&l->holes, 2 * LINE_MAX);
    if (l && (failed || !(l->calls = calloc(KEYS_MAX, sizeof *l->calls)))) {
        tp_layered_free(l);
        return 0;
    }
    if (l)
        l->last = -1;
    return l;
}

/* Forgets all forms and stems. */
TP_EXPORT void tp_layered_forget(tp_layered *l)
{
    tp_table_clear(&l->forms);
    tp_table_clear(&l->stems);
    tp_strings_clear(&l->recipes);
    l->parts_count = 0;
    l->last = -1;
}

/* Sets the recipe of a stem: text, and a HOLE with the number of a hole. A stem without one is read by Python. */
TP_EXPORT int tp_layered_set(tp_layered *l, tp_reader *r, int64_t number, const uint8_t *recipe, int64_t size)
{
    int64_t known = tp_reader_recipe(r, recipe, size);
    if (known < 0 || tp_strings_set(&l->recipes, number, recipe, size))
        return TP_NO_MEMORY;
    l->recipes.places[number].recipe = (int32_t)known;
    return 0;
}

/* What a value means. Those from TS to TYPE mean it outside of `args` alone. */
enum means { ARGUMENT, NO_OBJECT, US, MS, FIELD, DECIDES, TS, PID, TID, CPU, NAMES, BLOCK, INDEX_OF, ARGS, TYPE, OF_GROUP };

/* What the value of a key means; OF_GROUP and a group where it decides more than an argument there. */
static int key_of(const uint8_t *key, int64_t size)
{
#define IS(name) (!memcmp(key, name, sizeof name - 1))
    switch (size) {
    case 2:
        return IS("ts") ? TS : IS("op") ? DECIDES : ARGUMENT;
    case 3:
        return IS("pid")   ? PID
               : IS("tid") ? TID
               : IS("cpu") ? CPU
               : IS("cmd") ? DECIDES
               : IS("gpu") ? OF_GROUP + THREAD
                           : ARGUMENT;
    case 4:
        return IS("type")                 ? TYPE
               : IS("name") || IS("comm") ? NAMES
               : IS("args")               ? ARGS
               : IS("kind")               ? OF_GROUP + TRANSFER
                                          : ARGUMENT;
    case 5:
        return IS("phase") ? NAMES : IS("layer") ? DECIDES : IS("block") ? BLOCK : ARGUMENT;
    case 6:
        return IS("result") || IS("retval")   ? OF_GROUP + MEMORY
               : IS("kernel") || IS("device") ? OF_GROUP + THREAD
               : IS("thread")                 ? INDEX_OF
                                              : ARGUMENT;
    case 9:
        return IS("direction") || IS("ioctl_cmd") ? DECIDES : ARGUMENT;
    case 11:
        return IS("duration_us") ? US : IS("duration_ms") ? MS : ARGUMENT;
    }
#undef IS
    return ARGUMENT;
}

/* What the value of a key means in a line of a group of types. */
static int meaning_of(const uint8_t *key, int64_t size, int depth, int group, uint8_t first)
{
    int means = key_of(key, size);
    if (depth && means >= TS && means <= TYPE)
        return ARGUMENT;
    if (means == ARGS && first != '{')
        return NO_OBJECT;
    if ((means == BLOCK || means == INDEX_OF) && group != THREAD)
        return ARGUMENT;
    if (means >= OF_GROUP)
        return means == OF_GROUP + group ? FIELD : ARGUMENT;
    return means == DECIDES || means == NAMES ? FIELD : means;
}

static int group_of(const uint8_t *value, const uint8_t *end)
{
#define IS(type) (end - value >= (int64_t)sizeof type - 1 && !memcmp(value, type, sizeof type - 1))
    return IS("\"memory\"") ? MEMORY : IS("\"transfer\"") ? TRANSFER : IS("\"gpu_thread") ? THREAD : OTHER;
#undef IS
}

/* Reads a number of at most DIGITS_MAX digits. Returns what follows it, 0 where there is none. */
static const uint8_t *read_decimal(const uint8_t *at, const uint8_t *end, int64_t *digits, int *decimals)
{
    const uint8_t *start = at, *point = 0;
    *digits = 0;
    for (; at < end && ((uint8_t)(*at - '0') < 10 || (*at == '.' && !point)); at++) {
        if (*at == '.')
            point = at;
        else
            *digits = *digits * 10 + (*at - '0');
        if (at - start > DIGITS_MAX)
            return 0;
    }
    const uint8_t *whole = point ? point : at;
    *decimals = point ? (int)(at - point - 1) : 0;
    if (whole == start || (*start == '0' && whole - start > 1) || (point && !*decimals))
        return 0;
    return at;
}

/* Milliseconds as nanoseconds, where they are exact. */
static const uint8_t *read_ms(const uint8_t *at, const uint8_t *end, int64_t *ns)
{
    int decimals;
    const uint8_t *after = read_decimal(at, end, ns, &decimals);
    if (!after || decimals > 6)
        return 0;
    for (; decimals < 6; decimals++)
        if ((*ns *= 10) >= EXACT_NS)
            return 0;
    return *ns < EXACT_NS ? after : 0;
}

/* A length, rounded as Python rounds. */
static const uint8_t *read_length(const uint8_t *at, const uint8_t *end, double scale, int64_t *ns)
{
    static const double tens[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15};
    int64_t digits;
    int decimals;
    const uint8_t *after = read_decimal(at, end, &digits, &decimals);
    if (!after)
        return 0;
    double value = (double)digits / tens[decimals] * scale;
    if (value > LENGTH_MAX * scale)
        return 0;
    if (!decimals) {
        *ns = digits * (int64_t)scale;
        return after;
    }
    *ns = (int64_t)value;
    double rest = value - (double)*ns;
    *ns += rest > 0.5 || (rest == 0.5 && (*ns & 1));
    return after;
}

/* Appends the text of a value that becomes an argument. */
static const uint8_t *read_hole(tp_layered *l, const uint8_t *at, const uint8_t *end)
{
    int64_t ignored;
    if (l->count == HOLES_MAX || at >= end)
        return 0;
    const uint8_t *after = *at == '{' ? tp_object(at, end) : tp_unsigned(at, end, &ignored);
    if (after) {
        memcpy(l->holes.data + l->holes.size, at, (size_t)(after - at));
        l->holes.size += after - at;
    } else if (*at == '{' || !(after = tp_copy_value(&l->holes, at, end, 0))) {
        return 0;
    }
    l->hole_ends[l->count++] = l->holes.size;
    return after;
}

/* Reads a value. Returns what follows it, 0 where Python must read the line. */
static inline __attribute__((always_inline)) const uint8_t *read_value(tp_layered *l, int means, const uint8_t *at, const uint8_t *end, tp_layered_row *row)
{
    const uint8_t *after;
    int64_t value;
    switch (means) {
    case TS:
        return read_ms(at, end, &row->ts);
    case US:
    case MS:
        return read_length(at, end, means == US ? 1e3 : 1e6, &row->dur);
    case PID:
    case TID:
    case CPU:
        if (!(after = tp_unsigned(at, end, &value)) || value > ID_LIMIT)
            return 0;
        row->place[means - PID] = (int32_t)value;
        return after;
    case FIELD:
        if (!(after = tp_scalar(at, end)))
            return 0;
        memcpy(l->key.data + l->key.size, at, (size_t)(after - at));
        l->key.size += after - at;
        l->key.data[l->key.size++] = HOLE;
        return after;
    case BLOCK:
    case INDEX_OF:
        after = read_hole(l, at, end);
        return after && tp_index(at, end, row->index + (means == BLOCK ? 0 : INDEX / 2)) == after ? after : 0;
    case NO_OBJECT:
        return at < end && *at == '{' ? 0 : read_hole(l, at, end);
    }
    return read_hole(l, at, end);
}

static void begin_line(tp_layered *l, tp_layered_row *row)
{
    *row = (tp_layered_row){0};
    memset(row->place, -1, sizeof row->place);
    memset(row->index, -1, sizeof row->index);
    l->holes.size = l->count = 0;
    l->key.size = (1 + PLACE) * sizeof(int32_t);
}

/* Appends what stands before `at`, and what the value there means, to the form. Returns whether there is room. */
static int put_part(tp_layered *l, const uint8_t *at, uint8_t means)
{
    if (l->size == PARTS_MAX)
        return 0;
    const uint8_t mark[] = {HOLE, means + 1};
    l->scanned[l->size++] = (tp_part){(uint16_t)l->form.size, (uint16_t)(at - l->literal), means};
    memcpy(l->form.data + l->form.size, l->literal, (size_t)(at - l->literal));
    l->form.size += at - l->literal;
    memcpy(l->form.data + l->form.size, mark, sizeof mark);
    l->form.size += sizeof mark;
    return 1;
}

/* Reads the members of an object: a line, or its arguments. Returns what follows it. */
static const uint8_t *scan_members(tp_layered *l, const uint8_t *at, const uint8_t *end, tp_layered_row *row, int depth,
                                   int group)
{
    at = tp_after_blanks(at + 1, end);
    if (at < end && *at == '}')
        return at + 1;
    for (;; at = tp_after_blanks(at + 1, end)) {
        const uint8_t *key = at, *value = tp_string(key, end);
        if (!value)
            return 0;
        int64_t size = value - key - 2;
        value = tp_after_blanks(value, end);
        if (value >= end || *value != ':')
            return 0;
        value = tp_after_blanks(value + 1, end);
        if (value >= end)
            return 0;
        int means = meaning_of(key + 1, size, depth, group, *value);
        if (means == ARGS) {
            at = scan_members(l, value, end, row, 1, group);
        } else if (means == TYPE) {
            row->has_type++;
            if ((at = tp_scalar(value, end)))
                l->group = group_of(value, at);
        } else {
            if ((means == TS && row->has_ts++) || ((means == US || means == MS) && row->has_dur++))
                return 0;
            if (!put_part(l, value, (uint8_t)means))
                return 0;
            l->literal = at = read_value(l, means, value, end, row);
        }
        at = at ? tp_after_blanks(at, end) : end;
        if (at >= end || (*at != ',' && *at != '}'))
            return 0;
        if (*at == '}')
            return at + 1;
    }
}

/* Reads a line, and finds the number of its form, which may be new. Returns FOREIGN where Python must read the
 * line, or -2 without memory. */
static int64_t scan(tp_layered *l, const uint8_t *at, const uint8_t *end, tp_layered_row *row)
{
    for (int group = l->group, again = 0;; group = l->group, again = 1) {
        begin_line(l, row);
        l->form.size = l->size = 0;
        l->literal = at;
        const uint8_t *start = tp_after_blanks(at, end);
        const uint8_t *after = start < end && *start == '{' ? scan_members(l, start, end, row, 0, group) : 0;
        if (row->has_type == 1 && l->group != group && !again)
            continue;
        if (!row->has_type)
            l->group = OTHER;
        if (!after || row->has_type != 1 || !row->has_ts || l->group != group || tp_after_blanks(after, end) != end)
            return FOREIGN;
        break;
    }
    if (!put_part(l, end, ARGUMENT))
        return FOREIGN;
    uint64_t hash = tp_hash(l->form.data, l->form.size, l->forms.key);
    int64_t form = tp_table_find(&l->forms, l->form.data, l->form.size, hash);
    if (form >= 0)
        return form;
    if (TP_GROW(l->known, l->known_room, l->forms.strings.count))
        return -2;
    if (TP_GROW(l->parts, l->parts_room, l->parts_count + l->size))
        return -2;
    if ((form = tp_table_add(&l->forms, l->form.data, l->form.size, hash)) < 0)
        return -2;
    memcpy(l->parts + l->parts_count, l->scanned, (size_t)l->size * sizeof *l->parts);
    l->known[form] = (tp_form){l->parts_count, l->size, -1, 0};
    l->parts_count += l->size;
    return form;
}

/* memcmp takes longer for the few bytes between two values. */
static inline int is_same(const uint8_t *a, const uint8_t *b, int64_t size)
{
    uint64_t x, y;
    uint32_t p, q;
    if (size < 4) {
        for (; size > 0 && *a == *b; a++, b++)
            size--;
        return !size;
    }
    for (; size > 8; a += 8, b += 8, size -= 8) {
        memcpy(&x, a, sizeof x);
        memcpy(&y, b, sizeof y);
        if (x != y)
            return 0;
    }
    if (size < 4)
        a -= 4 - size, b -= 4 - size, size = 4;
    memcpy(&p, a, sizeof p);
    memcpy(&q, b, sizeof q);
    if (p != q)
        return 0;
    memcpy(&p, a + size - sizeof p, sizeof p);
    memcpy(&q, b + size - sizeof q, sizeof q);
    return p == q;
}

/* Reads a line that may have a form. Returns whether it has. */
static int has_form(tp_layered *l, int32_t form, const uint8_t *at, const uint8_t *end, tp_layered_row *row)
{
    const tp_form *f = &l->known[form];
    const tp_part *part = l->parts + f->parts, *last = part + f->count - 1;
    const uint8_t *text = l->forms.strings.bytes.data + l->forms.strings.places[form].at;
    begin_line(l, row);
    for (;; part++) {
        if (end - at < part->size || !is_same(at, text + part->at, part->size))
            return 0;
        at += part->size;
        if (part == last)
            return at == end;
        if (!(at = read_value(l, part->means, at, end, row)))
            return 0;
    }
}

/* Gives the text of a stem, with 0 in place of time, length and place, and HOLE in place of arguments, and its
 * process, thread and processor, -1 each where there is none. Returns its size, -1 where there is none. */
TP_EXPORT int64_t tp_layered_stem(tp_layered *l, int64_t number, const uint8_t **text, int32_t *place)
{
    const tp_strings *s = &l->stems.strings, *forms = &l->forms.strings;
    if (!tp_strings_has(s, number))
        return -1;
    const uint8_t *key = s->bytes.data + s->places[number].at, *end = key + s->places[number].size;
    int32_t head[1 + PLACE];
    memcpy(head, key, sizeof head);
    memcpy(place, head + 1, PLACE * sizeof *place);
    key += sizeof head;
    const tp_form *f = &l->known[head[0]];
    const uint8_t *form = forms->bytes.data + forms->places[head[0]].at;
    l->stem.size = 0;
    for (const tp_part *part = l->parts + f->parts, *last = part + f->count - 1;; part++) {
        uint8_t hole = part->means == TS || part->means == US || part->means == MS ||
                               (part->means >= PID && part->means <= CPU)
                           ? '0'
                           : HOLE;
        tp_append(&l->stem, form + part->at, part->size); /* a line has room */
        if (part == last)
            break;
        if (part->means == FIELD) {
            const uint8_t *after = memchr(key, HOLE, (size_t)(end - key));
            tp_append(&l->stem, key, after - key);
            key = after + 1;
        } else {
            tp_append(&l->stem, &hole, 1);
        }
    }
    *text = l->stem.data;
    return l->stem.size;
}

/* Makes the arguments of a line. Returns their number, -1 where there are none, or a lower number without memory. */
static int64_t make_args(tp_layered *l, tp_reader *r, int64_t stem)
{
    const tp_place *place = &l->recipes.places[stem];
    const uint8_t *at = l->recipes.bytes.data + place->at, *end = at + place->size;
    if (at == end)
        return -1;
    for (l->args.size = 0; at < end;) {
        const uint8_t *hole = memchr(at, HOLE, (size_t)(end - at)), *literal = hole ? hole : end;
        if (tp_append(&l->args, at, literal - at))
            return -2;
        at = literal;
        if (hole && at + 1 < end && at[1] < l->count) {
            int64_t from = at[1] ? l->hole_ends[at[1] - 1] : 0;
            if (tp_append(&l->args, l->holes.data + from, l->hole_ends[at[1]] - from))
                return -2;
        }
        at += 2 * !!hole;
    }
    int32_t *unique = &l->known[l->last].unique;
    int is_new = *unique >= UNIQUE && *unique < UNIQUE + LOOK_EVERY;
    int64_t count = tp_reader_count(r, 1), number;
    if (is_new)
        number = tp_reader_append(r, l->args.data, l->args.size, place->recipe);
    else
        number = tp_reader_number(r, 1, l->args.data, l->args.size);
    if (!is_new)
        *unique = number < count ? 0 : *unique < UNIQUE ? *unique + 1 : UNIQUE;
    else
        ++*unique;
    return number < 0 ? -2 : number;
}

/* Reads a line. Returns the number of its stem, FOREIGN where Python must read it, or -2 without memory. */
static int64_t read_line(tp_layered *l, const uint8_t *at, const uint8_t *end, tp_layered_row *row)
{
    if (end - at > LINE_MAX)
        return FOREIGN;
    int64_t form = l->last < 0 ? -1 : l->known[l->last].next;
    if (form < 0 || !has_form(l, (int32_t)form, at, end, row))
        form = scan(l, at, end, row);
    if (form < 0)
        return form;
    if (l->last >= 0)
        l->known[l->last].next = (int32_t)form;
    l->last = (int32_t)form;
    const int32_t head[1 + PLACE] = {(int32_t)form, row->place[0], row->place[1], row->place[2]};
    memcpy(l->key.data, head, sizeof head);
    uint64_t hash = tp_hash(l->key.data, l->key.size, l->stems.key);
    int64_t stem = tp_table_find(&l->stems, l->key.data, l->key.size, hash);
    if (stem < 0 && (stem = tp_table_add(&l->stems, l->key.data, l->key.size, hash)) < 0)
        return -2;
    return stem;
}

/* Reads the lines of `text` from `done` on, each into a row; `known` is how many stems have been given to
 * `tp_layered_set`, if they have a recipe. Stops before a line that has a new stem. Returns how many lines it
 * read, or TP_NO_MEMORY. */
TP_EXPORT int64_t tp_layered_read(tp_layered *l, tp_reader *r, const uint8_t *text, int64_t size, int64_t *done,
                                  int64_t known, tp_layered_rows *out, int64_t from, int64_t room)
{
    const uint8_t *at = text + *done, *end = text + size;
    int64_t count = from;
    for (; count < room && at <= end; count++) {
        const uint8_t *newline = memchr(at, '\n', (size_t)(end - at)), *stop = newline ? newline : end;
        tp_layered_row row;
        int64_t stem = read_line(l, at, stop, &row), args = -1;
        if (stem >= known)
            break;
        if (stem >= 0 && !tp_strings_has(&l->recipes, stem))
            stem = FOREIGN;
        if (stem < FOREIGN || (stem >= 0 && (args = make_args(l, r, stem)) < -1))
            return TP_NO_MEMORY;
        out->stem[count] = (int32_t)stem;
        if (stem >= 0) {
            out->ts[count] = row.ts;
            out->dur[count] = row.dur;
            out->args[count] = (int32_t)args;
            memcpy(out->index + INDEX * count, row.index, sizeof row.index);
        }
        at = stop + 1;
    }
    *done = at - text;
    return count;
}

/* The records of `bpftrace -f json`: bpftrace_records.py. */
#define PRINTF "{\"type\": \"printf\", \"data\": \""
#define PRINTF_END "\"}"

/* Copies a record of a printf as the line that it has. Returns what follows it; 0 where the record is not one
 * whole line with braces, or has other characters than printable ASCII. Sets `*is_held` to whether a text that
 * has no newline may wait for its end after the record. */
static uint8_t *put_printed(uint8_t *to, const uint8_t *at, const uint8_t *end, int *is_held)
{
    const int64_t around = sizeof PRINTF - 1 + sizeof PRINTF_END - 1;
    int is_known = end - at > around && !memcmp(at, PRINTF, sizeof PRINTF - 1), newlines = 0;
    if (!is_known) { /* it may be a printf in other words */
        *is_held |= memmem(at, (size_t)(end - at), "printf", 6) || memchr(at, '\\', (size_t)(end - at));
        return 0;
    }
    int has_braces = at[sizeof PRINTF - 1] == '{', was_held = *is_held;
    const uint8_t *start = to;
    const uint8_t *stop = end - (sizeof PRINTF_END - 1);
    is_known = !memcmp(stop, PRINTF_END, sizeof PRINTF_END - 1);
    for (at += sizeof PRINTF - 1; is_known && at < stop; at++) {
        is_known = *at >= ' ' && *at < 0x7F && *at != '"';
        if (*at == '\\') {
            is_known = ++at < stop && (*at == '"' || *at == '\\' || *at == 'n');
            newlines += *at == 'n';
        }
        *to++ = *at;
    }
    if (memmem(start, (size_t)(to - start), "printf", 6) || memmem(start, (size_t)(to - start), "\\u", 2)) {
        *is_held = 1; /* the line may itself be a record */
        return 0;
    }
    int ends = is_known && newlines && stop[-1] == 'n' && stop[-2] == '\\' && stop[-3] != '\\';
    *is_held = !ends || (has_braces && was_held);
    return ends && newlines == 1 && has_braces && !was_held ? to - 1 : 0;
}

/* Copies lines to `to`, which has room for them; records of which each is a whole line become this line. Returns
 * the size of the copy. */
TP_EXPORT int64_t tp_layered_unwrap(const uint8_t *text, int64_t size, uint8_t *to, int *is_held)
{
    const uint8_t *at = text, *end = text + size, *newline;
    uint8_t *start = to;
    for (; (newline = memchr(at, '\n', (size_t)(end - at))); at = newline + 1) {
        uint8_t *after = put_printed(to, at, newline, is_held);
        to = after ? after : (uint8_t *)memcpy(to, at, (size_t)(newline - at)) + (newline - at);
        *to++ = '\n';
    }
    memcpy(to, at, (size_t)(end - at)); /* without a newline, the line may have been cut */
    return to + (end - at) - start;
}

/* Joins two lines of a call: class _CallEnds of layered.py, which is the same in Python. */

enum role { INSTANT, BEGIN, END, END_WITH_LENGTH, WHOLE };

static void change(tp_entry *entry, uint8_t phase, uint8_t *phases, int64_t batch)
{
    if (entry->batch != batch)
        return;
    phases[entry->place] = phase;
    entry->is_begin = phase == BEGIN;
}

static void enter(tp_calls *c, tp_calls *function, int64_t ts, int32_t place, uint8_t role, uint8_t *phases, int64_t batch)
{
    if (function->exits && c->count && !c->entries[c->count - 1].says_so) {
        function->missing++;
        change(&c->entries[c->count - 1], INSTANT, phases, batch);
    }
    if (function->exits > SURELY * function->missing)
        phases[place] = BEGIN;
    if (c->count == OPEN_MAX)
        memmove(c->entries, c->entries + 1, --c->count * sizeof *c->entries);
    c->entries[c->count++] = (tp_entry){ts, batch, place, role == BEGIN, phases[place] == BEGIN};
}

/* Returns 1, 0 where there is no entry, and -1 where the entry is too far before to become a begin. */
static int leave(tp_calls *c, tp_calls *function, int64_t *ts, int64_t dur, int32_t place, uint8_t role, uint8_t *phases,
                 int64_t batch)
{
    int64_t start = *ts - (role == WHOLE ? 0 : dur), least = INT64_MAX;
    int found = -1;
    for (int i = c->count - 1; i >= 0; i--) {
        int64_t apart = c->entries[i].ts > start ? c->entries[i].ts - start : start - c->entries[i].ts;
        if (apart < least) {
            least = apart;
            found = i;
        }
    }
    if (found < 0 || least > APART_NS || c->entries[found].ts > start + dur)
        return 0;
    tp_entry *entry = &c->entries[found];
    function->exits++;
    function->missing -= function->missing > 0 && found != c->count - 1 && !entry->says_so;
    c->count = found;
    change(entry, BEGIN, phases, batch);
    if (!entry->is_begin)
        return -1;
    if (role == WHOLE) {
        phases[place] = END_WITH_LENGTH;
        *ts += dur;
    }
    return 1;
}

/* Forgets all calls. */
TP_EXPORT void tp_layered_forget_calls(tp_layered *l)
{
    for (int i = 0; i < KEYS_MAX; i++)
        l->calls[i].count = 0, l->calls[i].exits = l->calls[i].missing = 0;
}

/* Notes lines from `at` on. `key` is the number of the thread and function of each, -1 for a line that is not
 * noted, and `function` that of the function. `phases` has the roles of all rows of the batch by their places;
 * they change. Returns `to`, or the number of a line whose entry is too far before it. */
TP_EXPORT int64_t tp_layered_note(tp_layered *l, const int32_t *key, const int32_t *function, int64_t *ts,
                                  const int64_t *dur, uint8_t *phases, int64_t first, int64_t batch, int64_t at, int64_t to)
{
    for (; at < to; at++) {
        int32_t place = (int32_t)(first + at);
        if (key[at] < 0)
            continue;
        tp_calls *c = &l->calls[key[at]], *f = &l->calls[function[at]];
        uint8_t role = phases[place];
        int left = 0;
        if (role == INSTANT || role == BEGIN)
            enter(c, f, ts[at], place, role, phases, batch);
        else if (role == END || !(left = leave(c, f, &ts[at], dur[at], place, role, phases, batch)))
            c->count -= role != WHOLE && c->count && c->entries[c->count - 1].says_so;
        if (left < 0)
            break;
    }
    return at;
}
