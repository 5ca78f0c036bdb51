"""The GPU's rows: each part alone missing, with the command that fixes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.machines import machine
from tests.unit.test_doctor import FakeTrials
from tracepipe.doctor.checks import Diagnosis, Examination, gpu
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Driver
from tracepipe.tracer.gpu.build.toolchain import Parts, Toolchain
from tracepipe.tracer.machine.facts import Machine

GOOD = FakeTrials().toolchain()
HERE = machine()
INSTALL = "pip install 'tracepipe[gpu]'"


class Trials(FakeTrials):
    def __init__(self, tools: Toolchain, broken: dict[str, Exception] | None = None) -> None:
        super().__init__(broken)
        self.tools = tools

    def toolchain(self) -> Toolchain:
        return self.tools


def rows(tools: Toolchain, facts: Machine = HERE, **broken: Exception) -> dict[str, Diagnosis]:
    return {found.name: found for found in gpu(Examination(facts, Trials(tools, broken)))}


def without(**parts: list[object]) -> Toolchain:
    return replace(GOOD, parts=replace(GOOD.parts, **parts))  # type: ignore[arg-type]


def test_a_machine_where_everything_works() -> None:
    found = rows(GOOD)
    assert {row.state for row in found.values()} == {"works"}
    assert found["GPUs"].detail == "0: NVIDIA H200, sm_90"
    assert found["CUDA"].detail == "13.0, by the driver"
    assert found["kernels"].detail == "built: /cache/kernels.so"
    assert found["counters"].detail == "built: /cache/pm_sampler"


@pytest.mark.parametrize(
    ("row", "part", "fix"),
    [
        ("g++", "gxx", "apt install g++"),
        ("nvcc", "nvcc", INSTALL),
        ("CUPTI", "cupti", INSTALL),
        ("sanitizer", "sanitizer", INSTALL),
    ],
)
def test_a_part_that_is_not_there_fails_alone(row: str, part: str, fix: str) -> None:
    found = rows(without(**{part: []}))
    assert (found[row].state, found[row].fix) == ("fails", fix)
    assert {other.state for other in found.values() if other.name != row} == {"works"}


def test_a_part_that_does_not_fit_the_driver_names_the_version() -> None:
    newer = [replace(GOOD.parts.cupti[0], version=(13, 5))]
    found = rows(without(cupti=newer))  # type: ignore[arg-type]
    assert found["CUPTI"].fix == "pip install 'nvidia-cuda-cupti==13.0.*'"


def test_a_failed_build_is_reported() -> None:
    found = rows(
        GOOD, build_kernels=CaptureUnavailable("kernels could not be built: a.cpp:1.", "Try it: g++")
    )
    assert (found["kernels"].state, found["kernels"].fix) == ("fails", "Try it: g++")
    assert found["kernels"].detail == "kernels could not be built: a.cpp:1"


def test_without_a_driver_nothing_fails() -> None:
    found = rows(Toolchain(Driver(error="libcuda.so.1: not there"), Parts(), GOOD.owner))
    assert {row.state for row in found.values()} == {"absent"}
    assert [row.name for row in found.values() if row.fix] == ["CUDA"]
    assert found["CUDA"].detail == "libcuda.so.1: not there"


def test_a_driver_that_sees_no_gpu_fails() -> None:
    driver = Driver((13, 0), error="cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    found = rows(replace(GOOD, driver=driver))
    assert (found["GPUs"].state, found["GPUs"].detail) == ("fails", driver.error)
    assert found["GPUs"].fix.startswith("Run nvidia-smi")


def test_other_systems_have_no_rows() -> None:
    assert list(gpu(Examination(machine(system="Darwin"), FakeTrials()))) == []


def test_counters_that_the_driver_keeps_for_administrators_are_theirs() -> None:
    for euid, state in ((0, "limited"), (1000, "fails")):
        found = rows(GOOD, machine(profiles_for_admins=True, euid=euid))["counters"]
        assert (found.state, found.detail) == (state, "the driver lets only administrators profile")
        assert ("NVreg_RestrictProfilingToAdminUsers=0" in found.fix) == (euid != 0)


@pytest.mark.parametrize(
    ("for_admins", "uid", "state"),
    [(False, 1000, "works"), (True, 0, "works"), (True, 1000, "fails")],
)
def test_stall_reasons_are_sampled_as_the_user_of_the_command(for_admins: bool, uid: int, state: str) -> None:
    tools = replace(GOOD, owner=replace(GOOD.owner, uid=uid))
    found = rows(tools, machine(profiles_for_admins=for_admins))["stalls"]
    assert found.state == state
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in found.fix) == (state == "fails")
