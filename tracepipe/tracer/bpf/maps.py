"""The maps of probes.bpf.c: created here, and read and written as memory where the kernel can map them.

The ring buffer has records of a fixed size. From include/uapi/linux/bpf.h and kernel/bpf/ringbuf.c; a process
maps:

    page 0 (read, write)   consumer position, u64: written here
    page 1 (read)          producer position, u64
    from page 2 (read)     the data, twice in a row, so that a span never wraps

    each record:  len u32 (bit 31: being written, bit 30: discarded) │ page offset u32 │ payload

With a payload of 56 bytes every record takes 64. One slice over the bytes of lengths therefore shows whether
a span is complete, and the span can be kept unchanged. Each position is read and written as one machine word.

The map `specs` has a struct spec of each probe, the facts that the BPF programs need. Positions are stored
plus one; 0 means none.

    0       8        16      17      18    19          20     21      22          23
    ┌───────┬────────┬───────┬───────┬─────┬───────────┬──────┬───────┬───────────┬──────────────┐
    │low[8] │high[8] │ slots │ layer │ out │ out bytes │ text │ flags │ condition │ condition at │
    └───────┴────────┴───────┴───────┴─────┴───────────┴──────┴───────┴───────────┴──────────────┘
    24               25                 26       27          28        32
    ┌────────────────┬──────────────────┬────────┬───────────┬─────────┬─────────────────┐
    │ condition bits │ condition signed │ hashed │ hashed at │ zero[4] │ condition value │
    └────────────────┴──────────────────┴────────┴───────────┴─────────┴─────────────────┘
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

from tracepipe.hooks.hook import (
    INTEGER_KINDS,
    NAMING_EFFECTS,
    OPERATORS,
    TEXT_FORMS,
    Argument,
    KernelPlace,
    Probe,
    TracepointPlace,
)
from tracepipe.hooks.slots import slots, values
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.records.record import DROP_LAYERS, RECORD_BYTES
from tracepipe.tracer.request import Filters

_SPEC = struct.Struct("<8s8sBBBBBBBBBBBB4xQ")
SPEC_BYTES = _SPEC.size
_PAIRED, _INSTANT, _QUEUES, _IN_KERNEL, _EVERYWHERE, _UNFILTERED, _NAMES = 1, 2, 4, 8, 16, 32, 64
WHOLE_EFFECTS = frozenset({*NAMING_EFFECTS, "alloc", "free"})
"""The effects that no filter may drop: what handles are, and allocations, whose sum must be right."""
QUEUES_ITEMS = "nv_kthread_q_schedule_q_item"
"""The driver's function that queues work for its own threads."""
# enum condition of probes.bpf.c
_CONDITIONS = {"==": 1, "!=": 2, "<": 3, "<=": 4, ">": 5, ">=": 6, "&": 7}
assert set(_CONDITIONS) == set(OPERATORS)


def is_paired(probe: Probe, filters: Filters) -> bool:
    """Whether the return of a call needs data of its entry."""
    needs = filters.min_duration_ns > 0 or filters.sample > 1 or probe.hook.condition is not None
    return probe.is_span and (needs or any(argument.out for argument in probe.signature.arguments))


def text_field(argument: Argument) -> int:
    """The place of a text in a tracepoint's record, as TEXT_0 and the like of probes.bpf.c have it."""
    return (1 + TEXT_FORMS.index(argument.text_form)) << 16 | argument.position


def spec_of(probe: Probe, filters: Filters) -> bytes:
    """The struct spec of one probe."""
    low, high = bytearray(8), bytearray(8)
    arguments = probe.signature.arguments
    is_tracepoint = isinstance(probe.place, TracepointPlace)
    count = 0
    if not is_tracepoint:
        for count, slot in enumerate(slots(probe.signature), 1):
            low[count - 1] = slot.low + 1
            high[count - 1] = 0 if slot.high is None else slot.high + 1
    out = next((argument for argument in arguments if argument.out), None)
    text = next((argument for argument in arguments if argument.kind == "str"), None)
    condition = probe.hook.condition
    at = bits = value = operator = signed = 0
    if condition is not None:
        # A tracepoint's program reads fields in the order of the arguments.
        index = arguments.index(condition.argument) if is_tracepoint else condition.argument.position
        at = index + 1
        bits, signed = INTEGER_KINDS.get(condition.argument.kind, (32, True))
        value = condition.value & (1 << bits) - 1
        operator = _CONDITIONS[condition.operator]
    hook, in_kernel = probe.hook, isinstance(probe.place, KernelPlace)
    flags = (
        _PAIRED * is_paired(probe, filters)
        | _IN_KERNEL * in_kernel
        | _QUEUES * (in_kernel and probe.symbol == QUEUES_ITEMS)
        | _INSTANT * (not hook.returns)
        | _EVERYWHERE * hook.everywhere
        | _UNFILTERED * (hook.effect in WHOLE_EFFECTS)
        | _NAMES * (hook.effect in NAMING_EFFECTS)
    )
    return _SPEC.pack(
        bytes(low),
        bytes(high),
        count,
        DROP_LAYERS.index(probe.layer),
        out.position + 1 if out else 0,
        out.bits // 8 if out else 0,
        text.position + 1 if text and not is_tracepoint else 0,
        flags,
        operator,
        at,
        bits,
        int(signed),
        *hashed_slot(probe),
        value,
    )


