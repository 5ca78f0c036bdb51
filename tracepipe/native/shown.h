/* SPDX-License-Identifier: MIT */
/* What is shown of an event in addition to its arguments. An argument of the same name replaces it. */
#ifndef TP_SHOWN_H
#define TP_SHOWN_H

#include <stdint.h>

/* A mark's bit is 1 << mark: SHOWS_MARK of the first one. */
enum { SHOWS_LAUNCH = 1, SHOWS_MARK = 1, SHOWS_CPU = 16, SHOWS_SOURCE = 32, SHOWS_SIZES = 64 + 128, SHOWS_LINE = 256 };

/* Which of these names an object has, a bit each; -1 where one of its values is not `tp_wide`. */
int tp_shadows(const uint8_t *text, int64_t size);

#endif
