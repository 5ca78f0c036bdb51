"""What did not go as it should: when begins met ends, and what was lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from tracepipe.event.model import Record

# So many layers have sums of losses of their own. There are ten; what a file says is any text.
_LAYERS_MAX: Final = 100


@dataclass(slots=True)
class Outcomes:
    """What did not go as it should, counted; each is also marked on its slice."""

    unclosed: int = 0
    """B without E: drawn to the end, or to where its caller ended."""
    no_begin: int = 0
    """E without B and without a duration: drawn as an instant."""
    overlaps: int = 0
    """Slices that do not nest with those of their row, or too deep: on an extra row beside it."""
    undrawn: int = 0
    """Slices that too many others overlap: not drawn."""
    causality: int = 0
    """Kernels and warps that start before their launch call, by more than the clocks' bound."""
    beyond: int = 0
    """Events of threads, streams, GPUs or warps for which there are too many tracks: not drawn."""


def count_loss(losses: Counter[str], loss: Record) -> None:
    """Add a loss to those of its layer: events that were made and not recorded."""
    layer = loss.get("layer", "unknown layer")
    has_room = layer in losses or len(losses) < _LAYERS_MAX
    losses[layer if has_room else "other layers"] += loss["count"]
