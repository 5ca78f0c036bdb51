"""Counts of what did not go as it should: begins and ends without each other, overlaps, losses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from tracepipe.event.model import Record

# This many layers have separate sums of losses. There are ten, but a file may name any text.
_LAYERS_MAX: Final = 100


@dataclass(slots=True)
class Outcomes:
    """Counts of what did not go as it should. Each case is also marked on its slice."""

    unclosed: int = 0
    """B without E: drawn to the end of the recording, or to the end of its caller."""
    no_begin: int = 0
    """E without B and without a duration: drawn as an instant."""
    overlaps: int = 0
    """Slices that overlap those of their row, or are nested too deep: on an overlap row."""
    undrawn: int = 0
    """Slices for which there are too many overlap rows: not drawn."""
    causality: int = 0
    """Kernels and warps that start before their launch call, by more than the clocks' bound."""
    beyond: int = 0
    """Events of threads, streams, GPUs or warps for which there are too many tracks: not drawn."""


def count_loss(losses: Counter[str], loss: Record) -> None:
    """Add a loss to those of its layer."""
    layer = loss.get("layer", "unknown layer")
    has_room = layer in losses or len(losses) < _LAYERS_MAX
    losses[layer if has_room else "other layers"] += loss["count"]
