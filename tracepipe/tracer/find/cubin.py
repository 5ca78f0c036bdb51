"""Reads the kernels in a cubin: registers, memory, and the place of their source.

A cubin is an ELF file. Each kernel has a section `.text.NAME`, static shared memory in `.nv.shared.NAME`, and
the compiler's data about it in `.nv.info`, a sequence of attributes (cuda-binutils and cuobjdump -elf show
them):

    0 format u8 │ 1 attribute u8 │ 2 value u16, or with format 4 the number of bytes that follow

The attributes for the number of registers and the size of the stack have a symbol's number u32 and a value
u32. `.debug_line`, written with -lineinfo or -G, has a line number program for each kernel (DWARF 2, section
6.2).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from tracepipe.tracer.find.elf import Elf

_ATTRIBUTE = struct.Struct("<BBH")
_PAIR = struct.Struct("<II")
_WITH_BYTES, _REGISTERS, _FRAME_SIZE = 4, 0x2F, 0x11
_STT_FUNC = 2
_ENTRY = 0x10  # STO_CUDA_ENTRY: a kernel, not a device function
_RESERVED_SHARED = ".nv.shared.reserved.0"  # from sm_90 on, a block's shared memory begins with this part
_RESERVED_BYTES = 1024
_RELA = struct.Struct("<QQq")
_LINES_HEADER = struct.Struct("<IHIBBbBB")
_SET_ADDRESS = b"\x00\x09\x02"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel for one architecture. `name` is mangled; None for what the cubin does not state.
    `shared_bytes` is the static shared memory, `stack_bytes` the stack of a thread, and `source` is
    `FILE:LINE` of its first instruction.
    """

    name: str
    architecture: str
    registers: int | None
    shared_bytes: int
    stack_bytes: int | None
    source: str = ""


def kernels(cubin: bytes, path: str) -> list[Kernel]:
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
            if symbol.kind != _STT_FUNC or not symbol.other & _ENTRY:
                continue
            shared = elf.sections.get(f".nv.shared.{symbol.name}")
            found.append(
                Kernel(
                    symbol.name,
                    architecture,
                    registers.get(number),
                    max(shared.size - reserved, 0) if shared else 0,
                    frames.get(number),
                    sources.get(number, ""),
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
            step, at = _sleb(data, at)
            line += step
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


def _sleb(data: bytes, at: int) -> tuple[int, int]:
    start = at
    value, at = _uleb(data, at)
    bits = 7 * (at - start)
    return (value - (1 << bits) if value >> (bits - 1) & 1 else value), at
