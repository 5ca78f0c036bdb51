"""The options of the library's functions, under the names that the commands have for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """How a recording is read, by `tracepipe.open`, `load` and `cut`."""

    source_format: str = ""
    """The input format, for inputs whose content does not show it. FormatError for a name that is none."""
    strict: bool = False
    """Whether the first line that cannot be used raises InputError; otherwise such lines are counted."""
    assume_offset: Mapping[str, int | str] = field(default_factory=dict)
    """Places clocks that have no clock pairs: clock → ns to add, or the name of a host clock that it equals.
    ClockError where it cannot be placed so.
    """
    undated: str = "skip"
    """Lines without a time are skipped ("skip"), or placed between their neighbours ("between")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(ReadOptions):
    """How `tracepipe.convert` reads recordings, and how it draws them."""

    compress: bool = False
    """Whether packets are compressed. FormatError for a format other than perfetto."""
    warp_tracks: str = "auto"
    """What a track of warps is: "slot", "logical", "sm", "off", or "auto", which chooses by the kernel.
    FormatError for another text.
    """
    thread_exits: bool = False
    """Whether the exit of each GPU thread is drawn too."""
    offset: Mapping[str, int] = field(default_factory=dict)
    """Nanoseconds to add to the times of recordings, by their names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions(ReadOptions):
    """Which ranks of a dataset are converted, of which time, and how they are drawn."""

    ranks: Sequence[int] = ()
    """Their numbers; all ranks if there are none. InputError for one that is not there."""
    start: str = ""
    end: str = ""
    """The window: times such as "1.2s" after the start of the first rank of the job, or "@" and nanoseconds
    on the reference clock. Without one, it begins or ends with the recordings.
    """
    compress: bool = False
    warp_tracks: str = "auto"
    thread_exits: bool = False
    """As in `ConvertOptions`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOptions:
    """What `tracepipe.capture` records, and how. Times and sizes are texts such as "10s" and "1G".

    A text that is no time, no size or no such choice raises TracepipeError when `capture` is called.
    """

    # Whose events
    comm: str = ""
    """Record every process of this name, running or started later."""
    system: bool = False
    """Record all processes of this machine but the one that records."""
    children: bool = True
    """Whether processes that the recorded ones start are recorded too."""

    # What
    layers: str | Sequence[str] | None = None
    """Names of layers. None: all that this machine allows."""
    hooks: str | Sequence[str] = ()
    """Other functions and tracepoints: sets of hooks, files of them, or probes as `--hook` takes them."""
    calls: str = "default"
    """Which CUDA calls are recorded: the name of a rule, as `--calls` takes it."""
    only: str | Sequence[str] = ()
    """Record only functions whose names match one of these patterns."""
    exclude: str | Sequence[str] = ()
    """Record no function whose name matches one of these patterns."""
    libraries: str | Sequence[str] = ()
    """Files to probe, instead of those that the program would load."""
    min_duration: str = ""
    """Record only calls that last at least this time."""
    sample: int = 1
    """Record every Nth call of each function on each processor, from 1."""
    stacks: str = "python"
    """The stacks that are recorded with calls: "python" or "off"."""
    method: str = "auto"
    """How probes are attached: "bcc", "prebuilt", "bpftrace", or "auto", which uses the first that works."""

    # When
    duration: str = ""
    """The recording, or each window, ends after this time."""
    delay: str = ""
    """The recording, or each window, begins this time later."""
    start_on: str = ""
    """What begins a window: a trigger as `--start-on` takes it, or "api", which is `Capture.begin_window`."""
    stop_on: str = ""
    """What ends a window: a trigger, or "api", which is `Capture.end_window`."""
    repeat: int | None = None
    """The recording ends with this window. None: with the first, or with "api" after any number."""
    max_events: int | None = None
    """The recording ends after this many events."""
    max_size: str = ""
    """The recording ends when its events fill this size, before compression."""
    last: str = ""
    """Keep only this time before the end, in memory: a flight recorder."""
    last_size: str = ""
    """The memory for what `last` keeps. Default: 256M."""
    when: str | Sequence[str] = ()
    """Conditions on which a flight recorder writes what it kept, as `--when` takes them."""

    # The GPUs of a command
    gpu: str = "auto"
    """What records its GPU work: "kernels", "warps", "off", or "auto", which chooses by the program."""
    kernel: str = ""
    """Record the warps of kernels whose names match this regular expression."""
    launches: str = ""
    """Record the warps of these launches, counted from 1 among those of the chosen kernels: "10", "10-20" or
    "10-".
    """
    launches_per_kernel: int | None = None
    """Record the warps of the first launches of each kernel, this many; 0: of all. None: the first 3 where
    `gpu_warps` or "auto" sets a budget and `launches` does not choose, else all.
    """
    blocks: str = ""
    """Record the warps of these blocks of each grid, counted from 0: "5", "0-131", "100-"."""
    gpu_memory: str = ""
    """The memory on each GPU for records of warps in flight, from 1M. By default it is chosen."""
    gpu_warps: int | None = None
    """Record the warps of no further launch after this many warps. None: no limit, or 2 000 000 where "auto"
    chose warps.
    """
    thread_exits: bool = False
    """Whether the exit of each GPU thread is recorded."""
    gpu_stalls: bool = False
    """Whether it is sampled what warps wait for."""
    warp_marks: str = ""
    """Patterns of kernels and of their functions whose calls are recorded, as `--warp-marks` takes them."""
    gpu_counters: str = ""
    """The interval at which the hardware counters of the GPUs are sampled."""

    # Into what
    command_output: str | PathLike[str] = ""
    """The file for the standard output of a command. TracepipeError without a command."""
    ring_bytes: str = ""
    """The size of the buffer between the kernel and tracepipe, from 4K. Default: 16M."""
