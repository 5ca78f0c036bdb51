"""Which line of Python the GPU's time goes to: kernels, copies and allocations by line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

from tracepipe.event.columns import Int64s
from tracepipe.reports.analyses.called_by import called_by, work_by_stack
from tracepipe.reports.analyses.cuda_calls import effects_of_calls, rows_by_effect
from tracepipe.reports.analyses.gpu_by_line import FRAMES, Lines
from tracepipe.reports.frames.grouping import equal
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Option, Report, Result, Table

_KERNELS = 3


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe lines`."""

    frames: Annotated[
        str,
        Option(
            "own: the innermost line that is in no installed package; innermost: of any; all: every line "
            "of a stack, with what it calls.",
            choices=FRAMES,
        ),
    ] = FRAMES[0]
    top: Annotated[int, Option("How many lines; 0: all.", "N")] = 20


@dataclass(slots=True)
class _Line:
    """What one line asked for."""

    gpu_ns: int = 0
    kernels: int = 0
    copies: int = 0
    copied_bytes: int | None = None
    by_name: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Count and time by kind of work and name."""


def run(run: Run, options: Options) -> Result:
    """The lines that the GPU worked for longest, what ran for each, and what each allocated."""
    result = Result("LINES OF PYTHON")
    lines = Lines(run, options.frames)
    found, total_ns = _by_line(run, lines)
    order = sorted(found, key=lambda line: (-found[line].gpu_ns, line))
    shown = order[: options.top] if options.top > 0 else order
    result.parts = [_times(found, shown, total_ns), _works(found, shown)]
    allocated = _allocated(run, lines, options.top)
    if allocated.rows:
        result.parts.append(allocated)
    if len(order) > len(shown):
        result.notes.append(f"{len(order) - len(shown)} more lines are not listed: --top 0 lists all")
    result.notes += _missing(run)
    return result


def _by_line(run: Run, lines: Lines) -> tuple[dict[str, _Line], int]:
    """What each line asked for, and the GPU's time in all."""
    found: dict[str, _Line] = defaultdict(_Line)
    total_ns = 0
    for work in work_by_stack(run):
        names = run.shapes.column("name", work.layer.shape[work.rows]).astype(np.int64)
        lengths_ns = work.layer.end_ns[work.rows] - work.layer.start_ns[work.rows]
        total_ns += int(lengths_ns.sum())
        sizes, kind = _sizes(run, work.name, work.rows), "copy" if work.name == "transfer" else "kernel"
        for stack, name, count, gpu_ns, copied in _sums(work.stack, names, lengths_ns, sizes):
            for text in lines.of(stack):
                _add(found[text], kind, run.shapes.text(name), count, gpu_ns, copied)
    return found, total_ns


def _add(line: _Line, kind: str, name: str, count: int, gpu_ns: int, copied: int) -> None:
    line.gpu_ns += gpu_ns
    if kind == "copy":
        line.copies += count
        line.copied_bytes = (line.copied_bytes or 0) + copied
    else:
        line.kernels += count
    sums = line.by_name[kind, name]
    sums[0] += count
    sums[1] += gpu_ns


def _sizes(run: Run, layer: str, rows: Int64s) -> Int64s:
    """The bytes of copies, 0 where they are not known; of kernels 0."""
    if layer != "transfer" or not len(rows):
        return np.zeros(len(rows), np.int64)
    sizes: Int64s = run.rows(layer, rows, "size_bytes")["size_bytes"].fill_null(0).to_numpy()
    return sizes


def _sums(stack: Int64s, name: Int64s, *values: Int64s) -> Iterable[tuple[int, ...]]:
    """Of rows with the same stack and name: both, how many there are, and the sums of their values."""
    if not len(stack):
        return
    of, first = equal(stack, name)
    counts = np.bincount(of)
    sums = [np.zeros(len(first), np.int64) for _ in values]
    for total, column in zip(sums, values, strict=True):
        np.add.at(total, of, column)
    columns = (stack[first], name[first], counts, *sums)
    yield from zip(*(column.tolist() for column in columns), strict=True)


def _times(found: dict[str, _Line], shown: list[str], total_ns: int) -> Table:
    rows = []
    for text in shown:
        line = found[text]
        share = 100 * line.gpu_ns / total_ns if total_ns else None
        rows.append((text, line.gpu_ns, share, line.kernels, line.copies, line.copied_bytes))
    columns = (
        Column("line", "line"),
        Column("gpu_ns", "on GPU", "ns"),
        Column("share_percent", "share", "percent"),
        Column("kernels", "kernels", "count"),
        Column("copies", "copies", "count"),
        Column("copied_bytes", "copied", "bytes"),
    )
    note = "Lengths of kernels and copies are added up, those that ran at one time too."
    return Table("lines", "Which lines the GPU worked for", columns, rows, note, empty="nothing on a GPU")


def _works(found: dict[str, _Line], shown: list[str]) -> Table:
    rows = []
    for text in shown:
        by_time = sorted(found[text].by_name.items(), key=lambda one: (-one[1][1], one[0]))
        rows += [(text, name, kind, *sums) for (kind, name), sums in by_time[:_KERNELS]]
    columns = (
        Column("line", "line"),
        Column("name", "kernel or copy"),
        Column("kind", "kind"),
        Column("count", "count", "count"),
        Column("gpu_ns", "on GPU", "ns"),
    )
    title = f"The {_KERNELS} kernels and copies of each line that took longest"
    return Table("work", title, columns, rows, grouped=True, empty="none")


def _allocated(run: Run, lines: Lines, top: int) -> Table:
    """Allocations by the line that called for them."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    calls = effects_of_calls(run, ("alloc",), "size_bytes")
    good = np.flatnonzero(~calls["failed"].to_numpy())
    stack = called_by(run, rows_by_effect(run)["alloc"][good])
    sizes = calls["size_bytes"].fill_null(0).to_numpy()[good]
    for called, _, count, size_bytes in _sums(stack, np.zeros_like(stack), sizes):
        for text in lines.of(called):
            found[text][0] += count
            found[text][1] += size_bytes
    order = sorted(found, key=lambda line: (-found[line][1], line))
    columns = (
        Column("line", "line"),
        Column("count", "allocations", "count"),
        Column("size_bytes", "size", "bytes"),
    )
    listed = [(line, *found[line]) for line in (order[:top] if top > 0 else order)]
    return Table("allocations", "Which lines allocated", columns, listed)


def _missing(run: Run) -> list[str]:
    """What the recording does not have of it."""
    notes = []
    if not len(run.stacks):
        notes.append("the recording has no stacks of Python")
    if any(run.stacks.omitted(number) for number in range(len(run.stacks))):
        notes.append("some stacks lack frames at their outer end, which are deeper than is recorded")
    return notes


REPORT = Report("lines", Options, run, suits=lambda run: len(run.stacks) > 0)
