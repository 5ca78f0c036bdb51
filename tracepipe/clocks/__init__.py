"""Source times become trace times here, and nowhere else."""

from __future__ import annotations

from tracepipe.clocks.stamp import Clocks

__all__ = ["Clocks"]
