"""Writes the timeline as text, for people and for the tests: every track, and on it every slice in order.

    process vec_add 4242
      thread vec_add 4242
        CUDA API
                 0 +     1234  cuInit  cpu=1 result=0  ←0 →1
               500              an instant

A line has the time in ns since the start of the trace, then the duration. A slice inside another is indented.
`→1` starts the flow 1 and `←1` is one of its next steps; `→e7` belongs to the flow 7 that events have. Tracks
are written when all of them are known.
"""

from __future__ import annotations

from collections import Counter
from typing import BinaryIO

from tracepipe.converters.kept_items import KeptItem, KeptItems, Texts
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import FLOW_LIMIT
from tracepipe.layout.timeline import Drawn, Track
from tracepipe.printable import printable
from tracepipe.units import counted

_TOTALS = {
    "tracks": "track|tracks",
    "slices": "slice|slices",
    "instants": "instant|instants",
    "counts": "count|counts",
}


def _args_text(args: Texts) -> str:
    return "".join(f" {key}={text}" for key, text in args.items() if text is not None)


def _flows_text(flows: tuple[int, ...]) -> str:
    return "".join(f" {'→' if flow < 0 else '←'}{_flow_text(abs(flow))}" for flow in flows)


def _flow_text(flow: int) -> str:
    """The number of a flow, with an `e` where events have it."""
    return f"e{flow & FLOW_LIMIT}" if flow > FLOW_LIMIT else str(flow)


class TextWriter:
    """Keeps all operations in a temporary file, and renders them at the end."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._tracks: dict[int, Track] = {}
        self._items = KeptItems()
        self._children: dict[int | None, list[Track]] = {}
        self._counts: Counter[str] = Counter()

    def write(self, drawn: Drawn) -> None:
        """Keep what a batch draws."""
        self._tracks.update((track.id, track) for track in drawn.declared)
        self._items.add(drawn.items())

    def forget(self) -> None:
        """Do nothing: what was kept has no numbers."""

    def finish(self) -> None:
        """Write the tree of tracks, and the counts of what is in it."""
        self._put(f"trace clock {self._info.trace_clock}, start {self._base_ns} ns")
        for track in self._tracks.values():
            self._children.setdefault(track.parent.id if track.parent else None, []).append(track)
        self._items.sort()
        for root in self._ordered(None):
            self._render(root, 0)
        self._put(", ".join(counted(self._counts[what], words) for what, words in _TOTALS.items()))

    def _put(self, line: str) -> None:
        self._out.write(line.encode("utf-8", "replace") + b"\n")

    def _render(self, track: Track, indent: int) -> None:
        kind = f"{track.kind} " if track.kind in ("process", "thread") else ""
        unit = f" [{track.unit}]" if track.unit else ""
        self._put(printable("  " * indent + kind + track.label() + unit))
        pad, is_counter, is_empty = "  " * (indent + 1), track.kind == "counter", True
        for item in self._items.of(track.id):
            is_empty = False
            if is_counter:
                self._counts["counts"] += 1
                self._put(f"{pad}{item.ts_ns - self._base_ns:>12}  {item.name}")
            else:
                self._counts["slices" if item.is_slice else "instants"] += 1
                self._put(pad + self._line(item))
        self._counts["tracks"] += is_counter or not is_empty
        for child in self._ordered(track):
            self._render(child, indent + 1)

    def _ordered(self, parent: Track | None) -> list[Track]:
        children = self._children.get(parent.id if parent else None, [])
        return sorted(children, key=lambda track: track.order)

    def _line(self, item: KeptItem) -> str:
        dur = "" if item.end_ns is None else f"+{item.end_ns - item.ts_ns:>9}"
        when = item.ts_ns - self._base_ns
        name = "  " * item.depth + item.name
        line = f"{when:>12} {dur:<10}  {name}{_args_text(item.args)}{_flows_text(item.flows)}"
        return printable(line)
