"""How often a capture looks for what came."""

from __future__ import annotations

import pytest

from tracepipe.tracer.engines.drain import SHORT_S, Tick

RING = 1 << 24


def test_a_tick_grows_while_little_comes_and_is_short_again_when_much_does() -> None:
    tick, waits_s = Tick(RING, is_short=False), []
    for size_bytes in (0, 0, RING // 64, 0, 0, RING // 64 + 64):
        tick.adapt(size_bytes)
        waits_s.append(tick.wait_s)
    assert waits_s == [0.004, 0.008, 0.016, 0.016, 0.016, SHORT_S]


@pytest.mark.parametrize(
    ("ring_bytes", "longest_s"), [(RING * 4, 0.016), (RING // 4, 0.004), (4096, SHORT_S)]
)
def test_a_smaller_ring_is_looked_at_more_often(ring_bytes: int, longest_s: float) -> None:
    tick = Tick(ring_bytes, is_short=False)
    for _ in range(9):
        tick.adapt(0)
    assert tick.wait_s == longest_s


def test_windows_begin_and_end_within_a_short_tick() -> None:
    tick = Tick(RING, is_short=True)
    tick.adapt(0)
    assert tick.wait_s == SHORT_S
