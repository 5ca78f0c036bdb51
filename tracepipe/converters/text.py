"""Writes the timeline as text, for people and for the tests: every track, and on it every slice in order.

    process vec_add 4242
      thread vec_add 4242
        CUDA API
                 0 +     1234  cuInit  cpu=1 result=0  ←0 →1
               500              an instant

Times are ns since the start of the trace, then the duration; a slice inside another is indented; `→1` starts
the arrow 1 and `←1` is one of its next steps; `→e7` is of the arrow 7 that
events have. The whole timeline is held in memory until the end.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, BinaryIO

from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import FLOW_LIMIT
from tracepipe.event.tables import Args
from tracepipe.layout.timeline import END, INSTANT, Drawn, Item, Track
from tracepipe.printable import json_text, printable


def _args_text(args: Args | None) -> str:
    shown = []
    for key, value in (args or {}).items():
        if value is not None:
            text = value if isinstance(value, str) else json_text(value)
            shown.append(f"{key}={text}")
    return "".join(f" {pair}" for pair in shown)


def _flows_text(flows: tuple[int, ...]) -> str:
    return "".join(f" {'→' if flow < 0 else '←'}{_arrow_text(abs(flow))}" for flow in flows)


def _arrow_text(flow: int) -> str:
    """The number of an arrow, which is an event's where it has an `e`."""
    return f"e{flow & FLOW_LIMIT}" if flow > FLOW_LIMIT else str(flow)


class _Slice:
    """A drawn slice or instant. `end_ns` is None while it is open and for an instant."""

    __slots__ = ("args", "depth", "end_ns", "flows", "instant", "name", "ts_ns")

    def __init__(self, ts_ns: int, depth: int, name: str, args: Args | None, flows: tuple[int, ...]) -> None:
        self.ts_ns, self.depth, self.name, self.flows = ts_ns, depth, name, flows
        self.args = dict(args or {})
        self.end_ns: int | None = None
        self.instant = False


class TextWriter:
    """Keeps all operations, and renders them at the end."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out, self._info = out, info
        self._base_ns = info.start.get("trace_ns", 0)
        self._tracks: dict[int, Track] = {}
        self._items: dict[int, list[Item]] = {}
        self._children: dict[int | None, list[Track]] = {}

    def write(self, drawn: Drawn) -> None:
        """Keep what a batch draws."""
        for track in drawn.declared:
            self._tracks[track.id] = track
            self._items.setdefault(track.id, [])
        for item in drawn.items():
            self._items[item.track.id].append(item)

    def forget(self) -> None:
        """What was kept has no numbers."""

    def finish(self) -> None:
        """Render the tree of tracks, and count what it holds."""
        lines = [f"trace clock {self._info.trace_clock}, start {self._base_ns} ns"]
        counts: Counter[str] = Counter()
        for track in self._tracks.values():
            self._children.setdefault(track.parent.id if track.parent else None, []).append(track)
        for root in self._ordered(None):
            self._render(root, 0, lines, counts)
        total = ", ".join(f"{counts[what]} {what}" for what in ("tracks", "slices", "instants", "counts"))
        lines.append(total)
        self._out.write(("\n".join(lines) + "\n").encode("utf-8", "replace"))

    def _render(self, track: Track, indent: int, lines: list[str], counts: Counter[str]) -> None:
        kind = f"{track.kind} " if track.kind in ("process", "thread") else ""
        unit = f" [{track.unit}]" if track.unit else ""
        lines.append(printable("  " * indent + kind + track.label() + unit))
        ops = sorted(self._items[track.id], key=lambda item: item.ts_ns)
        pad = "  " * (indent + 1)
        if track.kind == "counter":
            counts["tracks"] += 1
            counts["counts"] += len(ops)
            lines += [f"{pad}{op[2] - self._base_ns:>12}  {op[3]}" for op in ops]
        elif ops:
            counts["tracks"] += 1
            for drawn in self._nest(ops):
                counts["instants" if drawn.instant else "slices"] += 1
                lines.append(pad + self._line(drawn))
        for child in self._ordered(track):
            self._render(child, indent + 1, lines, counts)

    def _ordered(self, parent: Track | None) -> list[Track]:
        children = self._children.get(parent.id if parent else None, [])
        return sorted(children, key=lambda track: track.order)

    @staticmethod
    def _nest(ops: list[Item]) -> list[_Slice]:
        """Slices in order of their begin, each with its depth: what the operations mean to a viewer."""
        drawn: list[_Slice] = []
        stack: list[_Slice] = []
        for kind, _, ts_ns, name, args, flows in ops:
            if kind == END:
                ended = stack.pop()
                ended.end_ns = ts_ns
                ended.args |= args or {}
                continue
            one = _Slice(ts_ns, len(stack), name, args, flows)
            drawn.append(one)
            if kind == INSTANT:
                one.instant = True
            else:
                stack.append(one)
        return drawn

    def _line(self, drawn: _Slice) -> str:
        dur = "" if drawn.end_ns is None else f"+{drawn.end_ns - drawn.ts_ns:>9}"
        when: Any = drawn.ts_ns - self._base_ns
        name = "  " * drawn.depth + drawn.name
        line = f"{when:>12} {dur:<10}  {name}{_args_text(drawn.args)}{_flows_text(drawn.flows)}"
        return printable(line)
