"""A BPF ring buffer of fixed-size records, read as memory.

From include/uapi/linux/bpf.h and kernel/bpf/ringbuf.c. A process maps:

    page 0 (read, write)   consumer position, u64: written here
    page 1 (read)          producer position, u64
    from page 2 (read)     the data, twice in a row, so that a span never wraps

    each record:  len u32 (bit 31: being written, bit 30: discarded) │ page offset u32 │ payload

With a payload of 56 bytes every record takes 64. One slice over the bytes of lengths therefore shows whether
a span is complete, and the span can be kept unchanged. Each position is read and written as one machine word.
"""

from __future__ import annotations

import mmap

from tracepipe.tracer.records.record import RECORD_BYTES

_BUSY_BYTE = 3  # holds bit 31 of the length; the other bits of that byte are 0 for short records


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

    def take(self, room_bytes: int) -> bytes:
        """The records up to the first that is still being written, with their headers; frees their space."""
        position = self._consumer[0]
        size = min(self._producer[0] - position, room_bytes)
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
