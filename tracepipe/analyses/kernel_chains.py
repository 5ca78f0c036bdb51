"""Chains of small kernels that follow each other on a stream, which could be fused, and what launching costs.

stream 7   ▌▌▌▌        ▌▌▌▌     ████████  ▌▌▌▌        the same chain of four, three times
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np

from tracepipe.analyses.gpu_by_line import Lines, stacks_of
from tracepipe.analyses.gpu_work import COPY, KERNEL, Work, shapes_of, streams_of
from tracepipe.analyses.idle_gaps import BETWEEN, IdleGaps
from tracepipe.analyses.nesting import open_at
from tracepipe.analyses.steps import loading_of, steps_of
from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.event.groups import RowsByNumber, run_starts
from tracepipe.event.intervals import Stretches
from tracepipe.kernel_names import applied_function, kernel_title
from tracepipe.store.run import Run

SMALL_NS: Final = 5_000
"""A kernel that is shorter is small; the launch of one takes about as long."""
NEAR_NS: Final = 5_000
"""A kernel follows another one if it starts at most this long after its end, on the same stream."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Small kernels that occur several times in this order: the sums of all occurrences. `launched_by` is the
    line that launches the first kernel most often, else the innermost range; None where none is known.
    """

    kernels: str
    length: int
    count: int
    kernels_ns: int
    gaps_ns: int
    launched_by: str | None


def small_kernels(work: Work) -> Bools:
    """Flags the kernels that are small. Shape `(rows,)`."""
    small: Bools = (work.what == KERNEL) & (work.end_ns - work.start_ns < SMALL_NS)
    return small


def chains_of(run: Run, work: Work, rows: Int64s, top: int) -> tuple[list[Chain], int]:
    """The chains of at least two kernels among some rows of work that occur at least twice, those with the
    most time in kernels and gaps first: the first `top`, or all for 0, and how many there are.
    """
    on_stream = rows[(work.what[rows] == KERNEL) | (work.what[rows] == COPY)]
    shape = shapes_of(run, work)[on_stream]
    gpu = np.searchsorted(work.bounds, on_stream, "right")
    stream = streams_of(run, work)[on_stream]
    order = np.lexsort((work.start_ns[on_stream], stream, work.pid[on_stream], gpu))
    on_stream, shape = on_stream[order], shape[order]
    start_ns, end_ns = work.start_ns[on_stream], work.end_ns[on_stream]
    is_small = small_kernels(work)[on_stream]
    follows = np.ones(len(on_stream), np.bool_)
    follows[run_starts(gpu[order], work.pid[on_stream], stream[order])] = False
    follows[1:] &= is_small[1:] & is_small[:-1] & (start_ns[1:] - end_ns[:-1] <= NEAR_NS)
    first = np.flatnonzero(~follows)
    last = np.append(first[1:], len(on_stream)) - 1
    first, last = first[last > first], last[last > first]
    names = run.shapes.column("name", shape)
    found = defaultdict[bytes, list[int]](list)
    for at, (begin, end) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
        found[names[begin : end + 1].tobytes()].append(at)
    until_ns = np.append(0, np.cumsum(end_ns - start_ns))
    whole_ns, kernels_ns = end_ns[last] - start_ns[first], until_ns[last + 1] - until_ns[first]
    recurring = [(int(whole_ns[some].sum()), some) for some in found.values() if len(some) > 1]
    recurring.sort(key=lambda one: (-one[0], one[1][0]))
    shown = recurring[: top or None]
    titles = _titles(run, [names[first[some[0]] : last[some[0]] + 1].tolist() for _, some in shown])
    chains = []
    for title, (sum_ns, some) in zip(titles, shown, strict=True):
        length, busy_ns = int(last[some[0]] - first[some[0]]) + 1, int(kernels_ns[some].sum())
        launched = _launched_by(run, work, on_stream[first[some]])
        # Kernels of one stream may overlap a little.
        chains.append(Chain(title, length, len(some), busy_ns, max(sum_ns - busy_ns, 0), launched))
    return chains, len(recurring)


def _titles(run: Run, chains: list[list[int]]) -> list[str]:
    """The kernels of each chain, from the numbers of their names: `fill ×4, add`. Chains that would have the
    same text have the kernels' template arguments too.
    """

    def title(numbers: list[int], *, is_short: bool) -> str:
        texts = [applied_function(kernel_title(run.shapes.text(number))) for number in numbers]
        texts = [text.partition("<")[0] for text in texts] if is_short else texts
        counts = ((text, len([*some])) for text, some in groupby(texts))
        return ", ".join(text if count == 1 else f"{text} ×{count}" for text, count in counts)

    short = [title(numbers, is_short=True) for numbers in chains]
    counts = Counter(short)
    return [
        text if counts[text] == 1 else title(numbers, is_short=False)
        for text, numbers in zip(short, chains, strict=True)
    ]


def _launched_by(run: Run, work: Work, rows: Int64s) -> str | None:
    """The most frequent line of some kernels, else the most frequent innermost range around their calls."""
    found = stacks_of(run, run.layer("gpu_kernel"), work.row[rows], work.call[rows])
    stacks, counts = np.unique(found, return_counts=True)
    counts, stacks = counts[stacks >= 0], stacks[stacks >= 0]
    if len(stacks):
        return Lines(run).of(int(stacks[np.argmax(counts)]))[0]
    calls = work.call[rows]
    calls = calls[calls != NONE]
    ranges, layer, (thread, _) = run.layer("annotation"), run.layer("userspace"), run.shapes.threads
    of_thread, inner = RowsByNumber(thread[ranges.shape]), np.full(len(calls), NONE, np.int64)
    for number, places in RowsByNumber(thread[layer.shape[calls]]):
        for some, row in open_at(ranges, of_thread.of(number), layer.start_ns[calls[places]]):
            some = places[some]
            inner[some] = np.where(inner[some] == NONE, row, inner[some])
    names, counts = np.unique(
        run.shapes.column("name", ranges.shape[inner[inner != NONE]]), return_counts=True
    )
    return run.shapes.text(int(names[np.argmax(counts)])) if len(names) else None


def launching_ns(run: Run, work: Work, gaps: IdleGaps) -> Int64s:
    """How much of each gap the launch of a CUDA graph could save at most: its time in steps, without loading
    data, if the next kernel was launched during the gap; 0 for the others. Shape `(gaps,)`.
    """
    found, calls = np.zeros(len(gaps), np.int64), run.layer("userspace")
    rows = np.flatnonzero((gaps.where == BETWEEN) & (gaps.call != NONE) & ~gaps.by_order)
    rows = rows[work.what[gaps.following[rows]] == KERNEL]
    rows = rows[calls.rows(gaps.call[rows], "end_ns").end_ns > gaps.start_ns[rows]]
    steps, loading = steps_of(run), loading_of(run)
    wanted = Stretches(steps.start_ns, steps.end_ns).joined(loading)
    spans = gaps.start_ns[rows], gaps.end_ns[rows]
    found[rows] = wanted.covered_ns(*spans) - loading.covered_ns(*spans)
    return found
