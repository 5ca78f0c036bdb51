"""In containers and their like, doctor agrees with a capture, and a command runs or its failure is reported.

No container engine is needed: containers are made of namespaces, capabilities, mounts and filters of system
calls, and those can be had without.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.program import PYTHONPATH
from tests.support.standin import needs
from tests.support.waiting import wait_until

TRACEPIPE = [sys.executable, "-m", "tracepipe"]
# While other tests' bpftraces detach, doctor attaches one in 30 s and more.
PATIENCE_S = 240.0

pytestmark = [
    pytest.mark.ebpf,
    needs("prebuilt"),
    pytest.mark.skipif(shutil.which("capsh") is None, reason="no capsh (apt install libcap2-bin)"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare (apt install util-linux)"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter's numbers are of x86-64"),
]

# What Docker gives to root, and Kubernetes with it.
DOCKER = (
    "chown dac_override fowner fsetid kill setgid setuid setpcap net_bind_service net_raw sys_chroot mknod"
)
DOCKER += " audit_write setfcap"
WITH_BPF = f"{DOCKER} bpf perfmon"


# What surroundings are made of --------------------------------------------------------------------------


def mounted(commands: str) -> list[str]:
    """A mount namespace in which something was done."""
    return ["unshare", "--mount", "sh", "-ec", f'{commands}; exec "$@"', "sh"]


def only(capabilities: str) -> list[str]:
    """Root with these capabilities, without all others that there are."""
    kept = {f"cap_{name}" for name in capabilities.split()}
    shown = subprocess.run(["capsh", "--print"], capture_output=True, text=True, check=True).stdout
    all_of_them = shown.split("Bounding set =")[1].splitlines()[0].split(",")
    dropped = ",".join(name for name in all_of_them if name not in kept)
    return ["capsh", f"--drop={dropped}", "--shell=/bin/sh", "--", "-c", 'exec "$@"', "sh"]


SYSTEM_CALLS = {"perf_event_open": 298, "bpf": 321}
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000  # SECCOMP_RET_*
_LOAD, _IS, _RETURN = 0x20, 0x15, 0x06  # of classic BPF: load a word, jump if equal, return
_SET_SECCOMP, _FILTER, _NO_NEW_PRIVILEGES = 22, 2, 38


def refuse(names: tuple[str, ...], number: int) -> Callable[[], None]:
    """A filter of system calls as a container's profile has it, set in the child before its exec."""
    code = [(_LOAD, 0, 0, 0)]  # the system call's number
    for name in names:
        code += [(_IS, 0, 1, SYSTEM_CALLS[name]), (_RETURN, 0, 0, _ERRNO | number)]
    code.append((_RETURN, 0, 0, _ALLOW))
    instructions = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *one) for one in code))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(instructions)))
    libc = ctypes.CDLL(None, use_errno=True)

    def install() -> None:
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        if libc.prctl(_SET_SECCOMP, _FILTER, program):
            raise OSError(ctypes.get_errno(), "seccomp")

    assert instructions is not None  # the program points to it
    install.instructions = instructions  # type: ignore[attr-defined]
    return install


@dataclass(frozen=True)
class Case:
    """Surroundings: what the command line begins with, and what is done in the child before its exec.

    `message` is in what a capture and doctor print, "" where a capture works; `hint` too.
    """

    prefix: list[str]
    message: str = ""
    hint: str = ""
    before: Callable[[], None] | None = None
    bpftrace: str | None = None
    """What doctor says of bpftrace, where it works otherwise than the rest."""


