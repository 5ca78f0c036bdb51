"""Which of many values stand beyond the tail that the others make.

Excesses over a high threshold follow a generalised Pareto law, whatever the noise (Pickands, Balkema and de
Haan): its shape says how heavy the tail is. Shape and scale are unknown, so both are weighed by the
likelihood of the values below a gap, and the chance of the gap is averaged over them: a predictive p value,
which stays honest with few values, where a fitted tail would be too sure. Shapes up to that of a tail without
a variance are allowed for.
"""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.reports.findings.kernel_warps import Floats, Ints
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import made

MIN_VALUES = 16
"""Fewer have no tail to speak of."""
MOST_OUTLYING = 16
"""More values beyond a gap are a group of their own, not stragglers."""
TAIL_SHARE = 0.25
"""Of the values, those that make the tail."""
MOST_OF_TAIL = 80
LIGHTEST, HEAVIEST, SHAPES = -0.5, 0.5, 15
"""Shapes of tails that are weighed: below 0 a tail ends, at 0 it is exponential, from 0.5 on it has no
variance."""
NARROWEST, WIDEST, SCALES = -2.0, 2.0, 25
"""Logarithms of the scales that are weighed, against the mean excess."""


LEAST_GAP = 3.0
"""Mean excesses that the gap must have, times the values above it: an exponential tail makes such a gap once
in twenty times, so that the test would not speak of less. It saves the work where there is nothing."""


CAUTION = 4.0
"""Every p value is multiplied by it: a quarter of the values is more than the far tail, for which the law
holds. With the noise that gets there slowest of those tried (t, 3 degrees of freedom) alarms came four times
as often as they should (`benchmarks/findings.py`)."""


class Outlying(NamedTuple):
    """Indices of the values beyond the gap, the largest first, and the chance of such a gap."""

    indices: Ints
    p_value: float


def beyond_the_tail(values: Floats, step: float, least: float) -> Outlying | None:
    """The largest values that a gap parts from the others, if they are `least` above the median.

    `step` is the resolution of `values`. For a gap below the j-th value the p value is multiplied by j·(j+1),
    as the inverses of these add up to one: that corrects for the gaps that were tried, and asks more for less
    simple answers.
    """
    if values.size < MIN_VALUES:
        return None
    # Rounding makes ties, and a tie has no spacing. Spread over the step, values are as before rounding.
    random, most = np.random.default_rng(0), values.size - 1
    spread = made(
        values.size,
        np.float64,
        lambda part: values[part] + random.uniform(-step / 2, step / 2, part.stop - part.start),
    )
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
    """The chance that all of the `above` largest of `excess` are as far above the next one as they are."""
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
    """Of the generalised Pareto law at each of `x`, on the last axis; -inf beyond its end."""
    ratio = x / scale[..., None]
    shape = np.where(np.abs(shape) < 1e-9, 1e-9, shape)[..., None]
    with np.errstate(divide="ignore"):
        logs: Floats = -np.log1p(np.maximum(shape * ratio, -1.0)) / shape
    return logs
