"""The distribution of lengths: total, mean, percentiles. Percentiles are lengths that occurred."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tracepipe.event.columns import Floats, Ints
from tracepipe.libraries import np
from tracepipe.reports.report import Column

PERCENTS = (50, 95, 99)

LENGTH_COLUMNS = (
    Column("total_ns", "total", "ns"),
    Column("mean_ns", "mean", "ns"),
    *(Column(f"p{percent}_ns", f"p{percent}", "ns") for percent in PERCENTS),
    Column("max_ns", "max", "ns"),
)
"""The columns that `lengths` and `of_values` fill. p95: 95% are no longer than this (nearest rank)."""


def rank(values: Ints | Floats, percent: int) -> float | None:
    """The least of numbers that `percent` % of them do not exceed; None without values. Shape `(n,)`."""
    if not len(values):
        return None
    at = max((len(values) * percent + 99) // 100 - 1, 0)
    found: float = np.partition(values, at)[at].item()  # an int of whole numbers
    return found


def median_within(values: Ints | Floats) -> tuple[int, int]:
    """Where the median of such values lies in 95 of 100 cases, by their order. Shape `(n,)`, n above 0."""
    ordered, half = np.sort(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return round(float(ordered[max(low, 0)])), round(float(ordered[min(high, len(values) - 1)]))


def of_values(values: Ints) -> tuple[int | None, ...]:
    """The cells of `LENGTH_COLUMNS` for numpy integers of shape `(n,)`; all None without values."""
    if not len(values):
        return (None,) * len(LENGTH_COLUMNS)
    ordered = np.sort(values)
    ranks: Sequence[int] = [(len(ordered) * percent + 99) // 100 - 1 for percent in PERCENTS]
    total = int(ordered.sum())
    return (total, round(total / len(ordered)), *(int(ordered[rank]) for rank in ranks), int(ordered[-1]))


def spread_of(length_ns: str) -> str:
    """Columns in SQL for the arguments of `cells_of`, from the lengths of rows; null is no length."""
    percentiles = ", ".join(f"{percent / 100}" for percent in PERCENTS)
    return ", ".join(
        (f"count({length_ns})", f"sum({length_ns})", f"quantile_disc({length_ns}, [{percentiles}])",
         f"max({length_ns})")
    )  # fmt: skip


def cells_of(
    known: int, total_ns: int | None, percentiles: Sequence[int] | None, longest_ns: int | None
) -> tuple[int | None, ...]:
    """The cells of `LENGTH_COLUMNS` from a number of lengths, their sum, the values of `PERCENTS`, and the
    longest; all None without lengths.
    """
    if not known or total_ns is None or percentiles is None:
        return (None,) * len(LENGTH_COLUMNS)
    return total_ns, round(total_ns / known), *percentiles, longest_ns
