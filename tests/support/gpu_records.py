"""Records that a traced process writes, as native/transport.h draws them, and what renders them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import partial
from typing import Any

from tracepipe.tracer.gpu.engines.annotations import AnnotationDecoder
from tracepipe.tracer.gpu.engines.kernels import KernelDecoder
from tracepipe.tracer.gpu.engines.stalls import StallDecoder
from tracepipe.tracer.gpu.engines.streams import GpuRenderer, ProcessDecoder
from tracepipe.tracer.gpu.engines.warps import WarpDecoder
from tracepipe.tracer.request import CaptureRequest

_RECORD = struct.Struct("<QIHxxIIQ")  # tag, length, kind, pid, tid, time_ns
_ALIGNMENT = 16


def pack_record(kind: int, pid: int, tid: int, time_ns: int, payload: bytes) -> bytes:
    """A record as the capture process collects it."""
    filler = bytes(-len(payload) % _ALIGNMENT)
    return _RECORD.pack(0, len(payload), kind, pid, tid, time_ns) + payload + filler


def kernel_renderer(gpus: Mapping[str, int] | None = None) -> GpuRenderer:
    """A renderer of the records of `--gpu kernels`."""
    return GpuRenderer([ProcessDecoder, KernelDecoder, StallDecoder], gpus)


def warp_renderer(gpus: Mapping[str, int] | None = None, **options: Any) -> GpuRenderer:
    """A renderer of the records of `--gpu warps`, with options of a request."""
    return GpuRenderer([ProcessDecoder, partial(WarpDecoder, request=CaptureRequest(**options))], gpus)


def annotation_renderer(*, kernels: bool = False) -> GpuRenderer:
    """A renderer of annotations, alone or with the records of `--gpu kernels`."""
    return GpuRenderer(
        [*((ProcessDecoder, KernelDecoder, StallDecoder) if kernels else ()), AnnotationDecoder]
    )
