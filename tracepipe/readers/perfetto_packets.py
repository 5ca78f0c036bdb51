"""Reads the packets of a Perfetto trace one after the other. One is in memory at a time. A large one is in a
temporary file, and its fields are read some at a time.

    Trace         1 packet…               a file is one, and so are several files joined
    TracePacket   50 compressed_packets   a Trace, compressed with zlib

    1 ftrace_events {2 event…}        messages with some of the repeated fields each; the first has all others
    2 process_tree {1, 2…}
    12 interned_data {…}
    50 compressed_packets             bytes, some at a time
    others                            one message, with those of its fields that fit

Source: protos/perfetto/trace/trace.proto, trace_packet.proto.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, Final

from tracepipe.readers.sorted_rows import naming_the_folder, unnamed_file
from tracepipe.readers.wire_fields import (
    BYTES,
    FIELDS_MAX,
    FIXED32,
    FIXED64,
    VARINT,
    Place,
    WireError,
    WireFile,
    tagged,
    varint,
)

AT_HAND_BYTES: Final = 1 << 20
_PART_BYTES: Final = 1 << 18
_FTRACE, _TREE, _INTERNED, _COMPRESSED_FIELD = 1, 2, 12, 50
_REPEATED: Final = {_FTRACE: range(2, 3), _TREE: range(1, 3), _INTERNED: range(1, 1 << 29)}
# The field of a ftrace bundle for events that were lost before it. Only its first part has it.
_LOST_EVENTS: Final = 3


class LargePacket:
    """A packet of `size_bytes` at the start of a file. `left_out` is how many of its fields do not fit."""

    def __init__(self, file: BinaryIO, size_bytes: int) -> None:
        self._wire = WireFile(file)
        self.size_bytes = size_bytes
        self.left_out = 0

    def startswith(self, start: bytes) -> bool:
        """Whether the packet starts with these bytes."""
        return self._wire.read(0, len(start)) == start

    def compressed(self) -> Iterator[Iterator[bytes]]:
        """The content of each field of compressed packets, some bytes at a time. Raises WireError."""
        for field in self._wire.fields(0, self.size_bytes):
            if (field.number, field.wire_type) == (_COMPRESSED_FIELD, BYTES):
                steps = range(field.start, field.end, _CHUNK_BYTES)
                yield (self._wire.read(at, min(at + _CHUNK_BYTES, field.end)) for at in steps)

    def fields(self) -> list[tuple[int, Any]]:
        """The fields of the packet by their tags, as `tagged` has them: large ones as messages that each have
        a part of it, which can be iterated once. Raises WireError.
        """
        found: list[tuple[int, Any]] = []
        held_bytes = 0
        for field in self._wire.fields(0, self.size_bytes):
            if len(found) >= FIELDS_MAX:
                raise WireError(f"there are over {FIELDS_MAX} fields", field.start)
            tag, size = field.number << 3 | field.wire_type, field.end - field.start
            value: Any = field.value
            if field.wire_type != VARINT:
                is_held = held_bytes + size <= _PART_BYTES
                held_bytes += size * is_held
                value = self._wire.read(field.start, field.end) if is_held else self._parts(field)
            found.append((tag, value))
        return found

    def _parts(self, of: Place) -> Iterator[bytes]:
        """A field as messages. Raises WireError."""
        repeated = _REPEATED.get(of.number, range(0))
        first, again = self._not_repeated(of, repeated)
        held, held_bytes = [first], len(first)
        for field, at in self._inside(of):
            if field.number not in repeated:
                continue
            size = field.end - at
            if size > AT_HAND_BYTES:
                self.left_out += 1
                continue
            if held_bytes + size > AT_HAND_BYTES or (len(held) > 1 and held_bytes + size > _PART_BYTES):
                yield b"".join(held)
                held, held_bytes = [again], len(again)
            held.append(self._wire.read(at, field.end))
            held_bytes += size
        yield b"".join(held)

    def _not_repeated(self, of: Place, repeated: range) -> tuple[bytes, bytes]:
        """The other fields that fit, and those of them that are numbers, which each part has."""
        first, again = bytearray(), bytearray()
        for field, at in self._inside(of):
            if field.number in repeated:
                continue
            if len(first) + field.end - at > AT_HAND_BYTES:
                self.left_out += 1
                continue
            data = self._wire.read(at, field.end)
            first += data
            if repeated and field.wire_type == VARINT and field.number != _LOST_EVENTS:
                again += data
        return bytes(first), bytes(again)

    def _inside(self, of: Place) -> Iterator[tuple[Place, int]]:
        """The fields of a field, and where each begins."""
        at = of.start
        for field in self._wire.fields(of.start, of.end):
            yield field, at
            at = field.end


def parts_of(value: bytes | Iterable[bytes]) -> Iterable[bytes]:
    """The messages of a packet's field: a single one, if it is in memory."""
    return (value,) if isinstance(value, bytes) else value


