"""Collects the stretches in which events were lost as columns: a recording may have a million."""

from __future__ import annotations

from typing import Any

from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.model import Record
from tracepipe.reports.frames.eager import picked
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.stored import Growing

# The most layers, and the most reasons, whose names are kept. There are ten, but a file may contain any text.
_TEXTS_MAX = 100
_NUMBERS = ("count", "start_ns", "dur_ns", "cpu")
# The texts that replace those beyond the maximum.
_TEXTS = {"layer": "other layers", "reason": "other reasons"}
_ROWS_AT_ONCE = 1 << 10
_INT64_MAX = (1 << 63) - 1


class LossTable:
    """A row for each loss, in file order. Call `add` for all losses, then `finish`, then the other
    methods.
    """

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        """The last rows, which are not in columns yet."""
        self._growing = {name: Growing(np.int64) for name in (*_NUMBERS, *_TEXTS)}
        self._places: dict[str, dict[str, int]] = {name: {} for name in _TEXTS}
        self._columns: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.column("layer"))

    def add(self, record: Record, start_ns: int) -> None:
        """Add a loss that began at `start_ns`. Raises OutputError."""
        # A file may contain any number of a processor; real ones fit 63 bits.
        cpu = record.get("cpu", NONE)
        cpu = cpu if cpu <= _INT64_MAX else NONE
        places = (self._place(name, record.get(name)) for name in _TEXTS)
        self._rows.append((record["count"], start_ns, record.get("dur_ns", NONE), cpu, *places))
        if len(self._rows) >= _ROWS_AT_ONCE:
            self._put()

    def _put(self) -> None:
        """Append the rows to the columns."""
        rows = np.array(self._rows, np.int64).reshape(len(self._rows), len(self._growing))
        for column, values in zip(self._growing.values(), rows.T, strict=True):
            column.extend(values, len(values))
        self._rows = []

    def _place(self, name: str, text: str | None) -> int:
        places = self._places[name]
        if text is None:
            return NONE
        if text not in places and len(places) >= _TEXTS_MAX:
            text = _TEXTS[name]
        return places.setdefault(text, len(places))

    def finish(self) -> None:
        """Make the columns. Nothing may be added afterwards. Raises OutputError."""
        self._put()
        self._columns = {name: growing.whole() for name, growing in self._growing.items()}

    def column(self, name: str) -> Int64s:
        """A column of shape `(losses,)`, NONE where a value is missing; layers and reasons are indices into
        `texts`.
        """
        found: Int64s = self._columns[name]
        return found

    def texts(self, name: str) -> list[str]:
        """The layers, or the reasons, in the order of their first occurrences."""
        return list(self._places[name])

    def frame(self, rows: slice = slice(None)) -> pl.DataFrame:
        """Some rows: layer, count, start_ns, dur_ns, cpu, reason."""
        columns: dict[str, Any] = {name: self.column(name)[rows] for name in _NUMBERS}
        for name in _TEXTS:
            # The last place is for NONE.
            texts = pl.Series([*self.texts(name), None], dtype=pl.String)
            places = self.column(name)[rows]
            columns[name] = picked(texts, np.where(places == NONE, len(texts) - 1, places))
        frame = pl.DataFrame(columns)
        known = (pl.when(pl.col(name) != NONE).then(pl.col(name)).alias(name) for name in ("dur_ns", "cpu"))
        return frame.with_columns(*known).select("layer", *_NUMBERS, "reason")
