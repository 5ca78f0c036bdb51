"""The facts that decide what a process may do on this machine, as far as they can be read without trying.

A field is None, "" or empty where it is unknown: on systems other than Linux, or where a file cannot be read.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tracepipe.paths import is_there

# Bits of CapEff, include/uapi/linux/capability.h.
CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SYS_RESOURCE": 24, "CAP_PERFMON": 38, "CAP_BPF": 39}
_TRACEFS = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO of include/linux/proc_ns.h
# A file that each of these puts into a container; since cgroup 2, cgroup paths do not show it.
_CONTAINER_MARKS = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
_SETTINGS = ("perf_event_paranoid", "unprivileged_bpf_disabled", "kptr_restrict")
NVIDIA_MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts that decide what can be captured.

    `release` is the kernel's. `capabilities` are those of CAPABILITIES that are effective. `seccomp`: 0 none,
    2 a filter. `has_proc`: /proc is mounted, with the process ids that this process sees. `files_max` and
    `memlock_bytes` are soft limits, −1 unlimited. `nvidia` is the driver's version, "" if it is not loaded;
    `profiles_for_admins`: it lets only administrators profile.
    """

    system: str
    release: str
    architecture: str
    euid: int = 0
    capabilities: frozenset[str] | None = None
    is_initial_pid_namespace: bool | None = None
    is_initial_user_namespace: bool | None = None
    container: str = ""
    seccomp: int | None = None
    has_proc: bool = True
    has_sysfs: bool = True
    lockdown: str = ""
    files_max: int | None = None
    memlock_bytes: int | None = None
    tracefs: str = ""
    has_btf: bool = False
    settings: dict[str, int] = field(default_factory=dict)
    nvidia: str = ""
    nvidia_modules: tuple[str, ...] = ()
    profiles_for_admins: bool = False

    @property
    def kernel(self) -> tuple[int, int]:
        """Major and minor version; (0, 0) if the release does not begin with one."""
        parts = self.release.split(".")
        digits = [
            "".join(letter for letter in part.partition("-")[0] if letter.isdigit()) for part in parts[:2]
        ]
        return (int(digits[0]), int(digits[1])) if len(digits) == 2 and all(digits) else (0, 0)

    def has(self, capability: str) -> bool:
        """Whether the capability is effective; where that is unknown, root is assumed to have it."""
        if self.capabilities is None:
            return self.euid == 0
        return capability in self.capabilities


def this_machine(root: Path = Path("/")) -> Machine:
    """This machine, or one whose /proc and /sys are below `root`."""
    lines = _read(root / "proc/self/status").splitlines()
    status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    capabilities = None
    if "CapEff" in status:
        effective = int(status["CapEff"], 16)
        capabilities = frozenset(name for name, bit in CAPABILITIES.items() if effective >> bit & 1)
    is_initial = None
    with suppress(OSError):
        is_initial = str((root / "proc/self/ns/pid").readlink()) == _INITIAL_PID_NAMESPACE
    # `         0          0 4294967295` maps all users: the initial user namespace. Inside of another one,
    # root is root of that one only.
    user_map = _read(root / "proc/self/uid_map").split()
    # systemd's convention, followed by podman, lxc and systemd-nspawn for the first process
    environment = _read(root / "proc/1/environ").split("\0")
    containers = [name for mark, name in _CONTAINER_MARKS.items() if is_there(root / mark[1:])]
    containers += [entry[10:] for entry in environment if entry.startswith("container=")]
    files_max = memlock_bytes = None
    with suppress(ImportError):  # not on this system
        import resource

        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if hasattr(resource, "RLIMIT_MEMLOCK"):
            memlock_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    settings = {name: _read(root / "proc/sys/kernel" / name) for name in _SETTINGS}
    # `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu …`
    nvidia = _read(root / "proc/driver/nvidia/version").partition("\n")[0].split()
    return Machine(
        system=platform.system(),
        release=platform.release(),
        architecture=platform.machine(),
        euid=os.geteuid() if hasattr(os, "geteuid") else -1,
        capabilities=capabilities,
        is_initial_pid_namespace=is_initial,
        is_initial_user_namespace=user_map == ["0", "0", "4294967295"] if user_map else None,
        container=containers[0] if containers else "",
        seccomp=int(status["Seccomp"]) if status.get("Seccomp", "").isdigit() else None,
        has_proc=bool(status) and status.get("Pid", str(os.getpid())) == str(os.getpid()),
        has_sysfs=is_there(root / "sys/kernel"),
        # `none [integrity] confidentiality`
        lockdown=_read(root / "sys/kernel/security/lockdown").partition("[")[2].partition("]")[0],
        files_max=files_max,
        memlock_bytes=memlock_bytes,
        tracefs=next((path for path in _TRACEFS if is_there(root / path[1:] / "events")), ""),
        has_btf=is_there(root / "sys/kernel/btf/vmlinux"),
        settings={name: int(text) for name, text in settings.items() if text.lstrip("-").isdigit()},
        nvidia=next((word for word in nvidia if word[0].isdigit() and "." in word), ""),
        nvidia_modules=tuple(name for name in NVIDIA_MODULES if is_there(root / "sys/module" / name)),
        profiles_for_admins="RmProfilingAdminOnly: 1" in _read(root / "proc/driver/nvidia/params"),
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
