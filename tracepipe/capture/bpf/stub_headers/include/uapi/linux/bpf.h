/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* BCC carries the bpf(2) definitions that match its own helpers; take those, not some kernel's. */
#include <bcc/bpf.h>
