"""Keeps collected records on disk, and renders them to lines on another thread.

The collector only appends bytes to a temporary file, so the kernel's ring is emptied in time however slow the
writing of lines is. The lines follow behind, and the rest of them after the recording has ended. However
large the backlog is, memory holds only a few spans of the files, and one block of each of a few runs.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
import tempfile
import threading
import time
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from tracepipe import disk_space
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.tracer.engines.drain import SHORT_S
from tracepipe.tracer.engines.engine import Chunk, Decoder, ThreadStore
from tracepipe.tracer.records.line import Lines, record_line
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES, Loss, loss_record, unread, unread_error
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.request import Limits, Plan

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.streams import GpuRenderer

_PIECE_BYTES = 64 * 4096  # rendered in one call: 4096 records
_LEAST_BYTES = 256 * RECORD_BYTES  # the smallest piece that is written where a disk is nearly full
_LINE_TO_RECORD = 2.2  # bytes of lines per byte of records, until it is measured
_AT_LEAST = 0.8
_NO_LIMITS = Limits()
# A part of the output is written when it has this many bytes, or lines this old: if the process is killed, it
# loses what was not written. Larger parts do not compress better: lines shrink to a 20th or 30th with zstd,
# to a 10th or 21st with gzip.
PART_BYTES = 1 << 18
_FLUSH_S = 1.0
_PATIENCE_S = 5.0  # how long the disk of temporary files may be full before the recording ends
_FLUSH_STREAM_S = 0.1  # for a stream, which may be watched live
# The error of the output → the hint.
_HINTS = {
    errno.EPIPE: "Let the program that reads the recording read it to its end.",
    errno.EFBIG: "ulimit -f unlimited",
    errno.ENOSPC: "Free some space, or choose another disk: with -o, or with TMPDIR if -o is a URL.",
    errno.EDQUOT: "Free some space, or choose another disk: with -o, or with TMPDIR if -o is a URL.",
}
_ELSE = "Name a file on another disk with -o; journalctl -k may say more."

_GIVE_BACK_BYTES = 4 << 20  # of a temporary file, freed in one call
_SPAN_BYTES = 4 << 20  # the longest span, however many chunks it joins
_RUN_BYTES = (1 << 16) * RECORD_BYTES  # sorted in memory, in one pass
_BLOCK_BYTES = (1 << 12) * RECORD_BYTES  # of a run, read back in one call


class Spool(ThreadStore):
    """Takes chunks and losses in order, and writes their lines to `sink`."""

    is_file = takes_device = True

    def __init__(
        self,
        sink: BinaryIO,
        renderer: RecordRenderer,
        *,
        device_renderer: GpuRenderer | None = None,
        is_unordered: bool = False,
        limits: Limits = _NO_LIMITS,
        sizes_bytes: tuple[int, int] | tuple[None, None] = (None, None),
    ) -> None:
        """`is_unordered`: lines are rendered in order of time, after everything was collected. What exceeds
        the limits is not written: the recording ends there. `sizes_bytes`: the total size of the records that
        will be put, and of those of a GPU, where it is known.
        """
        super().__init__(self._write, "tracepipe-lines")
        self._sink, self._renderer, self._is_unordered = sink, renderer, is_unordered
        self._device_renderer = device_renderer
        self._decoders: dict[bool, Decoder] = decoders_of(renderer, device_renderer)
        self._limits = limits
        self._counts: Counter[str] = Counter()
        self._waiting: Counter[str] = Counter()  # those of them that are not in a written part yet
        self._waiting_bytes = 0
        self._backlog = Backlog(sizes_bytes[0])
        self._device_backlog = Backlog(sizes_bytes[1]) if device_renderer is not None else self._backlog
        self._size_bytes = 0
        self._unkept: Counter[str | None] = Counter()  # None: records that were not counted by layer
        self._items = Waiting()
        self._held: deque[Chunk | Loss] = deque()
        self._full_since_s: float | None = None
        self._abandoned = threading.Event()
        self._losses: Counter[str] = Counter()
        self.cpu_losses: dict[str, dict[int, int]] = {}
        self._unwritten: Counter[str | None] = Counter()
        self._rendered_bytes = self._written_bytes = 0
        self._flush_s = _FLUSH_STREAM_S if getattr(sink, "is_stream", False) else _FLUSH_S
        self._flush_at_s: float | None = None  # None while no lines wait
        self._abandoned_ns = self._last_ns = 0
        self.error: Exception | None = None
        """Why events are only counted from now on: an OutputError or a bug."""

    def begin(self, plan: Plan, start_ns: int) -> None:
        """Start to write. The renderer already has the plan."""
        self._last_ns = start_ns
        super().begin(plan, start_ns)

    def put(self, item: Chunk | Loss) -> None:
        self._held.append(item)
        self.takes_more()

    def takes_more(self) -> bool:
        """Whether everything that was put is kept, or counted as lost. While the disk of temporary files is
        full, some of it waits in memory: nothing more should be put until this returns True.
        """
        while self._held and self._is_taken(self._held[0]):
            self._held.popleft()
        return not self._held

    def _is_taken(self, item: Chunk | Loss) -> bool:
        """Whether the item is kept, or counted as lost; False if there may be room for it later."""
        if isinstance(item, Loss):
            self._items.put(item)
            return True
        chunk, of_device = item.content, item.of_device
        if self.error is None:
            try:
                offset = (self._device_backlog if of_device else self._backlog).append(chunk)
                self._items.put(Span(offset, len(chunk), of_device))
                self._size_bytes += len(chunk)
                self._full_since_s = None
                return True
            except (OutputError, MemoryError) as error:
                # Other programs may free disk space, and rendering lines frees some.
                now_s = time.monotonic()
                self._full_since_s = self._full_since_s or now_s
                if disk_space.is_full(error.__cause__) and now_s - self._full_since_s < _PATIENCE_S:
                    if not of_device and len(chunk) > _LEAST_BYTES:  # small pieces of it may fit
                        starts = range(0, len(chunk), _LEAST_BYTES)
                        pieces = [Chunk(chunk[start : start + _LEAST_BYTES]) for start in starts]
                        self._held.popleft()
                        self._held.extendleft(reversed(pieces))
                    return False
                self.error = error
        try:
            self._unkept.update(self._decoders[of_device].counts(chunk))
        except MemoryError:
            self._unkept[None] += len(chunk) // RECORD_BYTES
        return True

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the header or the footer, while no lines are being rendered."""
        self._put_out(record_line(record).encode(), {})
        self._flush()

    def write_first(self, lines: Lines) -> None:
        """Write lines before those of all chunks; called before `begin`."""
        self._put_out(lines.encoded(), lines.counts())

    def finish(self) -> None:
        """Take no more. The thread ends once everything is written; `is_done` shows that."""
        while not self.takes_more():
            time.sleep(SHORT_S)
        self._items.put(None)

    @property
    def counts(self) -> dict[str, int]:
        return {layer: count for layer, count in self._counts.items() if count}

    @property
    def losses(self) -> dict[str, int]:
        found = Counter(self._losses)
        if self._device_renderer is not None:
            found.update(self._device_renderer.losses)
        return dict(found)

    @property
    def size_bytes(self) -> int:
        """The least size of the lines of everything that was put: an estimate while some are not written."""
        behind = self._size_bytes - self._rendered_bytes
        a_line = self._written_bytes / self._rendered_bytes if self._rendered_bytes else _LINE_TO_RECORD
        # Later lines may be shorter than those so far. What exceeds a limit is cut later.
        return self._written_bytes + int(behind * a_line * _AT_LEAST)

    def abandon(self) -> None:
        """Write no more lines; a loss record will count the events that were left."""
        self._abandoned_ns = self._abandoned_ns or time.monotonic_ns()
        self._abandoned.set()

    def close(self) -> None:
        """End the thread, and free the temporary file."""
        super().close()
        self._backlog.close()
        self._device_backlog.close()

    def _write(self) -> None:
        try:
            while True:
                # Waiting lines are written when it is time to, even if no item arrives.
                wait_s = None if self._flush_at_s is None else self._flush_at_s - time.monotonic()
                if wait_s is not None and wait_s <= 0:
                    self._flush()
                    continue
                try:
                    item = self._items.get(wait_s)
                except TimeoutError:
                    continue
                if item is None:
                    break
                if isinstance(item, Loss):
                    self._write_loss(item)
                elif item.of_device:
                    self._write_device(item)
                elif not self._is_unordered:
                    self._write_span(item)
            if self._device_renderer is not None:
                self._write_more(self._device_renderer.last())
            if self._is_unordered:
                for piece in self._backlog.in_order(self._renderer.learn, self._abandoned.is_set, self._lose):
                    self._write_piece(piece)
            self._flush()
            reason = f"not written: {why(self.error) if self.error else 'interrupted'}"
            now_ns = time.monotonic_ns()
            for layer, count in (self._unwritten + self._unkept).items():
                bound = "at most: " if layer is None else ""
                self._write_loss(Loss(layer, count, self._abandoned_ns or now_ns, now_ns, bound + reason))
            self._flush()
        except Exception as error:  # a bug: raised by the code that waits for the end
            self.error = error

    def _put_out(self, lines: bytes, counts: Mapping[str, int]) -> None:
        """Put out lines, with the number of events of each layer in them."""
        self._counts.update(counts)
        self._waiting.update(counts)
        self._waiting_bytes += len(lines)
        if self._flush_at_s is None:
            self._flush_at_s = time.monotonic() + self._flush_s
        try:
            self._sink.write(lines)
        except (OSError, MemoryError) as error:
            self._fail(error)
        if self._waiting_bytes >= PART_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the waiting lines as a part of the output; if that fails, count their events."""
        try:
            self._sink.flush()
        except (OSError, MemoryError) as error:
            self._fail(error)
        self._waiting.clear()
        self._waiting_bytes, self._flush_at_s = 0, None

    def _fail(self, error: OSError | MemoryError) -> None:
        self._counts.subtract(self._waiting)
        self._unwritten.update(self._waiting)
        self._waiting.clear()
        stated: Exception = error
        if isinstance(error, OSError):
            hint = _HINTS.get(error.errno or 0, _ELSE)
            stated = OutputError(f"The events cannot be written: {error.strerror}.", hint)
            stated.__cause__ = error
        self._give_up(stated)

    def _give_up(self, error: Exception) -> None:
        """Only count from now on. The code that waits for the end raises a bug or a lack of memory."""
        if self.error is None or not isinstance(error, OutputError):
            self.error = error
        self.abandon()

    def _write_loss(self, loss: Loss) -> None:
        layer = loss.layer or "unknown"
        self._losses[layer] += loss.count
        if loss.cpu is not None:
            self.cpu_losses.setdefault(layer, Counter())[loss.cpu] += loss.count
        self._put_out(record_line(loss_record(loss)).encode(), {})

    def _write_span(self, span: Span) -> None:
        end = span.offset + span.size_bytes
        for start in range(span.offset, end, _PIECE_BYTES):
            size_bytes = min(_PIECE_BYTES, end - start)
            try:
                self._write_piece(self._backlog.read(start, size_bytes))
            except OSError as error:
                self._lose(size_bytes, error)
            except Exception as error:  # without memory, any line of code may raise one
                self._give_up(error)
                self._unwritten[None] += size_bytes // RECORD_BYTES
            self._backlog.give_back(start + size_bytes)

    def _lose(self, size_bytes: int, error: OSError, *, bound: str = "at most") -> None:
        """Count records that cannot be read back."""
        count, now_ns = size_bytes // RECORD_BYTES, time.monotonic_ns()
        self._write_loss(unread(count, self._last_ns, now_ns, error, bound=bound))
        self.error = self.error or unread_error(error)

    def _write_piece(self, piece: bytes) -> None:
        self._last_ns = RECORD.unpack_from(piece, len(piece) - RECORD_BYTES)[0]
        self._render(piece, of_device=False)

    def _render(self, chunk: bytes, *, of_device: bool) -> bool:
        """Write the lines of a chunk; returns False where it was only counted, as after an error."""
        if not self._abandoned.is_set():
            try:
                lines = self._decoders[of_device].render(chunk)
                text = self._encoded(lines)
            except Exception as error:
                self._give_up(error)
            else:
                self._put_out(text, lines.counts())
                self._written_bytes += len(text)
                self._rendered_bytes += len(chunk)
                return True
        self._unwritten.update(self._decoders[of_device].counts(chunk))
        return False

    def _encoded(self, lines: Lines) -> bytes:
        """The lines as bytes, without those that exceed the limits, which are cut."""
        events, size_bytes = self._limits.events, self._limits.size_bytes
        if events is not None or size_bytes is not None:
            lines.cut(
                sys.maxsize if events is None else max(events - sum(self._counts.values()), 0),
                sys.maxsize if size_bytes is None else max(size_bytes - self._written_bytes, 0),
            )
        return lines.encoded()

    def _write_device(self, span: Span) -> None:
        """Write the lines of a chunk of the GPU's records, which is decoded as a whole."""
        assert self._device_renderer is not None
        try:
            chunk = self._device_backlog.read(span.offset, span.size_bytes)
        except OSError as error:
            self._lose(RECORD_BYTES, error, bound="at least")
            return
        finally:
            self._device_backlog.give_back(span.offset + span.size_bytes)
        if self._render(chunk, of_device=True):
            for lines in self._device_renderer.rest():
                self._write_more(lines)

    def _write_more(self, lines: Lines) -> None:
        """Write lines that do not belong to a single chunk."""
        if self._abandoned.is_set():
            self._unwritten.update(lines.counts())
        else:
            text = self._encoded(lines)
            self._put_out(text, lines.counts())
            self._written_bytes += len(text)


