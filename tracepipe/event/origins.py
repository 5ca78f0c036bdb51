"""Where what is drawn comes from, when it is several recordings that are read as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tracepipe.event.model import ID_LIMIT

FILE: Final = "file"
"""What a loss, a window or a problem has in its arguments to say which recording it is of."""
IDS_APART: Final = 10_000_000
"""Processes and threads of each further host have so much more: ids of Linux are below 4,194,304."""
HOSTS_MAX: Final = 100
MADE_UP: Final = ID_LIMIT // 2
"""Ids that a reader made up, for what has none, stand at the upper end."""


def id_on(host: int, id: int, made_up_apart: int = 0) -> int:
    """What the id of a process or thread becomes on the host of that number. Ids that were made up are
    `made_up_apart` lower: they mean something in one capture alone.
    """
    return id + host * IDS_APART if id < MADE_UP else id - host * IDS_APART - made_up_apart


@dataclass(frozen=True, slots=True)
class Origins:
    """`count` recordings. `programs` are the programs of processes, by pid; `hosts` say of each host what
    follows the name of a process where there are several: its pid is in the range of one; `gpus` are the
    titles of GPUs by their index. `files` are the names of the recordings, and `doubles` those two, by their
    places, that may have the same events.
    """

    count: int = 1
    programs: Mapping[int, str] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    gpus: Mapping[int, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    doubles: frozenset[tuple[int, int]] = frozenset()

    def alone(self, file: str) -> Origins:
        """The same for one of the recordings, which is drawn without the others."""
        return replace(self, count=1, files=(file,), doubles=frozenset())

    def host(self, pid: int | None) -> str:
        """What follows the name of a process: its host, where there are several."""
        id = pid or 0
        at = (id if id < MADE_UP else ID_LIMIT - id) // IDS_APART
        return f" {self.hosts[at]}" if at < len(self.hosts) else ""
