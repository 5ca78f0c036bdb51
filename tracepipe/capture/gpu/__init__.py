"""What a command's GPUs do, told by a library that CUDA's driver loads into it: no root, no change to it.

start("kernels") → DeviceRecording
"""

from __future__ import annotations

import os
from collections.abc import Callable

from tracepipe.capture.engine import CaptureRequest, DeviceRecording
from tracepipe.errors import TracepipeError


def _kernels(request: CaptureRequest) -> DeviceRecording:
    from tracepipe.capture.gpu.kernels import KernelsRecording, build_library
    from tracepipe.capture.gpu.toolchain import this_toolchain

    if request.gpu_kernels or request.gpu_launches:
        raise TracepipeError(
            "--gpu kernels records every kernel.", "--gpu warps takes --kernel and --launches."
        )
    return KernelsRecording(build_library(this_toolchain()), owner=_caller())


def _warps(request: CaptureRequest) -> DeviceRecording:
    from tracepipe.capture.gpu.toolchain import NATIVE, this_toolchain
    from tracepipe.capture.gpu.warps import GpuRecording, WarpOptions

    options = WarpOptions(request.gpu_kernels, request.gpu_launches)
    options.check()
    toolchain = this_toolchain()
    library = toolchain.build_host("warps", [NATIVE / "warps.cpp"], ["sanitizer"])
    patches = toolchain.build_patches("patches", NATIVE / "patches.cu")
    count = len(toolchain.driver.gpus)
    return GpuRecording(library, patches, options, owner=_caller(), gpu_count=count)


# Engine for the GPUs → its start.
GPU_ENGINES: dict[str, Callable[[CaptureRequest], DeviceRecording]] = {
    "kernels": _kernels,
    "warps": _warps,
}


def start(request: CaptureRequest) -> DeviceRecording:
    """Build what has to be built, and make the channel. Raises CaptureUnavailable."""
    if request.gpu not in GPU_ENGINES:
        raise TracepipeError(
            f"There is no GPU engine {request.gpu}.", f"Choose from: {', '.join(GPU_ENGINES)}."
        )
    return GPU_ENGINES[request.gpu](request)


def _caller() -> tuple[int, int] | None:
    """Who the command runs as, if that is not who we are: under sudo its caller."""
    if os.geteuid() == 0 and {"SUDO_UID", "SUDO_GID"} <= os.environ.keys():
        return int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"])
    return None
