"""Makes a process load a library and call an entry of it, on a new thread of that process.

    a page of code     loader.S, which continues even if this process ends
    pages of data      addresses of functions, texts, the stopped thread's registers, a stack

A thread of the process is stopped where it waits or computes and holds no lock of the C library. It maps
these pages and calls pthread_create, and its registers are restored; if this process is killed meanwhile, the
thread restores them itself. The new thread loads the library. If a step before that fails, the stopped thread
continues as before.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer.gpu.attach.process import (
    ALL_SIGNALS,
    FUNCTIONS,
    NO_CALL,
    NotStopped,
    Process,
    Registers,
    StoppedThread,
    read_memory,
    write_memory,
)
from tracepipe.tracer.gpu.engines.transport import printable

CODE: Final = bytes.fromhex(
    "fc31c90f01d0894310895314480faea300100000ff53204989c48b0089430c488d7b1831f6488d15d10000004889d9ff"
    "53288943048b430c418904248b43108b5314480faeab001000000f31448d6202c783f000000001000000b8180000000f"
    "050f314439e272f29d488b2528100000b80e000000bf02000000488d35d70f0000ba0000000041ba080000000f05488b"
    "05cb0f0000488b1dcc0f0000488b0dcd0f0000488b15ce0f0000488b35cf0f0000488b3dd00f0000488b2dd10f00004c"
    "8b05da0f00004c8b0ddb0f00004c8b15dc0f00004c8b1ddd0f00004c8b25de0f00004c8b2ddf0f00004c8b35e00f0000"
    "4c8b3de10f0000ff25e30f0000534889fbff53304889c7ff5338488dbb00040000be02000000ff5340b9020000004885"
    "c0742a4889c7488db300020000ff5348b9030000004885c07413488dbb00080000ffd0894308b901000000eb27514883"
    "ec08ff53504883c4084885c07415488dbb000100004889c6b9ff000000acaa84c0e0fa59890b31c05bc3"
)
"""The machine code of loader.S."""
_PAGE: Final = 4096
# Offsets in DATA.
_STATE, _SIGNALS, _WAITS, _ERROR, _ENTRY, _PATH, _ARGUMENT = 0x000, 0x058, 0x0F0, 0x100, 0x200, 0x400, 0x800
_FUNCTIONS_AT, _SAVED_AT = 0x020, 0x060
_STACK_END: Final = 23 * _PAGE  # behind a page of fields, four of xsave and its stack
_REGION: Final = _PAGE + _STACK_END
_SAVED: Final = (
    "rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp",
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rip",
)  # fmt: skip
_OUTCOME: Final = struct.Struct("<IiI")  # STATE, CREATED, RESULT
_NOT_CREATED: Final = -1
_LOADED, _NOT_LOADED, _NO_ENTRY = 1, 2, 3
_MMAP, _MPROTECT, _MUNMAP = 9, 10, 11
_READ_WRITE, _READ_EXECUTE, _PRIVATE_ANONYMOUS = 3, 5, 0x22
_TRY_S: Final = 10.0
_DETOUR_S: Final = 2.0
"""The detour takes about 0.1 ms; a thread that takes longer restores itself."""
_LOOK_S: Final = 0.0001
_LOAD_S: Final = 30.0
_PAUSE_S: Final = 0.002


def enter(pid: int, library: Path, entry: str, argument: str, meanwhile: Callable[[], object]) -> int:
    """Call `entry` of the library, a function that takes a text, and return its result. The library is loaded
    if it is not yet.

    `meanwhile` is called until the entry has returned. Raises TracepipeError if there is no such process,
    CaptureUnavailable if the library cannot be loaded into it.
    """
    texts = {_ENTRY: entry, _PATH: str(library.absolute()), _ARGUMENT: argument}
    limits = {_ENTRY: _PATH, _PATH: _ARGUMENT, _ARGUMENT: _PAGE}
    fields = {at: text.encode(errors="surrogateescape") for at, text in texts.items()}
    if any(len(text) >= limits[at] - at for at, text in fields.items()):
        raise CaptureUnavailable(
            f"The path {library} is too long for a library to be loaded from it.", "Set $XDG_CACHE_HOME."
        )
    if " xsave " not in Path("/proc/cpuinfo").read_text():
        raise CaptureUnavailable(
            "This processor does not support xsave.", "Start the program with tracepipe."
        )
    process = Process(pid, library)
    return _outcome(pid, library, _begin(process, fields), meanwhile)


class _Try(threading.Thread):
    """An attempt to send a thread of a process through the detour; ptrace needs a separate thread for it."""

    def __init__(self, process: Process, tid: int, fields: dict[int, bytes]) -> None:
        super().__init__(name="tracepipe-attach", daemon=True)
        self._process, self._tid, self._fields = process, tid, fields
        self.region = 0
        """The address of the new thread's data; 0 if the thread could not be used where it was stopped."""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            thread = StoppedThread(self._tid)
            try:
                self._detour(thread)
            finally:
                thread.release()
        except NotStopped:
            pass
        except (OSError, TracepipeError) as error:
            self.error = error

    def _detour(self, thread: StoppedThread) -> None:
        """Run the detour; `thread` is stopped before and afterwards."""
        process, registers = self._process, thread.registers()
        if not process.is_good_place(self._tid, registers):
            thread.set_registers(process.restored(self._tid, registers))
            return
        at, signals, region = process.syscall_instruction(), thread.swap_signals(ALL_SIGNALS), 0
        try:
            region = thread.call_kernel(at, _MMAP, 0, _REGION, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
            data = region + _PAGE
            self._write(region, process.resumption(registers), signals)
            thread.call_kernel(at, _MPROTECT, region, _PAGE, _READ_EXECUTE)
            there = Registers.from_buffer_copy(registers)
            there.rip, there.orig_rax, there.rbx, there.rsp = region, NO_CALL, data, data + _STACK_END - 16
            thread.set_registers(there)
        except BaseException:
            if region:
                thread.call_kernel(at, _MUNMAP, region, _REGION)
            self._restore(thread, registers, signals)
            raise
        self.region = data
        thread.go_on()
        by_s = time.monotonic() + _DETOUR_S
        while not any(read_memory(process.pid, data + _WAITS, 4)) and time.monotonic() < by_s:
            time.sleep(_LOOK_S)
        thread.stop()
        if any(read_memory(process.pid, data + _WAITS, 4)) and region <= thread.registers().rip < data:
            self._restore(thread, registers, signals)

    def _restore(self, thread: StoppedThread, registers: Registers, signals: int) -> None:
        thread.swap_signals(signals)
        thread.set_registers(self._process.restored(self._tid, registers))

    def _write(self, region: int, resumed: Registers, signals: int) -> None:
        data = bytearray(_PAGE)
        _OUTCOME.pack_into(data, _STATE, 0, _NOT_CREATED, 0)
        struct.pack_into("<Q", data, _SIGNALS, signals)
        addresses = [self._process.functions[name] for name in FUNCTIONS]
        struct.pack_into(f"<{len(addresses)}Q", data, _FUNCTIONS_AT, *addresses)
        struct.pack_into(f"<{len(_SAVED)}Q", data, _SAVED_AT, *(getattr(resumed, name) for name in _SAVED))
        for at, text in self._fields.items():
            data[at : at + len(text)] = text
        pid = self._process.pid
        write_memory(pid, region, CODE)
        write_memory(pid, region + _PAGE, bytes(data))
        write_memory(pid, region + _PAGE + _STACK_END - 16, struct.pack("<Q", resumed.eflags))


def _begin(process: Process, fields: dict[int, bytes]) -> int:
    """Send a thread through the detour, and return the address of its data. Raises CaptureUnavailable,
    TracepipeError.
    """
    by_s = time.monotonic() + _TRY_S
    while time.monotonic() < by_s:
        for tid in process.threads():
            attempt = _Try(process, tid, fields)
            attempt.start()
            attempt.join()
            if attempt.error is not None:
                process.check_status()
                raise _refused(process.pid, attempt.error)
            if attempt.region:
                return attempt.region
        time.sleep(_PAUSE_S)
    raise CaptureUnavailable(
        f"No thread of process {process.pid} reached a place where it can be interrupted.", "Try again."
    )


def _outcome(pid: int, library: Path, data: int, meanwhile: Callable[[], object]) -> int:
    """Wait for the entry, and return its result. Raises CaptureUnavailable."""
    by_s = time.monotonic() + _LOAD_S
    while time.monotonic() < by_s:
        try:
            fields = read_memory(pid, data, _ENTRY)
        except OSError:
            fields = b""
        if len(fields) < _ENTRY:
            raise TracepipeError(f"Process {pid} has ended.", "Check its number.")
        state, created, result = _OUTCOME.unpack_from(fields)
        if created > 0:
            raise CaptureUnavailable(
                f"Process {pid} could not create a thread: {os.strerror(created)}.",
                "Check its limit of threads (ulimit -u) and its memory.",
            )
        if state == _LOADED:
            return int(result)
        if state in (_NOT_LOADED, _NO_ENTRY):
            why = printable(fields[_ERROR:].partition(b"\0")[0].decode(errors="replace"))
            raise CaptureUnavailable(
                f"Process {pid} cannot load {library}: {why}.",
                "Check that the user of the process may read it.",
            )
        meanwhile()
        time.sleep(_PAUSE_S)
    raise CaptureUnavailable(
        f"Process {pid} has not loaded {library} in {_LOAD_S:.0f} s. It continues without being recorded.",
        "Check whether it is stopped, or is starting programs.",
    )


def _refused(pid: int, error: Exception) -> Exception:
    if isinstance(error, OSError):
        return CaptureUnavailable(
            f"Process {pid} may not be interrupted: {error.strerror}.",
            "Set /proc/sys/kernel/yama/ptrace_scope to 0, or run it as root with CAP_SYS_PTRACE.",
        )
    return error