def cases() -> dict[str, Case]:
    # Where debugfs is mounted, it has another, which the kernel mounts.
    no_tracefs = mounted("umount /sys/kernel/tracing; umount -l /sys/kernel/debug 2>/dev/null || true")
    both = tuple(SYSTEM_CALLS)
    return {
        "root": Case([]),
        "pid=host": Case(mounted("true")),
        "no user namespace's root": Case(
            ["unshare", "--user", "--map-root-user"], "root user of a user namespace", "sudo"
        ),
        "a user": Case(
            ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"], "needs root", "sudo -E"
        ),
        "Docker's capabilities": Case(
            only(DOCKER), "denies its root user|without CAP_SYS_ADMIN", "--privileged"
        ),
        "with CAP_BPF and CAP_PERFMON": Case(only(WITH_BPF), bpftrace="CAP_SYS_ADMIN"),
        "with CAP_SYS_ADMIN": Case(only(f"{DOCKER} sys_admin")),
        "process ids of its own": Case(
            ["unshare", "--pid", "--fork", "--mount-proc"], bpftrace="own process ids"
        ),
        "the host's /proc": Case(
            ["unshare", "--pid", "--fork"], "another process id namespace", "mount -t proc"
        ),
        "no /proc": Case(mounted("mount -t tmpfs none /proc"), "/proc is not mounted", "mount -t proc"),
        "no /sys": Case(mounted("mount -t tmpfs none /sys"), "/sys is not mounted", "mount -t sysfs"),
        "no tracefs": Case(no_tracefs),
        "no tracefs, in a /sys to read": Case(
            mounted("umount /sys/kernel/tracing; mount -o remount,bind,ro /sys")
        ),
        "no tracefs, and not to be mounted": Case(
            [*no_tracefs, *only(WITH_BPF)], "tracefs is not mounted", "-v /sys/kernel/tracing"
        ),
        "no BTF": Case(mounted("mount -t tmpfs none /sys/kernel/btf")),
        "small /dev/shm": Case(mounted("mount -t tmpfs -o size=64k none /dev/shm")),
        "a filter that says EPERM": Case([], "seccomp", "unconfined", refuse(both, 1)),
        "a filter that says ENOSYS": Case([], "seccomp", "unconfined", refuse(both, 38)),
        "a filter of perf events alone": Case([], "seccomp", "unconfined", refuse(("perf_event_open",), 1)),
        "Docker's default": Case(
            ["unshare", "--pid", "--fork", "--mount-proc", *no_tracefs, *only(DOCKER)],
            "denies its root user|without CAP_SYS_ADMIN",
            "--privileged",
            refuse(both, 1),
        ),
    }


CASES = cases() if shutil.which("capsh") and shutil.which("unshare") else {}


# What is seen there -------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """Anybody may write there: what is refused is refused for another reason."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        place.chmod(0o777)
        yield place


def run_in(case: Case, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*case.prefix, *TRACEPIPE, *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        preexec_fn=case.before,
        timeout=PATIENCE_S,
    )
    if any(f"{tool}: " in done.stderr.partition("\n")[0] for tool in ("unshare", "mount", "umount", "capsh")):
        pytest.skip(f"not to be had here: {done.stderr.splitlines()[0]}")
    assert "Traceback" not in done.stderr
    return done


@pytest.mark.parametrize("name", CASES)
def test_doctor_and_capture_agree(name: str, folder: Path) -> None:
    case = CASES[name]
    methods = "prebuilt"
    examined = run_in(case, folder, "doctor", "--json")
    findings = json.loads(examined.stdout)
    rows = {(row["area"], row["name"]): row for row in findings["findings"]}
    recording = folder / "run.jsonl"
    captured = run_in(
        case,
        folder,
        "capture",
        "--method",
        methods,
        "--gpu",
        "off",
        "-o",
        str(recording),
        "--",
        "echo",
        "RAN",
    )
    row = rows["methods", methods]
    works = not case.message
    assert (row["state"] == "works") is findings["can_capture"] is works, row
    assert examined.returncode == (0 if works else 3)
    if works:
        assert (captured.returncode, captured.stdout) == (0, "RAN\n")
        assert json.loads(recording.read_text().splitlines()[-1])["ended_by"] == "exit 0"
    else:
        assert (captured.returncode, captured.stdout) == (3, "")
        assert "echo was not started" in captured.stderr
        assert list(folder.iterdir()) == []
        for answer in (captured.stderr, f"{row['detail']} {row['fix']}"):
            assert re.search(case.message, answer), answer
            assert case.hint in answer
    bpftrace = rows["methods", "bpftrace"]
    if shutil.which("bpftrace") and case.bpftrace:
        assert case.bpftrace in bpftrace["detail"]
    elif shutil.which("bpftrace"):
        assert (bpftrace["state"] == "works") is works


def test_a_file_system_to_read_needs_a_place_for_both_files(folder: Path) -> None:
    place = folder / "place"
    place.mkdir()
    case = Case(mounted(f"mount -t tmpfs none {place}; mount -o remount,bind,ro /; cd {place}"))
    options = ["capture", "--method", "prebuilt", "--gpu", "off", "-o", str(place / "run.jsonl")]
    done = run_in(case, folder, *options, "--", "echo", "RAN")
    assert (done.returncode, done.stdout) == (0, "RAN\n")
    case = Case(mounted(f"mount -t tmpfs none {place}; mount -o remount,bind,ro /; cd /"))
    done = run_in(case, folder, *options, "--", "echo", "RAN")
    assert (done.returncode, done.stdout) == (1, "")
    assert "echo was not started" in done.stderr
    assert "No temporary file can be made" in done.stderr
    assert "TMPDIR" in done.stderr


