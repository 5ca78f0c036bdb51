"""Threads of a GPU between their entries and exits, by warp, as timelines draw warps."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Final

from tracepipe.event.columns import Three
from tracepipe.part.stretch import OPEN_NS, Stretch

_ROWS_MAX: Final = 1 << 15
_LANES: Final = 32


@dataclass(slots=True)
class _Warp:
    """The rows of a warp since the entry of its first thread; `inside` of its threads have not exited."""

    begin_ns: int
    inside: int = 0
    rows: list[int] = field(default_factory=list)


class GpuThreads:
    """Takes entries and exits, sorted by time. When the rows of too many warps wait, each further row is
    chosen by its own time.
    """

    def __init__(self, stretch: Stretch) -> None:
        self._stretch = stretch
        self._warps: dict[Hashable, _Warp] = {}
        self._held = 0

    def take(self, of: Hashable, thread: Three | None, *, enters: bool, ts_ns: int, row: int) -> list[int]:
        """Take a row of a thread of the block `of`. Once all threads of a warp have exited, return the warp's
        rows if the part has them.
        """
        x, y, z = thread or (0, 0, 0)
        key = (of, x // _LANES, y, z)
        warp = self._warps.get(key)
        if self._held >= _ROWS_MAX or (warp is None and not enters):
            return [row] if self._stretch.holds(ts_ns) else []
        if warp is None:
            warp = self._warps[key] = _Warp(ts_ns)
        warp.rows.append(row)
        self._held += 1
        warp.inside += 1 if enters else -1
        if warp.inside > 0:
            return []
        self._held -= len(self._warps.pop(key).rows)
        return self._rows(warp, ts_ns + 1)  # an exit may be drawn as an instant too

    def still_inside(self) -> list[int]:
        """The rows of warps with threads that have not exited, if the part has them."""
        return [row for warp in self._warps.values() for row in self._rows(warp, OPEN_NS)]

    def _rows(self, warp: _Warp, end_ns: int) -> list[int]:
        is_in = self._stretch.touches(warp.begin_ns, end_ns)
        return warp.rows if is_in else []
