/* SPDX-License-Identifier: MIT */
/* The number of a flow: `flow_number` of readers/ids.py. */
#ifndef TP_FLOW_NUMBER_H
#define TP_FLOW_NUMBER_H

#include <stdint.h>

/* The number made from `before`, the characters of the id, a quote and a bracket. It is below 0 where the id
 * is not plain ASCII, or where all of it is longer than a block of the hash. */
int64_t tp_flow_number(const uint8_t *before, int64_t before_size, const uint8_t *id, int64_t id_size);

#endif
