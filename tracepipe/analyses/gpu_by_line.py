"""The Python stack that launched each piece of the GPU's work, and the GPU's time by line."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_work import LaunchCalls
from tracepipe.analyses.nesting import nearest_of_some
from tracepipe.event.columns import NONE, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, sums_by
from tracepipe.store.run import Layer, Run
from tracepipe.store.schema import INSTANT

NO_STACK, AUTOGRAD, NO_CALL = -1, -2, -3
"""Values in place of a stack: the call has none; the call is on a thread of autograd; the call was not
recorded."""
BACKWARD = 1 << 32
"""Added to the number of the forward line's stack where autograd launched the work."""
# A range of PyTorch's emit_nvtx: `aten::linear, seq = 5, op_id = 12`; and the names of autograd's threads, of
# which the kernel keeps 15 characters.
_SEQUENCE = re.compile(r", seq ?= ?(\d{1,18})\b")
_AUTOGRAD = re.compile(r"pt_autograd_\d*")


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


def work_by_stack(run: Run) -> Iterator[Work]:
    """Yield the kernels on GPUs, then the copies."""
    layers = {name: layer for name in ("gpu_kernel", "transfer") if len(layer := run.layer(name))}
    if not layers:
        return
    launches, autograd = LaunchCalls(run), Autograd(run)
    for name, layer in layers.items():
        on_gpu = np.ones(len(run.shapes), np.bool_)
        if name == "transfer":  # transfers without a GPU are the host's view of copies
            on_gpu = run.shapes.column("gpu") != NONE
        rows = np.flatnonzero(on_gpu[layer.shape] & layer.has_length)
        launched = run.shapes.has_launch(layer.shape[rows])
        calls = np.full(len(rows), NONE, np.int64)
        calls[launched] = launches.find(layer, rows[launched])
        stack = np.full(len(rows), NO_CALL, np.int64)
        known = np.flatnonzero(calls != NONE)
        stack[known] = called_by(run, calls[known])
        bare = known[stack[known] == NO_STACK]
        if len(bare):
            stack[bare] = autograd.find(calls[bare])
        yield Work(name, layer, rows, stack)


class Autograd:
    """Links calls on autograd's threads to the forward line by the sequence numbers in annotations.

    The number counts the operators of a Python thread: a range of autograd belongs to the last forward range
    with the same number. Without such annotations, autograd's calls are recognized by their thread's name.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._calls = run, run.layer("userspace")
        self._threads, self._first = run.shapes.threads
        self._forward: dict[tuple[int, int], int] = {}

    def find(self, calls: Int64s) -> Int64s:
        """For calls without a stack, the forward stack plus BACKWARD, else AUTOGRAD or NO_STACK.
        Shapes `(n,)`.
        """
        found = np.full(len(calls), NO_STACK, np.int64)
        for thread, places in RowsByNumber(self._threads[self._calls.shape[calls]]):
            pid, tid = self._run.shapes.ids_of(int(self._first[thread]))
            numbers = self._numbers_at(thread, self._calls.start_ns[calls[places]])
            is_autograd = _AUTOGRAD.match(self._run.thread_name(pid, tid) or "") is not None
            known, of = np.unique(numbers, return_inverse=True)
            stacks = [self._forward.get((pid or 0, number), NONE) for number in known.tolist()]
            forward = np.array(stacks, np.int64)[of]
            other = AUTOGRAD if is_autograd else NO_STACK
            found[places] = np.where(forward == NONE, other, forward + BACKWARD)
        return found

    def _numbers_at(self, thread: int, times_ns: Int64s) -> Int64s:
        """At each time of a thread, the sequence number of the outermost range that has one; else NONE."""
        annotations, rows = self._run.layer("annotation"), self._ranges.of(thread)
        if not len(rows):
            return np.full(len(times_ns), NONE, np.int64)
        starts, ends = annotations.start_ns[rows], annotations.end_ns[rows]
        # Outermost ranges do not overlap.
        first = np.append(True, starts[1:] >= np.maximum.accumulate(ends)[:-1])
        rows, starts, ends = rows[first], starts[first], ends[first]
        at = np.maximum(np.searchsorted(starts, times_ns, "right") - 1, 0)
        inside = (starts[at] <= times_ns) & (times_ns < ends[at])
        return np.where(inside, self._sequence[annotations.shape[rows[at]]], NONE)

    @cached_property
    def _ranges(self) -> RowsByNumber:
        """The ranges with sequence numbers by thread. Finds `_sequence`, the number of each shape, and
        `_forward`, for each number the stack of the first call in its last range.
        """
        of, texts = values_by_names(self._run, "annotation", _SEQUENCE.search)
        self._sequence = np.array([NONE if one is None else int(one[1]) for one in texts], np.int64)[of]
        annotations, stack = self._run.layer("annotation"), self._calls.stack
        rows = np.flatnonzero((self._sequence[annotations.shape] != NONE) & (annotations.kind != INSTANT))
        ranges = RowsByNumber(self._threads[annotations.shape[rows]], rows)
        if stack is None:
            return ranges
        stacked = np.flatnonzero(stack != NONE)
        calls_of = RowsByNumber(self._threads[self._calls.shape[stacked]], stacked)
        for thread, own in ranges:
            calls = calls_of.of(thread)
            starts = np.append(self._calls.start_ns[calls], np.iinfo(np.int64).max)
            at = np.searchsorted(starts[:-1], annotations.start_ns[own])
            inside = starts[at] < annotations.end_ns[own]
            numbers = self._sequence[annotations.shape[own[inside]]].tolist()
            pid, _ = self._run.shapes.ids_of(int(self._first[thread]))
            for number, called in zip(numbers, stack[calls[at[inside]]].tolist(), strict=True):
                self._forward[pid or 0, number] = called
        return ranges


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
        shown = [f"{line}, backward" if is_backward else line for line in lines] or [_NO_LINE]
        self._known[stack] = shown
        return shown
