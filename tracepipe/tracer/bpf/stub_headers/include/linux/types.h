/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Fixed-width integers under the kernel's names: the same on every kernel and on both 64-bit architectures. */
#ifndef TRACEPIPE_STUB_TYPES_H
#define TRACEPIPE_STUB_TYPES_H
typedef unsigned char __u8, u8;
typedef unsigned short __u16, u16, __be16, __sum16;
typedef unsigned int __u32, u32, __be32, __wsum;
typedef unsigned long long __u64, u64, __be64;
typedef signed char __s8, s8;
typedef short __s16, s16;
typedef int __s32, s32, pid_t;
typedef long long __s64, s64;
typedef unsigned long size_t, uintptr_t;
typedef _Bool bool;
#define __bitwise
#define __aligned_u64 __u64 __attribute__((aligned(8)))
#ifndef NULL
#define NULL ((void *)0)
#endif
#endif
