/* SPDX-License-Identifier: MIT */
/* Makes columns of the lines of an event file: time, shape, arguments, duration, launch, stack.
 *
 *     {"ts_ns":1795,"type":"userspace","name":"cuInit","phase":"B","pid":7,"tid":7,"args":{"flags":0}}
 *              time └─────────────── shape ──────────────────────────────┘        └─ arguments ─┘
 *
 * The shape is the line without its time, arguments and stack, and with 0 for its duration and launch. Most
 * lines differ from an earlier one only in their time: those are found whole in one table, and no field is
 * looked at. Lines of threads of a GPU are all different: their shapes are without the indices of block and
 * thread, too.
 */
#include "tables.h"

#include "json.h"

/* The table of whole lines is a cache. It is emptied when it is full. */
#define LINES_MAX (1 << 12)
#define LINE_BYTES_MAX (3 << 20)
#define LINE_MAX 2048
#define FOREIGN (-1)
#define WARPS (-3) /* -2 is the shape of a row that is not an event */
#define INDEX 6
#define RECIPES_MAX (1 << 10)

typedef struct {
    int64_t dur, launch, stack; /* -1: none */
    int32_t shape, args;
} tp_line;

struct tp_reader {
    tp_table lines, shapes, args, recipes;
    tp_line *known;
    int64_t known_room;
    tp_buffer stem;
    int32_t index[INDEX]; /* of the line that was read last, if it has one */
    int has_index;
};

typedef struct {
    int64_t *ts;
    int32_t *shape, *args;
    int64_t *dur, *launch, *stack;
    int32_t *index; /* INDEX values for each line: block and thread, x, y and z each */
} tp_columns;

static const char START[] = "{\"ts_ns\":";
#define START_SIZE ((int64_t)sizeof START - 1)

TP_EXPORT void tp_reader_free(tp_reader *r)
{
    if (!r)
        return;
    tp_table_free(&r->lines);
    tp_table_free(&r->shapes);
    tp_table_free(&r->args);
    tp_table_free(&r->recipes);
    free(r->known);
    free(r->stem.data);
    free(r);
}

TP_EXPORT tp_reader *tp_reader_new(uint64_t key)
{
    tp_reader *r = calloc(1, sizeof *r);
    if (r && (tp_table_init(&r->lines, key) || tp_table_init(&r->shapes, key) || tp_table_init(&r->args, key) ||
              tp_table_init(&r->recipes, key))) {
        tp_reader_free(r);
        return 0;
    }
    return r;
}

static int64_t number_of(tp_table *t, const uint8_t *data, int64_t size)
{
    uint64_t hash = tp_hash(data, size, t->key);
    int64_t number = tp_table_find(t, data, size, hash);
    return number >= 0 ? number : tp_table_add(t, data, size, hash);
}

static int is_key(const uint8_t *key, int64_t size, const char *name)
{
    return size == (int64_t)strlen(name) + 2 && !memcmp(key + 1, name, (size_t)size - 2);
}

/* A field of an event: a scalar, or the three numbers of a size. Longer arrays belong to a batch of warps. */
static const uint8_t *field_of_event(const uint8_t *at, const uint8_t *end)
{
    if (at >= end || *at != '[')
        return tp_scalar(at, end);
    for (int i = 0; i < 3; i++)
        if (!(at = tp_scalar(at + 1, end)) || at >= end || *at != (i < 2 ? ',' : ']'))
            return 0;
    return at + 1;
}

/* Whether a line is of a thread of a GPU, by the value of its type. */
static int is_of_thread(const uint8_t *value, const uint8_t *end)
{
    static const char type[] = "\"gpu_thread\"";
    return end - value >= (int64_t)sizeof type - 1 && !memcmp(value, type, sizeof type - 1);
}

/* Whether a line is read in a different way: a thread's exit becomes an event of another type, and a batch of
 * warps is columns. */
