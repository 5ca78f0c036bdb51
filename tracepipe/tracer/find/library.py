"""Finds the library of a hook: as the dynamic linker does, and where running processes have mapped it.

The order is that of ld.so(8): RPATH of the program (unless it has RUNPATH), LD_LIBRARY_PATH, RUNPATH,
/etc/ld.so.cache, the default folders. dlopen, by which the CUDA runtime loads libcuda, searches in the same
way.

A process in a container has another root and other mounts: its files are found under /proc/PID/root. A file
that was deleted or replaced since then is found under /proc/PID/map_files, by the address of its mapping. So
is a file whose path is wrong under that root (chroot in a separate mount namespace).

PyTorch, JAX and CuPy load CUDA's libraries by path, from wheels: nvidia/cuda_runtime/lib, nvidia/cu13/lib,
torch/lib. The folders of packages are found from files alone: the interpreter is not run, as it belongs to
the target. Source: Python's documentation of the modules `site` and `venv`.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from tracepipe import paths
from tracepipe.errors import InputError, TracepipeError
from tracepipe.sudo import sudo_user
from tracepipe.tracer.find.elf import Dynamic, Elf
from tracepipe.tracer.find.foreign import head_of

_CACHE = Path("/etc/ld.so.cache")
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_NEEDED_LIMIT = 2000  # libraries of one program; PyTorch has about 100
_LOOKUPS_MAX = 10 * _NEEDED_LIMIT  # of names, some of which are not found
_FOLDERS_MAX = 256  # of a search path
_SETTINGS_BYTES = 1 << 16

_PROC = Path("/proc")
# `7f1c2a000000-7f1c2a021000 r-xp 00002000 fe:01 1573 /usr/lib/libcuda.so.550.54.14 (deleted)`
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ (\d+) *(.*)")
_DELETED = " (deleted)"

_INTERPRETER = re.compile(r"(python|pypy)[\d.]*t?")
_LIBRARY_FOLDERS = ("nvidia/*/lib", "torch/lib", "*.libs")


def find_program(command: list[str]) -> str:
    """The path of the program that `command` runs. Raises TracepipeError if none can be executed."""
    name = command[0]
    found = shutil.which(name)
    if found:
        return str(Path(found).absolute())
    if "/" in name and paths.is_folder(name):
        raise TracepipeError(f"{name} is a folder.", "Give a program after --.")
    if "/" in name and paths.is_there(name):
        raise TracepipeError(f"{name} cannot be executed.", f"chmod +x {name}")
    hint = "Check the path." if "/" in name else f"Is it in $PATH? For a file here, write ./{name}."
    raise TracepipeError(f"There is no program {name}.", hint)


def find_versions(program: str, name: str) -> dict[str, str]:
    """Soname of each version of a library → the file that the linker would load for `program`."""
    dynamic, found = _dynamic(program), dict[str, str]()
    rpath = [] if dynamic.runpath else dynamic.rpath
    before = [*_expanded(rpath, program), *_environment(), *_expanded(dynamic.runpath, program)]
    cached = (
        (version, file) for version, files in _cached().items() if is_version(version, name) for file in files
    )
    for version, file in (*_in_folders(before, name), *cached, *_in_folders(_default_folders(), name)):
        if version not in found and paths.is_file(file):
            found[version] = str(file.resolve())
    return found


def is_version(file_name: str, library: str) -> bool:
    """Whether a file name is one of `library`: libcudart.so.12 of libcudart.so, but not of libcudart.so.11.

    Python packages add eight hexadecimal digits to the stem: libcudart-d0da41ae.so.11.0.
    """
    if not file_name.startswith(library.partition(".so")[0]):
        return False
    stem, _, version = library.partition(".so")
    form = rf"{re.escape(stem)}(-[0-9a-f]{{8}})?\.so{re.escape(version)}(\.[\w.]+)?"
    return re.fullmatch(form, file_name) is not None


class LibrarySearch:
    """Finds the libraries that a target has loaded or would load.

    The target is `command`, which is about to run, or the running `pids`; with neither, it is any program of
    this machine. Files in `given` replace the libraries with their names. Raises InputError if one is not a
    library.
    """

    def __init__(
        self, command: list[str] | None = None, pids: tuple[int, ...] = (), given: tuple[str, ...] = ()
    ) -> None:
        self._pids = pids
        self._programs = _programs(command) if command else []
        self._given = {str(Path(path).resolve()): _names(path, must=True) for path in given}

    def find(self, library: str) -> list[str]:
        """The files of a soname, with or without version, of a path or a pattern; of the programs for ""."""
        if library == "":
            return self.programs()
        if "/" in library:  # the file with that path, or the ELF files that match it as a pattern
            if paths.is_file(library):
                return [str(Path(library).resolve())]
            root = Path("/" if library.startswith("/") else ".")
            fitting = [path for path in paths.fitting(root, library.lstrip("/")) if paths.is_file(path)]
            return [path for path in dict.fromkeys(str(file.resolve()) for file in fitting) if _is_elf(path)]
        if ".so" not in library:
            found_program = shutil.which(library)
            own = [program for program in self.programs() if Path(program).name == library]
            return own or ([str(Path(found_program).resolve())] if found_program else [])
        if known := self._files_given(library) or self.mapped(library) or self.linked(library):
            return known
        found: list[str] = []
        for program in self.programs() or [""]:
            if program.startswith("/proc/"):  # in a container, which has other folders
                continue
            python = python_of(program)
            if python:
                found += package_libraries(python, library)
            found += find_versions(program, library).values()
        return list(dict.fromkeys(found))

    def _files_given(self, library: str) -> list[str]:
        return [path for path, names in self._given.items() if any(same_library(n, library) for n in names)]

    def mapped(self, library: str) -> list[str]:
        """Files of `library` that the processes have mapped."""
        stem = library.partition(".so")[0]
        return [
            path
            for name, path in self._mapped
            if name.startswith(stem) and any(is_version(known, library) for known in (name, *_names(path)))
        ]

    def is_loaded(self, library: str) -> bool:
        """Whether the target is known to use a separate file of `library`: given, mapped or linked."""
        return bool(self._files_given(library) or self.mapped(library) or self.linked(library))

    def linked(self, library: str) -> list[str]:
        """Files of `library` that the programs load when they start."""
        return [path for name, path in self._linked.items() if is_version(name, library)]

    def programs(self) -> list[str]:
        """The target's programs: of the command, also after a launcher such as timeout, and of the pids."""
        return [*self._programs, *self._running]

    def unused(self, names: tuple[str, ...]) -> list[str]:
        """The given files that replace none of the libraries `names`."""
        return [
            path
            for path, own in self._given.items()
            if not any(same_library(mine, name) for mine in own for name in names)
        ]

    def where(self, library: str) -> str:
        """Why `library` was not found, for messages."""
        if "/" in library:
            elsewhere = self.find(Path(library).name) if ".so" in Path(library).name else []
            found = f"; {elsewhere[0]} was found: write {Path(library).name} alone" if elsewhere else ""
            return f"there is no such file{found}"
        if self._pids:
            pids = ", ".join(map(str, self._pids))
            return f"process {pids} has not loaded it, and its dynamic linker would not find it"
        if not self._programs:
            return "the dynamic linker would not find it"
        packages = " or in Python's packages" if any(map(python_of, self._programs)) else ""
        names = " and ".join(Path(program).name for program in self._programs)
        return f"not where the dynamic linker of {names} looks{packages}"

    @cached_property
    def _mapped(self) -> list[tuple[str, str]]:
        return list(dict.fromkeys(found for pid in self._pids for found in mapped_files(pid)))

    @cached_property
    def _running(self) -> list[str]:
        found = [program_of(pid) for pid in self._pids]
        return list(dict.fromkeys(path for path in found if path))

    @cached_property
    def _linked(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for program in self._programs:
            for name, path in linked_libraries(python_of(program) or program).items():
                found.setdefault(name, path)
        return found


def _is_elf(path: str) -> bool:
    return head_of(path, 4) == b"\x7fELF"


def linked_libraries(program: str) -> dict[str, str]:
    """All libraries that the linker loads before `program` starts: soname → path. Empty for a script."""
    found: dict[str, str] = {}
    waiting = deque([(program, list[str]())])  # a file, and the RPATH folders of the file that loads it
    lookups = 0
    while waiting and len(found) < _NEEDED_LIMIT and lookups < _LOOKUPS_MAX:
        path, inherited = waiting.popleft()
        dynamic = _dynamic(path)
        folders = [] if dynamic.runpath else _expanded([*_expanded(dynamic.rpath, path), *inherited], path)
        before = [*folders, *_environment(), *_expanded(dynamic.runpath, path)]
        needed = [name for name in dynamic.needed if name not in found]
        lookups += len(needed)
        for name in needed:
            candidates = [Path(name)]
            if "/" not in name:
                candidates = [Path(folder, name) for folder in before] + _cached().get(name, [])
                candidates += [Path(folder, name) for folder in _default_folders()]
            library = next((str(file.resolve()) for file in candidates if paths.is_file(file)), "")
            if library and name not in found:  # it may be needed twice
                found[name] = library
                waiting.append((library, folders))
    return found


def _programs(command: list[str]) -> list[str]:
    """The command's program, and those that it may start: later words that are programs, such as `python`."""
    programs = [find_program(command)]
    for word in command[1:]:
        found = shutil.which(word) if "/" in word or re.fullmatch(r"python[\d.]*", word) else None
        if found and paths.is_file(found):
            programs.append(str(Path(found).absolute()))
    return list(dict.fromkeys(programs))


def _names(path: str, *, must: bool = False) -> tuple[str, ...]:
    """The names of a library file: its file name, and its soname."""
    soname = _dynamic(path, must=must).soname
    return (Path(path).name, soname) if soname else (Path(path).name,)


def same_library(file_name: str, library: str) -> bool:
    """Whether a file name is one of `library` in any version."""
    return is_version(file_name, library.partition(".so")[0] + ".so")


def _dynamic(path: str, *, must: bool = False) -> Dynamic:
    try:
        with Elf(path) as elf:
            return elf.dynamic()
    except InputError:
        if must:
            raise
        return Dynamic([], [], [])  # a script: its interpreter loads, from the same folders without these


def _environment() -> list[str]:
    return [folder for folder in os.environ.get("LD_LIBRARY_PATH", "").replace(";", ":").split(":") if folder]


def _in_folders(folders: Iterable[str], name: str) -> Iterator[tuple[str, Path]]:
    """Versions of a library that the folders may have, and their files."""
    for folder in folders:
        yield name, Path(folder, name)
        if name.endswith(".so"):  # any version
            with suppress(OSError):
                with os.scandir(folder) as entries:
                    names = sorted(entry.name for entry in entries if is_version(entry.name, name))
                yield from ((entry, Path(folder, entry)) for entry in names)


def _expanded(folders: Iterable[str], program: str) -> list[str]:
    # The linker reads $ORIGIN from the file that is executed, links resolved.
    origin = str(Path(program).resolve().parent)
    found = (folder.replace("${ORIGIN}", origin).replace("$ORIGIN", origin) for folder in folders)
    return list(dict.fromkeys(found))[:_FOLDERS_MAX]


def _default_folders() -> list[str]:
    triple = f"{platform.machine()}-linux-gnu"
    return [f"/lib/{triple}", f"/usr/lib/{triple}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]


def _cached() -> dict[str, list[Path]]:
    """The 64-bit entries of the linker's cache, in their order: soname → paths.

    glibc's layout, with offsets in bytes from the magic (an older table may precede it):
        0 magic[20] │ 20 entry count u32 │ 24 string bytes u32 │ … │ 48 entries of 24 bytes
        entry: flags i32 │ name u32 │ path u32 │ os version u32 │ hardware capabilities u64
    """
    try:
        return _read_cache(_CACHE, _CACHE.stat().st_mtime_ns)
    except OSError:
        return {}


@cache
def _read_cache(path: Path, _changed_ns: int) -> dict[str, list[Path]]:
    data = path.read_bytes()
    start = data.find(_CACHE_MAGIC)
    if start < 0 or len(data) < start + 48:
        return {}
    data = data[start:]
    (count,) = struct.unpack_from("<I", data, 20)
    found: dict[str, list[Path]] = {}
    for index in range(min(count, (len(data) - 48) // 24)):
        flags, key, value = struct.unpack_from("<iII", data, 48 + 24 * index)
        # The high byte of the flags is the ABI; 0 is 32-bit x86, which no 64-bit program can load.
        if flags >> 8:
            name, file = (os.fsdecode(data[at : data.find(b"\0", at)]) for at in (key, value))
            found.setdefault(name, []).append(Path(file))
    return found


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping of a process's memory; `path` is "" if it is not of a file."""

    start: int
    end: int
    offset: int
    inode: int
    path: str
    is_code: bool

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.path.removesuffix(_DELETED)).name


def mappings(pid: int | str) -> Iterator[Mapping]:
    """The mappings of a process, in the order of their addresses. Raises OSError."""
    with (_PROC / str(pid) / "maps").open(errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            if match := _MAPPING.fullmatch(line.removesuffix("\n")):
                start, end, flags, offset, inode, path = match.groups()
                yield Mapping(int(start, 16), int(end, 16), int(offset, 16), int(inode), path, "x" in flags)


def mapped_files(pid: int) -> list[tuple[str, str]]:
    """Name and path of each file that `pid` has mapped as executable; empty if the process has ended."""
    found: dict[str, tuple[str, str]] = {}
    with suppress(OSError):
        files = [one for one in mappings(pid) if one.is_code and one.inode and one.path.startswith("/")]
        root = _root(pid)
        for mapping in files:
            if mapping.path not in found:
                opened = root + mapping.path
                link = f"{_PROC}/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
                if _inode(opened) != mapping.inode and _inode(link):
                    opened = link
                found[mapping.path] = mapping.name, opened
    return list(found.values())


def program_of(pid: int) -> str:
    """A path to open the program that `pid` runs; "" if the process has ended."""
    link = _PROC / str(pid) / "exe"
    try:
        path = str(link.readlink())
    except OSError:
        return ""
    return str(link) if path.endswith(_DELETED) or _root(pid) else path


def _root(pid: int) -> str:
    """The prefix for the paths of `pid` in this process; "" where both see the same files."""
    ours, theirs = _PROC / "self", _PROC / str(pid)
    try:
        same = (ours / "ns" / "mnt").readlink() == (theirs / "ns" / "mnt").readlink()
        if same and os.path.samestat((ours / "root").stat(), (theirs / "root").stat()):
            return ""
    except OSError:
        return ""
    return str(theirs / "root")


def _inode(path: str) -> int:
    try:
        return Path(path).stat().st_ino
    except OSError:
        return 0


def python_of(program: str) -> str:
    """The interpreter if `program` is a Python or a Python script (such as torchrun); otherwise ""."""
    if _INTERPRETER.fullmatch(Path(program).name):
        return program
    interpreter = interpreter_of(program)
    return interpreter if _INTERPRETER.fullmatch(Path(interpreter).name) else ""


def interpreter_of(script: str) -> str:
    """The program that a script's first line names, also after `env`; "" if the file is not a script."""
    head = os.fsdecode(head_of(script, 256).partition(b"\n")[0])
    words = head[2:].split() if head.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        names = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
        words = [shutil.which(names[0]) or ""] if names else []
    return words[0] if words else ""


def package_libraries(python: str, library: str) -> list[str]:
    """The files of a library in the interpreter's packages, with links resolved."""
    inside = ((folder, pattern) for folder in package_folders(python) for pattern in _LIBRARY_FOLDERS)
    folders = [found for folder, pattern in inside for found in paths.fitting(folder, pattern)]
    # conda's own libraries
    folders += [prefix / "lib" for prefix in _prefixes(python) if paths.is_folder(prefix / "conda-meta")]
    files: dict[str, None] = {}
    for folder in folders:
        with suppress(OSError):
            names = sorted(entry.name for entry in folder.iterdir() if is_version(entry.name, library))
            found_here = [folder / name for name in names if paths.is_file(folder / name)]
            files.update(dict.fromkeys(str(file.resolve()) for file in found_here))
    return list(files)


def package_folders(python: str) -> list[Path]:
    """The existing folders from which the interpreter imports packages."""
    folders = [Path(part) for part in os.environ.get("PYTHONPATH", "").split(":") if part]
    bases = list(_prefixes(python))
    if os.environ.get("VIRTUAL_ENV"):
        bases.append(Path(os.environ["VIRTUAL_ENV"]))
    bases += [_home() / ".local", Path("/usr/local"), Path("/usr")]
    for base in bases:
        for kind in ("site-packages", "dist-packages"):
            folders += paths.fitting(base, f"lib*/python3*/{kind}")
    folders.append(Path("/usr/lib/python3/dist-packages"))
    existing = {folder.resolve(): None for folder in folders if paths.is_folder(folder)}
    return list(existing)


def _prefixes(python: str) -> Iterator[Path]:
    """The folders above bin of the interpreter, of its venv's base, and of the file that it links to."""
    path = Path(python).absolute()
    prefix = path.parent.parent
    yield prefix
    if path.parent.name == "shims":  # pyenv: it may be any of its versions
        yield from paths.fitting(prefix, "versions/*")
    settings = head_of(str(prefix / "pyvenv.cfg"), _SETTINGS_BYTES).decode(errors="replace")
    for line in settings.splitlines():
        key, _, value = line.partition("=")
        if key.strip() == "home" and value.strip().startswith("/"):
            yield Path(value.strip()).parent
    yield path.resolve().parent.parent


def _home() -> Path:
    """The home of the user who runs the target: under sudo, of the user who called it."""
    user = sudo_user()
    return Path(user.pw_dir) if user else Path.home()
