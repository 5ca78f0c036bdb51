"""A capture while a `with` block runs, and the process that records for it: a process cannot record itself,
and signals are handled on a main thread.

    Capture  ── Order ──▶ main        its first message
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
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tracepipe.api.record import Order, record
from tracepipe.errors import CaptureTimeout, CaptureUnavailable, OutputError, TracepipeError
from tracepipe.tracer.request import API, ENDED, Answer, Notify, WindowOrder, triggers_of
from tracepipe.tracer.summary import CaptureSummary

STOP, WRITE = "stop", "write"
_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from tracepipe.api import capture_block; capture_block.main(sys.argv[1])"
)


@dataclass(frozen=True, slots=True)
class Began:
    """Everything from now on is recorded."""


@dataclass(frozen=True, slots=True)
class Written:
    """A flight recorder has written `path`, which answers all WRITEs up to number `asked`. `error` states why
    it is not complete.
    """

    asked: int
    path: str
    error: OutputError | None = None


Message = str | Began | Answer | Written | TracepipeError | CaptureSummary
"""A note for the user, the state of the recording, or the error with which it ended."""


class Capture:
    """A recording that is made while its `with` block runs.

    It has begun when the block begins. The end of the block waits for a command, and ends any other
    recording. An exception ends it too, as Ctrl-C would, and the file keeps what was recorded. Another
    process records, so the block may run on any thread.
    """

    def __init__(self, order: Order, notify: Notify | None) -> None:
        self.path = order.output
        """The recording."""
        self.notes: list[str] = []
        """Notes for the user: which method is used, and which layers cannot be recorded."""
        self._order, self._notify = order, notify
        self._owner = 0
        self._recorder: subprocess.Popen[bytes] | None = None
        self._connection: Connection[Any, Message] | None = None
        self._summary: CaptureSummary | None = None
        self._has_begun = False
        self._answer: Answer | None = None
        self._writes = 0
        self._written: list[Written] = []
        self._asking = threading.Lock()
        self._receiving = threading.Condition()
        self._is_receiving = False

    def __enter__(self) -> Capture:
        if self._recorder is not None:
            raise TracepipeError("A capture records once.", "Call tracepipe.capture again for another.")
        self._start()
        try:
            self._receive_until(lambda: self._has_begun)
        except BaseException:
            self._send(STOP)
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A fork of this process leaves the block too, and a recording that ended within the block was
        # reported.
        if os.getpid() != self._owner or self._connection is None:
            return
        try:
            if error is None and self._order.request.command:
                self.wait()
            else:
                self.stop()
        except TracepipeError as fault:
            if error is None:
                raise
            self._note(fault.message)  # the exception that ended the block is raised on

    def wait(self) -> CaptureSummary:
        """Wait until the recording ends: with its command or its processes, or by a limit."""
        try:
            return self._wait_for_summary()
        except KeyboardInterrupt:
            self.stop()
            raise

    def stop(self) -> CaptureSummary:
        """End the recording now. A command is interrupted, and killed two seconds later."""
        self._send(STOP)
        return self._wait_for_summary()

    def write_now(self, timeout_s: float = 60.0) -> str:
        """Write what `last` kept, as SIGUSR2 does, wait for that, and return the path of the file. The
        recording continues. Raises TracepipeError without `last` and in a fork, OutputError for a file that
        cannot be written or is not complete, and CaptureTimeout, after which the file will still be written.
        """
        if self._order.request.last is None:
            raise TracepipeError("This capture keeps no last events that it could write.", 'Give last="10s".')
        self._check_not_forked()
        with self._receiving:
            if self._summary is not None:
                raise TracepipeError(f"{self.path} is complete.", "Call it before the end of the block.")
            self._send(WRITE)
            self._writes += 1
            number = self._writes

        def written() -> Written | None:
            return next((one for one in self._written if one.asked >= number), None)

        if not self._receive_until(lambda: bool(written() or self._summary), timeout_s):
            raise CaptureTimeout(
                f"The last events were not written within {timeout_s:g} s.",
                "They will be written: look for the file in run.summary.recordings.",
            )
        answer = written()
        if answer is None:  # the recording ended meanwhile, and wrote what was kept
            self.summary.check()
            return self.summary.recordings[-1].path
        if answer.error is not None:
            raise answer.error
        return answer.path

    def begin_window(self, name: str = "") -> None:
        """Begin a window of a capture with `start_on="api"`. Everything is recorded from when this returns.
        Raises TracepipeError while a window is open, and when the recording has ended.
        """
        _check(self._answer_to(WindowOrder(True, name)))

    def end_window(self) -> None:
        """End the open window of a capture that begins or ends windows by `"api"`. A window of `begin_window`
        may have ended before, by `duration` or `stop_on`. Raises TracepipeError where there was no window,
        and when the recording has ended.
        """
        _check(self._answer_to(WindowOrder(False)))

    @contextmanager
    def window(self, name: str = "") -> Iterator[None]:
        """A window for a `with` statement, unless the recording ends before the block."""
        self.begin_window(name)
        try:
            yield
        except BaseException:
            with suppress(TracepipeError):  # the exception that ended the block is raised on
                self._answer_to(WindowOrder(False))
            raise
        answer = self._answer_to(WindowOrder(False))
        if answer != ENDED:
            _check(answer)

    @property
    def summary(self) -> CaptureSummary:
        """The summary of the recording. Raises TracepipeError before the end."""
        if self._summary is None:
            raise TracepipeError(f"{self.path} is not complete.", "Leave the block first, or call stop().")
        return self._summary

    def __repr__(self) -> str:
        if self._summary is None:
            state = "is being recorded" if self._connection is not None else "not recorded"
        else:
            counts = ", ".join(f"{count} {layer}" for layer, count in self._summary.counts.items())
            state = f"{counts or 'no events'}, ended by {self._summary.ended_by}"
        return f"<Capture {self.path}: {state}>"

    def _start(self) -> None:
        if not sys.executable:
            raise CaptureUnavailable(
                "There is no Python interpreter to record with: sys.executable is empty.",
                "Run python, or tracepipe capture, instead of a program that embeds Python.",
            )
        ours, theirs = Pipe()
        # A command shares the terminal. Any other recording ends when this process ends it, not by Ctrl-C.
        has_terminal = bool(self._order.request.command)
        self._owner = os.getpid()
        self._recorder = subprocess.Popen(
            command_line(theirs.fileno(), [str(Path(path).absolute()) for path in sys.path]),
            stdin=None if has_terminal else subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=not has_terminal,
        )
        theirs.close()
        self._connection = ours
        self._send(self._order)

    def _answer_to(self, order: WindowOrder) -> Answer:
        """Send an order for a window and return the recorder's answer. Raises TracepipeError if the capture
        does not take such orders from a program.
        """
        trigger = triggers_of(self._order.request.windows)[0 if order.begins else 1]
        if trigger is None or trigger.kind != API:
            option, does = ("start_on", "begin") if order.begins else ("stop_on", "end")
            raise TracepipeError(
                f"The windows of this capture do not {does} with {does}_window().", f'Give {option}="api".'
            )
        self._check_not_forked()
        with self._asking:
            self._answer = None
            self._send(order)
            self._receive_until(lambda: self._answer is not None or self._summary is not None)
            return self._answer or ENDED

    def _check_not_forked(self) -> None:
        """Raise TracepipeError in a fork, which would receive the answers for its parent."""
        if os.getpid() != self._owner and self._owner:
            raise TracepipeError(
                "This process was forked from the one that began the capture.", "Call it in that process."
            )

    def _wait_for_summary(self) -> CaptureSummary:
        self._receive_until(lambda: self._summary is not None)
        assert self._summary is not None
        return self._summary

    def _receive_until(self, is_there: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Receive messages of the recorder until `is_there()`; one thread receives for all that wait. Return
        False if the time is over before. Raises the error with which the recording ended.
        """
        give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._receiving:
                if is_there():
                    return True
                left_s = None if give_up_s is None else give_up_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    return False
                if self._is_receiving:
                    self._receiving.wait(left_s)
                    continue
                self._is_receiving = True
            try:
                note = self._receive(left_s)
            finally:
                with self._receiving:
                    self._is_receiving = False
                    self._receiving.notify_all()
            if note:
                self._note(note)

    def _receive(self, timeout_s: float | None = None) -> str:
        """Receive the next message of the recorder, if one comes in time, and return it if it is a note.
        Raises the error with which the recording ended.
        """
        if self._connection is None:
            raise TracepipeError(f"{self.path} is not being recorded.", "Use it in a with statement.")
        try:
            if not self._connection.poll(timeout_s):
                return ""
            message: Message = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self._close()
            raise TracepipeError(
                f"The process that records ended with {code}.", "Look at standard error for the reason."
            ) from None
        if isinstance(message, str):
            return message
        if isinstance(message, Began):
            self._has_begun = True
        elif isinstance(message, Answer):
            self._answer = message
        elif isinstance(message, Written):
            self._written.append(message)
        elif isinstance(message, CaptureSummary):
            self._summary = message
            self._close()
            message.check()  # the summary can still be read
        else:
            self._close()
            message.hint = message.hint.replace("tracepipe …", "python …")  # the user ran a Python program
            raise message
        return ""

    def _note(self, text: str) -> None:
        self.notes.append(text)
        if self._notify is not None:
            self._notify(text)

    def _send(self, message: Order | WindowOrder | str) -> None:
        if self._connection is not None:
            with suppress(OSError):  # it has ended, and its last messages can be received
                self._connection.send(message)

    def _close(self) -> int:
        """Wait for the end of the recorder and return its exit code."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        return self._recorder.wait() if self._recorder is not None else 0


def _check(answer: Answer) -> None:
    if answer.message:
        raise TracepipeError(answer.message, answer.hint)


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
        self.send(Written(asked, path, error))

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


def main(number_of_socket: str) -> None:
    """Record what the caller asks for."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    descriptor = int(number_of_socket)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)
    os.set_inheritable(descriptor, False)  # the command must not inherit it
    connection = Connection(descriptor)
    order: Order = connection.recv()
    caller = _Caller(connection)
    try:
        caller.send(record(order, notify=caller.send, control=caller))
    except TracepipeError as e:
        caller.send(e)