static int is_by_itself(const uint8_t *value, const uint8_t *end)
{
    static const char of_exit[] = "\"gpu_thread_exit\"", of_warps[] = "\"gpu_warp\"";
    return (end - value >= (int64_t)sizeof of_exit - 1 && !memcmp(value, of_exit, sizeof of_exit - 1)) ||
           (end - value >= (int64_t)sizeof of_warps - 1 && !memcmp(value, of_warps, sizeof of_warps - 1));
}

/* Takes apart what follows the time of a line. Returns 1, 0 where it is not of the native grammar, or
 * TP_NO_MEMORY. */
static int take_apart(tp_reader *r, const uint8_t *at, const uint8_t *end, tp_line *line)
{
    int has_dur = 0, has_launch = 0, has_args = 0, has_type = 0, has_block = 0, has_thread = 0, of_thread = 0;
    *line = (tp_line){0, 0, -1, FOREIGN, -1};
    memset(r->index, -1, sizeof r->index);
    r->stem.size = 0;
    if (tp_append(&r->stem, START, START_SIZE) || tp_append(&r->stem, "0", 1))
        return TP_NO_MEMORY;
    for (at--; *at == ',';) {
        const uint8_t *key = at + 1, *after = tp_string(key, end), *value;
        if (!after || after >= end || *after != ':')
            return 0;
        int64_t size = after - key;
        value = after + 1;
        if (is_key(key, size, "ts_ns"))
            return 0; /* twice: the last one counts */
        if (is_key(key, size, "args")) {
            if (has_args++ || !(at = tp_object(value, end))) /* empty arguments are left to Python */
                return 0;
            int64_t args = number_of(&r->args, value, at - value);
            if (args < 0)
                return TP_NO_MEMORY;
            line->args = (int32_t)args;
        } else if (is_key(key, size, "dur_ns") || is_key(key, size, "launch") || is_key(key, size, "flow")) {
            int is_dur = key[1] == 'd'; /* an event has a launch or a flow, not both */
            if ((is_dur ? has_dur++ : has_launch++) ||
                !(at = tp_unsigned(value, end, is_dur ? &line->dur : &line->launch)))
                return 0;
            if (is_dur && line->dur >= (int64_t)1 << 62)
                return 0;
            if (tp_append(&r->stem, key - 1, value - key + 1) || tp_append(&r->stem, "0", 1))
                return TP_NO_MEMORY;
        } else if (is_key(key, size, "stack")) {
            if (line->stack >= 0 || !(at = tp_unsigned(value, end, &line->stack)))
                return 0;
        } else if (of_thread && (is_key(key, size, "block") || is_key(key, size, "thread"))) {
            int is_block = key[1] == 'b';
            if ((is_block ? has_block++ : has_thread++) ||
                !(at = tp_index(value, end, r->index + (is_block ? 0 : INDEX / 2))))
                return 0;
            r->has_index = 1;
        } else {
            if (is_key(key, size, "type")) {
                of_thread = is_of_thread(value, end);
                /* What precedes the type is in the shape already. */
                if (has_type++ || (of_thread && (has_block || has_thread)) || is_by_itself(value, end))
                    return 0;
            }
            has_block += is_key(key, size, "block");
            has_thread += is_key(key, size, "thread");
            if (!(at = field_of_event(value, end)))
                return 0;
            if (tp_append(&r->stem, key - 1, at - key + 1))
                return TP_NO_MEMORY;
        }
        if (at >= end)
            return 0;
    }
    if (*at != '}' || at + 1 != end || tp_append(&r->stem, "}", 1))
        return 0;
    int64_t shape = number_of(&r->shapes, r->stem.data, r->stem.size);
    if (shape < 0)
        return TP_NO_MEMORY;
    line->shape = (int32_t)shape;
    return 1;
}

