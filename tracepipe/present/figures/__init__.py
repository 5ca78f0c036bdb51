"""Figures: pictures of a recording. A file here and a line in `FIGURES` make a figure.

matplotlib draws them on its own canvas, without a display. Numerous items are binned, so the number of items
in a picture does not grow with the recording.
"""

from __future__ import annotations

from collections.abc import Callable

from tracepipe.present.figures import exit_skew, gpu_idle, latency, occupancy
from tracepipe.present.figures.panel import Panel, Scope

__all__ = ["FIGURES"]

FIGURES: dict[str, tuple[str, Callable[[Scope], list[Panel]]]] = {
    "heatmap": ("Warps on the SMs over time", occupancy.panels),
    "skew": ("When the warps of a kernel exit", exit_skew.panels),
    "latency": ("How long calls take", latency.panels),
    "gaps": ("When GPUs are idle", gpu_idle.panels),
}
"""Name on the command line → heading, and the function that returns the panels of a scope."""
