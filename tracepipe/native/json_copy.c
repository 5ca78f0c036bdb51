/* SPDX-License-Identifier: MIT */
/* The functions of json_copy.h that are too long for a header. */
#include "json_copy.h"

#include <math.h>
#include <stdio.h>

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
