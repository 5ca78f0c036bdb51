"""Finds the GPU code in a file: cubins, fat binaries, and fat binaries that are linked into programs.

nvcc puts one or several fat binaries into a program's section `.nv_fatbin`, one after the other, each with
GPU code for some architectures. NVIDIA does not document the layout; this is what CUDA 11 to 13 write
(offsets in bytes; https://github.com/n-eiling/cuda-fatbin-decompression states the same):

    fat binary   0 magic u32 │ 4 version u16 │ 6 header bytes u16 │ 8 bytes of the entries u64
    entry        0 kind u16: 1 PTX, 2 cubin │ 4 header bytes u32 │ 8 bytes u64 │ 16 compressed bytes u32
                 28 architecture u32 │ 40 flags u64 │ 56 bytes when decompressed u64
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tracepipe import paths
from tracepipe.errors import InputError
from tracepipe.tracer.find.elf import Elf
from tracepipe.units import counted

_MAGIC = b"\x50\xed\x55\xba"
_FAT = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_CUBIN, _PTX = 2, 1
_LZ4, _ZSTD = 0x2000, 0x8000
_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BYTES_MAX = 1 << 30
"""The greatest size of a decompressed cubin; NVIDIA's largest have about 10 MB."""


def files_with_kernels(path: str) -> list[str]:
    """The file itself, or the cubins in a folder such as Triton's cache. Raises InputError."""
    if not paths.is_folder(path):
        return [path]
    found = sorted(str(file) for file in Path(path).rglob("*.cubin") if paths.is_file(file))
    if not found:
        raise InputError("a folder without cubins", "Give a program, a library or a .cubin file.", path=path)
    return found


def cubins(path: str, notify: Callable[[str], None]) -> Iterator[bytes]:
    """The cubins in a file. `notify` gets messages about what cannot be read. Raises InputError."""
    with _mapped(path) as data:
        if data[:4] == _MAGIC:
            yield from _in_fat_binaries(data, 0, len(data), path, notify)
            return
        with Elf(path) as elf:
            if elf.is_gpu_code:
                yield data[:]
                return
            sections = [elf.sections[name] for name in _SECTIONS if name in elf.sections]
        for section in sections:
            end = min(section.offset + section.size, len(data))
            yield from _in_fat_binaries(data, section.offset, end, path, notify)


@contextmanager
def _mapped(path: str) -> Iterator[mmap.mmap]:
    try:
        with Path(path).open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", "Check the path.", path=path) from None
    except ValueError:
        raise InputError("empty file", "Give a program, a library or a .cubin file.", path=path) from None
    try:
        yield data
    finally:
        data.close()


def _in_fat_binaries(
    data: mmap.mmap, start: int, end: int, path: str, notify: Callable[[str], None]
) -> Iterator[bytes]:
    unknown, only_ptx = 0, 0
    while (start := data.find(_MAGIC, start, end)) >= 0 and start + _FAT.size <= end:
        _, _, header_bytes, size = _FAT.unpack_from(data, start)
        at, start = start + header_bytes, start + header_bytes + size
        cubin_count = ptx_count = 0
        while at + _ENTRY.size <= min(start, end):
            kind, _, head, entry_bytes, packed, *_, flags, _, whole = _ENTRY.unpack_from(data, at)
            body = data[at + head : min(at + head + entry_bytes, end)]
            at += head + entry_bytes
            ptx_count += kind == _PTX
            if kind == _CUBIN:
                cubin_count += 1
                cubin = _decompressed(body[: packed or None], flags, whole)
                unknown += cubin is None
                if cubin is not None:
                    yield cubin
            if head + entry_bytes <= 0:
                break
        only_ptx += ptx_count > 0 and not cubin_count
    if unknown:
        words = "cubin|cubins is|are damaged, or its|their compression is unknown"
        notify(f"{path}: {counted(unknown, words)}")
    if only_ptx:
        words = (
            "part|parts is|are PTX, which the driver compiles at run time: its|their kernels are not listed"
        )
        notify(f"{path}: {counted(only_ptx, words)}")


def _decompressed(data: bytes, flags: int, size: int) -> bytes | None:
    """The cubin; None where it cannot be decompressed."""
    if not flags & (_LZ4 | _ZSTD):
        return data
    if size > _BYTES_MAX:
        return None
    if flags & _ZSTD or data[:4] == _ZSTD_MAGIC:
        import zstandard  # here, as it is rarely needed

        try:
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        except zstandard.ZstdError:
            return None
    try:
        return lz4_block(data, size)
    except IndexError:
        return None


def lz4_block(data: bytes, size: int) -> bytes:
    """Decompress a block of LZ4. Raises IndexError where it is damaged.

    A block is a sequence of a token, literals, and a match in the output so far (https://lz4.org, Block
    Format):

        token: literals in the upper four bits, length of the match − 4 in the lower; 15: more bytes follow
    """
    out, at = bytearray(), 0

    def length(first: int, at: int) -> tuple[int, int]:
        total = first
        if first == 15:
            while True:
                total, at = total + data[at], at + 1
                if data[at - 1] != 255:
                    break
        return total, at

    while at < len(data):
        token, at = data[at], at + 1
        count, at = length(token >> 4, at)
        out += data[at : at + count]
        at += count
        if at >= len(data) or len(out) > size:
            break
        back, at = data[at] | data[at + 1] << 8, at + 2
        count, at = length(token & 15, at)
        start = len(out) - back
        if not 0 <= start < len(out):
            raise IndexError
        for place in range(start, start + count + 4):
            out.append(out[place])
    if len(out) != size:
        raise IndexError
    return bytes(out)
