"""What did not go as it should when begins met ends."""

from __future__ import annotations

from dataclasses import dataclass


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
