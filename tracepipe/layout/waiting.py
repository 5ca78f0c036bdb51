"""Changes of warps that wait until nothing earlier can come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tracepipe.event.columns import AnyArray
from tracepipe.layout.changes import Slices

CHANGES: Final = {"ts_ns": np.int64, "kind": np.uint8, "slice": np.int32, "delta": np.int8, "mask": np.int64}
"""The columns of changes. `delta` is by how much the count of running warps changes."""


@dataclass(slots=True, eq=False)
class Waiting:
    """Changes that wait. Their `slice` is a place in `slices`."""

    columns: list[list[Any]] = field(default_factory=lambda: [[] for _ in CHANGES])
    slices: list[Slices] = field(default_factory=list)
    slice_count: int = 0

    def add(self, *columns: AnyArray) -> None:
        """Add values to each column of `CHANGES`. `slice` counts from the slices that are added next."""
        for kept, column, name in zip(self.columns, columns, CHANGES, strict=True):
            kept.append(column + self.slice_count if name == "slice" else column)

    def add_slices(self, slices: Slices) -> None:
        """Add the slices of the changes that were added last."""
        self.slices.append(slices)
        self.slice_count += len(slices)

    def take(self) -> list[Any]:
        """Take the values of all columns out."""
        whole = [
            np.concatenate(parts) if parts else np.empty(0, kind)
            for parts, kind in zip(self.columns, CHANGES.values(), strict=True)
        ]
        self.columns = [[] for _ in CHANGES]
        return [
            np.ascontiguousarray(column, kind) for column, kind in zip(whole, CHANGES.values(), strict=True)
        ]
