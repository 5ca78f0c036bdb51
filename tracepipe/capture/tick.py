"""How often what was recorded is collected: as seldom as the ring allows."""

from __future__ import annotations

from typing import Final

SHORT_S: Final = 0.002
"""Seconds: at 1.3 million events a second, 170 kB."""
_LONG_S: Final = 0.016  # where little comes: to look takes a processor 20 µs or more
_LONG_RING_BYTES: Final = 1 << 24  # a smaller ring is looked at more often
_LITTLE: Final = 64  # a part of the ring so small, in a tick


class Tick:
    """Grows while little comes, and is short again when much does. `wait_s`: seconds until the next look."""

    def __init__(self, ring_bytes: int, *, is_short: bool) -> None:
        """`is_short`: always."""
        self.wait_s = SHORT_S
        self._ring_bytes = ring_bytes
        self.longest_s = max(SHORT_S, _LONG_S * min(ring_bytes / _LONG_RING_BYTES, 1))
        if is_short:
            self.longest_s = SHORT_S

    def took(self, size_bytes: int) -> None:
        """So much had come."""
        is_little = size_bytes * _LITTLE <= self._ring_bytes
        self.wait_s = min(2 * self.wait_s, self.longest_s) if is_little else SHORT_S
