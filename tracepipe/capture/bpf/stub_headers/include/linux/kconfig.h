/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* BCC force-includes this file. Its own helpers refuse to compile without this option; nothing else is asked of
 * the kernel's configuration. */
#define CONFIG_BPF_SYSCALL 1
