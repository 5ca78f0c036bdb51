"""What doctor finds on made-up machines: each failure alone, with the command that fixes it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.machines import machine
from tracepipe.doctor import AREAS, Diagnosis, as_json, can_capture, diagnosis_lines, examine
from tracepipe.doctor.checks import Examination
from tracepipe.doctor.trials import Timing
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Driver, Gpu, Owner
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part, Parts, Toolchain
from tracepipe.tracer.machine.facts import Machine
from tracepipe.tracer.machine.refusals import ENOTSUPP, SUDO
from tracepipe.tracer.request import Notify, Plan

GOOD = machine(
    tracefs="/sys/kernel/tracing",
    files_max=20000,
    has_btf=True,
    settings={"perf_event_paranoid": 2, "kptr_restrict": 1},
    nvidia="550.54.14",
    nvidia_modules=("nvidia", "nvidia_uvm"),
)
NO_BCC = CaptureUnavailable("BCC's Python module cannot be loaded: no module.", "apt install python3-bpfcc")


class FakeTrials:
    """Everything works but what `broken` says: name of a trial, of a method or a tracepoint → its error."""

    def __init__(self, broken: dict[str, Exception] | None = None, functions: int = 321) -> None:
        self.broken = broken or {}
        self.functions = functions
        self.native = ("native core, gcc 13.2.0", "")
        self.done: list[str] = []

    def methods(self) -> list[str]:
        return ["bcc", "prebuilt", "bpftrace"]

    def version(self, method: str) -> str:
        self._do(method)
        return "1.2"

    def capture(self, method: str) -> Timing:
        return self._do(f"capture {method}")

    def map_and_program(self) -> None:
        self._do("map_and_program")

    def uprobes_at_once(self) -> Timing:
        return self._do("uprobes_at_once")

    def one_uprobe(self) -> Timing:
        return self._do("one_uprobe")

    def kprobes_at_once(self) -> Timing:
        return self._do("kprobes_at_once")

    def one_kprobe(self) -> Timing:
        return self._do("one_kprobe")

    def tracepoint(self, name: str) -> Timing:
        return self._do(name)

    def raw_tracepoint(self, name: str) -> Timing:
        return self._do(name)

    def libraries(self, name: str) -> list[str]:
        return [] if name in self.broken else [f"/usr/lib/{name}"]

    def driver_functions(self) -> tuple[int, str]:
        return self.functions, "" if self.functions else "the NVIDIA driver is not loaded"

    def toolchain(self) -> Toolchain:
        compiler, part = Compiler(Path("/c"), (13, 0), ""), Part((), Path("/l.so"), (13, 0))
        driver = Driver((13, 0), (Gpu("NVIDIA H200", "sm_90"),))
        return Toolchain(driver, Parts([compiler], [compiler], [part], [part]), Owner(0, 0, Path("/")))

    def build_kernels(self, toolchain: Toolchain) -> Path:
        self._do("build_kernels")
        return Path("/cache/kernels.so")

    def build_sampler(self, toolchain: Toolchain) -> Path:
        self._do("build_sampler")
        return Path("/cache/pm_sampler")

    def core(self) -> tuple[str, str]:
        return self.native

    def _do(self, what: str) -> Timing:
        self.done.append(what)
        if what in self.broken:
            raise self.broken[what]
        return Timing(1_234_567, 98_000_000)


def found(facts: Machine = GOOD, **broken: Exception) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in examine(facts, FakeTrials(dict(broken)))}


def test_a_machine_where_everything_works() -> None:
    findings = examine(GOOD, FakeTrials())
    assert {finding.state for finding in findings} == {"works"}
    assert [finding.fix for finding in findings if finding.fix] == []
    assert can_capture(findings)
    rows = {finding.name: finding.detail for finding in findings}
    assert rows["auto"] == "chooses bcc, the best that works here"
    assert rows["bcc"] == "1.2: attached in 1.2 ms, detached in 98 ms"
    assert rows["userspace"] == (
        "uprobes at once: attached in 1.2 ms, detached in 98 ms; by bcc, prebuilt, bpftrace"
    )
    assert "321 functions" in rows["kernel"]
    assert rows["driver"] == "550.54.14: nvidia, nvidia_uvm"


def test_a_missing_core_comes_with_the_command_that_builds_it() -> None:
    trials = FakeTrials()
    trials.native = ("pure Python: no compiled core", "apt install gcc")
    (core,) = [finding for finding in examine(GOOD, trials) if finding.area == "convert"]
    assert (core.state, core.detail, core.fix) == ("limited", *trials.native)


def test_one_method_is_enough() -> None:
    rows = found(bcc=NO_BCC, bpftrace=CaptureUnavailable("There is no bpftrace.", "apt install bpftrace"))
    assert (rows["bcc"].state, rows["bcc"].fix) == ("fails", "apt install python3-bpfcc")
    assert rows["bpftrace"].fix == "apt install bpftrace"
    assert rows["auto"].detail == "chooses prebuilt, the only one that works here"
    assert rows["syscall"].detail.endswith("; by prebuilt")
    assert can_capture(list(rows.values()))


def test_without_a_method_no_layer_works() -> None:
    gone = CaptureUnavailable("gone", "fix it")
    rows = found(bcc=gone, prebuilt=gone, bpftrace=gone)
    assert rows["auto"].state == "fails"
    for layer in ("userspace", "syscall", "kernel", "scheduler"):
        assert rows[layer].state == "fails"
        assert "no method works" in rows[layer].detail
    assert not can_capture(list(rows.values()))


def test_a_method_that_cannot_attach_fails() -> None:
    rows = found(**{"capture bcc": OSError(errno.EMFILE, "Too many open files")})
    assert (rows["bcc"].state, rows["bcc"].fix) == ("fails", "ulimit -n 8192")
    assert rows["auto"].detail.startswith("chooses prebuilt")


def test_no_privileges_hold_for_every_layer_and_are_tried_once() -> None:
    user = machine(euid=1000, capabilities=frozenset())
    trials = FakeTrials({"map_and_program": OSError(errno.EPERM, "Operation not permitted")})
    findings = examine(user, trials)
    rows = {finding.name: finding for finding in findings}
    assert (rows["privileges"].state, rows["privileges"].fix) == ("fails", SUDO)
    for layer in ("userspace", "syscall", "kernel", "scheduler"):
        assert rows[layer].state == "fails"
        assert "needs root" in rows[layer].detail
    assert "one_uprobe" not in trials.done
    assert not can_capture(findings)


def test_uprobes_one_by_one() -> None:
    rows = found(machine(release="6.1.0"), uprobes_at_once=OSError(errno.EINVAL, "Invalid argument"))
    assert rows["userspace"].state == "limited"
    assert "one by one: attached in 1.2 ms, detached in 98 ms each" in rows["userspace"].detail
    assert "6.6" in rows["userspace"].fix
    assert rows["system"].state == "limited"
    assert can_capture(list(rows.values()))


def test_no_uprobes_at_all() -> None:
    pmu = "/sys/bus/event_source/devices/uprobe/type"
    rows = found(
        uprobes_at_once=OSError(errno.EINVAL, "Invalid argument"),
        one_uprobe=FileNotFoundError(errno.ENOENT, "No such file or directory", pmu),
    )
    assert (rows["userspace"].state, rows["userspace"].detail) == ("fails", "This kernel has no uprobes")
    assert rows["syscall"].state == "works"
    assert not can_capture(list(rows.values()))


def test_few_capabilities_do_without_perf_events() -> None:
    facts = machine(capabilities=frozenset({"CAP_BPF", "CAP_PERFMON"}), tracefs="/sys/kernel/tracing")
    rows = found(facts, one_uprobe=OSError(errno.EACCES, "Permission denied"))
    assert rows["userspace"].state == "works"
    assert rows["privileges"].state == "limited"
    assert "without CAP_SYS_ADMIN" in rows["privileges"].detail


def test_no_tracefs() -> None:
    gone = CaptureUnavailable("tracefs is not mounted and cannot be mounted: no.", "mount -t tracefs none X")
    facts = machine(tracefs="", capabilities=frozenset({"CAP_BPF"}))
    rows = found(facts, **{"sys_enter": gone, "sched/sched_switch": gone})
    assert rows["tracefs"].state == "fails"
    assert rows["tracefs"].fix.startswith("mount -t tracefs none /sys/kernel/tracing ")
    assert (rows["syscall"].state, rows["scheduler"].state) == ("fails", "fails")
    assert rows["syscall"].fix == "mount -t tracefs none X"
    assert rows["userspace"].state == "works"


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (
            FileNotFoundError(errno.ENOENT, "No", "/sys/bus/event_source/devices/kprobe/type"),
            "has no kprobes",
        ),
        (OSError(errno.ENOENT, "No such file or directory"), "no such function"),
        (OSError(ENOTSUPP, "Unknown error 524"), "first instruction"),
    ],
)
def test_no_kprobes(error: OSError, detail: str) -> None:
    rows = found(one_kprobe=error)
    assert rows["kernel"].state == "fails"
    assert detail in rows["kernel"].detail
    assert can_capture(list(rows.values())), "the other layers need none"


def test_kprobes_without_a_driver() -> None:
    trials = FakeTrials(functions=0)
    rows = {finding.name: finding for finding in examine(GOOD, trials)}
    assert rows["kernel"].state == "absent"
    assert "the NVIDIA driver is not loaded" in rows["kernel"].detail


def test_kprobes_one_by_one() -> None:
    rows = found(kprobes_at_once=OSError(errno.EOPNOTSUPP, "Operation not supported"))
    assert rows["kernel"].state == "limited"
    assert "one by one" in rows["kernel"].detail


def test_missing_libraries_are_not_a_failure() -> None:
    rows = found(**{"libcuda.so.1": OSError(), "libcudart.so": OSError()})
    assert (rows["libcuda"].state, rows["libcudart"].state) == ("absent", "absent")
    assert "--library" in rows["libcuda"].fix


@pytest.mark.parametrize(
    ("facts", "name", "state", "detail", "fix"),
    [
        ({"release": "5.4.0"}, "system", "fails", "too old", "5.15"),
        ({"release": "5.15.0"}, "system", "limited", "one by one", ""),
        ({"architecture": "riscv64"}, "system", "fails", "riscv64", "aarch64"),
        ({"lockdown": "confidentiality"}, "lockdown", "fails", "nothing can be traced", "lockdown="),
        ({"lockdown": "integrity"}, "lockdown", "works", "integrity", ""),
        ({"files_max": 64}, "limits", "limited", "64 open files", "ulimit -n 8192"),
        ({"files_max": 1024}, "limits", "works", "1,024 open files", ""),
        ({"files_max": 1024, "release": "6.1.0"}, "limits", "limited", "one by one", "ulimit -n 8192"),
        ({"files_max": -1, "memlock_bytes": -1}, "limits", "works", "any locked memory", ""),
        ({"files_max": 9999, "release": "5.10.1"}, "limits", "limited", "memory", "ulimit -l unlimited"),
        ({"tracefs": ""}, "tracefs", "limited", "a capture mounts it", "mount -t tracefs"),
        ({"tracefs": "", "euid": 7, "capabilities": frozenset()}, "tracefs", "fails", "this user", "sudo"),
        ({"settings": {"kptr_restrict": 2}}, "settings", "limited", "by name", "kptr_restrict=1"),
        ({}, "settings", "absent", "not known", ""),
        ({"has_btf": False}, "BTF", "absent", "none", ""),
        ({"seccomp": 2, "container": "docker"}, "container", "limited", "docker", "--privileged"),
        ({"is_initial_pid_namespace": False}, "container", "works", "separate process ids", ""),
        ({"is_initial_user_namespace": False}, "privileges", "fails", "user namespace", "sudo"),
        ({"capabilities": None}, "privileges", "works", "capabilities not known", ""),
        ({"nvidia_modules": ()}, "driver", "absent", "no NVIDIA module", ""),
    ],
)  # fmt: skip
def test_rows_of_the_machine(facts: dict[str, object], name: str, state: str, detail: str, fix: str) -> None:
    row = found(machine(**facts))[name]
    assert row.state == state
    assert detail in row.detail
    assert (fix in row.fix) if fix else row.fix == ""


def test_another_operating_system_is_reported_and_nothing_is_tried() -> None:
    mac = Machine("Darwin", "23.1.0", "arm64", euid=501)
    refused = CaptureUnavailable("Capture does not know Darwin on arm64.", "Capture on Linux.")
    trials = FakeTrials({"bcc": refused, "prebuilt": refused, "bpftrace": refused})
    findings = examine(mac, trials)
    rows = {finding.name: finding for finding in findings}
    assert rows["system"].state == "fails"
    assert rows["userspace"].detail == "Darwin has no eBPF"
    assert trials.done == ["bcc", "prebuilt", "bpftrace"]
    assert not can_capture(findings)


def test_an_area_is_a_line() -> None:
    def gpus(examination: Examination) -> Iterator[Diagnosis]:
        assert examination.found_in("layers"), "areas see what was found before"
        yield Diagnosis("gpu", "0", "works", examination.machine.nvidia)

    seen: list[str] = []
    findings = examine(GOOD, FakeTrials(), {**AREAS, "fans": gpus}, seen.append)
    assert seen == [*AREAS, "fans"]
    assert findings[-1] == Diagnosis("gpu", "0", "works", "550.54.14")


FINDINGS = [
    Diagnosis("machine", "kernel", "works", "Linux 6.8"),
    Diagnosis("methods", "bcc", "fails", "BCC's Python module is missing.", "apt install python3-bpfcc"),
    Diagnosis("methods", "prebuilt", "limited", "slow"),
    Diagnosis("layers", "syscall", "fails", "no privileges", "sudo -E tracepipe …"),
    Diagnosis("layers", "scheduler", "fails", "no privileges", "sudo -E tracepipe …"),
    Diagnosis("cuda", "libcuda", "absent", "none"),
]


def test_the_report_is_a_table() -> None:
    assert list(diagnosis_lines(FINDINGS)) == [
        "machine  ✓ kernel     Linux 6.8",
        "methods  ✗ bcc        BCC's Python module is missing.",
        "                      → apt install python3-bpfcc",
        "         ! prebuilt   slow",
        "layers   ✗ syscall    no privileges",
        "                      → sudo -E tracepipe …",
        "         ✗ scheduler  the same",
        "cuda     – libcuda    none",
    ]


def test_the_report_fits_a_terminal_and_any_encoding() -> None:
    long = [Diagnosis("machine", "kernel", "fails", "word " * 40, "do this")]
    lines = list(diagnosis_lines(long, width=60, ascii_only=True))
    assert len(lines) > 3
    assert max(map(len, lines)) <= 60
    assert lines[0].startswith("machine  x kernel  word")
    assert all(line.startswith(" " * 19 + "word") for line in lines[1:-1])
    "\n".join(lines).encode("ascii")
    assert "\x1b[31m✗\x1b[0m kernel" in next(diagnosis_lines(long, colours=True))


def test_json_is_for_programs() -> None:
    answer = as_json(FINDINGS)
    assert answer["can_capture"] is False
    assert answer["findings"][1] == {
        "area": "methods",
        "name": "bcc",
        "state": "fails",
        "detail": "BCC's Python module is missing.",
        "fix": "apt install python3-bpfcc",
    }
    assert as_json(examine(GOOD, FakeTrials()))["can_capture"] is True


def test_slow_trials_are_reported_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def check(self) -> str:
            return "1.0"

        def attach(self, plan: Plan, notify: Notify) -> None:
            notify("slow is attaching 12 probes; this takes a while")
            raise CaptureUnavailable("Nothing is attached.", "")

    monkeypatch.setattr("tracepipe.doctor.trials.ENGINES", {"slow": Slow})
    messages: list[str] = []
    examine(GOOD, areas={"methods": AREAS["methods"]}, notify=messages.append)
    assert messages == ["methods", "slow is attaching 12 probes; this takes a while"]
