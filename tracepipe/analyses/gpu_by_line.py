"""The GPU's time by the line of Python that launched the work."""

from __future__ import annotations

import numpy as np

from tracepipe.analyses.called_by import AUTOGRAD, BACKWARD, NO_CALL, work_by_stack
from tracepipe.store.run import Run

FRAMES = ("own", "innermost", "all")
# The number of stacks whose texts are cached.
_REMEMBERED = 1 << 12
_NO_LINE = "(no Python)"
_OTHERS = {AUTOGRAD: "autograd (line not known)", NO_CALL: "(launch call not recorded)"}
"""The texts that replace the line of work without a stack."""


def gpu_by_line(run: Run) -> list[tuple[str, int, int]]:
    """Return each line with its time on GPUs in ns and the number of its kernels and copies, most time first.
    The list is empty where no stacks were recorded.
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
    texts, lines = Lines(run), dict[str, list[int]]()
    for stack, more in sums.items():
        known = lines.setdefault(texts.of(stack)[0], [0, 0])
        known[0], known[1] = known[0] + more[0], known[1] + more[1]
    found = [(line, gpu_ns, count) for line, (gpu_ns, count) in lines.items()]
    return sorted(found, key=lambda one: (-one[1], one[0]))


class Lines:
    """Converts stacks from `work_by_stack` to the texts of their lines, of which `frames` selects some."""

    def __init__(self, run: Run, frames: str = FRAMES[0]) -> None:
        self._stacks, self._frames = run.stacks, frames
        self._known: dict[int, list[str]] = {}

    def of(self, stack: int) -> list[str]:
        """The lines of a stack: one of them, or, with `all`, each distinct one."""
        if stack not in self._known:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[stack] = self._made(stack)
        return self._known[stack]

    def _made(self, stack: int) -> list[str]:
        if stack < 0:
            return [_OTHERS.get(stack, _NO_LINE)]
        is_backward, number = stack >= BACKWARD, stack % BACKWARD
        frames = list(self._stacks.frames_of(number))
        if self._frames == "own":
            frames = [at for at in self._stacks.own(np.array([number])).tolist() if at >= 0]
        elif self._frames == "innermost":
            frames = frames[:1]
        lines = dict.fromkeys(str(self._stacks.frames[at]) for at in frames)
        return [f"{line}, backward" if is_backward else line for line in lines] or [_NO_LINE]
