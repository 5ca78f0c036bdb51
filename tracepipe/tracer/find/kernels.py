"""Lists the kernels of an application, as the GPU code in its files describes them.

nvcc puts one or several fat binaries into a program's section `.nv_fatbin`, one after the other, each with
GPU code for some architectures. NVIDIA does not document the layout; this is what CUDA 11 to 13 write
(offsets in bytes; https://github.com/n-eiling/cuda-fatbin-decompression states the same):

    fat binary   0 magic u32 │ 4 version u16 │ 6 header bytes u16 │ 8 bytes of the entries u64
    entry        0 kind u16: 1 PTX, 2 cubin │ 4 header bytes u32 │ 8 bytes u64 │ 16 compressed bytes u32
                 28 architecture u32 │ 40 flags u64 │ 56 bytes when decompressed u64

A cubin is an ELF file. Each kernel has a section `.text.NAME`, static shared memory in `.nv.shared.NAME`, and
the compiler's data about it in `.nv.info`, a sequence of attributes (cuda-binutils and cuobjdump -elf show
them):

    0 format u8 │ 1 attribute u8 │ 2 value u16, or with format 4 the number of bytes that follow

The attributes for the number of registers and the size of the stack have a symbol's number u32 and a value
u32. `.debug_line`, written with -lineinfo or -G, has a line number program for each kernel (DWARF 2, section
6.2).
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path, PurePath
from typing import Any

from tracepipe import paths
from tracepipe.errors import InputError
from tracepipe.hooks.names import near_names
from tracepipe.kernel_names import short_kernel_name
from tracepipe.tracer.find.elf import Elf, mapped
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

_ATTRIBUTE = struct.Struct("<BBH")
_PAIR = struct.Struct("<II")
_WITH_BYTES, _REGISTERS, _FRAME_SIZE = 4, 0x2F, 0x11
_STT_FUNC = 2
_KERNEL = 0x10  # STO_CUDA_ENTRY: a kernel, not a device function
_RESERVED_SHARED = ".nv.shared.reserved.0"  # from sm_90 on, a block's shared memory begins with this part
_RESERVED_BYTES = 1024
_RELA = struct.Struct("<QQq")
_LINES_HEADER = struct.Struct("<IHIBBbBB")
_SET_ADDRESS = b"\x00\x09\x02"

_LIBRARIES = ("libstdc++.so.6", "libc++abi.so.1")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel for one architecture; None for what the cubin does not state. `name` is demangled,
    `shared_bytes` is the static shared memory, `stack_bytes` the stack of a thread, `source` is `FILE:LINE`
    of its first instruction, and `place` the file that has it.
    """

    name: str
    mangled: str
    architecture: str
    registers: int | None
    shared_bytes: int
    stack_bytes: int | None
    source: str
    place: str


@dataclass(slots=True)
class KernelListing:
    """The kernels that match a pattern, similar names if none does, and notes about unreadable parts."""

    rows: list[Kernel] = field(default_factory=list)
    near: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def list_kernels(pattern: str, paths: Iterable[str]) -> KernelListing:
    """The kernels of programs, libraries, cubins or folders of cubins whose names, mangled or not, match a
    shell pattern; all kernels if it is "". Raises InputError.
    """
    listing = KernelListing()
    known: dict[str, None] = {}
    for path in paths:
        files = files_with_kernels(path)
        for file in files:
            try:
                found = [
                    kernel
                    for cubin in cubins(file, listing.notes.append)
                    for kernel in kernels_in(cubin, file)
                ]
            except InputError as error:
                if len(files) == 1:
                    raise
                listing.notes.append(error.message)
                continue
            for kernel in found:
                known[kernel.name] = None
                # The whole name, without return type and parameters, or also without template parameters.
                short = short_kernel_name(kernel.name)
                names = (kernel.mangled, kernel.name, short, short.partition("<")[0])
                if not pattern or any(fnmatchcase(one, pattern) for one in names):
                    listing.rows.append(kernel)
    listing.rows.sort(key=lambda kernel: (kernel.name, kernel.architecture, kernel.place))
    if not listing.rows:
        listing.near = near_names(pattern, list(known))
    return listing


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
    try:
        data = mapped(path, "Give a program, a library or a .cubin file.")
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", "Check the path.", path=path) from None
    with data:
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


def kernels_in(cubin: bytes, path: str) -> list[Kernel]:
    """The kernels of a cubin that was found in `path`. Raises InputError."""
    with Elf(path, cubin) as elf:
        symbols = elf.symbols()
        registers, frames = _numbers(elf, _REGISTERS), _numbers(elf, _FRAME_SIZE)
        sources = _sources(elf)
        # The ABI version determines the place of the architecture in e_flags.
        architecture = f"sm_{(elf.flags >> (8 if elf.abi_version >= 8 else 0)) & 0xFF}"
        reserved = _RESERVED_BYTES if _RESERVED_SHARED in elf.sections else 0
        found = []
        for number, symbol in enumerate(symbols):
            if symbol.kind != _STT_FUNC or not symbol.other & _KERNEL:
                continue
            shared = elf.sections.get(f".nv.shared.{symbol.name}")
            found.append(
                Kernel(
                    demangled(symbol.name),
                    symbol.name,
                    architecture,
                    registers.get(number),
                    max(shared.size - reserved, 0) if shared else 0,
                    frames.get(number),
                    sources.get(number, ""),
                    path,
                )
            )
        return found


