"""Errors that a kernel causes. CUDA reports them at a later call, and then at every call of the context, and
does not say which kernel it was: the first launch that did not end is the one to look at.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from tracepipe.event.bounded import put_bounded

# Results of both APIs that only a kernel causes, from CUDA's cuda.h.
_FAULTS: Final = {
    700: "an illegal memory access",
    702: "a kernel that ran for too long",
    710: "a failed assertion in a kernel",
    714: "an error in the call stack of a kernel",
    715: "an illegal instruction",
    716: "a misaligned address",
    717: "an access to the wrong address space",
    718: "an invalid program counter",
    719: "a failed launch",
}
_PROCESSES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class UnendedLaunch:
    """A launch without an end: its id, its kernel and the line that launched it, "" if they are not known."""

    launch: int
    kernel: str
    place: str

    def __str__(self) -> str:
        kernel = self.kernel or "of a kernel whose name is not known"
        place = f", {self.place}" if self.place else ""
        return f"The first launch without a recorded end is {kernel} (launch {self.launch}{place})."


class Failures:
    """The first such error of each process."""

    def __init__(self) -> None:
        self._errors = OrderedDict[int, str]()
        self._launches = OrderedDict[int, UnendedLaunch]()

    def returned(self, pid: int, call: str, result: int) -> None:
        """Take the result of a call."""
        if result in _FAULTS and pid not in self._errors:
            error = f"CUDA error in process {pid}: {_FAULTS[result]}. {call} returned it first ({result})."
            put_bounded(self._errors, pid, error, _PROCESSES_MAX)

    def left(self, pid: int, launch: UnendedLaunch) -> None:
        """Take the first launch of a process that did not end."""
        if pid not in self._launches:
            put_bounded(self._launches, pid, launch, _PROCESSES_MAX)

    def has_failed(self, pid: int) -> bool:
        return pid in self._errors

    @property
    def texts(self) -> list[str]:
        """Sentences on each error."""
        return [f"{error} {self._launches.get(pid, '')}".rstrip() for pid, error in self._errors.items()]
