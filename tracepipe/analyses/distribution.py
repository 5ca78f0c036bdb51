"""The distribution of lengths: total, mean, percentiles. Percentiles are lengths that occurred."""

from __future__ import annotations

from collections.abc import Sequence

from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.report import Column

PERCENTS = (50, 95, 99)

LENGTH_COLUMNS = (
    Column("total_ns", "total", "ns"),
    Column("mean_ns", "mean", "ns"),
    *(Column(f"p{percent}_ns", f"p{percent}", "ns") for percent in PERCENTS),
    Column("max_ns", "max", "ns"),
)
"""The columns that `lengths` and `of_values` fill. p95: 95% are no longer than this (nearest rank)."""


def percentile(values: pl.Expr, percent: int) -> pl.Expr:
    """The least value that `percent` % of the known values do not exceed; null without known values."""
    known = values.drop_nulls().sort()
    rank = (known.len().cast(pl.Int64) * percent + 99) // 100
    return known.slice((rank - 1).clip(0), 1).first()


def total(values: pl.Expr) -> pl.Expr:
    """The sum of the known values; null (not 0) without known values."""
    return pl.when(values.count() > 0).then(values.sum())


def lengths(column: str = "dur_ns") -> list[pl.Expr]:
    """The aggregations of `LENGTH_COLUMNS` for a group_by; unknown lengths are left out."""
    values = pl.col(column)
    return [
        total(values).alias("total_ns"),
        values.mean().round().cast(pl.Int64).alias("mean_ns"),
        *(percentile(values, percent).alias(f"p{percent}_ns") for percent in PERCENTS),
        values.max().alias("max_ns"),
    ]


def rank(values: Ints | Floats, percent: int) -> float | None:
    """The least of numbers that `percent` % of them do not exceed; None without values. Shape `(n,)`."""
    if not len(values):
        return None
    at = max((len(values) * percent + 99) // 100 - 1, 0)
    found: float = np.partition(values, at)[at].item()  # an int of whole numbers
    return found


def of_values(values: Ints) -> tuple[int | None, ...]:
    """The cells of `LENGTH_COLUMNS` for numpy integers of shape `(n,)`; all None without values."""
    if not len(values):
        return (None,) * len(LENGTH_COLUMNS)
    ordered = np.sort(values)
    ranks: Sequence[int] = [(len(ordered) * percent + 99) // 100 - 1 for percent in PERCENTS]
    total = int(ordered.sum())
    return (total, round(total / len(ordered)), *(int(ordered[rank]) for rank in ranks), int(ordered[-1]))


def cells_of(
    known: int, total_ns: int | None, percentiles: Sequence[int] | None, longest_ns: int | None
) -> tuple[int | None, ...]:
    """The cells of `LENGTH_COLUMNS` from a number of lengths, their sum, the values of `PERCENTS`, and the
    longest; all None without lengths.
    """
    if not known or total_ns is None or percentiles is None:
        return (None,) * len(LENGTH_COLUMNS)
    return total_ns, round(total_ns / known), *percentiles, longest_ns