PACKET_BYTES_MAX: Final = 64 << 20
_CHUNK_BYTES: Final = 1 << 16
_HEAD_BYTES: Final = 20
_PACKET: Final = 1 << 3 | BYTES
# A tag, and three bytes of a length.
_PACKET_HEAD_BYTES: Final = 4
_COMPRESSED: Final = bytes([0x92, 0x03])  # 50 << 3 | BYTES, as a varint
_COMPRESSED_TAG: Final = 50 << 3 | BYTES
# Compressed packets may contain compressed packets. No program nests them deeper.
_DEPTH_MAX: Final = 2
# How a packet is recognized: its fields are below a number, and have these types.
_PACKETS_SNIFFED: Final = 4
_FIELDS_END: Final = 1024
_VARINTS: Final = frozenset({3, 8, 10, 13, 41, 42, 58, 79, 87, 98})
_SIZES: Final = {FIXED64: 8, FIXED32: 4}
Say = Callable[[str], None]
Take = Callable[[bytes, int], int]


class _Forward:
    """Bytes that are read forward."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read = read
        self._data, self._at, self._passed = b"", 0, 0

    @property
    def place(self) -> int:
        """How many bytes were consumed."""
        return self._passed + self._at

    def has(self, size: int) -> bool:
        """Whether `size` more bytes follow. They are in the buffer then."""
        missing = size - (len(self._data) - self._at)
        if missing <= 0:
            return True
        parts = [self._data[self._at :]]
        while missing > 0 and (more := self._read(max(missing, _CHUNK_BYTES))):
            parts.append(more)
            missing -= len(more)
        self._passed += self._at
        self._data, self._at = b"".join(parts), 0
        return missing <= 0

    def packets(self, take: Take) -> Iterator[tuple[int, bytes]]:
        """The next packets that are whole in the buffer, and the place of each, while their lengths have at
        most three bytes. This is the fast way, for millions of packets.
        """
        data, at = self._data, self._at
        last = len(data) - _PACKET_HEAD_BYTES
        while at <= last and data[at] == _PACKET:
            self._at = at = take(data, at)
            if at > last or data[at] != _PACKET:
                return
            size, start = data[at + 1], at + 2
            if size >= 0x80:
                size, start = size & 0x7F | data[start] << 7, start + 1
                if size >= 0x80 << 7:
                    size, start = size & 0x3FFF | data[start] << 14, start + 1
            end = start + size
            if end > len(data) or size > AT_HAND_BYTES:
                return
            self._at = end
            yield self._passed + at, data[start:end]
            at = end

    def head(self) -> bytes:
        """The next bytes, as many as two numbers can have, without consuming them."""
        self.has(_HEAD_BYTES)
        return self._data[self._at : self._at + _HEAD_BYTES]

    def consume(self, size: int) -> bytes:
        """Consume `size` bytes, which are in the buffer."""
        self._at += size
        return self._data[self._at - size : self._at]

    def skip(self, size: int, to: BinaryIO | None = None) -> bool:
        """Skip `size` bytes, and write them to a file, if there is one. Return whether there were as many."""
        while size > 0:
            part = min(size, _CHUNK_BYTES)
            if not self.has(part):
                self._at = len(self._data)
                return False
            data = self.consume(part)
            if to is not None:
                to.write(data)
            size -= part
        return True


class PacketStream:
    """Reads the packets of a stream. `say` is called with each fault and its place. `take` may read packets
    in a buffer from a place on, and returns the place of the next packet.
    """

    def __init__(self, stream: BinaryIO, say: Say, take: Take = lambda data, at: at) -> None:
        self._from, self._say, self._take = _Forward(stream.read), say, take

    def packets(self) -> Iterator[tuple[int, bytes | LargePacket]]:
        """Each packet, and the byte at which it, or the compressed packet around it, begins. A large one is
        valid until the next one is requested. Those that `take` has read are left out. Raises OutputError.
        """
        yield from self._unpacked(self._from, None, 0)

    def _unpacked(
        self, source: _Forward, within: int | None, depth: int
    ) -> Iterator[tuple[int, bytes | LargePacket]]:
        try:
            for at, data in self._packets(source, within):
                if not data.startswith(_COMPRESSED):
                    yield at, data
                    continue
                if depth >= _DEPTH_MAX:
                    self._say(f"the packet at byte {at} is compressed too many times, and is not read")
                    continue
                packed: Iterable[Iterator[bytes]] = (
                    data.compressed()
                    if isinstance(data, LargePacket)
                    else [iter([value]) for tag, value in tagged(data) if tag == _COMPRESSED_TAG]
                )
                for chunks in packed:
                    yield from self._unpacked(_Forward(_unpacking(chunks)), at, depth + 1)
        except WireError as e:
            inside = "" if within is None else f" of the compressed data at byte {within}"
            self._say(f"{e}{inside}: what follows is not read")

    def _packets(self, source: _Forward, within: int | None) -> Iterator[tuple[int, bytes | LargePacket]]:
        while True:
            for start, data in source.packets(self._take):
                yield start if within is None else within, data
            if not (head := source.head()):
                return
            start = source.place
            try:
                tag, used = varint(head, 0)
                wire_type, size = tag & 7, 0
                if wire_type in (VARINT, BYTES):
                    size, used = varint(head, used)
            except WireError:
                raise WireError("a number does not end", start) from None
            if tag < 8 or wire_type not in (VARINT, BYTES, *_SIZES):
                raise WireError("there is no packet", start)
            source.skip(used)
            at = start if within is None else within
            size = _SIZES.get(wire_type, size if wire_type == BYTES else 0)
            if tag != _PACKET or size > PACKET_BYTES_MAX:
                is_whole = source.skip(size)
                if tag == _PACKET and is_whole:
                    self._say(f"the packet at byte {at} has {size} bytes, over 64 MiB, and is not read")
            elif size > AT_HAND_BYTES:
                with naming_the_folder(), unnamed_file() as file:
                    if is_whole := source.skip(size, file):
                        yield at, LargePacket(file, size)
            elif is_whole := source.has(size):
                yield at, source.consume(size)
            if not is_whole:
                raise WireError("the trace ends inside of a packet", start)


def _unpacking(chunks: Iterator[bytes]) -> Callable[[int], bytes]:
    """A function that reads the decompressed data, some bytes at a time."""
    unpacker, left = zlib.decompressobj(), b""

    def read(size: int) -> bytes:
        nonlocal left
        made = b""
        while not made and not unpacker.eof and (left := left or next(chunks, b"")):
            try:
                made = unpacker.decompress(left, size)
            except zlib.error as e:
                raise WireError(f"compressed data cannot be read ({e})", 0) from None
            left = unpacker.unconsumed_tail
        return made or (b"" if unpacker.eof else unpacker.flush(size))

    return read


def is_trace(head: bytes) -> bool:
    """Whether content begins with packets: field 1, its length, and fields that a packet may have."""
    at = packets = 0
    try:
        while at < len(head) and packets < _PACKETS_SNIFFED:
            if head[at] != _PACKET:
                return False
            size, start = varint(head, at + 1)
            at = start + size
            packets += 1
            try:
                data = head[start:at]
                tags = [tag for tag, _ in tagged(data)] if at <= len(head) else [varint(data, 0)[0]]
            except WireError:
                return False
            if not all(map(_may_be, tags)):
                return False
    except WireError:  # the head ends in the length of a packet
        return packets > 0
    return packets > 0


def _may_be(tag: int) -> bool:
    number, wire_type = tag >> 3, tag & 7
    return 0 < number < _FIELDS_END and wire_type == (VARINT if number in _VARINTS else BYTES)
