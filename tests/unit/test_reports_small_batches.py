"""Columns of warps of launches that have few each: the same whether they are added at once or one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from tracepipe.event import warps as event_warps
from tracepipe.event.model import Header
from tracepipe.store.run import Run, load_run

pytestmark = pytest.mark.usefixtures("core")
FULL = (1 << 32) - 1


def batch(launch: int, **columns: Any) -> dict[str, Any]:
    record = {"ts_ns": 100 * launch, "type": "gpu_warp", "name": f"k{launch % 2}", "launch": launch}
    return record | {"warp": [0, 1], "entry_ns": [0, 3], "exit_ns": [50, 60], "block": [64, 1, 1]} | columns


BATCHES = [
    batch(1, sm=[1, 2], slot=[0, 0]),
    batch(2, gpu=1, pid=7, stream=3, exit_clk=[70, 80]),
    batch(3, exit_mask=[FULL, 7], entry_mask=[FULL, 7]),
    batch(4, exit_count=[2, 0], exit_ns=[5, 9]),
    batch(5, warp=[], entry_ns=[], exit_ns=[]),
    batch(6, exit_count=[1, 2], exit_ns=[5, 9, 8], exit_mask=[FULL, 1, 2], sm=[3, 3]),
    batch(7, entry_ns=[0, 1 << 62]),
    batch(8, exit_ns=[1 << 62, 1]),
    batch(9, exit_clk=[70, 80], ranges=["load"], range_count=[1, 0], range_name=[0], range_clk=[1],
          range_dur_clk=[5]),
    batch(10, block=[32, 2, 2], entry_mask=[3, FULL], exit_clk=[7, 8], slot=[4, 5], sm=[6, 7]),
]  # fmt: skip


def loaded(path: Path, small_max: int, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(event_warps, "SMALL_MAX", small_max)
    return load_run(str(path))


@pytest.mark.parametrize("order", [1, -1])
def test_batches_of_warps_are_added_at_once_as_each_alone(
    order: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.jsonl"
    lines = [Header(clock="monotonic").to_record(), *BATCHES[::order]]
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)) + b"\n")
    alone, at_once = (loaded(path, most, monkeypatch) for most in (0, 1 << 10))
    assert at_once.warps.fetchall() == alone.warps.fetchall()
    assert at_once.exits.fetchall() == alone.exits.fetchall()
    assert len(at_once.warps) == 2 * (len(BATCHES) - 3)
    assert at_once.facts == alone.facts
    assert len(at_once.facts.problems) == 2
