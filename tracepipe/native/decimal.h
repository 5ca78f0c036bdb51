/* SPDX-License-Identifier: MIT */
/* Decimal digits. */
#ifndef TP_DECIMAL_H
#define TP_DECIMAL_H

#include <stdint.h>
#include <string.h>

/* At most 20 bytes. */
static inline uint8_t *tp_decimal(uint8_t *to, uint64_t value)
{
    static const char pairs[] = "0001020304050607080910111213141516171819202122232425262728293031323334353637383940"
                                "4142434445464748495051525354555657585960616263646566676869707172737475767778798081"
                                "828384858687888990919293949596979899";
    uint8_t digits[20], *at = digits + sizeof digits;
    for (; value >= 100; value /= 100)
        memcpy(at -= 2, pairs + value % 100 * 2, 2);
    if (value >= 10)
        memcpy(at -= 2, pairs + value * 2, 2);
    else
        *--at = (uint8_t)('0' + value);
    size_t size = (size_t)(digits + sizeof digits - at);
    memcpy(to, at, size);
    return to + size;
}

/* At most 20 bytes. */
static inline uint8_t *tp_signed_decimal(uint8_t *to, int64_t value)
{
    if (value >= 0)
        return tp_decimal(to, (uint64_t)value);
    *to++ = '-';
    return tp_decimal(to, -(uint64_t)value);
}

/* Writes a number below 1000 in three digits. */
static inline uint8_t *tp_three_digits(uint8_t *to, int64_t value)
{
    *to++ = (uint8_t)('0' + value / 100);
    *to++ = (uint8_t)('0' + value / 10 % 10);
    *to++ = (uint8_t)('0' + value % 10);
    return to;
}

#endif
