"""Mappings of a limited size, from which the oldest entries leave first.

They are of OrderedDict: the first key of a dict is found by a scan over all entries that were deleted before
it, which takes some 50 µs where 65,536 entries are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def put_bounded(entries: OrderedDict[Key, Value], key: Key, value: Value, most: int) -> None:
    """Add an entry, in place of the oldest one if there are `most`."""
    if len(entries) >= most and key not in entries:
        entries.popitem(last=False)
    entries[key] = value
