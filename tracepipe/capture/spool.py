"""What was collected, kept on disk and turned into lines on another thread.

The collector only appends bytes to a temporary file, so the kernel's ring is emptied in time whatever the
writing of lines takes; lines come behind, and after the end as far as they are not done.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import BinaryIO

from tracepipe.capture.engines.engine import DeviceRenderer, Renderer
from tracepipe.capture.records.line import Lines, record_line
from tracepipe.capture.records.loss import Loss, loss_record
from tracepipe.capture.records.record import RECORD_BYTES
from tracepipe.capture.request import Limits, Plan
from tracepipe.errors import OutputError

_PIECE_BYTES = 64 * 4096  # bytes that become lines at once: 4096 records
_LINE_TO_RECORD = 2.2  # bytes of lines for a byte of records, until it is measured
_AT_LEAST = 0.8
_NO_LIMITS = Limits()
_TIME = struct.Struct("<8xQ48x")  # ts_ns of a record
assert _TIME.size == RECORD_BYTES
# Seconds a thread may keep the interpreter while another waits. The default of 5 ms would let the collector
# wait that long three times a tick while lines are made.
_SWITCH_S = 0.0005
_FLUSH_S = 1.0  # how long a line may wait in the output's buffer, from which a killed process writes nothing


@dataclass(frozen=True, slots=True)
class _Place:
    """A chunk in the temporary file."""

    offset: int
    size_bytes: int
    of_device: bool = False


class Spool:
    """Takes chunks and losses in order, writes their lines to `sink`."""

    def __init__(
        self,
        sink: BinaryIO,
        renderer: Renderer,
        *,
        device_renderer: DeviceRenderer | None = None,
        is_unordered: bool = False,
        limits: Limits = _NO_LIMITS,
    ) -> None:
        """`is_unordered`: lines are made when all is collected, in order of time. What is beyond the limits
        is not written: the recording ends there.
        """
        self._sink, self._renderer, self._is_unordered = sink, renderer, is_unordered
        self._device_renderer = device_renderer
        self._limits = limits
        self._counts: dict[str, int] = {}
        self._file: BinaryIO = tempfile.TemporaryFile(dir=_folder_of(sink), prefix="tracepipe-", buffering=0)  # noqa: SIM115, closed in `close`
        self._size_bytes = 0
        self._items: SimpleQueue[_Place | Loss | None] = SimpleQueue()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._write, name="tracepipe-lines", daemon=True)
        self._old_switch_s = sys.getswitchinterval()
        self._losses: dict[str, int] = {}
        self.cpu_losses: dict[str, dict[int, int]] = {}
        self._unwritten = 0
        self._rendered_bytes = self._written_bytes = 0
        self._flush_at_s: float | None = None  # while lines wait there
        self.error: OSError | None = None

    def begin(self, plan: Plan, start_ns: int) -> None:
        """Start to write; the renderer knows the plan."""
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def put(self, chunk: bytes) -> None:
        """Keep a chunk. Raises OutputError when the disk is full."""
        self._keep(chunk, of_device=False)

    def put_device(self, chunk: bytes) -> None:
        """Keep a chunk of the GPU's records. Raises OutputError when the disk is full."""
        self._keep(chunk, of_device=True)

    def _keep(self, chunk: bytes, *, of_device: bool) -> None:
        try:
            written = self._file.write(chunk)
        except OSError as error:
            raise cannot_write(error) from None
        if written != len(chunk):
            raise OutputError("The disk for temporary files is full.", "Set TMPDIR to a folder with room.")
        self._items.put(_Place(self._size_bytes, len(chunk), of_device))
        self._size_bytes += len(chunk)

    def put_loss(self, loss: Loss) -> None:
        """Keep a loss, after the chunks that came before it."""
        self._items.put(loss)

    def finish(self) -> None:
        """No more comes. The thread ends once all is written; `is_done` tells."""
        self._items.put(None)

    @property
    def counts(self) -> dict[str, int]:
        """Layer → events written."""
        return dict(self._counts)

    @property
    def losses(self) -> dict[str, int]:
        """Layer → events lost."""
        found = [self._losses, self._renderer.losses]
        if self._device_renderer is not None:
            found.append(self._device_renderer.losses)
        return {layer: sum(each.get(layer, 0) for each in found) for layer in dict.fromkeys(chain(*found))}

    @property
    def size_bytes(self) -> int:
        """What the lines of all that was put take at least: an estimate while some are not written."""
        behind = self._size_bytes - self._rendered_bytes
        a_line = self._written_bytes / self._rendered_bytes if self._rendered_bytes else _LINE_TO_RECORD
        # Later lines may be shorter than those so far; what is recorded beyond a limit is cut.
        return self._written_bytes + int(behind * a_line * _AT_LEAST)

    @property
    def is_done(self) -> bool:
        """Whether every line is written, or writing failed."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        """`is_done`, after waiting for it for at most `timeout_s`."""
        self._thread.join(timeout_s)
        return self.is_done

    def abandon(self) -> None:
        """Write no more lines; a loss record will count what was left."""
        self._abandoned.set()

    def close(self) -> None:
        """End the thread and give the temporary file back. Raises OutputError if writing lines failed."""
        self.abandon()
        self.finish()
        if self._thread.ident is not None:
            self._thread.join()
        sys.setswitchinterval(self._old_switch_s)
        self._file.close()

    def raise_if_failed(self) -> None:
        """Raise OutputError if lines could not be written."""
        if self.error is not None:
            raise cannot_write(self.error)

    def _write(self) -> None:
        try:
            kept: list[_Place] = []
            while (item := self._next()) is not None:
                if isinstance(item, Loss):
                    self._write_loss(item)
                elif item.of_device:
                    self._write_device(item)
                elif self._is_unordered:
                    kept.append(item)
                else:
                    self._write_chunk(item.offset, item.size_bytes)
            self._write_in_order(kept)
            if self._unwritten:
                now_ns = time.monotonic_ns()
                self._write_loss(Loss(None, self._unwritten, now_ns, now_ns, "not written: interrupted"))
        except OSError as error:
            self.error = error

    def _next(self) -> _Place | Loss | None:
        """The next item. Lines that wait when it is time go into the file, whether anything comes or not."""
        while True:
            wait_s = None
            if self._flush_at_s is not None and (wait_s := self._flush_at_s - time.monotonic()) <= 0:
                self._sink.flush()
                self._flush_at_s = wait_s = None
            with suppress(Empty):
                return self._items.get(timeout=wait_s)

    def _put_out(self, lines: bytes) -> None:
        self._sink.write(lines)
        if self._flush_at_s is None:
            self._flush_at_s = time.monotonic() + _FLUSH_S

    def _write_loss(self, loss: Loss) -> None:
        layer = loss.layer or "unknown"
        self._losses[layer] = self._losses.get(layer, 0) + loss.count
        if loss.cpu is not None:
            by_cpu = self.cpu_losses.setdefault(layer, {})
            by_cpu[loss.cpu] = by_cpu.get(loss.cpu, 0) + loss.count
        self._put_out(record_line(loss_record(loss)).encode())

    def _write_chunk(self, offset: int, size: int) -> None:
        for start in range(offset, offset + size, _PIECE_BYTES):
            piece_bytes = min(_PIECE_BYTES, offset + size - start)
            self._write_piece(os.pread(self._file.fileno(), piece_bytes, start))

    def _write_piece(self, piece: bytes) -> None:
        if self._abandoned.is_set():
            self._unwritten += self._renderer.count(piece)
            return
        self._write_lines(self._renderer.render(piece), len(piece))

    def _write_lines(self, lines: Lines, rendered_bytes: int) -> None:
        self._keep_within_limits(lines)
        text = lines.encoded()
        self._put_out(text)
        for layer, count in lines.counts().items():
            self._counts[layer] = self._counts.get(layer, 0) + count
        self._rendered_bytes += rendered_bytes
        self._written_bytes += len(text)

    def _keep_within_limits(self, lines: Lines) -> None:
        """Cut what there is no room for."""
        events, size_bytes = self._limits.events, self._limits.size_bytes
        if events is not None or size_bytes is not None:
            lines.cut(
                sys.maxsize if events is None else max(events - sum(self._counts.values()), 0),
                sys.maxsize if size_bytes is None else max(size_bytes - self._written_bytes, 0),
            )

    def _write_device(self, place: _Place) -> None:
        """Write the lines of a chunk of the GPU's records, which is one whole."""
        assert self._device_renderer is not None
        chunk = os.pread(self._file.fileno(), place.size_bytes, place.offset)
        if self._abandoned.is_set():
            self._unwritten += self._device_renderer.count(chunk)
        else:
            self._write_lines(self._device_renderer.render(chunk), len(chunk))

    def _write_in_order(self, places: list[_Place]) -> None:
        """Write what was collected there by time; records of one time stay in the order that they came in."""
        if not places:
            return
        data = b"".join(os.pread(self._file.fileno(), place.size_bytes, place.offset) for place in places)
        self._renderer.learn(data)
        times = array("Q", [time_ns for (time_ns,) in _TIME.iter_unpack(data)])
        order = sorted(range(len(times)), key=times.__getitem__)
        for first in range(0, len(order), _PIECE_BYTES // RECORD_BYTES):
            some = order[first : first + _PIECE_BYTES // RECORD_BYTES]
            self._write_piece(b"".join([data[at * RECORD_BYTES : (at + 1) * RECORD_BYTES] for at in some]))


def _folder_of(sink: BinaryIO) -> str | None:
    """The folder of the output, which has room for it; the system's for temporary files if it has no name."""
    name = getattr(sink, "name", None)
    if isinstance(name, str) and Path(name).is_file():
        return str(Path(name).absolute().parent)
    return None


def cannot_write(error: OSError) -> OutputError:
    """The output or the temporary file failed with `error`."""
    return OutputError(f"The events cannot be written: {error.strerror}.", "Is there room on the disk?")
