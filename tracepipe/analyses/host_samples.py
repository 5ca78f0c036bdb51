"""What threads executed at any time, from samples of their stacks and the stacks where they left a processor.

    on a processor   ────────●──────────●─────┐              ┌──●────
    samples                  ●          ●     │              │  ●
    off it                                    └── its stack ─┘
    stack            ◀── first ──▶◀── second ─▶◀── exact ────▶

Off a processor a thread has one stack, which is known exactly. On it, a time has the stack of the nearest
sample: of a stretch in question, one inside it before any outside. A sample that is further away than the
time between two samples says nothing; there the stack counts with which the thread left its processor next,
if that is so near.
"""

from __future__ import annotations

import re
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.event.columns import NONE, Bools, Int64s, distinct
from tracepipe.event.groups import RowsByNumber
from tracepipe.event.intervals import Stretches
from tracepipe.event.stacks import Frame, Stacks
from tracepipe.event.vocabulary import OFF_CPU, UNKNOWN_CODE
from tracepipe.store.run import Run
from tracepipe.store.schema import INSTANT, NO_BEGIN

LAYER: Final = "host_sample"
_HZ: Final = 199  # where the recording does not state it
_INTERPRETER: Final = re.compile(r"(?:^|/)(?:lib)?python3?[\d.]*(?:t?\.so[\d.]*)?$")
_COLLECTS: Final = re.compile(
    r"gc_|visit_|\w+_traverse$|deduce_unreachable|subtract_refs|untrack_|move_unreach"
)
# Where a program takes its next batch: of PyTorch, TensorFlow, DALI and Grain.
_LOADERS: Final = re.compile(
    r"(?:^|/)(?:torch/utils/data/dataloader|tensorflow/python/data/ops/iterator_ops|nvidia/dali/plugin/.+"
    r"|grain/.+)\.py$"
)
_TAKES_NEXT: Final = re.compile(r"(?:.*\.)?__next__$")
_MODULE: Final = re.compile(
    r"(?:.*/(?:site|dist)-packages/|.*/lib(?:64)?/python\d[\d.]*/|<frozen )(.+?)(?:\.py|>)$"
)


class Pieces(NamedTuple):
    """Stretches of time, cut where the stack changes: columns of shape `(pieces,)` in the order of time.
    `stretch` is the index of a stretch, `stack` NONE where it is not known. `waits`: it could not run on.
    """

    stretch: Int64s
    start_ns: Int64s
    end_ns: Int64s
    stack: Int64s
    waits: Bools


