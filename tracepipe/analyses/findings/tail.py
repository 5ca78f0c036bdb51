"""Outliers: values beyond the tail that the others form.

Excesses over a high threshold follow a generalised Pareto distribution, for nearly any noise (Pickands,
Balkema and de Haan); its shape is the weight of the tail. Shape and scale are unknown, so both are weighted
by the likelihood of the values below a gap, and the chance of the gap is averaged over them. This predictive
p value holds with few values too, where a fitted tail would be too small. Shapes up to that of a tail without
a variance are considered.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.libraries import np

MIN_VALUES = 16
"""The least number of values that have a tail."""
MOST_OUTLYING = 16
"""The most values beyond a gap that count as stragglers; more are a separate group."""
TAIL_SHARE = 0.25
"""The share of the values that form the tail."""
MOST_OF_TAIL = 80
"""The most values that form the tail."""
LIGHTEST, HEAVIEST, SHAPES = -0.5, 0.5, 15
"""The range and number of the shapes that are weighted: below 0 a tail ends, at 0 it is exponential, from 0.5
on it has no variance."""
NARROWEST, WIDEST, SCALES = -2.0, 2.0, 25
"""The range and number of the scales that are weighted, as logarithms of multiples of the mean excess."""


LEAST_GAP = 3.0
"""The least size of the gap, in mean excesses, times the number of values above it. An exponential tail has
such a gap once in twenty times, so the test would not report a smaller one: this only saves time."""


CAUTION = 4.0
"""The factor of every p value. The distribution holds for the far tail, and a quarter of the values is more
than that. With the noise that converges slowest of those tried (t, 3 degrees of freedom), false alarms were
four times as frequent as they should be (`benchmarks/findings.py`)."""


class Outlying(NamedTuple):
    """The indices of the values beyond the gap, the largest value first, and the chance of such a gap."""

    indices: Ints
    p_value: float


def beyond_the_tail(values: Floats, step: float, least: float) -> Outlying | None:
    """The largest values that a gap separates from the others, if they are `least` above the median.

    `values` has the shape `(n,)`, `step` is their resolution. For a gap below the j-th value the p value is
    multiplied by j·(j+1). The inverses of these factors add up to one, so they correct for the gaps that were
    tried, and require stronger evidence for more outliers.
    """
    if values.size < MIN_VALUES:
        return None
    # Rounding makes ties, and a tie has no spacing. Random offsets within the step undo the rounding.
    most = values.size - 1
    spread = values + np.random.default_rng(0).uniform(-step / 2, step / 2, values.size)
    tail = min(int(values.size * TAIL_SHARE), MOST_OF_TAIL)
    order = np.argpartition(spread, most - tail)[most - tail :]
    order = order[np.argsort(-spread[order])]
    far = int((spread[order] - np.median(spread) >= least).sum())
    excess = spread[order[:-1]] - spread[order[-1]]
    p_values = [
        _chance_of_gap(excess, above) * above * (above + 1) * CAUTION
        for above in range(1, min(far, MOST_OUTLYING, max(1, values.size // 16)) + 1)
    ]
    if not p_values:
        return None
    count = int(np.argmin(p_values)) + 1
    return Outlying(order[:count], min(1.0, p_values[count - 1]))


def _chance_of_gap(excess: Floats, above: int) -> float:
    """The chance that the `above` largest values of `excess` are all at least as far above the next one."""
    below = excess[above:]
    gap = float(excess[above - 1] - excess[above])
    if above * gap < LEAST_GAP * float(below.mean()):
        return 1.0
    shape = np.linspace(LIGHTEST, HEAVIEST, SHAPES)[:, None]
    scale = np.exp(np.linspace(NARROWEST, WIDEST, SCALES))[None, :] * max(float(below.mean()), 1e-9)
    at_next = _log_survival(below[:1], shape, scale)[..., 0]
    at_gap = _log_survival(excess[above - 1 : above], shape, scale)[..., 0]
    density = ((1 + shape[..., None]) * _log_survival(below, shape, scale)).sum(-1) - below.size * np.log(
        scale
    )
    likelihood = density + above * at_next
    weights = np.exp(likelihood - likelihood.max())
    possible = np.isfinite(at_next)
    chance = np.exp(above * (at_gap[possible] - at_next[possible]))
    return float((weights[possible] * chance).sum() / weights[possible].sum())


def _log_survival(x: Floats, shape: Floats, scale: Floats) -> Floats:
    """The log survival function of the generalised Pareto distribution at each `x`, on the last axis; -inf
    beyond its end.
    """
    ratio = x / scale[..., None]
    shape = np.where(np.abs(shape) < 1e-9, 1e-9, shape)[..., None]
    with np.errstate(divide="ignore"):
        logs: Floats = -np.log1p(np.maximum(shape * ratio, -1.0)) / shape
    return logs
