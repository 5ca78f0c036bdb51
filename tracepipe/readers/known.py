"""Caches of readers, in limited memory."""

from __future__ import annotations

from typing import Final, TypeVar

_ENTRIES_MAX: Final = 1 << 11
_BYTES_MAX: Final = 1 << 19

K = TypeVar("K")
V = TypeVar("V")


class Known(dict[K, V]):
    """Remembers what was made of a key. It is emptied when it is full."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def keep(self, key: K, value: V, size_bytes: int) -> V:
        """Keep what was made of a key, with the size of its text."""
        self._size_bytes += size_bytes
        if len(self) >= _ENTRIES_MAX or self._size_bytes > _BYTES_MAX:
            self.clear()
            self._size_bytes = size_bytes
        self[key] = value
        return value
