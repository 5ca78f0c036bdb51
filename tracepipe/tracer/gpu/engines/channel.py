"""The capture process's end of the channel that `native/transport.h` describes, and the records in it.

The channel is memory that both sides map. It has no path, and its size is sealed: no process can remove pages
that are mapped here. The traced processes can write anything into it: its contents are copied once and
checked in the copy, and positions are bounded by what was consumed and by the ring's size. A payload may be
anything, too. A record with impossible contents raises Malformed, and one for which there is no memory raises
Crowded. Both are skipped and counted, and the counts become losses in the file.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.model import ID_LIMIT, TIME_LIMIT_NS
from tracepipe.printable import printable
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.records.record import Loss

INJECTION_VARIABLE: Final = "CUDA_INJECTION64_PATH"
"""The variable that names the library which the CUDA driver loads into a program."""
NVTX_VARIABLE: Final = "NVTX_INJECTION64_PATH"
"""The variable that names the library which NVTX loads into a program."""


class Kind(IntEnum):
    """Kinds of records that several libraries write. The streams have enums of their own kinds."""

    NAME = 1
    GPU = 2
    CLOCK = 3
    NOTE = 4
    STACK = 5
    FRAME = 6
    STACK_BEYOND = 7
    KEPT = 8
    """A buffer of a process that ended before it could send what is in it. `Channel.collect` makes it."""
    SAMPLE = 64
    """A sample of GPU counters. The capture makes it (`counters.py`), not a library."""


NAME: Final = struct.Struct("<Q")
"""The number of a name in its process; the name follows."""
GPU: Final = struct.Struct("<10I16s")
"""index, SMs, major, minor, clock in kHz, then the most that an SM holds: warps, blocks, registers, bytes of
shared memory, those that are reserved in each block; UUID; the name follows."""
NOTE_BYTES: Final = 400
NAME_BYTES: Final = 1 << 16
"""The longest name that is read; the longest kernel names have a few thousand bytes."""
# tag, length, kind, pid, tid, time_ns; see native/transport.h
RECORD: Final = struct.Struct("<QIHxxIIQ")
ALIGNMENT: Final = 16

MEMORY_BYTES: Final = 256 << 20
"""The limit of all names, processes, threads and similar that a recording keeps until its end."""
ENTRY_BYTES: Final = 256
"""The memory that an entry takes besides its texts, roughly."""
PROCESS_BYTES: Final = 2048
"""The memory that a process takes, roughly."""
MALFORMED: Final = "records that the traced process wrote with invalid contents"
CROWDED: Final = "the recording had more processes, threads or names than are kept"


class Malformed(Exception):
    """A record that tracepipe's libraries never write."""


class Crowded(Exception):
    """A record with something new to keep, for which there is no memory."""


REFUSALS: Final = (Malformed, Crowded, struct.error)


class GpuRecord(NamedTuple):
    """A record of a traced process; `time_ns` is CLOCK_MONOTONIC when room was reserved for it."""

    kind: int
    pid: int
    tid: int
    time_ns: int
    payload: memoryview
    at: int
    """Where it begins in its chunk."""

    @property
    def content(self) -> bytes:
        """The bytes of the whole record."""
        chunk: Any = self.payload.obj
        return bytes(chunk[self.at : self.at + whole_bytes(len(self.payload))])

    @property
    def is_plausible(self) -> bool:
        """Whether the process, the thread and the time are within their limits."""
        return self.pid <= ID_LIMIT and self.tid <= ID_LIMIT and self.time_ns <= TIME_LIMIT_NS


def records(chunk: bytes) -> Iterator[GpuRecord]:
    """The records in a result of `Channel.collect`."""
    view, at = memoryview(chunk), 0
    while at < len(chunk):
        _, length, kind, pid, tid, time_ns = RECORD.unpack_from(chunk, at)
        start = at + RECORD.size
        yield GpuRecord(kind, pid, tid, time_ns, view[start : start + length], at)
        at += whole_bytes(length)


def text(payload: memoryview, start: int = 0) -> str:
    """The text at the end of a payload, up to the greatest length of a name."""
    return bytes(payload[start : start + NAME_BYTES]).decode(errors="replace")


def read_name(payload: memoryview) -> tuple[int, str]:
    """The payload of Kind.NAME: the number of a name in its process, and the name."""
    return NAME.unpack_from(payload)[0], text(payload, NAME.size)


def note(payload: memoryview) -> str:
    """The payload of Kind.NOTE, safe for a terminal."""
    return printable(text(payload[:NOTE_BYTES]))


