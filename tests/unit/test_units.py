"""Durations and sizes as people write them."""

from __future__ import annotations

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.units import agree, counted, duration_ns, size_bytes


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


def test_words_agree_with_a_count() -> None:
    text = "row|rows is|are not read"
    assert [counted(count, text) for count in (0, 1, 2)] == [
        "0 rows are not read",
        "1 row is not read",
        "2 rows are not read",
    ]
    assert [agree(count, "drawn as an_instant|instants: no_begin") for count in (1, 2)] == [
        "drawn as an instant: no_begin",
        "drawn as instants: no_begin",
    ]
