/* SPDX-License-Identifier: MIT */
/* Finds where the objects of a JSON array begin and end, by brackets and quotes alone: json_elements.py. */
#include "tables.h"

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
