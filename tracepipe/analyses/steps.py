"""The steps of a program's loop, and when it loads data, as its ranges say."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.intervals import Stretches
from tracepipe.store.run import Run, once_a_run

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


def loading_of(run: Run) -> Stretches:
    """When data was loaded."""
    rows, layer = rows_named(run, "annotation", is_loading), run.layer("annotation")
    return Stretches(layer.start_ns[rows], layer.end_ns[rows])
