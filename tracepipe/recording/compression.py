"""Compressed recordings: gzip members or zstd frames, one behind the other, written and read.

    header │ at least 256 KiB of lines, or what came within a second │ … │ the last lines and the footer

Each part is complete in itself and ends with a line, so a file that ends anywhere lacks the part that was
being written, and no other.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

# Larger parts gain nothing: the lines shrink to a 20th or 30th in zstd, to a 10th or 21st in gzip.
PART_BYTES = 1 << 18
# zstd compresses a line in 0.1 µs, gzip in 0.2 to 0.4 µs; to make the line takes 1 µs. Both let other threads
# run meanwhile. Higher levels of gzip take twice the time or more, those of zstd gain nothing on such lines.
_LEVEL = 1
# Compressed bytes that are read at once. They may unfold to a thousand times as many, and damage costs all.
_STEP_BYTES = 1 << 13
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# pzstd puts a skippable frame before each other one (RFC 8878, 3.1.2: 0x184D2A50 to 0x184D2A5F).
_ZSTD_SKIPPABLE = tuple(bytes((first, 0x2A, 0x4D, 0x18)) for first in range(0x50, 0x60))


class DamageError(Exception):
    """Compressed data `is_cut` off, or broken; the text says how."""

    def __init__(self, message: str, *, is_cut: bool = False) -> None:
        super().__init__(message)
        self.is_cut = is_cut


class Decompressed:
    """Decompresses parts, one after the other. Raises DamageError where one is cut off or broken."""

    def __init__(self, raw: BinaryIO, new_part: Callable[[], Any], part_name: str, padding: bytes) -> None:
        """`padding` are bytes that may stand between two parts."""
        self._raw: Any = raw
        self._new_part, self._part_name, self._padding = new_part, part_name, padding
        self._part: Any = None
        self._compressed = b""
        self._ready = b""

    def read1(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        while not self._ready:
            data = self._compressed or self._raw.read1(_STEP_BYTES)
            self._compressed = b""
            if not data and self._part is None:
                return b""
            if not data:
                raise DamageError(f"was cut off in the middle of a {self._part_name}", is_cut=True)
            if self._part is None:
                data = data.lstrip(self._padding)
                self._part = self._new_part() if data else None
            if self._part is not None:
                self._decompress(data)
        out, self._ready = self._ready[:size], self._ready[size:]
        return out

    def _decompress(self, data: bytes) -> None:
        try:
            self._ready = self._part.decompress(data)
        except Exception as error:
            # By its name, as the library is not loaded for gzip.
            if not isinstance(error, zlib.error) and type(error).__name__ != "ZstdError":
                raise
            raise DamageError(str(error)) from error
        if self._part.eof:
            self._compressed, self._part = self._part.unused_data, None


def is_zstd(head: bytes) -> bool:
    """Whether data that starts so is zstd frames."""
    return head.startswith((_ZSTD, *_ZSTD_SKIPPABLE))


def decompressed(raw: BinaryIO, head: bytes) -> Decompressed | None:
    """What reads the content of `raw`, which starts with `head`; None where that is not compressed."""
    if head.startswith(_GZIP):
        # gzip itself passes over zeros behind a member, with which tapes and block devices are filled up.
        return Decompressed(raw, lambda: zlib.decompressobj(wbits=31), "gzip member", b"\0")
    if is_zstd(head):
        import zstandard  # here, as most inputs need it not

        return Decompressed(raw, zstandard.ZstdDecompressor().decompressobj, "zstd frame", b"")
    return None


class _Compressed:
    """A file whose lines are compressed, on the thread that writes them, into parts.

    Whoever writes ends a part with `flush` when it is old, and at a line's end; it ends by itself when it is
    full.
    """

    def __init__(self, file: BinaryIO, compress: Callable[[bytearray], bytes]) -> None:
        self._file, self._compress = file, compress
        self.name = getattr(file, "name", None)
        self._waiting = bytearray()

    def write(self, lines: bytes) -> int:
        """Take whole lines. Raises OSError as the file does."""
        self._waiting += lines
        if len(self._waiting) >= PART_BYTES:
            self.flush()
        return len(lines)

    def flush(self) -> None:
        """Write what waits, as a part that is complete."""
        if self._waiting:
            # Taken off first: a part that the disk had no room for is not written a second time.
            lines, self._waiting = self._waiting, bytearray()
            self._file.write(self._compress(lines))
        self._file.flush()

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()


def compressing(file: BinaryIO, path: str) -> BinaryIO:
    """`file`; where `path`, its name, ends with .gz or .zst, what compresses into it."""
    suffix = Path(path).suffix
    if suffix == ".gz":
        return cast(BinaryIO, _Compressed(file, lambda lines: gzip.compress(lines, _LEVEL, mtime=0)))
    if suffix == ".zst":
        import zstandard  # here, as most outputs need it not

        # The checksum tells a sector that was never written from one that was.
        one = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        return cast(BinaryIO, _Compressed(file, one.compress))
    return file
