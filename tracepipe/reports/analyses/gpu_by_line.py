"""The GPU's time by the line of Python that asked for it, of the user's own code."""

from __future__ import annotations

from tracepipe.event.columns import NONE
from tracepipe.reports.analyses.called_by import AUTOGRAD, BACKWARD, NO_CALL, work_by_stack
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run

NO_LINE = "(no Python)"
OTHERS = {AUTOGRAD: "autograd, for no known line", NO_CALL: "(its call is not recorded)"}
"""What stands for stacks that are none."""


def gpu_by_line(run: Run) -> list[tuple[str, int, int]]:
    """Each line with its time on GPUs in ns and the number of its kernels and copies, the longest first.
    Nothing where no stacks were recorded.
    """
    if not len(run.stacks):
        return []
    sums: dict[int, list[int]] = {}
    for work in work_by_stack(run):
        stacks, of = np.unique(work.stack, return_inverse=True)
        lengths_ns = np.zeros(len(stacks), np.int64)
        np.add.at(lengths_ns, of, work.layer.end_ns[work.rows] - work.layer.start_ns[work.rows])
        counts = np.bincount(of, minlength=len(stacks))
        for stack, *more in zip(*(of.tolist() for of in (stacks, lengths_ns, counts)), strict=True):
            known = sums.setdefault(stack, [0, 0])
            known[0], known[1] = known[0] + more[0], known[1] + more[1]
    lines: dict[str, list[int]] = {}
    for stack, more in sums.items():
        known = lines.setdefault(line_of(run, stack), [0, 0])
        known[0], known[1] = known[0] + more[0], known[1] + more[1]
    found = [(line, gpu_ns, count) for line, (gpu_ns, count) in lines.items()]
    return sorted(found, key=lambda one: (-one[1], one[0]))


def line_of(run: Run, stack: int) -> str:
    """The user's line of a stack, or what stands for one, as `work_by_stack` has it."""
    if stack < 0:
        return OTHERS.get(stack, NO_LINE)
    (frame,) = run.stacks.own(np.array([stack % BACKWARD])).tolist()
    if frame == NONE:
        return NO_LINE
    line = str(run.stacks.frames[frame])
    return f"{line}, backward" if stack >= BACKWARD else line