def decoders_of(probes: Decoder, device: Decoder | None) -> dict[bool, Decoder]:
    """The decoders of a recording, by whether they are of the device."""
    return {False: probes} if device is None else {False: probes, True: device}


@dataclass(frozen=True, slots=True)
class Span:
    """A chunk in a temporary file, or several adjacent ones."""

    offset: int
    size_bytes: int
    of_device: bool = False


class Waiting:
    """A queue of spans and losses in the order of their arrival; None marks the end."""

    def __init__(self) -> None:
        self._items: deque[Span | Loss | None] = deque()
        self._changed = threading.Condition()

    def put(self, item: Span | Loss | None) -> None:
        """Add an item. Records extend a span before them, so hours of records are a few spans."""
        with self._changed:
            last = self._items[-1] if self._items else None
            if (
                isinstance(item, Span)
                and isinstance(last, Span)
                and not item.of_device  # a device's chunks are decoded one by one
                and not last.of_device
                and last.size_bytes + item.size_bytes <= _SPAN_BYTES
            ):
                self._items[-1] = Span(last.offset, last.size_bytes + item.size_bytes)
            else:
                self._items.append(item)
            self._changed.notify()

    def get(self, timeout_s: float | None) -> Span | Loss | None:
        """Wait for the next item, and remove it. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._items, timeout_s):
                raise TimeoutError
            return self._items.popleft()


class Backlog:
    """A temporary file that leaves nothing behind, however this process ends. Raises OutputError."""

    def __init__(self, size_bytes: int | None = None) -> None:
        """`size_bytes`: reserve this much; where the disk has no room for it, the file is in memory."""
        try:
            self._file = _temporary_file(size_bytes)
        except OSError as error:
            raise OutputError(
                f"No temporary file can be made: {error.strerror}.",
                "Set TMPDIR to a writable folder with free space.",
            ) from error
        self.size_bytes = self._done_bytes = self._given_back_bytes = 0
        self._at_once_bytes = _GIVE_BACK_BYTES
        self._giving_back = threading.Lock()

    def append(self, chunk: bytes) -> int:
        """Append a chunk, and return its offset. Raises OutputError."""
        offset = self.size_bytes
        try:
            self._write(offset, chunk)
        except OSError as error:
            if disk_space.is_full(error):
                self._at_once_bytes = 1
                self.give_back(self._done_bytes)
            raise OutputError(
                f"The events cannot be kept in {tempfile.gettempdir()}: {error.strerror}.",
                "ulimit -f unlimited"
                if error.errno == errno.EFBIG
                else "Set TMPDIR to a folder with free space.",
            ) from error
        self.size_bytes += len(chunk)
        return offset

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Read `size_bytes` at an offset. Raises OSError."""
        parts = []
        while size_bytes and (part := os.pread(self._file.fileno(), size_bytes, offset)):
            parts.append(part)
            offset, size_bytes = offset + len(part), size_bytes - len(part)
        if size_bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def give_back(self, end: int) -> None:
        """Free the disk space before `end`, as a capture may last for days. It is freed some megabytes at a
        time, or immediately once the disk was full.
        """
        end -= end % mmap.PAGESIZE  # a page that is freed in two parts is not freed at all
        with self._giving_back:
            self._done_bytes = end
            if end - self._given_back_bytes >= self._at_once_bytes:
                disk_space.give_back(
                    self._file.fileno(), self._given_back_bytes, end - self._given_back_bytes
                )
                self._given_back_bytes = end

    def in_order(
        self,
        learn: Callable[[bytes], object],
        is_over: Callable[[], bool],
        lose: Callable[[int, OSError], object],
    ) -> Iterator[bytes]:
        """All records in order of time; records of the same time keep their order. `learn` gets every record
        first. `lose` gets the number of bytes that cannot be read back or written in order, and the error.

        Runs are sorted in place, then merged. Records are out of order by milliseconds, rarely by more, so a
        run is opened only when the merge reaches the time of its first record, and few runs are open
        together. Once `is_over`, the records are returned unsorted.
        """
        runs: list[_Run] = []
        for offset in range(0, self.size_bytes, _RUN_BYTES):
            size_bytes = min(_RUN_BYTES, self.size_bytes - offset)
            try:
                data = self.read(offset, size_bytes)
                if is_sorted := not is_over():
                    learn(data)
                    data = _by_time(data)
                    self._write(offset, data)
            except OSError as error:
                lose(size_bytes, error)
                continue
            if is_sorted:
                runs.append(_Run(self, offset, size_bytes, _times(data)[0], len(runs), lose))
            else:
                yield data
        yield from _merged(runs)

    def close(self) -> None:
        """Free the file."""
        self._file.close()

    def _write(self, offset: int, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file.fileno(), data[written:], offset + written)


