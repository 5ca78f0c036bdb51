/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* BCC has the bpf(2) definitions that match its own helpers; use those, not a kernel's. */
#include <bcc/bpf.h>
