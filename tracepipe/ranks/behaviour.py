"""Ranks that do the same work: only they can be compared.

Stages of a pipeline run other kernels than each other, and ranks that only receive run other collectives.
"""

from __future__ import annotations

from typing import Final

from numpy.typing import NDArray

from tracepipe.libraries import np, pl

# Ranks that do the same work differ by less in how much of it they recorded.
_ALIKE: Final = 1.1


def behaviours(ranks: pl.DataFrame, members: pl.DataFrame) -> pl.Series:
    """The number of each rank's group, from 0, the largest group first. `ranks` has a row for each rank with
    `steps` and `kernels`, `members` those of `Job.members`.

    Ranks of one group run the same operations in process groups of the same sizes, about as often in a step,
    and about as many kernels.
    """
    kind = pl.format("{} {}", "operation", pl.col("group_size").fill_null(0))
    kinds = members.group_by("rank").agg(
        pl.col("collectives").sum(), kinds=kind.unique().sort().str.join(", ")
    )
    of = ranks.select("rank", "steps", "kernels").join(kinds, "rank", "left", maintain_order="left")
    of = of.with_columns(pl.col("kinds").fill_null(""), pl.col("collectives").fill_null(0))
    _, number = np.unique(of["kinds"].to_numpy(), return_inverse=True)
    steps = of["steps"].to_numpy().clip(1)
    for column in ("kernels", "collectives"):
        number = _split(number, of[column].to_numpy() / steps)
    _, first, sizes = np.unique(number, return_index=True, return_counts=True)
    # Of groups of one size, the one with the lowest rank first.
    order = np.lexsort((of["rank"].to_numpy()[first], -sizes))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return pl.Series("behaviour", place[number], dtype=pl.Int64)


def _split(number: NDArray[np.int64], value: NDArray[np.float64]) -> NDArray[np.int64]:
    """Groups from 0, each in parts between which no value is nearly the next one. Shapes `(ranks,)`."""
    order = np.lexsort((value, number))
    apart = (np.diff(number[order]) > 0) | (value[order][1:] > value[order][:-1] * _ALIKE)
    split = np.empty_like(number)
    split[order] = np.concatenate(([0], np.cumsum(apart)))[: len(number)]
    return split
