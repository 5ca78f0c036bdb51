"""The GPU's time by line of Python: kernels, copies and allocations of each line."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from heapq import nsmallest
from typing import Annotated

import numpy as np

from tracepipe.analyses.cuda_calls import rows_by_effect
from tracepipe.analyses.gpu_by_line import BACKWARD_SUFFIX, FRAMES, Lines, called_by, work_by_stack
from tracepipe.analyses.parts import Part, PartOptions, part_of, titled
from tracepipe.event.columns import Int64s
from tracepipe.event.groups import number_rows, sums_by
from tracepipe.options import Option
from tracepipe.reports.report import COUNT, SHARE, Column, Report, Result, Table, not_listed
from tracepipe.store.run import Run

_KERNELS = 3
_LINE, _GPU_NS = Column("line", "line"), Column("gpu_ns", "on GPU", "ns")


@dataclass(frozen=True, slots=True)
class Options(PartOptions):
    """Options of `tracepipe lines`."""

    frames: Annotated[
        str,
        Option(
            "Attribute time to these lines of a stack. own: the innermost that is in no installed package; "
            "innermost: the innermost of all; all: every one, with what it calls.",
            choices=FRAMES,
        ),
    ] = FRAMES[0]
    top: Annotated[int, Option("Show at most N lines; 0: all.", "N")] = 20


_Work = dict[tuple[str, str], Int64s]
"""By kind, "kernel" or "copy", and name: how many there are, their time on GPUs, and the bytes of copies."""


def _work_by_line(run: Run, lines: Lines, part: Part | None) -> dict[str, _Work]:
    """The work that each line launched."""
    found: dict[str, _Work] = defaultdict(lambda: defaultdict(lambda: np.zeros(3, np.int64)))
    for work in work_by_stack(run, part):
        kind = "copy" if work.name == "transfer" else "kernel"
        names = run.shapes.column("name", work.layer.shape[work.rows])
        lengths_ns = work.layer.end_ns[work.rows] - work.layer.start_ns[work.rows]
        of, first = number_rows(work.stack, names)
        sizes = _sizes(run, work.name, work.rows)
        sums = np.stack([sums_by(of, one, len(first)) for one in (np.ones_like(of), lengths_ns, sizes)], 1)
        for stack, number, some in zip(work.stack[first].tolist(), names[first].tolist(), sums, strict=True):
            for line in lines.of(stack):
                found[line][kind, run.shapes.text(number)] += some
    return found


def run(run: Run, options: Options) -> Result:
    """The lines with the most GPU time, the kernels and copies of each, and the allocations of lines."""
    part = part_of(run, options)
    result = Result(titled("LINES OF PYTHON", part))
    lines = Lines(run, options.frames)
    work = _work_by_line(run, lines, part)
    found = {line: int(sum(gpu_ns for _, gpu_ns, _ in of.values())) for line, of in work.items()}
    order = sorted(found, key=lambda line: (-found[line], line))
    shown = order[: options.top] if options.top > 0 else order
    total_ns = sum(
        int((one.layer.end_ns[one.rows] - one.layer.start_ns[one.rows]).sum())
        for one in work_by_stack(run, part)
    )
    result.parts = [_times(work, shown, total_ns), _works(work, shown)]
    allocated = _allocated(run, lines, options.top, part)
    if len(allocated.rows):
        result.parts.append(allocated)
    result.notes += not_listed(len(order) - len(shown), "line|lines")
    if not len(run.stacks):
        result.notes.append("no stacks of Python were recorded")
    if any(run.stacks.omitted(number) for number in range(len(run.stacks))):
        result.notes.append("some stacks are deeper than is recorded: they lack their outermost frames")
    return result


def _sizes(run: Run, layer: str, rows: Int64s) -> Int64s:
    """The bytes of copies, 0 where they are not known; 0 for kernels. Shape `(n,)`."""
    if layer != "transfer" or not len(rows):
        return np.zeros(len(rows), np.int64)
    of = run.layer(layer)
    sizes, known = run.args.size_bytes(of.args[rows], of.end_args[rows])
    return np.where(known, sizes, 0)


def _times(work: dict[str, _Work], shown: list[str], total_ns: int) -> Table:
    rows = []
    for line in shown:
        sums = {"kernel": np.zeros(3, np.int64), "copy": np.zeros(3, np.int64)}
        for (kind, _), some in work[line].items():
            sums[kind] += some
        (kernels, kernels_ns, _), (copies, copies_ns, copied_bytes) = (of.tolist() for of in sums.values())
        share = 100 * (kernels_ns + copies_ns) / total_ns if total_ns else None
        rows.append((line, kernels_ns + copies_ns, share, kernels, copies, copied_bytes if copies else None))
    columns = (
        _LINE,
        _GPU_NS,
        SHARE,
        Column("kernels", "kernels", "count"),
        Column("copies", "copies", "count"),
        Column("copied_bytes", "copied", "bytes"),
    )
    note = "On GPU: the sum of the lengths of kernels and copies, also where they ran at the same time."
    if any(line.endswith(BACKWARD_SUFFIX) for line in shown):
        note += (
            " Backward: autograd launched it, for the gradient of an operator that the line called (the one "
            "with the same sequence number)."
        )
    empty = "No work on a GPU was recorded."
    return Table("lines", "Lines by the GPU's time", columns, rows, note, empty=empty)


def _works(work: dict[str, _Work], shown: list[str]) -> Table:
    rows = [
        (line, name, kind, int(count), int(gpu_ns))
        for line in shown
        for (kind, name), (count, gpu_ns, _) in nsmallest(
            _KERNELS, work[line].items(), key=lambda of: (-of[1][1], *of[0])
        )
    ]
    columns = (_LINE, Column("name", "kernel or copy"), Column("kind", "kind"), COUNT, _GPU_NS)
    title = f"The {_KERNELS} kernels and copies of each line that took longest"
    return Table("work", title, columns, rows, grouped=True, empty="No kernels or copies of lines.")


def _allocated(run: Run, lines: Lines, top: int, part: Part | None) -> Table:
    """Allocations by the line that made them."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    calls, layer = rows_by_effect(run)["alloc"], run.layer("userspace")
    args = layer.args[calls], layer.end_args[calls]
    results, known = run.args.result(*args)
    good = np.flatnonzero(~known | (results == 0))
    good = good if part is None else good[part.holds("userspace", calls[good])]
    sizes, known = run.args.size_bytes(*args)
    stack = called_by(run, calls[good])
    of, first = number_rows(stack)
    sums = (
        sums_by(of, values, len(first)).tolist()
        for values in (np.ones_like(of), np.where(known, sizes, 0)[good])
    )
    for called, count, size_bytes in zip(stack[first].tolist(), *sums, strict=True):
        for text in lines.of(called):
            found[text][0] += count
            found[text][1] += size_bytes
    order = sorted(found, key=lambda line: (-found[line][1], line))
    columns = (_LINE, Column("count", "allocations", "count"), Column("size_bytes", "size", "bytes"))
    listed = [(line, *found[line]) for line in (order[:top] if top > 0 else order)]
    return Table("allocations", "Allocations by line", columns, listed)


REPORT = Report("lines", Options, run, suits=lambda run: len(run.stacks) > 0)
