"""What `layout` gives and a converter writes: tracks, and operations on them.

An operation is a tuple `(kind, track, ts_ns, name, args, flows)`. Operations of one track come in an order
in which a stable sort by ts_ns gives correct nesting; those of different tracks in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

DECLARE: Final = 0
"""`track` exists from here on, or has a new name. A track is declared after its parent, before its use."""
BEGIN: Final = 1
END: Final = 2
"""Ends the innermost open slice of the track, which is called `name`; args join those of its begin."""
INSTANT: Final = 3
COUNTER: Final = 4
"""`name` is the counter's new value, an int."""
BEGIN_ONCE: Final = 5
"""A begin whose name will hardly come again, so that a writer does not keep it in a table."""

# Ranks in a viewer's order are so far apart: between two is room for the extra tracks of the first.
_RANKS_APART = 1 << 8

TrackKind = Literal["process", "thread", "group", "slices", "counter"]


@dataclass(slots=True, eq=False)
class Track:
    """A row of the timeline, or a group of rows.

    `rank` orders siblings, smallest first; an extra track has its track's rank, and `beside` counts those.
    `lane` is the writer's packet sequence: one for each thread and GPU. `pid` and `tid` are 0 where unknown.
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
    lane: int = 0
    beside: int = 0
    written: Any = None
    """What the writer keeps of this track."""

    def path(self) -> tuple[str, ...]:
        """Names from the root to this track."""
        return (*self.parent.path(), self.label()) if self.parent else (self.label(),)

    @property
    def order(self) -> int:
        """One number for the place among siblings."""
        return self.rank * _RANKS_APART + self.beside

    def label(self) -> str:
        """The name a person sees, with the id that tells it from its namesakes."""
        number = {"process": self.pid, "thread": self.tid}.get(self.kind, 0)
        return f"{self.name} {number}" if number else self.name


Args = dict[str, Any]
Flows = tuple[int, ...]
"""Arrows through a slice, by their ids: negative where the arrow starts, positive where it goes on."""
Op = tuple[int, Track, int, Any, "Args | None", "Flows | None"]
