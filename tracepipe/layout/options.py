"""What a user may choose about the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WARP_TRACKS: Final = ("auto", "slot", "logical", "sm", "off")


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """`warp_tracks`: a track for each hardware slot, for each warp of the grid, a count for each SM, or none;
    auto is slot where the recording knows the slots and logical where not. `thread_exits` draws each exit of
    a warp's threads as an instant.
    """

    warp_tracks: str = "auto"
    thread_exits: bool = False
