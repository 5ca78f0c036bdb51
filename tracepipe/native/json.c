/* SPDX-License-Identifier: MIT */
/* The functions of json.h that are too long for a header. */
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
    if (*at != '[') {
        after = tp_scalar(at, end);
        return after || (*at != '-' && (uint8_t)(*at - '0') >= 10) ? after : tp_real(at, end, &ignored);
    }
    if (depth == WIDE_DEPTH)
        return 0;
    if (at + 1 < end && at[1] == ']')
        return at + 2;
    do {
        if (!(at = tp_wide(at + 1, end, depth + 1)) || at >= end)
            return 0;
    } while (*at == ',');
    return *at == ']' ? at + 1 : 0;
}

const uint8_t *tp_object(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *keys[KEYS_MAX];
    int64_t sizes[KEYS_MAX];
    int count = 0;
    if (at >= end || *at != '{')
        return 0;
    do {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':' || count == KEYS_MAX)
            return 0;
        for (int i = 0; i < count; i++)
            if (sizes[i] == after - key && !memcmp(keys[i], key, (size_t)sizes[i]))
                return 0;
        keys[count] = key;
        sizes[count++] = after - key;
        if (!(at = tp_value(after + 1, end)) || at >= end)
            return 0;
    } while (*at == ',');
    return *at == '}' ? at + 1 : 0;
}

/* The size of the object of the native grammar at the start of the text, bytes; 0 where there is none. */
TP_EXPORT int64_t tp_object_size(const uint8_t *text, int64_t size)
{
    const uint8_t *end = tp_object(text, text + size);
    return end ? end - text : 0;
}
