/* SPDX-License-Identifier: MIT */
/* Names of what is shown in addition to arguments. */
#include "shown.h"

#include "json.h"

/* By bit: the launch, the marks in their order, and the rest. */
static const struct {
    const char *name;
    size_t size;
} SHOWN[] = {
#define NAME(text) {text, sizeof text - 1}
    NAME("launch"), NAME("unclosed"), NAME("no_begin"), NAME("from_duration"), NAME("cpu"), NAME("source_ns"),
    NAME("grid"), NAME("block"), NAME("python"),
#undef NAME
};

#define SHOWN_COUNT ((int)(sizeof SHOWN / sizeof *SHOWN))

static int shadow_of(const uint8_t *key, size_t size)
{
    for (int i = 0; i < SHOWN_COUNT; i++)
        if (size == SHOWN[i].size && !memcmp(key, SHOWN[i].name, size))
            return 1 << i;
    return 0;
}

int tp_shadows(const uint8_t *text, int64_t size)
{
    const uint8_t *at = text, *end = text + size;
    int shadows = 0;
    if (at >= end || *at != '{')
        return -1;
    do {
        const uint8_t *key = at + 1, *after = tp_string(key, end);
        if (!after || after >= end || *after != ':')
            return -1;
        shadows |= shadow_of(key + 1, (size_t)(after - key - 2));
        if (!(at = tp_wide(after + 1, end, 0)) || at >= end)
            return -1;
    } while (*at == ',');
    return *at == '}' && at + 1 == end ? shadows : -1;
}