/* Does the same as `take_apart`, with the table of whole lines where that has the line. */
static int read_rest(tp_reader *r, const uint8_t *at, const uint8_t *end, tp_line *line)
{
    int64_t size = end - at;
    r->has_index = 0;
    if (size > LINE_MAX)
        return take_apart(r, at, end, line);
    uint64_t hash = tp_hash(at, size, r->lines.key);
    int64_t number = tp_table_find(&r->lines, at, size, hash);
    if (number >= 0) {
        *line = r->known[number];
        return 1;
    }
    int done = take_apart(r, at, end, line);
    if (done != 1 || r->has_index) /* a line with the index of a thread does not repeat */
        return done;
    if (r->lines.strings.count >= LINES_MAX || r->lines.strings.bytes.size > LINE_BYTES_MAX)
        tp_table_clear(&r->lines);
    number = r->lines.strings.count;
    if (TP_GROW(r->known, r->known_room, number))
        return TP_NO_MEMORY;
    r->known[number] = *line;
    return tp_table_add(&r->lines, at, size, hash) < 0 ? TP_NO_MEMORY : 1;
}

/* Whether a line is a warp batch, whose type precedes its columns. */
static int has_warps(const uint8_t *at, const uint8_t *end)
{
    static const char type[] = "\"type\":\"gpu_warp\"";
    int64_t look = end - at < LINE_MAX ? end - at : LINE_MAX;
    return memmem(at, (size_t)look, type, sizeof type - 1) != 0;
}

/* Reads the lines of `text` from `done` on, at most `room`, each into a row of the columns. Moves `done` to
 * after them, and beyond `size` when there are no more. Returns how many lines it read, or TP_NO_MEMORY. A
 * line that is not of the native grammar gets the shape FOREIGN or WARPS, and its place and size as ts and
 * dur. `indices` is set to how many rows have an index. */
TP_EXPORT int64_t tp_read_lines(tp_reader *r, const uint8_t *text, int64_t size, int64_t *done, tp_columns *out,
                                int64_t *indices, int64_t room)
{
    const uint8_t *at = text + *done, *end = text + size;
    int64_t count = 0;
    *indices = 0;
    for (; count < room && at <= end; count++) {
        const uint8_t *newline = memchr(at, '\n', (size_t)(end - at));
        const uint8_t *stop = newline ? newline : end;
        tp_line line = {stop - at, 0, -1, FOREIGN, -1};
        int64_t ts = 0;
        const uint8_t *after = 0;
        if (stop - at > START_SIZE && !memcmp(at, START, (size_t)START_SIZE))
            after = tp_unsigned(at + START_SIZE, stop, &ts);
        int is_warps = stop - at > LINE_MAX && has_warps(at, stop), result = 0;
        if (!is_warps && after && after + 1 < stop && *after == ',' && ts < (int64_t)1 << 62)
            result = read_rest(r, after + 1, stop, &line);
        if (result < 0)
            return result;
        if (!result) {
            line = (tp_line){stop - at, 0, -1, is_warps || has_warps(at, stop) ? WARPS : FOREIGN, -1};
        } else if (r->has_index) {
            memcpy(out->index + INDEX * count, r->index, sizeof r->index);
            ++*indices;
        }
        out->ts[count] = line.shape < 0 ? at - text : ts;
        out->dur[count] = line.dur;
        out->launch[count] = line.launch;
        out->stack[count] = line.stack;
        out->shape[count] = line.shape;
        out->args[count] = line.args;
        at = stop + 1;
    }
    *done = at - text;
    return count;
}

static tp_table *table_of(tp_reader *r, int args)
{
    return args ? &r->args : &r->shapes;
}

/* How many shapes, or arguments, there are. */
TP_EXPORT int64_t tp_reader_count(tp_reader *r, int args)
{
    return table_of(r, args)->strings.count;
}

TP_EXPORT int64_t tp_reader_bytes(tp_reader *r, int args)
{
    return table_of(r, args)->strings.bytes.size;
}

TP_EXPORT int64_t tp_reader_text(tp_reader *r, int args, int64_t number, const uint8_t **text)
{
    const tp_strings *s = &table_of(r, args)->strings;
    if (!tp_strings_has(s, number))
        return -1;
    *text = s->bytes.data + s->places[number].at;
    return s->places[number].size;
}

