"""Turns source times into trace times. Nothing else does."""

from __future__ import annotations

from tracepipe.clocks.stamp import Clocks

__all__ = ["Clocks"]
