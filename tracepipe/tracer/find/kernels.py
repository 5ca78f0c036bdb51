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

import io
import struct
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from tracepipe import paths
from tracepipe.errors import InputError
from tracepipe.hooks.names import near_names
from tracepipe.kernel_names import short_kernel_name
from tracepipe.mangled_names import demangled_signature
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.foreign import Content, ForeignFile, Readable, found_at
from tracepipe.units import counted

_MAGIC = b"\x50\xed\x55\xba"
_FAT = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_CUBIN, _PTX = 2, 1
_LZ4, _ZSTD = 0x2000, 0x8000
_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BYTES_MAX = 1 << 27  # of a cubin; NVIDIA's largest have about 10 MB
_TIMES_MAX = 32  # how many times larger than a file its decompressed cubins may be
_ENTRIES_MAX = 1 << 18  # of a file, its fat binaries too
_TABLE_BYTES = 1 << 24  # of attributes, and of relocations
_FILES_MAX, _SOURCE_CHARS = 1 << 16, 1 << 10  # files of a line number program, and characters of a path
_ROW_BYTES = 1 << 8  # from the address of a line number program to its first row
_KERNELS_MAX, _NAMES_CHARS = 1 << 19, 1 << 27  # of all files

_ATTRIBUTE = struct.Struct("<BBH")
_PAIR = struct.Struct("<II")
_WITH_BYTES, _REGISTERS, _FRAME_SIZE = 4, 0x2F, 0x11
_KERNEL = 0x10  # STO_CUDA_ENTRY: a kernel, not a device function
_RESERVED_SHARED = ".nv.shared.reserved.0"  # from sm_90 on, a block's shared memory begins with this part
_RESERVED_BYTES = 1024
_RELA = struct.Struct("<QQq")
_LINES_HEADER = struct.Struct("<IHIBBbBB")
_SET_ADDRESS = b"\x00\x09\x02"


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
    listing, kernels, chars = KernelListing(), list[Kernel](), 0
    for path in paths:
        files = files_with_kernels(path)
        for file in files:
            try:
                with closing(cubins(file, listing.notes.append)) as parts:
                    found = [kernel for cubin in parts for kernel in kernels_in(cubin, file)]
            except InputError as error:
                if len(files) == 1:
                    raise
                listing.notes.append(error.message)
                continue
            kernels += found
            chars += sum(len(kernel.mangled) + len(kernel.source) for kernel in found)
            if len(kernels) > _KERNELS_MAX or chars > _NAMES_CHARS:
                raise InputError("with it, there are too many kernels", "List fewer files.", path=file)
    known = {mangled: demangled_signature(mangled) for mangled in {kernel.mangled for kernel in kernels}}
    for kernel in kernels:
        name = known[kernel.mangled]
        # The whole name, without return type and parameters, or also without template parameters.
        short = short_kernel_name(name)
        names = (kernel.mangled, name, short, short.partition("<")[0])
        if not pattern or any(fnmatchcase(one, pattern) for one in names):
            listing.rows.append(replace(kernel, name=name))
    listing.rows.sort(key=lambda kernel: (kernel.name, kernel.architecture, kernel.place))
    if not listing.rows:
        listing.near = near_names(pattern, list(dict.fromkeys(known[kernel.mangled] for kernel in kernels)))
    return listing


def files_with_kernels(path: str) -> list[str]:
    """The file itself, or the cubins in a folder such as Triton's cache. Raises InputError."""
    if not paths.is_folder(path):
        return [path]
    found = sorted(str(file) for file in Path(path).rglob("*.cubin") if paths.is_file(file))
    if not found:
        raise InputError("a folder without cubins", "Give a program, a library or a .cubin file.", path=path)
    return found