def _temporary_file(size_bytes: int | None) -> BinaryIO:
    """A file without a name; with `size_bytes` that much is reserved on its disk, or it is in memory. Raises
    OSError.
    """
    with ExitStack() as opened:
        try:
            file = opened.enter_context(tempfile.TemporaryFile(prefix="tracepipe-", buffering=0))
            if size_bytes is not None:
                disk_space.reserve(file.fileno(), 0, size_bytes)
            opened.pop_all()
            return file
        except OSError:
            if size_bytes is None:
                raise
    return os.fdopen(os.memfd_create("tracepipe"), "w+b", buffering=0)


@dataclass(slots=True)
class _Run:
    """Sorted records, read a block at a time. `number` is the run's place in the order of collection."""

    backlog: Backlog
    offset: int
    unread_bytes: int
    first_ns: int
    number: int
    lose: Callable[[int, OSError], object]
    block: bytes = b""

    def fill(self) -> bool:
        """Read the next block if the last one is used up. Returns False at the end."""
        while self.unread_bytes and not self.block:
            size_bytes = min(_BLOCK_BYTES, self.unread_bytes)
            try:
                self.block = self.backlog.read(self.offset, size_bytes)
            except OSError as error:
                self.lose(size_bytes, error)
            self.offset += size_bytes
            self.unread_bytes -= size_bytes
        return bool(self.block)

    def last(self) -> tuple[int, int]:
        """The time of the last record read, and the run's number, which orders equal times."""
        return _times(self.block)[-1], self.number

    def read_until(self, until: tuple[int, int]) -> bytes:
        """Remove and return the records that were read, up to this place in the order."""
        bisect = bisect_right if self.number <= until[1] else bisect_left
        size_bytes = bisect(_times(self.block), until[0]) * RECORD_BYTES
        taken, self.block = self.block[:size_bytes], self.block[size_bytes:]
        return taken


