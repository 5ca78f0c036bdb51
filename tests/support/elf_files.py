"""Small ELF files made by hand: libraries, cubins with lines, and fat binaries.

header 64 │ segments, 56 each │ contents of the sections, each at a multiple of 8 │ sections, 64 each
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import zstandard

PROGBITS, SYMTAB, STRTAB, RELA, DYNAMIC, DYNSYM = 1, 2, 3, 4, 6, 11
X86_64, CUDA = 62, 190
_FUNCTION = 0x12  # STB_GLOBAL, STT_FUNC


@dataclass
class Part:
    """A section, and the one that it refers to by its place in the list."""

    name: str
    kind: int
    data: bytes
    link: int = 0
    offset: int | None = None
    size: int | None = None


def elf_of(parts: list[Part], machine: int = X86_64, flags: int = 0) -> bytes:
    """A file with these sections, which are numbered from 1, and then their names."""
    names = b"\0" + b"".join(part.name.encode() + b"\0" for part in parts) + b".shstrtab\0"
    all_parts = [Part("", 0, b""), *parts, Part(".shstrtab", STRTAB, names)]
    data, rows = bytearray(64 + 2 * 56), list[bytes]()
    dynamic = bytes(56)
    for part in all_parts:
        data += bytes(-len(data) % 8)
        offset, size = part.offset or len(data), len(part.data) if part.size is None else part.size
        name = names.index(b"\0" + part.name.encode() + b"\0") + 1 if part.name else 0
        rows.append(struct.pack("<IIQQQQIIQQ", name, part.kind, 0, offset, offset, size, part.link, 0, 8, 0))
        if part.kind == DYNAMIC:
            dynamic = struct.pack("<IIQQQQQQ", 2, 6, offset, offset, offset, size, size, 8)
        data += part.data
    data += bytes(-len(data) % 8)
    at, version = len(data), 8 if machine == CUDA else 0
    ident = b"\x7fELF\x02\x01\x01\0" + bytes([version]) + bytes(7)
    counts = (64, 56, 2, 64, len(rows), len(rows) - 1)
    data[:64] = struct.pack("<16sHHIQQQIHHHHHH", ident, 3, machine, 1, 0, 64, at, flags, *counts)
    data[64:176] = struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, at, at, 4096) + dynamic
    return bytes(data) + b"".join(rows)


def symbols(places: list[int], other: int = 0) -> bytes:
    """A table of functions, 16 bytes apart, whose names are at `places`."""
    rows = [struct.pack("<IBBHQQ", at, _FUNCTION, other, 1, 0x40 + 16 * n, 16) for n, at in enumerate(places)]
    return bytes(24) + b"".join(rows)


def strings(names: list[str]) -> tuple[bytes, list[int]]:
    """A table of names, and where each is."""
    data, places = b"\0", list[int]()
    for name in names:
        places.append(len(data))
        data += name.encode() + b"\0"
    return data, places


def library(names: list[str], local: list[str] | None = None, needed: list[str] | None = None) -> bytes:
    """A library with exported and local functions, which needs others, and has a search path and a soname."""
    text, places = strings(names)
    also, local_places = strings(local or [])
    links, at = strings([*(needed or []), "$ORIGIN/lib:/opt/lib", "libown.so.1"])
    # The strings' offset is their address; they are the first section.
    tags = [(5, 176), *((1, one) for one in at[:-2]), (29, at[-2]), (14, at[-1]), (0, 0)]
    return elf_of(
        [
            Part(".dynstr", STRTAB, links),
            Part(".dynsym", DYNSYM, symbols(places), 3),
            Part(".names", STRTAB, text),
            Part(".symtab", SYMTAB, symbols(local_places), 5),
            Part(".strtab", STRTAB, also),
            Part(".dynamic", DYNAMIC, b"".join(struct.pack("<qQ", *tag) for tag in tags)),
        ]
    )


def cubin(kernels: list[str], source: str = "kernel.cu") -> bytes:
    """A cubin for sm_90 whose kernels have 8 registers each, 2,048 bytes of shared memory, and a line."""
    text, places = strings(kernels)
    info = b"".join(
        struct.pack("<BBHII", 4, attribute, 8, 1 + number, value)
        for number in range(len(kernels))
        for attribute, value in ((0x2F, 8), (0x11, 0))
    )
    lines, relocations = _lines(source, len(kernels))
    return elf_of(
        [
            Part(".strtab", STRTAB, text),
            Part(".symtab", SYMTAB, symbols(places, 0x10), 1),
            Part(".nv.info", PROGBITS, info),
            Part(".debug_line", PROGBITS, lines),
            Part(".rela.debug_line", RELA, relocations),
            *(Part(f".nv.shared.{name}", PROGBITS, b"", size=2048) for name in kernels[:50]),
        ],
        CUDA,
        90 << 8,
    )


def _lines(source: str, count: int) -> tuple[bytes, bytes]:
    """`.debug_line` of version 2 with a program for each kernel, and the relocations."""
    operands = bytes([0, 1, 1, 1, 1, 0, 0, 0, 1])
    files = b"/src\0\0" + source.encode() + b"\0\1\0\0\0"
    header = struct.pack("<BBbBB", 4, 1, -5, 14, len(operands) + 1) + operands + files
    program, places = b"", list[int]()
    for number in range(count):
        places.append(10 + len(header) + len(program) + 3)
        program += b"\0\x09\2" + bytes(8) + b"\3" + bytes([number & 63]) + b"\1\0\1\1"
    body = struct.pack("<HI", 2, len(header)) + header + program
    relocations = [struct.pack("<QQq", place, (1 + n) << 32, 0) for n, place in enumerate(places)]
    return struct.pack("<I", len(body)) + body, b"".join(relocations)


def entry(data: bytes, kind: int = 2, packing: str = "", size: int | None = None) -> bytes:
    """An entry of a fat binary: a cubin, or PTX of kind 1. `size` is what it states."""
    flags, packed = 0, data
    if packing == "zstd":
        flags, packed = 0x8000, zstandard.compress(data)
    elif packing == "lz4":  # literals alone
        flags, packed = (
            0x2000,
            b"\xf0" + b"\xff" * ((len(data) - 15) // 255) + bytes([(len(data) - 15) % 255]) + data,
        )
    whole = len(data) if size is None else size
    stored = len(packed) if packing else 0
    head = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 257, 64, len(packed), stored, 0, 0, 0, 90, 0, 0, flags, 0, whole
    )
    return head + packed


def fat_binary(*entries: bytes) -> bytes:
    """A fat binary with these entries."""
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, sum(map(len, entries))) + b"".join(entries)


def program(*binaries: bytes) -> bytes:
    """A program with fat binaries, one after the other."""
    return elf_of([Part(".nv_fatbin", PROGBITS, b"".join(one + bytes(-len(one) % 8) for one in binaries))])
