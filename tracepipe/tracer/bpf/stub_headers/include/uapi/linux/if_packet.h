/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Included by BCC for packet filters, which tracepipe does not use. */
