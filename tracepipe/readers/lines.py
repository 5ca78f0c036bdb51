"""Numbered lines of a byte stream, some thousands at a time, however long a hostile line is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

CHUNK_BYTES = 1 << 20
# A warp batch of some thousands of warps is under 1 MB. A "line" far beyond that is not text.
LINE_LIMIT_BYTES = 64 << 20


def chunks_of_lines(
    stream: BinaryIO, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, list[bytes], int, bool]]:
    """Yield (number of the first line, whole lines without their newline, bytes read so far, cut).

    `cut` says that the last line of that list ended with the input and without a newline. A line over
    `LINE_LIMIT_BYTES` is given as its first bytes, so that it fails to parse and is counted as one line.
    """
    first, carry, offset_bytes = 1, b"", 0
    skipping = False
    while chunk := stream.read(chunk_bytes):
        offset_bytes += len(chunk)
        lines = chunk.split(b"\n")
        if skipping:
            if len(lines) == 1:
                continue
            lines[0], skipping = carry, False
        else:
            lines[0] = carry + lines[0]
        carry = lines.pop()
        if len(carry) > LINE_LIMIT_BYTES:
            carry, skipping = carry[:256], True
        if lines:
            yield first, lines, offset_bytes, False
            first += len(lines)
    if carry:
        yield first, [carry], offset_bytes, True
