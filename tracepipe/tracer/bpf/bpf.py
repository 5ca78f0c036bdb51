"""The kernel's bpf(2) and perf_event_open(2), as far as loading and attaching need them.

BCC 0.26 can neither load a program for a multi-uprobe link nor create one, and detaching probes one by one
costs 0.1 s each. Layouts of attributes are from include/uapi/linux/bpf.h and perf_event.h, and drawn at each
use.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterator
from contextlib import suppress
from ctypes import addressof
from pathlib import Path

_NUMBERS = {"x86_64": (321, 298), "aarch64": (280, 241)}

BPF_MAP_CREATE, BPF_MAP_LOOKUP_ELEM, BPF_MAP_UPDATE_ELEM = 0, 1, 2
BPF_MAP_DELETE_ELEM, BPF_MAP_GET_NEXT_KEY = 3, 4
BPF_PROG_LOAD, BPF_OBJ_GET_INFO_BY_FD, BPF_RAW_TRACEPOINT_OPEN, BPF_LINK_CREATE = 5, 15, 17, 28
PROG_TYPE_KPROBE, PROG_TYPE_TRACEPOINT, PROG_TYPE_PERF_EVENT, PROG_TYPE_RAW_TRACEPOINT = 2, 5, 7, 17
PERF_EVENT_LINK, KPROBE_MULTI, UPROBE_MULTI = 41, 42, 48  # enum bpf_attach_type
_KPROBE_MULTI_RETURN = _UPROBE_MULTI_RETURN = 1
_PERF_TYPE_SOFTWARE, _PERF_TYPE_TRACEPOINT = 1, 2
_CPU_CLOCK = 0  # enum perf_sw_ids: an hrtimer, which needs no hardware counter
_PERF_ATTR_BYTES = 112  # PERF_ATTR_SIZE_VER5
_PERF_FLAG_FD_CLOEXEC = 8
_BY_FREQUENCY = 1 << 10  # of the flags of a perf event: the period is a frequency, Hz
_DISABLED = 1  # of the flags of a perf event; linked programs run all the same
_UPROBE_PMU = Path("/sys/bus/event_source/devices/uprobe/type")
KPROBE_PMU = Path("/sys/bus/event_source/devices/kprobe/type")
"""Exists where the kernel has kprobes for perf events (CONFIG_KPROBE_EVENTS)."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _words(values: list[int]) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(struct.pack(f"<{len(values)}Q", *values), 8 * len(values))


