/* SPDX-License-Identifier: MIT */
/* Times of 64 bits, which recordings that nobody made can put at either end. */
#ifndef TP_TIMES_H
#define TP_TIMES_H

#include <stdint.h>

/* The sum, or the last time that there is; `length` is not negative. */
static inline int64_t tp_after(int64_t ts, int64_t length)
{
    int64_t sum;
    return __builtin_add_overflow(ts, length, &sum) ? INT64_MAX : sum;
}

#endif
