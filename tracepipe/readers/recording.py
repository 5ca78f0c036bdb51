"""What a reader is, and what it gives: the seam between input formats and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import BinaryIO

from tracepipe.model import Batch, Header


@dataclass(slots=True)
class Recording:
    """An opened input: its header, made up from what the format tells where it has none, and its batches."""

    header: Header
    batches: Iterable[Batch]


@dataclass(frozen=True, slots=True)
class InputFormat:
    """An input format. `sniff` sees the first 64 KiB of the decompressed input; `read` the whole stream."""

    name: str
    title: str
    sniff: Callable[[bytes], bool]
    read: Callable[[BinaryIO], Recording]
