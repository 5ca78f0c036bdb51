"""The peak of each GPU's allocated memory, and whether PyTorch's caching allocator holds it."""

from __future__ import annotations

from dataclasses import dataclass

from tracepipe.analyses.allocations import DEVICE, MANAGED, AllocationSums, allocations
from tracepipe.analyses.cuda_calls import rows_by_effect, values_by_names
from tracepipe.event.columns import distinct
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run

# The most allocations and frees that are followed: each takes some hundred bytes of memory.
EVENTS_MAX = 100_000
# Parts of the names of PyTorch's kernels and operators; and of its threads: pt_autograd_0, pt_nccl_watchdg.
_OF_PYTORCH = ("at::native::", "c10::", "aten::")
_THREAD_OF_PYTORCH = "pt_"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that a process had on one GPU at a time, and when; the number of its allocations, and of
    those that were not freed (`kept`).
    """

    pid: int | None
    gpu: int | None
    peak_bytes: int
    at_ns: int
    allocations: int
    kept: int
    kept_bytes: int


def _is_pytorch(name: str) -> bool:
    return any(part in name for part in _OF_PYTORCH)


def keeps_segments(run: Run) -> bool:
    """Whether the allocations are segments of PyTorch's caching allocator, judged by PyTorch's kernels,
    operators, threads or Python frames. (PyTorch's profiler records the allocations inside the segments.)
    """
    if run.facts.source == "chrome":
        return False
    if any(True in values_by_names(run, layer, _is_pytorch)[1] for layer in ("gpu_kernel", "annotation")):
        return True
    if run.warp_table.launches.flags_by_names(_is_pytorch).any():
        return True
    comms = distinct(run.shapes.column("comm", np.arange(len(run.shapes), dtype=np.int32)))
    names = (run.shapes.value("comm", number) or "" for number in comms.tolist())
    if any(name.startswith(_THREAD_OF_PYTORCH) for name in names):
        return True
    return any("/torch/" in (frame.file or "") for frame in run.stacks.frames)


def allocations_in(run: Run) -> int:
    """About how many events and calls allocate or free memory."""
    calls = rows_by_effect(run)
    count = sum(len(rows) for effect, rows in calls.items() if effect.startswith(("alloc", "free")))
    return len(run.layer("memory")) + count


def peaks_of(run: Run) -> list[Peak]:
    """The peaks of each process and GPU, the highest first."""
    found = allocations(run)
    sums = AllocationSums(found, found.place, len(found.places))
    peaks = [
        Peak(
            place.pid,
            place.gpu,
            place.most_bytes,
            place.most_ns,
            int(sums.count[place.number]),
            *(of or 0 for of in sums.never_freed(place.number)),
        )
        for place in found.places
        if place.kind in (DEVICE, MANAGED) and place.is_known and place.most_bytes
    ]
    return sorted(peaks, key=lambda peak: -peak.peak_bytes)
