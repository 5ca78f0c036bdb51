"""The processes that are recorded by their number, which are only watched for their end."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Sequence

from tracepipe.errors import TracepipeError


class Processes:
    """A pidfd of each process. Raises TracepipeError where one has already ended."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._opened: dict[int, int] = {}
        for pid in pids:
            try:
                self._opened[pid] = os.pidfd_open(pid)
            except OSError as error:
                self.close()
                if error.errno == errno.ESRCH:
                    raise TracepipeError(f"No such process: {pid}", "Look for it with ps or pgrep.") from None
                raise TracepipeError(f"Process {pid} cannot be recorded: {error.strerror}.") from None

    def have_ended(self) -> bool:
        """Whether there are processes, and all have ended."""
        poller = select.poll()
        for descriptor in self._opened.values():
            poller.register(descriptor, select.POLLIN)
        return bool(self._opened) and len(poller.poll(0)) == len(self._opened)

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._opened.values():
            os.close(descriptor)
        self._opened.clear()
