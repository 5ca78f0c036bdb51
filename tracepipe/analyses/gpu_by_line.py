"""The Python stack behind each piece of the GPU's work, and the GPU's time by line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tracepipe.analyses.autograd import autograd
from tracepipe.analyses.gpu_work import LaunchCalls
from tracepipe.analyses.nesting import nearest_of_some
from tracepipe.analyses.parts import Part
from tracepipe.event.columns import NONE, Int64s, Ints
from tracepipe.event.groups import sums_by
from tracepipe.event.model import AUTOGRAD as AUTOGRAD_LINE
from tracepipe.store.run import Layer, Run

NO_STACK, AUTOGRAD, NO_CALL = -1, -2, -3
"""Values in place of a stack: the call has none; the call is on a thread of autograd; the call was not
recorded."""
BACKWARD_SUFFIX: Final = ", backward"
BACKWARD = 1 << 32
"""Added to the number of the forward line's stack where autograd launched the work."""


def called_by(run: Run, calls: Ints) -> Int64s:
    """For rows of calls, the stack of each call, or of the nearest call around it that has one; else
    NO_STACK. Shapes `(n,)`.
    """
    layer = run.layer("userspace")
    if layer.stack is None:
        return np.full(len(calls), NO_STACK, np.int64)
    rows = nearest_of_some(layer.parent, layer.stack != NONE, calls)
    return np.where(rows == NONE, NO_STACK, layer.stack[np.maximum(rows, 0)].astype(np.int64))


@dataclass(frozen=True, slots=True)
class Work:
    """Some kernels or copies of a layer: their rows, and the stack that launched each, or one of NO_STACK,
    AUTOGRAD and NO_CALL. Shapes `(n,)`.
    """

    name: str
    layer: Layer
    rows: Int64s
    stack: Int64s


def work_by_stack(run: Run, part: Part | None = None) -> Iterator[Work]:
    """Yield the kernels on GPUs, then the copies, of a part of the recording."""
    layers = {name: layer for name in ("gpu_kernel", "transfer") if len(layer := run.layer(name))}
    if not layers:
        return
    launches = LaunchCalls(run)
    for name, layer in layers.items():
        on_gpu = np.ones(len(run.shapes), np.bool_)
        if name == "transfer":  # transfers without a GPU are the host's view of copies
            on_gpu = run.shapes.column("gpu") != NONE
        rows = np.flatnonzero(on_gpu[layer.shape] & layer.has_length)
        rows = rows if part is None else rows[part.holds(name, rows)]
        launched = run.shapes.has_launch(layer.shape[rows])
        calls = np.full(len(rows), NONE, np.int64)
        calls[launched] = launches.find(layer, rows[launched])
        yield Work(name, layer, rows, stacks_of(run, layer, rows, calls))


def stacks_of(run: Run, layer: Layer, rows: Ints, calls: Ints) -> Int64s:
    """For rows of work and of the calls that launched it, the stack of the work: its own, as work in a CUDA
    graph has that of the code that made its node; else the call's as `called_by` has it, or, if no frame of
    that is the user's, that of the forward operator of autograd plus BACKWARD; else AUTOGRAD, NO_STACK, or
    NO_CALL for NONE. Shapes `(n,)`.
    """
    found = np.full(len(rows), NO_CALL, np.int64)
    known = np.flatnonzero(calls != NONE)
    found[known] = called_by(run, calls[known])
    if layer.stack is not None:
        own = layer.stack[rows]
        found = np.where(own == NONE, found, own)
    is_library = np.array([*run.stacks.is_library, False], np.bool_)
    is_bare = (found == NO_STACK) | ((found >= 0) & is_library[run.stacks.own(np.maximum(found, NONE))])
    bare = np.flatnonzero(is_bare & (calls != NONE))
    if len(bare):
        forward = _forward_stacks(run, calls[bare].astype(np.int64))
        found[bare] = np.where(forward == NO_STACK, found[bare], forward)
    return found


def _forward_stacks(run: Run, calls: Int64s) -> Int64s:
    """For calls without a stack, that of the forward operator plus BACKWARD, else AUTOGRAD or NO_STACK.
    Shapes `(n,)`.
    """
    of, (thread, _) = autograd(run), run.shapes.threads
    threads = thread[run.layer("userspace").shape[calls]]
    known = {
        number: AUTOGRAD if of.is_thread(run, number) else NO_STACK for number in np.unique(threads).tolist()
    }
    found = np.array([known[number] for number in threads.tolist()], np.int64)
    forward = of.forward_of(calls)
    linked = np.flatnonzero(forward != NONE)
    stacks = of.stacks(forward[linked])
    linked, stacks = linked[stacks != NONE], stacks[stacks != NONE]
    found[linked] = stacks + BACKWARD
    return found


FRAMES = ("own", "innermost", "all")
# The number of stacks whose texts are cached.
_REMEMBERED = 1 << 12
_NO_LINE = "(no Python)"
_OTHERS = {AUTOGRAD: AUTOGRAD_LINE, NO_CALL: "(launch call not recorded)"}
"""The texts that replace the line of work without a stack."""


def gpu_by_line(run: Run) -> list[tuple[str, int, int]]:
    """Return each line with its time on GPUs in ns and the number of its kernels and copies, most time first.
    The list is empty where no stacks were recorded.
    """
    if not len(run.stacks) or not any(run.store.has(name, "stack") for name in ("userspace", "gpu_kernel")):
        return []
    lines, found = Lines(run), defaultdict[str, Int64s](lambda: np.zeros(2, np.int64))
    for work in work_by_stack(run):
        stacks, of = np.unique(work.stack, return_inverse=True)
        lengths_ns = sums_by(of, work.layer.end_ns[work.rows] - work.layer.start_ns[work.rows], len(stacks))
        sums = np.stack([lengths_ns, np.bincount(of, minlength=len(stacks))], 1)
        for stack, some in zip(stacks.tolist(), sums, strict=True):
            found[lines.of(stack)[0]] += some
    of_lines = [(line, int(gpu_ns), int(count)) for line, (gpu_ns, count) in found.items()]
    return sorted(of_lines, key=lambda one: (-one[1], one[0]))


class Lines:
    """Converts stacks from `work_by_stack` to the texts of their lines, of which `frames` selects some."""

    def __init__(self, run: Run, frames: str = FRAMES[0]) -> None:
        self._stacks, self._frames = run.stacks, frames
        self._known: dict[int, list[str]] = {}

    def of(self, stack: int) -> list[str]:
        """The lines of a stack: one of them, or, with `all`, each distinct one."""
        if stack < 0:
            return [_OTHERS.get(stack, _NO_LINE)]
        if stack in self._known:
            return self._known[stack]
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        is_backward, number = stack >= BACKWARD, stack % BACKWARD
        frames = list(self._stacks.frames_of(number))
        if self._frames == "own":
            frames = [at for at in self._stacks.own(np.array([number])).tolist() if at >= 0]
        elif self._frames == "innermost":
            frames = frames[:1]
        lines = dict.fromkeys(str(self._stacks.frames[at]) for at in frames)
        shown = [line + BACKWARD_SUFFIX if is_backward else line for line in lines] or [_NO_LINE]
        self._known[stack] = shown
        return shown
