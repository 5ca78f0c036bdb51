/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Included by BCC's own helpers. No program here uses the page size. */
#define PAGE_SIZE TRACEPIPE_PAGE_BYTES
