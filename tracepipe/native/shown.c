/* Names that are shown beside arguments. */
#include "shown.h"

#include "json.h"

/* By bit: the launch, the marks in their order, and the rest. */
static const char *const SHOWN[] = {"launch", "unclosed", "no_begin", "from_duration",
                                    "cpu",    "source_ns", "grid",     "block"};

uint8_t tp_shadows(const uint8_t *text, int64_t size)
{
    const uint8_t *at = text, *end = text + size;
    int shadows = 0;
    while (*at != '}') {
        const uint8_t *key = at + 2, *after = tp_string(at + 1, end);
        size_t length = (size_t)(after - key - 1);
        for (int i = 0; i < 8; i++)
            if (length == strlen(SHOWN[i]) && !memcmp(key, SHOWN[i], length))
                shadows |= 1 << i;
        at = tp_value(after + 1, end);
    }
    return (uint8_t)shadows;
}