def hashed_slot(probe: Probe) -> tuple[int, int]:
    """The slot, plus one, of the argument whose structure is hashed, and its position, plus one, where the
    structure itself lies on the stack.
    """
    hashed = next((argument for argument in probe.signature.arguments if argument.is_hashed), None)
    if hashed is None:
        return 0, 0
    on_stack = hashed.position + 1 if hashed.kind == "hash128" else 0
    return values(probe.signature)[hashed.name].slot + 1, on_stack


_HASH, _ARRAY, _PERCPU_ARRAY, _LRU_HASH, _RINGBUF = 1, 2, 6, 9, 27  # enum bpf_map_type
_MMAPABLE = 1 << 10  # BPF_F_MMAPABLE
_THREADS_MAX = 65536
_THREAD_BYTES = 56  # struct thread of probes.bpf.c
_OPEN_CALLS_MAX = 16384
_PYTHON_BYTES, _STACK_BYTES = 32, 1960  # struct python and struct stack

_BUSY_BYTE = 3  # holds bit 31 of the length; the other bits of that byte are 0 for short records


class Control(IntEnum):
    """Elements of the map `control`: enum control of probes.bpf.c."""

    ARMED = 0
    STOPPED = 1
    WINDOW_NS = 2
    WINDOWS_LEFT = 3
    BEGIN_HITS = 4
    END_HITS = 5
    ASKED_NS = 6
    ASKED_BY = 7
    SEEN_NS = 8
    IS_READY = 9
    IS_BUSY = 10
    END_ASKED_NS = 11


