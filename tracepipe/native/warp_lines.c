/* A line with a batch of warps into its columns.
 *
 *     {"ts_ns":9,"type":"gpu_warp","name":"k","warp":[0,1],"sm":[4,4],"entry_ns":[0,32],"exit_ns":[512,544]}
 *
 * What is no column of warps is given back as text, for Python: a field of that line that is one stands there
 * as an empty array.
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
    int64_t counts[COLUMN_COUNT]; /* -1: the line does not have that column */
    int64_t rooms[COLUMN_COUNT];
    tp_buffer rest;
} tp_batch;

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

/* Numbers of an array, from 0 to 10^18 - 1 each. Text of `n` bytes has at most n / 2 of them. */
static const uint8_t *numbers(tp_batch *b, int column, const uint8_t *at, const uint8_t *end)
{
    int64_t count = 0, *values = b->values[column], room = b->rooms[column];
    if (at >= end || *at != '[')
        return 0;
    if (at + 1 < end && at[1] == ']') {
        b->counts[column] = 0;
        return at + 2;
    }
    do {
        if (count == room) {
            if (TP_GROW(b->values[column], b->rooms[column], count))
                return 0;
            values = b->values[column];
            room = b->rooms[column];
        }
        /* Most have few digits: the plain loop is the quick one. */
        const uint8_t *digits = ++at;
        uint64_t v = 0;
        while (at < end && (uint8_t)(*at - '0') < 10 && at - digits < 18)
            v = v * 10 + (uint64_t)(*at++ - '0');
        if (at == digits || (*digits == '0' && at - digits > 1) || at >= end)
            return 0;
        values[count++] = (int64_t)v;
    } while (*at == ',');
    b->counts[column] = count;
    return *at == ']' ? at + 1 : 0;
}

static int column_of(const uint8_t *key, int64_t size)
{
    for (int i = 0; i < COLUMN_COUNT; i++)
        if (size == (int64_t)strlen(COLUMNS[i]) && !memcmp(key, COLUMNS[i], (size_t)size))
            return i;
    return -1;
}

/* Reads a line: 1 done, 0 it is not of the native grammar. */
TP_EXPORT int tp_batch_read(tp_batch *b, const uint8_t *line, int64_t size)
{
    const uint8_t *at = line, *end = line + size;
    for (int i = 0; i < COLUMN_COUNT; i++)
        b->counts[i] = -1;
    b->rest.size = 0;
    if (!size || *at != '{')
        return 0;
    do {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':')
            return 0;
        int column = column_of(key + 1, after - key - 2);
        const uint8_t *value = after + 1;
        if (column >= 0 && b->counts[column] >= 0)
            return 0; /* twice: the last one counts */
        if (column >= 0)
            at = numbers(b, column, value, end);
        else if (value < end && *value == '{')
            at = tp_object(value, end);
        else
            at = tp_value(value, end);
        if (!at || at >= end)
            return 0;
        const uint8_t *kept = column >= 0 ? value : at;
        if (tp_append(&b->rest, key - 1, kept - key + 1) || (column >= 0 && tp_append(&b->rest, "[]", 2)))
            return 0;
    } while (*at == ',');
    return *at == '}' && at + 1 == end && !tp_append(&b->rest, "}", 1);
}

/* How many values a column has, -1 where the line lacks it, and where they are until the next line. */
TP_EXPORT int64_t tp_batch_column(const tp_batch *b, int column, const int64_t **values)
{
    *values = b->values[column];
    return b->counts[column];
}

TP_EXPORT int64_t tp_batch_rest(const tp_batch *b, const uint8_t **text)
{
    *text = b->rest.data;
    return b->rest.size;
}
