"""Examines each area of a machine: makes diagnoses of facts and trials, and never asks the machine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, TypeVar

from tracepipe.doctor.trials import Timing, Trials
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.find.kernel import HOW_TO_MOUNT
from tracepipe.tracer.gpu.build.driver import Version
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part
from tracepipe.tracer.gpu.engines.counters import ADMIN_ONLY_HINT
from tracepipe.tracer.machine.facts import CAPABILITIES, Machine
from tracepipe.tracer.machine.refusals import OLDEST, SUDO, Operation, check_file_systems, explain
from tracepipe.units import counted

State = Literal["works", "limited", "fails", "absent"]
WORKS: Final = "works"
LIMITED: Final = "limited"
FAILS: Final = "fails"
ABSENT: Final = "absent"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A row of the report. `fix` is what to do, "" for nothing."""

    area: str
    name: str
    state: State
    detail: str
    fix: str = ""


@dataclass(slots=True)
class Examination:
    """The input of an area: the machine, ways to try it, and what was found before."""

    machine: Machine
    trials: Trials
    found: list[Diagnosis] = field(default_factory=list)

    def found_in(self, area: str) -> list[Diagnosis]:
        """The diagnoses of an area."""
        return [diagnosis for diagnosis in self.found if diagnosis.area == area]


Area = Callable[[Examination], Iterator[Diagnosis]]


_FILES_NEEDED = 256  # a capture's maps, links and pipes, and Python's files, with some reserve
_FILES_WANTED = 8192  # one for each entry and return if functions are probed one by one
_ELSEWHERE = "Capture on Linux, on x86-64 or aarch64; files are converted anywhere."
_MORE_FILES = f"ulimit -n {_FILES_WANTED}"
_LINUX = "Linux"
_ARCHITECTURES = ("x86_64", "aarch64")


def machine(examination: Examination) -> Iterator[Diagnosis]:
    """The facts that the system reports about itself."""
    facts = examination.machine
    yield Diagnosis("machine", "system", *_system(facts))
    if facts.system != _LINUX:
        return
    yield Diagnosis("machine", "privileges", *_privileges(facts))
    parts = [facts.container or "none seen"]
    if facts.is_initial_pid_namespace is not None:
        parts.append("process ids of the host" if facts.is_initial_pid_namespace else "separate process ids")
    if facts.seccomp is not None:
        parts.append("system calls are filtered (seccomp)" if facts.seccomp else "no filter of system calls")
    fix = "docker run --privileged …" if facts.seccomp and facts.container else ""
    yield Diagnosis("machine", "container", LIMITED if facts.seccomp else WORKS, ", ".join(parts), fix)
    if facts.lockdown == "confidentiality":
        fix = "Boot without lockdown=confidentiality (with Secure Boot: mokutil --disable-validation)."
        yield Diagnosis("machine", "lockdown", FAILS, "confidentiality: nothing can be traced", fix)
    else:
        yield Diagnosis("machine", "lockdown", WORKS, facts.lockdown or "none")
    yield Diagnosis("machine", "limits", *_limits(facts))
    yield Diagnosis("machine", "tracefs", *_tracefs(facts))
    detail = ", ".join(f"{name} {value}" for name, value in facts.settings.items())
    if facts.settings.get("kptr_restrict", 0) >= 2:
        detail += ": driver functions are probed by name, one by one"
        yield Diagnosis("machine", "settings", LIMITED, detail, "sysctl kernel.kptr_restrict=1")
    else:
        yield Diagnosis("machine", "settings", WORKS if detail else ABSENT, detail or "not known")
    btf = "/sys/kernel/btf/vmlinux" if facts.has_btf else "none"
    yield Diagnosis("machine", "BTF", WORKS if facts.has_btf else ABSENT, f"{btf} (not needed by captures)")


Answer = tuple[State, str, str]
"""State, detail, fix."""


def _system(facts: Machine) -> Answer:
    name = f"{facts.system} {facts.release}, {facts.architecture}"
    if facts.system != _LINUX or facts.architecture not in _ARCHITECTURES:
        return FAILS, name, _ELSEWHERE
    if facts.kernel < OLDEST:
        return FAILS, f"{name}: too old", "Use Linux 5.15 or later."
    if facts.kernel < (6, 6):
        return LIMITED, f"{name}: probes are set one by one (at once from 6.6)", ""
    return WORKS, name, ""


