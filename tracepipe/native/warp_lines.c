/* SPDX-License-Identifier: MIT */
/* Makes columns of lines with batches of warps, one line after the other.
 *
 *     {"ts_ns":9,"type":"gpu_warp","name":"k","warp":[0,1],"sm":[4,4],"entry_ns":[0,32],"exit_ns":[512,544]}
 *
 * The rest of a line is returned as text, for Python. In it, columns of warps are empty arrays, and the time
 * and the launch are 0, so that lines of one kernel have the same text.
 */
#include "json.h"
#include "tables.h"

/* In the order of event/warps.py. */
static const char *const COLUMNS[] = {"warp",       "sm",          "slot",       "entry_ns",  "entry_clk",
                                      "entry_mask", "exit_count",  "range_count", "exit_ns",   "exit_clk",
                                      "exit_mask",  "range_name",  "range_clk",  "range_dur_clk", "range_open"};
#define COLUMN_COUNT ((int)(sizeof COLUMNS / sizeof *COLUMNS))

typedef struct {
    int64_t *values[COLUMN_COUNT];
    int64_t used[COLUMN_COUNT];
    int64_t rooms[COLUMN_COUNT];
    tp_buffer rest;
} tp_batch;

/* By line: whether it is of the native grammar, its time, its launch (-1: the one in its text), where its
 * text ends among the texts, and COLUMN_COUNT counts of values, -1 for a column that the line does not have.
 * */
typedef struct {
    uint8_t *done;
    int64_t *ts, *launch, *rest, *counts;
} tp_warp_lines;

TP_EXPORT tp_batch *tp_batch_new(void)
{
    return calloc(1, sizeof(tp_batch));
}

TP_EXPORT void tp_batch_free(tp_batch *b)
{
    for (int i = 0; b && i < COLUMN_COUNT; i++)
        free(b->values[i]);
    if (b)
        free(b->rest.data);
    free(b);
}

/* Reads an array of numbers, from 0 to 10^18 - 1 each. A text of `n` bytes has at most n / 2 of them. */
static const uint8_t *numbers(tp_batch *b, int column, const uint8_t *at, const uint8_t *end)
{
    int64_t count = b->used[column], *values = b->values[column], room = b->rooms[column];
    if (at >= end || *at != '[')
        return 0;
    if (at + 1 < end && at[1] == ']')
        return at + 2;
    do {
        if (count == room) {
            if (TP_GROW(b->values[column], b->rooms[column], count))
                return 0;
            values = b->values[column];
            room = b->rooms[column];
        }
        /* Most numbers have few digits, for which a plain loop is fastest. */
        const uint8_t *digits = ++at;
        uint64_t v = 0;
        while (at < end && (uint8_t)(*at - '0') < 10 && at - digits < 18)
            v = v * 10 + (uint64_t)(*at++ - '0');
        if (at == digits || (*digits == '0' && at - digits > 1) || at >= end)
            return 0;
        values[count++] = (int64_t)v;
    } while (*at == ',');
    b->used[column] = count;
    return *at == ']' ? at + 1 : 0;
}

static int column_of(const uint8_t *key, int64_t size)
{
    for (int i = 0; i < COLUMN_COUNT; i++)
        if (size == (int64_t)strlen(COLUMNS[i]) && !memcmp(key, COLUMNS[i], (size_t)size))
            return i;
    return -1;
}

static int is_key(const uint8_t *key, const uint8_t *after, const char *name)
{
    int64_t size = after - key - 2;
    return size == (int64_t)strlen(name) && !memcmp(key + 1, name, (size_t)size);
}

/* Reads a line. Returns 1, or 0 where it is not of the native grammar. */
static int read_line(tp_batch *b, const uint8_t *line, int64_t size, int64_t *ts, int64_t *launch, int64_t *counts)
{
    const uint8_t *at = line, *end = line + size;
    int has_launch = 0;
    *ts = *launch = -1;
    for (int i = 0; i < COLUMN_COUNT; i++)
        counts[i] = -1;
    if (!size || *at != '{')
        return 0;
    do {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':')
            return 0;
        int column = column_of(key + 1, after - key - 2);
        const uint8_t *value = after + 1;
        const char *instead = 0;
        if (column >= 0) {
            int64_t before = b->used[column];
            if (counts[column] >= 0 || !(at = numbers(b, column, value, end)))
                return 0; /* twice: the last one counts */
            counts[column] = b->used[column] - before;
            instead = "[]";
        } else if (is_key(key, after, "ts_ns")) {
            if (*ts >= 0 || !(at = tp_unsigned(value, end, ts)) || *ts >= (int64_t)1 << 62)
                return 0;
            instead = "0";
        } else if (is_key(key, after, "launch")) {
            if (has_launch++)
                return 0;
            if ((at = tp_unsigned(value, end, launch)))
                instead = "0";
            else
                at = tp_value(value, end);
        } else if (value < end && *value == '{') {
            at = tp_object(value, end);
        } else {
            at = tp_value(value, end);
        }
        if (!at || at >= end)
            return 0;
        if (tp_append(&b->rest, key - 1, (instead ? value : at) - key + 1) ||
            (instead && tp_append(&b->rest, instead, (int64_t)strlen(instead))))
            return 0;
    } while (*at == ',');
    return *at == '}' && at + 1 == end && *ts >= 0 && !tp_append(&b->rest, "}", 1);
}

/* Reads the lines of a text at these places and of these sizes. A line that is not of the native grammar adds
 * nothing. */
TP_EXPORT void tp_batch_read(tp_batch *b, const uint8_t *text, int64_t lines, const int64_t *at, const int64_t *size,
                             const tp_warp_lines *out)
{
    memset(b->used, 0, sizeof b->used);
    b->rest.size = 0;
    for (int64_t i = 0; i < lines; i++) {
        int64_t used[COLUMN_COUNT], rest = b->rest.size;
        memcpy(used, b->used, sizeof used);
        out->done[i] = (uint8_t)read_line(b, text + at[i], size[i], &out->ts[i], &out->launch[i],
                                          out->counts + i * COLUMN_COUNT);
        if (!out->done[i]) {
            memcpy(b->used, used, sizeof used);
            b->rest.size = rest;
        }
        out->rest[i] = b->rest.size;
    }
}

/* Returns how many values of all lines a column has, and sets where they are. They are valid until other
 * lines are read. */
TP_EXPORT int64_t tp_batch_column(const tp_batch *b, int column, const int64_t **values)
{
    *values = b->values[column];
    return b->used[column];
}

TP_EXPORT int64_t tp_batch_rest(const tp_batch *b, const uint8_t **text)
{
    *text = b->rest.data;
    return b->rest.size;
}
