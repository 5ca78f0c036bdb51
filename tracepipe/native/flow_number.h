/* SPDX-License-Identifier: MIT */
/* The number of an arrow: `flow_number` of readers/chrome_numbers.py. */
#ifndef TP_FLOW_NUMBER_H
#define TP_FLOW_NUMBER_H

#include <stdint.h>

/* Of `before`, the id's letters, a quote and a bracket; below 0 where the id has others than plain ASCII, or all of
 * it is longer than a block of the hash. */
int64_t tp_flow_number(const uint8_t *before, int64_t before_size, const uint8_t *id, int64_t id_size);

#endif