class Maps:
    """All maps of one capture, by name; `descriptors` in the order of their numbers in probes.bpf.c."""

    def __init__(self, ring_bytes: int, probe_count: int, pairs: bool, samples: bool) -> None:
        """Create them. `pairs`: returns need data of their entries; `samples`: stacks are walked. Raises
        OSError.
        """
        # The number of the last one that may ever be online, plus one; the numbers may have gaps.
        text = Path("/sys/devices/system/cpu/possible").read_text()
        self.processors = int(text.strip().replace("-", ",").split(",")[-1]) + 1
        counters = len(DROP_LAYERS) * self.processors
        # name → kind, bytes of a key and of a value, entries, flags
        forms: dict[str, tuple[int, ...]] = {
            "ring": (_RINGBUF, 0, 0, ring_bytes),
            "tracked": (_HASH, 4, _THREAD_BYTES, _THREADS_MAX),
            "control": (_ARRAY, 4, 8, len(Control), _MMAPABLE),
            "drops": (_ARRAY, 4, 8, counters, _MMAPABLE),
            "wanted": (_ARRAY, 4, 8, 512, _MMAPABLE),
            "queued": (_LRU_HASH, 16, 8, 4096),
            "serving": (_HASH, 4, 16, 1024),
            "specs": (_ARRAY, 4, SPEC_BYTES, max(probe_count, 1), _MMAPABLE),
            "open": (_HASH, 16, 88, _OPEN_CALLS_MAX if pairs else 1024),
            "sampled": (_PERCPU_ARRAY, 4, 8, max(probe_count, 1)),
            "filtered": (_ARRAY, 4, 8, counters, _MMAPABLE),
            "adopted": (_HASH, 4, 8, 4096),
            "pythons": (_LRU_HASH, 4, _PYTHON_BYTES, 8192 if samples else 1024),
            "states": (_LRU_HASH, 4, 8, _THREADS_MAX if samples else 1024),
            "known": (_LRU_HASH, 8, 8, _THREADS_MAX if samples else 1024),
            "walked": (_PERCPU_ARRAY, 4, _STACK_BYTES, 2),
        }
        self._descriptors: dict[str, int] = {}
        self._mapped: list[tuple[mmap.mmap, memoryview]] = []
        try:
            for name, form in forms.items():
                self._descriptors[name] = bpf.create_map(name, *form)
            self.control = self._words("control", len(Control))
            self.drops = self._words("drops", counters)
            self.filtered = self._words("filtered", counters)
        except BaseException:
            self.close()
            raise

    def __getitem__(self, name: str) -> int:
        """The descriptor of a map."""
        return self._descriptors[name]

    @property
    def descriptors(self) -> list[int]:
        """The descriptors in the order of the maps' numbers, which start at 1."""
        return list(self._descriptors.values())

    def want_syscalls(self, numbers: list[int]) -> None:
        """Mark system calls as recorded."""
        words = self._words("wanted", 512)
        for number in numbers:
            words[number] = 1

    def put_specs(self, specs: bytes) -> None:
        """Write the specs of all probes, one after the other. Raises OSError."""
        for index in range(len(specs) // SPEC_BYTES):
            spec = specs[index * SPEC_BYTES : (index + 1) * SPEC_BYTES]
            bpf.map_update(self["specs"], struct.pack("=I", index), spec)

    def track(self, tid: int, tgid: int) -> None:
        """Record an existing thread, which may be running or not. Raises OSError."""
        #  0 tgid │ 4 running: 2, not known │ 6 its ids were sent │ 7 asleep │ 8 window │ 16 where │ 24 …
        value = struct.pack("=IHBB6Q", tgid, 2, *[0] * 8)
        bpf.map_update(self["tracked"], struct.pack("=I", tid), value)

    def set_python(self, tgid: int, python: bytes) -> None:
        """State where the Python of a process has its frames: a struct python. Raises OSError."""
        bpf.map_update(self["pythons"], struct.pack("=I", tgid), python)

    def forget_stack(self, number: int) -> None:
        """Have the words of a stack sent again when it occurs."""
        bpf.map_delete(self["known"], struct.pack("=Q", number))

    def adopt(self, tgid: int) -> None:
        """Record the threads of a process of this pid namespace from their next event on. Raises OSError."""
        bpf.map_update(self["adopted"], struct.pack("=I", tgid), struct.pack("=Q", 1))

    def processes(self) -> set[int]:
        """The processes that have recorded threads now."""
        values = bpf.map_values(self["tracked"], 4, _THREAD_BYTES, _THREADS_MAX)
        return {struct.unpack_from("=I", value)[0] for value in values}

    def close(self) -> None:
        """Unmap the maps, and close their descriptors."""
        for mapped, words in self._mapped:
            words.release()
            mapped.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._mapped, self._descriptors = [], {}

    def _words(self, name: str, count: int) -> memoryview:
        """Map an array of u64 as memory, which is read and written a word at a time."""
        size_bytes = -(-8 * count // mmap.PAGESIZE) * mmap.PAGESIZE
        mapped = mmap.mmap(self[name], size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        words = memoryview(mapped)[: 8 * count].cast("Q")
        self._mapped.append((mapped, words))
        return words


class Ring:
    """The consumer's end of the ring buffer behind `map_fd`."""

    def __init__(self, map_fd: int, data_bytes: int) -> None:
        page = mmap.PAGESIZE
        self._mask = data_bytes - 1
        self._control = mmap.mmap(map_fd, page, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=0)
        self._data = mmap.mmap(map_fd, page + 2 * data_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=page)
        self._consumer = memoryview(self._control)[:8].cast("Q")
        self._producer = memoryview(self._data)[:8].cast("Q")
        self._first = self._consumer[0]

    @property
    def made_bytes(self) -> int:
        """How many bytes have been written into the ring."""
        return self._producer[0] - self._first

    def read(self, most_bytes: int) -> bytes:
        """The records up to the first that is still being written, with their headers; frees their space."""
        position = self._consumer[0]
        size = min(self._producer[0] - position, most_bytes)
        if not size:
            return b""
        start = mmap.PAGESIZE + (position & self._mask)
        # Read the busy bits before copying: a record that is complete stays complete.
        marks = self._data[start + _BUSY_BYTE : start + size : RECORD_BYTES]
        ready = len(marks) - len(marks.lstrip(b"\0"))
        span = self._data[start : start + ready * RECORD_BYTES]
        self._consumer[0] = position + len(span)
        return span

    def close(self) -> None:
        """Unmap the ring."""
        self._consumer.release()
        self._producer.release()
        self._control.close()
        self._data.close()
