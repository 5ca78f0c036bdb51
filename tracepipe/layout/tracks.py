"""A track: a row of the timeline, or a group of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrackKind = Literal["process", "thread", "group", "slices", "counter"]
# The distance of ranks in a viewer's order: the overlap tracks of a track come between it and the next.
_RANKS_APART = 1 << 8


@dataclass(frozen=True, slots=True)
class Track:
    """A track. `rank` orders siblings, smallest first. An overlap track has its track's rank, and a number
    from 1 on in `overlap`. `pid` and `tid` are 0 where they are not known. A track with a new name is a new
    object with the same `id`. Its children may still have the object with the old name as their parent.
    """

    id: int
    parent: Track | None
    kind: TrackKind
    name: str
    rank: int = 0
    category: str = ""
    pid: int = 0
    tid: int = 0
    unit: str = ""
    overlap: int = 0

    @property
    def order(self) -> int:
        """The place among siblings, as one number."""
        return self.rank * _RANKS_APART + self.overlap

    def label(self) -> str:
        """The name with the id of the process or thread, as a person sees it."""
        number = {"process": self.pid, "thread": self.tid}.get(self.kind, 0)
        return f"{self.name} {number}" if number else self.name
