"""The steps of one rank: what its GPU did in each turn of the training loop, and how long data was loaded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.gpu_shares import COMMUNICATION, COMPUTE, COPIES, kinds_of, stretches_of
from tracepipe.analyses.gpu_work import Work, gpu_work
from tracepipe.event.intervals import Stretches, nothing
from tracepipe.store.run import Run

SCHEMA: Final = {
    "step": "Int64", "name": "String", "start_ns": "Int64", "end_ns": "Int64", "gpu": "Int64",
    "busy_ns": "Int64",
    "compute_ns": "Int64", "communication_ns": "Int64", "exposed_ns": "Int64", "copies_ns": "Int64",
    "idle_ns": "Int64", "data_loading_ns": "Int64",
}  # fmt: skip
# ProfilerStep#12 is what torch.profiler calls a step; others call theirs "step", "train_step 7", "Step: 3".
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})|(?:\w+[ _./])?step(?:[ _:#=./]*(\d{1,9}))?", re.IGNORECASE)
# enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__
_LOADING: Final = re.compile(r"(enumerate\(DataLoader\)|.*\bdata[ _.-]?load(er|ing)?\b)", re.IGNORECASE)


def is_step(name: str) -> bool:
    """Whether a range of this name is a step."""
    return _STEP.fullmatch(name) is not None


def is_loading(name: str) -> bool:
    """Whether data is loaded in a range of this name."""
    return _LOADING.match(name) is not None


@dataclass(frozen=True, slots=True)
class GpuTime:
    """When one GPU did what."""

    compute: Stretches
    communication: Stretches
    copies: Stretches

    @property
    def busy(self) -> Stretches:
        """When it did anything."""
        return self.compute.joined(self.communication).joined(self.copies)


def gpu_times(run: Run) -> dict[int, GpuTime]:
    """When each GPU of a recording did what."""
    work: Work = gpu_work(run)
    kinds = kinds_of(run, work)
    return {
        gpu: GpuTime(*(stretches_of(work, kinds, rows, kind) for kind in (COMPUTE, COMMUNICATION, COPIES)))
        for gpu, rows in work.of_gpus()
    }


def steps_of(run: Run, times: dict[int, GpuTime]) -> dict[str, Any]:
    """The columns of SCHEMA, a row for each step and GPU; one for all of the recording where no range is
    called a step. Step N ends where N + 1 begins, so that nothing is between them.
    """
    number, names, start_ns, end_ns = _bounds(run)
    loading_ns = _loading(run).covered_ns(start_ns, end_ns)
    of_gpus = []
    for gpu, time in times.items():
        busy_ns = time.busy.covered_ns(start_ns, end_ns)
        compute_ns = time.compute.covered_ns(start_ns, end_ns)
        computing_ns = time.compute.joined(time.communication).covered_ns(start_ns, end_ns)
        of_gpus.append({
            "step": number, "name": np.array(names, object), "start_ns": start_ns, "end_ns": end_ns,
            "gpu": np.full(len(number), gpu, np.int64), "busy_ns": busy_ns, "compute_ns": compute_ns,
            "communication_ns": time.communication.covered_ns(start_ns, end_ns),
            "exposed_ns": computing_ns - compute_ns,
            "copies_ns": time.copies.covered_ns(start_ns, end_ns), "idle_ns": end_ns - start_ns - busy_ns,
            "data_loading_ns": loading_ns,
        })  # fmt: skip
    nothing_ns = np.zeros(0, np.int64)
    return {name: np.concatenate([of[name] for of in of_gpus] or [nothing_ns]) for name in SCHEMA}


def _bounds(run: Run) -> tuple[Any, list[str], Any, Any]:
    """Number, name, start and end of each step, by start: the outermost ranges that are called one."""
    rows = rows_named(run, "annotation", is_step)
    of = run.values("annotation", rows, "start_ns", "end_ns", "name", "tid", "gpu")
    ranges = [
        (start_ns, end_ns, name, tid)
        for start_ns, end_ns, name, tid, gpu in zip(*of.values(), strict=True)
        if gpu is None and end_ns > start_ns
    ]
    if not ranges:
        whole = np.array([run.facts.start_ns]), np.array([run.facts.end_ns])
        return np.zeros(1, np.int64), [""], *whole
    # Of one thread: the one that has most of them.
    counts = Counter(tid for *_, tid in ranges)
    most = min(counts, key=lambda tid: (-counts[tid], -1 if tid is None else tid))
    steps: list[tuple[int, int, str]] = []
    last_ns: int | None = None
    for start_ns, end_ns, name, tid in sorted(ranges, key=lambda one: (one[0], -one[1])):
        if tid == most:
            if last_ns is None or start_ns >= last_ns:
                steps.append((start_ns, end_ns, name))
            last_ns = end_ns if last_ns is None else max(last_ns, end_ns)
    starts_ns = np.array([start_ns for start_ns, *_ in steps], np.int64)
    ends_ns = np.append(starts_ns[1:], steps[-1][1])
    names = [name for *_, name in steps]
    found = ((at, _STEP.fullmatch(name)) for at, name in enumerate(names))
    numbers = [next((int(text) for text in one.groups() if text), at) for at, one in found if one]
    return np.array(numbers, np.int64), names, starts_ns, ends_ns


def _loading(run: Run) -> Stretches:
    """When data was loaded, as the program's ranges say."""
    rows = rows_named(run, "annotation", is_loading)
    if not len(rows):
        return nothing()
    layer = run.layer("annotation")
    order = np.argsort(layer.start_ns[rows], kind="stable")
    return Stretches(layer.start_ns[rows][order], layer.end_ns[rows][order])
