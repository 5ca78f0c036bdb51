"""Records a command's GPU work with a library that the CUDA driver loads into it, without root or changes to
it.

start(CaptureRequest(["./vec_add"], gpu="auto"), notify) → the request with its engine, a GpuEngine
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
    from tracepipe.tracer.gpu.build.toolchain import Toolchain
    from tracepipe.tracer.gpu.engines.streams import GpuEngine, RecordStream


def _engine(request: CaptureRequest, toolchain: Toolchain, *streams: RecordStream) -> GpuEngine:
    from tracepipe.tracer.gpu.engines.streams import GpuEngine

    owner = toolchain.owner.uid, toolchain.owner.gid
    if streams and request.gpu != "off" and request.stacks == "python" and request.command:
        from tracepipe.tracer.gpu.engines.compiled_code import CompiledStream

        streams = (*streams, CompiledStream(owner))
    return GpuEngine(streams, owner=owner, stacks=request.stacks, gpus=toolchain.driver.listed)


def _kernels(request: CaptureRequest, toolchain: Toolchain) -> GpuEngine:
    from tracepipe.tracer.gpu.engines.kernels import KernelStream, StallStream

    kind = StallStream if request.gpu == "off" else KernelStream
    sampled = [gpu.uuid for gpu in toolchain.driver.gpus if gpu.uuid] if request.gpu_stalls else None
    return _engine(request, toolchain, kind(kind.build(toolchain), calls=request.calls, sampled=sampled))


def _warps(request: CaptureRequest, toolchain: Toolchain) -> GpuEngine:
    from tracepipe.tracer.gpu.engines.warps import WarpStream

    library, patches = WarpStream.build(toolchain, request)
    return _engine(request, toolchain, WarpStream(library, patches, request, toolchain.driver.listed))


# GPU engine → the function that starts it.
GPU_ENGINES: dict[str, Callable[[CaptureRequest, Toolchain], GpuEngine]] = {
    "kernels": _kernels,
    "warps": _warps,
}


def start(request: CaptureRequest, notify: Notify) -> tuple[CaptureRequest, GpuEngine | None]:
    """Build the native code where it is not cached, create the channel, and begin to sample counters where
    the request asks for them; None if the request asks for nothing.

    The returned request has the engine that `auto` chose, and its budget. Raises CaptureUnavailable for an
    engine that was named and cannot work or counters that cannot be sampled, TracepipeError for options that
    cannot be combined.
    """
    from tracepipe.tracer.gpu import choice

    if request.gpu not in ("auto", "off", *GPU_ENGINES):
        raise TracepipeError(
            f"There is no GPU engine {request.gpu}.", f"Choose from: auto, off, {', '.join(GPU_ENGINES)}."
        )
    choice.check(request)
    request, device = _start(replace(request, gpu=choice.named_engine(request)), notify)
    if request.gpu == "kernels" and choice.has_marks(request.command):
        notify("the program has marks in its kernels: --gpu warps records them")
    if request.gpu_counters_ns is not None:
        from tracepipe.tracer.gpu.build.toolchain import this_toolchain
        from tracepipe.tracer.gpu.engines.counters import start_counters

        try:
            toolchain = this_toolchain()
            counters = start_counters(request.gpu_counters_ns, toolchain, notify)
            device = device or _engine(request, toolchain)
            device.add(counters)
        except BaseException:
            if device is not None:
                device.close()
            raise
    return request, device


def _start(request: CaptureRequest, notify: Notify) -> tuple[CaptureRequest, GpuEngine | None]:
    from tracepipe.tracer.gpu import choice

    if request.gpu == "auto":
        return _start_chosen(request, notify)
    if request.gpu == "off" and not request.gpu_stalls:
        return request, None
    from tracepipe.tracer.gpu.attach.loader import user_of
    from tracepipe.tracer.gpu.build.toolchain import this_toolchain, toolchain_for
    from tracepipe.tracer.gpu.engines.channel import INJECTION_VARIABLE

    if INJECTION_VARIABLE in os.environ and request.command:
        notify(f"{INJECTION_VARIABLE} is set: tracepipe's library is loaded instead of the one that it names")
    toolchain = toolchain_for(user_of(request.pids)) if request.pids else this_toolchain()
    toolchain.architectures()  # raises without a GPU, as nothing would be recorded
    if request.gpu == "off":
        return request, _kernels(request, toolchain)
    request = choice.with_fair_budget(request)
    return request, GPU_ENGINES[request.gpu](request, toolchain)


def annotated(request: CaptureRequest, device: GpuEngine | None, notify: Notify) -> GpuEngine | None:
    """The GPU engine, if any, with annotations where the request asks for them and they are available.

    A message states why they are not available. Raises CaptureUnavailable if nothing else was requested.
    """
    if ANNOTATION not in request.layers:
        return device
    from tracepipe.tracer.gpu.build.toolchain import host_toolchain
    from tracepipe.tracer.gpu.engines.annotations import AnnotationStream
    from tracepipe.tracer.gpu.engines.channel import NVTX_VARIABLE

    try:
        if NVTX_VARIABLE in os.environ:
            raise CaptureUnavailable(
                f"{NVTX_VARIABLE} is set, and NVTX loads only one library.",
                f"Run env -u {NVTX_VARIABLE} tracepipe capture …",
            )
        toolchain = host_toolchain()
        stream = AnnotationStream(AnnotationStream.build(toolchain))
        device = device or _engine(request, toolchain)
        device.add(stream)
    except CaptureUnavailable as refusal:
        if device is None and request.layers == (ANNOTATION,) and not request.hooks:
            raise
        notify(f"no {ANNOTATION} layer: {refusal.message} {refusal.hint}")
    return device


def _start_chosen(request: CaptureRequest, notify: Notify) -> tuple[CaptureRequest, GpuEngine | None]:
    """Start the best engine for the request; if it is not available the other one, or none."""
    from tracepipe.tracer.gpu import choice
    from tracepipe.tracer.gpu.build.toolchain import this_toolchain

    off = choice.with_engine(request, "off")
    chosen = choice.choose(request, os.environ, has_device=paths.is_there(choice.CONTROL_DEVICE))
    if chosen.engine == "off":
        if chosen.why:
            notify("; ".join(filter(None, (f"gpu off: {chosen.why}", chosen.instead))))
        return off, None
    toolchain = this_toolchain()
    if not toolchain.driver.gpus:
        if toolchain.driver.is_broken or choice.given_for_warps(request):
            error = toolchain.driver.error or "the driver reports none"
            notify(f"gpu off: CUDA sees no GPU: {error}; nvidia-smi shows more")
        return off, None
    why, instead = chosen.why, chosen.instead
    for engine in (chosen.engine, *(other for other in GPU_ENGINES if other != chosen.engine)):
        configured = choice.with_engine(request, engine)
        try:
            device = GPU_ENGINES[engine](configured, toolchain)
        except CaptureUnavailable as refusal:
            notify(f"gpu {engine}: not available: {refusal.message} {refusal.hint}")
            selected = choice.given_for_warps(request)
            why = f"as {engine} is not available" + (f", and without {selected}" if selected else "")
            instead = ""
            continue
        launches, warps = configured.gpu_launches_per_kernel, configured.gpu_warps
        if launches and warps:
            why += f", for the first {launches} {agree(launches, 'launch|launches')} of each kernel"
        if warps:
            why += f", up to {warps} {agree(warps, 'warp|warps')}"
        notify("; ".join(filter(None, (f"gpu {engine}: {why}", instead))))
        return configured, device
    notify("gpu off: neither engine is available")
    return off, None
