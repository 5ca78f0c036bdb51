"""`tracepipe.capture`: records a command, running processes or this one while a block of Python runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import Any

from tracepipe.api.capture_block import Capture
from tracepipe.api.output_names import OutputNames
from tracepipe.api.recorder import Order
from tracepipe.capture.flight.conditions import Conditions
from tracepipe.capture.request import (
    CaptureRequest,
    Filters,
    Limits,
    Notify,
    Windows,
    calls_of,
    check_layers,
    check_stacks,
    last_of,
    ring_size,
)
from tracepipe.capture.triggers import check_windows
from tracepipe.errors import TracepipeError
from tracepipe.units import duration_ns, size_bytes


def capture(
    command: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    *,
    output: str | PathLike[str] = "",
    command_output: str | PathLike[str] = "",
    force: bool = False,
    pids: int | Sequence[int] = (),
    comm: str = "",
    system: bool = False,
    children: bool = True,
    layers: str | Sequence[str] | None = None,
    hooks: str | Sequence[str] = (),
    calls: str = "default",
    only: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    libraries: str | Sequence[str] = (),
    min_duration: str = "",
    sample: int = 1,
    duration: str = "",
    delay: str = "",
    start_on: str = "",
    stop_on: str = "",
    repeat: int | None = None,
    max_events: int | None = None,
    max_size: str = "",
    last: str = "",
    last_size: str = "",
    when: str | Sequence[str] = (),
    gpu: str = "auto",
    kernel: str = "",
    launches: str = "",
    launches_per_kernel: int | None = None,
    blocks: str = "",
    gpu_memory: str = "",
    gpu_warps: int | None = None,
    thread_exits: bool = False,
    gpu_stalls: bool = False,
    stacks: str = "python",
    warp_marks: str = "",
    gpu_counters: str = "",
    method: str = "auto",
    ring_bytes: str = "",
    notify: Notify | None = None,
) -> Capture:
    """Record a command, running processes, or this process, in a `with` statement.

    One of `command`, `pids`, `comm` and `system` chooses whose events are recorded. Without any, these are
    the events of this process, with the threads and processes that it starts. A command is a program with its
    arguments; it is not run by a shell. The other parameters are the options of `tracepipe capture`. `layers`
    is None for all layers that this machine allows. Times and sizes are texts such as "10s" and "1G".
    `notify` is called with notes on the capture. Entering the block raises CaptureUnavailable, whose hint
    states how to fix it, OutputError, and TracepipeError for a command that cannot be run.
    """
    from tracepipe.capture.plan import layers_here

    own = not (command or pids or comm or system)
    asked = layers_here(of_command=bool(command)) if layers is None else _several(layers)
    check_layers(asked)
    limits = Limits(_read(duration, duration_ns), max_events, _read(max_size, size_bytes))
    windows = Windows(_read(delay, duration_ns) or 0, start_on, stop_on, repeat)
    check_windows(windows, limits)
    Conditions(_several(when))
    check_stacks(stacks)
    request = CaptureRequest(
        command=_command(command),
        layers=asked,
        method=method,
        gpu=gpu,
        gpu_kernels=kernel,
        gpu_launches=launches,
        gpu_launches_per_kernel=launches_per_kernel,
        gpu_blocks=blocks,
        gpu_memory_bytes=_read(gpu_memory, size_bytes),
        gpu_warps=gpu_warps,
        gpu_thread_exits=thread_exits,
        gpu_stalls=gpu_stalls,
        stacks=stacks,
        gpu_warp_marks=warp_marks,
        gpu_counters_ns=_read(gpu_counters, duration_ns),
        pids=(os.getpid(),) if own else _several(pids),
        comm=comm,
        system=system,
        children=children,
        calls=calls_of(calls, only),
        hooks=_several(hooks),
        only=_several(only),
        exclude=_several(exclude),
        libraries=_several(libraries),
        filters=Filters(_read(min_duration, duration_ns) or 0, sample),
        windows=windows,
        limits=limits,
        last=last_of(_read(last, duration_ns), _read(last_size, size_bytes), _several(when), limits, windows),
        ring_bytes=ring_size(_read(ring_bytes, size_bytes)),
    )
    if command_output and not request.command:
        raise TracepipeError("There is no command whose output could be written.", "Name a command.")
    names = OutputNames(request)
    path, written = names.recording(fspath(output)), names.command_output(fspath(command_output))
    return Capture(Order(request, path, force, written), notify)


def _command(given: Any) -> list[str]:
    """The program with its arguments. A path object is not searched for in $PATH."""
    program, *rest = _several(given) or ("",)
    if isinstance(program, PathLike) and "/" not in fspath(program):
        program = f"./{fspath(program)}"
    return [fspath(part) for part in (program, *rest)] if program else []


def _several(given: Any) -> tuple[Any, ...]:
    """One or more values as a tuple. A text is a single value."""
    return (given,) if isinstance(given, (str, int, PathLike)) else tuple(given)


def _read(text: str, parse: Callable[[str], int]) -> int | None:
    """A duration or size; None where there is none. Raises TracepipeError."""
    return parse(text) if text else None