def _privileges(facts: Machine) -> Answer:
    user = "root" if facts.euid == 0 else f"user {facts.euid}"
    if facts.capabilities is None:
        return (
            WORKS if facts.euid == 0 else FAILS,
            f"{user}, capabilities not known",
            "" if facts.euid == 0 else SUDO,
        )
    wanted = [name for name in CAPABILITIES if name != "CAP_SYS_RESOURCE"]
    has = [name for name in wanted if name in facts.capabilities]
    detail = f"{user}, {', '.join(has) or 'no capability that tracing needs'}"
    if facts.euid != 0:
        return FAILS, detail, SUDO
    if facts.is_initial_user_namespace is False:
        return FAILS, f"{detail}; in a user namespace only", "Run it as root outside of it (sudo)."
    if "CAP_SYS_ADMIN" not in facts.capabilities:
        lacks = ", ".join(name for name in wanted if name not in has)
        return (
            LIMITED,
            f"{detail}; without {lacks}",
            "Start it with all capabilities (a container: --privileged).",
        )
    return WORKS, detail, ""


def _limits(facts: Machine) -> Answer:
    if facts.files_max is None:
        return ABSENT, "not known", ""
    files = "any number of" if facts.files_max < 0 else f"{facts.files_max:,}"
    detail = f"{files} open files"
    if facts.memlock_bytes is not None:
        locked = "any" if facts.memlock_bytes < 0 else f"{facts.memlock_bytes >> 10:,} KB of"
        detail += f", {locked} locked memory"
    if 0 <= facts.files_max < _FILES_NEEDED:
        return LIMITED, f"{detail}: too few files for a capture", _MORE_FILES
    if 0 <= facts.files_max < _FILES_WANTED and facts.kernel < (6, 6):
        return LIMITED, f"{detail}: too few files for thousands of probes set one by one", _MORE_FILES
    if facts.memlock_bytes is not None and 0 <= facts.memlock_bytes < 64 << 20 and facts.kernel < (5, 11):
        return LIMITED, f"{detail}: too little memory for this kernel", "ulimit -l unlimited"
    return WORKS, detail, ""


def _tracefs(facts: Machine) -> Answer:
    if facts.tracefs:
        return WORKS, facts.tracefs, ""
    fix = "mount -t tracefs none /sys/kernel/tracing"
    if not facts.has_sysfs:
        return FAILS, "no /sys to mount it in", "mount -t sysfs sysfs /sys"
    if facts.has("CAP_SYS_ADMIN") and facts.is_initial_user_namespace is not False and not facts.seccomp:
        return LIMITED, "not mounted; a capture mounts it", fix
    if facts.euid != 0:
        return FAILS, "not visible to this user", SUDO
    return FAILS, "not mounted", HOW_TO_MOUNT


def methods(examination: Examination) -> Iterator[Diagnosis]:
    """Try each capture method by attaching with it; and state which one `auto` chooses."""
    working: list[str] = []
    for method in examination.trials.methods():
        try:
            version = examination.trials.version(method)
            timing = examination.trials.capture(method)
        except (CaptureUnavailable, OSError) as error:
            yield Diagnosis("methods", method, FAILS, *_refusal(examination, Operation.ANY, error))
            continue
        working.append(method)
        yield Diagnosis("methods", method, WORKS, f"{version}: {_took(timing)}")
    if working:
        why = "the best that works here" if len(working) > 1 else "the only one that works here"
        yield Diagnosis("methods", "auto", WORKS, f"chooses {working[0]}, {why}")
    else:
        yield Diagnosis("methods", "auto", FAILS, "no method works here")


