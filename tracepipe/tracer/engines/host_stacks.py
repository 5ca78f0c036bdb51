"""The stacks of the host: from the words that probes.bpf.c walks to frames with function, file and line.

    FRAMES records ──▶ addresses ──▶ mapped file, offset ──────────▶ symbol, when a line is rendered
                  └──▶ Python's frames: code, instruction ──▶ code object, read at once: it may be freed

One stack has both: native frames from the innermost one out to the interpreter, then Python's frames in place
of the interpreter's own. Without a Python it has all native frames. The innermost address is exact. The
kernel finds its callers by frame pointers, which many libraries are built without: there the native frames
end early. Where they do not reach Python, a frame "unknown" is between them. An address that is in no symbol
is "unknown" in its file, and one in no file (a JIT) too, unless the program states it in /tmp/perf-PID.map.

The layouts of CPython are those of gpu/native/python_frames.h, which reads them in the process itself.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import struct
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracepipe.errors import InputError
from tracepipe.event.model import INDEX_LIMIT
from tracepipe.event.vocabulary import UNKNOWN_CODE
from tracepipe.mangled_names import demangled
from tracepipe.tracer.find.elf import Elf, Symbols
from tracepipe.tracer.find.foreign import head_of
from tracepipe.tracer.find.library import Mapping, mappings
from tracepipe.tracer.records.record import (
    FRAMES,
    ON_CPU_SAMPLE,
    RECORD,
    RECORD_BYTES,
    SWITCH_OUT,
    THREAD_NAME,
    THREAD_NEW,
)

HZ: Final = 199
"""Samples of a processor a second: no divisor of the round rates at which programs do things."""
_libc = ctypes.CDLL(None, use_errno=True)
NONE: Final = 0xFFFF
"""Of an offset."""
OF_C: Final = 3
"""The owner of a frame that stands for a call from C: Python does not show it."""
_KIND_AT: Final = 28
_NEEDED: Final = re.compile(
    b"[%s]" % re.escape(bytes((FRAMES, ON_CPU_SAMPLE, SWITCH_OUT, THREAD_NEW, THREAD_NAME)))
)
"""Finds the kinds of the records that are read here."""
_THREADS_MAX: Final = 1 << 16
_FIRST_ID: Final = 1 << 32  # smaller ids are those of the stacks that a library in the command reads
_STACKS_MAX: Final = 1 << 17
_DIFFERENT_MAX: Final = 1 << 17  # with their frames; a recording has some thousands
_CODES_MAX: Final = 1 << 15  # of a process
# Mappings are read so often at once; then reading them may take this part of the time.
_MAPS_AT_ONCE, _MAPS_APART = 64, 20
# How soon a process is looked at again for a Python: each time twice as late.
_LOOK_NS: Final = (10_000_000, 30_000_000_000)
_DEBUG_FILES = Path("/usr/lib/debug/.build-id")
"""Where distributions install the symbols of stripped files, by their build ids."""
_PERF_MAP_BYTES: Final = 1 << 26
_OPEN_MAX: Final = 128  # files whose symbols are known at a time
_UNKNOWN: Final = "unknown"
_GENERATED: Final = "[generated]"
"""In place of a file, where code is in none: that of a just-in-time compiler."""


class _Layout(NamedTuple):
    """Offsets in bytes. `main`: the pointer to the main interpreter in `_PyRuntime`. The next ten are those
    of struct python of probes.bpf.c, the others are in a code object and in a str. `at`: the instruction, an
    index in 3.10 and a pointer in the others.
    """

    main: int
    threads: int
    next: int
    id: int
    in_pthread: int
    frame: int
    between: int
    previous: int
    code: int
    at: int
    owner: int
    filename: int
    name: int
    linetable: int
    first_line: int
    first_traced: int
    instructions: int
    ascii_bytes: int
    text_bytes: int


# struct pthread of glibc.
_TID_IN_PTHREAD: Final = {"x86_64": 720, "aarch64": 208}.get(platform.machine(), NONE)
_LAYOUTS: Final = {
    10: _Layout(
        40, 8, 8, 176, _TID_IN_PTHREAD, 24, NONE, 24, 32, 96, NONE, 104, 112, 120, 40, NONE, NONE, 48, 72
    ),
    11: _Layout(48, 16, 8, 160, NONE, 56, 8, 48, 32, 56, 69, 112, 128, 136, 72, 168, 184, 48, 72),
    12: _Layout(48, 72, 8, 144, NONE, 56, 0, 8, 0, 56, 70, 112, 128, 136, 68, 176, 192, 40, 56),
    13: _Layout(640, 7344, 8, 160, NONE, 72, NONE, 8, 0, 56, 70, 112, 128, 136, 68, 184, 200, 40, 56),
    14: _Layout(816, 7344, 8, 160, NONE, 72, NONE, 8, 0, 56, 74, 112, 128, 136, 68, 192, 208, 40, 56),
    15: _Layout(944, 7336, 8, 184, NONE, 72, NONE, 8, 0, 56, 74, 112, 128, 136, 68, 192, 208, 40, 56),
}
FRAME_BYTES: Final = {10: 104, 11: 72, 12: 72, 13: 72, 14: 80, 15: 80}
"""How much of a frame has what is read."""
_PYTHON: Final = struct.Struct("<Q12H")
_DEBUG_OFFSETS: Final = (13, b"xdebugpy", 40, 72)
"""From this version on, `_PyRuntime` begins with this cookie, and has the offsets of the first interpreter
and of its threads at these places."""
_NAMED_PYTHON: Final = re.compile(r"(?:lib)?python3\.(\d+)(?![\dtd])")
_INTERPRETER: Final = re.compile(
    r"_?PyEval_|_PyFunction_Vectorcall|Py_(?:Run|Bytes)?Main|pymain_|_?PyRun_|_start$|__libc_start|main$"
)
_CODE_BYTES: Final = 208
# From Python 3.14 on, a frame's references may have tags in the low bits.
_ADDRESS: Final = (1 << 48) - 8
_TEXT_BYTES, _TABLE_BYTES = 1024, 1 << 16


class Native(NamedTuple):
    """An address of native code: its file, the inode of that, and the offset in it; without a file the name
    of the mapping, or "", and the address.
    """

    path: str
    inode: int
    offset: int
    pid: int


Python = tuple[str, str, int]
"""Function, file and line."""
_Stack = tuple[tuple[Native, ...], tuple[Python, ...], bool]
"""Native frames, those of Python, and whether there are more of them."""


@dataclass(slots=True)
class _Code:
    """A code object of Python. `identity` tells it from others at its address, `lines` has those of the
    instructions that were asked for.
    """

    identity: bytes
    mark: int
    name: str
    filename: str
    first_line: int
    first_traced: int
    table: bytes
    lines: dict[int, int] = field(default_factory=dict)


class Process:
    """A process whose threads are sampled: its mapped code and its Python, as far as they were needed."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._mappings: list[Mapping] = []
        """Those of code."""
        self._starts: list[int] = []
        self._maps = self._map_again_ns = 0
        self.layout: _Layout | None = None
        self.minor = self.interpreter_at = 0
        """The minor version of its Python, and where the pointer to the main interpreter is."""
        self.look_ns, self._wait_ns = 0, _LOOK_NS[0]
        self._memory = -1
        self._codes: dict[int, _Code] = {}
        """By address."""

    def fork(self, pid: int) -> Process:
        """A copy of this process."""
        copy = Process(pid)
        copy._mappings, copy._starts, copy.layout = self._mappings, self._starts, self.layout
        copy.minor, copy.interpreter_at = self.minor, self.interpreter_at
        copy._codes = dict(self._codes)
        return copy

    def read_mappings(self) -> None:
        begun_ns, found = time.monotonic_ns(), list[Mapping]()
        with suppress(OSError):
            found = [one for one in mappings(self.pid) if one.is_code]
        if found:
            self._mappings, self._starts = found, [one.start for one in found]
        # While a program loads its libraries, its mappings change often.
        self._maps, now_ns = self._maps + 1, time.monotonic_ns()
        if self._maps > _MAPS_AT_ONCE:
            self._map_again_ns = now_ns + _MAPS_APART * (now_ns - begun_ns)

    def native(self, address: int, *, is_innermost: bool) -> Native | None:
        """What code an address is in; None for an address that is in none. Mappings are read again for an
        innermost one, which is no mistake, but not often: a process may have thousands.
        """
        now_ns = time.monotonic_ns()
        for _ in range(2):
            at = bisect_right(self._starts, address) - 1
            if at >= 0 and address < self._mappings[at].end:
                one = self._mappings[at]
                if not one.path.startswith("/"):  # [vdso], or generated code
                    return Native(one.path, 0, address, self.pid)
                return Native(one.path, one.inode, address - one.start + one.offset, self.pid)
            if not is_innermost or now_ns < self._map_again_ns:
                break
            self.read_mappings()
        return None

    def find_python(self, now_ns: int) -> bytes | None:
        """A struct python where one was found now; it is looked for again later where it was not."""
        if self.layout is not None or now_ns < self.look_ns:
            return None
        self.look_ns, self._wait_ns = now_ns + self._wait_ns, min(2 * self._wait_ns, _LOOK_NS[1])
        self.read_mappings()
        for one in self._mappings:
            named = _NAMED_PYTHON.match(one.path.rpartition("/")[2])
            if named is None or int(named[1]) not in _LAYOUTS:
                continue
            with suppress(InputError, OSError), Elf(_readable(one.path, self.pid)) as elf:
                value = elf.data_symbol("_PyRuntime")
                if value is None:
                    continue
                minor, runtime = int(named[1]), one.start - elf.address_at(one.offset) + value
                layout = _LAYOUTS[minor]
                if minor >= _DEBUG_OFFSETS[0]:
                    _, cookie, head_at, threads_at = _DEBUG_OFFSETS
                    head = self.read(runtime, threads_at + 8)
                    if head[:8] != cookie:
                        continue
                    main, threads = (
                        int.from_bytes(head[at : at + 8], "little") for at in (head_at, threads_at)
                    )
                    layout = layout._replace(main=main + 8, threads=threads)
                self.layout, self.minor = layout, minor
                self.interpreter_at = runtime + layout.main
                return _PYTHON.pack(self.interpreter_at, *layout[1:11], layout.linetable, FRAME_BYTES[minor])
        return None

    def read(self, address: int, size: int) -> bytes:
        """Memory of the process. Raises OSError where it cannot be read."""
        if self._memory < 0:
            self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(self._memory, size, address)
        except OverflowError:
            raise OSError from None
        if len(data) < size:  # as of a process that has ended
            raise OSError
        return data

    def word(self, address: int) -> int:
        """A word of its memory. Raises OSError."""
        return int.from_bytes(self.read(address, 8), "little")

    def pythons(self, frames: Sequence[tuple[int, int]], *, are_marked: bool = True) -> list[Python | None]:
        """Some frames, each by its code and instruction; None for one that Python does not show. Code objects
        are read at once, as they may be freed soon, and others be made at their addresses: `are_marked` says
        whether that would show.
        """
        shown: list[Python | None] = []
        addresses = [marked & _ADDRESS for marked, _ in frames]
        for (marked, at), address, data in zip(frames, addresses, self._read_codes(addresses), strict=True):
            code, mark = self._codes.get(address), marked >> 48
            if not are_marked:
                mark = self._mark(data) if data else -1
            elif data and self._mark(data) != mark:
                data = b""  # another code object is there now
            # Where it cannot be read, its process has ended, or it was freed: it is what it was before.
            if data and (code is None or code.identity != self._identity(data)):
                with suppress(OSError, struct.error, IndexError):
                    code = self._codes[address] = self._code_of(data)
            if code is None or code.mark != mark:
                shown.append((_UNKNOWN, UNKNOWN_CODE, 0))
            else:
                shown.append(self._frame_of(address, at, code))
        if len(self._codes) > _CODES_MAX:
            self._codes.clear()
        return shown

    def _identity(self, data: bytes) -> bytes:
        """What tells a code object from a later one at its address."""
        layout = self.layout
        assert layout is not None
        return data[layout.first_line : layout.first_line + 4] + data[layout.filename : layout.linetable + 8]

    def _mark(self, data: bytes) -> int:
        """The mark of a code object, as the BPF program makes it."""
        assert self.layout is not None
        lines = int.from_bytes(data[self.layout.linetable : self.layout.linetable + 8], "little")
        return (lines >> 4 ^ lines >> 20) & 0xFFFF

    def _read_codes(self, codes: Sequence[int]) -> list[bytes]:
        """The beginnings of code objects, in one call of the kernel; b"" where one cannot be read."""
        local = ctypes.create_string_buffer(_CODE_BYTES * len(codes))
        here = struct.pack("<QQ", ctypes.addressof(local), len(local))
        there = b"".join(struct.pack("<QQ", code, _CODE_BYTES) for code in codes)
        read = _libc.process_vm_readv(self.pid, here, 1, there, len(codes), ctypes.c_ulong(0))
        data = local.raw[: max(read, 0)]  # it ends before the first that cannot be read
        parts = [data[start : start + _CODE_BYTES] for start in range(0, len(local), _CODE_BYTES)]
        return [part if len(part) == _CODE_BYTES else b"" for part in parts]

    def _code_of(self, data: bytes) -> _Code:
        """A code object, from its beginning. Raises OSError and struct.error where it is none."""
        layout = self.layout
        assert layout is not None
        (first_line,) = struct.unpack_from("<i", data, layout.first_line)
        first_traced = 0
        if layout.first_traced != NONE:
            (first_traced,) = struct.unpack_from("<i", data, layout.first_traced)
        filename, name, table = (
            struct.unpack_from("<Q", data, place)[0]
            for place in (layout.filename, layout.name, layout.linetable)
        )
        size = min(struct.unpack("<q", self.read(table + 16, 8))[0], _TABLE_BYTES)
        entries = self.read(table + 32, size) if size > 0 else b""
        return _Code(
            self._identity(data),
            self._mark(data),
            self._text(name),
            self._text(filename),
            first_line,
            first_traced,
            entries,
        )

    def _frame_of(self, address: int, at: int, code: _Code) -> Python | None:
        layout = self.layout
        assert layout is not None
        if layout.instructions == NONE:
            place = 2 * (at & 0xFFFFFFFF) if not at & 1 << 31 else -1
        else:
            place = at - (address + layout.instructions)
            if 0 <= place < 2 * code.first_traced:
                return None
        if place not in code.lines:
            line_of = line_by_pairs if layout.instructions == NONE else line_by_entries
            line = line_of(code.table, code.first_line, place) if place >= 0 else code.first_line
            code.lines[place] = min(max(line, 0), INDEX_LIMIT)
        return code.name, code.filename, code.lines[place]

    def _text(self, address: int) -> str:
        """A str, which must be as Python's compiler makes them. Raises OSError for another object."""
        layout = self.layout
        assert layout is not None
        head = self.read(address, layout.text_bytes)
        length, state = int.from_bytes(head[16:24], "little"), int.from_bytes(head[32:36], "little")
        is_compact, is_ascii, width = state >> 5 & 1, state >> 6 & 1, state >> 2 & 7
        if not is_compact or length > _TEXT_BYTES or width not in (1, 2, 4):
            raise OSError
        data = self.read(address + (layout.ascii_bytes if is_ascii else layout.text_bytes), length * width)
        return data.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[width], "replace")

    def close(self) -> None:
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def line_by_pairs(table: bytes, line: int, wanted: int) -> int:
    """The line of a byte of code in 3.10 (PEP 626): pairs of bytes of code and line difference, −128 for
    none.
    """
    passed = 0
    for at in range(0, len(table) - 1, 2):
        lines = table[at + 1] - 256 if table[at + 1] > 127 else table[at + 1]
        line += lines if lines != -128 else 0
        passed += table[at]
        if passed > wanted:
            return line if lines != -128 else 0
    return line


