/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* The registers that a uprobe's program gets, a part of the kernel's stable interface to tracing programs.
 * The programs use the argument registers of the C calling convention, the result and the stack pointer. */
#ifndef TRACEPIPE_STUB_PTRACE_H
#define TRACEPIPE_STUB_PTRACE_H
#if defined(TRACEPIPE_X86_64)
/* arch/x86/include/asm/ptrace.h, 21 words of 8 bytes:
 *   0 r15 r14 r13 r12 bp bx | 6 r11 r10 r9 r8 | 10 ax cx dx si di | 15 orig_ax ip cs flags sp ss */
struct pt_regs {
    unsigned long r15, r14, r13, r12, bp, bx;
    unsigned long r11, r10, r9, r8;
    unsigned long ax, cx, dx, si, di;
    unsigned long orig_ax, ip, cs, flags, sp, ss;
};
#elif defined(TRACEPIPE_AARCH64)
/* arch/arm64/include/uapi/asm/ptrace.h: x0-x30, sp, pc, pstate. */
struct pt_regs {
    unsigned long regs[31];
    unsigned long sp, pc, pstate;
};
#endif
#endif