class HostSamples:
    """The samples of a recording by thread, which are numbers as in `run.shapes.threads`."""

    def __init__(self, run: Run) -> None:
        layer = run.layer(LAYER)
        self.any = len(layer) > 0 and layer.stack is not None
        """Whether there are any stacks."""
        hz = run.facts.header.options.get("host_sample_hz", _HZ)
        self.period_ns = round(1e9 / hz) if isinstance(hz, int) and 0 < hz <= 100_000 else round(1e9 / _HZ)
        """The time between two samples of a processor."""
        thread = run.shapes.threads[0][layer.shape] if self.any else np.empty(0, np.int64)
        kind = layer.kind if self.any else thread
        on, off = np.flatnonzero(kind == INSTANT), np.flatnonzero((kind != INSTANT) & (kind != NO_BEGIN))
        self._layer: Any = layer
        self._waits = run.shapes.column("name") == run.shapes.number_of("name", OFF_CPU)
        """By shape."""
        self._on, self._off = RowsByNumber(thread[on], on), RowsByNumber(thread[off], off)
        self.threads = distinct(thread)
        """The threads that have any."""
        self._stacks = run.stacks

    @cached_property
    def loads(self) -> Bools:
        """Flags the stacks in which the program takes its next batch of data, as `loading_stacks` does."""
        return loading_stacks(self._stacks)

    def samples(self, thread: int) -> tuple[Int64s, Int64s]:
        """The times and stacks of the samples of a thread while it ran. Shapes `(samples,)`."""
        rows = self._on.of(thread)
        return self._layer.start_ns[rows], self._layer.stack[rows].astype(np.int64)

    def pieces(self, thread: int, start_ns: Int64s, end_ns: Int64s) -> Pieces:
        """Some stretches of a thread, which are sorted and do not overlap, by its stack."""
        on_ns, on_stack = self.samples(thread)
        rows = self._off.of(thread)
        off_ns, back_ns = self._layer.start_ns[rows], self._layer.end_ns[rows]
        off_stack = np.append(self._layer.stack[rows].astype(np.int64), NONE)
        middles = on_ns[:-1] + np.diff(on_ns) // 2
        edges = distinct(np.concatenate([start_ns, off_ns, back_ns, middles]))
        stretch = np.searchsorted(start_ns, edges, "right") - 1
        inside = (stretch >= 0) & (edges < np.append(end_ns, 0)[stretch])
        at_ns, stretch = edges[inside], stretch[inside]
        until_ns = np.minimum(np.append(at_ns[1:], np.iinfo(np.int64).max), end_ns[stretch])
        last_off = np.searchsorted(off_ns, at_ns, "right") - 1
        is_off = at_ns < np.append(back_ns, np.iinfo(np.int64).min)[last_off]
        stack = np.where(is_off, off_stack[last_off], NONE)
        next_ns = np.append(off_ns, np.iinfo(np.int64).max)[last_off + 1]
        stack = np.where(~is_off & (next_ns - at_ns <= self.period_ns), off_stack[last_off + 1], stack)
        if len(on_ns):
            nearest = np.searchsorted(middles, at_ns, "right")
            first = np.searchsorted(on_ns, start_ns[stretch], "left")
            last = np.searchsorted(on_ns, end_ns[stretch], "left") - 1
            is_inside = last >= first
            nearest = np.where(is_inside, np.clip(nearest, first, np.maximum(first, last)), nearest)
            apart_ns = np.maximum(at_ns - on_ns[nearest], on_ns[nearest] - until_ns)
            counts = ~is_off & (is_inside | (apart_ns <= self.period_ns))
            stack = np.where(counts, on_stack[nearest], stack)
        waits = np.append(self._waits[self._layer.shape[rows]], False)[last_off]
        return Pieces(stretch, at_ns, until_ns, stack, is_off & waits)

    def loading(self, thread: int, start_ns: Int64s, end_ns: Int64s) -> Stretches:
        """When a thread takes its next batch of data, in those of some stretches, as of `pieces`, that have
        samples.
        """
        known_ns = np.sort(np.append(self.samples(thread)[0], self._layer.start_ns[self._off.of(thread)]))
        first, last = np.searchsorted(known_ns, start_ns), np.searchsorted(known_ns, end_ns)
        pieces = self.pieces(thread, start_ns, end_ns)
        loads = self.loads[pieces.stack] & (first < last)[pieces.stretch]
        return Stretches(pieces.start_ns[loads], pieces.end_ns[loads])


def loading_stacks(stacks: Stacks) -> Bools:
    """Flags stacks in which the program takes its next batch of data. The last place is for no stack."""
    loads = np.array(
        [
            one.file is not None
            and _TAKES_NEXT.match(one.function) is not None
            and _LOADERS.search(one.file) is not None
            for one in stacks.frames
        ],
        np.bool_,
    )
    stack, _, frame = stacks.rows()
    found = np.zeros(len(stacks) + 1, np.bool_)
    found[stack[loads[frame]]] = True
    return found


def place_of(stacks: Stacks, stack: int, *, waits: bool) -> str:
    """What a stack executes, and the user's line that called it: `json.loads at load.py:31 step`. The line
    alone where its own code executes, or the interpreter for it. `waits`: as in `Pieces`.
    """
    frames = [stacks.frames[at] for at in stacks.frames_of(stack)]
    (own,) = (stacks.frames[at] for at in stacks.own(np.array([stack])).tolist())
    inner = frames[: frames.index(own)]
    if any(is_interpreter(one) and _COLLECTS.match(one.function) for one in inner):
        return f"garbage collection at {own}"
    inner = [one for one in inner if not is_interpreter(one)]
    if not inner:
        return str(own)
    callee = inner[-1]
    if callee.file == UNKNOWN_CODE:  # its native callers are not known: what waits is the innermost function
        return f"{function_of(inner[0]) if waits else 'native code'} at {own}"
    return f"{function_of(callee)} at {own}"


def is_interpreter(frame: Frame) -> bool:
    """Whether a frame is native code of the Python interpreter itself."""
    return frame.line is None and frame.file is not None and _INTERPRETER.search(frame.file) is not None


def function_of(frame: Frame) -> str:
    """A function with its module, as far as its file shows it: `json.loads`, `libc.so.6: read`."""
    if frame.line is not None and frame.file and (found := _MODULE.match(frame.file)):
        return f"{found[1].replace('/', '.').removesuffix('.__init__')}.{frame.function}"
    if frame.line is None and frame.file:
        name = frame.file.rpartition("/")[2]
        return name if frame.function in ("unknown", name) else f"{name}: {frame.function}"
    return frame.function
