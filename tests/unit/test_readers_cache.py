"""What readers remember begins anew where it holds too much."""

from __future__ import annotations

import pytest

from tracepipe.readers import sorted_rows
from tracepipe.readers.sorted_rows import Cache


@pytest.mark.parametrize("limit", ["_ENTRIES_MAX", "_BYTES_MAX"])
def test_it_holds_a_bounded_number_of_entries_and_bytes(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_rows, limit, 20)
    some = Cache[int, str]()
    size_bytes = 1 if limit == "_ENTRIES_MAX" else 10
    most = 0
    for at in range(200):
        assert some.keep(at, f"{at}", size_bytes) == f"{at}"
        assert some[at] == f"{at}"
        most = max(most, len(some))
    assert most == 20 // size_bytes


def test_an_entry_larger_than_all_is_kept_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_rows, "_BYTES_MAX", 20)
    some = Cache[int, str]()
    some.keep(1, "small", 5)
    some.keep(2, "large", 50)
    assert some == {2: "large"}