def _numbers(elf: Elf, wanted: int) -> dict[int, int]:
    """Symbol number → value of an attribute of `.nv.info`."""
    section = elf.sections.get(".nv.info")
    data = elf.contents(section) if section else b""
    found, at = {}, 0
    while at + _ATTRIBUTE.size <= len(data):
        form, attribute, size = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        if form == _WITH_BYTES:
            if attribute == wanted and size >= _PAIR.size and at + size <= len(data):
                symbol, value = _PAIR.unpack_from(data, at)
                found[symbol] = value
            at += size
    return found


def _sources(elf: Elf) -> dict[int, str]:
    """Symbol number → `FILE:LINE` of its first instruction."""
    section, relocations = elf.sections.get(".debug_line"), elf.sections.get(".rela.debug_line")
    if section is None or relocations is None:
        return {}
    # The kernel of a line number program is the symbol by which its address is relocated.
    data = elf.contents(relocations)
    whole = len(data) // _RELA.size * _RELA.size
    symbols = {offset: info >> 32 for offset, info, _ in _RELA.iter_unpack(data[:whole])}
    try:
        return dict(_first_lines(elf.contents(section), symbols))
    except (IndexError, struct.error):
        return {}  # of another version, or damaged


def _first_lines(data: bytes, symbols: dict[int, int]) -> Iterator[tuple[int, str]]:
    unit = 0
    while unit + _LINES_HEADER.size <= len(data):
        length, version, header, *_, line_base, line_range, opcode_base = _LINES_HEADER.unpack_from(
            data, unit
        )
        end = unit + 4 + length
        if not 2 <= version <= 4 or not line_range:
            return
        at = unit + _LINES_HEADER.size + (version == 4)
        if version == 4:  # version 4 has one more byte before default_is_stmt
            line_base, line_range, opcode_base = struct.unpack_from("<bBB", data, unit + 13)
        operands = data[at : at + opcode_base - 1]
        files = _files(data, at + opcode_base - 1)
        at = unit + 10 + header
        while (at := data.find(_SET_ADDRESS, at, end)) >= 0:
            place = at + len(_SET_ADDRESS)
            at = place + 8
            if place in symbols:
                file, line = _first_row(data, at, (line_base, line_range, opcode_base), operands)
                if 0 < file <= len(files):
                    yield symbols[place], f"{files[file - 1]}:{line}"
        unit = end


def _files(data: bytes, at: int) -> list[str]:
    """The names of the files of a header, with their folders where the header has them."""
    folders, files = [""], []
    while data[at]:
        end = data.index(0, at)
        folders.append(data[at:end].decode(errors="replace"))
        at = end + 1
    at += 1
    while data[at]:
        end = data.index(0, at)
        name = data[at:end].decode(errors="replace")
        folder, at = _uleb(data, end + 1)
        _, at = _uleb(data, at)
        _, at = _uleb(data, at)
        files.append(str(PurePath(folders[folder] if folder < len(folders) else "", name)))
    return files


def _first_row(data: bytes, at: int, form: tuple[int, int, int], operands: bytes) -> tuple[int, int]:
    """The file and line of the first row that a line number program produces from `at` on."""
    line_base, line_range, opcode_base = form
    file = line = 1
    while True:
        opcode, at = data[at], at + 1
        if opcode >= opcode_base:  # a row
            return file, line + line_base + (opcode - opcode_base) % line_range
        if opcode == 1:  # DW_LNS_copy: a row
            return file, line
        if opcode == 0:  # an extended opcode
            size, at = _uleb(data, at)
            at += size
        elif opcode == 3:  # DW_LNS_advance_line
            start = at
            step, at = _uleb(data, at)
            bits = 7 * (at - start)
            line += step - (1 << bits) if step >> (bits - 1) & 1 else step
        elif opcode == 4:  # DW_LNS_set_file
            file, at = _uleb(data, at)
        elif opcode == 9:  # DW_LNS_fixed_advance_pc
            at += 2
        else:
            for _ in range(operands[opcode - 1]):
                _, at = _uleb(data, at)


def _uleb(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def demangled(name: str) -> str:
    """The demangled name; names that are not C++ names are unchanged, as are all without a C++ library."""
    found = _demangler()
    if found is None or not name.startswith("_Z"):
        return name
    (demangle, free), status = found, ctypes.c_int()
    text = demangle(name.encode(errors="replace"), None, None, ctypes.byref(status))
    if not text:
        return name
    try:
        value = ctypes.cast(text, ctypes.c_char_p).value
        return value.decode(errors="replace") if value and not status.value else name
    finally:
        free(text)


@cache
def _demangler() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The function that demangles, and the one that frees its results."""
    free = ctypes.CDLL(None).free
    free.argtypes, free.restype = [ctypes.c_void_p], None
    for library in _LIBRARIES:
        try:
            function = ctypes.CDLL(library).__cxa_demangle
        except (OSError, AttributeError):
            continue
        function.argtypes, function.restype = [ctypes.c_char_p, *[ctypes.c_void_p] * 3], ctypes.c_void_p
        return function, free
    return None
