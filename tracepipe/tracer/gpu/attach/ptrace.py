"""One thread of another process, stopped by ptrace(2): x86-64.

All calls for a thread must come from the thread of this process that stopped it. When that one ends, for any
reason, the kernel releases the stopped thread.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from pathlib import Path
from typing import Final

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
    """A thread from its stop to `release`."""

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