def layers(examination: Examination) -> Iterator[Diagnosis]:
    """Try each layer by attaching to something harmless."""
    works = [f.name for f in examination.found_in("methods") if f.state == WORKS and f.name != "auto"]
    suffix = f"; by {', '.join(works)}" if works else ""
    trials = examination.trials
    rows: dict[str, Callable[[], Answer]] = {
        "userspace": lambda: _userspace(examination),
        "syscall": lambda: _tracepoint(examination, lambda: trials.raw_tracepoint("sys_enter")),
        "kernel": lambda: _driver(examination),
        "scheduler": lambda: _tracepoint(examination, lambda: trials.tracepoint("sched/sched_switch")),
    }
    if examination.machine.system != _LINUX:
        for name in rows:
            yield Diagnosis("layers", name, FAILS, f"{examination.machine.system} has no eBPF", _ELSEWHERE)
        return
    try:
        check_file_systems(examination.machine)
        refusal = _try(examination, Operation.PROGRAM, trials.map_and_program)
    except CaptureUnavailable as unavailable:
        refusal = _refusal(examination, Operation.PROGRAM, unavailable)
    for name, row in rows.items():
        answer: Answer = (FAILS, *refusal) if refusal else row()
        state, detail, fix = answer
        if state in (WORKS, LIMITED) and not works:
            state, fix = FAILS, ""
            detail += "; but no method works"
        elif state in (WORKS, LIMITED):
            detail += suffix
        yield Diagnosis("layers", name, state, detail, fix)


def _userspace(examination: Examination) -> Answer:
    at_once = _try(examination, Operation.UPROBES, examination.trials.uprobes_at_once)
    singly = _try(examination, Operation.UPROBE, examination.trials.one_uprobe)
    if isinstance(at_once, Timing):
        return WORKS, f"uprobes at once: {_took(at_once)}", ""
    if isinstance(singly, Timing):
        return LIMITED, f"uprobes one by one: {_took(singly)} each", at_once[1]
    return FAILS, *singly


def _tracepoint(examination: Examination, trial: Callable[[], Timing]) -> Answer:
    tried = _try(examination, Operation.TRACEPOINT, trial)
    if isinstance(tried, Timing):
        return WORKS, f"tracepoint: {_took(tried)}", ""
    return FAILS, *tried


def _driver(examination: Examination) -> Answer:
    singly = _try(examination, Operation.KPROBE, examination.trials.one_kprobe)
    if not isinstance(singly, Timing):
        return FAILS, *singly
    at_once = _try(examination, Operation.KPROBES, examination.trials.kprobes_at_once)
    if isinstance(at_once, Timing):
        detail = f"kprobes at once: {_took(at_once)}"
    else:
        detail = f"kprobes one by one: {_took(singly)} each"
    count, why = examination.trials.driver_functions()
    if not count:
        return ABSENT, f"{detail}; {why}", ""
    return (
        WORKS if isinstance(at_once, Timing) else LIMITED,
        f"{detail}; {counted(count, 'function|functions')} of the driver",
        "",
    )


def cuda(examination: Examination) -> Iterator[Diagnosis]:
    """The CUDA libraries and the driver that can be traced."""
    facts = examination.machine
    driver = examination.trials.libraries("libcuda.so.1")
    if driver:
        yield Diagnosis("cuda", "libcuda", WORKS, ", ".join(driver))
    else:
        fix = "Install NVIDIA's driver (Debian: apt install libcuda1), or name the file: --library PATH."
        yield Diagnosis("cuda", "libcuda", ABSENT, "the linker finds none", fix)
    runtimes = examination.trials.libraries("libcudart.so")
    if runtimes:
        yield Diagnosis("cuda", "libcudart", WORKS, ", ".join(runtimes))
    else:
        detail = "the linker finds none; those of programs and Python packages are found when they run"
        yield Diagnosis("cuda", "libcudart", ABSENT, detail)
    if facts.nvidia_modules:
        version = facts.nvidia or "version not known"
        yield Diagnosis("cuda", "driver", WORKS, f"{version}: {', '.join(facts.nvidia_modules)}")
    else:
        yield Diagnosis("cuda", "driver", ABSENT, "no NVIDIA module is loaded")


_Given = TypeVar("_Given")


def _try(
    examination: Examination, operation: Operation, trial: Callable[[], _Given]
) -> _Given | tuple[str, str]:
    """The result of a trial, or why it was refused and how to fix that."""
    try:
        return trial()
    except (CaptureUnavailable, OSError) as error:
        return _refusal(examination, operation, error)


