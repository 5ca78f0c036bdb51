/* SPDX-License-Identifier: MIT */
/* The sources and the compiler of this object, which the loader reads. */
#include "tables.h"

#ifndef TP_DIGEST
#define TP_DIGEST ""
#endif

#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* The digest of all sources, which build.py defines. */
TP_EXPORT const char *tp_digest(void)
{
    return TP_DIGEST;
}

TP_EXPORT const char *tp_compiler(void)
{
    return COMPILER;
}
