"""Draws the totals of `tracepipe live` while the command runs; the last ones stay when it ends.

On a terminal the view is at the bottom, and the command's output scrolls above it. Elsewhere only the final
table is written, or one table at every requested interval.

The command's output and the view would overwrite each other. So while the view is drawn, those of the
descriptors 1 and 2 that are terminals are replaced with a pseudo-terminal, which the command inherits. Its
output is read here and printed above the view, byte for byte. The command still sees a terminal of the same
size. Programs that draw on the whole screen cannot be shown like this: redirect the view for them (2>file).

    command ──▶ 1, 2: pseudo-terminal ──▶ `read` ──▶ above the view ──▶ terminal
"""

from __future__ import annotations

import codecs
import fcntl
import math
import os
import select
import signal
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from tracepipe.errors import OutputError
from tracepipe.sudo import sudo_ids
from tracepipe.terminal.live_table import Line, View, functions_that_fit, view_lines
from tracepipe.terminal.output import can_draw, is_ascii
from tracepipe.tracer.live.totals import Snapshot

if TYPE_CHECKING:
    from rich.console import Group

_OUTPUT, _ERRORS = 1, 2
_CHUNK_BYTES = 1 << 16


class CommandOutput:
    """Takes over the descriptors that are terminals; `terminal` is the real one."""

    def __init__(self, stream: TextIO) -> None:
        """`stream` is the terminal on which the view is drawn."""
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(stream.fileno())
        self.terminal = os.fdopen(saved, "w", encoding=stream.encoding, errors="replace")
        self._saved = {number: os.dup(number) for number in (_OUTPUT, _ERRORS) if os.isatty(number)}
        self._read, inherited = os.openpty()
        # No carriage return before a line feed, as the real terminal adds one.
        attributes = termios.tcgetattr(inherited)
        attributes[1] &= ~termios.OPOST
        termios.tcsetattr(inherited, termios.TCSANOW, attributes)
        if (ids := sudo_ids()) is not None:  # the command runs as the caller, who may open /dev/stdout again
            os.fchown(inherited, ids.uid, -1)
        for number in self._saved:
            os.dup2(inherited, number)
        os.close(inherited)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.fit()

    def fileno(self) -> int:
        """The descriptor to poll: it is readable when there is output."""
        return self._read

    def fit(self) -> None:
        """Give the pseudo-terminal the terminal's size."""
        size = os.get_terminal_size(self.terminal.fileno())
        #  rows │ columns │ pixels, unused
        fcntl.ioctl(self._read, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))

    def read(self) -> str:
        """The output since the last call; never waits."""
        text = ""
        poller = select.poll()
        poller.register(self._read, select.POLLIN)
        while len(text) < _CHUNK_BYTES and poller.poll(0):
            try:
                chunk = os.read(self._read, _CHUNK_BYTES)
            except OSError:  # EIO: no process has the other end open
                break
            text += self._decoder.decode(chunk)
        return text

    def give_back(self) -> str:
        """Restore the descriptors; returns the unread output."""
        sys.stdout.flush()
        sys.stderr.flush()
        for number, saved in self._saved.items():
            os.dup2(saved, number)
            os.close(saved)
        rest = ""
        while text := self.read():
            rest += text
        os.close(self._read)
        return rest + self._decoder.decode(b"", final=True)


DRAW_S = 0.25
_PRINT_S = 0.05  # the command's output is gathered for this time, as every print moves the view
_COLUMNS = 80  # of a terminal that does not report its size
_STYLES = {"title": "bold", "head": "dim", "loss": "red"}
_RATE_NS = 10**9  # rates on the terminal are those of about the last second


Totals = Callable[[], Snapshot | None]
"""Returns the current totals, which another thread adds up; None before there are any."""


@contextmanager
def live_view(
    totals: Totals,
    stream: TextIO,
    title: str,
    *,
    sort: str = "total",
    top: int | None = None,
    interval_s: float | None = None,
    on_unseen: Callable[[], None] = lambda: os.kill(os.getpid(), signal.SIGINT),
) -> Iterator[None]:
    """Show `totals` on `stream` while the context is open, and the last ones at its end.

    `top`: the number of functions; None: as many as fit on a terminal, and all in the final table.
    `interval_s`: the time between two views; by default a quarter of a second on a terminal, and only the
    final view elsewhere. `on_unseen` is called on another thread when the views can no longer be written.
    """
    view = View(title, sort, top, ascii_only=is_ascii(stream))
    output = CommandOutput(stream) if can_draw(stream) else None
    drawing: _Drawing | None = None
    try:
        if output is not None:
            drawing = _OnTerminal(totals, view, interval_s or DRAW_S, output)
        elif interval_s is not None:
            drawing = _Plain(totals, view, interval_s, stream, on_unseen)
        if drawing is not None:
            drawing.start()
        yield
    finally:
        try:
            if drawing is not None:
                drawing.stop()
        finally:
            if output is not None:
                rest = (drawing.unprinted if drawing is not None else "") + output.give_back()
                # If the command did not end its last line, it is ended here.
                output.terminal.write(rest if rest.endswith("\n") or not rest else rest + "\n")
                output.terminal.close()
        if (last := totals()) is not None:
            _write_plain(stream, last, view)


