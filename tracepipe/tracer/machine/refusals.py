"""Why the kernel refused a request of the capture, and how to fix it: the one place that interprets errno.

    operation, errno, machine ──▶ the first condition that applies ──▶ what happened, what to do

Measured on 6.1 and 6.18: without privileges bpf(2) answers EPERM and perf_event_open(2) EACCES; a filter of
system calls answers EPERM (Docker's) or ENOSYS (newer ones) for both.
"""

from __future__ import annotations

import errno
import os
from enum import Enum

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.machine.facts import Machine, this_machine

ENOTSUPP = 524
"""The kernel's own number, which errno.h does not define: the instruction at the place cannot be probed."""
_CONTAINER_FLAGS = "--privileged"
SUDO = 'sudo -E env "PATH=$PATH" tracepipe …'
"""Also finds tracepipe and the command in a virtual environment, as sudo alone uses its own search path."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
OLDEST = (5, 15)  # bpf_get_attach_cookie


class Operation(Enum):
    """A request to the kernel; ANY where the caller does not know which kind of probe it was."""

    MAP = "a map"
    PROGRAM = "a program"
    UPROBES = "a set of probes on functions of a file"
    UPROBE = "a probe on a function of a file"
    KPROBES = "a set of probes on kernel functions"
    KPROBE = "a probe on a kernel function"
    TRACEPOINT = "a tracepoint"
    TRACEFS = "tracefs"
    ANY = "a probe"
    CAPTURE = "a capture"


_UPROBES = (Operation.UPROBES, Operation.UPROBE)
_KPROBES = (Operation.KPROBES, Operation.KPROBE)


def _reason(operation: Operation, error: OSError, machine: Machine) -> tuple[str, str]:
    """A message, and how to fix it. Particular causes are before general ones."""
    number, what, text = error.errno, operation.value, _text(error)
    is_denial, is_root = number in (errno.EPERM, errno.EACCES), machine.euid == 0
    may = machine.has("CAP_SYS_ADMIN")
    # Before 5.11 maps counted against RLIMIT_MEMLOCK, and exceeding it gave EPERM.
    is_counted = operation in (Operation.MAP, Operation.PROGRAM, Operation.ANY)
    locks = is_counted and (0, 0) < machine.kernel < (5, 11)
    is_limited = machine.memlock_bytes is not None and 0 <= machine.memlock_bytes < 64 << 20
    if number in (errno.EPERM, errno.ENOMEM) and locks and is_limited and is_root:
        return f"This process may not lock enough memory for {what} on this kernel.", "ulimit -l unlimited"
    if is_denial and machine.lockdown == "confidentiality" and is_root:
        return (
            f"The kernel is locked down (confidentiality) and allows no tracing: {text}.",
            "Boot without lockdown=confidentiality (with Secure Boot: mokutil --disable-validation).",
        )
    if machine.seccomp and (number == errno.ENOSYS or (is_denial and may)):
        return (
            f"A system call filter (seccomp) denies this process {what}: {text}.",
            f"Start the container with {_CONTAINER_FLAGS} (or --security-opt seccomp=unconfined).",
        )
    if number == errno.ENOSYS:
        return (
            "This kernel has no bpf or perf_event_open system call.",
            "Use a kernel with CONFIG_BPF_SYSCALL and CONFIG_PERF_EVENTS.",
        )
    by_perf = operation in (Operation.UPROBE, Operation.KPROBE, Operation.TRACEPOINT)
    if is_denial and by_perf and not may and machine.has("CAP_BPF") and machine.has("CAP_PERFMON"):
        return (
            f"CAP_BPF and CAP_PERFMON without CAP_SYS_ADMIN do not allow {what}: {text}.",
            f"{SUDO}   (or Linux 6.6, where functions are probed without perf events)",
        )
    if is_denial and not is_root:
        return f"Capture with eBPF needs root: {text}.", SUDO
    if is_denial and machine.is_initial_user_namespace is False:
        return (
            f"The root user of a user namespace (a rootless container) is denied {what}: {text}.",
            f"Run it as root outside of it: sudo, or sudo podman run {_CONTAINER_FLAGS} …",
        )
    if is_denial and not may and (machine.container or machine.is_initial_pid_namespace is False):
        return (
            f"This container denies its root user {what}: {text}.",
            f"Start the container with {_CONTAINER_FLAGS}.",
        )
    if is_denial and not may:
        return (
            f"This process is root without CAP_SYS_ADMIN, and is denied {what}: {text}.",
            f"Run it with all capabilities; start a container with {_CONTAINER_FLAGS}.",
        )
    if is_denial:
        return (
            f"A security policy of this machine denies this process {what}: {text}.",
            "Look for the denial in the log of SELinux, AppArmor or the container: journalctl -k -g denied",
        )
    if number == errno.EMFILE:
        return f"This process may not open enough files for {what}.", "ulimit -n 8192"
    if number == errno.ENFILE:
        return "The system has too many open files.", "sysctl fs.file-max=1000000"
    if number == errno.ENOMEM:
        return (
            f"There is not enough memory for {what}: {text}.",
            "Lower --ring-bytes, or raise the limit of the process (ulimit -v) or the container "
            "(memory.max).",
        )
    if number == errno.EAGAIN:
        return (
            f"A limit of processes, threads or memory was reached for {what}: {text}.",
            "ulimit -u unlimited; ulimit -v unlimited; in a container, raise the cgroup's pids.max.",
        )
    if number == ENOTSUPP and operation in (*_UPROBES, *_KPROBES, Operation.ANY):
        return (
            "The first instruction of the function cannot be probed.",
            "Leave the function out: --exclude NAME.",
        )
    for kind, also in (("uprobe", ""), ("kprobe", "; the other layers need neither")):
        if number == errno.ENOENT and str(error.filename or "").endswith(f"{kind}/type"):
            configured = f"CONFIG_{kind.upper()}S and CONFIG_{kind.upper()}_EVENTS"
            return f"This kernel has no {kind}s.", f"Use a kernel with {configured}{also}."
    if number == errno.ENOENT and operation in _UPROBES:
        return (
            f"The file to probe does not exist here: {text}.",
            "Check the path; a container's files are not those of its host.",
        )
    if number in (errno.ENOENT, errno.EADDRNOTAVAIL, errno.ESRCH) and operation in _KPROBES:
        return (
            f"The kernel has no such function that can be probed: {text}.",
            "tracepipe hooks test HOOK   shows which functions there are.",
        )
    if number in (errno.ENOENT, errno.ENODEV) and operation in (Operation.TRACEPOINT, Operation.TRACEFS):
        return (
            f"The kernel does not show its tracepoints: {text}.",
            f"mount -t tracefs none /sys/kernel/tracing   (a container needs {_CONTAINER_FLAGS})",
        )
    if number in (errno.EINVAL, errno.E2BIG) and (0, 0) < machine.kernel < OLDEST:
        return f"Linux {machine.release} is too old for {what}.", "Use Linux 5.15 or later."
    several = (Operation.UPROBES, Operation.KPROBES)
    if number in (errno.EINVAL, errno.EOPNOTSUPP, errno.E2BIG) and operation in several:
        return (
            f"This kernel does not support {what}: they are attached one by one, and detach slowly.",
            "Use Linux 6.6 or later (kernel functions: 5.18 with CONFIG_FPROBE).",
        )
    if number == errno.EINVAL and operation == Operation.UPROBE:
        return (
            f"The place to probe is outside of the file's code: {text}.",
            "Check that the file is the one that is loaded; reinstall the library if it was replaced.",
        )
    if number == errno.EINVAL and operation == Operation.PROGRAM:
        return (
            f"The kernel's verifier refused {what}: {text}.",
            "Try --method bcc or --method bpftrace, and report it with this message.",
        )
    if number == errno.E2BIG:
        return (
            f"Linux allows 64 programs at a probe or tracepoint, and they are there already: {text}.",
            "End other captures and tracers, or record fewer layers: --layers.",
        )
    if number == errno.EBUSY:
        return (
            f"Another tool already uses {what}: {text}.",
            "End other tracers (perf, bpftrace, ftrace) and try again.",
        )
    return (
        f"The kernel refused {what}: {text}.",
        "Check the kernel: it needs CONFIG_UPROBES, CONFIG_BPF_EVENTS, CONFIG_FTRACE_SYSCALLS.",
    )


def check_file_systems(machine: Machine) -> None:
    """Raise CaptureUnavailable where /proc or /sys is missing."""
    if not machine.has_proc:
        raise CaptureUnavailable(
            "/proc is not mounted, or belongs to another process id namespace.",
            f"mount -t proc proc /proc   (a container needs {_CONTAINER_FLAGS}; unshare: --mount-proc)",
        )
    if not machine.has_sysfs:
        raise CaptureUnavailable(
            "/sys is not mounted.", f"mount -t sysfs sysfs /sys   (a container needs {_CONTAINER_FLAGS})"
        )


def explain(operation: Operation, error: OSError, machine: Machine | None = None) -> CaptureUnavailable:
    """The meaning of the kernel's answer to `operation` on this machine, and how to fix it."""
    return CaptureUnavailable(*_reason(operation, error, machine or this_machine()))


def shortage_of(error: BaseException) -> CaptureUnavailable | None:
    """The error for a shortage of memory, files or threads, by which too many system calls can fail to handle
    each; None for any other `error`.
    """
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, MemoryError):
        number = errno.ENOMEM
    if isinstance(error, RuntimeError) and "start new thread" in str(error):  # Python's message for EAGAIN
        number = errno.EAGAIN
    if number not in _SHORTAGES:
        return None
    return explain(Operation.CAPTURE, OSError(number, os.strerror(number)))


def _text(error: OSError) -> str:
    """`Operation not permitted (EPERM)`, with the verifier's message where there is one."""
    number = error.errno or 0
    name = "ENOTSUPP" if number == ENOTSUPP else errno.errorcode.get(number, str(number))
    stated = error.strerror or os.strerror(number)
    where = f" of {error.filename}" if error.filename else ""
    return f"{stated.rstrip('.')} ({name}){where}"
