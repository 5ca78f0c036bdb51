/* SPDX-License-Identifier: MIT */
/* Stable sorting by time. */
#ifndef TP_ORDER_H
#define TP_ORDER_H

#include <stdint.h>

/* Puts the places of `keys` into `order`, sorted by key and stable. Returns 0 or TP_NO_MEMORY. */
int tp_order(const int64_t *keys, int64_t count, int64_t *order);

#endif
