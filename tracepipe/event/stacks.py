"""The stacks of a recording: each frame is kept once, and each stack as the numbers of its frames."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from tracepipe.event.columns import NONE, Bools, EventColumns, Int32s, Int64s, distinct
from tracepipe.event.model import AUTOGRAD, Record, cut_text
from tracepipe.event.shape import Shape, ShapeColumn

if TYPE_CHECKING:
    from tracepipe.event.tables import Tables

# What is kept of a recording: some 10 MB at most. A training run has some thousand stacks and frames.
STACKS_MAX: Final = 1 << 15
FRAMES_MAX: Final = 1 << 14
PLACES_MAX: Final = 1 << 20
TEXT_BYTES_MAX: Final = 2 << 20
# A deeper stack is cut to this many frames at its inner end.
DEPTH_MAX: Final = 256
_TEXT_BYTES_MAX: Final = 4096  # so few long texts do not take the room of all others
_FRAME_BYTES = 64  # a frame takes some memory, however short its texts are
# The files of code that no user wrote: Python's own modules, installed packages, PyTorch where it runs from
# its sources, and what torch.compile generates.
_LIBRARY: Final = re.compile(
    r"/(?:site|dist)-packages/|/lib(?:64)?/python\d[\d.]*/|^<frozen |^<eval_with_key>"
    r"|(?:^|/)torchinductor_|/c[a-z2-7]{51}\.py$"
    # Native code: the interpreter, libraries, extension modules.
    r"|^(?:/usr)?/lib|/bin/python\d[\d.]*$|\.so(?:\.\d+)*$|^\["
    r"|(?:^|/)torch/(?:_|nn/|optim/|autograd/|utils/|cuda/|distributed/|fx/|functional\.py|overrides\.py|jit/)"
)
_TRITON_LAUNCHER: Final = "<string>", "launcher"


class Frame(NamedTuple):
    """A frame of a stack; `file` and `line` are None where they are not recorded."""

    function: str
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        """`models/net.py:41 forward`: the file with its folder."""
        if not self.file:
            return self.function
        place = "/".join(self.file.split("/")[-2:]).lstrip("/")
        return f"{place} {self.function}" if self.line is None else f"{place}:{self.line} {self.function}"

    @property
    def is_library(self) -> bool:
        """Whether its file is one of Python's own modules, of an installed package or generated; or it stands
        for autograd.
        """
        if self.function == AUTOGRAD:
            return True
        if self.file is None or (self.file, self.function) == _TRITON_LAUNCHER:
            return self.file is not None
        return _LIBRARY.search(self.file) is not None


class Stacks:
    """Numbers the stacks of a recording in the order in which they are read."""

    def __init__(self) -> None:
        self.left_out = 0
        """Stacks for which there was no room."""
        self.frames: list[Frame] = []
        """By number."""
        self.is_library: list[bool] = []
        """By number of a frame."""
        self._numbers: dict[int, int] = {}
        """By id."""
        self._frame_numbers: dict[Frame, int] = {}
        self._text_bytes = 0
        self._lines, self._ends, self._omitted = array("q"), array("q"), array("q")
        self._own = array("i")
        """By stack: the frame of the user's line."""
        self._places = array("i")
        """The frames of all stacks, one stack after the other; `_ends` has where each ends."""

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, record: Record, line: int) -> bool:
        """Add a good record of a stack and its line. Return False where another stack has its id."""
        if record["id"] in self._numbers:
            return False
        frames = [
            Frame(
                cut_text(one["function"], _TEXT_BYTES_MAX),
                cut_text(one["file"], _TEXT_BYTES_MAX) if "file" in one else None,
                one.get("line"),
            )
            for one in record["frames"][:DEPTH_MAX]
        ]
        omitted = record.get("omitted", 0) + len(record["frames"]) - len(frames)
        if self._keep(frames, line, omitted):
            self._numbers[record["id"]] = len(self) - 1
        return True

    def restore(
        self, frames: list[Frame], is_library: list[bool], stack: Int32s, frame: Int32s, omitted: list[int]
    ) -> None:
        """Add the frames and stacks of another table, which is empty so far: `stack` and `frame` have a row
        for each frame of a stack, innermost first.
        """
        self.frames, self.is_library = frames, is_library
        self._omitted.extend(omitted)
        self._places.frombytes(frame.astype(np.int32).tobytes())
        ends = np.cumsum(np.bincount(stack, minlength=len(omitted)))[: len(omitted)].astype(np.int64)
        self._ends.frombytes(ends.tobytes())
        for start, end in pairwise([0, *ends.tolist()]):
            self._own.append(self._own_frame(self._places[start:end]))

    def put(self, frames: list[Frame]) -> int:
        """Add a stack, innermost frame first, and return its number, NONE where there is no room for it."""
        kept = [
            frame._replace(function=cut_text(frame.function, _TEXT_BYTES_MAX)) for frame in frames[:DEPTH_MAX]
        ]
        return len(self) - 1 if self._keep(kept, 0, len(frames) - len(kept)) else NONE

    def take(self, other: Stacks, number: int) -> int:
        """Add a stack of another recording and return its number here, NONE where there is no room for it."""
        frames = [other.frames[frame] for frame in other.frames_of(number)]
        return len(self) - 1 if self._keep(frames, 0, other.omitted(number)) else NONE

    def _keep(self, frames: list[Frame], line: int, omitted: int) -> bool:
        """Add a stack where there is room for it, and return whether there is."""
        found = [self._frame(frame) for frame in frames]
        numbers = [number for number in found if number is not None]
        has_room = len(self) < STACKS_MAX and len(self._places) + len(frames) <= PLACES_MAX
        if not has_room or len(numbers) < len(frames):
            self.left_out += 1
            return False
        self._places.extend(numbers)
        self._own.append(self._own_frame(numbers))
        self._lines.append(line)
        self._ends.append(len(self._places))
        self._omitted.append(omitted)
        return True

    def _own_frame(self, numbers: Sequence[int]) -> int:
        innermost = numbers[0] if numbers else NONE
        return next((number for number in numbers if not self.is_library[number]), innermost)

    def _frame(self, frame: Frame) -> int | None:
        """The number of a frame; None where there is no room for it."""
        number = self._frame_numbers.get(frame)
        if number is not None:
            return number
        size = len(frame.function) + len(frame.file or "") + _FRAME_BYTES
        if len(self.frames) >= FRAMES_MAX or self._text_bytes + size > TEXT_BYTES_MAX:
            return None
        self._text_bytes += size
        self._frame_numbers[frame] = len(self.frames)
        self.frames.append(frame)
        self.is_library.append(frame.is_library)
        return len(self.frames) - 1

    def numbers(self, ids: Int64s, lines: Int64s) -> tuple[Int64s, Bools]:
        """The numbers of the stacks with these ids, and which ids no stack has on a line before its own, of
        `lines`.
        """
        known = distinct(ids)
        of_known = np.array([self._numbers.get(id, NONE) for id in known.tolist()], np.int64)
        numbers = of_known[np.searchsorted(known, ids)] if len(known) else ids
        written = np.frombuffer(self._lines or array("q", [0]), np.int64)[numbers]
        is_late = (numbers != NONE) & (written > lines)
        # An unknown stack may be one of those that were left out.
        unknown = is_late | ((numbers == NONE) & (ids != NONE) & (self.left_out == 0))
        return np.where(is_late, NONE, numbers), unknown

    def rows(self) -> tuple[Int64s, Int64s, Int32s]:
        """For each frame of each stack: the number of the stack, the place in it, the number of the frame."""
        ends, frames = np.array(self._ends, np.int64), np.array(self._places, np.int32)
        depths = np.diff(ends, prepend=0)
        stack = np.repeat(np.arange(len(ends)), depths)
        return stack, np.arange(len(frames)) - np.repeat(ends - depths, depths), frames

    def frames_of(self, number: int) -> array[int]:
        """The numbers of a stack's frames, innermost first."""
        return self._places[self._ends[number - 1] if number else 0 : self._ends[number]]

    def omitted(self, number: int) -> int:
        """The number of frames that are left out at a stack's outer end."""
        return self._omitted[number]

    def own(self, stacks: Int64s | Int32s) -> Int64s:
        """For each stack the number of its innermost frame in the user's code, else of its innermost frame;
        NONE without one.
        """
        # The last place is for no stack.
        own: Int64s = np.append(np.frombuffer(self._own, np.int32) if self._own else [], NONE)[stacks]
        return own.astype(np.int64)


