/* SPDX-License-Identifier: MIT */
/* Times of 64 bits. Damaged or hostile recordings may have any of them. */
#ifndef TP_TIMES_H
#define TP_TIMES_H

#include <stdint.h>

/* The sum, at most the last time that 64 bits can have; `length` is not negative. */
static inline int64_t tp_after(int64_t ts, int64_t length)
{
    int64_t sum;
    return __builtin_add_overflow(ts, length, &sum) ? INT64_MAX : sum;
}

#endif
