"""Records put on the trace's clock, as plain records again: for tests that state what clocks make of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tests.support.batches import record_of_warps, records_of, source_batch
from tests.support.cores import new_tables
from tracepipe.clocks import Clocks
from tracepipe.event.columns import NONE, SPECIAL, SourceBatch, TraceBatch
from tracepipe.event.model import Header, Record
from tracepipe.event.warps import PlacedWarps


class Stamping:
    """The clocks of one recording, and its tables. Batches come one after the other, as from a reader."""

    def __init__(
        self, header: Header, pairs: Iterable[Record] = (), assumed: Mapping[str, int | str] | None = None
    ) -> None:
        self.clocks = Clocks(header, pairs, assumed)
        self.tables = new_tables()
        self.unplaced: dict[str, int] = {}

    def batch(self, records: Iterable[Record]) -> SourceBatch:
        """Records as a reader gives them."""
        return source_batch(records, self.tables)

    def stamp(self, records: Iterable[Record]) -> list[Record]:
        """What the clocks make of a batch of these. A record that another clock timed has `source_ns` and
        `bound_ns` too; of warps, `source_ns` is a column, and there is `offset_ns`. Each has its row's time.
        """
        placed = self.clocks.stamp(self.batch(records), self.tables, self.unplaced)
        return [self._record(placed, record, at) for at, record in enumerate(records_of(placed, self.tables))]

    def _record(self, placed: TraceBatch, record: Record, at: int) -> Record:
        events = placed.events
        ts_ns = int(events.ts_ns[at])
        if events.shape[at] == SPECIAL:
            other = placed.others[int(events.args[at])]
            if isinstance(other, PlacedWarps):
                assert other.ts_ns == ts_ns
                source_ns = None if other.source_ns is None else other.source_ns.tolist()
                more = {"source_ns": source_ns, "bound_ns": other.bound_ns, "offset_ns": other.offset_ns}
                return record_of_warps(other) | more
            return record | {"ts_ns": ts_ns}
        assert record["ts_ns"] == ts_ns
        if events.source_ns is None or events.source_ns[at] == NONE:
            assert events.bound_ns is None or events.bound_ns[at] == 0
            return record
        assert events.bound_ns is not None
        more_ns: dict[str, Any] = {
            "source_ns": int(events.source_ns[at]),
            "bound_ns": int(events.bound_ns[at]),
        }
        return record | more_ns
