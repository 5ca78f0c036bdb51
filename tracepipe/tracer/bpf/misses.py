"""Hits at which the kernel did not run a program, as another BPF program was running on the processor.

The kernel counts them for each program (`recursion_misses`; for tracepoints from Linux 6.7 on), over all
threads of the machine. The count is therefore an upper bound of the missing events. Programs of the
scheduler's tracepoints count by thread themselves (probes.bpf.c), and those of uprobes and raw tracepoints
always run.
"""

from __future__ import annotations

import ctypes
import os
import struct

from tracepipe.tracer.bpf import bpf

_INFO_BYTES = 216  # struct bpf_prog_info up to the count, as since Linux 5.12
_MISSES_AT = 208
_EVERY_NS = 10**9  # each look takes a system call for each program


class Misses:
    """The attached programs, and how many hits each has missed so far."""

    def __init__(self) -> None:
        self._programs: list[tuple[int, str | None]] = []
        self._seen: dict[int, int] = {}
        self._look_at_ns = 0

    def watch(self, program_fd: int, layer: str | None) -> None:
        """Count a program's misses as events of a layer; None: as threads that are not followed."""
        self._programs.append((os.dup(program_fd), layer))

    def take(self, now_ns: int, *, is_final: bool) -> dict[str | None, int]:
        """Layer → hits that were missed since the last look; it looks once a second and at the end."""
        missed: dict[str | None, int] = {}
        if now_ns < self._look_at_ns and not is_final:
            return missed
        self._look_at_ns = now_ns + _EVERY_NS
        for descriptor, layer in self._programs:
            total = _misses_of(descriptor)
            if total > self._seen.get(descriptor, 0):
                missed[layer] = missed.get(layer, 0) + total - self._seen.get(descriptor, 0)
                self._seen[descriptor] = total
        return missed

    def close(self) -> None:
        """Close the programs."""
        for descriptor, _ in self._programs:
            os.close(descriptor)
        self._programs.clear()


def _misses_of(program_fd: int) -> int:
    info = ctypes.create_string_buffer(_INFO_BYTES)
    #  0 program │ 4 size │ 8 info
    bpf.bpf(bpf.BPF_OBJ_GET_INFO_BY_FD, struct.pack("<IIQ", program_fd, _INFO_BYTES, ctypes.addressof(info)))
    return int(struct.unpack_from("<Q", info, _MISSES_AT)[0])
