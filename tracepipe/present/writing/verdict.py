"""Writes the sentence that states what differs between two sides, with the evidence."""

from __future__ import annotations

from typing import NamedTuple

from tracepipe.analyses.changes import Change, Changes, Difference
from tracepipe.analyses.comparison import enough
from tracepipe.event.columns import Bools
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.samples import DECIDED_BY_PROGRAM, EXITS, LAYER_OF
from tracepipe.units import duration_text


class _Words(NamedTuple):
    """The words for less time and for more time."""

    less: str
    more: str
    some: str
    less_of_some: str
    more_of_some: str
    counted: str


_OF_TIME = _Words(
    "B is faster", "B is slower", "some of B is faster, some slower", "faster", "slower",
    "{less} of {all} got faster, {more} slower",
)  # fmt: skip
_OF_EXITS = _Words(
    "in B threads exit closer together", "in B threads exit further apart",
    "in B some threads exit closer together, some further apart", "closer together", "further apart",
    "{less} of {all} decreased, {more} increased",
)  # fmt: skip


def verdict(found: Changes, alpha: float, least: float) -> str:
    """Return the sentence. It states that B is faster or slower if there are enough recordings for that
    claim.

    A change of less than `least` percent of the time of its layer is called "hardly" faster or slower.
    """
    reported = found.is_reported
    if not found.can_claim:
        return _without_claim(found, reported, alpha, least)
    if not reported.any():
        return _nothing(found, alpha)
    every = np.ones(len(found), np.bool_)
    # Exits decide only where nothing else was recorded.
    exits_alone = bool(found.is_of(EXITS).all())
    words = _OF_EXITS if exits_alone else _OF_TIME
    timed = reported if exits_alone else _decisive(found, reported)
    which = found.directions()
    faster, slower = timed & (which < 0), timed & (which > 0)
    says, most = "B differs, but nothing shows that it is faster or slower.", reported
    if faster.any() and slower.any():
        net_ns = int(found.total_ns[faster | slower].sum())
        says = "In part, and overall " + ("yes" if net_ns < 0 else "no") + f": {words.some}."
        most = faster | slower
    elif (faster.any() or slower.any()) and _weight(found, timed) < least:
        change = words.less_of_some if faster.any() else words.more_of_some
        says, most = f"Hardly: the part that is {change} is under {least:g}% of the time of its layer.", timed
    elif faster.any():
        says, most = f"Yes: {words.less}.", faster
    elif slower.any():
        says, most = f"No: {words.more}.", slower
    counts = [int(np.count_nonzero(flags)) for flags in (faster, slower)]
    everything = np.count_nonzero(every if exits_alone else _decisive(found, every))
    count = words.counted.format(less=counts[0], all=everything, more=counts[1])
    return f"{says} {evidence(next(found.first(most, 1)))} {count}."


def _without_claim(found: Changes, reported: Bools, alpha: float, least: float) -> str:
    """The sentence for recordings that are too few to distinguish a change of the program from chance."""
    says = "These two runs differ."
    if found.comparison.has_spread:
        count = enough(alpha)
        says = (
            f"Too few recordings to claim a change: the smallest p with {found.sizes.a} and {found.sizes.b} "
            f"of them is {found.comparison.least_p:.2g}. Record {count} of each side."
        )
    if not reported.any():
        than = "recordings of one side do" if found.comparison.has_spread else f"{least:g}%"
        same = f"No name that both sides have differs by more than {than}."
        return f"{says} {same}" if found.comparison.has_spread else same
    most = _decisive(found, reported)
    most = most if most.any() else reported
    return f"{says} {evidence(next(found.first(most, 1)))}"


def _decisive(found: Changes, some: Bools) -> Bools:
    """The rows whose time the program itself decides; if there are none, those in which its threads wait."""
    ours: Bools = some & found.is_of(DECIDED_BY_PROGRAM)
    timed: Bools = some & ~found.is_of(EXITS)
    return ours if ours.any() else timed


def _weight(found: Changes, reported: Bools) -> float:
    """The change in percent of the layer's time in A, for the layer where this is most."""
    shares = [0.0]
    for layer in LAYER_OF:
        of = found.is_of((layer,))
        if (reported & of).any():
            before_ns = int(found.totals_ns[0][of].sum())
            change_ns = int(found.total_ns[reported & of].sum())
            shares.append(100 * abs(change_ns) / before_ns if before_ns else 100.0)
    return max(shares)


def evidence(one: Change) -> str:
    """A sentence about how one name differs, with its figures."""
    layer, name = one.key
    total = f"{duration_text(abs(one.total_ns))} {'less' if one.total_ns < 0 else 'more'} in total"
    if one.count_changed and one.only_in:
        return f"{name} is only in {one.only_in}: {total}."
    before, after = (f"{count:,.15g}" for count in one.counts)
    if one.count_changed:
        return f"{name} occurs {after} times instead of {before}{_sure(one.figures['count'])}: {total}."
    if one.length_changed:
        median = name if layer in EXITS else f"The median length of {name}"
        times = f"{before} times" if before == after else f"{before} and {after} times"
        return f"{median} is {_from_to(one.figures['p50_ns'])}, {times}: {total}."
    return f"5% of {name} take over {_from_to(one.figures['p95_ns'])}: {total}."


def _from_to(figure: Difference) -> str:
    """Both values and the change."""
    (before, after), change = figure.medians, figure.percent(figure.change)
    assert before is not None and after is not None
    size = f" ({change:+.1f}%)" if change is not None else ""
    return f"{duration_text(round(before))} in A and {duration_text(round(after))} in B{size}{_sure(figure)}"


def _sure(figure: Difference) -> str:
    """The bounds of a change and its p, where there are several recordings."""
    if figure.p is None:
        return ""
    low, high = figure.percent_bounds
    bounds = f"{low:+.1f}% to {high:+.1f}% between single recordings, " if low is not None else ""
    return f", {bounds}p {figure.p:.2g}"


def _nothing(found: Changes, alpha: float) -> str:
    compared = found.is_compared
    if not compared.any():
        return "Not enough data: nothing has a length in every recording."
    says = (
        "Nothing changed by more than recordings of one side differ (the chance of a false alarm is "
        f"{100 * alpha:g}%)."
    )
    some = _decisive(found, compared)
    some = some if some.any() else compared
    before_ns = found.totals_ns[0]
    largest = next(found.first(some & (before_ns == before_ns[some].max()), 1))
    figure = largest.figures["p50_ns"]
    low, high = figure.percent_bounds
    if low is not None and high is not None:
        says += (
            f" The median length of {largest.key[1]}, which takes the most time, changes by {low:+.1f}% to "
            f"{high:+.1f}% between single recordings."
        )
    return says
