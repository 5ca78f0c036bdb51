"""Writes PNG files some rows of dots at a time, so that a picture may be of any height."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from tracepipe.reports.frames.libraries import np

DOTS_PER_INCH = 150
_DOTS_PER_METRE = round(DOTS_PER_INCH / 0.0254)
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Bits of a colour, red with green and blue, and what else IHDR has: compression, filters, no interlace.
_FORMAT = (8, 2, 0, 0, 0)
_UNIT_METRE = 1
# Each row is what it differs by from the one above, which is little in a picture of lines and areas.
_FILTER_UP = 2
_ROWS_AT_ONCE = 64


def write_png(out: BinaryIO, width: int, heights: list[int], parts: Iterable[Any]) -> None:
    """Write parts below each other: arrays of (height, width, 3) bytes, whose heights are known before."""
    out.write(_SIGNATURE + _chunk(b"IHDR", struct.pack(">IIBBBBB", width, sum(heights), *_FORMAT)))
    out.write(_chunk(b"pHYs", struct.pack(">IIB", _DOTS_PER_METRE, _DOTS_PER_METRE, _UNIT_METRE)))
    for data in _compressed(width, parts):
        if data:
            out.write(_chunk(b"IDAT", data))
    out.write(_chunk(b"IEND", b""))


def _compressed(width: int, parts: Iterable[Any]) -> Iterator[bytes]:
    """The rows as a stream of zlib."""
    packing, above = zlib.compressobj(), np.zeros((1, width * 3), np.uint8)
    for part in parts:
        for first in range(0, len(part), _ROWS_AT_ONCE):
            rows = part[first : first + _ROWS_AT_ONCE].reshape(-1, width * 3)
            filtered = np.full((len(rows), 1 + width * 3), _FILTER_UP, np.uint8)
            filtered[:, 1:] = rows - np.concatenate([above, rows[:-1]])
            above = rows[-1:].copy()
            yield packing.compress(filtered.data)
        # Not to have it in memory while the next one is drawn.
        del part, rows
    yield packing.flush()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
