"""The summary of a capture, as figures and as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tracepipe.errors import OutputError
from tracepipe.event.model import LAYERS
from tracepipe.units import agree, counted, duration_text

INCOMPLETE = 125
"""The exit code if only the recording failed. env(1), timeout(1) and docker use it for their own failures."""


@dataclass(frozen=True, slots=True)
class RecordedWindows:
    """The number of recorded windows, and their total length."""

    count: int
    length_ns: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that a flight recorder wrote: events by layer, lost events, events that did not fit, how
    much time it holds, why it was written, how long that took, and samples of what warps wait for.
    """

    path: str
    counts: dict[str, int]
    losses: dict[str, int]
    cpu_losses: dict[str, dict[int, int]]
    evicted: dict[str, int]
    span_ns: int
    reason: str
    took_ns: int
    stall_samples: int = 0

    @property
    def text(self) -> str:
        """One line for the user."""
        counts = counts_text(self.counts, self.stall_samples)
        wrote = f"written in {self.took_ns / 1e9:.2f} s"
        return f"{self.path}: {counts} of the last {self.span_ns / 1e9:.2f} s, by {self.reason}; {wrote}"


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """A recording's counts, losses and filtered events by layer, how it ended, wall time, engine.

    `cpu_losses` are the losses of a layer by processor, where the processor is known. `exit_code` is the
    target's as a shell gives it: its own, or 128 + the signal that ended it. `windows` is None for a
    recording without windows. `recordings` are those of a flight recorder, whose counts and losses are then
    those of the last one. `error` is "" for a recording that is complete and has the requested name;
    otherwise it states what went wrong, and `hint` what to do. `stall_samples` are samples of what warps
    wait for, which are no events. `cuda_errors` are sentences on errors that kernels caused. `running` has
    the processes that had been started by those that ended.
    """

    counts: dict[str, int]
    losses: dict[str, int]
    cpu_losses: dict[str, dict[int, int]]
    filtered: dict[str, int]
    ended_by: str
    exit_code: int
    wall_ns: int
    attach_ns: int
    detach_ns: int
    engine: str
    windows: RecordedWindows | None = None
    error: str = ""
    hint: str = ""
    recordings: tuple[Recording, ...] = ()
    stall_samples: int = 0
    cuda_errors: tuple[str, ...] = ()
    running: Mapping[str, str] = field(default_factory=dict)

    def check(self, as_command: bool = False) -> None:
        """Raise OutputError for a recording that is not complete, or has another name. `as_command`: its exit
        code is the command's, or `INCOMPLETE` if that is 0.
        """
        if self.error:
            error = OutputError(self.error, self.hint)
            if as_command:
                error.exit_code = self.exit_code or INCOMPLETE
            raise error


def counts_text(counts: Mapping[str, int], stall_samples: int) -> str:
    """The number of events of each layer, and of samples, as text."""
    stated = [f"{counts[layer]} {layer}" for layer in LAYERS if counts.get(layer)]
    if stall_samples:
        stated.append(counted(stall_samples, "sample|samples of what warps wait for (tracepipe stalls)"))
    return ", ".join(stated) or "no events"


def summary_lines(path: str, summary: CaptureSummary) -> Iterator[str]:
    """The lines that tell a user about a capture, the most important last."""
    yield from summary.cuda_errors
    seconds = summary.wall_ns / 1e9
    if not summary.recordings:
        counts = counts_text(summary.counts, summary.stall_samples)
        yield f"{path}: {counts} in {seconds:.2f} s, by {summary.engine}"
    else:
        recordings = counted(len(summary.recordings), "recording|recordings")
        yield f"{recordings} in {seconds:.2f} s, by {summary.engine}:"
    for recording in summary.recordings:
        yield recording.text
        for layer, count in recording.evicted.items():
            events = agree(count, "event|events")
            yield f"note: {count} {layer} {events} of that time did not fit: raise --last-size"
        yield from _lost(recording.losses, recording.cpu_losses)
    if summary.windows is not None and summary.windows.count:
        count, length = summary.windows.count, duration_text(summary.windows.length_ns)
        yield (
            f"note: in {count} windows of {length} in all" if count > 1 else f"note: in a window of {length}"
        )
    if summary.ended_by != "exit 0":
        yield f"note: the recording ended by {summary.ended_by}"
    for layer, count in summary.filtered.items():
        yield f"note: {count} {layer} {agree(count, 'event|events was|were')} left out by the filters"
    if not summary.recordings:
        yield from _lost(summary.losses, summary.cpu_losses)


def _lost(losses: Mapping[str, int], cpu_losses: Mapping[str, Mapping[int, int]]) -> Iterator[str]:
    for layer, count in losses.items():
        if count:
            by_cpu = cpu_losses.get(layer, {})
            where = ", ".join(f"{lost} on processor {cpu}" for cpu, lost in sorted(by_cpu.items()))
            hint = f" ({where}); raise --ring-bytes" if where else ""
            happened = agree(count, "event|events happened and was|were not recorded")
            of = "unknown layer" if layer == "unknown" else layer
            yield f"lost: {count} {of} {happened}{hint}"
