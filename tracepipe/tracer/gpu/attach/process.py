"""Examines a process before a library is loaded into it, and finds and stops a thread of it (x86-64)."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import pwd
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tracepipe import paths
from tracepipe.errors import CaptureUnavailable, InputError, TracepipeError
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.gpu.build.driver import Owner

_CONT, _SINGLESTEP, _GETREGS, _SETREGS, _DETACH = 7, 9, 12, 13, 17
_SEIZE, _INTERRUPT, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 0x420A, 0x420B
_WALL: Final = 0x40000000
_STOP_EVENT: Final = 128  # PTRACE_EVENT_STOP
_STOP_S: Final = 2.0
_STEP_S: Final = 2.0
_PAUSE_S: Final = 0.0005
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
            time.sleep(_PAUSE_S)
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


# `7f1c2a000000-7f1c2a021000 r-xp 00002000 fe:01 1573    /usr/lib/libc.so.6`
_MAPPING: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ (\d+) *(.*)")
_OF_LIBC: Final = re.compile(r"(libc|libpthread|libdl|ld-linux-x86-64|ld)[-.].*")
_DELETED: Final = " (deleted)"
_CUDA: Final = "libcuda.so."
FUNCTIONS: Final = (
    "__errno_location", "pthread_create", "pthread_self", "pthread_detach", "dlopen", "dlsym", "dlerror",
)  # fmt: skip
"""The functions that the code of loader.S calls."""
# System calls that wait, in which a thread holds no lock of the C library; by their numbers on x86-64.
_WAITS: Final = {
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


def user_of(pids: Sequence[int]) -> Owner:
    """The user of processes, who builds what they load. Raises TracepipeError if they have several users."""
    users = set()
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}").stat()
        except OSError as error:
            raise _refused(pid, error) from None
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
            self._mappings = list(_mappings(pid))
            self._check_surroundings(library)
        except OSError as error:
            raise _refused(pid, error) from None
        self._exports: dict[str, dict[str, int]] = {}
        self.functions = self._functions()

    def threads(self) -> list[int]:
        """Its threads; those that wait where they may be stopped come first."""
        found: list[tuple[int, int]] = []
        order = list(_WAITS)
        for path in Path(f"/proc/{self.pid}/task").iterdir():
            try:
                words = (path / "syscall").read_text().split()
            except OSError:  # it ended
                continue
            number = int(words[0]) if words[0].lstrip("-").isdigit() else -1
            is_wait = number in _WAITS and _is_harmless(number, int(words[2], 16))
            found.append((order.index(number) if is_wait else len(order), int(path.name)))
        return [tid for _, tid in sorted(found)]

    def is_good_place(self, tid: int, registers: Registers) -> bool:
        """Whether a stopped thread can run other code here: it holds no lock of the C library."""
        if registers.cs != _USER_CODE or _has_signal(self.pid, tid):
            return False
        if _signed(registers.orig_rax) < 0:
            return self._is_outside_libc(registers.rip)
        return registers.orig_rax in _WAITS and _is_harmless(registers.orig_rax, registers.rsi)

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
        status = dict(
            line.split(":", 1)
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
            if ":" in line
        )
        state, tracer = status["State"].split()[0], int(status["TracerPid"])
        if state in "ZX":
            raise TracepipeError(f"Process {self.pid} has ended.", "Check its number.")
        if tracer:
            raise CaptureUnavailable(
                f"Process {self.pid} is traced by process {tracer}.", "End that one first."
            )
        if state in "Tt":
            raise CaptureUnavailable(f"Process {self.pid} is stopped.", f"kill -CONT {self.pid}")
        filters = int(status.get("Seccomp_filters", "0"))
        if filters > _own_filters():
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
        if not any(mapping.name.startswith(_CUDA) for mapping in self._mappings):
            raise CaptureUnavailable(
                f"Process {self.pid} does not use CUDA: it has not loaded libcuda.so.1.",
                "Wait until it does, or " + _FROM_START,
            )

    def _functions(self) -> dict[str, int]:
        found = {name: self._address(name) for name in FUNCTIONS}
        if missing := [name for name, address in found.items() if not address]:
            raise CaptureUnavailable(
                f"Process {self.pid} has no GNU C library with {missing[0]}.", _FROM_START
            )
        return found

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
    text = Path(f"/proc/{pid}/task/{tid}/status").read_text()
    found = {
        name: int(mask, 16) for name, mask in re.findall(r"^(SigPnd|ShdPnd|SigBlk):\s*(\w+)", text, re.M)
    }
    return bool((found["SigPnd"] | found["ShdPnd"]) & ~found["SigBlk"])


def _is_harmless(number: int, second: int) -> bool:
    return number != _FUTEX or second & _FUTEX_COMMAND == _WAIT_BITSET


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mappings(pid: int) -> Iterator[Mapping]:
    for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
        if match := _MAPPING.fullmatch(line):
            start, end, flags, offset, inode, path = match.groups()
            yield Mapping(int(start, 16), int(end, 16), int(offset, 16), int(inode), path, "x" in flags)


def _own_filters() -> int:
    match = re.search(r"^Seccomp_filters:\s*(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(match[1]) if match else 0


def _refused(pid: int, error: OSError) -> TracepipeError:
    if isinstance(error, (FileNotFoundError, ProcessLookupError)):
        return TracepipeError(f"No such process: {pid}", "Look for it with ps or pgrep.")
    return CaptureUnavailable(
        f"Process {pid} may not be inspected: {error.strerror}.",
        "Run it as the user of the process or as root; a container needs CAP_SYS_PTRACE.",
    )
