"""Records for another process: a process cannot record itself, and signals are handled on a main thread.

    caller ── Order ──▶ recorder        its first message
           ◀── notes, Began, the end ──
           ── WRITE ──▶            of a flight recorder
           ◀── Written ──
           ── WindowOrder ──▶  ◀── Answer ──
           ── STOP, or its own end ──▶

Messages are pickled, on a pair of sockets that the recorder inherits.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import FrameType

from tracepipe.api.record import record
from tracepipe.errors import OutputError, TracepipeError
from tracepipe.tracer.request import ENDED, Answer, CaptureRequest, WindowOrder
from tracepipe.tracer.summary import CaptureSummary

STOP, WRITE = "stop", "write"
_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; from tracepipe.api import recorder; recorder.main(sys.argv[1])"
)


@dataclass(frozen=True, slots=True)
class Order:
    """What to record, and into which file."""

    request: CaptureRequest
    output: str
    force: bool
    command_output: str = ""


@dataclass(frozen=True, slots=True)
class Began:
    """Everything from now on is recorded."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The recording ended with an error. `kind` is its name in `tracepipe.errors`."""

    kind: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True)
class Written:
    """A flight recorder has written `path`, which answers all WRITEs up to number `asked`. `error` and `hint`
    state why it is not complete.
    """

    asked: int
    path: str
    error: str = ""
    hint: str = ""


Message = str | Began | Answer | Written | Refused | CaptureSummary
"""A note for the user, or the state of the recording."""


class _Caller:
    """The other end of the connection, for the capture. When it is gone, the recording ends."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_gone = self._is_recorded = False
        self._orders: deque[WindowOrder] = deque()
        self.asked = 0

    def began(self) -> None:
        self.send(Began())

    def is_over(self) -> bool:
        while not self._is_gone and self._connection.poll():
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                message = STOP
            if message == WRITE:
                self.asked += 1
            elif isinstance(message, WindowOrder):
                self._orders.append(message)
            else:
                self._is_gone = True
        while self._is_recorded and self.order() is not None:
            self.answer(ENDED)
        return self._is_gone

    def ended(self) -> None:
        self._is_recorded = True

    def order(self) -> WindowOrder | None:
        return self._orders.popleft() if self._orders else None

    def answer(self, answer: Answer) -> None:
        self.send(answer)

    def wrote(self, asked: int, path: str, error: OutputError | None) -> None:
        self.send(Written(asked, path, error.message if error else "", error.hint if error else ""))

    def send(self, message: Message) -> None:
        try:
            self._connection.send(message)
        except OSError:  # it is gone, which does not affect the recording
            return


def command_line(descriptor: int, paths: Sequence[str]) -> list[str]:
    """The command that starts a recorder on the socket with this number, which imports modules from `paths`.

    Python ignores the environment, which is that of the command to record.
    """
    return [sys.executable, "-I", "-c", _CODE, str(descriptor), *paths]


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(number_of_socket: str) -> None:
    """Record what the caller asks for."""
    descriptor = int(number_of_socket)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    os.set_inheritable(descriptor, False)  # the command must not inherit it
    connection = Connection(descriptor)
    order: Order = connection.recv()
    caller = _Caller(connection)
    try:
        summary = record(
            order.request,
            order.output,
            command_output=order.command_output,
            force=order.force,
            notify=caller.send,
            control=caller,
        )
        caller.send(summary)
    except TracepipeError as e:
        caller.send(Refused(type(e).__name__, e.message, e.hint))
