"""Signals that a capture gets, taken one by one, and what they mean for the command.

The first one goes on to the command, which has two seconds to end; a second one kills it. Nothing else ends a
command that runs, and nothing at all a process that is recorded by its number or name.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tracepipe.capture.request import Control
from tracepipe.capture.target import Target
from tracepipe.errors import TracepipeError

_GRACE_S = 2.0  # how long an interrupted command may take to end
_SEEN_S = 0.05  # by when the end of a command is seen that is only waited for
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_ASKING = signal.SIGUSR2
_SI_KERNEL = 0x80  # siginfo's code of a Ctrl-C from the terminal, which the command got as well


@contextmanager
def blocked(*, asking: bool = False) -> Iterator[set[signal.Signals]]:
    """Block the signals, as `Interrupts` takes them, and the one that asks for something if it is waited for;
    gives the mask that a command shall have.
    """
    # Under nohup, which ignores a closed terminal, a blocked SIGHUP would wait for the loop all the same.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    taken = _SIGNALS - ignored | ({_ASKING} if asking else set())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    try:
        yield {signal.Signals(number) for number in mask}
    finally:
        # An interrupt that came while this one was dealt with means the same.
        while signal.sigtimedwait(taken, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def check_not_interrupted(what: str) -> None:
    """Raise TracepipeError if a signal came before `what` was done, while signals are blocked."""
    if _SIGNALS & set(signal.sigpending()):
        raise TracepipeError(f"The capture was interrupted before {what}.", "Nothing was recorded.")


@contextmanager
def outlived() -> Iterator[None]:
    """Let a signal that asks for something before the recording, or after it, not end this process."""
    before = signal.signal(_ASKING, lambda *_: None)  # which no command inherits, unlike SIG_IGN
    try:
        yield
    finally:
        signal.signal(_ASKING, before)


class Interrupts:
    """What came since the command was forked; `stopped`: the control ended the recording."""

    def __init__(self, control: Control | None) -> None:
        self._control = control
        self.target: Target | None = None
        self.count = 0
        self.stopped = False
        self.asked = 0
        """How often a flight recorder was asked to write, or a window to begin or to end."""
        self.asked_by = ""
        self._control_asked = 0
        self._kill_at_s = 0.0

    def wait(self, timeout_s: float) -> None:
        """Wait, take the signals that came, and end what shall end now."""
        # Not in sigtimedwait: when a stop and a continue (Ctrl-Z, fg) cut its wait short, Python (3.11) gives
        # a signal that never came.
        time.sleep(timeout_s)
        while (received := signal.sigtimedwait({*_SIGNALS, _ASKING}, 0)) is not None:
            if received.si_signo == _ASKING:
                self.asked, self.asked_by = self.asked + 1, "SIGUSR2"
                continue
            self._interrupt(received.si_signo, is_sent=received.si_code == _SI_KERNEL)
        if self._control is not None and not self.stopped and self._control.is_over():
            self.stopped = True
            if self.target is not None and not self.count:
                self._interrupt(signal.SIGINT)
        if self._control is not None and self._control.asked > self._control_asked:
            self._control_asked, self.asked, self.asked_by = self._control.asked, self.asked + 1, "write_now"
        if self._kill_at_s and time.monotonic() >= self._kill_at_s and self.target is not None:
            self.target.send(signal.SIGKILL)

    def see_off(self) -> None:
        """Wait for the end of the command."""
        while self.target is not None and self.target.poll() is None:
            self.wait(_SEEN_S)

    def _interrupt(self, number: int, *, is_sent: bool = False) -> None:
        """End the command, a second time without grace; `is_sent`: it got the signal as well."""
        self.count += 1
        if self.target is None:
            return
        if self.count > 1:
            self.target.send(signal.SIGKILL)
            return
        self._kill_at_s = time.monotonic() + _GRACE_S
        if not is_sent:
            self.target.send(number)
