"""What the threads of the host executed, by function and line: a table, and a flame graph as a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np

from tracepipe.analyses.gpu_work import gpu_work, idle_of
from tracepipe.analyses.host_samples import HostSamples, Pieces, is_interpreter
from tracepipe.analyses.idle_gaps import BETWEEN, gaps_of
from tracepipe.analyses.idle_places import idle_stacks
from tracepipe.analyses.parts import Part, PartOptions, part_of, titled
from tracepipe.event.columns import NONE
from tracepipe.event.groups import number_rows, sums_by
from tracepipe.event.stacks import Frame
from tracepipe.options import Option
from tracepipe.present.flame_graph import Kind, Label, write_speedscope, write_svg
from tracepipe.reports.report import SHARE, Column, FileOutput, Report, Result, Table, not_listed
from tracepipe.store.run import Run
from tracepipe.units import duration_text

_OFF = Label("off-CPU", Kind.OFF)


@dataclass(frozen=True, slots=True)
class Options(PartOptions):
    """Options of `tracepipe flame`."""

    idle: Annotated[
        bool, Option("Show only the time in which a GPU was idle, of the thread that launched its next work.")
    ] = False
    top: Annotated[int, Option("List at most N functions; 0: all.", "N")] = 20


def run(run: Run, options: Options) -> Result:
    """The time of each function, and the flame graph."""
    part, samples = part_of(run, options), HostSamples(run)
    found, unknown_ns = _times(run, _idle(run, part) if options.idle else _whole(run, samples, part))
    total_ns = sum(found.values())
    what = "while a GPU was idle" if options.idle else "of all threads"
    title = titled("HOST TIME BY FUNCTION", part)
    own_ns, off_ns, with_callees_ns = Counter[Label](), Counter[Label](), Counter[Label]()
    for path, spent_ns in found.items():
        innermost = path[-1] if path[-1] is not _OFF else path[-2]
        own_ns[innermost] += spent_ns
        off_ns[innermost] += spent_ns * (path[-1] is _OFF)
        for label in {*path[1:]} - {_OFF}:
            with_callees_ns[label] += spent_ns
    order = sorted(with_callees_ns, key=lambda one: (-own_ns[one], -with_callees_ns[one], one.text))
    shown = order[: options.top] if options.top > 0 else order
    columns = (
        Column("function", "function"),
        Column("own_ns", "itself", "ns"),
        SHARE,
        Column("off_ns", "off-CPU", "ns"),
        Column("total_ns", "with callees", "ns"),
    )
    rows = [
        (one.text, own_ns[one], 100 * own_ns[one] / max(total_ns, 1), off_ns[one], with_callees_ns[one])
        for one in shown
    ]
    note = (
        f"A sample stands for the time around it, at {1e9 / samples.period_ns:.0f} a second of a processor; "
        "the time off a processor is exact. Itself: in no function that it calls; off-CPU: waiting in it."
    )
    nothing = "No stacks of the host were recorded: --layers host_sample,… records them."
    if samples.any:
        nothing = "No GPU was idle between its first and last work." if options.idle else "No time is known."
    table = Table("functions", f"Time {what}", columns, rows, note, empty=nothing)
    result = Result(title, [table])
    result.notes += not_listed(len(order) - len(shown), "function|functions")
    if unknown_ns:
        result.notes.append(f"for {duration_text(unknown_ns)} the stack is not known")
    result.files = {
        ".svg": partial(write_svg, f"Time {what}", found),
        ".json": partial(write_speedscope, f"Time {what}", found),
    }
    return result


def _whole(run: Run, samples: HostSamples, part: Part | None) -> Iterator[tuple[int, Pieces]]:
    """The time of all threads that were sampled."""
    start_ns, end_ns = np.array([run.facts.start_ns]), np.array([run.facts.end_ns])
    if part is not None:
        start_ns, end_ns = part.spans.start_ns, part.spans.end_ns
    for thread in samples.threads.tolist():
        yield thread, samples.pieces(thread, start_ns, end_ns)


def _idle(run: Run, part: Part | None) -> Iterator[tuple[int, Pieces]]:
    """The idle time of GPUs between their first work and their last, as in the report `gaps`."""
    work = gpu_work(run)
    if not len(work):
        return
    idle = [idle_of(work, gpu, rows) for gpu, rows in work.of_gpus()]
    if part is not None:
        idle = [one.within(part.spans) for one in idle]
    gaps = gaps_of(run, work, idle)
    gaps = gaps.select(np.flatnonzero(gaps.where == BETWEEN))
    if part is not None:
        gaps = gaps.within(part.spans.start_ns, part.spans.end_ns)
    yield from idle_stacks(run, gaps)


def _times(run: Run, threads: Iterable[tuple[int, Pieces]]) -> tuple[dict[tuple[Label, ...], int], int]:
    """Path from the thread to the innermost function → its time; and the time of unknown stacks."""
    stacks, first = run.stacks, run.shapes.threads[1]
    found, labels, unknown_ns = dict[tuple[Label, ...], int](), dict[int, Label](), 0
    for thread, pieces in threads:
        pid, tid = run.shapes.ids_of(int(first[thread])) if thread != NONE else (None, None)
        name = run.thread_name(pid, tid) or run.process_name(pid) if tid is not None else "unknown thread"
        root = Label(f"{name} {tid}" if tid is not None else name, Kind.THREAD)
        of, at = number_rows(pieces.stack, pieces.waits)
        sums_ns = sums_by(of, pieces.end_ns - pieces.start_ns, len(at))
        for row, spent_ns in zip(at.tolist(), sums_ns.tolist(), strict=True):
            stack, waits = int(pieces.stack[row]), bool(pieces.waits[row])
            if stack == NONE:
                unknown_ns += spent_ns
                continue
            for number in stacks.frames_of(stack):
                if number not in labels:
                    labels[number] = _label(stacks.frames[number])
            path = (root, *(labels[number] for number in reversed(stacks.frames_of(stack))), *[_OFF] * waits)
            found[path] = found.get(path, 0) + spent_ns
    return found, unknown_ns


def _label(frame: Frame) -> Label:
    kind = Kind.LIBRARY if frame.is_library else Kind.OWN
    if frame.line is None:
        kind = Kind.INTERPRETER if is_interpreter(frame) else Kind.NATIVE
    file = (frame.file or "").rpartition("/")[2]
    return Label(str(frame) if frame.line is not None else f"{frame.function} {file}".rstrip(), kind)


REPORT = Report("flame", Options, run, output=FileOutput((".svg", ".json")))
