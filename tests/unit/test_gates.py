"""Gates: what recordings of two sides say about a bound, tested against counting all divisions and
simulations.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from math import comb

import pytest

from tracepipe.analyses import gates
from tracepipe.analyses.gates import Gate, judge, least_recordings
from tracepipe.errors import TracepipeError
from tracepipe.libraries import np

ALPHA = 0.05
DRAWS = 1000


@pytest.mark.parametrize("alpha", [0.05, 0.025, 0.01, 0.2])
def test_a_bound_is_the_difference_that_counting_all_divisions_gives(alpha: float) -> None:
    for count_a in range(1, 7):
        for count_b in range(1, 7):
            places = combinations(range(count_a + count_b), count_b)
            in_order = Counter(sum(place - at for at, place in enumerate(some)) for some in places)
            most, rank, below = alpha * comb(count_a + count_b, count_a), 0, 0
            while (below := below + in_order[rank]) <= most:
                rank += 1
            assert gates._rank(count_a, count_b, alpha) == rank


def test_how_many_recordings_a_bound_needs() -> None:
    assert [least_recordings(alpha) for alpha in (0.05, 0.025, 0.01)] == [3, 4, 5]


def answers(gate: str, longer: float, count: int, *, is_heavy: bool = False) -> Counter[str]:
    """How often each answer is given of simulated recordings whose steps differ by 1%."""
    draw, found = np.random.default_rng(1), Counter[str]()
    for _ in range(DRAWS):
        noise = draw.standard_t(2, 2 * count) if is_heavy else draw.normal(size=2 * count)
        values = 1e7 * (1 + 0.01 * noise)
        values[count:] *= 1 + longer
        found[judge(Gate.read(gate), values, values, count, ALPHA, 1).answer] += 1
    return found


@pytest.mark.parametrize("is_heavy", [False, True])
@pytest.mark.parametrize("count", [3, 5, 8])
def test_a_gate_that_holds_is_broken_no_more_often_than_alpha(count: int, is_heavy: bool) -> None:
    """At the bound itself, where it is hardest; and where the bound is 3% away, hardly ever."""
    # Three standard deviations above what is expected of so many draws.
    most = DRAWS * ALPHA + 3 * (DRAWS * ALPHA * (1 - ALPHA)) ** 0.5
    at_bound = answers("step<=+0%", 0, count, is_heavy=is_heavy)
    assert at_bound["broken"] <= most
    assert at_bound["held"] <= most
    assert answers("step<=+3%", 0, count, is_heavy=is_heavy)["broken"] <= DRAWS // 100


@pytest.mark.parametrize(("gate", "longer", "least"), [("step<=+1%", 0.03, 0.8), ("step<=+3%", 0.1, 0.99)])
def test_longer_steps_break_gates(gate: str, longer: float, least: float) -> None:
    found = answers(gate, longer, 5)
    assert found["broken"] >= least * DRAWS
    assert found["held"] == 0


def test_several_gates_are_broken_no_more_often_together() -> None:
    values = np.array([10.0, 11, 12, 13, 14, 15])
    alone, of_two = (judge(Gate.read("wall<=+0%"), values, values, 3, ALPHA, count) for count in (1, 2))
    assert (alone.answer, of_two.answer, of_two.needed) == ("broken", "cannot tell", 4)


@pytest.mark.parametrize(
    "text", ["", "step", "step<3%", "step<=3%", "steps<=+3%", "step<=+%", "step<=+1.2.3%", "step<=+3 parsecs"]
)
def test_a_text_that_is_no_gate_is_refused(text: str) -> None:
    with pytest.raises(TracepipeError):
        Gate.read(text)


@pytest.mark.parametrize("bound", ["+3", "-0.5", "+ 3"])
def test_a_bound_without_a_unit_is_refused(bound: str) -> None:
    with pytest.raises(TracepipeError, match="A bound without a unit") as refused:
        Gate.read(f"step<={bound}")
    written = bound.replace(" ", "")
    assert refused.value.hint == f"Write step<={written}% or step<={written}ms."
