"""Records a command's GPU work with a library that the CUDA driver loads into it, without root or changes to
it.

start(CaptureRequest(["./vec_add"], gpu="auto"), notify) → the request with its engine, a DeviceEngine
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from tracepipe import paths
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer.request import ANNOTATION, CaptureRequest, Notify
from tracepipe.units import agree

if TYPE_CHECKING:
    from tracepipe.tracer.engines.engine import DeviceEngine
    from tracepipe.tracer.gpu.build.toolchain import Toolchain
    from tracepipe.tracer.gpu.engines.channel_engine import ChannelEngine
    from tracepipe.tracer.gpu.engines.over import EngineOver


def _kernels(request: CaptureRequest, toolchain: Toolchain) -> ChannelEngine:
    from tracepipe.tracer.gpu.engines.kernels import KernelsEngine, build_library

    owner = toolchain.owner.uid, toolchain.owner.gid
    return KernelsEngine(
        build_library(toolchain),
        calls=request.calls,
        stacks=request.stacks,
        owner=owner,
        gpus=toolchain.driver.listed,
        stalls=request.gpu_stalls,
    )


def _stalls(toolchain: Toolchain) -> ChannelEngine:
    from tracepipe.tracer.gpu.engines.stalls import StallsEngine, build_library

    user, library = toolchain.owner, build_library(toolchain)
    return StallsEngine(library, owner=(user.uid, user.gid), gpus=toolchain.driver.listed, stalls=True)


def _warps(request: CaptureRequest, toolchain: Toolchain) -> ChannelEngine:
    from tracepipe.tracer.gpu.build.toolchain import NATIVE
    from tracepipe.tracer.gpu.choice import warp_options
    from tracepipe.tracer.gpu.engines.warps import WarpsEngine

    options = warp_options(request)
    library = toolchain.build_host("warps", [NATIVE / "warps.cpp"], ["sanitizer"])
    patches = toolchain.build_patches("patches", NATIVE / "patches.cu", defines=options.defines())
    user, gpus = toolchain.owner, toolchain.driver.listed
    return WarpsEngine(library, patches, options, owner=(user.uid, user.gid), gpus=gpus)


# GPU engine → the function that starts it.
GPU_ENGINES: dict[str, Callable[[CaptureRequest, Toolchain], ChannelEngine]] = {
    "kernels": _kernels,
    "warps": _warps,
}


def start(request: CaptureRequest, notify: Notify) -> tuple[CaptureRequest, ChannelEngine | None]:
    """Build the native code where it is not cached, and create the channel; None for `off`.

    The returned request has the engine that `auto` chose, and its budget. Raises CaptureUnavailable for an
    engine that was named and cannot work, TracepipeError for options that cannot be combined.
    """
    from tracepipe.tracer.gpu import choice

    if request.gpu not in ("auto", "off", *GPU_ENGINES):
        raise TracepipeError(
            f"There is no GPU engine {request.gpu}.", f"Choose from: auto, off, {', '.join(GPU_ENGINES)}."
        )
    choice.check(request)
    request, device = _start(replace(request, gpu=choice.named(request)), notify)
    if request.gpu == "kernels" and choice.has_marks(request.command):
        notify("the program has marks in its kernels: --gpu warps records them")
    return request, device


def _start(request: CaptureRequest, notify: Notify) -> tuple[CaptureRequest, ChannelEngine | None]:
    from tracepipe.tracer.gpu import choice

    if request.gpu == "auto":
        return _start_chosen(request, notify)
    if request.gpu == "off" and not request.gpu_stalls:
        return request, None
    from tracepipe.tracer.gpu.attach.process import user_of
    from tracepipe.tracer.gpu.build.toolchain import this_toolchain, toolchain_for
    from tracepipe.tracer.gpu.engines.transport import INJECTION_VARIABLE

    if INJECTION_VARIABLE in os.environ and request.command:
        notify(f"{INJECTION_VARIABLE} is set: tracepipe's library is loaded instead of the one that it names")
    toolchain = toolchain_for(user_of(request.pids)) if request.pids else this_toolchain()
    toolchain.architectures()  # raises without a GPU, as nothing would be recorded
    if request.gpu == "off":
        return request, _stalls(toolchain)
    request = choice.fair(request)
    return request, GPU_ENGINES[request.gpu](request, toolchain)


def counted(
    request: CaptureRequest, device: ChannelEngine | None, notify: Notify
) -> ChannelEngine | EngineOver | None:
    """The GPU engine, if any, with hardware counters where the request asks for them.

    Raises CaptureUnavailable where they cannot be sampled.
    """
    if request.gpu_counters_ns is None:
        return device
    from tracepipe.tracer.gpu.build.toolchain import this_toolchain
    from tracepipe.tracer.gpu.engines.counters import start_counters

    return start_counters(request, device, this_toolchain(), notify)


def annotated(
    request: CaptureRequest, device: ChannelEngine | EngineOver | None, notify: Notify
) -> DeviceEngine | None:
    """The GPU engine, if any, with annotations where the request asks for them and they are available.

    A message states why they are not available. Raises CaptureUnavailable if nothing else was requested.
    """
    if ANNOTATION not in request.layers:
        return device
    try:
        return _with_annotations(request, device)
    except CaptureUnavailable as refusal:
        if device is None and request.layers == (ANNOTATION,) and not request.hooks:
            raise
        notify(f"no {ANNOTATION} layer: {refusal.message} {refusal.hint}")
        return device


def _with_annotations(request: CaptureRequest, device: ChannelEngine | EngineOver | None) -> DeviceEngine:
    from tracepipe.tracer.gpu.build.toolchain import NATIVE, host_toolchain
    from tracepipe.tracer.gpu.engines.annotations import AnnotationsEngine, NoGpus
    from tracepipe.tracer.gpu.engines.transport import NVTX_VARIABLE

    if NVTX_VARIABLE in os.environ:
        raise CaptureUnavailable(
            f"{NVTX_VARIABLE} is set, and NVTX loads only one library.",
            f"Run env -u {NVTX_VARIABLE} tracepipe capture …",
        )
    toolchain = host_toolchain()
    library = toolchain.build_host("annotations", [NATIVE / "annotations.cpp"])
    owner = toolchain.owner.uid, toolchain.owner.gid
    return AnnotationsEngine(library, device or NoGpus(owner, stacks=request.stacks))


def _start_chosen(request: CaptureRequest, notify: Notify) -> tuple[CaptureRequest, ChannelEngine | None]:
    """Start the best engine for the request; if it is not available the other one, or none."""
    from tracepipe.tracer.gpu import choice
    from tracepipe.tracer.gpu.build.toolchain import this_toolchain

    off = choice.taken(request, "off")
    chosen = choice.choose(request, os.environ, has_device=paths.is_there(choice.CONTROL_DEVICE))
    if chosen.engine == "off":
        if chosen.why:
            _notify_of(notify, f"gpu off: {chosen.why}", chosen.instead)
        return off, None
    toolchain = this_toolchain()
    if not toolchain.driver.gpus:
        if toolchain.driver.is_broken or choice.of_warps(request):
            error = toolchain.driver.error or "the driver reports none"
            notify(f"gpu off: CUDA sees no GPU: {error}; nvidia-smi shows more")
        return off, None
    why, instead = chosen.why, chosen.instead
    for engine in (chosen.engine, *(other for other in GPU_ENGINES if other != chosen.engine)):
        configured = choice.taken(request, engine)
        try:
            device = GPU_ENGINES[engine](configured, toolchain)
        except CaptureUnavailable as refusal:
            notify(f"gpu {engine}: not available: {refusal.message} {refusal.hint}")
            selected = choice.of_warps(request)
            why = f"as {engine} is not available" + (f", and without {selected}" if selected else "")
            instead = ""
            continue
        _notify_of(notify, f"gpu {engine}: {why}{_budget(configured)}", instead)
        return configured, device
    notify("gpu off: neither engine is available")
    return off, None


def _budget(request: CaptureRequest) -> str:
    launches = request.gpu_launches_per_kernel
    each = (
        f", for the first {launches} {agree(launches, 'launch|launches')} of each kernel" if launches else ""
    )
    warps = request.gpu_warps
    return f"{each}, up to {warps} {agree(warps, 'warp|warps')}" if warps else ""


def _notify_of(notify: Notify, *parts: str) -> None:
    notify("; ".join(part for part in parts if part))
