"""Mappings of a limited size."""

from __future__ import annotations

from collections import OrderedDict

from tracepipe.event.bounded import put_bounded


def test_the_oldest_entries_leave_first() -> None:
    entries = OrderedDict[int, str]()
    for key in range(5):
        put_bounded(entries, key, str(key), 3)
    assert entries == OrderedDict({2: "2", 3: "3", 4: "4"})


def test_an_entry_that_is_there_is_replaced_and_no_other_leaves() -> None:
    entries = OrderedDict({1: "a", 2: "b"})
    put_bounded(entries, 1, "c", 2)
    assert list(entries.items()) == [(1, "c"), (2, "b")]
