"""The header and the footer of a recording."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tracepipe.errors import TracepipeError
from tracepipe.event.model import SCHEMA_VERSION, HostInstant
from tracepipe.hooks.hook import HOST_SAMPLE
from tracepipe.launchers import place_of
from tracepipe.tracer.engines.engine import Store
from tracepipe.tracer.engines.host_stacks import HZ
from tracepipe.tracer.machine.processes import clock_ahead_ns
from tracepipe.tracer.request import CALL_LAYERS, CaptureRequest

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.streams import GpuEngine, GpuRenderer

_RUNNING_MAX: Final = 16  # names of processes in a footer
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
# The options of the request that a header has where they differ from the default.
_OPTIONS = (
    "gpu", "gpu_kernels", "gpu_launches", "gpu_launches_per_kernel", "gpu_blocks", "gpu_memory_bytes",
    "gpu_warps", "gpu_thread_exits", "gpu_warp_marks", "gpu_stalls", "gpu_counters_ns", "pids", "comm",
    "system", "children", "wait_children", "calls", "stacks", "hooks", "only", "exclude", "libraries",
    "min_duration_ns", "sample", "delay_ns", "start_on", "stop_on", "repeat",
)  # fmt: skip


def instant() -> HostInstant:
    """All three host clocks, read within a microsecond."""
    return {
        "monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        "boottime_ns": time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        "realtime_ns": time.clock_gettime_ns(time.CLOCK_REALTIME),
    }


def header_of(
    request: CaptureRequest,
    engine: str,
    recorded: Sequence[str],
    missing: Mapping[str, str],
    device: GpuEngine | None,
    start: HostInstant,
) -> dict[str, Any]:
    """The header of a recording that starts at `start`. `recorded`: layers; `missing`: layer → why not."""
    made = [layer for layer in CALL_LAYERS if layer in request.layers and "userspace" in recorded]
    by_device = sorted(device.layers) if device else ()
    asked, usual = asdict(request), asdict(CaptureRequest())
    stated = {**asked, **asked["filters"], **asked["windows"]}
    usual |= usual["filters"] | usual["windows"]
    last = {f"last_{name}": value for name, value in (asked["last"] or {}).items() if value}
    boot, rank = dict[str, str](), dict[str, int]()
    with suppress(TracepipeError):  # the rank of what is recorded, and the number of ranks
        place = place_of(request.command, request.pids)
        rank = {"rank": place.rank}
        rank |= {} if place.world_size is None else {"world_size": place.world_size}
    if not clock_ahead_ns():  # within one boot, CLOCK_MONOTONIC is the same
        with suppress(OSError):
            boot["boot"] = _BOOT_ID.read_text(encoding="ascii").strip()
    try:
        tool = f"tracepipe {version('tracepipe')}"
    except PackageNotFoundError:  # run from a source tree
        tool = "tracepipe"
    header: dict[str, Any] = dict(
        type="header",
        schema=SCHEMA_VERSION,
        tool=tool,
        host=platform.node(),
        **boot,
        kernel=platform.release(),
        machine=platform.machine(),
        command=request.command,
        **rank,
        engine=engine,
        clock="monotonic",
        clocks=["monotonic", *(device.clocks if device else ())],
        start=start,
        layers={
            "asked": list(request.layers),
            "got": list(dict.fromkeys((*recorded, *made, *by_device))),
            "missing": dict(missing),
        },
        options={name: stated[name] for name in _OPTIONS if stated[name] != usual[name]} | last,
    )
    if HOST_SAMPLE in recorded:
        header["options"]["host_sample_hz"] = HZ
    if device is not None:
        header["options"]["stacks"] = request.stacks
    if device is not None and device.counters:
        header["counters"] = [dict(counter) for counter in device.counters]
    if device is not None and device.gpus:
        header["gpus"] = [dict(gpu) for gpu in device.gpus]
    return header


def footer_of(
    store: Store,
    filtered: Mapping[str, int],
    renderer: GpuRenderer | None,
    ended_by: str,
    end: HostInstant,
    evicted: Mapping[str, int] | None = None,
    running: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """The footer of a recording that ended at `end`. `filtered` and `evicted`: layer → events that were left
    out by filters, and because they did not fit. `running`: processes that the command left → their names.
    """
    footer: dict[str, Any] = {
        "type": "footer",
        "counts": store.counts,
        "losses": store.losses,
        "end": end,
        "ended_by": ended_by,
    }
    if store.cpu_losses:
        footer["cpu_losses"] = {
            layer: {str(cpu): count for cpu, count in sorted(by_cpu.items())}
            for layer, by_cpu in store.cpu_losses.items()
        }
    if renderer is not None and renderer.gpus:
        footer["gpus"] = renderer.gpus
    if renderer is not None and (errors := renderer.cuda_errors):
        footer["cuda_errors"] = errors
    if renderer is not None and renderer.sampling:
        footer["sampling"] = renderer.sampling
    if filtered:
        footer["filtered"] = dict(filtered)
    if evicted:
        footer["evicted"] = dict(evicted)
    if running:
        footer["running"] = len(running)
        named = list(running.items())[:_RUNNING_MAX]
        footer["running_processes"] = dict(named)
    return footer
