"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.units import duration_ns, size_bytes


@pytest.mark.parametrize(
    ("text", "ns"),
    [("10s", 10**10), ("1.5ms", 1_500_000), ("20us", 20_000), ("20 µs", 20_000), ("7ns", 7),
     ("2m", 120 * 10**9), ("1h", 3600 * 10**9), ("3", 3 * 10**9)],
)  # fmt: skip
def test_a_duration(text: str, ns: int) -> None:
    assert duration_ns(text) == ns


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096),
        ("64K", 65536),
        ("64KiB", 65536),
        ("1.5G", 3 << 29),
        ("100 MB", 100 << 20),
        ("1t", 1 << 40),
    ],
)
def test_a_size(text: str, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "s", "10 parsecs", "-1s", "1e3s", "10KB/s", "0x10", "9" * 400])
def test_nonsense_is_reported(text: str) -> None:
    with pytest.raises(TracepipeError) as caught:
        duration_ns(text)
    assert repr(text) in caught.value.message
    with pytest.raises(TracepipeError):
        size_bytes(text)
