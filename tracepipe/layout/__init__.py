"""Decides tracks, names, nesting and flows. The entry is `draw.Layout`; a user may choose its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WARP_TRACKS: Final = ("auto", "slot", "logical", "sm", "off")


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """The options. `warp_tracks` is a track for each hardware slot (slot), for each warp of the grid
    (logical), a count for each SM (sm), or none (off). auto is slot where the recording has slots, else
    logical. `thread_exits` draws each exit of a warp's threads as an instant.
    """

    warp_tracks: str = "auto"
    thread_exits: bool = False