def line_by_entries(table: bytes, line: int, wanted: int) -> int:
    """The same from 3.11 on (CPython's Objects/locations.md): 1 | kind 4 bits | units − 1, then data that
    depends on the kind.
    """
    at = passed = 0
    while at < len(table):
        kind, units = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        if 10 <= kind <= 12:
            line += kind - 10
        elif kind in (13, 14):
            value, shift, place = 0, 0, at
            while place < len(table):
                value |= (table[place] & 63) << shift
                if not table[place] & 64:
                    break
                place, shift = place + 1, shift + 6
            line += -(value >> 1) if value & 1 else value >> 1
        passed += 2 * units
        if passed > wanted:
            return line if kind != 15 else 0
        while at < len(table) and not table[at] & 0x80:
            at += 1
    return line


def _readable(path: str, pid: int) -> str:
    """A path to a mapped file: as its process sees it, where that still runs."""
    seen = f"/proc/{pid}/root{path}"
    return seen if Path(seen).exists() else path


class _Symbols:
    """The functions of a file by offset in it. The file stays open."""

    def __init__(self, path: str, inode: int, pid: int) -> None:
        self._found: Symbols | None = None
        self._open = ExitStack()
        readable = _readable(path, pid)
        with suppress(InputError, OSError):
            elf = self._open.enter_context(Elf(readable))
            if elf.file_id[1] != inode:  # it was replaced
                return
            self._found, self._address, build_id = elf.symbols(), elf.address_at, elf.build_id()
            debug = _DEBUG_FILES / build_id[:2] / f"{build_id[2:]}.debug"
            if build_id and debug.exists():  # its addresses are the same
                self._found = self._open.enter_context(Elf(str(debug))).symbols() or self._found

    def name(self, offset: int) -> str:
        """The function at an offset, else "unknown"."""
        if self._found is not None:
            with suppress(InputError):
                return demangled(self._found.name(self._address(offset))) or _UNKNOWN
        return _UNKNOWN

    def close(self) -> None:
        with suppress(InputError):  # it may have been replaced since then
            self._open.close()


