"""The longest single calls, found part by part."""

from __future__ import annotations

from tracepipe.event.columns import Int64s
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.nesting import NOBODY
from tracepipe.reports.frames.stored import parts
from tracepipe.store.run import Layer
from tracepipe.store.spans import FROM_DURATION, SPAN


def slowest_calls(layer: Layer, most: int) -> list[int]:
    """The rows of the `most` longest outermost calls, the longest first; among equal ones, the
    earliest first.
    """
    rows, lengths_ns = np.empty(0, np.int64), np.empty(0, np.int64)
    for part in parts(len(layer) if most > 0 else 0):
        timed = (layer.kind[part] == SPAN) | (layer.kind[part] == FROM_DURATION)
        more = np.flatnonzero(timed & (layer.parent[part] == NOBODY)) + part.start
        rows = np.concatenate([rows, more])
        lengths_ns = np.concatenate([lengths_ns, _lengths_ns(layer, more)])
        longest = np.argsort(-lengths_ns, kind="stable")[:most]
        rows, lengths_ns = rows[longest], lengths_ns[longest]
    longest_rows: list[int] = rows.tolist()
    return longest_rows


def _lengths_ns(layer: Layer, rows: Int64s) -> Int64s:
    lengths_ns: Int64s = layer.end_ns[rows] - layer.start_ns[rows]
    return lengths_ns
