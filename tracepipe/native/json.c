/* What of json.h is too long for a header. */
#include "json.h"

#include "tables.h"

#define KEYS_MAX 24

/* One character of two bytes or more, as Python's decoder takes it: shortest form, no surrogates. */
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

/* How many bytes of the text an object of the native grammar has, 0 where there is none. */
TP_EXPORT int64_t tp_object_size(const uint8_t *text, int64_t size)
{
    const uint8_t *end = tp_object(text, text + size);
    return end ? end - text : 0;
}
