"""The facts of a machine, read from /proc and /sys of made-up ones."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tracepipe.tracer.machine.facts import Machine, this_machine
from tracepipe.tracer.machine.processes import runs_at_once, runs_first

STATUS = "Name:\tpython3\nCapEff:\t{effective:016x}\nSeccomp:\t{seccomp}\n"
NVRM = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
    "GCC version:  gcc version 12.2.0\n"
)


def put(root: Path, path: str, text: str = "") -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)


def test_a_machine_with_everything(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/status", STATUS.format(effective=1 << 21 | 1 << 38 | 1 << 39, seccomp=0))
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    put(tmp_path, "proc/self/uid_map", "         0          0 4294967295\n")
    put(tmp_path, "proc/sys/kernel/perf_event_paranoid", "-1\n")
    put(tmp_path, "proc/sys/kernel/kptr_restrict", "2\n")
    put(tmp_path, "sys/kernel/security/lockdown", "none [integrity] confidentiality\n")
    (tmp_path / "sys/kernel/debug/tracing/events").mkdir(parents=True)
    put(tmp_path, "sys/kernel/btf/vmlinux")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    (tmp_path / "sys/module/nvidia_uvm").mkdir()
    put(tmp_path, "proc/driver/nvidia/version", NVRM)
    put(tmp_path, "proc/driver/nvidia/params", "ModifyDeviceFiles: 1\nRmProfilingAdminOnly: 1\n")

    facts = this_machine(tmp_path)

    assert facts.capabilities == {"CAP_SYS_ADMIN", "CAP_PERFMON", "CAP_BPF"}
    assert facts.is_initial_pid_namespace is True
    assert facts.is_initial_user_namespace is True
    assert facts.settings == {"perf_event_paranoid": -1, "kptr_restrict": 2}
    assert (facts.lockdown, facts.tracefs) == ("integrity", "/sys/kernel/debug/tracing")
    assert facts.has_btf
    assert (facts.nvidia, facts.nvidia_modules) == ("535.129.03", ("nvidia", "nvidia_uvm"))
    assert facts.profiles_for_admins is True
    assert facts.container == ""


def test_a_container(tmp_path: Path) -> None:
    put(tmp_path, "proc/self/status", STATUS.format(effective=0, seccomp=2))
    (tmp_path / "proc/self/ns").mkdir()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532501]")
    put(tmp_path, "proc/self/uid_map", "         0       1000          1\n")
    put(tmp_path, "proc/1/environ", "PATH=/bin\0container=lxc\0")
    facts = this_machine(tmp_path)
    assert (facts.container, facts.seccomp, facts.capabilities) == ("lxc", 2, frozenset())
    assert facts.is_initial_pid_namespace is False
    assert facts.is_initial_user_namespace is False
    put(tmp_path, "run/.containerenv")
    assert this_machine(tmp_path).container == "podman"
    put(tmp_path, ".dockerenv")
    assert this_machine(tmp_path).container == "docker"


def test_a_system_that_gives_no_facts(tmp_path: Path) -> None:
    facts = this_machine(tmp_path)
    assert (facts.capabilities, facts.seccomp, facts.is_initial_pid_namespace) == (None, None, None)
    assert (facts.lockdown, facts.tracefs, facts.container, facts.nvidia) == ("", "", "", "")
    assert facts.profiles_for_admins is False
    assert facts.settings == {}
    assert facts.has("CAP_BPF") == (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("release", "kernel"),
    [
        ("6.18.44-fc-v595", (6, 18)),
        ("5.15.0-1031-aws", (5, 15)),
        ("6.1-rc3", (6, 1)),
        ("23.1.0", (23, 1)),
        ("devel", (0, 0)),
        ("6", (0, 0)),
        ("", (0, 0)),
    ],
)
def test_versions_of_kernels(release: str, kernel: tuple[int, int]) -> None:
    assert Machine("Linux", release, "x86_64").kernel == kernel


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may go before others")
def test_the_collecting_thread_has_priority_and_the_line_maker_does_not() -> None:
    nices: list[int] = []

    def own() -> None:
        nices.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def collect() -> None:
        runs_first()
        own()
        later = threading.Thread(target=own)
        later.start()
        later.join()

    collector = threading.Thread(target=collect)
    collector.start()
    collector.join()
    assert nices == [-5, 0]


def test_the_thread_that_empties_the_ring_without_the_interpreter_runs_at_once() -> None:
    policies: list[tuple[bool, int]] = []

    def empty() -> None:
        policies.append((runs_at_once(), os.sched_getscheduler(0)))

    thread = threading.Thread(target=empty)
    thread.start()
    thread.join()
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        assert policies == [(False, os.SCHED_OTHER)]
    else:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        assert policies == [(True, os.SCHED_FIFO)]
