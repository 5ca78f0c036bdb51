"""The steps of a program's loop, when it loads data, as its ranges say, and how the GPUs spent the steps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.gpu_work import Partition, Work, gpu_times, gpu_work, partition_of, streams_of
from tracepipe.analyses.host_samples import HostSamples
from tracepipe.event.columns import NONE, Int64s, Ints, distinct
from tracepipe.event.groups import number_rows, sums_by
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run, once_a_run
from tracepipe.store.schema import SPAN

# ProfilerStep#12 is what torch.profiler calls a step; others call theirs "step", "train_step 7", "Step: 3",
# "iteration 5", "step[DECODE bs=4]".
_STEP: Final = re.compile(
    r"ProfilerStep#(\d{1,9})"
    r"|(?!optim)(?:\w+[ _./:-])?(?:step|iteration|iter)(?:[ _:#=./-]*(?:(\d{1,9})|[a-z]\w*)|\[.*\])?"
    r"|execute_(?:\d+_)?context_.*",  # vLLM's
    re.IGNORECASE | re.DOTALL,
)
# enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__
_LOADING: Final = re.compile(r"(enumerate\(DataLoader\)|.*\bdata[ _.-]?load(er|ing)?\b)", re.IGNORECASE)

# The least share of the steps' work that runs while they do.
_INSIDE_LEAST: Final = 0.9


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
    thread: int = NONE
    """The number of their thread in `ShapeTable.threads`; NONE where no range is called a step."""

    @property
    def are_marked(self) -> bool:
        """Whether ranges of the program say where they are."""
        return self.thread != NONE


@once_a_run
def steps_of(run: Run) -> Steps:
    """The steps: the outermost ranges that are called one, of the thread that has most of them. All of the
    recording is one step where no range is called a step.
    """
    layer, on_gpu = run.layer("annotation"), run.shapes.column("gpu") != NONE
    rows = rows_named(run, "annotation", is_step)
    rows = rows[~on_gpu[layer.shape[rows]] & (layer.end_ns[rows] > layer.start_ns[rows])]
    if not len(rows):
        whole = np.array([run.facts.start_ns]), np.array([run.facts.end_ns])
        return Steps(np.zeros(1, np.int64), [""], *whole)
    of_row = run.shapes.threads[0][layer.shape[rows]]
    threads, counts = np.unique(of_row, return_counts=True)
    thread = int(threads[np.argmax(counts)])
    rows = rows[of_row == thread]
    rows = rows[np.lexsort((-layer.end_ns[rows], layer.start_ns[rows]))]
    starts_ns, ends_ns = layer.start_ns[rows], layer.end_ns[rows]
    first = np.append(True, starts_ns[1:] >= np.maximum.accumulate(ends_ns)[:-1])
    starts_ns, last_ns = starts_ns[first], ends_ns[first][-1:]
    names = [str(name) for name in run.shapes.values("name", layer.shape[rows[first]])]
    found = ((at, _STEP.fullmatch(name)) for at, name in enumerate(names))
    numbers = [next((int(text) for text in one.groups() if text), at) for at, one in found if one]
    return Steps(np.array(numbers, np.int64), names, starts_ns, np.append(starts_ns[1:], last_ns), thread)


@once_a_run
def loading_of(run: Run) -> Stretches:
    """When data was loaded: in ranges that are called so, and where stacks say so."""
    rows, layer = rows_named(run, "annotation", is_loading), run.layer("annotation")
    found = Stretches(layer.start_ns[rows], layer.end_ns[rows])
    for one in loading_by_stacks(run).values():
        found = found.joined(one)
    return found


@once_a_run
def loading_by_stacks(run: Run) -> dict[int, Stretches]:
    """When the thread that has the steps took its next batch of data, by samples of its stack between its
    CUDA calls; without steps, each thread that launches.
    """
    samples, found = HostSamples(run), dict[int, Stretches]()
    if not samples.any or not samples.loads.any():
        return found
    steps, calls, work = steps_of(run), run.layer("userspace"), gpu_work(run)
    threads, (begin_ns, end_ns) = run.shapes.threads[0], (steps.start_ns[0], steps.end_ns[-1])
    of_call, called = threads[calls.shape], work.call[work.call != NONE]
    for thread in [steps.thread] if steps.are_marked else distinct(of_call[called]).tolist():
        own = np.flatnonzero((of_call == thread) & (calls.kind == SPAN))
        inside = Stretches(*(np.clip(ns[own], begin_ns, end_ns) for ns in (calls.start_ns, calls.end_ns)))
        start_ns, until_ns = np.append(begin_ns, inside.end_ns), np.append(inside.start_ns, end_ns)
        lasts = until_ns > start_ns
        found[thread] = samples.loading(thread, start_ns[lasts], until_ns[lasts])
    return found


@dataclass(frozen=True, slots=True, eq=False)
class GpuSteps:
    """How one GPU spent each step. Columns have the shape `(steps,)`.

    `loading_ns` is the part of the idle time during which the program loaded data.
    """

    gpu: int
    start_ns: Int64s
    end_ns: Int64s
    parts: Partition
    loading_ns: Int64s


def gpu_steps(run: Run, work: Work, kinds: Ints) -> tuple[list[GpuSteps], bool]:
    """How each GPU spent the steps, and whether steps are taken as the GPUs see them.

    A step is the time of its range. Where the program runs so far ahead that much of the work of the steps
    runs later than they do, a step of a GPU begins with the first work that was launched in it on the stream
    with the most work, and ends where the next one begins. Without ranges that are called steps, the only
    step is the time from a GPU's first work to its last.
    """
    steps, loading, found = steps_of(run), loading_of(run), []
    step = step_of_work(run, steps, work)
    is_late = run_far_ahead(run, work, steps)
    streams = streams_of(run, work) if is_late else step
    for time in gpu_times(work, kinds):
        start_ns, end_ns = steps.start_ns, steps.end_ns
        if is_late:
            start_ns, end_ns = _seen_by_gpu(work, time.rows, step, streams[time.rows], len(steps.number))
        elif not steps.are_marked:
            start_ns, end_ns = (work.start_ns[time.rows][:1], work.end_ns[time.rows].max(keepdims=True))
        loaded_ns = time.idle_inside_ns(loading, start_ns, end_ns)
        found.append(GpuSteps(time.gpu, start_ns, end_ns, partition_of(time, start_ns, end_ns), loaded_ns))
    return found, is_late


def run_far_ahead(run: Run, work: Work, steps: Steps) -> bool:
    """Whether much of the work that is launched in the steps runs later than they do."""
    return steps.are_marked and _inside(steps, work, step_of_work(run, steps, work)) < _INSIDE_LEAST


def step_of_work(run: Run, steps: Steps, work: Work) -> Int64s:
    """The index of the step in which each row of work was launched, NONE outside of all. Shape `(rows,)`."""
    calls = run.layer("userspace")
    if not steps.are_marked or not len(calls):
        return np.full(len(work), NONE, np.int64)
    called_ns = calls.rows(np.maximum(work.call, 0), "start_ns").start_ns
    step = np.searchsorted(steps.start_ns, called_ns, "right") - 1
    return np.where((work.call != NONE) & (called_ns < steps.end_ns[-1]), step, NONE).astype(np.int64)


def _inside(steps: Steps, work: Work, step: Int64s) -> float:
    """Of the work that was launched in the steps or runs while they do, the share that runs while they do; 1
    without such work.
    """
    whole = Stretches(steps.start_ns[:1], steps.end_ns[-1:])
    covered_ns = whole.covered_ns(work.start_ns, work.end_ns)
    whole_ns = int(np.where(step != NONE, work.end_ns - work.start_ns, covered_ns).sum())
    return int(covered_ns.sum()) / whole_ns if whole_ns else 1


def _seen_by_gpu(work: Work, rows: slice, step: Int64s, streams: Int64s, count: int) -> tuple[Int64s, Int64s]:
    """The start and the end of each step as a GPU sees it. Shapes `(count,)`. Work on other streams, such as
    copies of the next data, may run before all work of the steps before it. So only the first step begins
    with work on any stream, if the work from before the steps has ended then.
    """
    step, starts_ns, ends_ns = step[rows], work.start_ns[rows], work.end_ns[rows]
    some = np.flatnonzero(step != NONE)
    if not len(some):
        last_ns = ends_ns.max()
        return np.full(count, last_ns), np.full(count, last_ns)
    of, first = number_rows(streams[some])
    main = streams[some[first[np.argmax(sums_by(of, (ends_ns - starts_ns)[some], len(first)))]]]
    first_ns = starts_ns[some[0]]
    some = some[streams[some] == main]
    last_ns = ends_ns[some].max()
    start_ns = np.full(count, last_ns)
    np.minimum.at(start_ns, step[some], starts_ns[some])
    start_ns = np.minimum.accumulate(start_ns[::-1])[::-1]
    before = (step == NONE) & (streams == main) & (starts_ns < start_ns[0])
    start_ns[0] = min(start_ns[0], max(first_ns, ends_ns[before].max(initial=first_ns)))
    return start_ns, np.append(start_ns[1:], last_ns)
