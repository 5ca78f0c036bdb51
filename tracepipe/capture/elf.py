"""The few parts of an ELF file that capture needs: exported functions, needed libraries, search paths.

Layouts from the ELF-64 object file format, little-endian only. Sections give the symbols: `.dynsym` stays in
stripped libraries. The file is mapped, not read: NVIDIA's libraries are up to 100 MB.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracepipe.capture.engine import Function
from tracepipe.errors import InputError

# Elf64_Ehdr:  ident[16] type machine version entry phoff shoff flags ehsize phentsize phnum shentsize shnum …
_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
# Elf64_Phdr:  type flags offset vaddr paddr filesz memsz align
_PHDR = struct.Struct("<IIQQQQQQ")
# Elf64_Shdr:  name type flags addr offset size link info addralign entsize
_SHDR = struct.Struct("<IIQQQQIIQQ")
# Elf64_Sym:   name info other shndx value size
_SYM = struct.Struct("<IBBHQQ")
_DYN = struct.Struct("<qQ")  # Elf64_Dyn: tag value

_PT_LOAD, _PT_DYNAMIC = 1, 2
_SHT_DYNSYM = 11
_STT_FUNC = 2  # STT_GNU_IFUNC is 10: a resolver, not the function
_DT_NEEDED, _DT_STRTAB, _DT_RPATH, _DT_RUNPATH = 1, 5, 15, 29


@dataclass(frozen=True, slots=True)
class Dynamic:
    """What the dynamic linker is told: needed libraries and the folders to search, as written."""

    needed: list[str]
    rpath: list[str]
    runpath: list[str]


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


class Elf:
    """A 64-bit little-endian ELF file, mapped while in use as a context. Raises InputError for others."""

    def __init__(self, path: str) -> None:
        self.path = path
        with Path(path).open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except ValueError:
                raise InputError("empty file", "give a shared library", path=path) from None
        if self._data[:4] != b"\x7fELF":
            raise InputError("not an ELF file", "give a shared library or a program", path=path)
        if self._data[4:6] != b"\x02\x01":
            raise InputError("not a 64-bit little-endian ELF file", "only those can be traced", path=path)
        try:
            header = _EHDR.unpack_from(self._data)
            self._section_offset, self._section_count = header[6], header[12]
            self._segments = [
                _Segment(fields[0], fields[2], fields[3], fields[5])
                for fields in self._rows(_PHDR, header[5], header[10])
            ]
        except struct.error:
            raise InputError("truncated ELF file", "the file is damaged", path=path) from None

    def __enter__(self) -> Elf:
        return self

    def __exit__(self, *_: object) -> None:
        self._data.close()

    def exported_functions(self, prefix: str) -> list[Function]:
        """Functions of `.dynsym` whose names start with `prefix` and an upper-case letter, one an offset.

        Aliases share an offset, where one probe must not be set twice: the shortest name stands for them.
        """
        try:
            by_offset: dict[int, str] = {}
            for name, address in self._dynamic_functions(prefix.encode()):
                offset = self._file_offset(address)
                rival = by_offset.get(offset)
                if rival is None or (len(name), name) < (len(rival), rival):
                    by_offset[offset] = name
        except struct.error:
            raise InputError("the symbol table is cut off", "the file is damaged", path=self.path) from None
        return [
            Function(name, offset) for offset, name in sorted(by_offset.items(), key=lambda item: item[1])
        ]

    def dynamic(self) -> Dynamic:
        """The dynamic section; empty for a static program."""
        tags: dict[int, list[int]] = {}
        try:
            for segment in self._segments:
                if segment.kind == _PT_DYNAMIC:
                    for tag, value in self._rows(_DYN, segment.offset, segment.size // _DYN.size):
                        tags.setdefault(tag, []).append(value)
        except struct.error:
            raise InputError(
                "the dynamic section is cut off", "the file is damaged", path=self.path
            ) from None
        if _DT_STRTAB not in tags:
            return Dynamic([], [], [])
        strings = self._file_offset(tags[_DT_STRTAB][0])
        texts = {
            tag: [self._text(strings + value) for value in tags.get(tag, [])]
            for tag in (_DT_NEEDED, _DT_RPATH, _DT_RUNPATH)
        }
        return Dynamic(
            texts[_DT_NEEDED],
            [folder for text in texts[_DT_RPATH] for folder in text.split(":")],
            [folder for text in texts[_DT_RUNPATH] for folder in text.split(":")],
        )

    def _rows(self, row: struct.Struct, offset: int, count: int) -> Iterator[tuple[int, ...]]:
        for index in range(count):
            yield row.unpack_from(self._data, offset + index * row.size)

    def _dynamic_functions(self, prefix: bytes) -> Iterator[tuple[str, int]]:
        sections = list(self._rows(_SHDR, self._section_offset, self._section_count))
        for section in sections:
            if section[1] != _SHT_DYNSYM:
                continue
            strings = sections[section[6]][4]
            for name, info, _, index, value, _ in self._rows(_SYM, section[4], section[5] // _SYM.size):
                if info & 15 != _STT_FUNC or index == 0 or not value:
                    continue
                start = strings + name
                if self._data[start : start + len(prefix)] == prefix:
                    text = self._text(start)
                    if text[len(prefix) : len(prefix) + 1].isupper():
                        yield text, value

    def _text(self, start: int) -> str:
        return self._data[start : self._data.find(b"\0", start)].decode(errors="replace")

    def _file_offset(self, address: int) -> int:
        for segment in self._segments:
            if segment.kind == _PT_LOAD and 0 <= address - segment.address < segment.size:
                return address - segment.address + segment.offset
        raise InputError(f"address {address:#x} is in no segment", "the file is damaged", path=self.path)
