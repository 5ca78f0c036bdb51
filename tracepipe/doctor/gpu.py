"""Diagnoses of the GPUs: the driver, its GPUs, the tools for native code, and whether it can be built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tracepipe.doctor.diagnosis import ABSENT, FAILS, LIMITED, WORKS, Diagnosis, Examination
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Driver, Version
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part, Toolchain
from tracepipe.tracer.gpu.engines.counters import ADMIN_ONLY_HINT

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
    yield from _driver(toolchain.driver)
    bad = FAILS if toolchain.driver.gpus else ABSENT
    yield _row("g++", bad, lambda: _compiler(toolchain.gxx()))
    yield _row("nvcc", bad, lambda: _compiler(toolchain.nvcc()))
    yield _row("sanitizer", bad, lambda: _part(toolchain.part("sanitizer")))
    yield _row("CUPTI", bad, lambda: _part(toolchain.part("cupti")))
    if toolchain.driver.gpus:
        yield _row("kernels", bad, lambda: f"built: {trials.build_kernels(toolchain)}")
        yield _counters(examination, toolchain)
        yield _stalls(for_admins=examination.machine.profiles_for_admins, uid=toolchain.owner.uid)


def _driver(driver: Driver) -> Iterator[Diagnosis]:
    if driver.cuda == (0, 0):
        yield Diagnosis("gpu", "CUDA", ABSENT, driver.error or "gives no version", _INSTALL_DRIVER)
        return
    yield Diagnosis("gpu", "CUDA", WORKS, f"{_dots(driver.cuda)}, by the driver")
    if not driver.gpus:
        yield Diagnosis("gpu", "GPUs", FAILS, driver.error or "CUDA sees none", _SHOW)
        return
    named = [f"{index}: {gpu.name}, {gpu.architecture}" for index, gpu in enumerate(driver.gpus)]
    yield Diagnosis("gpu", "GPUs", WORKS, "; ".join(named))


def _counters(examination: Examination, toolchain: Toolchain) -> Diagnosis:
    """Whether the GPUs' hardware can be sampled, as far as that is known without sampling."""
    machine = examination.machine
    row = _row("counters", FAILS, lambda: f"built: {examination.trials.build_sampler(toolchain)}")
    if row.state != WORKS or not machine.profiles_for_admins:
        return row
    state, fix = (LIMITED, "") if machine.euid == 0 else (FAILS, ADMIN_ONLY_HINT)
    return replace(row, state=state, detail="the driver lets only administrators profile", fix=fix)


def _stalls(*, for_admins: bool, uid: int) -> Diagnosis:
    """Whether --gpu-stalls may sample; `uid` is the user that commands run as, which do the sampling."""
    if for_admins and uid:
        detail = f"the driver lets only administrators profile, and commands run as user {uid}"
        return Diagnosis("gpu", "stalls", FAILS, detail, _LET_PROFILE)
    return Diagnosis("gpu", "stalls", WORKS, "commands may sample what warps wait for")


def _row(name: str, bad: str, detail: Callable[[], str]) -> Diagnosis:
    try:
        return Diagnosis("gpu", name, WORKS, detail())
    except CaptureUnavailable as refusal:
        fix = refusal.hint if bad == FAILS else ""
        return Diagnosis("gpu", name, bad, refusal.message.rstrip("."), fix)


def _compiler(compiler: Compiler) -> str:
    return f"{_dots(compiler.version)}, {compiler.path}"


def _part(part: Part) -> str:
    return f"{_dots(part.version)}, {part.library}" if part.version else str(part.library)


def _dots(version: Version) -> str:
    return f"{version[0]}.{version[1]}"
