/* SPDX-License-Identifier: MIT */
/* The functions of json.h that are too long for a header. */
#include <math.h>
#include <stdio.h>

#include "json.h"
#include "tables.h"

#define KEYS_MAX 24

/* Reads one character of two bytes or more, with the rules of Python's decoder: shortest form, no surrogates.
 * */
const uint8_t *tp_utf8(const uint8_t *at, const uint8_t *end)
{
    uint8_t c = at[0];
    int more = c >= 0xF0 ? 3 : c >= 0xE0 ? 2 : 1;
    if (c < 0xC2 || c > 0xF4 || end - at <= more)
        return 0;
    for (int i = 1; i <= more; i++)
        if ((at[i] & 0xC0) != 0x80)
            return 0;
    if ((c == 0xE0 && at[1] < 0xA0) || (c == 0xED && at[1] > 0x9F) || (c == 0xF0 && at[1] < 0x90) ||
        (c == 0xF4 && at[1] > 0x8F))
        return 0;
    return at + more + 1;
}

const uint8_t *tp_real(const uint8_t *at, const uint8_t *end, double *value)
{
    char digits[48], *after;
    const uint8_t *start = at, *whole;
    at += at < end && *at == '-';
    for (whole = at; at < end && (uint8_t)(*at - '0') < 10;)
        at++;
    if (at == whole || (*whole == '0' && at - whole > 1))
        return 0;
    int is_real = 0;
    if (at < end && *at == '.') {
        const uint8_t *fraction = ++at;
        while (at < end && (uint8_t)(*at - '0') < 10)
            at++;
        if (at == fraction)
            return 0;
        is_real = 1;
    }
    if (at < end && (*at == 'e' || *at == 'E')) {
        at++;
        at += at < end && (*at == '+' || *at == '-');
        const uint8_t *exponent = at;
        while (at < end && (uint8_t)(*at - '0') < 10)
            at++;
        if (at == exponent)
            return 0;
        is_real = 1;
    }
    if (!is_real || at - start >= (int64_t)sizeof digits)
        return 0;
    memcpy(digits, start, (size_t)(at - start));
    digits[at - start] = 0;
    *value = strtod(digits, &after);
    /* Python's readers accept finite numbers only. */
    return after == digits + (at - start) && *value - *value == 0 ? at : 0;
}

const uint8_t *tp_wide(const uint8_t *at, const uint8_t *end, int depth)
{
    double ignored;
    const uint8_t *after;
    if (at >= end)
        return 0;
    if (*at != '[' && *at != '{') {
        after = tp_scalar(at, end);
        return after || (*at != '-' && (uint8_t)(*at - '0') >= 10) ? after : tp_real(at, end, &ignored);
    }
    uint8_t closing = *at + 2; /* of [ and of { */
    if (depth == WIDE_DEPTH)
        return 0;
    if (at + 1 < end && at[1] == closing)
        return at + 2;
    do {
        at++;
        if (closing == '}' && (!(at = tp_string(at, end)) || at >= end || *at++ != ':'))
            return 0;
        if (!(at = tp_wide(at, end, depth + 1)) || at >= end)
            return 0;
    } while (*at == ',');
    return *at == closing ? at + 1 : 0;
}

static const uint8_t *object(const uint8_t *at, const uint8_t *end, int depth);

/* A value of an object of the native grammar. */
static const uint8_t *inner(const uint8_t *at, const uint8_t *end, int depth)
{
    if (at >= end || (*at != '[' && *at != '{'))
        return tp_scalar(at, end);
    if (depth == WIDE_DEPTH)
        return 0;
    if (at + 1 < end && at[1] == *at + 2) /* [] or {} */
        return at + 2;
    if (*at == '{')
        return object(at, end, depth);
    do {
        if (!(at = inner(at + 1, end, depth + 1)) || at >= end)
            return 0;
    } while (*at == ',');
    return *at == ']' ? at + 1 : 0;
}

static const uint8_t *object(const uint8_t *at, const uint8_t *end, int depth)
{
    const uint8_t *keys[KEYS_MAX];
    int64_t sizes[KEYS_MAX];
    int count = 0;
    do {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':' || count == KEYS_MAX)
            return 0;
        for (int i = 0; i < count; i++)
            if (sizes[i] == after - key && !memcmp(keys[i], key, (size_t)sizes[i]))
                return 0;
        keys[count] = key;
        sizes[count++] = after - key;
        if (!(at = inner(after + 1, end, depth + 1)) || at >= end)
            return 0;
    } while (*at == ',');
    return *at == '}' ? at + 1 : 0;
}

const uint8_t *tp_object(const uint8_t *at, const uint8_t *end)
{
    return at < end && *at == '{' ? object(at, end, -1) : 0;
}

/* The size of the object of the native grammar at the start of the text, bytes; 0 where there is none. */
TP_EXPORT int64_t tp_object_size(const uint8_t *text, int64_t size)
{
    const uint8_t *end = tp_object(text, text + size);
    return end ? end - text : 0;
}

/* The digits of a real number that a double always keeps: with no more of them, its text is the shortest one.
 * And the digits that distinguish all doubles. */
#define KEPT_DIGITS 15
#define ALL_DIGITS 17

const uint8_t *tp_after_string(const uint8_t *at, const uint8_t *end)
{
    for (at++; at < end;) {
        uint8_t c = *at;
        if (c == '"')
            return at + 1;
        if (c == '\\') {
            if (at + 1 >= end || !at[1] || !strchr("\"\\bfnrt", at[1]))
                return 0;
            at += 2;
        } else if (c < 0x20) {
            return 0;
        } else if (c < 0x80) {
            at++;
        } else if (!(at = tp_utf8(at, end))) {
            return 0;
        }
    }
    return 0;
}

