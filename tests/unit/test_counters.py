"""The registry of counter tracks: each is in it once, and viewers can tell which are which."""

from __future__ import annotations

from collections import Counter

from tracepipe.event import counters
from tracepipe.event.counters import COUNTERS, SUMMARY, CounterTrack


def test_every_counter_track_is_listed() -> None:
    defined = [one for one in vars(counters).values() if isinstance(one, CounterTrack)]
    assert Counter(defined) == Counter(COUNTERS)


def test_names_and_categories_tell_counters_apart() -> None:
    named = [(one.name, one.category) for one in COUNTERS if one.name]
    assert len(named) == len(set(named))


def test_counters_of_a_gpu_are_above_its_streams_and_those_of_a_process_below_its_threads() -> None:
    ranks = {one.owner: {two.rank for two in COUNTERS if two.owner == one.owner} for one in COUNTERS}
    assert ranks["gpu"] <= {0, counters.RANK_OF_GPU, counters.RANK_OF_SM}
    assert ranks["process"] == {counters.RANK_OF_PROCESS}


def test_a_summary_has_a_unit_by_which_readers_know_it() -> None:
    assert all(one.unit for one in COUNTERS if one.category == SUMMARY)
