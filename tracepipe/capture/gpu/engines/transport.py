"""The capture process's end of the channel that `native/transport.h` describes: a file that both map.

The payloads of the kinds of record that every engine has are read here too.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tracepipe.errors import CaptureUnavailable

INJECTION_VARIABLE: Final = "CUDA_INJECTION64_PATH"
"""What CUDA's driver takes the library from that it loads into a program."""
CHANNEL_VARIABLE: Final = "TRACEPIPE_GPU_CHANNEL"
CHANNEL_BYTES: Final = 64 << 20
"""Default ring: a warp is about 48 bytes, a launch of 10⁵ warps 5 MB."""
WAIT_US: Final = 20_000
"""How long a producer may keep its thread for want of room."""

KIND_NAME: Final = 1
KIND_GPU: Final = 2
KIND_CLOCK: Final = 3
KIND_NOTE: Final = 4

NAME: Final = struct.Struct("<Q")
"""What stands for a name in its process; the name follows."""
GPU: Final = struct.Struct("<6I16s")
"""index, SMs, major, minor, clock in kHz, 0, UUID; the name follows."""

_MAGIC: Final = 0x3155504765706954
_HEADER_BYTES: Final = 4096
_KINDS: Final = 64
_HEADER: Final = struct.Struct("<QQQII")
_CLOSED_AT, _PRODUCED_AT, _CONSUMED_AT, _DROPPED_AT = 40, 64, 128, 192
_U64: Final = struct.Struct("<Q")
_DROPPED: Final = struct.Struct(f"<{_KINDS}Q")

# tag, length, kind, pid, tid, time_ns; see native/transport.h
_RECORD: Final = struct.Struct("<QIHxxIIQ")
_ALIGNMENT: Final = 16
_BUSY, _COMMITTED = 1, 2


class GpuRecord(NamedTuple):
    """One record as a traced process put it; `time_ns` is CLOCK_MONOTONIC when room was taken for it."""

    kind: int
    pid: int
    tid: int
    time_ns: int
    payload: memoryview


def records(chunk: bytes) -> Iterator[GpuRecord]:
    """The records of what `Channel.collect` gave."""
    view, at = memoryview(chunk), 0
    while at < len(chunk):
        _, length, kind, pid, tid, time_ns = _RECORD.unpack_from(chunk, at)
        start = at + _RECORD.size
        yield GpuRecord(kind, pid, tid, time_ns, view[start : start + length])
        at += _whole(length)


def text(payload: memoryview, start: int = 0) -> str:
    """The text that ends a payload."""
    return bytes(payload[start:]).decode(errors="replace")


def read_name(payload: memoryview) -> tuple[int, str]:
    """The payload of KIND_NAME: the number that stands for a name in its process, and the name."""
    return NAME.unpack_from(payload)[0], text(payload, NAME.size)


def _whole(length: int) -> int:
    return (_RECORD.size + length + _ALIGNMENT - 1) & -_ALIGNMENT