def _syscall(which: int, *args: object) -> int:
    result = _libc.syscall(ctypes.c_long(_NUMBERS[platform.machine()][which]), *args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(result)


def bpf(command: int, attributes: bytes) -> int:
    """Call bpf(2). Raises OSError."""
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return _syscall(0, ctypes.c_int(command), buffer, ctypes.c_uint(len(attributes)))


def create_map(name: str, kind: int, key_bytes: int, value_bytes: int, entries: int, flags: int = 0) -> int:
    """Create a map, and return its descriptor; `entries` of a ring buffer are bytes. Raises OSError."""
    #  0 type │ 4 key │ 8 value │ 12 entries │ 16 flags │ 20 inner map │ 24 NUMA node │ 28 name[16]
    return bpf(
        BPF_MAP_CREATE,
        struct.pack("<IIIIIII16s", kind, key_bytes, value_bytes, entries, flags, 0, 0, name.encode()[:15]),
    )


SLEEPABLE = 1 << 4  # BPF_F_SLEEPABLE


def load_program(
    name: str, instructions: bytes, program_type: int, attach_type: int = 0, flags: int = 0
) -> int:
    """Load a program; returns its descriptor. Raises OSError, which ends with the verifier's last lines."""
    code = ctypes.create_string_buffer(instructions, len(instructions))
    # The kernel considers this license GPL-compatible, so the program may use all helpers.
    licence = ctypes.create_string_buffer(b"Dual MIT/GPL")
    log = ctypes.create_string_buffer(1 << 20)

    def attributes(log_level: int) -> bytes:
        #  0 type │ 4 count │ 8 insns │ 16 license │ 24 log level │ 28 log bytes │ 32 log │ 40 version
        # 44 flags │ 48 name[16] │ 64 ifindex │ 68 expected attach type
        return struct.pack(
            "<IIQQIIQII16sII",
            *(program_type, len(instructions) // 8, addressof(code), addressof(licence)),
            *(log_level, len(log) if log_level else 0, addressof(log) if log_level else 0),
            *(0, flags, name.encode()[:15], 0, attach_type),
        )

    try:
        return bpf(BPF_PROG_LOAD, attributes(0))
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
        try:
            return bpf(BPF_PROG_LOAD, attributes(1))
        except OSError as again:
            lines = log.value.decode(errors="replace").strip().splitlines()
            raise OSError(again.errno, f"{again.strerror}: {' '.join(lines[-2:])}") from None


def link_uprobes(program_fd: int, path: str, offsets: list[int], cookies: list[int], returns: bool) -> int:
    """Create one link for uprobes at all `offsets` of a file; EINVAL before Linux 6.6. Raises OSError."""
    name, places, values = ctypes.create_string_buffer(os.fsencode(path)), _words(offsets), _words(cookies)
    #  0 program │ 4 target │ 8 attach type │ 12 flags
    # 16 path │ 24 offsets │ 32 reference counters │ 40 cookies │ 48 count │ 52 uprobe flags │ 56 pid
    attributes = struct.pack(
        "<IIIIQQQQIIII",
        *(program_fd, 0, UPROBE_MULTI, 0),
        *(addressof(name), addressof(places), 0, addressof(values)),
        *(len(offsets), _UPROBE_MULTI_RETURN if returns else 0, 0, 0),
    )
    return bpf(BPF_LINK_CREATE, attributes)


def link_one_uprobe(program_fd: int, path: str, offset: int, cookie: int, returns: bool) -> int:
    """Create a link for one uprobe through a perf event, for kernels from 5.15. Raises OSError."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return _link_probe(program_fd, _UPROBE_PMU, addressof(name), offset, cookie, returns)


def link_kprobes(program_fd: int, addresses: list[int], cookies: list[int], returns: bool) -> int:
    """Create one link for kprobes at all `addresses`, which must be traceable function entries. Raises
    OSError.

    Kernels before 5.18, and those built without CONFIG_FPROBE, refuse it.
    """
    places, values = _words(addresses), _words(cookies)
    #  0 program │ 4 target │ 8 attach type │ 12 flags
    # 16 kprobe flags │ 20 count │ 24 symbols │ 32 addresses │ 40 cookies
    attributes = struct.pack(
        "<IIIIIIQQQ",
        *(program_fd, 0, KPROBE_MULTI, 0),
        *(_KPROBE_MULTI_RETURN if returns else 0, len(addresses), 0, addressof(places), addressof(values)),
    )
    return bpf(BPF_LINK_CREATE, attributes)


def link_one_kprobe(program_fd: int, symbol: str, address: int, cookie: int, returns: bool) -> int:
    """Link one kprobe through a perf event: at `address`, or at `symbol` if that is 0. Raises OSError."""
    name = ctypes.create_string_buffer(symbol.encode())
    where = (0, address) if address else (addressof(name), 0)
    return _link_probe(program_fd, KPROBE_PMU, *where, cookie, returns)


def _link_probe(program_fd: int, pmu: Path, config1: int, config2: int, cookie: int, returns: bool) -> int:
    event = perf_event(int(pmu.read_text()), config=int(returns), config1=config1, config2=config2)
    try:
        return link_event(program_fd, event, cookie)
    finally:
        os.close(event)  # the link holds it


def open_tracepoint(tracepoint_id: int) -> int:
    """Create a perf event to which a program for every hit, on every processor, can be linked. The event is
    disabled, so it records nothing itself. Raises OSError.
    """
    return perf_event(_PERF_TYPE_TRACEPOINT, config=tracepoint_id, flags=_DISABLED)


def open_clock(processor: int, hz: int) -> int:
    """Create a perf event that fires `hz` times a second on a processor, for `link_event`. Raises OSError."""
    return perf_event(_PERF_TYPE_SOFTWARE, _CPU_CLOCK, flags=_BY_FREQUENCY, period=hz, processor=processor)


def link_event(program_fd: int, event: int, cookie: int = 0) -> int:
    """Create a link that runs the program at every hit of a perf event. Raises OSError."""
    #  0 program │ 4 perf event │ 8 attach type │ 12 flags │ 16 cookie
    return bpf(BPF_LINK_CREATE, struct.pack("<IIIIQ", program_fd, event, PERF_EVENT_LINK, 0, cookie))


def attach_raw_tracepoint(program_fd: int, name: str) -> int:
    """Create a link that runs the program at every hit, with raw arguments. Raises OSError."""
    text = ctypes.create_string_buffer(name.encode())
    #  0 name │ 8 program
    return bpf(BPF_RAW_TRACEPOINT_OPEN, struct.pack("<QI", addressof(text), program_fd))


def perf_event(
    event_type: int,
    config: int,
    config1: int = 0,
    config2: int = 0,
    flags: int = 0,
    period: int = 1,
    processor: int = 0,
) -> int:
    """Call perf_event_open(2) for all processes, on one processor: enough to enable a probe. Raises
    OSError.
    """
    #  0 type │ 4 size │ 8 config │ 16 period │ 24 sample type │ 32 read format │ 40 flags │ 48 wake-up
    # 52 breakpoint type │ 56 config1 │ 64 config2 │ … 112
    attributes = struct.pack(
        "<IIQQQQQIIQQ", event_type, _PERF_ATTR_BYTES, config, period, 0, 0, flags, 0, 0, config1, config2
    ).ljust(_PERF_ATTR_BYTES, b"\0")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    everyone, on, no_group = ctypes.c_int(-1), ctypes.c_int(processor), ctypes.c_int(-1)
    return _syscall(1, buffer, everyone, on, no_group, ctypes.c_ulong(_PERF_FLAG_FD_CLOEXEC))


def map_update(map_fd: int, key: bytes, value: bytes) -> None:
    """Set one element. Raises OSError."""
    key_buffer = ctypes.create_string_buffer(key, len(key))
    value_buffer = ctypes.create_string_buffer(value, len(value))
    #  0 map │ 8 key │ 16 value │ 24 flags
    bpf(
        BPF_MAP_UPDATE_ELEM,
        struct.pack("<IIQQQ", map_fd, 0, addressof(key_buffer), addressof(value_buffer), 0),
    )


def map_values(map_fd: int, key_bytes: int, value_bytes: int, most: int) -> Iterator[bytes]:
    """The values of a hash map of at most so many elements, which changes meanwhile: some may come twice."""
    key, value = ctypes.create_string_buffer(key_bytes), ctypes.create_string_buffer(value_bytes)
    before = 0
    for _ in range(most):
        try:
            #  0 map │ 8 key (0: the first) │ 16 next key
            bpf(BPF_MAP_GET_NEXT_KEY, struct.pack("<IIQQ", map_fd, 0, before, addressof(key)))
        except OSError:
            return
        before = addressof(key)
        with suppress(FileNotFoundError):  # it was deleted in between
            #  0 map │ 8 key │ 16 value │ 24 flags
            bpf(BPF_MAP_LOOKUP_ELEM, struct.pack("<IIQQQ", map_fd, 0, before, addressof(value), 0))
            yield value.raw


def map_delete(map_fd: int, key: bytes) -> None:
    """Delete an element, if it is there."""
    buffer = ctypes.create_string_buffer(key, len(key))
    with suppress(OSError):
        #  0 map │ 8 key
        bpf(BPF_MAP_DELETE_ELEM, struct.pack("<IIQ", map_fd, 0, addressof(buffer)))


def map_clear(map_fd: int, key_bytes: int) -> None:
    """Delete every element of a hash map."""
    while True:
        key = ctypes.create_string_buffer(key_bytes)
        try:
            #  0 map │ 8 key (0: the first) │ 16 next key
            bpf(BPF_MAP_GET_NEXT_KEY, struct.pack("<IIQQ", map_fd, 0, 0, addressof(key)))
        except OSError:
            return
        try:
            bpf(BPF_MAP_DELETE_ELEM, struct.pack("<IIQ", map_fd, 0, addressof(key)))
        except FileNotFoundError:
            continue  # the thread ended in between
