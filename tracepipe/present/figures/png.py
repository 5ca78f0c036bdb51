"""Writes PNG files a few rows of pixels at a time, so a picture may have any height."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from tracepipe.reports.frames.libraries import np

DOTS_PER_INCH = 150
_DOTS_PER_METRE = round(DOTS_PER_INCH / 0.0254)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# The rest of IHDR: bits of each channel, RGB, compression, filters, no interlace.
_FORMAT = (8, 2, 0, 0, 0)
_UNIT_METRE = 1
# Each row is stored as the difference to the row above, which is small in a picture of lines and areas.
_FILTER_UP = 2
_ROWS_AT_ONCE = 64


def write_png(out: BinaryIO, width: int, heights: list[int], parts: Iterable[Any]) -> None:
    """Write parts below each other: uint8 arrays of shape `(height, width, 3)`, whose `heights` are known."""
    out.write(_SIGNATURE + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, sum(heights), *_FORMAT)))
    out.write(_chunk(b"pHYs", struct.pack(">IIB", _DOTS_PER_METRE, _DOTS_PER_METRE, _UNIT_METRE)))
    for data in _compressed(width, parts):
        if data:
            out.write(_chunk(b"IDAT", data))
    out.write(_chunk(b"IEND", b""))


def _compressed(width: int, parts: Iterable[Any]) -> Iterator[bytes]:
    """The filtered rows as a zlib stream."""
    packing, above = zlib.compressobj(), np.zeros((1, width * 3), np.uint8)
    for part in parts:
        for first in range(0, len(part), _ROWS_AT_ONCE):
            rows = part[first : first + _ROWS_AT_ONCE].reshape(-1, width * 3)
            filtered = np.full((len(rows), 1 + width * 3), _FILTER_UP, np.uint8)
            filtered[:, 1:] = rows - np.concatenate([above, rows[:-1]])
            above = rows[-1:].copy()
            yield packing.compress(filtered.data)
        # Free its memory before the next one is drawn.
        del part, rows
    yield packing.flush()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
