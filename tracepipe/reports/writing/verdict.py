"""Says in a sentence whether the second run is faster than the first, and by what evidence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tracepipe.reports.analyses.changes import Change
from tracepipe.reports.frames.samples import DECIDED_BY_PROGRAM, EXITS
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


def verdict(found: Sequence[Change], lengths_ns: tuple[int, int], alpha: float, least: float) -> str:
    """The sentence. `lengths_ns` is how long each run was recorded.

    Hardly faster or slower is what changes by less than `least` percent of the time of its layer.
    """
    told = [one for one in found if one.is_reported]
    # Where nothing else was recorded, exits decide: of exits alone that is the question.
    exits_alone = all(one.key[0] in EXITS for one in found)
    words = _OF_EXITS if exits_alone else _OF_TIME
    timed = told if exits_alone else _decisive(told)
    faster = [one for one in timed if direction(one) < 0]
    slower = [one for one in timed if direction(one) > 0]
    ran = f"The recordings last {duration_text(lengths_ns[0])} and {duration_text(lengths_ns[1])}."
    if not told:
        return f"{_nothing(found, alpha)} {ran}"
    most = max(told, key=lambda one: abs(one.total_ns))
    if faster and slower:
        net_ns = sum(one.total_ns for one in faster) + sum(one.total_ns for one in slower)
        says = "In part, and on the whole " + ("yes" if net_ns < 0 else "no") + f": {words.some}."
        most = max((*faster, *slower), key=lambda one: abs(one.total_ns))
    elif (faster or slower) and _weight(found, timed) < least:
        most = max(timed, key=lambda one: abs(one.total_ns))
        change = words.less_of_some if faster else words.more_of_some
        says = f"Hardly: what is {change} is under {least:g}% of the time of its kind."
    elif faster:
        says, most = f"Yes: {words.less}.", max(faster, key=lambda one: abs(one.total_ns))
    elif slower:
        says, most = f"No: {words.more}.", max(slower, key=lambda one: abs(one.total_ns))
    else:
        says = "B differs, but is neither faster nor slower as far as is told."
    everything = len(found if exits_alone else _decisive(found))
    count = words.counted.format(less=len(faster), all=everything, more=len(slower))
    return f"{says} {evidence(most, alpha)} {count}. {ran}"


def _decisive(found: Sequence[Change]) -> list[Change]:
    """What the program does itself; what its threads wait in counts where there is nothing else."""
    timed = [one for one in found if one.key[0] not in EXITS]
    return [one for one in timed if one.key[0] in DECIDED_BY_PROGRAM] or timed


def _weight(found: Sequence[Change], told: Sequence[Change]) -> float:
    """How many percent of the time of a layer in A what is told changed: of the layer where that is most."""
    shares = [0.0]
    for layer in {one.key[0] for one in told}:
        before_ns = sum(one.a.total_ns for one in found if one.key[0] == layer and one.a)
        change_ns = sum(one.total_ns for one in told if one.key[0] == layer)
        shares.append(100 * abs(change_ns) / before_ns if before_ns else 100.0)
    return max(shares)


def direction(one: Change) -> int:
    """-1 where it takes less time, 1 where it takes more."""
    if one.length_changed and one.shift is not None and not one.count_changed:
        return -1 if one.shift.estimate < 0 else 1
    return (one.total_ns > 0) - (one.total_ns < 0)


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


def _nothing(found: Sequence[Change], alpha: float) -> str:
    tested = [one for one in found if one.length_p is not None and one.shift is not None]
    if not tested:
        return "It cannot be told: nothing happens often enough in both runs to be compared."
    says = f"Nothing changed by more than chance makes it, at a false discovery rate of {100 * alpha:g}%."
    largest = max(_decisive(tested) or tested, key=lambda one: one.a.total_ns if one.a else 0)
    assert largest.shift is not None
    low, high = largest.percent(largest.shift.low), largest.percent(largest.shift.high)
    if low is not None and high is not None:
        says += f" The change of {largest.key[1]}, which takes most, is from {low:+.1f}% to {high:+.1f}%."
    return says
