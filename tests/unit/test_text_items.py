"""What tracks draw, kept in a temporary file until all of it is known."""

from __future__ import annotations

import pytest

from tracepipe.converters.text import StoredItem, StoredItems
from tracepipe.errors import OutputError
from tracepipe.event.ops import BEGIN, COUNTER, END, INSTANT
from tracepipe.layout.timeline import Item, Track

TRACK, OTHER = Track(1, None, "slices", "a"), Track(2, None, "counter", "b")


def test_items_come_by_track_and_time_with_their_ends() -> None:
    kept = StoredItems()
    f = Item(BEGIN, TRACK, 10, "f", {"x": 1, "y": 0, "gone": None}, (-3,))
    kept.add([f, Item(END, TRACK, 90, "f", {"y": [2]})])
    kept.add([Item(BEGIN, TRACK, 20, "g"), Item(INSTANT, TRACK, 20, "\ud800"), Item(END, TRACK, 30, "g")])
    kept.add([Item(COUNTER, OTHER, 5, 2.5), Item(BEGIN, TRACK, 95, "open")])
    kept.sort()
    assert [*kept.items_of(1)] == [
        StoredItem(True, 10, 0, "f", {"x": "1", "y": "[2]", "gone": None}, (-3,), 90),
        StoredItem(True, 20, 1, "g", {}, (), 30),
        StoredItem(False, 20, 2, "\ud800", {}, (), None),
        StoredItem(True, 95, 0, "open", {}, (), None),
    ]
    assert [*kept.items_of(2)] == [StoredItem(False, 5, 0, "2.5", {}, (), None)]


def test_a_file_without_room_is_an_error() -> None:
    kept = StoredItems()
    kept._database.execute("PRAGMA max_page_count = 8")
    with pytest.raises(OutputError, match="cannot be kept in a temporary file: database or disk is full"):
        kept.add(Item(INSTANT, TRACK, at, "x" * 1000) for at in range(1000))
