/* SPDX-License-Identifier: MIT */
/* The part of JSON that recordings are written in: no blanks, no escapes in strings, integers of 64 bits.
 *
 * Each function takes where a value starts and where the text ends, and returns where the value ends, or NULL
 * where the value is not of this part. Python reads such values, as it reads all of JSON.
 */
#ifndef TP_JSON_H
#define TP_JSON_H

#include <stdint.h>
#include <string.h>

#include "tables.h"

const uint8_t *tp_utf8(const uint8_t *at, const uint8_t *end);

static inline const uint8_t *tp_string(const uint8_t *at, const uint8_t *end)
{
    if (at >= end || *at != '"')
        return 0;
    for (at++; at < end;) {
        uint8_t c = *at;
        if (c == '"')
            return at + 1;
        if (c == '\\' || c < 0x20)
            return 0;
        if (c < 0x80)
            at++;
        else if (!(at = tp_utf8(at, end)))
            return 0;
    }
    return 0;
}

/* An integer from 0 to 2^63 - 1. */
static inline const uint8_t *tp_unsigned(const uint8_t *at, const uint8_t *end, int64_t *value)
{
    const uint8_t *start = at;
    uint64_t v = 0;
    while (at < end && (uint8_t)(*at - '0') < 10 && at - start < 19)
        v = v * 10 + (uint64_t)(*at++ - '0');
    if (at == start || (*start == '0' && at - start > 1) || v > INT64_MAX)
        return 0;
    if (at < end && ((uint8_t)(*at - '0') < 10 || *at == '.' || *at == 'e' || *at == 'E'))
        return 0;
    *value = (int64_t)v;
    return at;
}

static inline const uint8_t *tp_integer(const uint8_t *at, const uint8_t *end, int64_t *value)
{
    int negative = at < end && *at == '-';
    at = tp_unsigned(at + negative, end, value);
    if (!at || !negative)
        return at;
    *value = -*value;
    return *value ? at : 0; /* Python reads -0 as a float */
}

/* Reads x, y and z of a block or a thread. Returns what follows them, 0 where there is no such array. */
static inline const uint8_t *tp_index(const uint8_t *at, const uint8_t *end, int32_t *index)
{
    for (int axis = 0; axis < 3; axis++) {
        int64_t value;
        if (at >= end || *at != "[,,"[axis] || !(at = tp_unsigned(at + 1, end, &value)) || value > INT32_MAX)
            return 0;
        index[axis] = (int32_t)value;
    }
    return at < end && *at == ']' ? at + 1 : 0;
}

static inline const uint8_t *tp_word(const uint8_t *at, const uint8_t *end)
{
    static const char *words[] = {"true", "false", "null"};
    for (int i = 0; i < 3; i++) {
        size_t size = strlen(words[i]);
        if ((size_t)(end - at) >= size && !memcmp(at, words[i], size))
            return at + size;
    }
    return 0;
}

/* A string, an integer, true, false or null. */
static inline const uint8_t *tp_scalar(const uint8_t *at, const uint8_t *end)
{
    int64_t ignored;
    if (at >= end)
        return 0;
    if (*at == '"')
        return tp_string(at, end);
    if (*at == '-' || (uint8_t)(*at - '0') < 10)
        return tp_integer(at, end, &ignored);
    return tp_word(at, end);
}

/* A scalar or an array of scalars. */
static inline const uint8_t *tp_value(const uint8_t *at, const uint8_t *end)
{
    if (at >= end || *at != '[')
        return tp_scalar(at, end);
    do {
        if (!(at = tp_scalar(at + 1, end)) || at >= end)
            return 0;
    } while (*at == ',');
    return *at == ']' ? at + 1 : 0;
}

/* A number with a fraction or an exponent, as Python reads it. */
const uint8_t *tp_real(const uint8_t *at, const uint8_t *end, double *value);

/* A scalar, a real number, or an array or an object of such values, at most WIDE_DEPTH deep. Arrays and
 * objects may be empty. Keys of an object are not compared. */
#define WIDE_DEPTH 8
const uint8_t *tp_wide(const uint8_t *at, const uint8_t *end, int depth);

/* A non-empty object of scalars, arrays and objects, at most WIDE_DEPTH deep. Each object has different keys,
 * at most KEYS_MAX, as each key is compared with each other. */
const uint8_t *tp_object(const uint8_t *at, const uint8_t *end);

/* JSON with blanks, as other programs write it: finds where its parts end, and copies values as orjson writes
 * them. As in json.h, a function returns where a value ends, or NULL where the value is not of this part of
 * JSON.
 */

#define COPY_DEPTH_MAX 8

static inline const uint8_t *tp_after_blanks(const uint8_t *at, const uint8_t *end)
{
    while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    return at;
}

static inline const uint8_t *tp_after_digits(const uint8_t *at, const uint8_t *end)
{
    while (at < end && (uint8_t)(*at - '0') < 10)
        at++;
    return at;
}

/* A string that has only escapes which orjson writes the same way: two such strings are equal if their bytes
 * are. */
const uint8_t *tp_after_string(const uint8_t *at, const uint8_t *end);

/* Appends a value, a scalar or a list of values, without its blanks to `to`, which has room for all up to
 * `end`. */
const uint8_t *tp_copy_value(tp_buffer *to, const uint8_t *at, const uint8_t *end, int depth);

#endif
