"""The recorded command: forked, held before its exec until the probes are attached, and ended by signals.

The first signal that a capture gets is passed on to the command, which then has two seconds to end; a second
one kills it. Nothing else ends a running command. A process that is recorded by its number or name is never
ended.
"""

from __future__ import annotations

import os
import pwd
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pwd import struct_passwd

from tracepipe.errors import TracepipeError
from tracepipe.sudo import AS_ROOT, sudo_ids, sudo_user
from tracepipe.tracer.request import Control

_GRACE_S = 2.0  # how long an interrupted command may take to end
_SEEN_S = 0.05  # how often a command that is only waited for is looked at
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_ASKING = signal.SIGUSR2
_SI_KERNEL = 0x80  # si_code of a Ctrl-C in the terminal, which the command also got


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended, `exit 0` or `signal 11 (SIGSEGV)`, and the exit code that a shell shows."""

    text: str
    exit_code: int


class Target:
    """A child process that executes `command` when it is released."""

    def __init__(
        self,
        program: str,
        command: list[str],
        mask: set[signal.Signals],
        environment: Mapping[str, str] | None = None,
        stdout: int = 1,
    ) -> None:
        """Fork it. `mask` is the signal mask that the command starts with, `environment` is added to this
        process's environment, and `stdout` is its standard output. Raises TracepipeError where it cannot run
        as the user who called sudo.
        """
        self._program, self._command, self._mask, self._stdout = program, command, mask, stdout
        self._environment, self._user = environment or {}, _command_user()
        self._ending: Ending | None = None
        self._go = self._failure = -1
        self.is_released = False
        """Whether it executes the command; from then on `close` does not end it."""
        with ExitStack() as opened:  # they are few, but the limit may be reached
            go_read, self._go = _pipe(opened)
            self._failure, failure_write = _pipe(opened)  # a successful exec closes it, as all of Python's
            self.pid = os.fork()
            if self.pid == 0:
                os.close(self._go)
                self._become(go_read, failure_write)
            opened.pop_all()
        os.close(go_read)
        os.close(failure_write)

    def release(self) -> None:
        """Let it exec, and wait until it has done so. Raises TracepipeError if it could not."""
        failure = b"it was ended before it began"
        with suppress(BrokenPipeError):
            os.write(self._go, b"x")
            failure = os.read(self._failure, 256)
        os.close(self._go)
        self._go = -1
        if failure:
            self.wait()
            raise TracepipeError(
                f"{self._command[0]} cannot be executed: {failure.decode(errors='replace')}.",
                "Check that it is a program for this machine, and that the user may read and execute it.",
            )
        self.is_released = True

    def poll(self) -> Ending | None:
        """How it ended; None while it runs."""
        if self._ending is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ending = _ending(status)
        return self._ending

    def wait(self) -> Ending:
        """Wait until it ends."""
        if self._ending is None:
            self._ending = _ending(os.waitpid(self.pid, 0)[1])
        return self._ending

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Close its pipes, and kill it if it was never released. A released one has ended, or runs on."""
        if not self.is_released and self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for descriptor in (self._go, self._failure):
            if descriptor >= 0:
                os.close(descriptor)
        self._go = self._failure = -1

    def _become(self, go: int, failure: int) -> None:
        """In the child: wait for the release, then turn into the command. Never returns."""
        try:
            if os.read(go, 1):
                # Python ignores the last two, and exec would keep them ignored; a shell would not.
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
                if self._stdout != 1:
                    os.dup2(self._stdout, 1)
                names = {}
                if (user := self._user) and (ids := sudo_ids()):
                    # Variables that described root describe the user. With -E sudo keeps the caller's values,
                    # which may differ from the user database: they are kept too.
                    root, caller = _names(pwd.getpwuid(0)), _names(user)
                    names = {name: caller[name] for name in caller if os.environ.get(name) == root[name]}
                    os.initgroups(user.pw_name, ids.gid)
                    os.setgid(ids.gid)
                    os.setuid(ids.uid)
                os.execve(self._program, self._command, {**os.environ, **names, **self._environment})
        except BaseException as error:
            reason = error.strerror if isinstance(error, OSError) else None
            os.write(failure, os.fsencode(reason or f"{type(error).__name__} {error}")[:256])
        finally:
            os._exit(127)


def _ending(status: int) -> Ending:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:  # a real-time signal
            name = f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return Ending(f"signal {number} ({name})", 128 + number)
    return Ending(f"exit {os.WEXITSTATUS(status)}", os.WEXITSTATUS(status))


def _command_user() -> struct_passwd | None:
    """The user who called sudo, as whom the command runs; None for root. Raises TracepipeError."""
    ids, user = sudo_ids(), sudo_user()
    if ids and user is None:
        raise TracepipeError(f"SUDO_UID is {ids.uid}, and no user has that number.", AS_ROOT)
    return user


def _names(user: struct_passwd) -> dict[str, str]:
    """The variables that a login sets for a user."""
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}


def _pipe(opened: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        opened.callback(os.close, end)
    return ends


@contextmanager
def blocked(*, asking: bool = False) -> Iterator[set[signal.Signals]]:
    """Block the signals for `Interrupts`, with `asking` SIGUSR2 too. Yields the mask for the command."""
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


@dataclass
class Interrupts:
    """The signals received since the command was forked; `stopped`: the control ended the recording."""

    control: Control | None
    target: Target | None = None
    count: int = 0
    stopped: bool = False
    asked: int = 0
    """How often a flight recorder was asked to write, or a window to begin or to end."""
    asked_by: str = ""
    _control_asked: int = 0
    _kill_at_s: float = 0.0

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
        if self.control is not None and not self.stopped and self.control.is_over():
            self.stopped = True
            if self.target is not None and not self.count:
                self._interrupt(signal.SIGINT)
        if self.control is not None and self.control.asked > self._control_asked:
            self._control_asked, self.asked, self.asked_by = self.control.asked, self.asked + 1, "write_now"
        if self._kill_at_s and time.monotonic() >= self._kill_at_s and self.target is not None:
            self.target.send(signal.SIGKILL)

    def see_off(self) -> None:
        """Wait for the end of the command."""
        while self.target is not None and self.target.poll() is None:
            self.wait(_SEEN_S)

    def _interrupt(self, number: int, *, is_sent: bool = False) -> None:
        """Interrupt the command, or kill it at the second signal; `is_sent`: it got the signal itself."""
        self.count += 1
        if self.target is None:
            return
        if self.count > 1:
            self.target.send(signal.SIGKILL)
            return
        self._kill_at_s = time.monotonic() + _GRACE_S
        if not is_sent:
            self.target.send(number)
