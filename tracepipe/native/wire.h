/* SPDX-License-Identifier: MIT */
/* Protobuf's varints and byte fields. */
#ifndef TP_WIRE_H
#define TP_WIRE_H

#include <stdint.h>
#include <string.h>

static inline int64_t tp_varint_size(int64_t value)
{
    return (64 - __builtin_clzll((uint64_t)value | 1) + 6) / 7;
}

static inline uint8_t *tp_varint(uint8_t *to, uint64_t value)
{
    for (; value >= 0x80; value >>= 7)
        *to++ = (uint8_t)(value | 0x80);
    *to++ = (uint8_t)value;
    return to;
}

static inline uint8_t *tp_bytes(uint8_t *to, const uint8_t *from, int64_t size)
{
    to = tp_varint(to, (uint64_t)size);
    if (size)
        memcpy(to, from, (size_t)size);
    return to + size;
}

#endif
