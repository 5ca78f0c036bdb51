"""The last names of a recording's threads and processes, for those that are in a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tracepipe.event.model import Record
from tracepipe.event.shape import Shape

THREADS_MAX: Final = 1 << 14
Thread = tuple[int | None, int | None]


class Names:
    """Takes all shapes of a recording in their order."""

    def __init__(self) -> None:
        self._names: dict[Thread, str] = {}
        self._others: set[Thread] = set()
        """The threads that other records name, which the part has too."""

    def give(self, record: Record) -> None:
        """Take a `name` record."""
        if "name" in record:
            self._has_other((record["pid"], record.get("tid")))

    def add_shape(self, shape: Shape) -> None:
        """Take a shape that has a thread's name."""
        thread = shape.pid, shape.tid
        if shape.type == "annotation":  # a name that the program gave has priority over the kernel's
            self._has_other(thread)
        elif shape.comm and (thread in self._names or len(self._names) < THREADS_MAX):
            self._names[thread] = shape.comm

    def _has_other(self, thread: Thread) -> None:
        if len(self._others) < THREADS_MAX:
            self._others.add(thread)

    def records(self, threads: set[Thread]) -> Iterator[Record]:
        """Yield records for the names of these threads and of their processes, which are those of their main
        threads.
        """
        for pid in sorted({pid for pid, _ in threads if pid is not None}):
            name = self._names.get((pid, pid)) or self._names.get((pid, None))
            if name is not None and (pid, None) not in self._others:
                yield {"type": "name", "pid": pid, "name": name}
        for pid, tid in sorted((pid, tid) for pid, tid in threads if pid is not None and tid is not None):
            name = self._names.get((pid, tid))
            if name is not None and (pid, tid) not in self._others:
                yield {"type": "name", "pid": pid, "tid": tid, "name": name}
