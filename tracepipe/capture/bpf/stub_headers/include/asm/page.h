/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* The page size of the machine that compiles is the one that runs: the loader passes it. */
#define PAGE_SIZE TRACEPIPE_PAGE_BYTES
