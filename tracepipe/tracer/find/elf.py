"""Reads the parts of an ELF file that capture needs: functions, needed libraries, search paths.

Layouts from the ELF-64 object file format, little-endian only. Sections give the symbols: `.dynsym` stays in
stripped libraries, `.symtab` has a program's own functions. Files belong to anybody: every table has its
bound, and is read once, whatever the file states of it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from tracepipe.errors import InputError
from tracepipe.tracer.find.foreign import ForeignFile, Readable

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
_STT_OBJECT = 1
_STT_FUNC = 2  # not STT_GNU_IFUNC (10), which is a resolver, not the function
_SHN_LORESERVE = 0xFF00  # values from here on are not section indexes
_DT_NULL, _DT_NEEDED, _DT_STRTAB, _DT_SONAME, _DT_RPATH, _DT_RUNPATH = 0, 1, 5, 14, 15, 29

# The first eight bytes of a symbol, as one number: where its name is, its kind, and the index of its section.
_NAME = (1 << 32) - 1
_KIND, _FUNCTION = 15 << 32, _STT_FUNC << 32
_SECTION, _RESERVED = 1 << 48, _SHN_LORESERVE << 48

# The bounds are far above what a large library has: libLLVM has 0.2 million functions with names of 17 MB.
_SYMBOLS_MAX, _FUNCTIONS_MAX, _NEEDED_MAX, _ENTRIES_MAX = 1 << 23, 1 << 20, 1 << 11, 1 << 14
# Longer names are cut. Kernels and search paths have long ones.
_NAME_BYTES, _LONG_NAME_BYTES = 1 << 12, 1 << 16
_NAMES_BYTES = 1 << 27  # of all names in a table together
_ROWS_AT_ONCE, _WINDOW_BYTES = 1 << 15, 1 << 25
_ROW_BITS = 24  # of the number of a row, in two tables


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

    name_at: int
    kind: int
    offset: int
    size: int
    link: int


class Symbols:
    """The functions of a file by address. Large libraries have 450,000, of which few are asked for: so ends
    and names are read then, while the file is open.
    """

    def __init__(self, keys: list[int], read: Callable[[int], tuple[int, str]]) -> None:
        """`keys`: start and place in the tables of symbols, in one number; sorted. `read`: what is there."""
        self._keys, self._read = keys, read

    def __len__(self) -> int:
        return len(self._keys)

    def name(self, address: int) -> str:
        """The function at an address, "" where there is none. Raises InputError if the file is damaged."""
        at = bisect_right(self._keys, (address + 1 << _ROW_BITS) - 1) - 1
        if at < 0:
            return ""
        start = self._keys[at] >> _ROW_BITS
        first = self._keys[bisect_left(self._keys, start << _ROW_BITS)]
        end, name = self._read(first & (1 << _ROW_BITS) - 1)
        return name if address < end else ""


@dataclass(frozen=True, slots=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


class Elf:
    """A 64-bit little-endian ELF file, open while in use as a context. Raises InputError for others, and for
    one that is damaged, or changes meanwhile.
    """

    def __init__(self, path: str, content: Readable | None = None) -> None:
        """Read the file, or `content`, which was found in it."""
        self.path = path
        self._opened = ForeignFile(path) if content is None else None
        self._file: Readable = content or self._opened  # type: ignore[assignment]
        try:
            self._read_header()
        except BaseException as error:
            self.__exit__(type(error))
            raise

    def _read_header(self) -> None:
        head = self._file.read(0, min(_EHDR.size, self._file.size))
        if head[:4] != b"\x7fELF":
            raise InputError("not an ELF file", "Give a shared library or a program.", path=self.path)
        if head[4:6] != b"\x02\x01":
            raise InputError(
                "not a 64-bit little-endian ELF file",
                "Give one, as only those can be traced.",
                path=self.path,
            )
        with self._damage("table of segments"):
            header = _EHDR.unpack(head)
            self._machine, self._section_offset, self._section_count = header[2], header[6], header[12]
            self._names_at = header[13]
            self.flags, self.abi_version = header[7], head[8]
            segments = [
                _Segment(fields[0], fields[2], fields[3], fields[5])
                for fields in self._rows(_PHDR, header[5], header[10])
            ]
        # The linker wants them in this order too.
        self._loaded = sorted(
            (one for one in segments if one.kind == _PT_LOAD), key=lambda one: (one.address, one.size)
        )
        self._addresses = [one.address for one in self._loaded]
        self._dynamic = next((one for one in segments if one.kind == _PT_DYNAMIC), None)

    def __enter__(self) -> Elf:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._opened is not None:
            self._opened.__exit__(kind)

    @property
    def file_id(self) -> tuple[int, int]:
        """Device and inode of the file that was opened."""
        return (0, 0) if self._opened is None else (self._opened.status.st_dev, self._opened.status.st_ino)

    @property
    def bytes_read(self) -> int:
        """The bytes that were read of it so far."""
        return 0 if self._opened is None else self._opened.bytes_read

    @property
    def is_gpu_code(self) -> bool:
        """Whether it is a cubin."""
        return bool(self._machine == _EM_CUDA)

    @cached_property
    def sections(self) -> dict[str, Section]:
        """The sections by name."""
        with self._damage("table of sections"):
            rows = self._sections
            if not rows:
                return {}
            names = self._names(rows[self._names_at], [row.name_at for row in rows], _LONG_NAME_BYTES)
            return dict(zip(names, rows, strict=True))

    def contents(self, section: Section) -> bytes:
        """The bytes of a section; empty for one without contents in the file."""
        with self._damage("table of sections"):
            return b"" if section.kind == _SHT_NOBITS else self._file.read(section.offset, section.size)

    def functions_marked(self, mark: int) -> dict[int, str]:
        """Number of a symbol → its name, for the functions of `.symtab` with the bits `mark` in st_other,
        whose meaning the processor's ABI defines.
        """
        with self._damage("symbol table"):
            for table in self._symbol_tables(_SHT_SYMTAB):
                rows = enumerate(self._rows(_SYM, table.offset, table.size // _SYM.size))
                found = {number: row[0] for number, row in rows if row[1] & 15 == _STT_FUNC and row[2] & mark}
                names = self._names(self._sections[table.link], [*found.values()], _LONG_NAME_BYTES)
                return dict(zip(found, names, strict=True))
        return {}

    def functions(self, *, local: bool = False) -> list[tuple[str, int]]:
        """Name and address of every function of `.dynsym`, and with `local` of `.symtab` too. A name may be
        in both; aliases have the same address.
        """
        found = list[tuple[str, int]]()
        with self._damage("symbol table"):
            for table in self._symbol_tables(_SHT_DYNSYM, *[_SHT_SYMTAB] * local):
                names, addresses = list[int](), list[int]()
                for _, name, address, _ in self._functions_in(table):
                    names.append(name)
                    addresses.append(address)
                texts = self._names(self._sections[table.link], names, _NAME_BYTES)
                found += zip(texts, addresses, strict=True)
        return found

    def symbols(self) -> Symbols:
        """The functions of the file, for which it must stay open; of several at one start the first."""
        tables, keys, before = list[tuple[int, Section, Section]](), list[int](), 0
        with self._damage("symbol table"):
            for table in self._symbol_tables(_SHT_DYNSYM, _SHT_SYMTAB):
                found = (
                    address << _ROW_BITS | before + row
                    for row, _, address, size in self._functions_in(table)
                    if size
                )
                keys += islice(found, 2 * _FUNCTIONS_MAX + 1)
                tables.append((before, table, self._sections[table.link]))
                before += table.size // _SYM.size
            if len(keys) > 2 * _FUNCTIONS_MAX:
                raise IndexError
        keys.sort()
        return Symbols(keys, lambda row: self._symbol(tables, row))

    def _symbol(self, tables: list[tuple[int, Section, Section]], row: int) -> tuple[int, str]:
        """The end and the name of a function, by its place in some tables. Raises InputError."""
        with self._damage("symbol table"):
            before, table, strings = next(one for one in reversed(tables) if one[0] <= row)
            at = table.offset + (row - before) * _SYM.size
            name, _, _, _, address, size = _SYM.unpack(self._file.read(at, _SYM.size))
            if name >= strings.size:
                raise IndexError
            text = self._file.read(strings.offset + name, min(_LONG_NAME_BYTES, strings.size - name))
            return address + size, text.partition(b"\0")[0].decode("utf-8", "replace")

    def build_id(self) -> str:
        """The build id, in hexadecimal; "" if it has none."""
        note = self.sections.get(".note.gnu.build-id")
        content = self.contents(note) if note is not None and note.size <= _NAME_BYTES else b""
        # Elf64_Nhdr: size of the name, size of the id, type; "GNU" and a NUL
        return content[16 : 16 + int.from_bytes(content[4:8], "little")].hex()

    def data_symbol(self, name: str) -> int | None:
        """The address of an object of the file; None if it has none of that name."""
        with self._damage("symbol table"):
            for table in self._symbol_tables(_SHT_DYNSYM, _SHT_SYMTAB):
                strings, places = self.contents(self._sections[table.link]), set[int]()
                place = strings.find(text := name.encode() + b"\0")
                while place >= 0:  # it may be the end of longer names too
                    places.add(place)
                    place = strings.find(text, place + 1)
                for row in self._rows(_SYM, table.offset, table.size // _SYM.size):
                    if row[0] in places and row[1] & 15 == _STT_OBJECT and row[3]:
                        return row[4]
        return None

    def address_at(self, offset: int) -> int:
        """The address of the byte at a file offset; the inverse of `file_offset`. Raises InputError."""
        for segment in self._loaded:
            # The first page of a segment has the end of the one before too.
            if segment.offset & ~0xFFF <= offset < segment.offset + segment.size:
                return offset - segment.offset + segment.address
        raise InputError(f"offset {offset:#x} is in no segment", "Install it again.", path=self.path)

    def file_offset(self, address: int) -> int:
        """The file offset of the byte at `address`. Raises InputError if it is not in the file."""
        if at := bisect_right(self._addresses, address):
            segment = self._loaded[at - 1]
            if address - segment.address < segment.size:
                return address - segment.address + segment.offset
        raise InputError(
            f"address {address:#x} is in no segment", "Install it again, as it is damaged.", path=self.path
        )

    def dynamic(self) -> Dynamic:
        """The dynamic section; empty for a static program."""
        with self._damage("dynamic section"):
            tags: dict[int, list[int]] = {}
            if self._dynamic is not None:
                count = min(self._dynamic.size // _DYN.size, _ENTRIES_MAX)
                for tag, value in self._rows(_DYN, self._dynamic.offset, count):
                    if tag == _DT_NULL:
                        break
                    tags.setdefault(tag, []).append(value)
            if _DT_STRTAB not in tags:
                return Dynamic([], [], [])
            strings = self.file_offset(tags[_DT_STRTAB][0])
            if len(tags.get(_DT_NEEDED, ())) > _NEEDED_MAX:
                raise IndexError
            # Of the others there is one.
            needed, rpath, runpath, soname = (
                [self._text(strings + value, longest) for value in tags.get(tag, [])[:count]]
                for tag, count, longest in (
                    (_DT_NEEDED, _NEEDED_MAX, _NAME_BYTES),
                    (_DT_RPATH, 1, _LONG_NAME_BYTES),
                    (_DT_RUNPATH, 1, _LONG_NAME_BYTES),
                    (_DT_SONAME, 1, _NAME_BYTES),
                )
            )
            return Dynamic(
                needed,
                [folder for text in rpath for folder in text.split(":")],
                [folder for text in runpath for folder in text.split(":")],
                soname[0] if soname else "",
            )

    @cached_property
    def _sections(self) -> list[Section]:
        rows = self._rows(_SHDR, self._section_offset, self._section_count)
        return [Section(row[0], row[1], row[4], row[5], row[6]) for row in rows]

    def _symbol_tables(self, *kinds: int) -> Iterator[Section]:
        """The tables of symbols of these kinds: a file has at most one of each. Raises IndexError."""
        for kind in kinds:
            tables = [one for one in self._sections if one.kind == kind]
            if len(tables) > 1 or (tables and tables[0].size // _SYM.size > _SYMBOLS_MAX):
                raise IndexError
            yield from tables

    def _functions_in(self, table: Section) -> Iterator[tuple[int, int, int, int]]:
        """The row of each function in a table of symbols, the place of its name, its address and its size."""
        row = 0
        for part in self._parts(_SYM, table.offset, table.size // _SYM.size):
            words = memoryview(part).cast("Q")
            for head, address, size in zip(*(words[at::3] for at in range(3)), strict=True):
                if head & _KIND == _FUNCTION and _SECTION <= head < _RESERVED and address:
                    yield row, head & _NAME, address, size
                row += 1

    @contextmanager
    def _damage(self, part: str) -> Iterator[None]:
        """Turn the errors of wrong offsets and sizes in a damaged or hostile file into InputError."""
        try:
            yield
        except (struct.error, IndexError):
            raise InputError(
                f"the {part} is damaged", "Install it again, or look who wrote it.", path=self.path
            ) from None

    def _rows(self, row: struct.Struct, offset: int, count: int) -> Iterator[tuple[int, ...]]:
        """The rows of a table, some of which are in memory at a time. Raises IndexError."""
        return chain.from_iterable(map(row.iter_unpack, self._parts(row, offset, count)))

    def _parts(self, row: struct.Struct, offset: int, count: int) -> Iterator[bytes]:
        """The rows of a table as they are in the file, some at a time. Raises IndexError."""
        for start in range(0, count, _ROWS_AT_ONCE):
            yield self._file.read(offset + start * row.size, min(count - start, _ROWS_AT_ONCE) * row.size)

    def _names(self, strings: Section, places: list[int], longest: int) -> list[str]:
        """The names that begin at these places of a table, which ends with a NUL. Raises IndexError."""
        if not places:
            return []
        size, left = strings.size, _NAMES_BYTES
        is_damaged = len(places) > _FUNCTIONS_MAX or max(places) >= size
        if is_damaged or self._file.read(strings.offset + size - 1, 1) != b"\0":
            raise IndexError
        # Of a large table a window is in memory, which goes through the table once.
        is_large, begin, end = size > _WINDOW_BYTES, 0, 0
        found, window = [""] * len(places), b""
        for index in sorted(range(len(places)), key=places.__getitem__) if is_large else range(len(places)):
            place = places[index]
            if place >= end:
                begin = place if is_large else 0
                end = begin + _WINDOW_BYTES - longest if is_large else size
                window = self._file.read(strings.offset + begin, min(_WINDOW_BYTES, size - begin))
            start = place - begin
            stop = window.find(b"\0", start, start + longest)
            if stop < 0:  # a longer name
                stop = start + longest
            left -= stop - start
            if left < 0:
                raise IndexError
            found[index] = window[start:stop].decode("utf-8", "replace")
        return found

    def _text(self, start: int, longest: int) -> str:
        data = self._file.read(start, min(longest, max(self._file.size - start, 1)))
        return data[: data.index(b"\0")].decode(errors="replace")
