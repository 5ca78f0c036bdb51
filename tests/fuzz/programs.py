"""Programs, libraries, cubins and fat binaries that are nearly real ones, and change while they are read.

What must be true of each: no error but InputError, messages that name the file, no functions of a file that
changed, and bounds for memory, time and open files.
"""

from __future__ import annotations

import os
import resource
import struct
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.judge import ran
from tests.native.inputs import mutated
from tests.support import elf_files
from tests.support.compiled import compiled
from tests.support.gpu_libraries import ROOT, nvcc
from tracepipe.errors import InputError
from tracepipe.tracer.find import foreign
from tracepipe.tracer.find.functions import FunctionTables
from tracepipe.tracer.find.kernels import list_kernels
from tracepipe.tracer.find.library import interpreter_of, linked_libraries
from tracepipe.tracer.gpu.choice import has_marks

_MEMORY_BYTES = 192 << 20
_SPARSE_BYTES = 1 << 30
_NAMES = ["cuInit", "cuLaunchKernel", "_Z3addPKfPf", "x" * 300, "é", "a\nb", "_Z1f1AIiiES_IS0_S0_E"]
# Offset and size of fields: of the header, of a segment, a section, a symbol, and an entry of a fat binary.
_HEADER = ((16, 2), (18, 2), (32, 8), (40, 8), (48, 4), (54, 2), (56, 2), (58, 2), (60, 2), (62, 2))
_SEGMENT = ((0, 4), (8, 8), (16, 8), (32, 8), (40, 8))
_SECTION = ((0, 4), (4, 4), (24, 8), (32, 8), (40, 4), (44, 4))
_SYMBOL = ((0, 4), (4, 1), (5, 1), (6, 2), (8, 8))
_ENTRY = ((0, 2), (4, 4), (8, 8), (16, 4), (28, 4), (40, 8), (56, 8))
_EXTREMES = (0, 1, 2, 7, 8, 11, 15, 16, 63, 64, 255, 4095, 4096, (1 << 16) - 1, (1 << 31) - 1, 1 << 31,
             (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)  # fmt: skip


@cache
def _real() -> list[bytes]:
    """Small libraries of this Python, and what nvcc makes where there is one."""
    libraries = Path(sysconfig.get_path("platstdlib"), "lib-dynload").glob("*.so")
    found = [
        file.read_bytes() for file in sorted(libraries, key=lambda file: (file.stat().st_size, file.name))[:4]
    ]
    with suppress(pytest.skip.Exception), tempfile.TemporaryDirectory() as folder:
        for what in (
            "-cubin -lineinfo",
            "-c",
            "-fatbin --compress-mode=size",
            "-fatbin --compress-mode=speed",
        ):
            command = [nvcc(), "-arch=sm_90", *what.split(), str(ROOT / "tests/support/listed.cu")]
            found.append(compiled(command, Path(folder, "made")).read_bytes())
    return found


def _made(rng: Random) -> bytes:
    """A file that is made by hand, of any kind."""
    names = [rng.choice(_NAMES) + str(n) for n in range(rng.choice((0, 1, 3, 40)))]
    cubin = elf_files.cubin(names)
    if rng.random() < 0.5:
        cubin = _changed(rng, cubin)
    entries = [
        elf_files.entry(cubin, rng.choice((2, 2, 2, 1)), rng.choice(("", "zstd", "lz4")))
        for _ in range(rng.choice((1, 2, 5)))
    ]
    kind = rng.randrange(4)
    if kind == 0:
        return elf_files.library(names, names[:3], ["libc.so.6", "libm.so.6"])
    if kind == 1:
        return cubin
    binaries = [elf_files.fat_binary(*entries)] * rng.choice((1, 3))
    return b"".join(binaries) if kind == 2 else elf_files.program(*binaries)


def _changed(rng: Random, data: bytes) -> bytes:
    """Some fields have other values, some tables other places, some bytes are others."""
    if rng.random() < 0.2:
        data = mutated(rng, data)
    made = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        tables = _tables(made)
        start, size, fields = rng.choice(tables or [(0, len(made), ((0, 8),))])
        row = start + rng.randrange(max(size // 8, 1)) * 8 if not tables else start
        at, width = rng.choice(fields)
        if row + at + width <= len(made):
            old = int.from_bytes(made[row + at : row + at + width], "little")
            other = rng.choice(
                (rng.choice(_EXTREMES), old + rng.randint(-9, 9), len(made), rng.randrange(len(made)))
            )
            made[row + at : row + at + width] = (other % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(made)


def _tables(data: bytes) -> list[tuple[int, int, tuple[tuple[int, int], ...]]]:
    """Where rows with fields are: of the header, segments, sections, symbols, and fat binaries."""
    found = []
    at = data.find(b"\x50\xed\x55\xba")
    if at >= 0:
        found += [(at, 16, ((4, 2), (6, 2), (8, 8))), (at + 16, 64, _ENTRY)]
    if data[:4] != b"\x7fELF" or len(data) < 64:
        return found
    (*_, segments, sections, _, _, _, segment_count, _, count, _) = struct.unpack_from(
        "<16sHHIQQQIHHHHHH", data
    )
    found.append((0, 64, _HEADER))
    found += [(segments + 56 * n, 56, _SEGMENT) for n in range(min(segment_count, 20))]
    for number in range(min(count, 40)):
        row = sections + 64 * number
        if row + 64 > len(data):
            break
        found.append((row, 64, _SECTION))
        _, kind, _, _, offset, size, *_ = struct.unpack_from("<IIQQQQIIQQ", data, row)
        if kind in (elf_files.SYMTAB, elf_files.DYNSYM):
            found += [(offset + 24 * n, 24, _SYMBOL) for n in range(min(size // 24, 10))]
        elif kind == elf_files.DYNAMIC:
            found += [(offset + 16 * n, 16, ((0, 8), (8, 8))) for n in range(min(size // 16, 20))]
        elif kind == elf_files.PROGBITS and size:
            found += [(offset, min(size, 64), ((0, 4), (4, 2), (6, 4), (10, 1), (13, 1), (14, 1), (15, 1)))]
    return found


def program(rng: Random) -> bytes:
    """A file that is nearly a real one."""
    return _changed(rng, rng.choice(_real()) if rng.random() < 0.3 else _made(rng))


# Changes ------------------------------------------------------------------------------------------------


def _replace(path: Path) -> None:
    new = path.with_name("new")
    new.write_bytes(elf_files.library(["other"]))
    new.rename(path)


def _write(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\x7fELF\1")


def _put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    "truncate": lambda path: os.truncate(path, min(70, path.stat().st_size - 1)),
    "empty": lambda path: os.truncate(path, 0),
    "grow": lambda path: os.truncate(path, path.stat().st_size + 4096),
    "write": _write,
    "replace": _replace,
    "remove": lambda path: path.unlink(),
    "pipe": _put_pipe,
}


class Changing:
    """`os.pread`, which changes the file before one of its calls: `is_done` says whether it has."""

    def __init__(self, path: Path, change: str, call: int) -> None:
        self._path, self._change, self._left = path, CHANGES[change], call
        self.is_done = False
        os.utime(path, ns=(0, 0))  # two writes may be within one tick of the file system's clock

    def __call__(self, file: int, size: int, offset: int) -> bytes:
        """Read, after the change if it is time."""
        self._left -= 1
        if self._left == 0:
            self._change(self._path)
            self.is_done = True
        return os.pread(file, size, offset)


# What must be true --------------------------------------------------------------------------------------


def judge(path: Path, rng: Random) -> None:
    """Read a file in every way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    files = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_DATA, (used_bytes + _MEMORY_BYTES, hard))
    try:
        with pytest.MonkeyPatch.context() as patch:
            _judge(path, rng, patch)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == files, "a file stays open"


def _judge(path: Path, rng: Random, patch: pytest.MonkeyPatch) -> None:
    data, notes = path.read_bytes(), list[str]()
    size = _SPARSE_BYTES if rng.random() < 0.03 else len(data)  # which has all that its tables state
    changing = None
    for ask in rng.sample((_functions, _kernels, _others, _command), 3):
        if changing is None:
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            os.truncate(path, size)
        if rng.random() < 0.4:
            changing = Changing(path, rng.choice([*CHANGES]), 1 + int(rng.expovariate(0.2)))
            patch.setattr(foreign, "_pread", changing)
        has_answer = ask(path, rng, notes.append)
        assert not (has_answer and changing and changing.is_done), "a changed file has an answer"
        changing = None if changing and changing.is_done else changing
    assert all(str(path) in note for note in notes), notes


def _functions(path: Path, rng: Random, notify: Callable[[str], None]) -> bool:
    tables = FunctionTables(notify)
    local = rng.random() < 0.7
    found = tables.all_of(str(path), local=local)
    assert not (found and tables.unreadable)
    assert all(offset >= 0 and len(name) <= 4096 for offset, names in found.items() for name in names)
    return bool(found)


def _kernels(path: Path, rng: Random, notify: Callable[[str], None]) -> bool:
    try:
        listing = list_kernels("", [str(path)])
    except InputError as error:
        notify(error.message)
        return False
    for note in listing.notes:
        notify(note)
    assert all(len(kernel.source) <= 1024 and len(kernel.mangled) <= 1 << 16 for kernel in listing.rows)
    return bool(listing.rows)


def _others(path: Path, rng: Random, notify: Callable[[str], None]) -> bool:
    linked_libraries(str(path))
    interpreter_of(str(path))
    has_marks([str(path)])
    return False


def _command(path: Path, rng: Random, notify: Callable[[str], None]) -> bool:
    if rng.random() < 0.9:
        return False
    asked = rng.choice((["--kernels", str(path)], [f"uprobe:{path}:cu*"]))
    code, out, err = ran(["hooks", "list", *asked])
    text = (out + err).decode()
    assert {letter for letter in text if not letter.isprintable()} <= {"\n"}
    assert code in (0, 1) and (code == 0 or f"{path}" in err.decode().replace("\n  ", " "))
    return code == 0
