"""Says in a sentence whether the second run is faster than the first, and by what evidence."""

from __future__ import annotations

from typing import Any, NamedTuple

from tracepipe.event.columns import Bools
from tracepipe.reports.analyses.changes import Change, Changes
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.samples import DECIDED_BY_PROGRAM, EXITS, LAYER_OF
from tracepipe.reports.frames.stored import parts
from tracepipe.units import duration_text


class _Words(NamedTuple):
    """What less time and more time is called."""

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
    "in B threads leave closer together", "in B threads leave further apart",
    "in B some threads leave closer together, some further apart", "closer together", "further apart",
    "{less} of {all} got less, {more} more",
)  # fmt: skip


def verdict(found: Changes, lengths_ns: tuple[int, int], alpha: float, least: float) -> str:
    """The sentence. `lengths_ns` is how long each run was recorded.

    Hardly faster or slower is what changes by less than `least` percent of the time of its layer.
    """
    told, every = found.is_reported, np.ones(len(found), np.bool_)
    # Where nothing else was recorded, exits decide: of exits alone that is the question.
    exits_alone = bool(found.is_of(EXITS).all())
    words = _OF_EXITS if exits_alone else _OF_TIME
    timed = told if exits_alone else _decisive(found, told)
    which = directions(found)
    faster, slower = timed & (which < 0), timed & (which > 0)
    ran = f"The recordings last {duration_text(lengths_ns[0])} and {duration_text(lengths_ns[1])}."
    if not told.any():
        return f"{_nothing(found, alpha)} {ran}"
    says, most = "B differs, but nothing shows that it is faster or slower.", told
    if faster.any() and slower.any():
        net_ns = int(found.total_ns[faster | slower].sum())
        says = "In part, and on the whole " + ("yes" if net_ns < 0 else "no") + f": {words.some}."
        most = faster | slower
    elif (faster.any() or slower.any()) and _weight(found, timed) < least:
        change = words.less_of_some if faster.any() else words.more_of_some
        says, most = f"Hardly: what is {change} is under {least:g}% of the time of its kind.", timed
    elif faster.any():
        says, most = f"Yes: {words.less}.", faster
    elif slower.any():
        says, most = f"No: {words.more}.", slower
    counts = [int(np.count_nonzero(flags)) for flags in (faster, slower)]
    everything = np.count_nonzero(every if exits_alone else _decisive(found, every))
    count = words.counted.format(less=counts[0], all=everything, more=counts[1])
    return f"{says} {evidence(next(found.first(most, 1)), alpha)} {count}. {ran}"


def _decisive(found: Changes, some: Bools) -> Bools:
    """What the program does itself; what its threads wait in counts where there is nothing else."""
    ours: Bools = some & found.is_of(DECIDED_BY_PROGRAM)
    timed: Bools = some & ~found.is_of(EXITS)
    return ours if ours.any() else timed


def _weight(found: Changes, told: Bools) -> float:
    """How many percent of the time of a layer in A what is told changed: of the layer where that is most."""
    shares = [0.0]
    for layer in LAYER_OF:
        of = found.is_of((layer,))
        if (told & of).any():
            before_ns = int(found.column("total_ns_a")[of].sum())
            change_ns = int(found.total_ns[told & of].sum())
            shares.append(100 * abs(change_ns) / before_ns if before_ns else 100.0)
    return max(shares)


def directions(found: Changes) -> Any:
    """Of each name, below 0 where it takes less time, above where it takes more."""
    which = np.empty(len(found), np.int8)
    for part in parts(len(found)):
        which[part] = np.sign(found.total_ns[part])
    rows = found.tested.rows
    is_longer = found.length_changed[rows] & ~found.count_changed[rows]
    which[rows[is_longer]] = np.where(found.tested["estimate"][is_longer] < 0, -1, 1)
    return which


def evidence(one: Change, alpha: float) -> str:
    """How one thing changed, with its bounds."""
    layer, name = one.key
    length = name if layer in EXITS else f"The length of {name}"
    in_all = f"{duration_text(abs(one.total_ns))} {'less' if one.total_ns < 0 else 'more'} in all"
    if one.is_in_one_alone:
        return f"{name} is in {'B' if one.a is None else 'A'} alone: {in_all}."
    before, after = one.counts
    if one.length_changed and one.shift is not None:
        percent, low, high = (one.percent(v) for v in (one.shift.estimate, one.shift.low, one.shift.high))
        size = f" by {percent:+.1f}%" if percent is not None else ""
        if percent is not None and low is not None and high is not None:
            size += f" ({low:+.1f}% to {high:+.1f}%, {100 * (1 - alpha):g}% confidence)"
        times = f"{before} times" if before == after else f"{before} and {after} times"
        return f"{length} changed{size}, p {one.length_p:.1g}, {times}: {in_all}."
    if one.count_changed:
        return f"{name} happens {after} times and not {before}, p {one.count_p:.1g}: {in_all}."
    assert one.tail is not None
    shares = f"{100 * one.tail.share_a:.1f}% of {name} in A and {100 * one.tail.share_b:.1f}% in B"
    return f"{shares} take over {duration_text(one.tail.limit)}, p {one.tail_p:.1g}: {in_all}."


def _nothing(found: Changes, alpha: float) -> str:
    tested = np.zeros(len(found), np.bool_)
    tested[found.tested.rows] = True
    if not tested.any():
        return "Not enough data: nothing happens often enough in both runs to be compared."
    says = f"Nothing changed by more than chance makes it, at a false discovery rate of {100 * alpha:g}%."
    some = _decisive(found, tested)
    some = some if some.any() else tested
    before_ns = found.column("total_ns_a")
    largest = next(found.first(some & (before_ns == before_ns[some].max()), 1))
    assert largest.shift is not None
    low, high = largest.percent(largest.shift.low), largest.percent(largest.shift.high)
    if low is not None and high is not None:
        says += f" The change of {largest.key[1]}, which takes most, is from {low:+.1f}% to {high:+.1f}%."
    return says
