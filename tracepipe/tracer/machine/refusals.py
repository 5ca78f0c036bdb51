"""Why the kernel refused a request of the capture, and how to fix it: the one place that interprets errno.

    operation ──┐
    errno ──────┼──▶ first fitting line of _REASONS ──▶ what happened, what to do
    machine ────┘

Measured on 6.1 and 6.18: without privileges bpf(2) answers EPERM and perf_event_open(2) EACCES; a filter of
system calls answers EPERM (Docker's) or ENOSYS (newer ones) for both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.machine.facts import Machine, this_machine

ENOTSUPP = 524
"""The kernel's own number, which errno.h does not define."""
_CONTAINER_FLAGS = "--privileged"
SUDO = 'sudo -E env "PATH=$PATH" tracepipe …'
"""Also finds tracepipe and the command in a virtual environment, as sudo alone uses its own search path."""
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_OLDEST = (5, 15)  # bpf_get_attach_cookie


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


_UPROBE = frozenset({Operation.UPROBES, Operation.UPROBE, Operation.ANY})
_KPROBE = frozenset({Operation.KPROBES, Operation.KPROBE, Operation.ANY})
_PERF = frozenset({Operation.UPROBE, Operation.KPROBE, Operation.TRACEPOINT})
_MULTI = frozenset({Operation.UPROBES, Operation.KPROBES})


@dataclass(frozen=True, slots=True)
class _Case:
    operation: Operation
    error: OSError
    machine: Machine

    @property
    def is_denial(self) -> bool:
        return self.error.errno in (errno.EPERM, errno.EACCES)

    @property
    def is_root(self) -> bool:
        return self.machine.euid == 0

    @property
    def is_contained(self) -> bool:
        return bool(self.machine.container) or self.machine.is_initial_pid_namespace is False


@dataclass(frozen=True, slots=True)
class _Reason:
    """A cause: if `fits`, the message, with places for {what} and {error}, and the hint."""

    fits: Callable[[_Case], bool]
    happened: str
    fix: str


def _is(*numbers: int) -> Callable[[_Case], bool]:
    return lambda case: case.error.errno in numbers


def _of(operations: frozenset[Operation], *numbers: int) -> Callable[[_Case], bool]:
    return lambda case: case.operation in operations and case.error.errno in numbers


def _lacks_memlock(case: _Case) -> bool:
    """Whether RLIMIT_MEMLOCK is the cause: before 5.11 maps counted against it."""
    limit = case.machine.memlock_bytes
    return (
        case.error.errno in (errno.EPERM, errno.ENOMEM)
        and (0, 0) < case.machine.kernel < (5, 11)
        and limit is not None
        and 0 <= limit < 64 << 20
        and case.is_root
        and case.operation in (Operation.MAP, Operation.PROGRAM, Operation.ANY)
    )


def _is_filtered(case: _Case) -> bool:
    may = case.machine.has("CAP_SYS_ADMIN")
    return bool(case.machine.seccomp) and (case.error.errno == errno.ENOSYS or (case.is_denial and may))


