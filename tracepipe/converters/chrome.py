"""Writes Chrome's JSON trace, for chrome://tracing, Perfetto and Speedscope.

The format has processes and threads and nothing below them. Each track becomes a "thread" whose name includes
those of its parents, and each group at the top becomes a "process". Times are µs. They count from the trace's
start, as a double can represent nanoseconds of the time since boot, but not since 1970. Source: the "Trace
Event Format" document of the Chromium project.
"""

from __future__ import annotations

from typing import BinaryIO

from tracepipe.converters.chrome_events import ChromeEvents, json_text
from tracepipe.converters.native_chrome_events import NativeChromeEvents
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import Drawn, Track
from tracepipe.native import library

# Ids of groups that are not processes: above all process ids of Linux (at most 2^22).
_NO_PROCESS = 1 << 23
# Times count from an hour before the start. Perfetto drops negative times, but events may come before the
# start: a call may be recorded by its end and length only, and text that several threads printed is not in
# order.
_BEFORE_START_NS = 3_600 * 1_000_000_000


class ChromeWriter:
    """Writes each batch as it comes."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._out = out
        self._base_ns = max(0, info.start.get("trace_ns", 0) - _BEFORE_START_NS)
        other = {"trace_clock": info.trace_clock, "base_ns": self._base_ns, "start": info.start}
        head = {"displayTimeUnit": "ns", "otherData": other}
        self._out.write(json_text(head)[:-1] + b',"traceEvents":[\n')
        core = library()
        self._events = (
            ChromeEvents(out, self._base_ns) if core is None else NativeChromeEvents(core, out, self._base_ns)
        )
        self._tracks: dict[int, Track] = {}
        self._named: dict[int, list[Track]] = {}
        """The tracks whose names include a group's name, by the group's id."""

    def write(self, drawn: Drawn) -> None:
        """Write what a batch draws."""
        for track in drawn.declared:
            for line in self._declare(track):
                self._events.line(line)
        if len(drawn.order):
            self._events.write(drawn)
        for warps in drawn.warps:
            self._events.warps(warps)
        self._events.flush()

    def forget(self) -> None:
        """Forget all shapes and arguments: they have new numbers now."""
        self._events.forget()

    def _declare(self, track: Track) -> list[bytes]:
        """The metadata events of a track: the name and order of its process and of itself."""
        self._tracks[track.id] = track
        root = track
        while root.parent is not None:
            root = root.parent
        pid = root.pid or _NO_PROCESS + root.id
        if track.parent is None:
            return [
                self._metadata("process_name", pid, 0, name=track.name),
                self._metadata("process_sort_index", pid, 0, sort_index=track.rank),
            ]
        if track.kind not in ("slices", "counter"):  # a thread has a new name or place
            return [line for one in self._named.get(track.id, ()) for line in self._described(pid, one)]
        self._events.give_track(track, pid)
        self._named.setdefault(track.parent.id, []).append(track)
        return self._described(pid, track)

    def _described(self, pid: int, track: Track) -> list[bytes]:
        """The name and order of a track."""
        order = self._metadata("thread_sort_index", pid, track.id, sort_index=self._order(track))
        return [self._thread_name(pid, track), order]

    def _thread_name(self, pid: int, track: Track) -> bytes:
        names: list[str] = []
        at: Track | None = track
        while at is not None and at.parent is not None:
            names.insert(0, self._tracks[at.id].label())
            at = at.parent
        return self._metadata("thread_name", pid, track.id, name=" / ".join(names))

    def _order(self, track: Track) -> int:
        """The place of a track under its top: the rank of its group, then its own. Groups in groups do not
        count.
        """
        ranks = []
        at: Track | None = track
        while at is not None and at.parent is not None:
            ranks.append(self._tracks[at.id].rank)
            at = at.parent
        group, own = (ranks[-1], ranks[0]) if len(ranks) > 1 else (ranks[0], 0)
        return min(group, (1 << 22) - 1) << 9 | min(own, 511)

    @staticmethod
    def _metadata(kind: str, pid: int, tid: int, **args: object) -> bytes:
        return json_text({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args})

    def finish(self) -> None:
        """Close the array and the object."""
        self._out.write(b"\n]}\n")
