/* SPDX-License-Identifier: MIT */
/* What this object was compiled from and by: the loader reads both. */
#include "tables.h"

#ifndef TP_DIGEST
#define TP_DIGEST ""
#endif

#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* Of all sources, by build.py. */
TP_EXPORT const char *tp_digest(void)
{
    return TP_DIGEST;
}

TP_EXPORT const char *tp_compiler(void)
{
    return COMPILER;
}
