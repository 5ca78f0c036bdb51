/* SPDX-License-Identifier: MIT */
/* Takes apart an object of Chrome's trace JSON. */
#include "chrome_event.h"

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
                : IS(key, "\"Bytes\"")       ? BYTES
                : IS(key, "\"Addr\"")        ? ADDRESS
                : IS(key, "\"Total Allocated\"") ? TOTAL
                : IS(key, "\"correlation\"") ? CORRELATION
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

int tp_event_read(tp_buffer *values, tp_event *e, const uint8_t *at, const uint8_t *end)
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
