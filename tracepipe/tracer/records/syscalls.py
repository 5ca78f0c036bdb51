"""The recorded system calls: ioctl, and those that block or change mappings.

Numbers by architecture. Source: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h
(aarch64). The calls that aarch64 lacks (poll, select, epoll_wait) are their p-variants there.
"""

from __future__ import annotations

# 335 (uretprobe, since 6.11) and 336 (uprobe) must stay out: the kernel uses them at probes, so they appear
# among the target's system calls, but the target did not call them.
_X86_64 = {
    0: "read",
    1: "write",
    7: "poll",
    9: "mmap",
    11: "munmap",
    16: "ioctl",
    17: "pread64",
    18: "pwrite64",
    19: "readv",
    20: "writev",
    23: "select",
    24: "sched_yield",
    35: "nanosleep",
    42: "connect",
    43: "accept",
    45: "recvfrom",
    47: "recvmsg",
    61: "wait4",
    74: "fsync",
    75: "fdatasync",
    202: "futex",
    230: "clock_nanosleep",
    232: "epoll_wait",
    247: "waitid",
    270: "pselect6",
    271: "ppoll",
    281: "epoll_pwait",
    288: "accept4",
    441: "epoll_pwait2",
    449: "futex_waitv",
}
_AARCH64 = {
    22: "epoll_pwait",
    29: "ioctl",
    63: "read",
    64: "write",
    65: "readv",
    66: "writev",
    67: "pread64",
    68: "pwrite64",
    72: "pselect6",
    73: "ppoll",
    82: "fsync",
    83: "fdatasync",
    95: "waitid",
    98: "futex",
    101: "nanosleep",
    115: "clock_nanosleep",
    124: "sched_yield",
    202: "accept",
    203: "connect",
    207: "recvfrom",
    212: "recvmsg",
    215: "munmap",
    222: "mmap",
    242: "accept4",
    260: "wait4",
    441: "epoll_pwait2",
    449: "futex_waitv",
}
SYSCALLS: dict[str, dict[int, str]] = {"x86_64": _X86_64, "aarch64": _AARCH64}

# The recorded arguments, by position; the others are addresses and flags, which tell little in a timeline.
SYSCALL_ARGUMENTS: dict[str, tuple[tuple[str, int], ...]] = {
    "read": (("fd", 0), ("count_bytes", 2)),
    "write": (("fd", 0), ("count_bytes", 2)),
    "pread64": (("fd", 0), ("count_bytes", 2)),
    "pwrite64": (("fd", 0), ("count_bytes", 2)),
    "readv": (("fd", 0),),
    "writev": (("fd", 0),),
    "recvfrom": (("fd", 0), ("count_bytes", 2)),
    "recvmsg": (("fd", 0),),
    "accept": (("fd", 0),),
    "accept4": (("fd", 0),),
    "connect": (("fd", 0),),
    "fsync": (("fd", 0),),
    "fdatasync": (("fd", 0),),
    "epoll_wait": (("fd", 0),),
    "epoll_pwait": (("fd", 0),),
    "epoll_pwait2": (("fd", 0),),
    "mmap": (("address", 0), ("size_bytes", 1)),
    "munmap": (("address", 0), ("size_bytes", 1)),
    "futex": (("address", 0),),
}

# Low bits of futex's second argument, include/uapi/linux/futex.h; 128 and 256 are flags.
FUTEX_OPERATIONS = {
    0: "WAIT",
    1: "WAKE",
    3: "REQUEUE",
    4: "CMP_REQUEUE",
    5: "WAKE_OP",
    6: "LOCK_PI",
    7: "UNLOCK_PI",
    8: "TRYLOCK_PI",
    9: "WAIT_BITSET",
    10: "WAKE_BITSET",
    11: "WAIT_REQUEUE_PI",
    12: "CMP_REQUEUE_PI",
    13: "LOCK_PI2",
}
