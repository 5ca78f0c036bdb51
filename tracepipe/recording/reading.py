"""The one loop that reads a recording: batches, progress, damage, and the account of what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tracepipe.event.columns import SPECIAL, Int32s, SourceBatch, TraceBatch, no_events
from tracepipe.event.model import STALLS, Footer, Problem
from tracepipe.event.nesting import count_loss
from tracepipe.event.stacks import LaunchStacks
from tracepipe.event.tables import KEPT_MAX
from tracepipe.event.warps import WarpColumns
from tracepipe.recording.account import Account
from tracepipe.recording.open import OpenRecording, damage, footer_notes, refused
from tracepipe.units import counted

Progress = Callable[[int, int], None]
"""Called with the bytes read and the bytes in all, 0 where they are not known."""
# Records about the recording itself, which are not counted among its events.
_NO_EVENTS = ("header", "footer", "clock", "loss", "window", "stack", "name", *STALLS)


class Reading:
    """Reads an opened recording once. Raises InputError on the first bad line where `strict`.

    `relieve` is called between two batches when the tables have much that may not be in use any more. Without
    it, nothing of a batch may be in use after the batch.
    """

    def __init__(
        self,
        opened: OpenRecording,
        path: str,
        *,
        strict: bool = False,
        progress: Progress | None = None,
        relieve: Callable[[], None] | None = None,
    ) -> None:
        self.account = Account(path, opened.source)
        self.footer = Footer()
        self._opened, self._path, self._strict, self._progress = opened, path, strict, progress
        self.relieve = relieve or self._forget
        self._after_footer = 0
        self._counts = np.zeros(0, np.int64)
        self._others = 0
        """Records that are not events since the tables were last relieved. The names made from them take
        memory too."""

    def _forget(self) -> None:
        nothing = np.empty(0, np.int32)
        self._opened.recording.tables.keep(nothing, nothing)

    def source(self) -> Iterator[SourceBatch]:
        """Batches on the clocks that they were recorded with."""
        for batch in self._batches():
            self._take(batch.events.shape, batch.events.args, batch.others)
            yield batch
            self._relieve()

    def placed(self) -> Iterator[tuple[TraceBatch, list[Problem]]]:
        """Batches on the trace's clock, with their problems."""
        for batch, placed in self.both():
            yield placed, batch.problems

    def both(self) -> Iterator[tuple[SourceBatch, TraceBatch]]:
        """Batches as they were read, and on the trace's clock. Both share columns."""
        clocks, tables = self._opened.clocks, self._opened.recording.tables
        stacks = LaunchStacks(tables)
        for batch in self._batches():
            placed = clocks.stamp(batch, tables, self.account.unplaced)
            stacks.give(placed.events)
            self._take(placed.events.shape, placed.events.args, placed.others)
            yield batch, placed
            self._relieve()

    def _batches(self) -> Iterator[SourceBatch]:
        stream, tables = self._opened.stream, self._opened.recording.tables
        for batch in self._opened.recording.batches:
            batch.text_bytes = batch.text_bytes or tables.given_bytes
            tables.given_bytes = 0
            for problem in batch.problems:
                self.note(problem)
            # A reader that puts events in order has none at first.
            if len(batch.events) or batch.problems:
                yield batch
            if self._progress and batch.offset_bytes:
                self._progress(stream.position_bytes(), stream.size_bytes)
        if stream.damage:
            self.note(damage(stream))
            yield SourceBatch(no_events(), problems=[damage(stream)])

    def note(self, problem: Problem) -> None:
        """Count a problem. Raises InputError where `strict` and its line was skipped."""
        if self._strict and problem.skipped:
            raise refused(problem, self._path)
        self.account.add(problem)

    def _take(self, shapes: Int32s, args: Int32s, others: list[Any]) -> None:
        """Count the records of a batch."""
        if self.footer.is_read:
            self._after_footer += len(shapes)
        counts = np.bincount(shapes[shapes >= 0], minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        for at in np.flatnonzero(shapes == SPECIAL).tolist() if others else ():
            other = others[int(args[at])]
            if isinstance(other, WarpColumns):
                self.account.counts["gpu_warp"] += len(other)
                continue
            self.account.counts[other["type"]] += 1
            self._others += 1
            if other["type"] == "loss":
                count_loss(self.account.losses, other)
            elif other["type"] == "footer":
                self.footer, self._after_footer = Footer.from_record(other), len(shapes) - at - 1

    def _relieve(self) -> None:
        if self._opened.recording.tables.crowded() or self._others > KEPT_MAX:
            self._others = 0
            self._sum_counts()
            self.relieve()

    def _sum_counts(self) -> None:
        """Add the counts by shape to the counts by layer."""
        shapes = self._opened.recording.tables.shapes
        for number in np.flatnonzero(self._counts).tolist():
            shape = shapes[number]
            assert shape is not None
            self.account.counts[shape.type] += int(self._counts[number])
        self._counts = np.zeros(0, np.int64)

    def finish(self) -> Account:
        """The account of all that was read."""
        account = self.account
        self._sum_counts()
        for kind in _NO_EVENTS:
            del account.counts[kind]
        account.clocks = self._opened.clocks.statements()
        if left_out := self._opened.recording.tables.stacks.left_out:
            account.notes.append(
                counted(left_out, "stack|stacks is|are left out: there are more than can be kept")
            )
        if account.source == "tracepipe":
            if self._after_footer:
                account.notes.append(
                    counted(self._after_footer, "record|records comes|come after the footer")
                )
            if not self.footer.is_read or not account.unplaced:
                account.notes += footer_notes(self.footer, account.counts)
        return account