class HostStacks:
    """The stacks of one recording, by the numbers that records have.

    `add` is called where records are collected, as soon as possible, and `record_of` where they are rendered.
    `is_alone`: without the layer `scheduler`.
    """

    def __init__(
        self,
        set_python: Callable[[int, bytes], None],
        shown_pid: Callable[[int], int],
        forget_stack: Callable[[int], None],
        *,
        is_alone: bool,
    ) -> None:
        """`set_python` states where a process, by the kernel's id, has its Python; `shown_pid` is the id of a
        process in this pid namespace, 0 where it is not known yet; `forget_stack` has a stack sent again.
        """
        self._forget_stack = forget_stack
        self.is_alone = is_alone
        self._set_python, self._shown_pid = set_python, shown_pid
        self._processes: dict[int, Process] = {}
        self._tgids: dict[int, int] = {}
        """Thread → its process, by the kernel's ids."""
        self._parts: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
        self._stacks = OrderedDict[int, _Stack]()
        """By number: those that were not rendered yet."""
        self.left_out = 0
        """Stacks beyond those that a recording keeps."""
        self._symbols: dict[tuple[str, int], _Symbols] = {}
        self._perf_maps: dict[int, tuple[list[int], list[tuple[int, str]]]] = {}
        self._records = OrderedDict[int, dict[str, Any]]()
        self._by_frames: dict[object, dict[str, Any]] = {}

    def look(self, tgid: int) -> Process:
        """Look whether a process has a Python, unless that was done a moment ago."""
        process = self._processes.get(tgid)
        if process is None or not process.pid:
            process = self._processes[tgid] = Process(self._shown_pid(tgid))
        found = process.find_python(time.monotonic_ns())
        if found is not None:
            self._set_python(tgid, found)
        return process

    def add(self, chunk: bytes) -> None:
        """Keep the stacks in collected records, and find the Python of new processes."""
        looked = set[int]()
        for found in _NEEDED.finditer(chunk[_KIND_AT::RECORD_BYTES]):
            at = found.start() * RECORD_BYTES
            _, tid, tgid, number, kind, _, _, *words = RECORD.unpack_from(chunk, at)
            if kind == THREAD_NAME and tid == tgid:  # it may execute another program now
                self._forget(tgid)
                looked.discard(tgid)
            elif kind == THREAD_NEW:
                self._add_thread(tid, tgid, self._processes.get(self._tgids.get(number, number)))
            self._tgids[tid] = tgid
            if tgid not in looked:
                looked.add(tgid)
                self.look(tgid)
            if kind == FRAMES:
                self._add_part(tid, tgid, number, words)

    def _add_thread(self, tid: int, tgid: int, creator: Process | None) -> None:
        """A fork has what its creator had, and may be gone before it is read."""
        if tid == tgid and creator is not None:
            self._forget(tgid)
            self._processes[tgid] = creator.fork(self._shown_pid(tgid))

    def _forget(self, tgid: int) -> None:
        if (gone := self._processes.pop(tgid, None)) is not None:
            gone.close()
        if len(self._tgids) > _THREADS_MAX:
            self._tgids.clear()

    def _add_part(self, tid: int, tgid: int, number: int, words: list[int]) -> None:
        if number == 0:
            self._parts[tid] = [(0, tuple(words))]
            parts = self._parts[tid]
        elif parts := self._parts.get(tid, []):
            parts.append((number, tuple(words)))
        if not parts:
            return
        stack, form = parts[0][1][:2]
        addresses, frames, further = form & 0xFFFF, form >> 16 & 0xFFFF, bool(form >> 32)
        of_addresses = -(-addresses // 4)
        if len(parts) < 1 + of_addresses + -(-frames // 2):
            return
        del self._parts[tid]
        natives = [word for _, part in parts[1 : 1 + of_addresses] for word in part][:addresses]
        pairs = [word for _, part in parts[1 + of_addresses :] for word in part][: 2 * frames]
        process = self._processes.get(tgid) or self.look(tgid)
        found = list[Native]()
        for address in natives:
            native = process.native(address, is_innermost=not found)
            if native is None:  # no return address: the chain of frame pointers has ended
                break
            found.append(native)
        calls = [(code, at) for code, at in zip(pairs[::2], pairs[1::2], strict=True) if code]  # 0: from C
        pythons = process.pythons(calls) if process.layout is not None and calls else []
        shown = tuple(frame for frame in pythons if frame is not None)
        if found or shown:
            self._keep(stack, (tuple(found), shown, further))

    def _keep(self, number: int, stack: _Stack) -> None:
        """Keep a stack until it is rendered. The oldest are forgotten, here and in the BPF program, which
        then sends them again.
        """
        if number not in self._records:
            self._stacks[number] = stack
        for kept in (self._stacks, self._records):
            while len(kept) > _STACKS_MAX:
                # Another thread may change it at the same time.
                with suppress(KeyError):
                    oldest, _ = kept.popitem(last=False)
                    self._forget_stack(oldest)

    def put(self, process: Process, frames: Sequence[tuple[int, int]], *, is_cut: bool) -> int:
        """The number of a stack of Python that was read just now. `is_cut`: there are more frames."""
        shown = tuple(one for one in process.pythons(frames, are_marked=False) if one is not None)
        number = hash((shown, is_cut)) & (1 << 63) - 1 | 1
        self._keep(number, ((), shown, is_cut))
        return number

    def record_of(self, number: int) -> dict[str, Any] | None:
        """The record of a stack, with its id in the file; None where it is not known."""
        known, stack = self._records.get(number), self._stacks.pop(number, None)
        if known is not None or stack is None:
            return known
        natives, pythons, further = stack
        frames, has_gap = list[dict[str, Any]](), False
        for at, native in enumerate(natives):
            # A return address is after the call, which may be the last instruction of its function.
            name = self._name(native._replace(offset=native.offset - bool(at)))
            is_python = bool(_NAMED_PYTHON.match(native.path.rpartition("/")[2]))
            if pythons and is_python and (_INTERPRETER.match(name) or name == _UNKNOWN):
                has_gap = False
                break
            has_gap |= not is_python
            frames.append({"function": name, "file": native.path or _GENERATED})
        if pythons and has_gap:
            frames.append({"function": _UNKNOWN, "file": UNKNOWN_CODE})
        for function, file, line in pythons:
            frames.append({"function": function} | ({"file": file, "line": line} if file else {}))
        key = tuple(tuple(one.values()) for one in frames), further
        record = self._by_frames.get(key)
        if record is None and len(self._by_frames) >= _DIFFERENT_MAX:
            self.left_out += 1
            return None
        if record is None:
            record = {"type": "stack", "id": _FIRST_ID + len(self._by_frames), "frames": frames}
            record |= {"omitted": 1} if further else {}
            self._by_frames[key] = record
        self._records[number] = record
        return record

    def _name(self, native: Native) -> str:
        if not native.path.startswith("/"):
            return native.path or self._generated(native)
        key = native.path, native.inode
        symbols = self._symbols.get(key)
        if symbols is None:
            if len(self._symbols) == _OPEN_MAX:
                self._symbols.pop(next(iter(self._symbols))).close()
            symbols = self._symbols[key] = _Symbols(native.path, native.inode, native.pid)
        return symbols.name(native.offset)

    def _generated(self, native: Native) -> str:
        """The name of generated code, as the file that `perf` reads too has it: start, size, name a line."""
        if native.pid not in self._perf_maps:
            found = []
            for folder in (f"/proc/{native.pid}/root/tmp", "/tmp"):
                with suppress(ValueError):  # a line of another form ends it
                    text = head_of(f"{folder}/perf-{native.pid}.map", _PERF_MAP_BYTES)
                    for line in text.decode(errors="replace").splitlines():
                        start, size, name = line.split(maxsplit=2)
                        found.append((int(start, 16), int(start, 16) + int(size, 16), name))
                if found:
                    break
            found.sort()
            self._perf_maps[native.pid] = [one[0] for one in found], [one[1:] for one in found]
        starts, rest = self._perf_maps[native.pid]
        at = bisect_right(starts, native.offset) - 1
        return rest[at][1] if at >= 0 and native.offset < rest[at][0] else _UNKNOWN

    def close(self) -> None:
        """Close what is open of other processes."""
        for process in self._processes.values():
            process.close()
        for symbols in self._symbols.values():
            symbols.close()
