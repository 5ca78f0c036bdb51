"""The signals that a capture gets, received one by one, and what they do to the command.

The first signal is passed on to the command, which then has two seconds to end; a second one kills it.
Nothing else ends a running command. A process that is recorded by its number or name is never ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tracepipe.errors import TracepipeError
from tracepipe.tracer.request import Control
from tracepipe.tracer.target import Target

_GRACE_S = 2.0  # how long an interrupted command may take to end
_SEEN_S = 0.05  # how often a command that is only waited for is looked at
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_ASKING = signal.SIGUSR2
_SI_KERNEL = 0x80  # si_code of a Ctrl-C in the terminal, which the command also got


@contextmanager
def blocked(*, asking: bool = False) -> Iterator[set[signal.Signals]]:
    """Block the signals that `Interrupts` receives, and with `asking` SIGUSR2 too. Yields the signal mask for
    the command.
    """
    # Under nohup SIGHUP is ignored; if it were blocked, it would stay pending and end the capture.
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    taken = _SIGNALS - ignored | ({_ASKING} if asking else set())
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    try:
        yield {signal.Signals(number) for number in mask}
    finally:
        # A second interrupt that arrived while the first was handled has no further effect.
        while signal.sigtimedwait(taken, 0):
            pass
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def check_not_interrupted(what: str) -> None:
    """Raise TracepipeError if a signal came before `what` was done, while signals are blocked."""
    if _SIGNALS & set(signal.sigpending()):
        raise TracepipeError(f"The capture was interrupted before {what}.", "Nothing was recorded.")


@contextmanager
def outlived() -> Iterator[None]:
    """Keep SIGUSR2 before or after the recording from ending this process."""
    before = signal.signal(_ASKING, lambda *_: None)  # a command does not inherit a handler, unlike SIG_IGN
    try:
        yield
    finally:
        signal.signal(_ASKING, before)


class Interrupts:
    """The signals received since the command was forked; `stopped`: the control ended the recording."""

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
        """Wait, receive the signals that arrived, and end the command or the recording if they ask for it."""
        # Not in sigtimedwait: when a stop and a continue (Ctrl-Z, fg) interrupt its wait, Python (3.11)
        # returns a signal that was never sent.
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
        """Interrupt the command, or kill it at the second signal; `is_sent`: the command itself got the
        signal.
        """
        self.count += 1
        if self.target is None:
            return
        if self.count > 1:
            self.target.send(signal.SIGKILL)
            return
        self._kill_at_s = time.monotonic() + _GRACE_S
        if not is_sent:
            self.target.send(number)