class Channel:
    """The file and its ring. Records that were committed can be collected whatever became of who put them."""

    def __init__(self, path: Path) -> None:
        """Open the channel at `path`, also one that another process left. Raises CaptureUnavailable."""
        self.path = path
        try:
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise CaptureUnavailable(
                f"The GPU channel {path} cannot be opened: {error}.", "Is it the file of a capture?"
            ) from None
        magic, self._key, self._ring_bytes, _, _ = _HEADER.unpack_from(self._map)
        ring_bytes = self._ring_bytes
        if magic != _MAGIC or ring_bytes & (ring_bytes - 1) or len(self._map) != _HEADER_BYTES + ring_bytes:
            self._map.close()
            raise CaptureUnavailable(f"{path} is no GPU channel of this version.", "Remove it.")
        self._dropped = [0] * _KINDS

    @classmethod
    def create(
        cls,
        ring_bytes: int = CHANNEL_BYTES,
        *,
        owner: tuple[int, int] | None = None,
        folder: Path | None = None,
        wait_us: int = WAIT_US,
    ) -> Channel:
        """A new channel that this process reads; `ring_bytes` is rounded up to a power of two.

        `owner` (user, group) may write to it too: those that the command runs as. Raises CaptureUnavailable.
        """
        size_bytes = 1 << max(ring_bytes - 1, 65535).bit_length()
        shm = Path("/dev/shm")
        where = folder or (shm if os.access(shm, os.W_OK) else None)
        try:
            descriptor, name = tempfile.mkstemp(prefix="tracepipe-gpu-", dir=where)
            try:
                os.truncate(descriptor, _HEADER_BYTES + size_bytes)
                header = _HEADER.pack(_MAGIC, secrets.randbits(64), size_bytes, os.getpid(), wait_us)
                os.pwrite(descriptor, header, 0)
                if owner is not None:
                    os.fchown(descriptor, *owner)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CaptureUnavailable(
                f"The GPU channel cannot be made: {error}.", "Is there room in /dev/shm?"
            ) from None
        return cls(Path(name))

    def environment(self) -> dict[str, str]:
        """What the traced command's environment needs to find the channel."""
        return {CHANNEL_VARIABLE: str(self.path)}

    def collect(self, *, is_final: bool = False) -> bytes:
        """Whole records since the last call, in the order in which room was taken for them; never waits.

        A record that is still being written ends it. `is_final`: whoever was writing is gone, so such records
        are passed over.
        """
        produced, consumed = self._u64(_PRODUCED_AT), self._u64(_CONSUMED_AT)
        kept: list[bytes] = []
        while consumed < produced:
            run_end = self._run(consumed, produced)
            if run_end > consumed:
                kept.append(self._bytes(consumed, run_end))
                consumed = run_end
            elif is_final:
                consumed = self._next_committed(consumed, produced)
            else:
                break
            _U64.pack_into(self._map, _CONSUMED_AT, consumed)
        return b"".join(kept)

    def dropped(self) -> dict[int, int]:
        """Kind → events that found no room, since the last call."""
        now = list(_DROPPED.unpack_from(self._map, _DROPPED_AT))
        new = {kind: now[kind] - self._dropped[kind] for kind in range(_KINDS)}
        self._dropped = now
        return {kind: count for kind, count in new.items() if count}

    def say_closed(self) -> None:
        """Tell producers that nothing is taken any more: they drop without waiting."""
        _U64.pack_into(self._map, _CLOSED_AT, 1)

    def close(self) -> None:
        """Give the memory back and remove the file. Processes that still have it mapped are not harmed."""
        if not self._map.closed:
            self.say_closed()
            self._map.close()
            with suppress(OSError):
                self.path.unlink()

    def _u64(self, at: int) -> int:
        return int(_U64.unpack_from(self._map, at)[0])

    def _bytes(self, start: int, end: int) -> bytes:
        at, size = start & (self._ring_bytes - 1), end - start
        first = min(size, self._ring_bytes - at)
        at += _HEADER_BYTES
        piece = self._map[at : at + first]
        return piece if first == size else piece + self._map[_HEADER_BYTES : _HEADER_BYTES + size - first]

    def _state(self, position: int) -> tuple[int, int]:
        """State of the record at `position` and where the next one is; 0 where none begins."""
        # A header is 32 bytes at a multiple of 16, so it can go over the ring's end.
        tag, length, *_ = _RECORD.unpack(self._bytes(position, position + _RECORD.size))
        state = tag ^ self._key ^ position
        known = state in (_BUSY, _COMMITTED) and length <= self._ring_bytes // 4
        return (state, position + _whole(length)) if known else (0, position)

    def _run(self, position: int, produced: int) -> int:
        """Where the committed records from `position` on end."""
        while position < produced:
            state, after = self._state(position)
            if state != _COMMITTED or after > produced:
                break
            position = after
        return position

    def _next_committed(self, position: int, produced: int) -> int:
        """The next committed record after one that is not: its room is known, or has to be searched."""
        state, after = self._state(position)
        position = after if state == _BUSY else position + _ALIGNMENT
        while position < produced:
            state, after = self._state(position)
            if state == _COMMITTED:
                return position
            position = after if state == _BUSY else position + _ALIGNMENT
        return produced