/* Gives all texts, which are one after the other by number, and where each ends. Returns the bytes of all. */
TP_EXPORT int64_t tp_reader_texts(tp_reader *r, int args, int64_t *ends, const uint8_t **text)
{
    const tp_strings *s = &table_of(r, args)->strings;
    for (int64_t i = 0; i < s->count; i++)
        ends[i] = s->places[i].at + s->places[i].size;
    *text = s->bytes.data;
    return s->count ? ends[s->count - 1] : 0;
}

/* Returns the number of a text, which is added if it has none. */
TP_EXPORT int64_t tp_reader_number(tp_reader *r, int args, const uint8_t *text, int64_t size)
{
    return number_of(table_of(r, args), text, size);
}

int64_t tp_reader_recipe(tp_reader *r, const uint8_t *text, int64_t size)
{
    tp_table *t = &r->recipes;
    uint64_t hash = tp_hash(text, size, t->key);
    int64_t number = tp_table_find(t, text, size, hash);
    if (number < 0 && t->strings.count == RECIPES_MAX)
        return 0;
    if (number < 0 && (number = tp_table_add(t, text, size, hash)) < 0)
        return TP_NO_MEMORY;
    return number + 1;
}

int64_t tp_reader_recipe_text(tp_reader *r, int64_t recipe, const uint8_t **text)
{
    const tp_place *place = &r->recipes.strings.places[recipe - 1];
    *text = r->recipes.strings.bytes.data + place->at;
    return place->size;
}

int32_t tp_reader_recipe_of(tp_reader *r, int64_t number)
{
    return r->args.strings.places[number].recipe;
}

int64_t tp_reader_append(tp_reader *r, const uint8_t *text, int64_t size, int32_t recipe)
{
    tp_strings *s = &r->args.strings;
    int64_t number = s->count;
    if (tp_strings_set(s, number, text, size))
        return TP_NO_MEMORY;
    s->places[number].recipe = recipe;
    return number;
}

/* Sets the numbers of texts that follow each other, each up to its end; -1 for an empty one. Returns 0 or
 * TP_NO_MEMORY. */
TP_EXPORT int tp_reader_numbers(tp_reader *r, int args, const uint8_t *text, const int64_t *ends, int64_t count,
                                int32_t *numbers)
{
    for (int64_t i = 0, at = 0; i < count; at = ends[i++]) {
        int64_t number = -1;
        if (ends[i] > at && (number = number_of(table_of(r, args), text + at, ends[i] - at)) < 0)
            return TP_NO_MEMORY;
        numbers[i] = (int32_t)number;
    }
    return 0;
}

/* Keeps these shapes, or arguments, in this order, and forgets the others. */
TP_EXPORT int64_t tp_reader_keep(tp_reader *r, int args, const int64_t *numbers, int64_t count)
{
    tp_table *old = table_of(r, args), kept;
    if (tp_table_init(&kept, old->key))
        return TP_NO_MEMORY;
    for (int64_t i = 0; i < count; i++) {
        if (!tp_strings_has(&old->strings, numbers[i]))
            continue;
        const tp_place *p = &old->strings.places[numbers[i]];
        const uint8_t *text = old->strings.bytes.data + p->at;
        int failed;
        if (p->recipe) { /* it was not looked up, and is not in the table */
            failed = tp_strings_set(&kept.strings, kept.strings.count, text, p->size);
            if (!failed)
                kept.strings.places[kept.strings.count - 1].recipe = p->recipe;
        } else {
            failed = tp_table_add(&kept, text, p->size, tp_hash(text, p->size, kept.key)) < 0;
        }
        if (failed) {
            tp_table_free(&kept);
            return TP_NO_MEMORY;
        }
    }
    tp_table_free(old);
    *old = kept;
    tp_table_clear(&r->lines);
    return 0;
}