def _refusal(
    examination: Examination, operation: Operation, error: CaptureUnavailable | OSError
) -> tuple[str, str]:
    refusal = explain(operation, error, examination.machine) if isinstance(error, OSError) else error
    return refusal.message.rstrip("."), refusal.hint


def _took(timing: Timing) -> str:
    return f"attached in {_milliseconds(timing.attach_ns)}, detached in {_milliseconds(timing.detach_ns)}"


def _milliseconds(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.{0 if duration_ns >= 10**7 else 1}f} ms"


_INSTALL_DRIVER = "Install NVIDIA's driver (Debian: apt install nvidia-driver libcuda1)."
_LET_PROFILE = (
    "Set the driver's option: options nvidia NVreg_RestrictProfilingToAdminUsers=0 in a file of "
    "/etc/modprobe.d, and load the driver again."
)
_SHOW = "Run nvidia-smi to see whether the driver finds a GPU."


def gpu(examination: Examination) -> Iterator[Diagnosis]:
    """The means of this machine to record on GPUs. Without a GPU they are absent, which is no failure."""
    if examination.machine.system != "Linux":
        return
    trials = examination.trials
    toolchain = trials.toolchain()
    driver = toolchain.driver
    bad: State = FAILS if driver.gpus else ABSENT
    if driver.cuda == (0, 0):
        yield Diagnosis("gpu", "CUDA", ABSENT, driver.error or "gives no version", _INSTALL_DRIVER)
    else:
        yield Diagnosis("gpu", "CUDA", WORKS, f"{_dots(driver.cuda)}, by the driver")
        named = [f"{index}: {gpu.name}, {gpu.architecture}" for index, gpu in enumerate(driver.gpus)]
        if named:
            yield Diagnosis("gpu", "GPUs", WORKS, "; ".join(named))
        else:
            yield Diagnosis("gpu", "GPUs", FAILS, driver.error or "CUDA sees none", _SHOW)
    yield _row("g++", bad, toolchain.gxx)
    yield _row("nvcc", bad, toolchain.nvcc)
    yield _row("sanitizer", bad, lambda: toolchain.part("sanitizer"))
    yield _row("CUPTI", bad, lambda: toolchain.part("cupti"))
    if driver.gpus:
        yield _row("kernels", bad, lambda: trials.build_kernels(toolchain))
        # As far as it is known without sampling.
        row = _row("counters", FAILS, lambda: trials.build_sampler(toolchain))
        for_admins = examination.machine.profiles_for_admins
        if row.state == WORKS and for_admins:
            row = replace(row, state=LIMITED, detail="the driver lets only administrators profile")
            if examination.machine.euid != 0:
                row = replace(row, state=FAILS, fix=ADMIN_ONLY_HINT)
        yield row
        if for_admins and (uid := toolchain.owner.uid):  # the command samples
            detail = f"the driver lets only administrators profile, and commands run as user {uid}"
            yield Diagnosis("gpu", "stalls", FAILS, detail, _LET_PROFILE)
        else:
            yield Diagnosis("gpu", "stalls", WORKS, "commands may sample what warps wait for")


def _row(name: str, bad: State, find: Callable[[], Compiler | Part | Path]) -> Diagnosis:
    """A row on a compiler, a library, or a file that is built."""
    try:
        found = find()
    except CaptureUnavailable as refusal:
        return Diagnosis("gpu", name, bad, refusal.message.rstrip("."), refusal.hint if bad == FAILS else "")
    if isinstance(found, Path):
        return Diagnosis("gpu", name, WORKS, f"built: {found}")
    path = found.path if isinstance(found, Compiler) else found.library
    return Diagnosis("gpu", name, WORKS, f"{_dots(found.version)}, {path}" if found.version else str(path))


def _dots(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def convert(examination: Examination) -> Iterator[Diagnosis]:
    """Whether the native core runs, and how to build it."""
    detail, fix = examination.trials.core()
    yield Diagnosis("convert", "core", LIMITED if fix else WORKS, detail, fix)
