"""Reads numbered lines of a byte stream, some thousands at a time. Hostile lines may have any length."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from tracepipe.event.model import STALLS

CHUNK_BYTES = 1 << 20
# An event has some hundred bytes. A much longer line is not an event, and parsing it would take memory.
LINE_LIMIT_BYTES = 1 << 20
# A launch of a million warps may be one line, which has its type near its start.
WARPS_LIMIT_BYTES = 64 << 20
_WARPS, _HEAD_BYTES = b'"gpu_warp"', 256
# Types of records that are not events of a thread, a stream or a lane, or that become an event of another
# type.
OTHERS = frozenset(
    {"header", "footer", "clock", "loss", "window", "stack", "name", "gpu_warp", "gpu_thread_exit", *STALLS}
)
# Editors on other systems put it before the first line.
BOM = b"\xef\xbb\xbf"
# orjson reads 1024 levels and writes 254, with the record's own level. What is read must be writable.
DEPTH_LIMIT = 200
TOO_DEEP = f"nests deeper than {DEPTH_LIMIT} levels"
# Each level needs an opening and a closing bracket: shorter lines need not be checked.
SHALLOW_BYTES = 2 * DEPTH_LIMIT


class Rejoined:
    """A stream of which `head` was read already, with these bytes before the rest."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        if self._head:
            out, self._head = self._head[:size], self._head[size:]
            return out
        return self._stream.read(size)


def not_json(error: json.JSONDecodeError) -> str:
    """The message for a line that orjson rejected. Raises MemoryError where that was the reason."""
    if error.msg.startswith("Not enough memory"):
        raise MemoryError
    return f"is not JSON: {error.msg} at column {error.colno}"


def is_too_deep(text: bytes, value: object) -> bool:
    """Whether `value`, parsed from `text`, nests deeper than DEPTH_LIMIT."""
    if len(text) <= SHALLOW_BYTES or text.count(b"[") + text.count(b"{") <= DEPTH_LIMIT:
        return False
    level: list[Any] = [value]
    for _ in range(DEPTH_LIMIT):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return False
    return True


def chunks_of_text(stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES) -> Iterator[tuple[bytes, int, bool]]:
    """Yield (whole lines, bytes read so far, cut); the last newline is left out.

    `cut` is whether the last line ended with the input, without a newline. A line over the limit is given as
    its first bytes, so that it fails to parse and counts as one line.
    """
    offset_bytes = 0
    pieces: list[bytes] = []  # of the line that has not ended yet, which are joined once
    held_bytes, skipping = 0, False
    while chunk := stream.read(chunk_bytes):
        offset_bytes += len(chunk)
        end = chunk.rfind(b"\n")
        if end >= 0:
            start = 0
            if skipping:
                start = chunk.find(b"\n")
                pieces = [pieces[0]]
            view = memoryview(chunk)
            yield b"".join([*pieces, view[start:end]]), offset_bytes, False
            pieces, held_bytes, skipping = [chunk[end + 1 :]], len(chunk) - end - 1, False
        elif not skipping:
            pieces.append(chunk)
            held_bytes += len(chunk)
        if held_bytes > LINE_LIMIT_BYTES and not skipping:
            head = b"".join(piece[:_HEAD_BYTES] for piece in pieces[:2])[:_HEAD_BYTES]
            if held_bytes > WARPS_LIMIT_BYTES or _WARPS not in head:
                pieces, skipping = [head], True
    if rest := b"".join(pieces):
        yield rest, offset_bytes, True


def chunks_of_lines(
    stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, list[bytes], int, bool]]:
    """Yield (number of the first line, lines, bytes read so far, cut) as `chunks_of_text`."""
    first = 1
    for text, offset_bytes, cut in chunks_of_text(stream, chunk_bytes):
        lines = text.split(b"\n")
        yield first, lines, offset_bytes, cut
        first += len(lines)
