/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* BCC force-includes this file. Its own helpers refuse to compile without this option; no other option of the
 * kernel's configuration is needed. */
#define CONFIG_BPF_SYSCALL 1
