"""Totals of what calls did to memory: how much they allocated and copied."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tracepipe.hooks.hook import Probe
from tracepipe.tracer.records.effects import Effects

Words = tuple[int, int, int, int]
_ALLOCATING = ("alloc", "alloc_host")


@dataclass(slots=True)
class Moved:
    """How often an operation was done, and its total size."""

    count: int = 0
    size_bytes: int = 0


class MovedTotals:
    """Adds up the effects of calls. A runtime call and the driver call inside it count once."""

    def __init__(self, value_names: Mapping[str, Mapping[int, str]]) -> None:
        self._names = {name: dict(values) for name, values in value_names.items()}
        self._allocated: dict[str, Moved] = {}
        self._copied: dict[str, Moved] = {}
        self.bytes_of: defaultdict[int, int] = defaultdict(int)
        """Function id → bytes."""
        self.is_partial = False
        """Whether some calls were not examined."""
        self._effects = Effects(self._names)
        self._more: dict[int, tuple[int, Words]] = {}

    def more(self, tid: int, number: int, words: Words) -> None:
        """Take the slots that did not fit into the record of the next entry."""
        self._more[tid] = number, words

    def enter(self, tid: int, number: int, probe: Probe, ts_ns: int, words: Words) -> None:
        """Called when a thread enters a call."""
        of, more = self._more.pop(tid, (-1, (0, 0, 0, 0)))
        self._effects.enter(tid, probe, ts_ns, words + (more if of == number else (0, 0, 0, 0)))

    def leave(self, tid: int, number: int, probe: Probe, ts_ns: int, result: int, out: int) -> None:
        """Called when the call returns."""
        if done := self._effects.leave(tid, probe, ts_ns, result, out):
            self.add(done.name, done.size_bytes or 0, is_copy=done.is_copy, number=number)

    def add(self, name: str, size_bytes: int, *, is_copy: bool, number: int | None) -> None:
        """Add an operation, by a call of function `number` if that is known."""
        if number is not None:
            self.bytes_of[number] += size_bytes
        if not is_copy and name not in _ALLOCATING:
            return
        moved = (self._copied if is_copy else self._allocated).setdefault(name, Moved())
        moved.count += 1
        moved.size_bytes += size_bytes

    def forget(self) -> None:
        """Forget the calls in progress."""
        self.is_partial = True
        self._effects = Effects(self._names)
        self._more.clear()

    def allocated(self) -> dict[str, Moved]:
        """Name of the event → what was allocated."""
        return {name: replace(moved) for name, moved in self._allocated.items()}

    def copied(self) -> dict[str, Moved]:
        """Direction → what was copied."""
        return {name: replace(moved) for name, moved in self._copied.items()}