def _merged(runs: list[_Run]) -> Iterator[bytes]:
    """Merge sorted runs into records in order."""
    unopened = sorted(runs, key=lambda run: (run.first_ns, run.number), reverse=True)
    opened: list[_Run] = []
    while True:
        opened = [run for run in opened if run.fill()]
        until = min((run.last() for run in opened), default=None)
        if unopened and (until is None or (unopened[-1].first_ns, unopened[-1].number) <= until):
            opened.append(unopened.pop())
        elif until is None:
            return
        else:
            yield _by_time(
                b"".join(run.read_until(until) for run in sorted(opened, key=lambda run: run.number))
            )


def _times(records: bytes) -> memoryview:
    """The time of each record: the second of its eight words, after the ring's header."""
    return memoryview(records).cast("Q")[1 :: RECORD_BYTES // 8]


def _by_time(records: bytes) -> bytes:
    """The records sorted by time; those of the same time keep their order."""
    times = _times(records).tolist()
    order = sorted(range(len(times)), key=times.__getitem__)
    return b"".join([records[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in order])


def why(error: Exception) -> str:
    """The failure of a recording in a few words."""
    if isinstance(error, MemoryError):
        return "no memory"
    behind = (error.__cause__ if isinstance(error, TracepipeError) else None) or error
    if isinstance(behind, OSError):
        return str(behind.strerror)
    return behind.message if isinstance(behind, TracepipeError) else "a bug"
