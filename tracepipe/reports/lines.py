"""The GPU's time by line of Python: kernels, copies and allocations of each line."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import pairwise
from typing import Annotated, Any

from tracepipe.analyses.called_by import called_by, work_by_stack
from tracepipe.analyses.cuda_calls import rows_by_effect
from tracepipe.analyses.gpu_by_line import FRAMES, Lines
from tracepipe.event.columns import Int64s
from tracepipe.options import Option
from tracepipe.reports.frames.grouping import equal, greatest, starts_of
from tracepipe.reports.frames.kept_rows import kept_rows
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, parts, taken, touched, zeros
from tracepipe.reports.report import Column, Report, Result, Table
from tracepipe.store.run import Run
from tracepipe.units import counted

_KERNELS = 3
# The sums for each stack and name: how many kernels or copies, their time, and the bytes of copies.
_SUMS = ("count", "gpu_ns", "copied_bytes")
# The bytes of one row of these columns.
_ROW_BYTES = 48


@dataclass(frozen=True, slots=True)
class Options:
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


@dataclass(slots=True)
class _Line:
    """The work that one line launched; `stacks` are indices into `_Launched.starts`."""

    gpu_ns: int = 0
    kernels: int = 0
    copies: int = 0
    copied_bytes: int = 0
    stacks: array[int] = field(default_factory=lambda: array("i"))


class _Launched:
    """The work that stacks launched, as columns sorted by stack: a row for each stack and name of its kernels
    or copies. `starts` has the first row of each stack, and the end of the last; `total_ns` is the time of
    all work.
    """

    def __init__(self, run: Run) -> None:
        found = {name: Growing(np.int64) for name in ("stack", "is_copy", "name", *_SUMS)}
        self.total_ns = 0
        for work in work_by_stack(run):
            names = run.shapes.column("name", work.layer.shape[work.rows])
            lengths_ns = work.layer.end_ns[work.rows] - work.layer.start_ns[work.rows]
            self.total_ns += int(lengths_ns.sum())
            values = np.ones_like(lengths_ns), lengths_ns, _sizes(run, work.name, work.rows)
            (stack, name), sums = _summed((work.stack, names), values)
            columns = (stack, int(work.name == "transfer"), name, *sums)
            for column, some in zip(found.values(), columns, strict=True):
                column.extend(some, len(stack))
        whole = [column.whole() for column in found.values()]
        (self.stack, self._is_copy, self._name), sums = _summed(whole[:3], whole[3:])
        self._count, self._gpu_ns, self._copied = sums
        self.starts = np.append(starts_of(self.stack), len(self.stack))
        self._run = run

    def lines(self, lines: Lines) -> dict[str, _Line]:
        """The work that each line launched."""
        found: dict[str, _Line] = defaultdict(_Line)
        for at, (start, stop) in enumerate(pairwise(self.starts.tolist())):
            rows = slice(start, stop)
            is_copy, counts = self._is_copy[rows] > 0, self._count[rows]
            copies, gpu_ns = int(counts[is_copy].sum()), int(self._gpu_ns[rows].sum())
            copied_bytes, kernels = int(self._copied[rows].sum()), int(counts.sum()) - copies
            for text in lines.of(int(self.stack[start])):
                line = found[text]
                line.gpu_ns, line.kernels, line.copies = (
                    line.gpu_ns + gpu_ns,
                    line.kernels + kernels,
                    line.copies + copies,
                )
                line.copied_bytes += copied_bytes
                line.stacks.append(at)
            touched((stop - start) * _ROW_BYTES)
        return found

    def longest(self, line: _Line) -> Iterator[tuple[str, str, int, int]]:
        """Yield the kernels and copies of a line that took longest: name, kind, count, and time in ns."""
        stacks = np.array(line.stacks)
        rows = np.concatenate([np.arange(*self.starts[at : at + 2]) for at in stacks])
        columns = (taken(column, rows) for column in (self._is_copy, self._name, self._count, self._gpu_ns))
        is_copy, name, *values = columns
        (is_copy, name), (count, gpu_ns) = _summed((is_copy, name), values)

        def named(at: int) -> tuple[int, str, str]:
            kind = "copy" if is_copy[at] else "kernel"
            return -int(gpu_ns[at]), kind, self._run.shapes.text(int(name[at]))

        some = np.concatenate(greatest(gpu_ns, np.arange(len(name)), _KERNELS)).tolist()
        for at in nsmallest(_KERNELS, some, key=named):
            _, kind, text = named(at)
            yield text, kind, int(count[at]), int(gpu_ns[at])


def run(run: Run, options: Options) -> Result:
    """The lines with the most GPU time, the kernels and copies of each, and the allocations of lines."""
    result = Result("LINES OF PYTHON")
    lines = Lines(run, options.frames)
    launched = _Launched(run)
    found = launched.lines(lines)
    order = sorted(found, key=lambda line: (-found[line].gpu_ns, line))
    shown = order[: options.top] if options.top > 0 else order
    result.parts = [_times(found, shown, launched.total_ns), _works(launched, found, shown)]
    allocated = _allocated(run, lines, options.top)
    if len(allocated.rows):
        result.parts.append(allocated)
    if len(order) > len(shown):
        result.notes.append(
            counted(len(order) - len(shown), "more line|lines is|are not listed: --top 0 lists all")
        )
    result.notes += _missing(run)
    return result


def _sizes(run: Run, layer: str, rows: Int64s) -> Int64s:
    """The bytes of copies, 0 where they are not known; 0 for kernels. Shape `(n,)`."""
    if layer != "transfer" or not len(rows):
        return np.zeros(len(rows), np.int64)
    of = run.layer(layer)
    sizes, known = run.args.size_bytes(of.args[rows], of.end_args[rows])
    return np.where(known, sizes, 0)


def _summed(keys: Sequence[Any], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The distinct keys of rows, in order, and the sums of the values of their rows. Arguments are columns of
    shape `(n,)`, results of shape `(keys,)`.
    """
    of, first = equal(*keys)
    sums = [zeros(len(first), np.int64) for _ in values]
    for part in parts(len(of)):
        for total, column in zip(sums, values, strict=True):
            np.add.at(total, of[part], column[part])
    return [taken(key, first) for key in keys], sums


