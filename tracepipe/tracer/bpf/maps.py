"""The maps of probes.bpf.c: created here, and read and written as memory where the kernel can map them.

The ring buffer has records of a fixed size. From include/uapi/linux/bpf.h and kernel/bpf/ringbuf.c; a process
maps:

    page 0 (read, write)   consumer position, u64: written here
    page 1 (read)          producer position, u64
    from page 2 (read)     the data, twice in a row, so that a span never wraps

    each record:  len u32 (bit 31: being written, bit 30: discarded) │ page offset u32 │ payload

With a payload of 56 bytes every record takes 64. One slice over the bytes of lengths therefore shows whether
a span is complete, and the span can be kept unchanged. Each position is read and written as one machine word.
"""

from __future__ import annotations

import mmap
import os
import struct
from enum import IntEnum
from pathlib import Path

from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.bpf.specs import SPEC_BYTES
from tracepipe.tracer.records.record import DROP_LAYERS, RECORD_BYTES

_HASH, _ARRAY, _PERCPU_ARRAY, _LRU_HASH, _RINGBUF = 1, 2, 6, 9, 27  # enum bpf_map_type
_MMAPABLE = 1 << 10  # BPF_F_MMAPABLE
_THREADS_MAX = 65536
_OPEN_CALLS_MAX = 16384

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

    def __init__(self, ring_bytes: int, probe_count: int, pairs: bool) -> None:
        """Create them. `pairs`: returns need data of their entries. Raises OSError."""
        # The number of the last one that may ever be online, plus one; the numbers may have gaps.
        text = Path("/sys/devices/system/cpu/possible").read_text()
        self.processors = int(text.strip().replace("-", ",").split(",")[-1]) + 1
        counters = len(DROP_LAYERS) * self.processors
        # name → kind, bytes of a key and of a value, entries, flags
        forms: dict[str, tuple[int, ...]] = {
            "ring": (_RINGBUF, 0, 0, ring_bytes),
            "tracked": (_HASH, 4, 24, _THREADS_MAX),
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
        #  0 tgid │ 4 running: 2, not known │ 6 its ids were sent │ 7 asleep │ 8 their window │ 16 where
        value = struct.pack("=IHBBQQ", tgid, 2, 0, 0, 0, 0)
        bpf.map_update(self["tracked"], struct.pack("=I", tid), value)

    def adopt(self, tgid: int) -> None:
        """Record the threads of a process of this pid namespace from their next event on. Raises OSError."""
        bpf.map_update(self["adopted"], struct.pack("=I", tgid), struct.pack("=Q", 1))

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
    def made(self) -> int:
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
