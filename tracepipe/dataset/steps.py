"""The steps of one rank: what its GPU did in each turn of the training loop, and how long data was loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.gpu_shares import COMMUNICATION, COMPUTE, COPIES, kinds_of, stretches_of
from tracepipe.analyses.gpu_work import Work, gpu_work
from tracepipe.reports.frames.intervals import Stretches, nothing
from tracepipe.reports.frames.libraries import np, pl
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


def steps_of(run: Run, times: dict[int, GpuTime]) -> pl.DataFrame:
    """A row for each step and GPU, with the columns of SCHEMA; one for all of the recording where no range is
    called a step. Step N ends where N + 1 begins, so that nothing is between them.
    """
    number, names, start_ns, end_ns = _bounds(run)
    loading = _loading(run)
    frames = []
    for gpu, time in times.items():
        busy = time.busy
        busy_ns = busy.covered_ns(start_ns, end_ns)
        compute_ns = time.compute.covered_ns(start_ns, end_ns)
        computing = time.compute.joined(time.communication).covered_ns(start_ns, end_ns)
        columns = {
            "step": number, "name": names, "start_ns": start_ns, "end_ns": end_ns,
            "gpu": np.full(len(number), gpu, np.int64), "busy_ns": busy_ns, "compute_ns": compute_ns,
            "communication_ns": time.communication.covered_ns(start_ns, end_ns),
            "exposed_ns": computing - compute_ns,
            "copies_ns": time.copies.covered_ns(start_ns, end_ns), "idle_ns": end_ns - start_ns - busy_ns,
            "data_loading_ns": loading.covered_ns(start_ns, end_ns),
        }  # fmt: skip
        frames.append(pl.DataFrame(columns, schema=_schema()))
    return pl.concat(frames) if frames else pl.DataFrame(schema=_schema())


def _schema() -> dict[str, Any]:
    return {name: getattr(pl, kind) for name, kind in SCHEMA.items()}


def _bounds(run: Run) -> tuple[Any, list[str], Any, Any]:
    """Number, name, start and end of each step, by start: the outermost ranges that are called one."""
    rows = rows_named(run, "annotation", is_step)
    kinds = {
        name: pl.String if name == "name" else pl.Int64
        for name in ("start_ns", "end_ns", "name", "tid", "gpu")
    }
    ranges = pl.DataFrame(run.values("annotation", rows, *kinds), kinds)
    ranges = ranges.filter(pl.col("gpu").is_null(), pl.col("end_ns") > pl.col("start_ns"))
    if ranges.is_empty():
        whole = np.array([run.facts.start_ns]), np.array([run.facts.end_ns])
        return np.zeros(1, np.int64), [""], *whole
    # Of one thread: the one that has most of them.
    most = ranges.group_by("tid").len().sort("len", "tid", descending=[True, False])["tid"][0]
    ranges = ranges.filter(pl.col("tid").eq_missing(most)).sort(
        "start_ns", "end_ns", descending=[False, True]
    )
    before_ns = ranges["end_ns"].cum_max().shift(1)
    ranges = ranges.filter(before_ns.is_null() | (ranges["start_ns"] >= before_ns))
    start_ns, end_ns = (ranges[name].to_numpy().copy() for name in ("start_ns", "end_ns"))
    end_ns[:-1] = start_ns[1:]
    names = ranges["name"].to_list()
    numbers = [next((int(text) for text in found.groups() if text), at) for at, found in _found(names)]
    return np.array(numbers, np.int64), names, start_ns, end_ns


def _found(names: list[str]) -> list[tuple[int, re.Match[str]]]:
    return [(at, found) for at, name in enumerate(names) if (found := _STEP.fullmatch(name))]


def _loading(run: Run) -> Stretches:
    """When data was loaded, as the program's ranges say."""
    rows = rows_named(run, "annotation", is_loading)
    if not len(rows):
        return nothing()
    layer = run.layer("annotation")
    order = np.argsort(layer.start_ns[rows], kind="stable")
    return Stretches(layer.start_ns[rows][order], layer.end_ns[rows][order])
