"""What a viewer should show first: the time of the GPUs' work, and the tracks with it.

This is known at the end of the trace. It is in the last packet, as trace_attributes, which the trace
processor ignores. `tracepipe open` reads it from there (ui/first_screen.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import orjson

from tracepipe.converters.wire import delimited, number, text
from tracepipe.event.columns import Bytes, Int64s, grown
from tracepipe.event.ops import BEGIN
from tracepipe.event.vocabulary import FIRST_SCREEN, GPU_BUSY
from tracepipe.layout.changes import WarpChanges
from tracepipe.layout.rows import SUMMARY
from tracepipe.layout.timeline import Drawn, Track

# This many tracks fit at the top of a screen, above the others.
_PINS_MAX: Final = 10
# Tracks with longer names are not pinned.
_NAME_MAX: Final = 100
# At most this many of the pins are threads that launch, at least a tenth as often as the one that launches
# most.
_CALLERS_MAX, _CALLERS_APART = 4, 10
# At most this many streams are considered.
_STREAMS_MAX: Final = 1000
_OTHER, _STREAM, _CALLS = range(3)
_NEVER: Final = (1 << 63) - 1
_KINDS: Final = {"gpu": _STREAM, "userspace": _CALLS}


class FirstScreen:
    """Counts what is drawn, and decides at the end what to show first."""

    def __init__(self) -> None:
        self._start_ns, self._end_ns = _NEVER, -_NEVER
        self._kind: Bytes = np.zeros(0, np.uint8)
        self._begins: Int64s = np.zeros(0, np.int64)
        self._first_ns: Int64s = np.zeros(0, np.int64)
        """By row: what is on its track, how many slices it has (only those that launch, for calls), and when
        the first one is."""
        self._tracks: list[Track] = []
        self._counters: dict[int, Track] = {}
        """By GPU: the counter of running warps."""
        self._gpus: list[Track] = []
        """GPUs whose kernels are shown on one row."""
        self._busy: list[str] = []
        self._cpu_use: list[str] = []
        """The names of the counters of how busy GPUs are, and of the processor time that processes use."""

    def add_row(self, row: int, track: Track) -> None:
        """Note the track of a row."""
        self._kind, self._begins = grown(self._kind, row + 1, _OTHER), grown(self._begins, row + 1, 0)
        self._first_ns = grown(self._first_ns, row + 1, _NEVER)
        self._kind[row] = _KINDS.get(track.category, _OTHER) if track.kind == "slices" else _OTHER
        if track.kind == "group" and track.parent is None:
            self._gpus.append(track)
        elif track.kind == "counter" and track.category == SUMMARY:
            (self._busy if track.name == GPU_BUSY else self._cpu_use).append(track.name)

    def see(self, drawn: Drawn) -> None:
        """Count operations, whose rows were noted."""
        self._tracks = drawn.book.tracks
        kind, row, ts_ns, event = (
            drawn.ops.columns[key][drawn.order] for key in ("kind", "row", "ts", "event")
        )
        of = self._kind[row]
        self._work(ts_ns[of == _STREAM])
        counted = (of != _OTHER) & (kind == BEGIN) & (event >= 0)
        if drawn.events is None or not counted.any():
            return
        # Only calls that launch count: a thread that waits for the GPU may make more calls than the one that
        # launches.
        counted[counted] = (drawn.events.launch[event[counted]] != 0) | (of[counted] == _STREAM)
        begun = np.bincount(row[counted])
        self._begins[: len(begun)] += begun
        np.minimum.at(self._first_ns, row[counted], ts_ns[counted])

    def see_warps(self, warps: WarpChanges) -> None:
        """Note the times of warps."""
        self._work(warps.ts_ns)
        self._counters[warps.id] = warps.counter

    def _work(self, ts_ns: Int64s) -> None:
        if len(ts_ns):
            self._start_ns = min(self._start_ns, int(ts_ns.min()))
            self._end_ns = max(self._end_ns, int(ts_ns.max()))

    def packet(self, sequence: int) -> bytes:
        """The packet with the result, in one packet sequence; empty where no GPU worked."""
        if self._end_ns < self._start_ns:
            return b""
        stated: dict[str, Any] = {"start_ns": self._start_ns, "end_ns": self._end_ns, "pins": self._pins()}
        attribute = text(1, FIRST_SCREEN) + text(3, orjson.dumps(stated).decode())
        return delimited(1, delimited(126, delimited(1, attribute)) + number(10, sequence))

    def _pins(self) -> list[str]:
        """The UI's names of the tracks to pin: calls of threads that launch, GPUs' counters, busy streams,
        the processor time of processes.
        """
        callers = self._busiest(_CALLS)
        callers = callers[self._first_ns[callers] < self._end_ns]
        least = max(1, int(self._begins[callers[0]]) // _CALLERS_APART) if len(callers) else 1
        callers = callers[self._begins[callers] >= least]
        at_most = min(_CALLERS_MAX, max(1, _PINS_MAX - len(self._gpus)))
        threads = [self._tracks[row] for row in callers[:at_most].tolist()]
        threads.sort(key=lambda track: (track.pid, track.tid))
        pins = [self._called(track) for track in threads]
        if len(self._gpus) > 1:
            # The streams and counters of several GPUs have the same names.
            gpus = sorted((gpu.rank, gpu.name) for gpu in self._gpus if len(gpu.name) <= _NAME_MAX)
            return [*pins, *(name for _, name in gpus)][:_PINS_MAX]
        warps = [counter.name for counter in self._counters.values()]
        streams = [self._tracks[row].name for row in self._busiest(_STREAM)[:_STREAMS_MAX].tolist()]
        names = [*self._busy, *warps, *streams, *self._cpu_use]
        # The UI pins all tracks with a name.
        count = Counter(names)
        return [*pins, *(name for name in names if count[name] == 1)][:_PINS_MAX]

    def _busiest(self, kind: int) -> Int64s:
        """The rows of a kind, those with the most slices first."""
        rows = np.flatnonzero(self._kind == kind)
        return rows[np.argsort(-self._begins[rows], kind="stable")]

    @staticmethod
    def _called(track: Track) -> str:
        """The UI's name of a thread's track."""
        return f"{track.name} ({track.tid})" if track.tid else track.name
