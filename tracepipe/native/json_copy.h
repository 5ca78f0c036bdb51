/* SPDX-License-Identifier: MIT */
/* JSON as others write it, with blanks: where its parts end, and values as orjson writes them. As in json.h a function
 * gives where what it takes ends, or NULL where that is not of this part of JSON.
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

/* A string with those escapes alone that orjson writes as they stand, so that two are the same where their bytes
 * are. */
const uint8_t *tp_after_string(const uint8_t *at, const uint8_t *end);

/* Copies a value, a scalar or a list of values, without its blanks behind what is in `to`, which has room for all up to
 * `end`. */
const uint8_t *tp_copy_value(tp_buffer *to, const uint8_t *at, const uint8_t *end, int depth);

#endif
