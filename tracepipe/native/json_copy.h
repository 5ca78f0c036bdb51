/* SPDX-License-Identifier: MIT */
/* JSON with blanks, as other programs write it: finds where its parts end, and copies values as orjson writes
 * them. As in json.h, a function returns where a value ends, or NULL where the value is not of this part of
 * JSON.
 */
#ifndef TP_JSON_COPY_H
#define TP_JSON_COPY_H

#include "json.h"
#include "tables.h"

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
