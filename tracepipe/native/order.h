/* SPDX-License-Identifier: MIT */
/* Stable sorting by time. */
#ifndef TP_ORDER_H
#define TP_ORDER_H

#include <stdint.h>

/* Puts into `order` the places of `keys` in their order, those of one key as they stand. */
int tp_order(const int64_t *keys, int64_t count, int64_t *order);

#endif
