"""Stacks of calls from slices of Python functions, as PyTorch's profiler writes them in place of stacks.

    train.py(20): step ├──────────────────────┤         each slice is a frame
      model.py(42): forward ├──────────┤
        cudaLaunchKernel        ├─┤                       its stack: model.py:42 forward, train.py:20 step

Slices without a file (`<built-in method …>`, `nn.Module: Linear_0`) are in no stack.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import numpy as np

from tracepipe.event.columns import NONE, Int32s, Int64s
from tracepipe.event.groups import RowsByNumber
from tracepipe.event.stacks import Frame, Stacks

LAYER: Final = "python_function"
_NOT_KNOWN: Final = -2
_FUNCTION: Final = re.compile(r"(.+)\((\d{1,9})\): (.+)", re.DOTALL)


class PythonSlices:
    """The slices of Python functions of a recording, in the order of their ids: columns of shape `(slices,)`.
    `parent` is the place of the innermost slice around each, NONE without one; `thread` and `name` are
    numbers.
    """

    def __init__(
        self, start_ns: Int64s, end_ns: Int64s, parent: Int64s, thread: Int32s, name: Int32s
    ) -> None:
        self._start_ns, self._end_ns, self._parent, self._name = start_ns, end_ns, parent, name
        self._of_thread = RowsByNumber(thread)

    def around(self, thread: Int32s, at_ns: Int64s) -> Int64s:
        """The innermost slice around each time of a thread; NONE without one. Shapes `(n,)`."""
        found = np.full(len(at_ns), NONE, np.int64)
        for number, places in RowsByNumber(thread):
            rows = self._of_thread.of(number)
            before = np.searchsorted(self._start_ns[rows], at_ns[places], "right") - 1
            places, inside = places[before >= 0], rows[before[before >= 0]]
            while len(places):
                has_ended = self._end_ns[inside] <= at_ns[places]
                found[places[~has_ended]] = inside[~has_ended]
                places, inside = places[has_ended], self._parent[inside[has_ended]]
                places, inside = places[inside != NONE], inside[inside != NONE]
        return found

    def stacks(self, slices: Int64s, text: Callable[[int], str], stacks: Stacks) -> Int32s:
        """The numbers of the stacks at some slices, which are added to `stacks`; NONE for NONE, where there
        is no frame, and where there is no room. `text` is the name of a number. Shapes `(n,)`.
        """
        frames: dict[int, Frame | None] = {}
        # A chain is the names of a slice and of those around it: the chain around it, and its own frame.
        chains, links = dict[tuple[int, int], int](), list[tuple[int, Frame]]()
        of_slice = np.full(len(self._parent) + 1, _NOT_KNOWN, np.int32)
        of_slice[NONE] = NONE
        numbers: dict[int, int] = {NONE: NONE}
        wanted, of = np.unique(slices, return_inverse=True)
        found = np.full(len(wanted), NONE, np.int32)
        for at, place in enumerate(wanted.tolist()):
            path = list[int]()
            while (chain := int(of_slice[place])) == _NOT_KNOWN:
                path.append(place)
                place = int(self._parent[place])
            for inner in reversed(path):
                name = int(self._name[inner])
                if name not in frames:
                    frames[name] = frame_of(text(name))
                if (frame := frames[name]) is not None:
                    outer = chain
                    chain = chains.setdefault((outer, name), len(links))
                    if chain == len(links):
                        links.append((outer, frame))
                of_slice[inner] = chain
            if chain not in numbers:
                numbers[chain] = stacks.put(_frames(links, chain))
            found[at] = numbers[chain]
        return found[of]


def _frames(links: list[tuple[int, Frame]], chain: int) -> list[Frame]:
    """The frames of a chain, innermost first."""
    frames = []
    while chain != NONE:
        chain, frame = links[chain]
        frames.append(frame)
    return frames


def frame_of(name: str) -> Frame | None:
    """The frame that the name of a slice says; None for one without a file."""
    found = _FUNCTION.fullmatch(name)
    return Frame(found[3], found[1], int(found[2])) if found else None
