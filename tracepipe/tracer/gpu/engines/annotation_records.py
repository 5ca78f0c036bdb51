"""The byte layout of the annotation library's records, which `native/annotation_records.h` describes."""

from __future__ import annotations

import struct
from typing import Final

KIND_MARK: Final = 56
KIND_PUSH: Final = 57
KIND_POP: Final = 58
KIND_START: Final = 59
KIND_END: Final = 60
KIND_LABEL: Final = 61
EVENT_KINDS: Final = range(KIND_MARK, KIND_LABEL)
KINDS: Final = range(KIND_MARK, KIND_LABEL + 1)

BEGUN: Final = struct.Struct("<3Q8s4IQ")
"""domain, registered text, number, payload, type of that, flags, colour, category, stack; a text follows."""
HAS_COLOR: Final = 1
BEGAN_BEFORE: Final = 2
"""Flags; BEGAN_BEFORE marks a range that was open when its window began."""
ENDED: Final = struct.Struct("<2Q")
"""domain, number"""
LABEL: Final = struct.Struct("<IIQQ")
"""what, 0, domain, number; a text follows."""
LABEL_DOMAIN: Final = 1
LABEL_TEXT: Final = 2
LABEL_CATEGORY: Final = 3
LABEL_THREAD: Final = 4
LABEL_FORK: Final = 5
LABEL_STACK: Final = 6
DEPTH_UNKNOWN: Final = (1 << 64) - 1
PAYLOADS: Final = {
    1: struct.Struct("<Q"),
    2: struct.Struct("<q"),
    3: struct.Struct("<d"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
}
"""Type of a payload → its format."""
