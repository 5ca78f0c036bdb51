"""What calls did to memory, by their records: how much they allocated and copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracepipe.capture.records.effects import Effects
from tracepipe.hooks.hook import Probe

Words = tuple[int, int, int, int]
_ALLOCATING = ("alloc", "alloc_host")


@dataclass(slots=True)
class Moved:
    """How often something was done to memory, and to how many bytes in all."""

    count: int = 0
    size_bytes: int = 0


class MovedTotals:
    """Adds up what calls did, of a runtime's and the driver's inside it once."""

    def __init__(self, value_names: Mapping[str, Mapping[int, str]]) -> None:
        self._names = {name: dict(values) for name, values in value_names.items()}
        self._allocated: dict[str, Moved] = {}
        self._copied: dict[str, Moved] = {}
        self.bytes_of: defaultdict[int, int] = defaultdict(int)
        """By the id of a function."""
        self.is_partial = False
        """Whether some calls were not looked at."""
        self._effects = Effects(self._names)
        self._more: dict[int, tuple[int, Words]] = {}

    def more(self, tid: int, number: int, words: Words) -> None:
        """Take what did not fit into the record of the entry that follows."""
        self._more[tid] = number, words

    def enter(self, tid: int, number: int, probe: Probe, ts_ns: int, words: Words) -> None:
        """A thread enters a call."""
        of, more = self._more.pop(tid, (-1, (0, 0, 0, 0)))
        self._effects.enter(tid, probe, ts_ns, words + (more if of == number else (0, 0, 0, 0)))

    def leave(self, tid: int, number: int, probe: Probe, ts_ns: int, result: int, out: int) -> None:
        """It returns."""
        if done := self._effects.leave(tid, probe, ts_ns, result, out):
            self.add(done.name, done.size_bytes or 0, is_copy=done.is_copy, number=number)

    def add(self, name: str, size_bytes: int, *, is_copy: bool, number: int | None) -> None:
        """Something was done to so many bytes, by a call of function `number` if that is known."""
        if number is not None:
            self.bytes_of[number] += size_bytes
        if not is_copy and name not in _ALLOCATING:
            return
        moved = (self._copied if is_copy else self._allocated).setdefault(name, Moved())
        moved.count += 1
        moved.size_bytes += size_bytes

    def forget(self) -> None:
        """Lose sight of calls in progress."""
        self.is_partial = True
        self._effects = Effects(self._names)
        self._more.clear()

    def allocated(self) -> dict[str, Moved]:
        """What was allocated, by the names of its events."""
        return {name: replace(moved) for name, moved in self._allocated.items()}

    def copied(self) -> dict[str, Moved]:
        """What was copied, by the directions."""
        return {name: replace(moved) for name, moved in self._copied.items()}
