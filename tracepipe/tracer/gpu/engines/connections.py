"""The processes that write into a channel: each connects to a socket, gets the memory and stays connected.

    process                                        capture process
    connect ─────────────────────────────────────▶ accept: may its user connect?
            ◀───────────────────────────────────── one byte, with the memory's descriptor
      …  records go through the memory  …
            ◀───────────────────────────────────── end of the stream: record no more
    the last records, then closed ───────────────▶ end of the stream: it is done

When a process dies, for any reason, the kernel closes its end, so each side sees the other's death as an end
of file. The socket is abstract: it has no path that another user could take, and nothing has to be removed.
"""

from __future__ import annotations

import secrets
import socket
import struct
from contextlib import suppress
from typing import Final

from tracepipe.errors import CaptureUnavailable

CONNECTIONS_MAX: Final = 512
"""Processes at a time; each takes a file descriptor here."""
_PEER: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid


class Connections:
    """The listening socket and the connected processes. `users` and root may connect."""

    def __init__(self, memory: int, users: set[int]) -> None:
        """`memory` is the descriptor that each process gets. Raises CaptureUnavailable."""
        self._memory, self._users = memory, users | {0}
        self.name = f"tracepipe-gpu-{secrets.token_hex(16)}"
        self._open: list[socket.socket] = []
        try:
            self._listener: socket.socket | None = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
            )
            self._listener.bind(f"\0{self.name}")
            self._listener.listen(CONNECTIONS_MAX)
        except OSError as error:
            raise CaptureUnavailable(
                f"The GPU channel's socket cannot be created: {error}.",
                "Check that there are free file descriptors (ulimit -n).",
            ) from None

    def accept(self) -> None:
        """Accept waiting processes; never waits."""
        while self._listener is not None:
            try:
                process, _ = self._listener.accept()
            except OSError:  # no process waits, or no descriptor is free
                return
            if not self._connect(process):
                process.close()

    def stop(self) -> None:
        """Accept no more processes, and ask the connected ones to record no more."""
        self.accept()  # a process that is about to begin is answered, and stops at once
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for process in self._open:
            with suppress(OSError):
                process.shutdown(socket.SHUT_WR)

    def are_over(self) -> bool:
        """Whether every process has disconnected or ended."""
        self._open = [process for process in self._open if not _is_over(process)]
        return not self._open

    def close(self) -> None:
        """Close all connections: to processes that still record, it looks as if this one had ended."""
        self.stop()
        for process in self._open:
            process.close()
        self._open = []

    def _connect(self, process: socket.socket) -> bool:
        """Send a process the memory's descriptor. False if it may not have it, or has ended."""
        if len(self._open) >= CONNECTIONS_MAX:
            self.are_over()
        if len(self._open) >= CONNECTIONS_MAX:
            return False
        try:
            _, user, _ = _PEER.unpack(process.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if user not in self._users:
                return False
            process.setblocking(False)
            socket.send_fds(process, [b"\1"], [self._memory])
        except OSError:
            return False
        self._open.append(process)
        return True


def _is_over(process: socket.socket) -> bool:
    """Whether a process has closed its end. Anything that it sends is ignored."""
    try:
        over = not process.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        over = True
    if over:
        process.close()
    return over
