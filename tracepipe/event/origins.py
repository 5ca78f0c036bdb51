"""Which recording things come from when several recordings are read as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tracepipe.event.model import ID_LIMIT

FILE: Final = "file"
"""The argument of a loss, a window or a problem that names its recording."""
IDS_APART: Final = 10_000_000
"""This is added to the ids of processes and threads for each further host. Ids of Linux are below
4,194,304."""
HOSTS_MAX: Final = 100
MADE_UP: Final = ID_LIMIT // 2
"""Ids that a reader made up, for what has none, are above this."""


def id_on(host: int, id: int, made_up_apart: int = 0) -> int:
    """The id of a process or thread on the host of that number. Ids that were made up are `made_up_apart`
    lower, as they mean nothing outside of their capture.
    """
    return id + host * IDS_APART if id < MADE_UP else id - host * IDS_APART - made_up_apart


@dataclass(frozen=True, slots=True)
class Origins:
    """The origins of `count` recordings. `programs` are the programs of processes, by pid, and `ranks` the
    ranks of those of a distributed run, where several are read. `hosts` has for
    each host the text that follows the names of its processes, where there are several hosts: a pid's range
    is its host. `gpus` are the titles of GPUs by index. `files` are the names of the recordings, and
    `doubles` the pairs of them, by their places, that may have the same events.
    """

    count: int = 1
    programs: Mapping[int, str] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    gpus: Mapping[int, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    doubles: frozenset[tuple[int, int]] = frozenset()

    def alone(self, file: str) -> Origins:
        """The origins of one of the recordings that is drawn without the others."""
        return replace(self, count=1, files=(file,), doubles=frozenset())

    def host(self, pid: int | None) -> str:
        """The text that follows the name of a process: its host, where there are several."""
        id = pid or 0
        at = (id if id < MADE_UP else ID_LIMIT - id) // IDS_APART
        return f" {self.hosts[at]}" if at < len(self.hosts) else ""

    def process(self, name: str, pid: int | None) -> str:
        """The name of a process with its rank and its host."""
        return self._rank(pid) + name + self.host(pid)

    def plain(self, name: str, pid: int | None) -> str:
        """The name that `process` was given."""
        return name.removeprefix(self._rank(pid)).removesuffix(self.host(pid))

    def _rank(self, pid: int | None) -> str:
        rank = self.ranks.get(pid or 0)
        return "" if rank is None else f"rank {rank}: "
