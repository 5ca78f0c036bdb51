"""Attaches the two driver programs to functions of kernel modules.

One link for all where the kernel has multi-kprobes (5.18, CONFIG_FPROBE), one link a probe elsewhere.
"""

from __future__ import annotations

import errno
import os

from tracepipe.capture import bpf
from tracepipe.capture.engine import DriverFunction

_QUEUES_COOKIE = 1 << 32
_QUEUES = "nv_kthread_q_schedule_q_item"
# What the kernel answers for a function that it will not probe: blacklisted, ambiguous by name, gone since.
_UNPROBEABLE = {errno.EINVAL, errno.ENOENT, errno.EADDRNOTAVAIL, errno.EILSEQ, bpf.ENOTSUPP}


class Kprobes:
    """Links of the functions of a driver; `refused` are the indices that the kernel would not probe."""

    def __init__(self, functions: list[DriverFunction]) -> None:
        self._functions = functions
        self.multi_links: list[int] = []
        self.single_links: list[int] = []
        self.refused: set[int] = set()

    def attach(self, program: str, code: bytes, *, returns: bool) -> None:
        """Attach the program with bytecode `code` to all functions. Raises OSError."""
        if all(function.address for function in self._functions) and self._attach_all(program, code, returns):
            return
        loaded = bpf.load_program(program, code, bpf.PROG_TYPE_KPROBE)
        try:
            for index, function in enumerate(self._functions):
                # A return without its entry would be an end without a begin.
                if index not in self.refused:
                    self._attach_one(loaded, index, function, returns)
        finally:
            os.close(loaded)

    def _attach_all(self, program: str, code: bytes, returns: bool) -> bool:
        """Whether one link took them all: no, where the kernel has none or refuses one of the functions."""
        addresses = [function.address for function in self._functions]
        cookies = [_cookie(index, function) for index, function in enumerate(self._functions)]
        try:
            loaded = bpf.load_program(program, code, bpf.PROG_TYPE_KPROBE, bpf.KPROBE_MULTI)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EACCES):
                raise
            return False
        try:
            self.multi_links.append(bpf.link_kprobes(loaded, addresses, cookies, returns))
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EMFILE):
                raise
            return False
        finally:
            os.close(loaded)
        return True

    def _attach_one(self, loaded: int, index: int, function: DriverFunction, returns: bool) -> None:
        cookie = _cookie(index, function)
        try:
            self.single_links.append(
                bpf.link_one_kprobe(loaded, function.name, function.address, cookie, returns)
            )
        except OSError as error:
            if error.errno not in _UNPROBEABLE:
                raise
            self.refused.add(index)


def _cookie(index: int, function: DriverFunction) -> int:
    return index | (_QUEUES_COOKIE if function.name == _QUEUES else 0)
