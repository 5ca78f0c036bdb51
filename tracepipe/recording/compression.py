"""Writes and reads recordings that are parts one after the other: plain lines, gzip members or zstd frames.

    header │ at least 256 KiB of lines, or what came within a second │ … │ the last lines and the footer

Each part is complete and ends with a line. So a file that was cut off lacks only the part that was being
written.
"""

from __future__ import annotations

import gzip
import os
import select
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from tracepipe.disk_space import reserve

if TYPE_CHECKING:
    import io

# zstd compresses a line in 0.1 µs, gzip in 0.2 to 0.4 µs; making the line takes 1 µs. Both let other threads
# run meanwhile. Higher levels of gzip take twice the time or more. Those of zstd gain nothing on such lines.
_LEVEL = 1
_READ_BYTES = 1 << 13
# Compressed bytes are taken in steps of this size; damage loses a whole step. Four bytes of zstd may give 128
# KiB, so a step of zstd gives at most 4 MiB, and one of gzip 128 KiB.
_STEP_BYTES = 1 << 7
# A frame that needs more memory to be read is rejected. Frames of zstd -19 need this much.
_WINDOW_BYTES = 8 << 20
_LAST_BYTES = 1 << 15  # for the footer with every processor's losses, and the loss before it
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# pzstd puts a skippable frame before each frame (RFC 8878, 3.1.2: 0x184D2A50 to 0x184D2A5F).
_ZSTD_SKIPPABLE = tuple(bytes((first, 0x2A, 0x4D, 0x18)) for first in range(0x50, 0x60))


class DamageError(Exception):
    """Compressed data is cut off (`is_cut`) or broken; the text states how."""

    def __init__(self, message: str, *, is_cut: bool = False) -> None:
        super().__init__(message)
        self.is_cut = is_cut


class Decompressed:
    """Decompresses parts, one after the other. Raises DamageError where one is cut off or broken."""

    def __init__(self, raw: BinaryIO, new_part: Callable[[], Any], part_name: str, padding: bytes) -> None:
        """`padding` are bytes that may be between two parts."""
        self._raw: Any = raw
        self._new_part, self._part_name, self._padding = new_part, part_name, padding
        self._part: Any = None
        self._compressed = memoryview(b"")
        self._ready = memoryview(b"")

    def read1(self, size: int) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        while not self._ready:
            if not self._compressed:
                self._compressed = memoryview(self._raw.read1(_READ_BYTES))
            data, self._compressed = self._compressed[:_STEP_BYTES], self._compressed[_STEP_BYTES:]
            if not data and self._part is None:
                return b""
            if not data:
                raise DamageError(f"was cut off in the middle of a {self._part_name}", is_cut=True)
            if self._part is None and self._padding:
                data = memoryview(bytes(data).lstrip(self._padding))
            if not data:
                continue
            if self._part is None:
                self._part = self._new_part()
            try:
                self._ready = memoryview(self._part.decompress(data))
            except Exception as error:
                # The error is recognized by its name, as the library is not loaded for gzip.
                if not isinstance(error, zlib.error) and type(error).__name__ != "ZstdError":
                    raise
                raise DamageError(str(error)) from error
            if self._part.eof:
                rest, self._part = self._part.unused_data, None
                if rest:
                    self._compressed = memoryview(rest + self._compressed)
        out, self._ready = self._ready[:size], self._ready[size:]
        return bytes(out)


def is_zstd(head: bytes) -> bool:
    """Whether data that starts with `head` is zstd frames."""
    return head.startswith((_ZSTD, *_ZSTD_SKIPPABLE))


def decompressed(raw: BinaryIO, head: bytes) -> Decompressed | None:
    """A reader for the content of `raw`, which starts with `head`; None where it is not compressed."""
    if head.startswith(_GZIP):
        # gzip itself ignores zeros after a member, with which tapes and block devices are padded.
        return Decompressed(raw, lambda: zlib.decompressobj(wbits=31), "gzip member", b"\0")
    if is_zstd(head):
        import zstandard  # here, as most inputs do not need it

        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES)
        return Decompressed(raw, reader.decompressobj, "zstd frame", b"")
    return None


class PartWriter:
    """A file of lines that is written in parts, on the thread that makes the lines.

    The writer ends a part with `flush`, at the end of a line. A part that cannot be written whole is removed
    again, so that the file ends with a line. Some room is always reserved, for the footer and for the loss
    that it then reports.
    """

    def __init__(
        self,
        file: BinaryIO | io.RawIOBase,
        compress: Callable[[bytearray], bytes],
        *,
        is_ours: bool,
    ) -> None:
        """`file` is unbuffered. `is_ours`: nobody else writes to it, from its start to its end."""
        self._file, self._compress, self._is_ours = file, compress, is_ours
        self.is_stream = not is_ours
        """Whether the output is read while it is written: it is a pipe or a device."""
        self._waiting = bytearray()
        self._written_bytes = 0
        self._is_full = False

    def write(self, lines: bytes) -> int:
        """Add whole lines, which `flush` writes."""
        self._waiting += lines
        return len(lines)

    def flush(self) -> None:
        """Write the lines that were added as a complete part, or raise OSError and forget them."""
        if not self._waiting:
            return
        lines, self._waiting = self._waiting, bytearray()
        part = self._compress(lines)
        try:
            if self._is_ours and self._written_bytes and not self._is_full:
                reserve(self._file.fileno(), self._written_bytes, len(part) + _LAST_BYTES)
            rest = memoryview(part)
            while rest:
                written = self._file.write(rest)
                if written is None:  # a pipe that another program set to not block: wait for it
                    select.select([], [self._file], [])
                else:
                    rest = rest[written:]
        except OSError:
            self._is_full = True
            if self._is_ours:
                with suppress(OSError):  # a device has no length
                    self._file.truncate(self._written_bytes)
                    self._file.seek(self._written_bytes)
            raise
        self._written_bytes += len(part)

    def close(self) -> None:
        """Write the rest and close the file."""
        try:
            self.flush()
            if self._is_ours:
                with suppress(OSError):
                    self._file.truncate(self._written_bytes)  # without the reserved room
                # Network file systems and failing disks report a failed write only here.
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def compressing(file: BinaryIO | io.RawIOBase, path: str, *, is_ours: bool = True) -> BinaryIO:
    """A writer of parts to an unbuffered file, compressed where `path` ends with .gz or .zst."""
    suffix = Path(path).suffix
    compress: Callable[[bytearray], bytes] = bytes
    if suffix == ".gz":
        compress = partial(gzip.compress, compresslevel=_LEVEL, mtime=0)
    elif suffix == ".zst":
        import zstandard  # here, as most outputs do not need it

        # The checksum detects sectors that were never written.
        compress = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress
    return cast(BinaryIO, PartWriter(file, compress, is_ours=is_ours))
