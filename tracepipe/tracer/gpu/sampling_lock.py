"""Locks a GPU's hardware sampler, which serves one capture at a time on the whole machine.

PC sampling and PM sampling share the GPU's hardware. The driver does not refuse the second one in every
order: PC sampling that starts after PM sampling breaks the program that it is in.

    lock name     \\0tracepipe-gpu-sampling-UUID: an abstract socket of this network namespace
    held          while the socket listens; the kernel closes it when its process ends, however that ends
    holder        the process that the kernel reports to whoever connects: it cannot be forged

Any user can take the lock, and nothing has to be removed. Processes in other network namespaces are not seen.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.printable import printable
from tracepipe.tracer.gpu.engines.channel import peer_of

_PREFIX: Final = "tracepipe-gpu-sampling-"
_COMMAND_LENGTH: Final = 80
_COMMAND_BYTES: Final = 4096
_ASKING_MAX: Final = 1024  # connections stay in the queue, as nobody accepts them


class SamplingLock(ExitStack):
    """The right to sample some GPUs, until `close` or the end of this process. It is a context manager."""

    def __init__(self, uuids: Iterable[str]) -> None:
        """Lock all GPUs of these UUIDs, or none. Raises CaptureUnavailable, which names a holder."""
        super().__init__()
        with ExitStack() as locks:
            for uuid in sorted({uuid.lower() for uuid in uuids}):
                # Not inherited by a command.
                lock = locks.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                try:
                    lock.bind(f"\0{_PREFIX}{uuid}")
                    lock.listen(_ASKING_MAX)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:
                        raise CaptureUnavailable(
                            f"{uuid} cannot be locked: {error.strerror}.",
                            "Check that there are free file descriptors (ulimit -n).",
                        ) from None
                    raise CaptureUnavailable(
                        f"{uuid} is being sampled by {_holder(uuid)}: "
                        "a GPU's hardware serves one sampler at a time.",
                        "Wait until it has ended, or end it.",
                    ) from None
            self.push(locks.pop_all())


def _holder(uuid: str) -> str:
    """The holder of a lock, as text for a message."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect(f"\0{_PREFIX}{uuid}")
            pid, _, _ = peer_of(asking)
        except OSError:  # the holder has just ended, or its queue is full
            return "another process"
    if pid <= 0:
        return "a process of another container"
    try:
        with Path(f"/proc/{pid}/cmdline").open("rb") as file:  # as long as that process likes
            command = file.read(_COMMAND_BYTES).replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # /proc may hide other users' processes
        return f"process {pid}"
    shown = printable(command.strip()[:_COMMAND_LENGTH])
    return f"process {pid} ({shown})" if shown else f"process {pid}"
