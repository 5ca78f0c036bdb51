"""The steps of a program's loop, and when it loads data, as its ranges say."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.event.columns import Int64s
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run

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


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps by start, as columns of shape `(steps,)`. Step N ends where N + 1 begins, so that nothing is
    between them. The number is that in the name, else the place.
    """

    number: Int64s
    names: list[str]
    start_ns: Int64s
    end_ns: Int64s


def steps_of(run: Run) -> Steps:
    """The steps: the outermost ranges that are called one, of the thread that has most of them. All of the
    recording is one step where no range is called a step.
    """
    rows = rows_named(run, "annotation", is_step)
    of = run.values("annotation", rows, "start_ns", "end_ns", "name", "tid", "gpu")
    ranges = [
        (start_ns, end_ns, name, tid)
        for start_ns, end_ns, name, tid, gpu in zip(*of.values(), strict=True)
        if gpu is None and end_ns > start_ns
    ]
    if not ranges:
        return Steps(
            np.zeros(1, np.int64), [""], *(np.array([ns]) for ns in (run.facts.start_ns, run.facts.end_ns))
        )
    counts = Counter(tid for *_, tid in ranges)
    most = min(counts, key=lambda tid: (-counts[tid], -1 if tid is None else tid))
    steps: list[tuple[int, str]] = []
    last_ns = until_ns = -(1 << 63)
    for start_ns, end_ns, name, tid in sorted(ranges, key=lambda one: (one[0], -one[1])):
        if tid == most:
            if start_ns >= until_ns:
                steps.append((start_ns, name))
                last_ns = end_ns
            until_ns = max(until_ns, end_ns)
    starts_ns = np.array([start_ns for start_ns, _ in steps], np.int64)
    names = [name for _, name in steps]
    found = ((at, _STEP.fullmatch(name)) for at, name in enumerate(names))
    numbers = [next((int(text) for text in one.groups() if text), at) for at, one in found if one]
    return Steps(np.array(numbers, np.int64), names, starts_ns, np.append(starts_ns[1:], last_ns))


def loading_of(run: Run) -> Stretches:
    """When data was loaded."""
    rows, layer = rows_named(run, "annotation", is_loading), run.layer("annotation")
    return Stretches(layer.start_ns[rows], layer.end_ns[rows])