# The first that fits applies, so particular causes are before general ones.
_REASONS = (
    _Reason(
        _lacks_memlock,
        "This process may not lock enough memory for {what} on this kernel.",
        "ulimit -l unlimited",
    ),
    _Reason(
        lambda case: case.is_denial and case.machine.lockdown == "confidentiality" and case.is_root,
        "The kernel is locked down (confidentiality) and allows no tracing: {error}.",
        "Boot without lockdown=confidentiality (with Secure Boot: mokutil --disable-validation).",
    ),
    _Reason(
        _is_filtered,
        "A system call filter (seccomp) denies this process {what}: {error}.",
        f"Start the container with {_CONTAINER_FLAGS} (or --security-opt seccomp=unconfined).",
    ),
    _Reason(
        _is(errno.ENOSYS),
        "This kernel has no bpf or perf_event_open system call.",
        "Use a kernel with CONFIG_BPF_SYSCALL and CONFIG_PERF_EVENTS.",
    ),
    _Reason(
        lambda case: (
            case.is_denial
            and case.operation in _PERF
            and not case.machine.has("CAP_SYS_ADMIN")
            and case.machine.has("CAP_BPF")
            and case.machine.has("CAP_PERFMON")
        ),
        "CAP_BPF and CAP_PERFMON without CAP_SYS_ADMIN do not allow {what}: {error}.",
        f"{SUDO}   (or Linux 6.6, where functions are probed without perf events)",
    ),
    _Reason(
        lambda case: case.is_denial and not case.is_root,
        "Capture with eBPF needs root: {error}.",
        SUDO,
    ),
    _Reason(
        lambda case: case.is_denial and case.machine.is_initial_user_namespace is False,
        "The root user of a user namespace (a rootless container) is denied {what}: {error}.",
        f"Run it as root outside of it: sudo, or sudo podman run {_CONTAINER_FLAGS} …",
    ),
    _Reason(
        lambda case: case.is_denial and case.is_contained and not case.machine.has("CAP_SYS_ADMIN"),
        "This container denies its root user {what}: {error}.",
        f"Start the container with {_CONTAINER_FLAGS}.",
    ),
    _Reason(
        lambda case: case.is_denial and not case.machine.has("CAP_SYS_ADMIN"),
        "This process is root without CAP_SYS_ADMIN, and is denied {what}: {error}.",
        f"Run it with all capabilities; start a container with {_CONTAINER_FLAGS}.",
    ),
    _Reason(
        lambda case: case.is_denial,
        "A security policy of this machine denies this process {what}: {error}.",
        "Look for the denial in the log of SELinux, AppArmor or the container: journalctl -k -g denied",
    ),
    _Reason(
        _is(errno.EMFILE),
        "This process may not open enough files for {what}.",
        "ulimit -n 8192",
    ),
    _Reason(_is(errno.ENFILE), "The system has too many open files.", "sysctl fs.file-max=1000000"),
    _Reason(
        _is(errno.ENOMEM),
        "There is not enough memory for {what}: {error}.",
        "Lower --ring-bytes, or raise the limit of the process (ulimit -v) or the container (memory.max).",
    ),
    _Reason(
        _is(errno.EAGAIN),
        "A limit of processes, threads or memory was reached for {what}: {error}.",
        "ulimit -u unlimited; ulimit -v unlimited; in a container, raise the cgroup's pids.max.",
    ),
    _Reason(
        _of(_UPROBE | _KPROBE, ENOTSUPP),
        "The first instruction of the function cannot be probed.",
        "Leave the function out: --exclude NAME.",
    ),
    _Reason(
        lambda case: (
            case.error.errno == errno.ENOENT and str(case.error.filename or "").endswith("uprobe/type")
        ),
        "This kernel has no uprobes.",
        "Use a kernel with CONFIG_UPROBES and CONFIG_UPROBE_EVENTS.",
    ),
    _Reason(
        lambda case: (
            case.error.errno == errno.ENOENT and str(case.error.filename or "").endswith("kprobe/type")
        ),
        "This kernel has no kprobes.",
        "Use a kernel with CONFIG_KPROBES and CONFIG_KPROBE_EVENTS; the other layers need neither.",
    ),
    _Reason(
        _of(_UPROBE - {Operation.ANY}, errno.ENOENT),
        "The file to probe does not exist here: {error}.",
        "Check the path; a container's files are not those of its host.",
    ),
    _Reason(
        _of(_KPROBE - {Operation.ANY}, errno.ENOENT, errno.EADDRNOTAVAIL, errno.ESRCH),
        "The kernel has no such function that can be probed: {error}.",
        "tracepipe hooks test HOOK   shows which functions there are.",
    ),
    _Reason(
        _of(frozenset({Operation.TRACEPOINT, Operation.TRACEFS}), errno.ENOENT, errno.ENODEV),
        "The kernel does not show its tracepoints: {error}.",
        f"mount -t tracefs none /sys/kernel/tracing   (a container needs {_CONTAINER_FLAGS})",
    ),
    _Reason(
        lambda case: (
            case.error.errno in (errno.EINVAL, errno.E2BIG) and (0, 0) < case.machine.kernel < _OLDEST
        ),
        "Linux {release} is too old for {what}.",
        "Use Linux 5.15 or later.",
    ),
    _Reason(
        _of(_MULTI, errno.EINVAL, errno.EOPNOTSUPP, errno.E2BIG),
        "This kernel does not support {what}: they are attached one by one, and detach slowly.",
        "Use Linux 6.6 or later (kernel functions: 5.18 with CONFIG_FPROBE).",
    ),
    _Reason(
        _of(frozenset({Operation.UPROBE}), errno.EINVAL),
        "The place to probe is outside of the file's code: {error}.",
        "Check that the file is the one that is loaded; reinstall the library if it was replaced.",
    ),
    _Reason(
        _of(frozenset({Operation.PROGRAM}), errno.EINVAL),
        "The kernel's verifier refused {what}: {error}.",
        "Try --method bcc or --method bpftrace, and report it with this message.",
    ),
    _Reason(
        _is(errno.EBUSY),
        "Another tool already uses {what}: {error}.",
        "End other tracers (perf, bpftrace, ftrace) and try again.",
    ),
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
    case = _Case(operation, error, machine or this_machine())
    words = {"what": operation.value, "error": _text(error), "release": case.machine.release}
    for reason in _REASONS:
        if reason.fits(case):
            return CaptureUnavailable(reason.happened.format(**words), reason.fix)
    return CaptureUnavailable(
        "The kernel refused {what}: {error}.".format(**words),
        "Check the kernel: it needs CONFIG_UPROBES, CONFIG_BPF_EVENTS, CONFIG_FTRACE_SYSCALLS.",
    )


def shortage_of(error: BaseException) -> CaptureUnavailable | None:
    """The error of the capture for a shortage of memory, files or threads; None where `error` is something
    else.

    Too many system calls can fail like this to handle each of them.
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
