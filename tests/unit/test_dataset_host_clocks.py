"""Two clocks of one host, related by the header of a capture."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pytest

from tracepipe.dataset.alignment import Alignment, Line, Placement
from tracepipe.dataset.build import build
from tracepipe.dataset.clocks_table import related, relations
from tracepipe.dataset.places import Rank

_PAIR = Path(__file__).parents[2] / "fixtures/merged-pytorch"
_BOOT, _REAL, _FAR = "node0: monotonic since boot a", "node0: realtime", "node1: realtime"
_CLOCKS = [_BOOT, _REAL, _FAR]
_EPOCH_NS = 1_795_000_000_000_000_000
_SECOND_NS = 1_000_000_000


def rank_of(clock: str, start_ns: int, end_ns: int, ahead_ns: int) -> Rank:
    """A rank that was recorded from one time of its clock to another."""
    source = ("run.jsonl", "tracepipe", 1, 1, None)
    counts = (0, 0, 0, 0, 0, [])
    return Rank("node0", 0, None, clock, *source, start_ns, end_ns, ahead_ns, None, None, *counts)


def recorded(header_ns: int = 10 * _SECOND_NS) -> list[Rank]:
    """A capture whose header is at 10 s, and a trace from 12 to 20 s after the boot."""
    return [
        rank_of(_BOOT, header_ns, 21 * _SECOND_NS, _EPOCH_NS),
        rank_of(_REAL, _EPOCH_NS + 12 * _SECOND_NS, _EPOCH_NS + 20 * _SECOND_NS, 0),
        rank_of(_FAR, _EPOCH_NS, _EPOCH_NS + 30 * _SECOND_NS, 0),
    ]


def placed(offset_ns: int, shared: int = 100) -> Placement:
    return Placement(Line(0, offset_ns, 0), 1_000, shared, 0, 0, 1 << 62)


def test_relations_hold_both_ways_and_are_less_certain_far_from_the_header() -> None:
    back, there = relations(recorded(), _CLOCKS)
    assert (back.clock, back.other, back.ahead_ns) == (0, 1, -_EPOCH_NS)
    assert (there.clock, there.other, there.ahead_ns) == (1, 0, _EPOCH_NS)
    assert there.bound_ns == 5_000 + 10 * 500_000  # 10 s at 500 ppm
    assert back.bound_ns == 5_000 + 11 * 500_000
    # Of several headers, the nearest one.
    nearer = [*recorded(), rank_of(_BOOT, 15 * _SECOND_NS, 16 * _SECOND_NS, _EPOCH_NS + 7)]
    _, there = relations(nearer, _CLOCKS)
    assert (there.ahead_ns, there.bound_ns) == (_EPOCH_NS + 7, 5_000 + 5 * 500_000)


def test_the_end_of_a_capture_relates_as_its_header_does_unless_the_clock_was_set() -> None:
    capture, *others = recorded()
    ended = capture._replace(last_at_ns=21 * _SECOND_NS, last_realtime_offset_ns=_EPOCH_NS + 5_000_000)
    _, there = relations([ended, *others], _CLOCKS)
    assert (there.ahead_ns, there.bound_ns) == (_EPOCH_NS + 5_000_000, 5_000 + 9 * 500_000 + 2_500)
    was_set = capture._replace(last_at_ns=21 * _SECOND_NS, last_realtime_offset_ns=_EPOCH_NS + 6_000_000)
    assert list(relations([was_set, *others], _CLOCKS)) == []


def test_a_clock_without_collectives_is_placed_by_the_other_one_of_its_host() -> None:
    found = Alignment(2, {0: placed(_EPOCH_NS + 5), 2: placed(0)}, {1: "shares fewer"})
    more = related(found, relations(recorded(), _CLOCKS), _CLOCKS)
    assert (sorted(more.placements), more.refused) == ([0, 1, 2], {})
    assert more.placements[1].line.place(_EPOCH_NS + 42) == _EPOCH_NS + 47
    assert more.placements[1].bound_ns == 1_000 + 5_000 + 10 * 500_000
    assert (more.placements[1].shared, more.placements[1].first_ns) == (0, _EPOCH_NS + 12 * _SECOND_NS + 5)
    other_way = related(
        Alignment(1, {1: placed(0), 2: placed(0)}, {0: "shares fewer"}),
        relations(recorded(), _CLOCKS),
        _CLOCKS,
    )
    assert other_way.placements[0].line.place(42) == _EPOCH_NS + 42


@pytest.mark.parametrize(("away_ns", "is_refused"), [(5_000_000, False), (6_000_000, True)])
def test_collectives_that_contradict_the_header_place_nothing(away_ns: int, is_refused: bool) -> None:
    found = Alignment(2, {0: placed(_EPOCH_NS), 1: placed(away_ns, 8), 2: placed(0)}, {})
    more = related(found, relations(recorded(), _CLOCKS), _CLOCKS)
    assert (1 in more.refused, 1 in more.placements) == (is_refused, not is_refused)
    assert 0 in more.placements
    if is_refused:
        assert "contradict what the header of a capture says" in more.refused[1]


def test_no_header_and_no_host_relate_nothing() -> None:
    unknown = [one._replace(realtime_offset_ns=None) for one in recorded()]
    assert list(relations(unknown, _CLOCKS)) == []
    assert list(relations(recorded()[1:], _CLOCKS)) == []


@pytest.mark.slow
def test_a_capture_and_a_trace_of_pytorch_of_one_host(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "vm").mkdir(parents=True)
    shutil.copy(_PAIR / "probes.jsonl.zst", runs / "vm/0.jsonl.zst")
    shutil.copy(_PAIR / "kineto.json.zst", runs / "vm/1.json.zst")
    built = build([str(runs)], str(tmp_path / "ds"), jobs=1)
    assert built.aligned is not None
    assert len(built.aligned.placements) == 2
    alignment = {row["clock"]: row for row in _layer(tmp_path, "alignment").iter_rows(named=True)}
    (own,) = (row for row in alignment.values() if row["offset_ns"])
    assert 500_000 < own["bound_ns"] < 1_000_000  # the header is 8 s before, the footer 1.5 s after
    calls = _layer(tmp_path, "calls")
    ranks = _layer(tmp_path, "ranks").select("rank", "clock")
    calls = calls.join(ranks, "rank").with_columns(
        at_ns=pl.col("start_ns") + pl.col("clock").replace_strict(
            {clock: row["offset_ns"] for clock, row in alignment.items()}, return_dtype=pl.Int64
        )
    )  # fmt: skip
    probed, traced = (
        calls.filter(pl.col("rank") == rank).select("name", "at_ns").sort("at_ns") for rank in (0, 1)
    )
    both = traced.join_asof(
        probed.rename({"at_ns": "probed_ns"}), left_on="at_ns", right_on="probed_ns", by="name",
        strategy="nearest", check_sortedness=False,
    )  # fmt: skip
    away_ns = (both["at_ns"] - both["probed_ns"]).drop_nulls()
    assert len(away_ns) > 40
    assert abs(away_ns.median()) < 5_000  # type: ignore[arg-type, operator]


def _layer(folder: Path, layer: str) -> pl.DataFrame:
    return pl.read_parquet(folder / f"ds/layer={layer}/**/*.parquet", hive_partitioning=True)