class _Drawing:
    """A thread that shows the totals at intervals."""

    unprinted = ""
    """The command's output that is not printed yet; at the end, an incomplete line."""

    def __init__(self, totals: Totals, view: View, interval_s: float) -> None:
        self._totals, self._view, self._interval_s = totals, view, interval_s
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="tracepipe-view", daemon=True)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._is_stopping = False

    def start(self) -> None:
        """Start the thread. It takes no signals: the recording waits for them on the main thread."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._thread.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def stop(self) -> None:
        """End the thread, and wait for it."""
        self._is_stopping = True
        os.write(self._wake, b"x")
        self._thread.join()
        os.close(self._wake)
        os.close(self._woken)

    def _run(self) -> None:
        raise NotImplementedError


class _Plain(_Drawing):
    """A table at every interval, one after the other."""

    def __init__(
        self, totals: Totals, view: View, interval_s: float, stream: TextIO, on_unseen: Callable[[], None]
    ) -> None:
        super().__init__(totals, view, interval_s)
        self._stream, self._on_unseen = stream, on_unseen

    def _run(self) -> None:
        before: Snapshot | None = None
        while not self._poller.poll(1000 * self._interval_s):
            snapshot = self._totals()
            if snapshot is not None:
                try:
                    _write_plain(self._stream, snapshot, replace(self._view, before=before))
                except (OSError, OutputError):
                    # Nobody will see more. Writing the last totals fails too, and reports the error.
                    self._on_unseen()
                    return
                before = snapshot


class _OnTerminal(_Drawing):
    """The view at the bottom of a terminal, and a command's output above it."""

    def __init__(self, totals: Totals, view: View, interval_s: float, output: CommandOutput) -> None:
        super().__init__(totals, view, interval_s)
        from rich.console import Console
        from rich.live import Live

        self._output = output
        self._poller.register(output, select.POLLIN)
        self._console = Console(file=output.terminal)
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._snapshots: list[Snapshot] = []
        self._lines: list[Line] = []

    def _run(self) -> None:
        draw_s, print_s = 0.0, math.inf
        with self._live:
            while not self._is_stopping:
                now_s = time.monotonic()
                if now_s >= draw_s:
                    self._draw()
                    draw_s = now_s + self._interval_s
                self._poller.poll(max(0, 1000 * (min(draw_s, print_s) - time.monotonic())))
                if read := self._output.read():
                    self.unprinted += read
                    print_s = min(print_s, time.monotonic() + _PRINT_S)
                if time.monotonic() >= print_s:
                    self._print()
                    print_s = math.inf  # an incomplete line stays there until more output comes
            self._print()

    def _draw(self) -> None:
        snapshot = self._totals()
        self._output.fit()
        if snapshot is None:
            return
        recent = [old for old in self._snapshots if snapshot.now_ns - old.now_ns <= _RATE_NS]
        self._snapshots = [*recent, snapshot]
        size = self._console.size
        view = replace(
            self._view,
            top=min(self._view.top or size.height, functions_that_fit(size.height - 1, snapshot)),
            width=size.width,
            before=recent[0] if recent else None,
        )
        self._lines = view_lines(snapshot, view)
        self._live.update(self._frame(), refresh=True)

    def _print(self) -> None:
        """Print the complete lines; an incomplete one is drawn above the view until its end comes."""
        text, line_feed, self.unprinted = self.unprinted.rpartition("\n")
        self._live.update(self._frame())
        if line_feed:  # as it is, with its escape sequences
            from rich.segment import Segment, Segments

            self._console.print(Segments([Segment(text + line_feed)]), end="", crop=False, soft_wrap=True)
        else:
            self._live.refresh()

    def _frame(self) -> Group:
        """The view, below the last line of the command's output if that is incomplete."""
        from rich.console import Group
        from rich.segment import Segment, Segments
        from rich.text import Text

        partial = self.unprinted.rpartition("\n")[2].rpartition("\r")[2]
        above = [Text.from_ansi(partial, no_wrap=True, overflow="ellipsis")] if partial else []
        styles = {line.kind: self._console.get_style(_STYLES.get(line.kind, "none")) for line in self._lines}
        view = [
            part for line in self._lines for part in (Segment(line.text, styles[line.kind]), Segment.line())
        ]
        return Group(*above, Segments(view))


def _write_plain(stream: TextIO, snapshot: Snapshot, view: View) -> None:
    """Write the whole view, as wide as the terminal if `stream` is one."""
    if stream.isatty():
        # A terminal without a size, such as a serial line, has 0 columns.
        view = replace(view, width=os.get_terminal_size(stream.fileno()).columns or _COLUMNS)
    stream.write("".join(line.text + "\n" for line in view_lines(snapshot, view)))
    stream.flush()