# Time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [100_000, -1])
def test_a_time_namespace_has_one_clock(seconds: int, folder: Path) -> None:
    unshare = ["unshare", "--time", f"--monotonic={seconds}", "--fork"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("no time namespace can be made here")
    script = "import time; print(time.monotonic_ns()); time.sleep(0.01); print(time.monotonic_ns())"
    options = ["--method", "prebuilt", "--gpu", "off", "--layers", "syscall", "--last", "60s"]
    run = folder / "run.jsonl"
    done = run_in(
        Case(unshare), folder, "capture", *options, "-o", str(run), "--", sys.executable, "-c", script
    )
    assert done.returncode == 0
    begin_ns, end_ns = map(int, done.stdout.split())
    header, *found, _ = map(json.loads, run.read_text().splitlines())
    (slept_ns,) = (
        one["ts_ns"]
        for one in found
        if (one.get("name"), one.get("phase")) == ("clock_nanosleep", "B")
        and begin_ns < one["ts_ns"] < end_ns
    )
    assert header["start"]["monotonic_ns"] < slept_ns
    assert "boot" not in header  # other recordings of this boot have another clock


# Memory -------------------------------------------------------------------------------------------------

# Takes a MiB after the other until the kernel has ended a process of its control group.
EATER = """
import os, sys, time
def killed():
    return [line for line in open(sys.argv[1]) if line.startswith("oom_kill ")]
eaten, before = [], killed()
print("begun", flush=True)
while killed() == before:
    eaten.append(bytearray(b"x" * (1 << 20)))
    time.sleep(0.01)
print("done", flush=True)
"""


@pytest.fixture
def memory_group() -> Iterator[Callable[[int], Path]]:
    """Makes a control group that may have so many bytes of memory."""
    made: list[Path] = []

    def make(size_bytes: int) -> Path:
        for place, limit in (
            ("memory", "memory.limit_in_bytes"),
            ("", "memory.max"),
            ("unified", "memory.max"),
        ):
            group = Path("/sys/fs/cgroup", place, f"tracepipe-test-{os.getpid()}")
            try:
                group.mkdir()
                made.append(group)
                (group / limit).write_text(str(size_bytes))
            except OSError:
                continue
            return group
        pytest.skip("no control group of memory can be made here")

    yield make
    for group in made:
        group.rmdir()


def kills_in(state: Path) -> int:
    (kills,) = re.findall(r"^oom_kill (\d+)$", state.read_text(), re.MULTILINE)
    return int(kills)


def test_where_memory_runs_out_the_capture_ends_and_the_program_continues(
    folder: Path, memory_group: Callable[[int], Path]
) -> None:
    group = memory_group(160 << 20)
    printed = folder / "printed"
    # The largest process is the program.
    state = next(path for name in ("memory.events", "memory.oom_control") if (path := group / name).exists())
    program = [sys.executable, "-c", EATER, str(state)]
    shell = f'echo $$ > {group}/cgroup.procs; exec "$@"'
    inner = ["sh", "-c", '"$@" > "$0"', str(printed), *program]
    options = ["--method", "prebuilt", "--gpu", "off", "--ring-bytes", "64K", "-o", str(folder / "run.jsonl")]
    for _ in range(5):
        before = kills_in(state)
        (folder / "run.jsonl.part").unlink(missing_ok=True)  # what a killed capture leaves
        done = run_in(Case(["sh", "-c", shell, "sh"]), folder, "capture", *options, "--", *inner)
        wait_until(lambda: (group / "cgroup.procs").read_text() == "")
        if kills_in(state) == before + 1:
            break
        # The kernel killed a second process before it had freed the memory of the first.
    assert done.returncode == -9
    assert printed.read_text() == "begun\ndone\n"
    assert not (folder / "run.jsonl").exists()


def test_too_little_memory_is_reported_before_the_program_starts(
    folder: Path, memory_group: Callable[[int], Path]
) -> None:
    group = memory_group(120 << 20)
    case = Case(["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"])
    options = [
        "--method",
        "prebuilt",
        "--gpu",
        "off",
        "--ring-bytes",
        "256M",
        "-o",
        str(folder / "run.jsonl"),
    ]
    done = run_in(case, folder, "capture", *options, "--", "echo", "RAN")
    wait_until(lambda: (group / "cgroup.procs").read_text() == "")
    assert (done.returncode, done.stdout) == (3, "")
    assert "There is not enough memory for a map" in done.stderr
    assert "echo was not started" in done.stderr
    assert "memory.max" in done.stderr
