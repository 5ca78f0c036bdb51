"""Numbered lines of a byte stream, some thousands at a time, however long a hostile line is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

CHUNK_BYTES = 1 << 20
# A warp batch of some thousands of warps is under 1 MB. A "line" far beyond that is not text.
LINE_LIMIT_BYTES = 64 << 20
# Editors of other systems put it before the first line.
BOM = b"\xef\xbb\xbf"
# orjson reads 1024 levels and writes 254, its record's own included: what is read must be written again.
DEPTH_LIMIT = 200
TOO_DEEP = f"nests deeper than {DEPTH_LIMIT} levels"
# So many levels need an opening and a closing bracket each: shorter lines need no look.
SHALLOW_BYTES = 2 * DEPTH_LIMIT


class Rejoined:
    """A stream that was read ahead, with those bytes put back in front."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head, self._stream = head, stream

    def read(self, size: int) -> bytes:
        if self._head:
            out, self._head = self._head[:size], self._head[size:]
            return out
        return self._stream.read(size)


def is_too_deep(text: bytes, value: Any) -> bool:
    """Whether `value`, parsed from `text`, nests deeper than DEPTH_LIMIT."""
    if len(text) <= SHALLOW_BYTES or text.count(b"[") + text.count(b"{") <= DEPTH_LIMIT:
        return False
    level = [value]
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


def chunks_of_text(
    stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, bytes, int, bool]]:
    """Yield (number of the first line, whole lines, bytes read so far, cut); the last newline is left out.

    `cut` says that the last line ended with the input and without a newline. A line over `LINE_LIMIT_BYTES`
    is given as its first bytes, so that it fails to parse and is counted as one line.
    """
    first, offset_bytes = 1, 0
    pieces: list[bytes] = []  # of the line that is not at its end yet; joined once, however many
    held_bytes, skipping = 0, False
    while chunk := stream.read(chunk_bytes):
        offset_bytes += len(chunk)
        whole, newline, tail = chunk.rpartition(b"\n")
        if newline:
            if skipping:
                pieces = [pieces[0], whole[whole.find(b"\n") :] if b"\n" in whole else b""]
            else:
                pieces.append(whole)
            text = b"".join(pieces)
            yield first, text, offset_bytes, False
            first += text.count(b"\n") + 1
            pieces, held_bytes, skipping = [tail], len(tail), False
        elif not skipping:
            pieces.append(tail)
            held_bytes += len(tail)
        if held_bytes > LINE_LIMIT_BYTES and not skipping:
            pieces, skipping = [b"".join(pieces)[:256]], True
    if rest := b"".join(pieces):
        yield first, rest, offset_bytes, True


def chunks_of_lines(
    stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, list[bytes], int, bool]]:
    """`chunks_of_text` with the text as a list of lines."""
    for first, text, offset_bytes, cut in chunks_of_text(stream, chunk_bytes):
        yield first, text.split(b"\n"), offset_bytes, cut
