"""Batches of warps are laid out as one: what is drawn does not depend on how many are."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import trace_batch
from tests.support.cores import new_tables
from tests.support.timeline_text import shown
from tracepipe.event import warps
from tracepipe.event.model import Header
from tracepipe.layout import LayoutOptions
from tracepipe.layout.draw import Layout

pytestmark = pytest.mark.usefixtures("core")


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """A batch of few warps on few slots, with the columns that it happens to have."""
    size = draw(st.sampled_from([0, 1, 1, 1, 2, 4]))

    def column(most: int, count: int = size, least: int = 0) -> list[int]:
        return draw(st.lists(st.integers(least, most), min_size=count, max_size=count))

    exits = draw(st.none() | st.just(column(3)))
    leaves = size if exits is None else sum(exits)
    record: dict[str, Any] = {
        "type": "gpu_warp",
        "name": draw(st.sampled_from(["k", "j"])),
        "ts_ns": draw(st.integers(0, 60)),
        "gpu": draw(st.integers(0, 1)),
        "warp": column(9),
        "entry_ns": column(20),
        "exit_ns": column(30, leaves),
    }
    optional = {
        "launch": draw(st.integers(1, 4)),
        "block": [64, 1, 1],
        "grid": [2, draw(st.integers(1, 2)), 1],
        "sm": column(1),
        "slot": column(1),
        "entry_mask": column((1 << 32) - 1),
        "exit_clk": column(99, leaves),
        "exit_mask": column((1 << 32) - 1, leaves),
    }
    record |= {name: optional[name] for name in draw(st.sets(st.sampled_from(sorted(optional))))}
    if exits is not None:
        record["exit_count"] = exits
    if "exit_clk" in record and draw(st.booleans()):
        last_clk = iter(record["exit_clk"])
        lives = [max((next(last_clk) for _ in range(count)), default=0) for count in exits or [1] * size]
        count = [draw(st.integers(0, 2)) for _ in lives]
        record |= {"ranges": ["load", "store"], "range_count": count, "range_name": column(1, sum(count))}
        record["range_clk"] = [0] * sum(count)
        record["range_dur_clk"] = [
            life for life, times in zip(lives, count, strict=True) for _ in range(times)
        ]
    return record


calls = st.builds(
    lambda ts_ns, launch: {
        "type": "userspace", "name": "cuLaunchKernel", "phase": "X", "ts_ns": ts_ns, "dur_ns": 1, "pid": 1,
        "tid": 1, "launch": launch,
    },
    st.integers(0, 60),
    st.integers(1, 4),
)  # fmt: skip
losses = st.builds(
    lambda ts_ns: {"type": "loss", "layer": "gpu_warp", "count": 1, "ts_ns": ts_ns}, st.integers(0, 60)
)


@pytest.mark.slow
@given(
    st.lists(st.one_of(batches(), batches(), calls, losses), max_size=12),
    st.sampled_from(["auto", "auto", "sm", "logical", "off"]),
    st.booleans(),
)
def test_what_is_drawn_does_not_depend_on_what_is_drawn_as_one(
    records: list[dict[str, Any]], mode: str, exits: bool
) -> None:
    def drawn(small_max: int, at_once_max: int) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(warps, "SMALL_MAX", small_max)
            patch.setattr(warps, "AT_ONCE_MAX", at_once_max)
            tables = new_tables()
            layout = Layout(Header(), tables, LayoutOptions(mode, exits))
            parts = [layout.place(trace_batch([dict(one) for one in records], tables)), *layout.finish()]
            return shown(parts), layout.outcomes, layout.end_ns

    assert drawn(0, 9) == drawn(9, 3) == drawn(1, 9) == drawn(9, 1 << 13)
