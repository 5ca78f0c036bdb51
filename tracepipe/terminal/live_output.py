"""Shows a command's output on the terminal on which the live view is drawn.

Both would overwrite each other. So while the view is drawn, those of the descriptors 1 and 2 that are
terminals are replaced with a pseudo-terminal, which the command inherits. Its output is read here and printed
above the view, byte for byte. The command still sees a terminal of the same size. Programs that draw on the
whole screen cannot be shown like this: redirect the view for them (2>file).

    command ──▶ 1, 2: pseudo-terminal ──▶ `read` ──▶ above the view ──▶ terminal
"""

from __future__ import annotations

import codecs
import fcntl
import os
import select
import struct
import sys
import termios
from typing import TextIO

from tracepipe.sudo import sudo_ids

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
        _pass_bytes_through(inherited)
        self._give_to_caller(inherited)
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

    def close(self) -> None:
        """Close this descriptor of the terminal; others stay open."""
        self.terminal.close()

    def _give_to_caller(self, inherited: int) -> None:
        """Under sudo, the command runs as the caller, who may open /dev/stdout again."""
        ids = sudo_ids()
        if ids is not None:
            os.fchown(inherited, ids.uid, -1)


def _pass_bytes_through(descriptor: int) -> None:
    """Turn off the carriage return before a line feed, as the real terminal adds one."""
    attributes = termios.tcgetattr(descriptor)
    attributes[1] &= ~termios.OPOST
    termios.tcsetattr(descriptor, termios.TCSANOW, attributes)
