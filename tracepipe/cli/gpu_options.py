"""The options of `capture` for GPUs, a panel of the help."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from tracepipe.capture.gpu import GPU_ENGINES
from tracepipe.capture.request import AUTO_WARPS, BUDGET_LAUNCHES, STACKS, CaptureRequest
from tracepipe.cli.values import misuse_of, read, whole
from tracepipe.errors import TracepipeError
from tracepipe.terminal.messages import choices, text_of
from tracepipe.units import duration_ns, size_bytes

Stacks = choices("Stacks", list(STACKS))
Gpu = choices("Gpu", ["auto", "off", *GPU_ENGINES])
GPUS = "GPUs"
_COUNTERS = (
    "Sample the hardware counters of all GPUs (SMs, tensor cores, DRAM, PCIe, clocks) at this interval, from "
    "100us to 1s: 1ms, 200us."
)
_MARKS = (
    "Record warps of kernels that fit the first expression, with their calls of device functions that "
    "fit the second. This slows both down."
)


@dataclass(frozen=True, slots=True)
class OnGpus:
    """What is recorded of a command's GPUs."""

    gpu: Annotated[
        Gpu,  # type: ignore[valid-type]
        typer.Option(
            "--gpu",
            help="Record what the command's GPUs do, without root: kernels and copies (almost free), or "
            "every warp. auto takes the one that suits the command, and says which.",
            rich_help_panel=GPUS,
        ),
    ] = "auto"
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            metavar="REGEX",
            help="Record warps of kernels whose name, mangled or demangled, this finds.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    launches: Annotated[
        str,
        typer.Option(
            "--launches",
            metavar="RANGE",
            help="Record warps of these launches, counted from 1 among those of the chosen kernels: 10, "
            "10-20, 10-.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    launches_per_kernel: Annotated[
        int | None,
        typer.Option(
            "--launches-per-kernel",
            parser=whole(),
            metavar="N",
            help="Record warps of the first N launches of each kernel; 0: of all. Default: "
            f"{BUDGET_LAUNCHES} with "
            "a budget, which auto or --gpu-warps sets, and without --launches; else all.",
            rich_help_panel=GPUS,
        ),
    ] = None
    blocks: Annotated[
        str,
        typer.Option(
            "--blocks",
            metavar="RANGE",
            help="Record warps of these blocks of each grid, counted from 0: 5, 0-131, 100-.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    gpu_memory: Annotated[
        str,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            help="Record warps, with this much memory on each GPU for records in flight, from 1M. By "
            "default it is chosen.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    gpu_warps: Annotated[
        int | None,
        typer.Option(
            "--gpu-warps",
            parser=whole(1),
            metavar="N",
            help="Record warps, and no further launch after N warps. With auto, the default is "
            f"{AUTO_WARPS}.",
            rich_help_panel=GPUS,
        ),
    ] = None
    gpu_stalls: Annotated[
        bool,
        typer.Option(
            "--gpu-stalls",
            help="Sample what warps wait for, with --gpu kernels (which auto takes then) or, with --gpu off, "
            "alone.",
            rich_help_panel=GPUS,
        ),
    ] = False
    stacks: Annotated[
        Stacks,  # type: ignore[valid-type]
        typer.Option(
            "--stacks",
            help="Record where a Python program launches, copies and allocates, by its frames; or not.",
            rich_help_panel=GPUS,
        ),
    ] = "python"
    thread_exits: Annotated[
        bool,
        typer.Option(
            "--thread-exits",
            help="Record warps, and also write a line for the exit of each thread: 32 times as many lines.",
            rich_help_panel=GPUS,
        ),
    ] = False
    warp_marks: Annotated[
        str, typer.Option("--warp-marks", metavar="REGEX:REGEX", help=_MARKS, rich_help_panel=GPUS)
    ] = ""
    gpu_counters: Annotated[
        str, typer.Option("--gpu-counters", metavar="TIME", help=_COUNTERS, rich_help_panel=GPUS)
    ] = ""


def with_gpus(request: CaptureRequest, gpus: OnGpus) -> CaptureRequest:
    """The request with what the options say of GPUs. Raises Misuse."""
    from tracepipe.capture.gpu.choice import check

    request = replace(
        request,
        gpu=text_of(gpus.gpu),
        gpu_kernels=gpus.kernel,
        gpu_launches=gpus.launches,
        gpu_launches_per_kernel=gpus.launches_per_kernel,
        gpu_blocks=gpus.blocks,
        gpu_memory_bytes=read(gpus.gpu_memory, size_bytes, "--gpu-memory"),
        gpu_warps=gpus.gpu_warps,
        gpu_thread_exits=gpus.thread_exits,
        gpu_stalls=gpus.gpu_stalls,
        stacks=text_of(gpus.stacks),
        gpu_warp_marks=gpus.warp_marks,
        gpu_counters_ns=read(gpus.gpu_counters, duration_ns, "--gpu-counters"),
    )
    try:
        check(request)
    except TracepipeError as error:
        raise misuse_of(error) from None
    return request
