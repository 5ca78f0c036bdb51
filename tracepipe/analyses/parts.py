"""A part of a recording: some steps, or the ranges of one name, with all that belongs to them.

thread   ├─ step 2 ───────┤├─ step 3 ───────┤
stream      ├ k ┤  ├ k ────────┤├ k ┤             the first two kernels are of step 2, which launched them
                              ├idle┤              idle time is cut at the bounds of the steps
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Annotated, Final

import numpy as np

from tracepipe.analyses.cuda_calls import rows_named
from tracepipe.analyses.gpu_by_range import MORE, work_in_ranges
from tracepipe.analyses.gpu_work import WORK_LAYERS, LaunchCalls
from tracepipe.analyses.steps import steps_of
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import NONE, Bools, Int64s
from tracepipe.event.intervals import Stretches
from tracepipe.options import Option, about
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT, NO_BEGIN
from tracepipe.units import counted, duration_text

_NEAREST: Final = 3
_NAMES_MAX: Final = 1 << 14
_SHOWN_STEPS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOptions:
    """The options of reports that can show a part of a recording."""

    step: Annotated[int | None, Option("Show only the step of this number, and what it launched.", "N")] = (
        None
    )
    range: Annotated[
        str, Option("Show only the ranges of this name, and what was launched in them.", "NAME")
    ] = ""


@dataclass(frozen=True, eq=False)
class Part:
    """The stretches of time of steps or ranges, and the work of GPUs that was launched in them. `title` says
    which they are. `ranges` are their rows in the layer of annotations; of steps, `pid` is the process.
    """

    run: Run
    title: str
    spans: Stretches
    ranges: Int64s | None = None
    pid: int = NONE

    def holds(self, layer: str, rows: Int64s) -> Bools:
        """Whether some rows of a layer belong to the part: work of GPUs by the call that launched it, all
        else, and work whose call is not known, by its begin. Shapes `(n,)`.
        """
        start_ns = self.run.layer(layer).start_ns[rows]
        begins = self.spans.covered_ns(start_ns, start_ns + 1) > 0
        if layer not in WORK_LAYERS:
            return begins
        is_known, is_inside = self._launched[layer]
        return np.where(is_known[rows], is_inside[rows], begins)

    @cached_property
    def _launched(self) -> dict[str, tuple[Bools, Bools]]:
        """By layer of work, whether the call of each row is known, and whether it is in the part."""
        found, calls, shapes = {}, self.run.layer("userspace"), self.run.shapes
        ranges, work = self.ranges, {} if self.ranges is None else work_in_ranges(self.run)[0]
        for what, (layer, rows, call) in enumerate(LaunchCalls(self.run).launched()):
            is_known, is_inside = np.zeros((2, len(layer)), np.bool_)
            is_known[rows] = True
            if ranges is None:
                called_ns, pids = calls.start_ns[call], shapes.column("pid", calls.shape[call])
                inside = self.spans.covered_ns(called_ns, called_ns + 1) > 0
                is_inside[rows[inside & (pids == self.pid)]] = True
            else:
                is_inside[work["row"][np.isin(work["range"], ranges) & (work["what"] == what)]] = True
            found[WORK_LAYERS[what]] = is_known, is_inside
        return found


def titled(title: str, part: Part | None) -> str:
    """The title of a report with the part that it shows."""
    return title if part is None else f"{title}: {part.title}"


def part_of(run: Run, options: PartOptions) -> Part | None:
    """The part that options choose, None where they choose none. Raises TracepipeError, with the steps that
    there are, or the nearest names.
    """
    if options.step is not None and options.range:
        raise TracepipeError("A part is a step or ranges, not both.", "Give --step or --range.")
    with about("step" if options.step is not None else "range"):
        if options.step is not None:
            return _step(run, options.step)
        return _ranges(run, options.range) if options.range else None


def _step(run: Run, number: int) -> Part:
    steps = steps_of(run)
    if not steps.are_marked:
        raise TracepipeError("No range of the recording is called a step.", "Choose ranges by --range NAME.")
    own = np.flatnonzero(steps.number == number)
    if not len(own):
        raise TracepipeError(f"No step {number} was recorded.", f"Steps: {_listed(steps.number.tolist())}.")
    pid = int(run.shapes.column("pid")[run.shapes.threads[1][steps.thread]])
    spans = Stretches(steps.start_ns[own], steps.end_ns[own])
    name = steps.names[int(own[0])]
    title = f"step {number}" if name.endswith(str(number)) and "#" not in name else f"step {number} ({name})"
    return Part(run, f"{title}, {duration_text(spans.total_ns)}", spans, pid=pid)


def _listed(numbers: list[int]) -> str:
    """Numbers as ranges of them: `0 to 3, 7`."""
    starts = [at for at in range(len(numbers)) if at == 0 or numbers[at] != numbers[at - 1] + 1]
    ends = [*(at - 1 for at in starts[1:]), len(numbers) - 1]
    texts = [
        f"{numbers[a]} to {numbers[b]}" if b > a else str(numbers[a])
        for a, b in zip(starts, ends, strict=True)
    ]
    more = [f"and {len(texts) - _SHOWN_STEPS} more"] if len(texts) > _SHOWN_STEPS else []
    return ", ".join(texts[:_SHOWN_STEPS] + more)


def _ranges(run: Run, name: str) -> Part:
    layer, names = run.layer("annotation"), dict[str, None]()

    def matches(other: str) -> bool:
        plain = re.sub(MORE, "", other)
        if len(names) < _NAMES_MAX:
            names[plain] = None
        return name in (plain, other)

    rows = rows_named(run, "annotation", matches)
    rows = rows[(layer.kind[rows] != INSTANT) & (layer.kind[rows] != NO_BEGIN)]
    if not len(rows):
        others = counted(len(names), "other|others")
        hint = f"It has {others}: {', '.join(sorted(names)[:_NEAREST])}." if names else "It has no ranges."
        if nearest := get_close_matches(name, names, _NEAREST):
            hint = f"The nearest names: {', '.join(nearest)}."
        raise TracepipeError(f"No range of the name {name} was recorded.", hint)
    spans = Stretches(layer.start_ns[rows], layer.end_ns[rows])
    words = f"range|ranges {name}, {duration_text(spans.total_ns)}"
    return Part(run, counted(len(rows), words), spans, rows)