# A power of two. Ids of launches are consecutive numbers: this many of the last ones have a place each.
LAUNCHES_MAX = 1 << 16
_NEITHER, _CALL, _WORK = range(3)


class LaunchStacks:
    """Remembers the stacks of the last launches. In the file, a call comes before its work."""

    def __init__(self, tables: Tables) -> None:
        def part_of(shape: Shape, _: int) -> int:
            if not shape.has_launch or shape.phase == "E":
                return _NEITHER
            return _WORK if shape.on_stream else _CALL

        self._parts = ShapeColumn(tables, part_of, np.uint8)
        self._launches: Int64s = np.zeros(0, np.int64)
        self._stacks: Int64s = np.zeros(0, np.int64)
        """Indexed by the lower bits of a launch's id; empty until the first stack is read."""

    def give(self, events: EventColumns) -> None:
        """Set the stacks of the kernels and copies of a batch."""
        if events.stack is None and not len(self._stacks):
            return
        part = self._parts.values()[events.shape]
        at = np.flatnonzero(part)
        if not len(at):
            return
        if not len(self._stacks):
            self._launches = np.zeros(LAUNCHES_MAX, np.int64)
            self._stacks = np.full(LAUNCHES_MAX, NONE, np.int64)
        stack = np.full(len(events), NONE, np.int64) if events.stack is None else events.stack.copy()
        calls = part[at] == _CALL
        found = self._last(events.launch[at], calls, stack[at])
        is_bare = ~calls & (stack[at] == NONE)
        stack[at[is_bare]] = found[is_bare]
        events.stack = stack

    def _last(self, launches: Int64s, calls: Bools, stacks: Int64s) -> Int64s:
        """The stack of the last call with the same id before each event. The last calls are remembered."""
        places = launches & (LAUNCHES_MAX - 1)
        order = np.argsort(places, kind="stable")
        launches, calls, stacks, places = launches[order], calls[order], stacks[order], places[order]
        every = np.arange(len(order))
        last = np.maximum.accumulate(np.where(calls, every, NONE))
        is_first = np.diff(places, prepend=NONE) != 0
        last[last < np.maximum.accumulate(np.where(is_first, every, 0))] = NONE
        id = np.where(last == NONE, self._launches[places], launches[last])
        of_last = np.where(last == NONE, self._stacks[places], stacks[last])
        found = np.empty_like(of_last)
        found[order] = np.where(id == launches, of_last, NONE)
        ends = np.append(is_first[1:], True) & (last != NONE)
        self._launches[places[ends]], self._stacks[places[ends]] = id[ends], of_last[ends]
        return found
