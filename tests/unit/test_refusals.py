"""Every way in which the kernel is known to refuse a probe, and what is reported."""

from __future__ import annotations

import errno

import pytest

from tests.support.machines import machine
from tracepipe.tracer.machine.refusals import ENOTSUPP, Operation, explain

PMU = "/sys/bus/event_source/devices/{}/type"


ROOT = machine()
USER = machine(euid=1000, capabilities=frozenset())
DOCKER = machine(container="docker", seccomp=2, capabilities=frozenset(), is_initial_pid_namespace=False)
ROOTLESS = machine(is_initial_user_namespace=False, container="podman")
FILTERED = machine(seccomp=2)
POWERLESS = machine(capabilities=frozenset())
FILTERED_AND_POWERLESS = machine(seccomp=2, capabilities=frozenset())
PERFMON = machine(capabilities=frozenset({"CAP_BPF", "CAP_PERFMON"}))
LOCKED_DOWN = machine(lockdown="confidentiality")
LINUX_4, LINUX_5, LINUX_6 = (machine(release=release) for release in ("4.19.1", "5.4.0-150", "6.1.0"))

CASES = {
    "user, bpf": (Operation.MAP, errno.EPERM, USER, "needs root", "sudo"),
    "user, perf": (Operation.UPROBE, errno.EACCES, USER, "needs root", "sudo"),
    "user, unknown operation": (Operation.ANY, errno.EPERM, USER, "needs root", "sudo"),
    "container, bpf": (Operation.PROGRAM, errno.EPERM, DOCKER, "container", "--privileged"),
    "container, perf": (Operation.TRACEPOINT, errno.EACCES, DOCKER, "container", "--privileged"),
    "rootless container": (Operation.MAP, errno.EPERM, ROOTLESS, "user namespace", "outside"),
    "filter that says EPERM": (Operation.MAP, errno.EPERM, FILTERED, "seccomp", "unconfined"),
    "filter that says ENOSYS": (Operation.MAP, errno.ENOSYS, FILTERED_AND_POWERLESS, "seccomp", "unconfined"),
    "no bpf in the kernel": (Operation.MAP, errno.ENOSYS, ROOT, "no bpf", "CONFIG_BPF_SYSCALL"),
    "few capabilities, perf uprobe": (Operation.UPROBE, errno.EACCES, PERFMON, "CAP_SYS_ADMIN", "sudo"),
    "no capability, root": (
        Operation.UPROBES,
        errno.EPERM,
        POWERLESS,
        "without CAP_SYS_ADMIN",
        "--privileged",
    ),
    "locked down": (Operation.KPROBE, errno.EPERM, LOCKED_DOWN, "locked down", "lockdown="),
    "security module": (Operation.MAP, errno.EACCES, ROOT, "security policy", "journalctl"),
    "memlock of an old kernel": (Operation.MAP, errno.EPERM, LINUX_5, "may not lock", "ulimit -l unlimited"),
    "files of the process": (Operation.UPROBE, errno.EMFILE, ROOT, "open enough files", "ulimit -n 8192"),
    "files of the system": (Operation.UPROBE, errno.ENFILE, ROOT, "system", "fs.file-max"),
    "no memory": (Operation.MAP, errno.ENOMEM, ROOT, "not enough memory", "--ring-bytes"),
    "instruction": (Operation.UPROBES, ENOTSUPP, ROOT, "first instruction", "--exclude"),
    "instruction of the kernel": (Operation.KPROBE, ENOTSUPP, ROOT, "first instruction", "--exclude"),
    "offset": (Operation.UPROBE, errno.EINVAL, ROOT, "outside of the file's code", "reinstall"),
    "no file": (Operation.UPROBES, errno.ENOENT, ROOT, "does not exist", "path"),
    "no symbol": (Operation.KPROBE, errno.ENOENT, ROOT, "no such function", "hooks test"),
    "symbol that must not be probed": (
        Operation.KPROBES,
        errno.EADDRNOTAVAIL,
        ROOT,
        "can be probed",
        "hooks test",
    ),
    "no tracefs": (Operation.TRACEPOINT, errno.ENOENT, ROOT, "tracepoints", "mount -t tracefs"),
    "no link for many uprobes": (Operation.UPROBES, errno.EINVAL, LINUX_6, "one by one", "6.6"),
    "no link for many kprobes": (Operation.KPROBES, errno.EOPNOTSUPP, ROOT, "one by one", "CONFIG_FPROBE"),
    "kernel too old": (Operation.PROGRAM, errno.EINVAL, LINUX_5, "5.4.0-150 is too old", "5.15"),
    "attribute of a newer kernel": (Operation.UPROBE, errno.E2BIG, LINUX_4, "too old", "5.15"),
    "verifier": (Operation.PROGRAM, errno.EINVAL, ROOT, "verifier", "--method"),
    "many programs": (Operation.ANY, errno.E2BIG, ROOT, "64 programs", "other captures"),
    "other tracer": (Operation.KPROBES, errno.EBUSY, ROOT, "Another tool", "other tracers"),
    "anything else": (Operation.ANY, errno.EIO, ROOT, "EIO", "CONFIG_UPROBES"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_states_what_happened_and_what_to_do(name: str) -> None:
    operation, number, where, happened, fix = CASES[name]
    refusal = explain(operation, OSError(number, "refused"), where)
    assert happened in refusal.message
    assert fix in refusal.hint
    assert refusal.exit_code == 3


@pytest.mark.parametrize("kind", ["uprobe", "kprobe"])
def test_a_kernel_without_these_probes(kind: str) -> None:
    error = FileNotFoundError(errno.ENOENT, "No such file or directory", PMU.format(kind))
    for operation in (Operation[kind.upper()], Operation.ANY):
        refusal = explain(operation, error, ROOT)
        assert refusal.message == f"This kernel has no {kind}s."
        assert f"CONFIG_{kind.upper()}S" in refusal.hint


def test_the_answer_itself_is_reported() -> None:
    error = OSError(errno.EINVAL, "Invalid argument: invalid mem access 'scalar'")
    message = explain(Operation.PROGRAM, error, ROOT).message
    assert message.endswith("Invalid argument: invalid mem access 'scalar' (EINVAL).")
    assert "(ENOTSUPP)" not in message


def test_braces_of_the_kernels_words_are_not_read() -> None:
    assert "{what}" in explain(Operation.PROGRAM, OSError(errno.EINVAL, "R1 {what} bad"), ROOT).message