def cubins(path: str, notify: Callable[[str], None]) -> Generator[bytes, None, None]:
    """The cubins in a file. `notify` gets messages about what cannot be read. Raises InputError."""
    with ForeignFile(path, "Give a program, a library or a .cubin file.") as file:
        if file.read(0, min(len(_MAGIC), file.size)) == _MAGIC:
            yield from _in_fat_binaries(file, [(0, file.size)], path, notify)
            return
        elf = Elf(path, file)
        if elf.is_gpu_code:
            if file.size > _BYTES_MAX:
                raise InputError("a cubin with more than 128 MiB", "Give another file.", path=path)
            yield file.read(0, file.size)
            return
        sections = [elf.sections[name] for name in _SECTIONS if name in elf.sections]
        spans = [(one.offset, min(one.offset + one.size, file.size)) for one in sections]
        yield from _in_fat_binaries(file, spans, path, notify)


def _in_fat_binaries(
    file: Readable, spans: list[tuple[int, int]], path: str, notify: Callable[[str], None]
) -> Iterator[bytes]:
    unknown = only_ptx = entry_count = 0
    left = _TIMES_MAX * file.size + _BYTES_MAX
    for start, end in spans:
        while (start := found_at(file, _MAGIC, start, end)) >= 0 and start + _FAT.size <= end:
            _, _, header_bytes, size = _FAT.unpack(file.read(start, _FAT.size))
            at, start = start + max(header_bytes, _FAT.size), start + max(header_bytes, _FAT.size) + size
            unknown += start > end
            cubin_count = ptx_count = 0
            entry_count += 1
            while at + _ENTRY.size <= min(start, end) and left >= 0 and entry_count <= _ENTRIES_MAX:
                kind, _, head, entry_bytes, packed, *_, flags, _, whole = _ENTRY.unpack(
                    file.read(at, _ENTRY.size)
                )
                entry_count += 1
                if head < _ENTRY.size:
                    unknown += 1
                    break
                body, at = at + head, at + head + entry_bytes
                ptx_count += kind == _PTX
                if kind == _CUBIN:
                    cubin_count += 1
                    size = min(packed or entry_bytes, entry_bytes)
                    is_there = body + size <= end and max(size, whole) <= _BYTES_MAX
                    cubin = _decompressed(file.read(body, size), flags, whole) if is_there else None
                    unknown += cubin is None
                    if cubin is not None:
                        left -= len(cubin)
                        yield cubin
            if left < 0 or entry_count > _ENTRIES_MAX:
                raise InputError("it has more GPU code than any file", "Give another file.", path=path)
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
    if flags & _ZSTD or data[:4] == _ZSTD_MAGIC:
        import zstandard  # here, as it is rarely needed

        try:
            # Not `decompress`, which believes the size that the data state.
            with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
                found = stream.read(size + 1)
        except (zstandard.ZstdError, MemoryError):
            return None
        return found if len(found) == size else None
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
        if at >= len(data):
            break
        back, at = data[at] | data[at + 1] << 8, at + 2
        count, at = length(token & 15, at)
        if not 0 < back <= len(out) or len(out) + count + 4 > size:
            raise IndexError
        copied = out[len(out) - back :][: count + 4]
        out += (copied * ((count + 4) // len(copied) + 1))[: count + 4]
    if len(out) != size:
        raise IndexError
    return bytes(out)


def kernels_in(cubin: bytes, path: str) -> list[Kernel]:
    """The kernels of a cubin that was found in `path`, whose names are not demangled. Raises InputError."""
    with Elf(path, Content(cubin)) as elf:
        names = elf.functions_marked(_KERNEL)
        numbers, sources = _numbers(elf, names), _sources(elf, names)
        # The ABI version determines the place of the architecture in e_flags.
        architecture = f"sm_{(elf.flags >> (8 if elf.abi_version >= 8 else 0)) & 0xFF}"
        reserved = _RESERVED_BYTES if _RESERVED_SHARED in elf.sections else 0
        found = []
        for number, name in names.items():
            shared = elf.sections.get(f".nv.shared.{name}")
            found.append(
                Kernel(
                    name,
                    name,
                    architecture,
                    numbers.get((_REGISTERS, number)),
                    max(shared.size - reserved, 0) if shared else 0,
                    numbers.get((_FRAME_SIZE, number)),
                    sources.get(number, ""),
                    path,
                )
            )
        return found


def _table(elf: Elf, name: str) -> bytes:
    """The contents of a section; empty where there is none. Raises InputError."""
    section = elf.sections.get(name)
    if section and section.size > _TABLE_BYTES:
        raise InputError(f"{name} is larger than that of any cubin", "Give another file.", path=elf.path)
    return elf.contents(section) if section else b""


def _numbers(elf: Elf, kernels: Collection[int]) -> dict[tuple[int, int], int]:
    """Attribute of `.nv.info` and number of a kernel's symbol → value."""
    data = _table(elf, ".nv.info")
    found, at = {}, 0
    while at + _ATTRIBUTE.size <= len(data):
        form, attribute, size = _ATTRIBUTE.unpack_from(data, at)
        at += _ATTRIBUTE.size
        if form == _WITH_BYTES:
            is_wanted = attribute in (_REGISTERS, _FRAME_SIZE)
            if is_wanted and size >= _PAIR.size and at + size <= len(data):
                symbol, value = _PAIR.unpack_from(data, at)
                if symbol in kernels:
                    found[attribute, symbol] = value
            at += size
    return found


def _sources(elf: Elf, kernels: Collection[int]) -> dict[int, str]:
    """Number of a kernel's symbol → `FILE:LINE` of its first instruction."""
    # The kernel of a line number program is the symbol by which its address is relocated.
    data = _table(elf, ".rela.debug_line")
    whole = len(data) // _RELA.size * _RELA.size
    symbols = {
        offset: info >> 32 for offset, info, _ in _RELA.iter_unpack(data[:whole]) if info >> 32 in kernels
    }
    lines = elf.sections.get(".debug_line") if symbols else None
    try:
        return dict(_first_lines(elf.contents(lines), symbols)) if lines else {}
    except (IndexError, ValueError, struct.error):
        return {}  # of another version, or damaged


def _first_lines(data: bytes, symbols: dict[int, int]) -> Iterator[tuple[int, str]]:
    begin = 0
    while begin + _LINES_HEADER.size <= len(data):
        length, version, header, *_, line_base, line_range, opcode_base = _LINES_HEADER.unpack_from(
            data, begin
        )
        unit = data[begin : begin + 4 + length]
        if not 2 <= version <= 4 or not line_range:
            return
        at = _LINES_HEADER.size + (version == 4)
        if version == 4:  # version 4 has one more byte before default_is_stmt
            line_base, line_range, opcode_base = struct.unpack_from("<bBB", unit, 13)
        operands = unit[at : at + opcode_base - 1]
        files = _files(unit, at + opcode_base - 1)
        at = 10 + header
        while (at := unit.find(_SET_ADDRESS, at)) >= 0:
            place = at + len(_SET_ADDRESS)
            at = place + 8
            if begin + place in symbols:
                program = unit[at : at + _ROW_BYTES]
                file, line = _first_row(program, 0, (line_base, line_range, opcode_base), operands)
                if 0 < file <= len(files):
                    folder, name = (part.decode(errors="replace") for part in files[file - 1])
                    source = f"{PurePath(folder, name)}:{line}"
                    yield symbols[begin + place], source if len(source) <= _SOURCE_CHARS else ""
        begin += len(unit)


def _files(data: bytes, at: int) -> list[tuple[bytes, bytes]]:
    """The folders and the names of the files of a header; the folder is empty where it has none."""
    folders, files = [b""], list[tuple[bytes, bytes]]()
    while data[at]:
        end = data.index(0, at)
        folders.append(data[at:end])
        at = end + 1
    at += 1
    while data[at] and len(files) < _FILES_MAX:
        end = data.index(0, at)
        name = data[at:end]
        folder, at = _uleb(data, end + 1)
        _, at = _uleb(data, at)
        _, at = _uleb(data, at)
        files.append((folders[folder] if folder < len(folders) else b"", name))
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
        if shift > 63:
            raise IndexError
