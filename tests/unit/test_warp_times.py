"""Batches of warps on the trace clock: some that are placed at once are as each would be placed alone."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.warp_readings import LikelyGpu
from tracepipe.clocks import warp_times
from tracepipe.clocks.maps import ClockMap, offset_map
from tracepipe.event import warps as event_warps
from tracepipe.event.warps import Others, PlacedWarps, Warps

pytestmark = pytest.mark.usefixtures("core")
CLOCK = "globaltimer:0"


def small_batches(seed: int) -> list[Warps]:
    """Batches of a GPU, cut to a few warps, with the columns that they happen to have."""
    dice, made = Random(seed), []
    for base_ns, *columns in LikelyGpu(seed).batches():
        some = min(len(columns[0]), dice.choice((0, 1, 1, 1, 2, 5)))
        counts = columns[6]
        left = some if counts is None else int(counts[:some].sum())
        names = ("entry_ns", "exit_ns", "sm", "slot", "entry_clk", "exit_clk", "exit_count")
        sizes = (some, left, some, some, some, left, some)
        found = zip(names, columns, sizes, strict=True)
        given: dict[str, Any] = {name: column[:size] for name, column, size in found if column is not None}
        for name in ("sm", "slot", "entry_clk"):
            if dice.random() < 0.1:
                given.pop(name, None)
        if dice.random() < 0.02:
            given["exit_ns"] = given["exit_ns"] + (1 << 61)
        made.append(Warps(launched={}, ts_ns=base_ns, warp=np.arange(some), **given))
    return made


def drifting(batches: list[Warps]) -> ClockMap:
    """A clock that is slow by a thousandth or more, related at two times among those of the batches."""
    first_ns = batches[0].ts_ns + 10
    length_ns = batches[-1].ts_ns + 3000 - first_ns
    source_ns = np.array([first_ns, first_ns + length_ns], np.int64)
    trace_ns = np.array([10**12, 10**12 + length_ns + length_ns // 500], np.int64)
    bounds_ns = np.array([50, 60, 70], np.int64)
    return ClockMap(CLOCK, "fit", source_ns, trace_ns, bounds_ns, bounds_ns, (1001, 1000), (5, 8))


def placed(clock_map: ClockMap, batches: list[Warps]) -> list[dict[str, Any]]:
    times, numbers = warp_times.WarpTimes(), np.arange(len(batches))
    groups = (times.place(clock_map, group) for _, group in Others(batches).groups(numbers))
    return listed([one for group in groups for one in group])


def listed(placed: list[PlacedWarps]) -> list[dict[str, Any]]:
    def value(one: Any) -> Any:
        return one.tolist() if isinstance(one, np.ndarray) else one

    return [{field.name: value(getattr(one, field.name)) for field in fields(one)} for one in placed]


@given(st.integers(0, 1 << 32), st.sampled_from(["same", "offset", "fit"]))
def test_batches_that_are_placed_at_once_are_as_each_alone(seed: int, method: str) -> None:
    batches = small_batches(seed)
    clock_map = offset_map(CLOCK, method, 5 * (method == "offset"), 7 * (method == "offset"))
    if method == "fit":
        clock_map = drifting(batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_warps, "SMALL_MAX", 0)
        alone = placed(clock_map, batches)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(event_warps, "AT_ONCE_MAX", 20)
        assert placed(clock_map, batches) == alone
    assert placed(clock_map, batches) == alone
