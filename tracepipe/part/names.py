"""What threads and processes of a recording are called at its end, for those that are in a part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tracepipe.event.model import Record
from tracepipe.event.shape import Shape

THREADS_MAX: Final = 1 << 14
Thread = tuple[int | None, int | None]


class Names:
    """Takes all shapes of a recording in the order in which they come."""

    def __init__(self) -> None:
        self._names: dict[Thread, str] = {}
        self._others: set[Thread] = set()
        """Threads that have their names by other records, which the part has too."""

    def give(self, record: Record) -> None:
        """Take a record of a name."""
        if "name" in record:
            self._has_other((record["pid"], record.get("tid")))

    def meet(self, shape: Shape) -> None:
        """Take a shape that has a thread's name."""
        thread = shape.pid, shape.tid
        if shape.type == "annotation":  # the program's own, whatever the kernel calls it
            self._has_other(thread)
        elif shape.comm and (thread in self._names or len(self._names) < THREADS_MAX):
            self._names[thread] = shape.comm

    def _has_other(self, thread: Thread) -> None:
        if len(self._others) < THREADS_MAX:
            self._others.add(thread)

    def records(self, threads: set[Thread]) -> Iterator[Record]:
        """The names of these threads, and those of their processes, which are their main threads'."""
        for pid in sorted({pid for pid, _ in threads if pid is not None}):
            name = self._names.get((pid, pid)) or self._names.get((pid, None))
            if name is not None and (pid, None) not in self._others:
                yield {"type": "name", "pid": pid, "name": name}
        for pid, tid in sorted((pid, tid) for pid, tid in threads if pid is not None and tid is not None):
            name = self._names.get((pid, tid))
            if name is not None and (pid, tid) not in self._others:
                yield {"type": "name", "pid": pid, "tid": tid, "name": name}
