"""As whom GPUs are sampled, and when they are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Driver, Gpu, Owner
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part, Parts, Toolchain
from tracepipe.tracer.gpu.engines import counters
from tracepipe.tracer.gpu.engines.counters import NotPermitted, build_sampler, start_counters

ANN = Owner(1000, 1000, Path("/home/ann"))


def machine(cuda: tuple[int, int] = (13, 0), owner: Owner = ANN) -> Toolchain:
    compiler, part = Compiler(Path("/c"), (13, 0), ""), Part((), Path("/l.so"), cuda)
    gpus = (Gpu("NVIDIA H200", "sm_90", f"GPU-of-test-{os.getpid()}"),)
    return Toolchain(Driver((13, 0), gpus), Parts([compiler], [compiler], [part], [part]), owner)


class Starts:
    """What is built and started, and by which user; only root may sample."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, euid: int) -> None:
        self.built: list[int] = []
        self.ran: list[int] = []
        monkeypatch.setattr(os, "geteuid", lambda: euid)
        monkeypatch.setattr(counters, "find_parts", lambda user: Parts())
        monkeypatch.setattr(counters, "build_sampler", self._build)
        monkeypatch.setattr(counters, "_begun", self._begin)

    def _build(self, toolchain: Toolchain) -> Path:
        self.built.append(toolchain.owner.uid)
        return Path(f"/cache/{toolchain.owner.uid}/pm_sampler")

    def _begin(self, _: Any, __: int, ___: Any, program: Path, user: Owner) -> list[Any]:
        assert program == Path(f"/cache/{user.uid}/pm_sampler")
        self.ran.append(user.uid)
        if user.uid != 0:
            raise NotPermitted("The driver refuses.", "")
        return []


def test_root_samples_what_its_caller_may_not_with_a_build_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts, messages = Starts(monkeypatch, euid=0), list[str]()
    start_counters(10**6, machine(), messages.append).close()
    assert (starts.built, starts.ran) == ([1000, 0], [1000, 0])
    assert messages == ["gpu counters: sampled as root, as the driver lets only administrators profile"]


def test_a_user_other_than_root_is_refused_and_the_gpus_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        starts = Starts(monkeypatch, euid=1000)
        with pytest.raises(NotPermitted):
            start_counters(10**6, machine(), print)
        assert starts.ran == [1000]


def test_a_cupti_that_is_too_old_is_refused() -> None:
    with pytest.raises(CaptureUnavailable, match=r"CUPTI of CUDA 12.6 is too old .* 12.8 is the first"):
        build_sampler(machine((12, 6)))
