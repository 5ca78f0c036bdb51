"""Reads the parts of an ELF file that capture needs: functions, needed libraries, search paths.

Layouts from the ELF-64 object file format, little-endian only. Sections give the symbols: `.dynsym` stays in
stripped libraries, `.symtab` has a program's own functions. The file is mapped, not read: NVIDIA's libraries
are up to 100 MB.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
_SHT_SYMTAB, _SHT_DYNSYM = 2, 11
_SHT_NOBITS = 8
_EM_CUDA = 190
_STT_FUNC = 2  # not STT_GNU_IFUNC (10), which is a resolver, not the function
_SHN_LORESERVE = 0xFF00  # values from here on are not section indexes
_DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 1, 5, 14, 15, 29


@dataclass(frozen=True, slots=True)
class Dynamic:
    """Entries for the dynamic linker: needed libraries, folders to search as they are written, the soname."""

    needed: list[str]
    rpath: list[str]
    runpath: list[str]
    soname: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a file: offset and size of its contents in bytes, and its references to others."""

    number: int
    kind: int
    offset: int
    size: int
    link: int
    info: int


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol: its name, its type, and st_other, whose meaning the processor's ABI defines."""

    name: str
    kind: int
    other: int


def mapped(path: str, hint: str = "Give a shared library.") -> mmap.mmap:
    """The contents of a file. Raises InputError if it is empty, OSError."""
    with Path(path).open("rb") as file:
        try:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        except ValueError:
            raise InputError("empty file", hint, path=path) from None


class Elf:
    """A 64-bit little-endian ELF file, mapped while in use as a context. Raises InputError for others."""

    def __init__(self, path: str, data: bytes | None = None) -> None:
        """Read the file, or `data`, which was found in it."""
        self.path = path
        self._data = mapped(path) if data is None else data
        if self._data[:4] != b"\x7fELF":
            raise InputError("not an ELF file", "Give a shared library or a program.", path=path)
        if self._data[4:6] != b"\x02\x01":
            raise InputError(
                "not a 64-bit little-endian ELF file", "Give one, as only those can be traced.", path=path
            )
        with self._damage("table of segments"):
            header = _EHDR.unpack_from(self._data)
            self._machine, self._section_offset, self._section_count = header[2], header[6], header[12]
            self._names_at = header[13]
            self.flags, self.abi_version = header[7], self._data[8]
            self._segments = [
                _Segment(fields[0], fields[2], fields[3], fields[5])
                for fields in self._rows(_PHDR, header[5], header[10])
            ]

    def __enter__(self) -> Elf:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._data, mmap.mmap):
            self._data.close()

    @property
    def is_gpu_code(self) -> bool:
        """Whether it is a cubin."""
        return bool(self._machine == _EM_CUDA)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections by name."""
        with self._damage("table of sections"):
            rows = list(self._rows(_SHDR, self._section_offset, self._section_count))
            if not rows:
                return {}
            names = rows[self._names_at][4]
            return {
                self._text(names + row[0]): Section(number, row[1], row[4], row[5], row[6], row[7])
                for number, row in enumerate(rows)
            }

    def contents(self, section: Section) -> bytes:
        """The bytes of a section; empty for one without contents in the file."""
        return (
            b"" if section.kind == _SHT_NOBITS else self._data[section.offset : section.offset + section.size]
        )

    def symbols(self) -> list[Symbol]:
        """The symbols of `.symtab`, in its order."""
        table = self.sections.get(".symtab")
        with self._damage("symbol table"):
            if table is None:
                return []
            strings = next(s for s in self.sections.values() if s.number == table.link).offset
            rows = self._rows(_SYM, table.offset, table.size // _SYM.size)
            return [Symbol(self._text(strings + name), info & 15, other) for name, info, other, *_ in rows]

    def functions(self, *, local: bool = False) -> list[tuple[str, int]]:
        """Name and address of every function of `.dynsym`, and with `local` of `.symtab` too. A name may be
        in both; aliases have the same address.
        """
        with self._damage("symbol table"):
            kinds = (_SHT_DYNSYM, _SHT_SYMTAB) if local else (_SHT_DYNSYM,)
            sections = list(self._rows(_SHDR, self._section_offset, self._section_count))
            found = list[tuple[str, int]]()
            for table in sections:
                if table[1] not in kinds:
                    continue
                names, size_bytes = sections[table[6]], table[5] // _SYM.size * _SYM.size
                if table[4] + size_bytes > len(self._data) or names[4] + names[5] > len(self._data):
                    raise IndexError
                # Copied, as slicing bytes is twice as fast as slicing a mapping.
                strings = self._data[names[4] : names[4] + names[5]]
                rows = self._data[table[4] : table[4] + size_bytes]
                for name, info, _, index, address, _ in _SYM.iter_unpack(rows):
                    if info & 15 == _STT_FUNC and 0 < index < _SHN_LORESERVE and address:
                        text = strings[name : strings.find(b"\0", name)].decode(errors="replace")
                        found.append((text, address))
            return found

    def file_offset(self, address: int) -> int:
        """The file offset of the byte at `address`. Raises InputError if it is not in the file."""
        for segment in self._segments:
            if segment.kind == _PT_LOAD and 0 <= address - segment.address < segment.size:
                return address - segment.address + segment.offset
        raise InputError(
            f"address {address:#x} is in no segment", "Install it again, as it is damaged.", path=self.path
        )

    def dynamic(self) -> Dynamic:
        """The dynamic section; empty for a static program."""
        with self._damage("dynamic section"):
            tags: dict[int, list[int]] = {}
            for segment in self._segments:
                if segment.kind == _PT_DYNAMIC:
                    for tag, value in self._rows(_DYN, segment.offset, segment.size // _DYN.size):
                        tags.setdefault(tag, []).append(value)
            if _DT_STRTAB not in tags:
                return Dynamic([], [], [])
            strings = self.file_offset(tags[_DT_STRTAB][0])
            needed, rpath, runpath, soname = (
                [self._text(strings + value) for value in tags.get(tag, [])]
                for tag in (_DT_NEEDED, _DT_RPATH, _DT_RUNPATH, _DT_SONAME)
            )
            return Dynamic(
                needed,
                [folder for text in rpath for folder in text.split(":")],
                [folder for text in runpath for folder in text.split(":")],
                soname[0] if soname else "",
            )

    @contextmanager
    def _damage(self, part: str) -> Iterator[None]:
        """Turn the errors of wrong offsets and sizes in a damaged or hostile file into InputError."""
        try:
            yield
        except (struct.error, IndexError, OverflowError, MemoryError, StopIteration):
            raise InputError(
                f"the {part} is cut off", "Install it again, as it is damaged.", path=self.path
            ) from None

    def _rows(self, row: struct.Struct, offset: int, count: int) -> Iterator[tuple[int, ...]]:
        for index in range(count):
            yield row.unpack_from(self._data, offset + index * row.size)

    def _text(self, start: int) -> str:
        return self._data[start : self._data.find(b"\0", start)].decode(errors="replace")
