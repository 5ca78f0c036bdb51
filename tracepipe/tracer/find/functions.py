"""The functions of libraries and programs: file offset → names. Each file is read once.

The CUDA runtime gets every driver function from cuGetProcAddress, by base name, CUDA version and stream flag;
libcuda does not export all of them. A short-lived child process loads the library, asks for the same
functions, and returns file offsets. A failure there is a note, and the capture continues with the exported
functions. Source: the CUDA Driver API reference, section Driver Entry Point Access; cuda.h 13.0, enum
CUdriverProcAddress_flags.
"""

from __future__ import annotations

import json
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Collection
from typing import Any

from tracepipe.errors import InputError
from tracepipe.hooks.names import HookIndex
from tracepipe.sudo import sudo_ids
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.library import LibrarySearch, interpreter_of, python_of
from tracepipe.tracer.request import Notify

Functions = dict[int, list[str]]

VARIANTS = ("_ptsz", "_ptds", "_v2", "_v3", "_v4", "_v5")
_GETTERS = ("cuGetProcAddress_v2", "cuGetProcAddress")
_TIMEOUT_S, _ANSWER_BYTES = 5, 1 << 20
# A process can map thousands of files. What is kept and read of all has a bound; a function takes these bytes
# besides its name.
_TABLES_BYTES, _READ_BYTES, _FUNCTION_BYTES = 1 << 29, 1 << 32, 256
# 1000 × major + 10 × minor: a function may have a new ABI in any of them. The child asks for those below the
# library's own version, and for its own; the library refuses later ones.
_VERSIONS = (
    *(2000, 2020, 3000, 3010, 3020, 4000, 4010, 5000, 6000, 6050, 7000, 7050, 8000, 9000, 9020),
    *(major * 1000 + minor * 10 for major in (10, 11, 12, 13) for minor in range(10)),
)
_DEFAULT, _PER_THREAD = 0, 2  # CU_GET_PROC_ADDRESS_DEFAULT, …_PER_THREAD_DEFAULT_STREAM

# The child's program. It reads {"path", "names", "versions", "flags"} and writes [[name, flags, file offset],
# …]. It looks up an address in its own mappings of the file. What it and the library may write is bounded, as
# they may write without end.
_CHILD = """
import ctypes, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
out = os.dup(1)
os.dup2(2, 1)  # what the library prints is not the answer
task = json.load(sys.stdin)
library = ctypes.CDLL(task["path"])
new = getattr(library, "cuGetProcAddress_v2", None)
get = new or library.cuGetProcAddress
get.restype = ctypes.c_int
get.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64]
function, status = ctypes.c_void_p(), ctypes.c_int()
more = (ctypes.byref(status),) if new else ()
own = ctypes.c_int()
if hasattr(library, "cuDriverGetVersion"):
    library.cuDriverGetVersion(ctypes.byref(own))
versions = [version for version in task["versions"] if version < own.value or not own.value]
found = set()
for name in task["names"]:
    for flags in task["flags"]:
        for version in versions + [own.value] * (own.value > 0):
            function.value = None
            failed = get(name.encode(), ctypes.byref(function), version, flags, *more)
            if not failed and function.value:
                found.add((function.value, name, flags))
spans = []
for line in open("/proc/self/maps", errors="surrogateescape"):
    span, mode, offset, _, _, *name = line.rstrip("\\n").split(None, 5)
    if name == [os.path.realpath(task["path"])] and "x" in mode:
        low, high = (int(part, 16) for part in span.split("-"))
        spans.append((low, high, int(offset, 16)))
answer = [
    [name, flags, address - low + offset]
    for address, name, flags in sorted(found)
    for low, high, offset in spans
    if low <= address < high
]
with open(out, "w") as file:
    json.dump(answer, file)
os._exit(0)  # not the library's destructors
"""


