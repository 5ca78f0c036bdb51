"""Makes a process load a library and call an entry of it, on a new thread of that process.

    a page of code     loader.S, which continues even if this process ends
    pages of data      addresses of functions, texts, the stopped thread's registers, a stack

A thread of the process is stopped where it waits or computes and holds no lock of the C library. It maps
these pages and calls pthread_create, and its registers are restored; if this process is killed meanwhile, the
thread restores them itself. The new thread loads the library. If a step before that fails, the stopped thread
continues as before.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import pwd
import re
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tracepipe import paths
from tracepipe.errors import CaptureUnavailable, InputError, TracepipeError
from tracepipe.printable import printable
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.library import Mapping, mappings
from tracepipe.tracer.gpu.build.driver import Owner

_CONT, _SINGLESTEP, _GETREGS, _SETREGS, _DETACH = 7, 9, 12, 13, 17
_SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 0x420A, 0x420B
_WALL: Final = 0x40000000
_STOP_EVENT: Final = 128  # PTRACE_EVENT_STOP
_STOP_S: Final = 2.0
_STEP_S: Final = 2.0
_STOP_PAUSE_S: Final = 0.0005
ALL_SIGNALS: Final = (1 << 64) - 1
NO_CALL: Final = (1 << 64) - 1
"""The value for a system call's number that keeps the kernel from restarting one."""
SYSCALL: Final = b"\x0f\x05"


class Registers(ctypes.Structure):
    """`struct user_regs_struct` of <sys/user.h>."""

    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "r15", "r14", "r13", "r12", "rbp", "rbx", "r11", "r10", "r9", "r8", "rax", "rcx", "rdx", "rsi",
            "rdi", "orig_rax", "rip", "cs", "eflags", "rsp", "ss", "fs_base", "gs_base", "ds", "es", "fs",
            "gs",
        )
    ]  # fmt: skip


class NotStopped(Exception):
    """The thread ended, or did not stop in time or as expected."""


class StoppedThread:
    """A thread of another process from its stop to `release`, by ptrace(2).

    All calls for a thread must come from the thread of this process that stopped it. When that one ends, for
    any reason, the kernel releases the stopped thread.
    """

    def __init__(self, tid: int) -> None:
        """Stop the thread. Raises NotStopped; OSError where that is not allowed."""
        self._tid = tid
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
        self._libc.ptrace.restype = ctypes.c_long
        self._signal = 0
        self._request(_SEIZE)
        self.stop()

    def stop(self) -> None:
        """Stop it again. Raises NotStopped; a thread that was about to get a signal is released first."""
        self._request(_INTERRUPT)
        status = self._wait(_STOP_S)
        if status >> 16 != _STOP_EVENT:
            self._signal = os.WSTOPSIG(status)
        if self._signal or os.WSTOPSIG(status) != signal.SIGTRAP:  # or a stop of its whole process
            self.release()
            raise NotStopped

    def go_on(self) -> None:
        """Let the thread run until it is stopped again."""
        self._request(_CONT)

    def registers(self) -> Registers:
        """The thread's registers."""
        registers = Registers()
        self._request(_GETREGS, 0, ctypes.addressof(registers))
        return registers

    def set_registers(self, registers: Registers) -> None:
        """Set the thread's registers."""
        self._request(_SETREGS, 0, ctypes.addressof(registers))

    def swap_signals(self, blocked: int) -> int:
        """Block the signals of a mask; returns the previous mask."""
        mask = ctypes.c_uint64()
        self._request(_GETSIGMASK, 8, ctypes.addressof(mask))
        before, mask.value = mask.value, blocked
        self._request(_SETSIGMASK, 8, ctypes.addressof(mask))
        return before

    def call_kernel(self, at: int, number: int, *arguments: int) -> int:
        """Make the thread execute a system call with the instruction `at`, its signals blocked; its result.

        Raises OSError if the call fails, NotStopped.
        """
        before, registers = self.registers(), self.registers()
        registers.rip, registers.rax, registers.orig_rax = at, number, NO_CALL
        for name, value in zip(("rdi", "rsi", "rdx", "r10", "r8", "r9"), arguments, strict=False):
            setattr(registers, name, value & NO_CALL)
        self.set_registers(registers)
        try:
            self._request(_SINGLESTEP)
            status = self._wait(_STEP_S)
            if status >> 16 or os.WSTOPSIG(status) != signal.SIGTRAP:  # SIGSTOP cannot be blocked
                self._signal = 0 if status >> 16 else os.WSTOPSIG(status)
                raise NotStopped
            result = ctypes.c_int64(self.registers().rax).value
        finally:
            self.set_registers(before)
        if -4096 < result < 0:
            raise OSError(-result, os.strerror(-result))
        return result

    def release(self) -> None:
        """Release the thread."""
        self._request(_DETACH, 0, self._signal)

    def _wait(self, longest_s: float) -> int:
        """Wait for the thread's next stop, and return its status."""
        by_s = time.monotonic() + longest_s
        while time.monotonic() < by_s:
            tid, status = os.waitpid(self._tid, os.WNOHANG | _WALL)
            if tid and os.WIFSTOPPED(status):
                return status
            if tid:
                break
            time.sleep(_STOP_PAUSE_S)
        raise NotStopped

    def _request(self, request: int, address: int = 0, data: int = 0) -> None:
        if self._libc.ptrace(request, self._tid, address, data) == -1:
            number = ctypes.get_errno()
            if number == errno.ESRCH:
                raise NotStopped
            raise OSError(number, os.strerror(number))


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Read memory of a process; empty if the process has ended. Raises OSError."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        memory.seek(address)
        return memory.read(size) or b""


