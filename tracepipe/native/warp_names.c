/* SPDX-License-Identifier: MIT */
/* Names of warps. */
#include "warp_names.h"

#include "decimal.h"

static uint8_t *put_text(uint8_t *to, const char *text)
{
    size_t size = strlen(text);
    memcpy(to, text, size);
    return to + size;
}

int tp_warp_name(tp_buffer *b, const tp_strings *names, const tp_kernel *kernel, int64_t number)
{
    const tp_place *place = tp_strings_has(names, kernel->name) ? &names->places[kernel->name] : 0;
    int64_t size = place ? place->size : 0;
    b->size = 0;
    if (tp_reserve(b, size + 128))
        return TP_NO_MEMORY;
    if (size)
        memcpy(b->data, names->bytes.data + place->at, (size_t)size);
    uint8_t *to = b->data + size;
    b->size = size;
    if (kernel->warps < 0)
        return 0;
    if (kernel->warps > 0) {
        int64_t block = number / kernel->warps, x = kernel->x, y = kernel->y;
        number %= kernel->warps;
        to = put_text(to, " block ");
        if (x > 0 && y > 0) {
            to = tp_decimal(put_text(to, "("), block % x);
            to = tp_decimal(put_text(to, ","), block / x % y);
            to = put_text(tp_decimal(put_text(to, ","), block / x / y), ")");
        } else {
            to = tp_decimal(to, block);
        }
    }
    to = tp_decimal(put_text(to, " warp "), number);
    b->size = to - b->data;
    return 0;
}
