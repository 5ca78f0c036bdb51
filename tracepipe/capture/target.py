"""The traced process: forked, held before its exec until the probes are attached, and waited for."""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tracepipe.errors import TracepipeError


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: `exit 0`, `signal 11 (SIGSEGV)`; and the exit code that a shell would show."""

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
    ) -> None:
        """Fork it. `mask` is the signal mask that the command shall start with, `environment` what it finds
        in its environment beside ours.
        """
        go_read, self._go = os.pipe()
        self._failure, failure_write = os.pipe()  # closed by a successful exec, as all of Python's pipes are
        self._ending: Ending | None = None
        self._command = command
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._go)
            _become(program, command, mask, environment or {}, go_read, failure_write)
        os.close(go_read)
        os.close(failure_write)

    def release(self) -> None:
        """Let it exec, and wait until it has. Raises TracepipeError if the exec failed."""
        os.write(self._go, b"x")
        os.close(self._go)
        self._go = -1
        failure = os.read(self._failure, 16)
        if failure:
            self.wait()
            reason = os.strerror(int(failure))
            raise TracepipeError(
                f"{self._command[0]} cannot be executed: {reason}.",
                "Is it a program for this machine, readable and executable by the user that it runs as?",
            )

    def poll(self) -> Ending | None:
        """How it ended, None while it runs."""
        if self._ending is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._ending = _ending(status)
        return self._ending

    def wait(self) -> Ending:
        """Wait for its end."""
        if self._ending is None:
            self._ending = _ending(os.waitpid(self.pid, 0)[1])
        return self._ending

    def send(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """End it if it still runs, and give its pipes back."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        for descriptor in (self._go, self._failure):
            if descriptor >= 0:
                os.close(descriptor)
        self._go = self._failure = -1


def _ending(status: int) -> Ending:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            name = signal.Signals(number).name
        except ValueError:  # a real-time signal
            name = f"SIGRTMIN+{number - signal.SIGRTMIN}"
        return Ending(f"signal {number} ({name})", 128 + number)
    return Ending(f"exit {os.WEXITSTATUS(status)}", os.WEXITSTATUS(status))


def _become(
    program: str,
    command: list[str],
    mask: set[signal.Signals],
    environment: Mapping[str, str],
    go: int,
    failure: int,
) -> None:
    """In the child: wait for the release, then turn into the command. Never returns."""
    try:
        if os.read(go, 1):
            # Python ignores these two, and an exec keeps that; the command shall start as from a shell.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            caller = _drop_to_caller()
            os.execve(program, command, {**os.environ, **caller, **environment})
    except OSError as error:
        os.write(failure, str(error.errno).encode())
    except KeyError:  # SUDO_UID of no user
        os.write(failure, b"1")
    finally:
        os._exit(127)


def _drop_to_caller() -> dict[str, str]:
    """Under sudo, become the user who called it, with that user's groups; what its environment says of root
    is said of that user.
    """
    if os.geteuid() != 0 or not {"SUDO_UID", "SUDO_GID"} <= os.environ.keys():
        return {}
    uid, gid = int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"])
    if uid == 0:
        return {}
    root, caller = _names(0), _names(uid)
    os.initgroups(caller["USER"], gid)
    os.setgid(gid)
    os.setuid(uid)
    # With -E sudo leaves the caller's own, which need not be those of the user database.
    return {name: caller[name] for name in caller if os.environ.get(name) == root[name]}


def _names(uid: int) -> dict[str, str]:
    """What a login puts into a user's environment."""
    user = pwd.getpwuid(uid)
    return {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