def write_memory(pid: int, address: int, data: bytes) -> None:
    """Write memory of a process. Raises OSError."""
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        memory.seek(address)
        if memory.write(data) != len(data):
            raise OSError(errno.EIO, "only a part of it was written")


_OF_LIBC: Final = re.compile(r"(libc|libpthread|libdl|ld-linux-x86-64|ld)[-.].*")
FUNCTIONS: Final = (
    "__errno_location", "pthread_create", "pthread_self", "pthread_detach", "dlopen", "dlsym", "dlerror",
)  # fmt: skip
"""The functions that the code of loader.S calls."""
# System calls that wait, in which a thread holds no lock of the C library; by their numbers on x86-64.
_WAITING_CALLS: Final = {
    230: "clock_nanosleep", 35: "nanosleep", 219: "restart_syscall", 7: "poll", 271: "ppoll", 23: "select",
    270: "pselect6", 34: "pause", 0: "read", 45: "recvfrom", 47: "recvmsg", 61: "wait4", 247: "waitid",
    43: "accept", 288: "accept4", 202: "futex", 232: "epoll_wait", 281: "epoll_pwait", 130: "rt_sigsuspend",
    # Calls in which a busy thread is often found.
    1: "write", 16: "ioctl", 24: "sched_yield", 44: "sendto", 46: "sendmsg",
}  # fmt: skip
_FUTEX: Final = 202
_WAIT_BITSET, _FUTEX_COMMAND = 9, 0x7F  # conditions, semaphores, joins; locks use plain FUTEX_WAIT
_FROM_START: Final = "Start it with tracepipe: capture --gpu kernels -- COMMAND."
# Results of a system call while the kernel has not decided whether the program sees the interruption:
# ERESTARTSYS, ERESTARTNOINTR and ERESTARTNOHAND of include/linux/errno.h, and EINTR of calls that are never
# restarted. ERESTART_RESTARTBLOCK is of calls with a time limit, which are continued by another call.
_RESTART_BLOCK, _RESTART_SYSCALL = -516, 219
_INTERRUPTED: Final = {-512, -513, -514, -errno.EINTR, _RESTART_BLOCK}
_USER_CODE: Final = 0x33  # %cs of 64-bit code


