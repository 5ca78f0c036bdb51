"""Lays out events of single threads of a GPU: each entry or exit is on the track of its warp."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Three
from tracepipe.event.model import Record
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Args
from tracepipe.layout import LayoutOptions
from tracepipe.layout.rows import Rows
from tracepipe.layout.timeline import WARP_LANES

Of = tuple[Three | None, Three | None]
"""Block and thread of an event, None each where it is not recorded."""


class ThreadLayout:
    """Draws events of single threads. A pair of B and E makes a slice for the warp, from its first thread's
    entry to its last thread's exit. A record of a single entry or exit (I) is an instant.
    """

    def __init__(self, rows: Rows, options: LayoutOptions) -> None:
        self._rows, self._options = rows, options
        self._of: dict[int, dict[tuple[Any, ...], int]] = {}
        self._inside: dict[tuple[Any, ...], int] = {}
        self.beyond = 0
        """Events that are not drawn, as there are too many tracks."""

    def place(self, ts_ns: int, shape: Shape, of: Of, args: Args, dur_ns: int, launch: int | None) -> int:
        """Draw one event `of` a block and a thread. Return its end, trace ns."""
        where = _warp_of(*of, args)
        gpu = shape.gpu or 0
        key = (launch, shape.name, *where)
        rows = self._of.setdefault(gpu, {})
        row = rows.get(key)
        if row is None and self._rows.tree.is_full:
            self.beyond += 1
            return ts_ns
        if row is None:
            group = self._rows.launch_group(gpu, shape.name, launch)
            row = rows[key] = self._rows.new_row(
                self._rows.tree.child(group, "slices", " ".join(where), len(rows), "warp")
            )
        if of[1] is not None:
            args["thread"] = list(of[1])
        nesting, name = self._rows.nesting, self._rows.name
        if shape.phase == "X":
            nesting.one(row, "X", ts_ns, dur_ns, name(shape.name), self._rows.keep_args(args))
            return ts_ns + dur_ns
        if shape.phase == "I" or self._options.thread_exits:
            event = {"B": "entry", "E": "exit"}.get(shape.phase) or args.pop("event", "event")
            nesting.one(row, "I", ts_ns, None, name(f"thread {event}"), self._rows.keep_args(args))
        if shape.phase == "I":
            return ts_ns
        begins, inside = shape.phase == "B", self._inside.get((gpu, *key), 0)
        if (begins and inside == 0) or (not begins and inside <= 1):
            nesting.one(row, shape.phase, ts_ns, None, name(" ".join((shape.name, *where))), NONE)
        self._inside[(gpu, *key)] = max(0, inside + (1 if begins else -1))
        return ts_ns

    def close(self, gpu: int, end_ns: int) -> None:
        """End what is still open on one GPU."""
        for row in self._of.get(gpu, {}).values():
            self._rows.nesting.close(row, end_ns)


def _warp_of(block: Three | None, thread: Three | None, args: Record) -> tuple[str, str]:
    """Block and warp of a thread, in words.

    With y = z = 0, lane 0 of a warp has an x divisible by 32, for every size of the block. Elsewhere it
    depends on the size, which such a record does not have: 32 neighbours in x are named as threads then.
    """
    if block is not None:
        where = "block ({},{},{})".format(*block)
    elif "block_x" in args:
        where = f"block {args['block_x']}"
    else:
        where = f"occurrence {args.get('occurrence', 0)}"
    if thread is None:
        return where, "warp not recorded"
    x, y, z = thread
    if y == z == 0:
        return where, f"warp {x // WARP_LANES}"
    first = x // WARP_LANES * WARP_LANES
    return where, f"threads ({first}–{first + WARP_LANES - 1},{y},{z})"
