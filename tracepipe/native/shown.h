/* SPDX-License-Identifier: MIT */
/* What is shown of an event besides its arguments; an argument of the same name takes its place. */
#ifndef TP_SHOWN_H
#define TP_SHOWN_H

#include <stdint.h>

/* A mark's bit is 1 << mark: SHOWS_MARK of the first one. */
enum { SHOWS_LAUNCH = 1, SHOWS_MARK = 1, SHOWS_CPU = 16, SHOWS_SOURCE = 32, SHOWS_SIZES = 64 + 128, SHOWS_LINE = 256 };

/* Which of these names an object has, a bit each; -1 where the text is none of the native grammar. */
int tp_shadows(const uint8_t *text, int64_t size);

/* The same of an object whose values are `tp_wide`. */
int tp_shadows_wide(const uint8_t *text, int64_t size);

#endif
