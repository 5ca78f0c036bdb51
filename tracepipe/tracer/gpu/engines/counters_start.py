"""Starts the counter samplers of a machine's GPUs, as a user who may sample them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.cuda_parts import find_parts
from tracepipe.tracer.gpu.build.driver import Owner, driver_environment
from tracepipe.tracer.gpu.build.toolchain import INSTALL, NATIVE, Toolchain
from tracepipe.tracer.gpu.engines.annotations import NoGpus
from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
from tracepipe.tracer.gpu.engines.counter_metrics import COUNTERS
from tracepipe.tracer.gpu.engines.counters import CountersEngine
from tracepipe.tracer.gpu.engines.sampler import NotPermitted, SampledGpu, Sampler
from tracepipe.tracer.gpu.sampling_lock import SamplingLock
from tracepipe.tracer.request import CaptureRequest, Notify

_FIRST_CUPTI: Final = (12, 8)
"""The first version that keeps the latest samples when the hardware's buffer is full."""


def start_counters(
    request: CaptureRequest, device: ChannelEngine | None, toolchain: Toolchain, notify: Notify
) -> CountersEngine:
    """Start sampling the counters of all GPUs that CUDA sees, and add them to the GPU engine, if any.

    Raises CaptureUnavailable.
    """
    assert request.gpu_counters_ns is not None
    toolchain.architectures()  # raises without a GPU
    gpus = [SampledGpu(index, gpu.uuid) for index, gpu in enumerate(toolchain.driver.gpus)]
    program = build_sampler(toolchain)
    with ExitStack() as started:
        lock = started.enter_context(SamplingLock(gpu.uuid for gpu in gpus))
        try:
            samplers = _begun(started, request.gpu_counters_ns, gpus, program, toolchain.owner)
        except NotPermitted:
            if os.geteuid() != 0 or toolchain.owner.uid == 0:
                raise
            # Root does not run what its caller compiled, and has a separate build.
            root = Owner(0, 0, Path("/root"))
            own = replace(toolchain, parts=find_parts(user=root), owner=root)
            samplers = _begun(started, request.gpu_counters_ns, gpus, build_sampler(own), root)
            notify("gpu counters: sampled as root, as the driver lets only administrators profile")
        for sampler in samplers:
            taken = {one.counter.name for one in sampler.sampled}
            missing = [counter.name for counter in COUNTERS if counter.name not in taken]
            if missing:
                notify(f"gpu counters: GPU {sampler.gpu.index} does not give {', '.join(missing)}")
        if device is None:
            owner = toolchain.owner.uid, toolchain.owner.gid
            device = NoGpus(owner, stacks=request.stacks)
            device.gpus = toolchain.driver.listed
        started.pop_all()
        return CountersEngine(device, samplers, lock, request.gpu_counters_ns)


def build_sampler(toolchain: Toolchain) -> Path:
    """The program that samples a GPU, built if it is not in the cache. Raises CaptureUnavailable."""
    cupti = toolchain.part("cupti")
    if cupti.version is not None and cupti.version < _FIRST_CUPTI:
        raise CaptureUnavailable(
            f"CUPTI of CUDA {cupti.version[0]}.{cupti.version[1]} is too old to sample counters: "
            f"{_FIRST_CUPTI[0]}.{_FIRST_CUPTI[1]} is the first that can.",
            f"Run {INSTALL} with a driver at least as new, or leave out --gpu-counters.",
        )
    return toolchain.build_program("pm_sampler", [NATIVE / "pm_sampler.cpp"], ["cupti"])


def _begun(
    started: ExitStack, interval_ns: int, gpus: list[SampledGpu], program: Path, user: Owner
) -> list[Sampler]:
    """Start a sampler for each GPU, and wait until all sample; their setups run at the same time."""
    environment = driver_environment()
    if user.uid == 0 and os.environ.get("SUDO_UID"):
        environment.pop("LD_LIBRARY_PATH", None)  # it is the caller's, and root loads none of their libraries
    samplers = []
    for gpu in gpus:
        sampler = Sampler(program, gpu, interval_ns, COUNTERS, run_as=user.run_as, environment=environment)
        started.callback(sampler.close)
        samplers.append(sampler)
    for sampler in samplers:
        sampler.begin()
    return samplers