def _times(found: dict[str, _Line], shown: list[str], total_ns: int) -> Table:
    def row(text: str) -> tuple[Any, ...]:
        line = found[text]
        share = 100 * line.gpu_ns / total_ns if total_ns else None
        copied_bytes = line.copied_bytes if line.copies else None
        return text, line.gpu_ns, share, line.kernels, line.copies, copied_bytes

    rows = kept_rows(map(row, shown))
    columns = (
        Column("line", "line"),
        Column("gpu_ns", "on GPU", "ns"),
        Column("share_percent", "share", "percent"),
        Column("kernels", "kernels", "count"),
        Column("copies", "copies", "count"),
        Column("copied_bytes", "copied", "bytes"),
    )
    note = "On GPU: the sum of the lengths of kernels and copies, also where they ran at the same time."
    empty = "No work on a GPU was recorded."
    return Table("lines", "Lines by the GPU's time", columns, rows, note, empty=empty)


def _works(launched: _Launched, found: dict[str, _Line], shown: list[str]) -> Table:
    rows = kept_rows((text, *of) for text in shown for of in launched.longest(found[text]))
    columns = (
        Column("line", "line"),
        Column("name", "kernel or copy"),
        Column("kind", "kind"),
        Column("count", "count", "count"),
        Column("gpu_ns", "on GPU", "ns"),
    )
    title = f"The {_KERNELS} kernels and copies of each line that took longest"
    return Table("work", title, columns, rows, grouped=True, empty="No kernels or copies of lines.")


def _allocated(run: Run, lines: Lines, top: int) -> Table:
    """Allocations by the line that made them."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    calls, layer = rows_by_effect(run)["alloc"], run.layer("userspace")
    for part in parts(len(calls)):
        args = layer.args[calls[part]], layer.end_args[calls[part]]
        results, known = run.args.result(*args)
        good = np.flatnonzero(~known | (results == 0))
        sizes, known = run.args.size_bytes(*args)
        sizes = np.where(known, sizes, 0)[good]
        (stack,), sums = _summed((called_by(run, calls[part][good]),), (np.ones_like(good), sizes))
        for called, count, size_bytes in zip(*(of.tolist() for of in (stack, *sums)), strict=True):
            for text in lines.of(called):
                found[text][0] += count
                found[text][1] += size_bytes
    order = sorted(found, key=lambda line: (-found[line][1], line))
    columns = (
        Column("line", "line"),
        Column("count", "allocations", "count"),
        Column("size_bytes", "size", "bytes"),
    )
    listed = kept_rows((line, *found[line]) for line in (order[:top] if top > 0 else order))
    return Table("allocations", "Allocations by line", columns, listed)


def _missing(run: Run) -> list[str]:
    """Notes about what the recording lacks."""
    notes = []
    if not len(run.stacks):
        notes.append("no stacks of Python were recorded")
    if any(run.stacks.omitted(number) for number in range(len(run.stacks))):
        notes.append("some stacks are deeper than is recorded: they lack their outermost frames")
    return notes


REPORT = Report("lines", Options, run, suits=lambda run: len(run.stacks) > 0)
