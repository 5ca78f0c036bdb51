"""Whether some positions come later than the others, by ranks within each row.

Under the null, the times of one row (lanes of a warp, warps of a block, blocks of a launch) are exchangeable:
whatever their distribution, however heavy its tail, their ranks are a random order. Sums of ranks over many
rows are normal, and the normal's tail is above the true one where rows are few, so the test errs towards
silence.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.reports.findings.kernel_warps import Flags, Floats, Ints
from tracepipe.reports.frames.libraries import np, stats


def centred_ranks(times: Floats) -> Floats:
    """Ranks within each row less their mean, ties shared; nan where `times` is nan."""
    absent = np.isnan(times)
    ranks = np.asarray(stats.rankdata(np.where(absent, np.inf, times), axis=1), np.float64)
    present = (~absent).sum(axis=1, keepdims=True)
    return np.where(absent, np.nan, ranks - (present + 1) / 2)


def score_classes(ranks: Floats, classes: Ints, count: int) -> Floats:
    """How much later than the rest each class 0…`count`-1 is, standard normal if it is not.

    `ranks` by `centred_ranks`, `classes` of the same shape. Early classes are below zero.
    """
    rows = ranks.shape[0]
    row, column = np.nonzero(~np.isnan(ranks))
    values = ranks[row, column]
    key = row * count + classes[row, column]
    sums = np.bincount(key, values, rows * count).reshape(rows, count)
    members = np.bincount(key, minlength=rows * count).reshape(rows, count)
    present = members.sum(axis=1, keepdims=True)
    variance = np.bincount(row, values**2, rows)[:, None] / np.maximum(present, 1)
    spread = (members * (present - members) / np.maximum(present - 1, 1) * variance).sum(axis=0)
    scores: Floats = np.divide(sums.sum(axis=0), np.sqrt(spread), out=np.zeros(count), where=spread > 0)
    return scores


class LateClass(NamedTuple):
    """Positions t with t mod `modulus` in `residues` are later than the others."""

    modulus: int
    residues: list[int]
    p_value: float
    members: Flags


APART_OF_RANGE = 0.5
"""How far the late residues must stand above the next one, as a share of all that residues differ by. Below
it, the positions follow one another as on a ramp, and no class of them is late."""


def late_class(times: Floats, positions: Ints, moduli: range) -> LateClass | None:
    """The modulus and residues of `positions` whose times are the latest, or None where no class stands
    apart."""
    ranks = centred_ranks(times)
    tried, score, modulus, residue = 0, 0.0, 0, 0
    for candidate in moduli:
        scores = score_classes(ranks, positions % candidate, candidate)
        tried += candidate
        # Of equal evidence the smaller modulus is the simpler pattern, so a larger one must be better.
        if scores.max() > score:
            score, modulus, residue = float(scores.max()), candidate, int(scores.argmax())
    if not modulus:
        return None
    residual = times - np.nanmedian(times, axis=1, keepdims=True)
    classes = positions % modulus
    means = [residual[(classes == r) & ~np.isnan(residual)] for r in range(modulus)]
    level = np.array([np.median(values) if values.size else np.nan for values in means])
    residues = _standing_apart(level, int(moduli[-1]) if modulus == moduli[-1] else 0)
    if residue not in residues:
        return None
    return LateClass(
        modulus, residues, min(1.0, float(stats.norm.sf(score)) * tried), np.isin(classes, residues)
    )


def _standing_apart(level: Floats, widest: int) -> list[int]:
    """The residues above the largest gap, where they are few enough to be a stride."""
    order = np.argsort(level)  # nan last
    known = order[~np.isnan(level[order])]
    if known.size < 2:
        return []
    steps = np.diff(level[known])
    cut = int(steps.argmax())
    span = level[known[-1]] - level[known[0]]
    late = known[cut + 1 :]
    # Many residues of the widest modulus are a range of lanes and no stride: that is for divergence to tell.
    most = 1 if level.size == widest else max(1, level.size // 4)
    if span <= 0 or steps[cut] < APART_OF_RANGE * span or late.size > most:
        return []
    return sorted(int(r) for r in late)


def median_with_interval(values: Floats) -> tuple[float, float, float]:
    """The median and its distribution-free 95% interval; infinite where there are too few values for one."""
    interval = stats.quantile_test(values, q=0.0, p=0.5).confidence_interval(0.95)
    low, high = float(interval.low), float(interval.high)
    return (
        float(np.median(values)),
        -np.inf if np.isnan(low) else low,
        np.inf if np.isnan(high) else high,
    )
