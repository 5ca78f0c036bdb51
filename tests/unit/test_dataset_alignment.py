"""Clocks of several hosts on one, by the ends of collectives: how far off, and what cannot be placed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tracepipe.dataset.alignment import LEAST_SHARED, Alignment, Line, Meetings, align

_EPOCH_NS = 1_795_000_000_000_000_000


class Job:
    """Collectives of some ranks; `clock_of` has the clock of each, and `in_it` who is in which collective."""

    def __init__(
        self, clock_of: list[int], collectives: int, seed: int, last: int | None = None, share: float = 1
    ) -> None:
        rng = np.random.default_rng(seed)
        self.clock_of = np.array(clock_of)
        clocks = int(self.clock_of.max()) + 1
        self.ahead_ns = rng.integers(-5_000_000, 5_000_000, clocks)
        self.drift_ppb = rng.integers(-10_000, 10_001, clocks)
        self.at_ns = np.cumsum(rng.integers(500_000, 3_000_000, collectives))
        start_ns = self.at_ns - rng.integers(50_000, 2_000_000, (len(clock_of), collectives))
        if last is not None:
            is_late = rng.random(collectives) < share
            start_ns[last] = np.where(is_late, self.at_ns - 20_000, start_ns[last])
        last_ns = start_ns.max(0)
        # Of one length where a rank is often last: then it leaves as late each time.
        transfer_ns = rng.choice([30_000, 80_000, 400_000] if share == 1 else [300_000], collectives)
        end_ns = last_ns + transfer_ns + np.rint(rng.normal(0, 1_500, start_ns.shape)).astype(np.int64)
        # As on two H200s, the last one leaves a little later.
        self.start_ns, self.end_ns = (
            start_ns,
            end_ns + np.where(start_ns == last_ns, transfer_ns * 8 // 100, 0),
        )
        self.in_it = np.ones(start_ns.shape, np.bool_)

    def shown(self, clock: Any, ns: Any) -> Any:
        """What clocks show at times of the job."""
        return _EPOCH_NS + ns + self.ahead_ns[clock] + ns * self.drift_ppb[clock] // 1_000_000_000

    def aligned(self) -> Alignment:
        """The clocks, by the collectives of those who are in them."""
        rank, collective = np.nonzero(self.in_it)
        clock = self.clock_of[rank]
        times = (self.shown(clock, ns[rank, collective]) for ns in (self.start_ns, self.end_ns))
        meetings = Meetings.of(clock, collective.astype(np.int64), *times)
        return align(meetings, int(self.clock_of.max()) + 1)

    def errors_ns(self, found: Alignment) -> dict[int, int]:
        """How far each placed clock is off the reference, at most, while collectives ran."""
        truth = self.shown(np.full(len(self.at_ns), found.reference), self.at_ns)
        return {
            clock: int(
                np.abs(one.line.place_all(self.shown(np.full(len(truth), clock), self.at_ns)) - truth).max()
            )
            for clock, one in found.placements.items()
        }


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("clock_of", "collectives", "last", "share", "most_ns"),
    [
        pytest.param(
            [c // 4 for c in range(80)], 200, 7, 1, 80_000, id="20 hosts of 4, one rank always last"
        ),
        pytest.param([c // 4 for c in range(80)], 200, 7, 0.75, 320_000, id="20 hosts of 4, one often last"),
        pytest.param([0, 1, 2], 400, 1, 0.6, 320_000, id="three ranks, one last more often than not"),
        pytest.param([0, 1], 16, None, 1, 100_000, id="two ranks"),
        pytest.param([0, 1], 300, 0, 1, 45_000, id="two ranks, one always last"),
        pytest.param([0, 1], 300, 0, 0.75, 350_000, id="two ranks, one often last"),
        pytest.param(list(range(8)), LEAST_SHARED, None, 1, 450_000, id="as few collectives as can be"),
    ],
)
def test_two_clocks_are_within_the_sum_of_their_bounds(
    clock_of: list[int], collectives: int, last: int | None, share: float, most_ns: int, seed: int
) -> None:
    """A bound is about the shortest transfer, by which ranks may leave apart, and its noise."""
    job = Job(clock_of, collectives, seed, last, share)
    found = job.aligned()
    assert (len(found.placements), found.refused) == (max(clock_of) + 1, {})
    own_ns = found.placements[found.reference].bound_ns
    for clock, error_ns in job.errors_ns(found).items():
        assert error_ns <= found.placements[clock].bound_ns + own_ns
        assert found.placements[clock].bound_ns < most_ns


def test_no_rank_leaves_before_another_one_comes() -> None:
    """`early_ns` and `late_ns` are certain: where the true clock lies is never outside."""
    job = Job([0, 1, 2, 3], 100, 3, last=2)
    found = job.aligned()
    reference = found.placements[found.reference]
    assert (reference.early_ns, reference.late_ns, reference.bound_ns) == (None, None, 0)
    for clock in found.placements.keys() - {found.reference}:
        one, off_ns = found.placements[clock], job.errors_ns(found)[clock]
        assert one.early_ns is not None
        assert one.late_ns is not None
        assert max(one.early_ns, one.late_ns) >= off_ns
        assert one.late_ns >= 20_000 or one.early_ns >= 20_000


@pytest.mark.parametrize("clocks", [2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_clocks_whose_ranks_leave_early_each_time_are_placed(clocks: int, seed: int) -> None:
    """No distance of ends shows that a rank leaves by half a transfer before another one, as with sockets."""
    job = Job(list(range(clocks)), 200, seed)
    transfer_ns = job.end_ns.min(0) - job.start_ns.max(0)
    job.end_ns -= np.rint(np.linspace(0, 0.5, clocks)[:, None] * transfer_ns).astype(np.int64)
    found = job.aligned()
    reference = found.placements[found.reference]
    for clock, error_ns in job.errors_ns(found).items():
        assert error_ns <= found.placements[clock].bound_ns + reference.bound_ns
        assert error_ns < 6_000 * clocks
        assert found.placements[clock].bound_ns < 60_000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("pause_ns", [0, 3_000_000_000])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 0.5, 0.8])
@pytest.mark.parametrize("begin", ["the same", "barriers"])
@pytest.mark.parametrize("clocks", [2, 3])
def test_a_clock_whose_rank_leaves_earlier_from_some_moment_on_is_within_its_bound(
    clocks: int, begin: str, share: float, pause_ns: int, seed: int
) -> None:
    """As where a link becomes slow: that is no drift. A program often begins with barriers, which are short,
    and limit a clock to some µs at one end.
    """
    job, rng, count = Job(list(range(clocks)), 240, seed), np.random.default_rng(seed), 240
    changed = int(share * count)
    later_ns = np.where(np.arange(count) < changed, 0, pause_ns)
    job.at_ns, job.start_ns = job.at_ns + later_ns, job.start_ns + later_ns
    last_ns = job.start_ns.max(0)
    noise_ns = np.rint(rng.normal(0, 1_500, job.start_ns.shape)).astype(np.int64)
    job.end_ns = last_ns + 80_000 + noise_ns
    job.end_ns[0, changed:] -= 12_000
    if begin == "barriers":
        job.end_ns[:, :changed] = last_ns[:changed] + 4_000 + rng.integers(0, 1_000, (clocks, changed))
    found = job.aligned()
    for clock, error_ns in job.errors_ns(found).items():
        assert error_ns <= found.placements[clock].bound_ns


def test_clocks_that_do_not_drift_are_known_to_do_so() -> None:
    """Over two minutes, with most of the collectives in the last of these."""
    job = Job([0, 1], 200, 8)
    job.drift_ppb[:] = 0
    later_ns = np.where(np.arange(200) < 20, 0, 120_000_000_000)
    job.at_ns, job.start_ns, job.end_ns = (ns + later_ns for ns in (job.at_ns, job.start_ns, job.end_ns))
    found = job.aligned()
    (placed,) = (one for clock, one in found.placements.items() if clock != found.reference)
    assert (abs(placed.line.drift_ppb) <= 20, placed.dropped) == (True, 0)
    assert job.errors_ns(found)[1 - found.reference] <= placed.bound_ns < 120_000


def test_collectives_that_all_end_at_one_time_show_no_drift() -> None:
    """As where they are one launch. Half of them alone may decide the line."""
    job = Job([0, 1], 20, 9)
    job.drift_ppb[:] = 0
    job.end_ns[:] = int(job.end_ns.max())
    job.start_ns[:] = job.end_ns - np.where(np.arange(20) < 10, 50_000, 90_000)
    found = job.aligned()
    assert [one.line.drift_ppb for one in found.placements.values()] == [0, 0]
    assert max(job.errors_ns(found).values()) <= max(one.bound_ns for one in found.placements.values())


def test_groups_that_reach_from_host_to_host_are_enough() -> None:
    """A pipeline: each stage exchanges with the next one alone."""
    job = Job([0, 1, 2, 3, 4], 400, 4)
    job.in_it[:] = False
    for stage in range(4):
        job.in_it[stage : stage + 2, stage::4] = True
    found = job.aligned()
    assert (sorted(found.placements), found.refused) == ([0, 1, 2, 3, 4], {})
    bounds_ns = sum(one.bound_ns for one in found.placements.values())
    assert all(error_ns <= bounds_ns for error_ns in job.errors_ns(found).values())


def test_what_nothing_relates_is_refused() -> None:
    job = Job([0, 1, 2, 3], 100, 5)
    job.in_it[2:, :50] = False
    job.in_it[:2, 50:] = False
    job.in_it[3, LEAST_SHARED // 2 + 50 :] = False
    found = job.aligned()
    few = f"shares fewer than {LEAST_SHARED} collectives with clocks that are placed"
    assert sorted(found.placements) == [0, 1]
    assert found.refused == {2: few, 3: few}


def test_collectives_that_are_not_the_same_ones_are_dropped() -> None:
    job = Job([0, 1, 2], 200, 6)
    rng = np.random.default_rng(1)
    wrong = rng.choice(200, 20, replace=False)
    job.end_ns[2, wrong] += 30_000_000
    found = job.aligned()
    assert found.placements[2].dropped > 0
    # Nor do they make the certain limits impossible ones.
    limits_ns = [(one.early_ns or 0, one.late_ns or 0) for clock, one in found.placements.items() if clock]
    assert found.reference == 0
    assert (np.array(limits_ns) > 0).all()
    assert job.errors_ns(found)[2] <= found.placements[2].bound_ns + found.placements[0].bound_ns < 50_000


def test_a_clock_whose_ends_lie_on_no_line_is_refused() -> None:
    job = Job([0, 1, 2], 200, 7)
    job.end_ns[2] += np.random.default_rng(1).integers(0, 10**9, 200) ** 2 // 10**6
    assert sorted(job.aligned().placements) == [0, 1]
    assert list(job.aligned().refused) == [2]


def test_no_collective_at_all() -> None:
    nothing = np.zeros(0, np.int64)
    found = align(Meetings.of(nothing, nothing, nothing, nothing), 2)
    assert list(found.placements) == [0]
    assert list(found.refused) == [1]


def test_times_are_placed_exactly_however_large_they_are() -> None:
    line = Line(at_ns=_EPOCH_NS, offset_ns=-7, drift_ppb=-499_999)
    for away_ns in (0, 1, 999_999, 10**13 + 17, -(10**15) - 3):
        exact = _EPOCH_NS + away_ns - 7 + away_ns * -499_999 // 10**9
        placed = int(line.place_all(np.array([_EPOCH_NS + away_ns]))[0])
        assert abs(placed - exact) <= 1
