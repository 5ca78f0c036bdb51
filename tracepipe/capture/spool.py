"""What was collected, kept on disk and turned into lines on another thread.

The collector only appends bytes to a temporary file, so the kernel's ring is emptied in time whatever the
writing of lines takes; lines come behind, and after the end as far as they are not done.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

from tracepipe.capture.engine import Loss, Renderer
from tracepipe.capture.record import loss_line
from tracepipe.errors import OutputError

_PIECE_BYTES = 64 * 4096  # bytes that become lines at once: 4096 records
# Seconds a thread may keep the interpreter while another waits. The default of 5 ms would let the collector
# wait that long three times a tick while lines are made.
_SWITCH_S = 0.0005


class Spool:
    """Takes chunks and losses in order, writes their lines to `sink`."""

    def __init__(self, sink: BinaryIO, renderer: Renderer) -> None:
        self._sink, self._renderer = sink, renderer
        self._file: BinaryIO = tempfile.TemporaryFile(dir=_folder_of(sink), prefix="tracepipe-", buffering=0)  # noqa: SIM115, closed in `close`
        self._size_bytes = 0
        self._items: SimpleQueue[tuple[int, int] | Loss | None] = SimpleQueue()
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._write, name="tracepipe-lines", daemon=True)
        self._old_switch_s = sys.getswitchinterval()
        self.losses: dict[str, int] = {}
        self._unwritten = 0
        self.error: OSError | None = None
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def put(self, chunk: bytes) -> None:
        """Keep a chunk. Raises OutputError when the disk is full."""
        try:
            written = self._file.write(chunk)
        except OSError as error:
            raise cannot_write(error) from None
        if written != len(chunk):
            raise OutputError("The disk for temporary files is full.", "Set TMPDIR to a folder with room.")
        self._items.put((self._size_bytes, len(chunk)))
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
        return dict(self._renderer.counts)

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
        self._thread.join()
        sys.setswitchinterval(self._old_switch_s)
        self._file.close()

    def raise_if_failed(self) -> None:
        """Raise OutputError if lines could not be written."""
        if self.error is not None:
            raise cannot_write(self.error)

    def _write(self) -> None:
        try:
            while (item := self._items.get()) is not None:
                if isinstance(item, Loss):
                    self._write_loss(item)
                else:
                    self._write_chunk(*item)
            if self._unwritten:
                now_ns = time.monotonic_ns()
                self._write_loss(Loss(None, self._unwritten, now_ns, now_ns, "not written: interrupted"))
        except OSError as error:
            self.error = error

    def _write_loss(self, loss: Loss) -> None:
        layer = loss.layer or "unknown"
        self.losses[layer] = self.losses.get(layer, 0) + loss.count
        self._sink.write(loss_line(loss))

    def _write_chunk(self, offset: int, size: int) -> None:
        for start in range(offset, offset + size, _PIECE_BYTES):
            piece_bytes = min(_PIECE_BYTES, offset + size - start)
            piece = os.pread(self._file.fileno(), piece_bytes, start)
            if self._abandoned.is_set():
                self._unwritten += self._renderer.count(piece)
            else:
                self._sink.write(self._renderer.render(piece))


def _folder_of(sink: BinaryIO) -> str | None:
    """The folder of the output, which has room for it; the system's for temporary files if it has no name."""
    name = getattr(sink, "name", None)
    if isinstance(name, str) and Path(name).is_file():
        return str(Path(name).absolute().parent)
    return None


def cannot_write(error: OSError) -> OutputError:
    """The output or the temporary file failed with `error`."""
    return OutputError(f"The events cannot be written: {error.strerror}.", "Is there room on the disk?")
