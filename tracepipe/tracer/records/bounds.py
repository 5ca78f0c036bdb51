"""The greatest values that an event file accepts, which bound what a traced process may claim."""

from __future__ import annotations

from tracepipe.event.model import (
    COLUMN_LIMIT,
    COUNT_LIMIT,
    ID_LIMIT,
    INDEX_LIMIT,
    MASK_LIMIT,
    NAME_BYTES_MAX,
    OFFSET_LIMIT_NS,
    RANGE_LIMIT,
    SLOT_LIMIT,
    SM_LIMIT,
    TIME_LIMIT_NS,
)

__all__ = [
    "COLUMN_LIMIT",
    "COUNT_LIMIT",
    "ID_LIMIT",
    "INDEX_LIMIT",
    "MASK_LIMIT",
    "NAME_BYTES_MAX",
    "OFFSET_LIMIT_NS",
    "RANGE_LIMIT",
    "SLOT_LIMIT",
    "SM_LIMIT",
    "TIME_LIMIT_NS",
]
