"""Which libcuda a command will load: the dynamic linker's search, for one library.

Order from ld.so(8): RPATH of the program (unless it has RUNPATH), LD_LIBRARY_PATH, RUNPATH, /etc/ld.so.cache,
the default folders. A program that loads libcuda by dlopen, as the CUDA runtime does, searches the same way.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

from tracepipe.capture.elf import Elf
from tracepipe.errors import InputError, TracepipeError

LIBCUDA = "libcuda.so.1"
_CACHE = Path("/etc/ld.so.cache")
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"


def find_program(command: list[str]) -> str:
    """Path of the program that `command` runs. Raises TracepipeError if none can be executed."""
    name = command[0]
    found = shutil.which(name)
    if found:
        return str(Path(found).absolute())
    if "/" in name and Path(name).is_dir():
        raise TracepipeError(f"{name} is a folder.", "Give a program after --.")
    if "/" in name and Path(name).exists():
        raise TracepipeError(f"{name} cannot be executed.", f"chmod +x {name}")
    hint = "Check the path." if "/" in name else f"Is it in $PATH? For a file here, write ./{name}."
    raise TracepipeError(f"There is no program {name}.", hint)


def find_library(program: str, name: str = LIBCUDA) -> str | None:
    """Path of the library `name` as the dynamic linker would find it for `program`; None if it would not."""
    for folder in _folders(program):
        path = Path(folder, name)
        if path.is_file():
            return str(path.resolve())
    for path in [*_cached(name), *(Path(folder, name) for folder in _default_folders())]:
        if path.is_file():
            return str(path.resolve())
    return None


def _folders(program: str) -> Iterator[str]:
    try:
        with Elf(program) as elf:
            dynamic = elf.dynamic()
        rpath, runpath = dynamic.rpath, dynamic.runpath
    except InputError:  # a script: its interpreter decides, by the same folders less these
        rpath, runpath = [], []
    # The linker reads $ORIGIN from the file that is executed, links resolved.
    origin = str(Path(program).resolve().parent)
    if not runpath:
        yield from (_expand(folder, origin) for folder in rpath)
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":"))
    yield from (_expand(folder, origin) for folder in runpath)


def _expand(folder: str, origin: str) -> str:
    return folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin)


def _default_folders() -> list[str]:
    triple = f"{platform.machine()}-linux-gnu"
    return [f"/lib/{triple}", f"/usr/lib/{triple}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]


def _cached(name: str) -> Iterator[Path]:
    """Paths of `name` in the linker's cache, 64-bit entries first as they stand.

    glibc's layout, offsets in bytes from the magic (an older table may stand before it):
        0 magic[20] │ 20 entry count u32 │ 24 string bytes u32 │ … │ 48 entries of 24 bytes
        entry: flags i32 │ name u32 │ path u32 │ os version u32 │ hardware capabilities u64
    """
    try:
        data = _CACHE.read_bytes()
    except OSError:
        return
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + 48:
        return
    data = data[start:]
    (count,) = struct.unpack_from("<I", data, 20)
    wanted = name.encode() + b"\0"
    for index in range(min(count, (len(data) - 48) // 24)):
        flags, key, value = struct.unpack_from("<iII", data, 48 + 24 * index)
        # The high byte of the flags is the ABI; 0 is 32-bit x86, which no 64-bit program can load.
        if flags >> 8 and data.startswith(wanted, key):
            yield Path(os.fsdecode(data[value : data.index(b"\0", value)]))
