/* SPDX-License-Identifier: MIT */
/* Names of warps by kernel, block and warp: `vectorAdd block 3 warp 1`, `k block (0,1,2) warp 0`, `k warp 9`. */
#ifndef TP_WARP_NAMES_H
#define TP_WARP_NAMES_H

#include "tables.h"

/* A kernel with one size of its grid. `warps` is how many a block has, 0 where that is not known, or -1 where
 * the name is that of a range of warps, to which nothing is added. `x` and `y` are the blocks of the grid, 0
 * where blocks are numbered in one dimension. */
typedef struct {
    int64_t name, warps, x, y;
} tp_kernel;

/* Puts the name of a warp into `b`. `names` has the names of kernels. */
int tp_warp_name(tp_buffer *b, const tp_strings *names, const tp_kernel *kernel, int64_t number);

#endif
