"""The names of kernels by their handles, for each process; a forked process inherits its parent's."""

from __future__ import annotations

_DEEPEST = 64  # how many generations of forks are followed


class KernelNames:
    """The names of the handles of a recording."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self._named: set[int] = set()
        self._parents: dict[int, int] = {}
        self._process_of: dict[int, int] = {}

    def put(self, tgid: int, handle: int, name: str) -> None:
        """Set the name of a handle in a process."""
        self._names[tgid, handle] = name
        self._named.add(tgid)

    def get(self, tgid: int, handle: int) -> str:
        """The name of a handle; "" if it has none."""
        for _ in range(_DEEPEST):
            if (tgid, handle) in self._names:
                return self._names[tgid, handle]
            if tgid not in self._parents:
                return ""
            tgid = self._parents[tgid]
        return ""

    def meet(self, tid: int, tgid: int, creator_tid: int = 0) -> None:
        """Note a thread of a process, and the thread that created it if it is known."""
        self._process_of[tid] = tgid
        parent = self._process_of.get(creator_tid, creator_tid)
        if creator_tid and parent != tgid and (parent in self._named or parent in self._parents):
            self._parents[tgid] = parent

    def forget(self, tid: int) -> None:
        """Forget a thread that has ended."""
        self._process_of.pop(tid, None)
