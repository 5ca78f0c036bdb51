/* SPDX-License-Identifier: MIT OR GPL-2.0-only */
/* Programs loaded by type carry no kernel version since 5.0; BCC only needs the macros to exist. 5.15 is the
 * oldest kernel that tracepipe captures on. */
#define KERNEL_VERSION(major, minor, patch) (((major) << 16) + ((minor) << 8) + (patch))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 15, 0)
