"""`tracepipe.capture`: records a command, running processes or this one while a block of Python runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from os import PathLike, fspath
from typing import TypeVar

from tracepipe.api.capture_block import Capture
from tracepipe.api.options import CaptureOptions
from tracepipe.api.output_names import OutputNames
from tracepipe.api.recorder import Order
from tracepipe.errors import TracepipeError
from tracepipe.tracer.request import (
    CaptureRequest,
    Filters,
    Limits,
    Notify,
    Windows,
    calls_of,
    check_layers,
    check_stacks,
    check_windows,
    last_of,
    ring_size,
)
from tracepipe.tracer.watch import Conditions
from tracepipe.units import duration_ns, size_bytes

T = TypeVar("T", bound="str | int | PathLike[str]")


def capture(
    command: str | PathLike[str] | Sequence[str | PathLike[str]] = (),
    options: CaptureOptions | None = None,
    *,
    pids: int | Sequence[int] = (),
    output: str | PathLike[str] = "",
    force: bool = False,
    notify: Notify | None = None,
) -> Capture:
    """Record a command, running processes, or this process, in a `with` statement.

    One of `command`, `pids`, and `comm` and `system` of the options chooses whose events are recorded.
    Without any, these are the events of this process, with the threads and processes that it starts. A
    command is a program with its arguments; it is not run by a shell. `output` is the file, or `-`; by
    default it has the name of the program. It replaces another only with `force`. `notify` is called with
    notes on the capture. Raises TracepipeError for an option that has no meaning. Entering the block raises
    CaptureUnavailable, whose hint states how to fix it, OutputError, and TracepipeError for a command that
    cannot be run.
    """
    options = options or CaptureOptions()
    request = _request(_command(command), _several(pids), options)
    if options.command_output and not request.command:
        raise TracepipeError("There is no command whose output could be written.", "Name a command.")
    names = OutputNames(request)
    path = names.recording(fspath(output))
    written = names.command_output(fspath(options.command_output))
    return Capture(Order(request, path, force, written), notify)


def _request(command: list[str], pids: tuple[int, ...], options: CaptureOptions) -> CaptureRequest:
    """The request that the options make. Raises TracepipeError."""
    from tracepipe.tracer.plan import layers_here

    own = not (command or pids or options.comm or options.system)
    layers = layers_here(of_command=bool(command)) if options.layers is None else _several(options.layers)
    check_layers(layers)
    limits = Limits(
        _read(options.duration, duration_ns), options.max_events, _read(options.max_size, size_bytes)
    )
    delay_ns = _read(options.delay, duration_ns) or 0
    windows = Windows(delay_ns, options.start_on, options.stop_on, options.repeat)
    check_windows(windows, limits)
    when, only = _several(options.when), _several(options.only)
    Conditions(when)
    check_stacks(options.stacks)
    last_ns, last_bytes = _read(options.last, duration_ns), _read(options.last_size, size_bytes)
    return CaptureRequest(
        command=command,
        layers=layers,
        method=options.method,
        gpu=options.gpu,
        gpu_kernels=options.kernel,
        gpu_launches=options.launches,
        gpu_launches_per_kernel=options.launches_per_kernel,
        gpu_blocks=options.blocks,
        gpu_memory_bytes=_read(options.gpu_memory, size_bytes),
        gpu_warps=options.gpu_warps,
        gpu_thread_exits=options.thread_exits,
        gpu_stalls=options.gpu_stalls,
        stacks=options.stacks,
        gpu_warp_marks=options.warp_marks,
        gpu_counters_ns=_read(options.gpu_counters, duration_ns),
        pids=(os.getpid(),) if own else pids,
        comm=options.comm,
        system=options.system,
        children=options.children,
        calls=calls_of(options.calls, only),
        hooks=_several(options.hooks),
        only=only,
        exclude=_several(options.exclude),
        libraries=_several(options.libraries),
        filters=Filters(_read(options.min_duration, duration_ns) or 0, options.sample),
        windows=windows,
        limits=limits,
        last=last_of(last_ns, last_bytes, when, limits, windows),
        ring_bytes=ring_size(_read(options.ring_bytes, size_bytes)),
    )


def _command(given: str | PathLike[str] | Sequence[str | PathLike[str]]) -> list[str]:
    """The program with its arguments. A path object is not searched for in $PATH."""
    program, *rest = _several(given) or ("",)
    if isinstance(program, PathLike) and "/" not in fspath(program):
        program = f"./{fspath(program)}"
    return [fspath(part) for part in (program, *rest)] if program else []


def _several(given: T | Sequence[T]) -> tuple[T, ...]:
    """One or more values as a tuple. A text is a single value."""
    return (given,) if isinstance(given, (str, int, PathLike)) else tuple(given)


def _read(text: str, parse: Callable[[str], int]) -> int | None:
    """A duration or size; None where there is none. Raises TracepipeError."""
    return parse(text) if text else None