def whole_bytes(length: int) -> int:
    """The size in the ring of a record with a payload of `length` bytes."""
    return (RECORD.size + length + ALIGNMENT - 1) & -ALIGNMENT


class MemoryLimit:
    """The memory for what a recording keeps of traced processes."""

    def __init__(self, size_bytes: int = MEMORY_BYTES) -> None:
        self.left_bytes = size_bytes

    def use(self, size_bytes: int) -> None:
        """Count memory as used. Raises Crowded if there is not enough."""
        if size_bytes > self.left_bytes:
            raise Crowded
        self.left_bytes -= size_bytes

    def release(self, size_bytes: int) -> None:
        """Count memory as free again."""
        self.left_bytes += size_bytes


def check_span(start_ns: int, end_ns: int) -> None:
    """Raise Malformed for times beyond the limit."""
    if start_ns > TIME_LIMIT_NS or end_ns > TIME_LIMIT_NS:
        raise Malformed


_FUTEX: Final = {"x86_64": 202, "aarch64": 98}
_WAKE: Final = 1
_ALL: Final = (1 << 31) - 1
_libc = ctypes.CDLL(None)


CONNECTIONS_MAX: Final = 512
"""Processes at a time; each takes a file descriptor here."""
_PEER: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


CHANNEL_VARIABLE: Final = "TRACEPIPE_GPU_CHANNEL"
CHANNEL_BYTES: Final = 64 << 20
"""Default size of the ring: a warp takes about 48 bytes, a launch of 10⁵ warps 5 MB."""
WAIT_US: Final = 20_000
"""The longest time for which a producer may delay its thread while the ring is full."""
FULL: Final = "the channel to the capture process was full"
TORN: Final = "records that the traced process began in the GPU channel and did not finish"
OVERWRITTEN: Final = "the traced process overwrote the GPU channel's counters: nothing was read after that"

