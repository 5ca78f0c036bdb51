"""A track: a row of the timeline, or a group of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TrackKind = Literal["process", "thread", "group", "slices", "counter"]
# Ranks in a viewer's order are so far apart: between two is room for the extra tracks of the first.
_RANKS_APART = 1 << 8


@dataclass(frozen=True, slots=True)
class Track:
    """`rank` orders siblings, smallest first; an extra track has its track's rank, and `beside` counts those.
    `pid` and `tid` are 0 where unknown. A track with a new name is another object with the same `id`, whose
    children may still have the one with the old name as their parent.
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
    beside: int = 0

    @property
    def order(self) -> int:
        """One number for the place among siblings."""
        return self.rank * _RANKS_APART + self.beside

    def label(self) -> str:
        """The name a person sees, with the id that tells it from its namesakes."""
        number = {"process": self.pid, "thread": self.tid}.get(self.kind, 0)
        return f"{self.name} {number}" if number else self.name
