"""How often records are collected: as rarely as the size of the ring allows."""

from __future__ import annotations

from typing import Final

SHORT_S: Final = 0.002
"""At 1.3 million events a second, 170 kB arrive in this time."""
_LONG_S: Final = 0.016  # at low rates: each look at the ring takes a processor at least 20 µs
_LONG_RING_BYTES: Final = 1 << 24  # a smaller ring is looked at more often
_LITTLE: Final = 64  # a tick with less than this fraction of the ring is a quiet one


class Tick:
    """The time between two looks at the ring: it grows while few records arrive, and is short again when many
    do. `wait_s` is the time until the next look.
    """

    def __init__(self, ring_bytes: int, *, is_short: bool) -> None:
        """`is_short`: keep the time short at any rate."""
        self.wait_s = SHORT_S
        self._ring_bytes = ring_bytes
        self.longest_s = max(SHORT_S, _LONG_S * min(ring_bytes / _LONG_RING_BYTES, 1))
        if is_short:
            self.longest_s = SHORT_S

    def took(self, size_bytes: int) -> None:
        """Adapt `wait_s` to the bytes that the last look found."""
        is_little = size_bytes * _LITTLE <= self._ring_bytes
        self.wait_s = min(2 * self.wait_s, self.longest_s) if is_little else SHORT_S
