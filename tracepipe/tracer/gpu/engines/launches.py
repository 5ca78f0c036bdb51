"""Matches a process's launches with kernels, to count those without one after another profiler takes CUPTI.

A launch's call and its kernels come in any order, and the calls of both APIs have the launch's number. A
launch into a stream that is being captured has no kernel, and neither has a call that failed.
"""

from __future__ import annotations

import re
from typing import Final

KEPT_MAX: Final = 1 << 16
"""The number of launches, and of kernels, that are remembered; the oldest are forgotten first."""
_LAUNCHES: Final = re.compile(r"(?:cu|cuda)(?:Graph)?Launch(?!HostFunc)")
_BEGINS_CAPTURE: Final = re.compile(r"(?:cu|cuda)StreamBeginCapture")
_ENDS_CAPTURE: Final = re.compile(r"(?:cu|cuda)StreamEndCapture")


class Launches:
    """Launches and kernels by the number that they share."""

    __slots__ = ("_capturing", "_ran", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, None] = {}
        self._ran: dict[int, None] = {}
        self._capturing = 0

    def call(self, name: str, correlation: int, *, failed: bool) -> None:
        """A call of the process has returned."""
        if failed:
            return
        if _LAUNCHES.match(name):
            if correlation not in self._ran and not self._capturing:
                _keep(self._waiting, correlation)
        elif _BEGINS_CAPTURE.match(name):
            self._capturing += name.startswith("cuS")  # the runtime's calls have the driver's in them
        elif _ENDS_CAPTURE.match(name):
            self._capturing = max(0, self._capturing - name.startswith("cuS"))

    def kernel(self, correlation: int) -> None:
        """A kernel that a launch with this number started."""
        self._waiting.pop(correlation, None)
        _keep(self._ran, correlation)

    def take_waiting(self) -> int:
        """Return the number of launches without a kernel, and forget them."""
        count = len(self._waiting)
        self._waiting.clear()
        return count


def _keep(numbers: dict[int, None], number: int) -> None:
    if len(numbers) >= KEPT_MAX:
        del numbers[next(iter(numbers))]
    numbers[number] = None
