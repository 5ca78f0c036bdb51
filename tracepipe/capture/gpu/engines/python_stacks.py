"""Stacks of Python: what one is stands once in the file, before the first event that names it.

`native/python_stacks.h` draws the record. A process numbers its stacks by what they are made of, also by the
instruction in a line; here those with the same frames have one id, whatever processes they are of.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any, Final

from tracepipe.capture.gpu.engines.transport import NAME, GpuRecord
from tracepipe.capture.gpu.engines.untrusted import Kept, Malformed
from tracepipe.capture.records.bounds import COUNT_LIMIT, INDEX_LIMIT

STACK: Final = struct.Struct("<QII")
"""number, frames left out, frames."""
FRAME: Final = struct.Struct("<IHH")
"""line, bytes of the function's name, bytes of the file's; both follow."""
_STACK_BYTES: Final = 384  # what is kept takes that much, roughly
_UNUSED: Final = 8  # times what a record has, until the stack stands in the file


class PythonStacks:
    """The stacks of all processes of a recording. Refuses as `untrusted` says."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._digests: dict[tuple[int, int], bytes] = {}
        """Of the frames of a process's stack, by its number there."""
        self._unused: dict[bytes, tuple[int, dict[str, Any]]] = {}
        """What it takes until it stands in the file, and what then stands there."""
        self._ids: dict[bytes, int] = {}
        self._new: list[dict[str, Any]] = []

    def take(self, record: GpuRecord) -> None:
        """Take what a stack of a process is."""
        number, omitted, _ = STACK.unpack_from(record.payload)
        frames = list(_frames(record.payload))
        if omitted > COUNT_LIMIT:
            raise Malformed
        digest = blake2b(record.payload[NAME.size :], digest_size=16).digest()
        is_new = digest not in self._ids and digest not in self._unused
        size_bytes = _UNUSED * len(record.payload)
        self._kept.take(_STACK_BYTES + (size_bytes if is_new else 0))
        self._digests[record.pid, number] = digest
        if is_new:
            said = {"frames": frames} | ({"omitted": omitted} if omitted else {})
            self._unused[digest] = size_bytes, said

    def id_of(self, pid: int, number: int) -> int | None:
        """The id of a stack of that process; None where it has none, or its record was lost."""
        digest = self._digests.get((pid, number)) if number else None
        if digest is None:
            return None
        if digest not in self._ids:
            stack = self._ids[digest] = len(self._ids) + 1
            size_bytes, said = self._unused.pop(digest)
            self._kept.give(size_bytes)
            self._new.append({"type": "stack", "id": stack} | said)
        return self._ids[digest]

    def take_new(self) -> list[dict[str, Any]]:
        """The records of the file that say what the stacks are whose ids were given since the last call."""
        new, self._new = self._new, []
        return new


def _frames(payload: memoryview) -> Iterator[dict[str, Any]]:
    _, _, frames = STACK.unpack_from(payload)
    at = STACK.size
    for _ in range(frames):
        line, function_bytes, file_bytes = FRAME.unpack_from(payload, at)
        at += FRAME.size
        file_at, end = at + function_bytes, at + function_bytes + file_bytes
        if end > len(payload) or line > INDEX_LIMIT:
            raise Malformed
        function, file = (
            bytes(part).decode(errors="replace") for part in (payload[at:file_at], payload[file_at:end])
        )
        yield {"function": function, "file": file, "line": line}
        at = end
