/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Included by BCC for stack-trace tables, which tracepipe does not use. */