def user_of(pids: Sequence[int]) -> Owner:
    """The user of processes, who builds what they load. Raises TracepipeError if they have several users."""
    users = set()
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}").stat()
        except OSError as error:
            raise _not_inspected(pid, error) from None
        users.add((status.st_uid, status.st_gid))
    if len(users) > 1:
        raise TracepipeError(
            "The processes belong to several users.", "Record the processes of one user at a time."
        )
    ((user, group),) = users
    try:
        home = Path(pwd.getpwuid(user).pw_dir)
    except KeyError:
        raise CaptureUnavailable(
            f"The user {user} of process {pids[0]} is unknown on this machine.", _FROM_START
        ) from None
    return Owner(user, group, home)


class Process:
    """A process that a library can be loaded into."""

    def __init__(self, pid: int, library: Path) -> None:
        """Examine it. Raises TracepipeError if there is no such process, CaptureUnavailable if it cannot be
        used.
        """
        self.pid = pid
        if platform.machine() != "x86_64":
            raise CaptureUnavailable(
                f"A running process can be recorded on x86-64 only, and this is {platform.machine()}.",
                _FROM_START,
            )
        try:
            self.check_status()
            self._mappings = list(mappings(pid))
            self._check_surroundings(library)
        except OSError as error:
            raise _not_inspected(pid, error) from None
        self._exports: dict[str, dict[str, int]] = {}
        self.functions = {name: self._address(name) for name in FUNCTIONS}
        if missing := [name for name, address in self.functions.items() if not address]:
            raise CaptureUnavailable(f"Process {pid} has no GNU C library with {missing[0]}.", _FROM_START)

    def threads(self) -> list[int]:
        """Its threads; those that wait where they may be stopped come first."""
        found: list[tuple[int, int]] = []
        order = list(_WAITING_CALLS)
        for path in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                words = (path / "syscall").read_text().split()
            except OSError:  # it ended
                continue
            number = int(words[0]) if words[0].lstrip("-").isdigit() else -1
            is_wait = number in _WAITING_CALLS and _is_harmless(number, int(words[2], 16))
            found.append((order.index(number) if is_wait else len(order), int(path.name)))
        return [tid for _, tid in sorted(found)]

    def is_good_place(self, tid: int, registers: Registers) -> bool:
        """Whether a stopped thread can run other code here: it holds no lock of the C library."""
        if registers.cs != _USER_CODE or _has_signal(self.pid, tid):
            return False
        if _signed(registers.orig_rax) < 0:
            return self._is_outside_libc(registers.rip)
        return registers.orig_rax in _WAITING_CALLS and _is_harmless(registers.orig_rax, registers.rsi)

    def restored(self, tid: int, registers: Registers) -> Registers:
        """The registers to give back to a stopped thread, as they were when it was first stopped.

        The kernel restarts most interrupted system calls. Those that it would end with EINTR are restarted
        here, if only our stop interrupted them.
        """
        is_ours = _signed(registers.rax) == -errno.EINTR and not _has_signal(self.pid, tid)
        return self.resumption(registers) if is_ours else registers

    def resumption(self, registers: Registers) -> Registers:
        """The registers with which a stopped thread continues by itself and restarts an interrupted call."""
        resumed, result = Registers.from_buffer_copy(registers), _signed(registers.rax)
        resumed.orig_rax = NO_CALL
        if _signed(registers.orig_rax) < 0 or result not in _INTERRUPTED:
            return resumed
        resumed.rip -= len(SYSCALL)
        resumed.rax = _RESTART_SYSCALL if result == _RESTART_BLOCK else registers.orig_rax
        return resumed

    def syscall_instruction(self) -> int:
        """The address of a syscall instruction in the C library. Raises CaptureUnavailable."""
        place = self._address("syscall")
        at = read_memory(self.pid, place, 64).find(SYSCALL) if place else -1
        if at < 0:
            raise CaptureUnavailable(f"The C library of process {self.pid} is not as expected.", _FROM_START)
        return place + at

    def check_status(self) -> None:
        """Raise as __init__ does if the process has ended, is stopped or traced, or has a seccomp filter."""
        status = _status(self.pid)
        state, tracer = status["State"].split()[0], int(status["TracerPid"])
        if state in "ZX":
            raise TracepipeError(f"Process {self.pid} has ended.", "Check its number.")
        if tracer:
            raise CaptureUnavailable(
                f"Process {self.pid} is traced by process {tracer}.", "End that one first."
            )
        if state in "Tt":
            raise CaptureUnavailable(f"Process {self.pid} is stopped.", f"kill -CONT {self.pid}")
        if int(status.get("Seccomp_filters", "0")) > int(_status("self").get("Seccomp_filters", "0")):
            raise CaptureUnavailable(
                f"Process {self.pid} has a seccomp filter, which could end it for what the library calls.",
                _FROM_START,
            )

    def _check_surroundings(self, library: Path) -> None:
        for namespace, what in (("net", "network"), ("pid", "process ids")):
            ours, theirs = (Path(f"/proc/{who}/ns/{namespace}").readlink() for who in ("self", self.pid))
            if ours != theirs:
                raise CaptureUnavailable(
                    f"Process {self.pid} is in a container: it has another {what} namespace.",
                    "Run tracepipe in that container.",
                )
        try:
            is_seen = os.path.samestat(library.stat(), Path(f"/proc/{self.pid}/root{library}").stat())
        except FileNotFoundError:
            is_seen = False
        if not is_seen:
            raise CaptureUnavailable(
                f"Process {self.pid} does not see {library}: its root folder is another one.",
                "Run tracepipe in its container.",
            )
        if not any(mapping.name.startswith("libcuda.so.") for mapping in self._mappings):
            raise CaptureUnavailable(
                f"Process {self.pid} does not use CUDA: it has not loaded libcuda.so.1.",
                "Wait until it does, or " + _FROM_START,
            )

    def _address(self, function: str) -> int:
        """The address of a function of the C library; 0 if it has none."""
        for mapping in self._mappings:
            if mapping.is_code and _OF_LIBC.fullmatch(mapping.name) and not mapping.name.startswith("ld"):
                offset = self._exported(mapping).get(function)
                if (
                    offset is not None
                    and mapping.offset <= offset < mapping.offset + mapping.end - mapping.start
                ):
                    return mapping.start + offset - mapping.offset
        return 0

    def _exported(self, mapping: Mapping) -> dict[str, int]:
        """Exported functions of a mapping's file → their file offsets."""
        if mapping.path not in self._exports:
            path = Path(f"/proc/{self.pid}/root{mapping.path}")
            try:
                # The file may have been replaced since it was mapped.
                if not paths.is_there(path) or path.stat().st_ino != mapping.inode:
                    path = Path(f"/proc/{self.pid}/map_files/{mapping.start:x}-{mapping.end:x}")
                with Elf(str(path)) as file:
                    found = {name: file.file_offset(address) for name, address in file.functions()}
            except (InputError, OSError):
                found = {}
            self._exports[mapping.path] = found
        return self._exports[mapping.path]

    def _is_outside_libc(self, address: int) -> bool:
        """Whether this code is neither the C library's nor that of another allocator."""
        for mapping in self._mappings:
            if mapping.start <= address < mapping.end and mapping.is_code:
                if not mapping.path.startswith("/") or _OF_LIBC.fullmatch(mapping.name):
                    return False
                return "malloc" not in self._exported(mapping)
        return False


def _has_signal(pid: int, tid: int) -> bool:
    """Whether a thread has a pending signal, for which its system call returns."""
    status = _status(f"{pid}/task/{tid}")
    thread, process, blocked = (int(status[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk"))
    return bool((thread | process) & ~blocked)


def _status(of: int | str) -> dict[str, str]:
    """The fields of a process's or a thread's status."""
    lines = Path(f"/proc/{of}/status").read_text().splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _is_harmless(number: int, second: int) -> bool:
    return number != _FUTEX or second & _FUTEX_COMMAND == _WAIT_BITSET


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _not_inspected(pid: int, error: OSError) -> TracepipeError:
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return TracepipeError(f"No such process: {pid}", "Look for it with ps or pgrep.")
    return CaptureUnavailable(
        f"Process {pid} may not be inspected: {error.strerror}.",
        "Run it as the user of the process or as root; a container needs CAP_SYS_PTRACE.",
    )


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
