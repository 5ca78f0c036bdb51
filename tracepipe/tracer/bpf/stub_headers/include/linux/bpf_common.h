/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Classic BPF's instruction classes: included by the bpf(2) definitions, used by no program here. */