static void put(tp_buffer *to, const uint8_t *from, int64_t size)
{
    memcpy(to->data + to->size, from, (size_t)size);
    to->size += size;
}

/* Whether the text of a real number above 0 is the shortest one for its double, as orjson writes it. */
static int is_shortest(const uint8_t *at, const uint8_t *end)
{
    char text[2 * ALL_DIGITS], rounded[2 * ALL_DIGITS], digits[2 * ALL_DIGITS];
    int count = 0, exponent;
    if (end - at >= (int64_t)sizeof text)
        return 0;
    memcpy(text, at, (size_t)(end - at));
    text[end - at] = 0;
    for (; at < end; at++)
        if (*at != '.' && (count || *at != '0'))
            digits[count++] = (char)*at;
    if (count <= KEPT_DIGITS || count > ALL_DIGITS)
        return count <= KEPT_DIGITS;
    double value = strtod(text, 0);
    /* Next to a power of two, the shortest text may differ from the rounded one. */
    if (frexp(value, &exponent) == 0.5)
        return 0;
    for (int size = KEPT_DIGITS; size < count; size++) {
        snprintf(rounded, sizeof rounded, "%.*e", size - 1, value);
        if (strtod(rounded, 0) == value)
            return 0;
    }
    snprintf(rounded, sizeof rounded, "%.*e", count - 1, value);
    return rounded[0] == digits[0] && !memcmp(rounded + 2, digits + 1, (size_t)count - 1) && rounded[count + 1] == 'e';
}

/* Copies a number as orjson writes it: an integer as it is, a real number without trailing zeros. */
static const uint8_t *copy_number(tp_buffer *to, const uint8_t *at, const uint8_t *end)
{
    int64_t ignored;
    const uint8_t *after = tp_integer(at, end, &ignored), *start = at;
    if (after) {
        put(to, start, after - start);
        return after;
    }
    at += *at == '-';
    const uint8_t *point = tp_after_digits(at, end);
    if (point == at || point >= end || *point != '.' || (*at == '0' && point - at > 1))
        return 0;
    after = tp_after_digits(point + 1, end);
    const uint8_t *last = after;
    while (last > point + 2 && last[-1] == '0')
        last--;
    /* orjson writes small numbers with an exponent. */
    int is_small = *at == '0', is_zero = last == point + 2 && point[1] == '0';
    for (int i = 1; i <= 4 && point + i < last; i++)
        is_small = is_small && point[i] == '0';
    if (after == point + 1 || (is_small && !is_zero) || !is_shortest(at, last))
        return 0;
    put(to, start, last - start);
    return after;
}

const uint8_t *tp_copy_value(tp_buffer *to, const uint8_t *at, const uint8_t *end, int depth)
{
    if (at >= end)
        return 0;
    if (*at == '-' || (uint8_t)(*at - '0') < 10)
        return copy_number(to, at, end);
    if (*at != '[') {
        const uint8_t *after = *at == '"' ? tp_after_string(at, end) : tp_word(at, end);
        if (after)
            put(to, at, after - at);
        return after;
    }
    to->data[to->size++] = '[';
    at = tp_after_blanks(at + 1, end);
    if (at >= end || depth == COPY_DEPTH_MAX)
        return 0;
    for (int is_first = 1; is_first || *at == ','; is_first = 0) {
        if (is_first && *at == ']')
            break;
        if (!is_first) {
            to->data[to->size++] = ',';
            at = tp_after_blanks(at + 1, end);
        }
        if (!(at = tp_copy_value(to, at, end, depth + 1)) || (at = tp_after_blanks(at, end)) >= end)
            return 0;
    }
    to->data[to->size++] = ']';
    return *at == ']' ? at + 1 : 0;
}

/* Finds where the objects of a JSON array begin and end, by brackets and quotes alone: json_elements.py. */

static int is_blank(uint8_t c)
{
    return c == ' ' || (c >= '\t' && c <= '\r') || c == ',';
}

/* The end of the string that begins at `at`, 0 where it does not end in the text. */
static const uint8_t *string_end(const uint8_t *at, const uint8_t *end)
{
    for (at++; at < end; at++) {
        at = memchr(at, '"', (size_t)(end - at));
        if (!at)
            return 0;
        const uint8_t *slash = at;
        while (slash[-1] == '\\')
            slash--;
        if (!((at - slash) & 1))
            return at + 1;
    }
    return 0;
}

/* The end of the object that begins at `at`, 0 where it does not end in the text. */
static const uint8_t *object_end(const uint8_t *at, const uint8_t *end)
{
    for (int64_t depth = 0; at && at < end;) {
        uint8_t c = *at;
        if (c == '"') {
            at = string_end(at, end);
            continue;
        }
        at++;
        depth += (c == '{' || c == '[') - (c == '}' || c == ']');
        if (!depth && (c == '}' || c == ']'))
            return at;
    }
    return 0;
}

/* Finds the objects that follow each other from `done[0]` on, at most `room`. Moves `done[0]` to after the
 * last one with its blanks and commas. Sets `done[1]` to whether an object begins there that does not end.
 * Returns how many it found. */
TP_EXPORT int64_t tp_objects(const uint8_t *text, int64_t size, int64_t *done, int64_t *starts, int64_t *ends,
                             int64_t room)
{
    const uint8_t *at = text + done[0], *end = text + size;
    int64_t count = 0;
    done[1] = 0;
    while (count < room) {
        while (at < end && is_blank(*at))
            at++;
        if (at == end || *at != '{')
            break;
        const uint8_t *after = object_end(at, end);
        if (!after) {
            done[1] = 1;
            break;
        }
        starts[count] = at - text;
        ends[count++] = after - text;
        at = after;
    }
    done[0] = at - text;
    return count;
}