_MAGIC: Final = int.from_bytes(b"TipeGPU2", "little")
_HEADER_BYTES: Final = 4096
_KINDS: Final = 64
_HEADER: Final = struct.Struct("<QQQI")
_PRODUCED_AT, _CONSUMED_AT, _DROPPED_AT, _TURNS_AT, _KEPT_AT = 64, 128, 192, 704, 1024
_KEPT: Final = struct.Struct("<IIQ")
"""A buffer's process, whether its records from a position on are nowhere else, and that position"""
_IN_FLIGHT_AT, _COUNTED_PROCESSES = 3072, 31
_IN_FLIGHT: Final = struct.Struct("<I4xqq8x")
"""A process, and its launches and warps that were to be recorded and were not sent"""
_KEPT_BUFFERS, _KEPT_BYTES, _CUPTI_RECORD_MAX = 128, 1 << 20, 1024
_WINDOWS: Final = struct.Struct("<5I4x16Q")
"""turns, windows left, hits of the trigger that begins windows and of the one that ends them, whether there
are windows; times of the last turns, of turn N at N mod 16"""
_TURNS_MAX: Final = 16
_U64: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")
_DROPPED: Final = struct.Struct(f"<{_KINDS}Q")
_DROPPED_MAX: Final = 1 << 41
"""A greater counter of dropped events was overwritten, as no recording drops so many."""
_BUSY, _COMMITTED = 1, 2
_STACKS: Final[dict[int, str]] = dict.fromkeys((Kind.STACK, Kind.FRAME, Kind.STACK_BEYOND), "stack")
"""Stacks have no layer, and are lost as "stack"."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Channel:
    """The memory with its ring, and the processes that write into it: each connects to a socket, gets the
    memory, stays connected. Committed records can be collected even if their process has died.

    process                                        capture process
    connect ─────────────────────────────────────▶ accept: may its user connect?
            ◀───────────────────────────────────── one byte, with the memory's descriptor
      …  records go through the memory  …
    a turn of the windows, when it has followed ─▶ has_followed
            ◀───────────────────────────────────── end of the stream: record no more
    the last records, then closed ───────────────▶ end of the stream: it is done

    When a process dies, for any reason, the kernel closes its end, so each side sees the other's death as an
    end of file. The socket is abstract: it has no path that another user could take, and nothing has to be
    removed.
    """

    def __init__(
        self,
        ring_bytes: int = CHANNEL_BYTES,
        *,
        owner: tuple[int, int] | None = None,
        wait_us: int = WAIT_US,
    ) -> None:
        """Create a channel that this process reads; `ring_bytes` is rounded up to a power of two.

        `owner` (user, group) is whom the command runs as, and may connect besides this user and root. Raises
        CaptureUnavailable.
        """
        self._ring_bytes = 1 << max(ring_bytes - 1, 65535).bit_length()
        self._key = secrets.randbits(64)
        self._consumed = 0
        self._dropped = [0] * _KINDS
        self._faults: dict[str, int] = {}
        self._unsent: list[tuple[str | None, int, str]] = []
        self._is_overwritten = False
        self._turns = 1
        self._losses_until_ns = time.monotonic_ns()
        with ExitStack() as undo:
            try:
                self._memory = os.memfd_create("tracepipe-gpu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                undo.callback(os.close, self._memory)
                of_buffers = _KEPT_BUFFERS * _KEPT_BYTES
                os.truncate(self._memory, _HEADER_BYTES + self._ring_bytes + of_buffers)
                fcntl.fcntl(self._memory, fcntl.F_ADD_SEALS, _SEALS)
                self._map = mmap.mmap(self._memory, _HEADER_BYTES + self._ring_bytes)
            except (OSError, ValueError) as error:
                raise CaptureUnavailable(
                    f"The GPU channel cannot be created: {error}.",
                    "Check that there is memory for it, and a free file descriptor (ulimit -n).",
                ) from None
            _HEADER.pack_into(self._map, 0, _MAGIC, self._key, self._ring_bytes, wait_us)
            _WINDOWS.pack_into(self._map, _TURNS_AT, 1, 0, 0, 0, 0, *[0] * _TURNS_MAX)
            self._users = {0, os.geteuid()} | ({owner[0]} if owner else set())
            self._name = f"tracepipe-gpu-{secrets.token_hex(16)}"
            self._processes: list[socket.socket] = []
            self._followed: dict[socket.socket, bytes] = {}
            try:
                self._listener: socket.socket | None = socket.socket(
                    socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
                )
                self._listener.bind(f"\0{self._name}")
                self._listener.listen(CONNECTIONS_MAX)
            except OSError as error:
                raise CaptureUnavailable(
                    f"The GPU channel's socket cannot be created: {error}.",
                    "Check that there are free file descriptors (ulimit -n).",
                ) from None
            undo.pop_all()

    def environment(self) -> dict[str, str]:
        """The variable by which the traced command finds the channel."""
        return {CHANNEL_VARIABLE: self._name}

    def accept(self) -> None:
        """Accept processes that have started; never waits."""
        while self._listener is not None:
            try:
                process, _ = self._listener.accept()
            except OSError:  # no process waits, or no descriptor is free
                return
            if not self._connect(process):
                process.close()

    def collect(self, *, is_final: bool = False) -> bytes:
        """Complete records since the last call, in the order in which room was reserved for them; never
        waits.

        They end before a record that is still being written. `is_final`: all writers have ended, so such
        records are skipped and counted. `records` reads the result.
        """
        if not is_final:
            self.accept()
        pieces: list[bytes] = []
        while piece := self._collect_piece(pieces, is_final=is_final):
            self._consumed += piece
            _U64.pack_into(self._map, _CONSUMED_AT, self._consumed)
            if not is_final:  # a process that fills it as fast as it is emptied would keep us here
                break
        if is_final:
            pieces += self._kept()
            self._count_unsent()
        return b"".join(pieces)

    def _kept(self) -> Iterator[bytes]:
        """Records of what processes had in their buffers, if anything, when they ended without giving them
        up; once.
        """
        for number in range(_KEPT_BUFFERS):
            entry = _KEPT_AT + number * _KEPT.size
            pid, is_out, sent = _KEPT.unpack_from(self._map, entry)
            if not is_out:
                continue
            _KEPT.pack_into(self._map, entry, 0, 0, 0)
            sent = min(sent, _KEPT_BYTES)
            start = _HEADER_BYTES + self._ring_bytes + number * _KEPT_BYTES
            content = os.pread(self._memory, _KEPT_BYTES - sent, start + sent).rstrip(b"\0")
            content += bytes(
                _CUPTI_RECORD_MAX + -len(content) % ALIGNMENT
            )  # its last record may end with zeros
            yield RECORD.pack(0, len(content), Kind.KEPT, pid, 0, time.monotonic_ns()) + content

    def _count_unsent(self) -> None:
        """Count what processes had not sent when they ended, once."""
        for number in range(_COUNTED_PROCESSES):
            entry = _IN_FLIGHT_AT + number * _IN_FLIGHT.size
            pid, *counts = _IN_FLIGHT.unpack_from(self._map, entry)
            _IN_FLIGHT.pack_into(self._map, entry, 0, 0, 0)
            for layer, count in zip(("gpu_kernel", "gpu_warp"), counts, strict=True):
                if 0 < count <= _DROPPED_MAX:
                    reason = f"process {pid} ended before {count} were read from the GPU"
                    self._unsent.append((layer, count, reason))

    def losses(
        self, layers: Mapping[int, str], reasons: Mapping[int, str] = MappingProxyType({})
    ) -> list[Loss]:
        """Losses since the last call; `layers` and `reasons` are by kind of record."""
        since_ns, now_ns = self._losses_until_ns, time.monotonic_ns()
        self._losses_until_ns = now_ns
        layers = {**_STACKS, **layers}
        reasons = {Kind.STACK_BEYOND: "a process had more Python stacks than are kept", **reasons}
        counted = [(layers.get(kind), n, reasons.get(kind, FULL)) for kind, n in self._new_dropped()]
        counted += [(None, count, reason) for reason, count in self._faults.items()]
        counted += self._unsent
        self._faults, self._unsent = {}, []
        return [Loss(layer, count, since_ns, now_ns, reason) for layer, count, reason in counted]

    def expect_windows(self) -> None:
        """Record events only in windows, none of which is open yet. Call it before a process starts."""
        self._turns = 0
        _WINDOWS.pack_into(self._map, _TURNS_AT, 0, 0, 0, 0, 1, *[0] * _TURNS_MAX)

    def arm(self, windows: int) -> None:
        """From now on let processes begin and end this number of windows, by the triggers."""
        _U32.pack_into(self._map, _TURNS_AT + 8, 0)
        self.let_begin(windows)

    def let_begin(self, windows: int) -> None:
        """Let processes begin this number of windows more."""
        _U32.pack_into(self._map, _TURNS_AT + 4, windows)

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the open one, unless a process has already done so."""
        (turns,) = _U32.unpack_from(self._map, _TURNS_AT)
        if turns % 2 != is_open:
            self._turns = (self._turns + 1) % (1 << 32)
            _U32.pack_into(self._map, _TURNS_AT, (turns + 1) % (1 << 32))
            # Wake all threads, of any process, that wait for the word to change.
            word = ctypes.byref(ctypes.c_uint32.from_buffer(self._map, _TURNS_AT))
            number = ctypes.c_long(_FUTEX[platform.machine()])
            _libc.syscall(number, word, ctypes.c_int(_WAKE), ctypes.c_int(_ALL))

    def hits(self) -> int:
        """How often the trigger that begins a window was seen since `arm`, or since the last one began."""
        return int(_U32.unpack_from(self._map, _TURNS_AT + 8)[0])

    def turns(self) -> list[Turn]:
        """The begins and ends of windows by processes since the last call; of many, the last ones."""
        self.is_over()  # the numbers that processes send must not pile up
        turns, _, _, _, _, *turned_ns = _WINDOWS.unpack_from(self._map, _TURNS_AT)
        new, self._turns, now_ns = (turns - self._turns) % (1 << 32), turns, time.monotonic_ns()
        last = [(turns - before) % (1 << 32) for before in reversed(range(min(new, _TURNS_MAX)))]
        return [Turn(min(turned_ns[turn % _TURNS_MAX], now_ns), begins=turn % 2 == 1) for turn in last]

    def has_followed(self) -> bool:
        """Whether the libraries that follow windows by a thread of their own have followed the last turn."""
        self.is_over()
        turns = self._map[_TURNS_AT : _TURNS_AT + _U32.size]
        return all(followed == turns for followed in self._followed.values())

    def stop(self) -> None:
        """Accept no more processes, and ask the connected ones to record no more; what they still send is
        collected until `is_over`.
        """
        self.accept()  # a process that is about to begin is answered, and stops at once
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for process in self._processes:
            with suppress(OSError):
                process.shutdown(socket.SHUT_WR)

    def is_over(self) -> bool:
        """Whether every process has sent its last records and closed the channel, or has ended."""
        for process in list(self._processes):
            try:
                for _ in range(_TURNS_MAX):
                    if not (sent := process.recv(_U32.size)):
                        break
                    self._followed[process] = sent
                else:
                    continue
            except BlockingIOError:
                continue
            except OSError:
                pass
            process.close()
            self._processes.remove(process)
            self._followed.pop(process, None)
        return not self._processes

    def processes(self) -> set[int]:
        """The processes that have the channel now."""
        self.accept()
        self.is_over()
        return {peer_of(process)[0] for process in self._processes}

    def close(self) -> None:
        """Release the memory. Processes that still have it mapped are not harmed, and record no more: to them
        it looks as if this one had ended.
        """
        if not self._map.closed:
            self.stop()
            for process in self._processes:
                process.close()
            self._processes = []
            self._map.close()
            os.close(self._memory)

    def _connect(self, process: socket.socket) -> bool:
        """Send a process the memory's descriptor. False if it may not have it, or has ended."""
        if len(self._processes) >= CONNECTIONS_MAX:
            self.is_over()
        if len(self._processes) >= CONNECTIONS_MAX:
            return False
        try:
            if peer_of(process)[1] not in self._users:
                return False
            process.setblocking(False)
            socket.send_fds(process, [b"\1"], [self._memory])
        except OSError:
            return False
        self._processes.append(process)
        return True

    def _collect_piece(self, pieces: list[bytes], *, is_final: bool) -> int:
        """Add the records of the next piece of the ring to `pieces`; returns its size, 0 if there is none."""
        produced = int(_U64.unpack_from(self._map, _PRODUCED_AT)[0])
        if self._is_overwritten or not 0 <= produced - self._consumed <= self._ring_bytes:
            self._overwritten()
            return 0
        # Any record fits into half a ring.
        size = min(produced - self._consumed, self._ring_bytes // 2) & -ALIGNMENT
        piece = self._bytes(self._consumed, size)
        end = self._committed_until(piece, 0)
        # They are copied again: the first copy may have taken the end of a record before it was written, and
        # after that the header that says that it was.
        pieces.append(self._bytes(self._consumed, end))
        if not is_final:
            return end
        is_last = size == produced - self._consumed
        while end < size:
            state, after = self._state(piece, end)
            if not is_last and ((after > size and state) or end + RECORD.size > size):
                break  # the rest of it is in the next piece
            self._faults[TORN] = self._faults.get(TORN, 0) + 1
            begin = self._next_committed(piece, after if state == _BUSY else end + ALIGNMENT, is_last=is_last)
            end = self._committed_until(piece, begin)
            pieces.append(piece[begin:end])
        return end

    def _bytes(self, start: int, size: int) -> bytes:
        """A copy of a part of the ring, which may wrap around its end."""
        at = start & (self._ring_bytes - 1)
        first = min(size, self._ring_bytes - at)
        at += _HEADER_BYTES
        piece = self._map[at : at + first]
        return piece if first == size else piece + self._map[_HEADER_BYTES : _HEADER_BYTES + size - first]

    def _state(self, piece: bytes, at: int) -> tuple[int, int]:
        """The state of the record at `at`, 0 if none begins there, and where the next one begins."""
        if at + RECORD.size > len(piece):
            return 0, len(piece)
        tag, length, *_ = RECORD.unpack_from(piece, at)
        state = tag ^ self._key ^ (self._consumed + at)
        known = state in (_BUSY, _COMMITTED) and length <= self._ring_bytes // 4
        return (state, at + whole_bytes(length)) if known else (0, at)

    def _committed_until(self, piece: bytes, at: int) -> int:
        """Where the committed records that begin at `at` in the piece end."""
        size = len(piece)
        while at < size:
            state, after = self._state(piece, at)
            if state != _COMMITTED or after > size:
                break
            at = after
        return at

    def _next_committed(self, piece: bytes, at: int, *, is_last: bool) -> int:
        """Where the next committed record, or a part of one, begins in the piece; else its end."""
        words = memoryview(piece).cast("Q")
        for place in range(at, len(piece), ALIGNMENT):
            if words[place >> 3] ^ self._key == self._consumed + place | _COMMITTED:
                state, after = self._state(piece, place)
                if state == _COMMITTED and (after <= len(piece) or not is_last):
                    return place
                if not is_last and place + RECORD.size > len(piece):
                    return place
        return len(piece)

    def _new_dropped(self) -> Iterable[tuple[int, int]]:
        """Kinds with the number of events that were dropped since the last call."""
        before, self._dropped = self._dropped, list(_DROPPED.unpack_from(self._map, _DROPPED_AT))
        new = [now - then for now, then in zip(self._dropped, before, strict=True)]
        if self._is_overwritten or min(new) < 0 or max(self._dropped) > _DROPPED_MAX:
            self._overwritten()
            return []
        return [(kind, count) for kind, count in enumerate(new) if count]

    def _overwritten(self) -> None:
        """Stop, as the counters are impossible: from now on nothing in the memory is trusted."""
        if not self._is_overwritten:
            self._is_overwritten = True
            self._faults[OVERWRITTEN] = 1
            self.stop()


def peer_of(process: socket.socket) -> tuple[int, ...]:
    """The process, user and group that connected, as the kernel says."""
    return _PEER.unpack(process.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
