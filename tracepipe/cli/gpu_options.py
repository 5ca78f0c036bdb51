"""The options of `capture` for GPUs, a panel of the help."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import typer

from tracepipe.cli.values import misuse_of, read, whole
from tracepipe.errors import TracepipeError
from tracepipe.terminal.messages import choices, text_of
from tracepipe.tracer.gpu import GPU_ENGINES
from tracepipe.tracer.request import AUTO_WARPS, BUDGET_LAUNCHES, STACKS, CaptureRequest
from tracepipe.units import duration_ns, size_bytes

Stacks = choices("Stacks", list(STACKS))
Gpu = choices("Gpu", ["auto", "off", *GPU_ENGINES])
GPUS = "GPUs"
_COUNTERS = (
    "Sample the hardware counters of all GPUs (SMs, tensor cores, DRAM, PCIe, clocks) at this interval: 1ms, "
    "200us. The interval is from 100us to 1s."
)
_MARKS = (
    "Record the warps of kernels that match the first expression, and in them the calls of device functions "
    "that match the second. This slows both down."
)


@dataclass(frozen=True, slots=True)
class OnGpus:
    """The recording of a command's work on GPUs."""

    gpu: Annotated[
        Gpu,  # type: ignore[valid-type]
        typer.Option(
            "--gpu",
            help="Record what the command does on the GPUs, without root: kernels and copies (kernels; it "
            "costs almost nothing), or every warp (warps). auto chooses by the command, and says which. For "
            "a process of --pid, only kernels is possible.",
            rich_help_panel=GPUS,
        ),
    ] = "auto"
    kernel: Annotated[
        str,
        typer.Option(
            "--kernel",
            metavar="REGEX",
            help="Record the warps of kernels whose name, mangled or demangled, contains a match.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    launches: Annotated[
        str,
        typer.Option(
            "--launches",
            metavar="RANGE",
            help="Record the warps of these launches, counted from 1 among the launches of the chosen "
            "kernels: 10, 10-20, 10-.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    launches_per_kernel: Annotated[
        int | None,
        typer.Option(
            "--launches-per-kernel",
            parser=whole(),
            metavar="N",
            help="Record the warps of the first N launches of each kernel; 0: of all launches. Default: "
            f"{BUDGET_LAUNCHES} with a limit of warps (by --gpu-warps or auto) and without --launches; "
            "otherwise all.",
            rich_help_panel=GPUS,
        ),
    ] = None
    blocks: Annotated[
        str,
        typer.Option(
            "--blocks",
            metavar="RANGE",
            help="Record the warps of these blocks of each grid, counted from 0: 5, 0-131, 100-.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    gpu_memory: Annotated[
        str,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            help="Record warps, with a buffer of this size on each GPU, from 1M. Default: a size that suits "
            "the GPU.",
            rich_help_panel=GPUS,
        ),
    ] = ""
    gpu_warps: Annotated[
        int | None,
        typer.Option(
            "--gpu-warps",
            parser=whole(1),
            metavar="N",
            help="Record warps, and after N warps record no further launch. Default: no limit; "
            f"with auto, {AUTO_WARPS}.",
            rich_help_panel=GPUS,
        ),
    ] = None
    gpu_stalls: Annotated[
        bool,
        typer.Option(
            "--gpu-stalls",
            help="Sample why warps wait (stall reasons): with --gpu kernels, which auto then chooses, or "
            "alone, with --gpu off.",
            rich_help_panel=GPUS,
        ),
    ] = False
    stacks: Annotated[
        Stacks,  # type: ignore[valid-type]
        typer.Option(
            "--stacks",
            help="Record the Python stack of each launch, copy and allocation (python), or no stacks (off).",
            rich_help_panel=GPUS,
        ),
    ] = "python"
    thread_exits: Annotated[
        bool,
        typer.Option(
            "--thread-exits",
            help="Record warps, and write a line for the exit of each thread too: 32 times as many lines.",
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
    from tracepipe.tracer.gpu.choice import check

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