class FunctionTables:
    """The functions of files. A file that cannot be used is reported once, and has no functions: `unreadable`
    has the reason. `ids` has device and inode of those that were read.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._tables: dict[tuple[str, bool], Functions] = {}
        self._read_bytes = 0
        self._sizes: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self.ids: dict[str, tuple[int, int]] = {}

    def functions_of(self, library: str, libraries: LibrarySearch, index: HookIndex) -> dict[str, Functions]:
        """The functions of a library (a soname, a path, "" for the program) that hooks may match, by file.

        If the program has linked in a library statically, its functions replace those of the shared library.
        """
        if ".so" not in library or "/" in library:
            return {path: self.all_of(path) for path in libraries.find(library)}
        if not libraries.is_loaded(library):
            linked_in = {path: self._linked_into(path, index) for path in libraries.programs()}
            if any(linked_in.values()):
                return {path: functions for path, functions in linked_in.items() if functions}
        return {path: self._of_library(path, index) for path in libraries.find(library)}

    def _of_library(self, path: str, index: HookIndex) -> Functions:
        """The functions that a library exports, and those of cuGetProcAddress that a hook matches."""
        exported = self.all_of(path, local=False)
        names = {name for found in exported.values() for name in found}
        if names.isdisjoint(_GETTERS):
            return exported
        asked = {
            base
            for name in (*names, *index.literals)
            if (base := _base(name)).startswith("cu") and any(index.find(base + end) for end in ("", "_ptsz"))
        }
        functions = dict(exported)
        for name, offset in handed_out(path, asked, self._notify):
            if offset not in exported:
                functions.setdefault(offset, []).append(name)
        return functions

    def _linked_into(self, program: str, index: HookIndex) -> Functions:
        """The functions of a program that hooks on a library match, if the library seems to be linked into
        it.

        It does if it has a function that a hook names without wildcards; a pattern may match functions of the
        program itself.
        """
        if interpreter_of(program) or python_of(program):  # a script has no functions
            return {}
        fitting = {
            offset: names for offset, names in self.all_of(program).items() if any(map(index.find, names))
        }
        plain = set(index.literals)
        found = {_base(name) for names in fitting.values() for name in names}
        return fitting if not plain or plain & found else {}

    def all_of(self, path: str, *, local: bool = True) -> Functions:
        """All functions that a file has symbols for, also local ones unless only exported ones are wanted."""
        if (path, local) not in self._tables and path not in self.unreadable:
            try:
                self._tables[path, local] = self._read(path, local)
            except InputError as error:
                self.unreadable[path] = error.message
                self._notify(f"{error.message}: no function of it is recorded")
        return self._tables.setdefault((path, local), {})

    def _read(self, path: str, local: bool) -> Functions:
        by_address: dict[int, list[str]] = {}
        with Elf(path) as elf:
            self._check_amount(path)
            try:
                functions = elf.functions(local=local)
            finally:
                self._read_bytes += elf.bytes_read
            self._sizes[path] = sum(len(name) + _FUNCTION_BYTES for name, _ in functions)
            self._check_amount(path)
            for name, address in functions:
                if (names := by_address.get(address)) is None:
                    by_address[address] = [name]
                elif names[-1] != name:
                    names.append(name)
            if self.ids.setdefault(path, elf.file_id) != elf.file_id:
                raise InputError("it was replaced while it was read", "Try again.", path=path)
            # A name may be in both tables of symbols.
            return {
                elf.file_offset(address): names if len(names) < 3 else [*dict.fromkeys(names)]
                for address, names in by_address.items()
            }

    def _check_amount(self, path: str) -> None:
        if sum(self._sizes.values()) > _TABLES_BYTES or self._read_bytes > _READ_BYTES:
            hint = "Record fewer processes at a time."
            raise InputError("the files up to this one have too many functions", hint, path=path)


def _base(name: str) -> str:
    while name.endswith(VARIANTS):
        name = next(name.removesuffix(ending) for ending in VARIANTS if name.endswith(ending))
    return name


def handed_out(path: str, names: Collection[str], notify: Notify) -> list[tuple[str, int]]:
    """The name and file offset of each function that the libcuda at `path` returns for the base names
    `names`.

    Exported functions are among them. A separate per-thread variant has a name with `_ptsz`. Several ABIs of
    a function have the same name. Empty, with a note, where the library cannot be asked.
    """
    if path.startswith("/proc/"):
        why = "it was deleted, or it is in another container"
        notify(f"{path} could not be searched for functions that it does not export: {why}")
        return []
    task = {"names": sorted(names), "versions": _VERSIONS, "flags": [_DEFAULT, _PER_THREAD]}
    try:
        rows, size_bytes = _ask(path, task)
    except (OSError, ValueError, KeyError, RecursionError, subprocess.SubprocessError) as error:
        reason = "no answer in time" if isinstance(error, subprocess.TimeoutExpired) else str(error)
        notify(f"{path} could not be searched for functions that it does not export: {reason}")
        return []
    found: dict[int, str] = {}
    # They come from a process with foreign code.
    valid = [row for row in rows if isinstance(row, list) and [*map(type, row)] == [str, int, int]]
    for name, flags, offset in sorted(valid, key=lambda row: (row[1], row[0])):
        if name in names and 0 < offset < size_bytes:
            found.setdefault(offset, f"{name}_ptsz" if flags == _PER_THREAD else name)
    return [(name, offset) for offset, name in found.items()]


def _ask(path: str, task: dict[str, Any]) -> tuple[list[Any], int]:
    """The rows that a child process answers, and the bytes of the library. Raises OSError, ValueError."""
    # It loads the file that was judged, whatever stands at that path by then.
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(place)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a file")
        rows = json.loads(_answer({"path": f"/proc/self/fd/{place}", **task}, place, _user(status)))
        return rows if isinstance(rows, list) else [], status.st_size
    finally:
        os.close(place)


def _answer(task: dict[str, Any], file: int, user: dict[str, Any]) -> bytes:
    """The output of the child, which keeps the descriptor `file`; `user` are options of Popen. Raises
    OSError, SubprocessError, ValueError.
    """
    environment = {
        name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "LANG")
    }
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _CHILD, str(_ANSWER_BYTES)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=errors,
            env=environment,
            cwd="/",
            start_new_session=True,  # a Ctrl-C is for the capture
            pass_fds=[file],
            **user,
        ) as child:
            try:
                child.communicate(json.dumps(task).encode(), _TIMEOUT_S)
            finally:
                if child.poll() is None:  # and what the library has started
                    os.killpg(child.pid, signal.SIGKILL)
        out.seek(0)
        errors.seek(0)
        if child.returncode:
            lines = errors.read().decode(errors="replace").strip().splitlines()
            raise ValueError(lines[-1] if lines else f"the child process ended with {child.returncode}")
        return out.read()


def _user(status: os.stat_result) -> dict[str, Any]:
    """The user who loads the library if this is root: its owner, so that its code gets no other rights. Of a
    library of root it is the user who called sudo. Raises ValueError where others can write that one.
    """
    if os.geteuid() != 0:
        return {}
    ids, uid = sudo_ids(), status.st_uid
    if uid == 0:
        if status.st_mode & (stat.S_IWOTH | stat.S_IWGRP * (status.st_gid != 0)):
            raise ValueError("other users can write it")
        uid = ids.uid if ids else 0
    if uid == 0:
        return {}
    user = pwd.getpwuid(uid)
    return {"user": uid, "group": user.pw_gid, "extra_groups": os.getgrouplist(user.pw_name, user.pw_gid)}
