"""Writes each Python stack once in the file, before the first event that refers to it.

`native/python_stacks.h` describes the records. A process gives stacks different numbers if they differ in an
instruction within a line. In the file, stacks with the same frames have one id, even of different processes.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from tracepipe.tracer.gpu.engines.transport import KIND_FRAME, KIND_STACK, GpuRecord, text
from tracepipe.tracer.gpu.engines.untrusted import Kept, Malformed
from tracepipe.tracer.records.bounds import COUNT_LIMIT, INDEX_LIMIT

STACK_KINDS: Final = frozenset({KIND_STACK, KIND_FRAME})
STACK: Final = struct.Struct("<QII")
"""number, frames left out, frames; the numbers of these follow."""
FRAME: Final = struct.Struct("<QIHxx")
"""number, line, bytes of the function's name; that and the file's follow."""
_NUMBER_BYTES: Final = 8
_ENTRY_BYTES: Final = 512  # roughly, for each entry without its texts and frames

_Frames = tuple[int, tuple[int, ...]]
"""The number of frames left out, and the numbers of the others."""


class PythonStacks:
    """The stacks of all processes of a recording. Raises Malformed and Crowded."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._places: dict[tuple[int, int], int] = {}
        """Number of a process's frame → its index in `_frames`."""
        self._frames: list[dict[str, Any]] = []
        self._place_of: dict[tuple[str, str, int], int] = {}
        self._stacks: dict[tuple[int, int], _Frames] = {}
        """Number of a process's stack → its frames, by number."""
        self._ids: dict[_Frames, int] = {}
        """Frames, by index → id."""
        self._given: dict[tuple[int, int], int] = {}
        self._new: list[dict[str, Any]] = []

    def take(self, record: GpuRecord) -> None:
        """Take a record of STACK_KINDS: a frame or a stack."""
        if record.kind == KIND_FRAME:
            self._take_frame(record.pid, record.payload)
            return
        number, omitted, frames = STACK.unpack_from(record.payload)
        if omitted > COUNT_LIMIT or STACK.size + _NUMBER_BYTES * frames != len(record.payload):
            raise Malformed
        self._kept.take(_ENTRY_BYTES + 8 * len(record.payload))
        self._given.pop((record.pid, number), None)
        self._stacks[record.pid, number] = (
            omitted,
            struct.unpack_from(f"<{frames}Q", record.payload, STACK.size),
        )

    def id_of(self, pid: int, number: int) -> int | None:
        """The id of a process's stack; None if there is no stack, or if a record of it was lost."""
        if not number:
            return None
        given = self._given.get((pid, number))
        if given is None and (pid, number) in self._stacks:
            given = self._give(pid, number)
        return given

    def take_new(self) -> list[dict[str, Any]]:
        """The records of the stacks whose ids were assigned since the last call."""
        new, self._new = self._new, []
        return new

    def _take_frame(self, pid: int, payload: memoryview) -> None:
        number, line, function_bytes = FRAME.unpack_from(payload)
        file_at = FRAME.size + function_bytes
        if line > INDEX_LIMIT or file_at > len(payload):
            raise Malformed
        self._kept.take(_ENTRY_BYTES + 4 * len(payload))
        frame = text(payload[:file_at], FRAME.size), text(payload, file_at), line
        place = self._places[pid, number] = self._place_of.setdefault(frame, len(self._frames))
        if place == len(self._frames):
            self._frames.append({"function": frame[0], "file": frame[1], "line": line})

    def _give(self, pid: int, number: int) -> int | None:
        omitted, numbers = self._stacks[pid, number]
        places = tuple(self._places.get((pid, frame), -1) for frame in numbers)
        if -1 in places:
            return None
        stack = self._ids.get((omitted, places))
        if stack is None:
            stack = self._ids[omitted, places] = len(self._ids) + 1
            line: dict[str, Any] = {"type": "stack", "id": stack}
            line["frames"] = [self._frames[place] for place in places]
            self._new.append(line | ({"omitted": omitted} if omitted else {}))
        self._given[pid, number] = stack
        return stack
