"""What two GPUs recorded: a step without its extra part is as long as the one that has none."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.golden.cases import FIXTURES
from tests.support.here import build_here
from tracepipe.api.options import ReadOptions
from tracepipe.api.reports import REPORTS, make
from tracepipe.dataset.places import Dataset, read_rows
from tracepipe.errors import TracepipeError
from tracepipe.ranks.engine import opened
from tracepipe.ranks.job import Job
from tracepipe.ranks.whatif import whatif

EXTRAS = ("host", "gpu", "sync", "sleep", "small")


def made(name: str, dataset: Path, **given: Any) -> dict[str, Any]:
    report = REPORTS[name]
    options, how = report.options(**given), ReadOptions()
    return make(report, [[str(dataset)]], options, how, showing=lambda _: nullcontext()).result.as_json()


@pytest.mark.parametrize(
    ("case", "off"), [("ddp-h200", 0.01), ("small-fsdp-h200", 0.05)], ids=["GPU-bound", "host-bound"]
)
def test_of_all_ranks(case: str, off: float, tmp_path: Path) -> None:
    dataset = tmp_path / "ds"
    build_here(str(FIXTURES / case), str(dataset))
    found = Dataset.opened(str(dataset))
    names = {one["name"]: one["step"] for one in read_rows(found.part("steps", *found.ranks()[0]))}
    lengths_ns = {one["step"]: one["mean_ns"] for one in made("steps", dataset)["steps"]}
    truth_ns = lengths_ns[names["step none"]]
    for extra in EXTRAS:
        (row,) = made("whatif", dataset, without=f"extra-{extra}")["changes"]
        step_ns = lengths_ns[names[f"step {extra}"]]
        assert (row["steps"], row["step_ns"]) == (1, pytest.approx(step_ns, rel=1e-3))
        assert row["new_ns"] == pytest.approx(truth_ns, rel=off)
        assert row["low_ns"] <= step_ns - truth_ns <= row["high_ns"]
    every = made("whatif", dataset, top=0)["changes"]
    assert {f"without extra-{extra}" for extra in EXTRAS} <= {one["change"] for one in every}
    (row,) = made("whatif", dataset, faster="nvjet*=1")["changes"]
    assert row["steps"] == 0
    (row,) = made("whatif", dataset, fuse="CUDAFunctor_add, vectorized_layer_norm_kernel")["changes"]
    assert (row["steps"], row["saves_ns"] >= 0) == (6, True)
    (row,) = made("whatif", dataset, overlap="nccl*")["changes"]
    assert (row["steps"], abs(row["saves_ns"]) < 0.02 * truth_ns) == (6, True)
    for options, message in (({"without": "no*"}, "No range"), ({"like_peers": 7}, "no rank 7")):
        with pytest.raises(TracepipeError, match=message):
            made("whatif", dataset, **options)
    # One of the two ranks does all that is extra, so that they are not taken for peers.
    with pytest.raises(TracepipeError, match="same work"):
        made("whatif", dataset, like_peers=1)
    with opened("duckdb", found) as engine:
        job = Job(engine, found)
        job.ranks["behaviour"][:] = 0
        answer = whatif(job, REPORTS["whatif"].options(like_peers=1))
    (row,) = answer.as_json()["changes"]
    assert row["new_ns"] == pytest.approx(truth_ns, rel=off)
    first = "compute" if case == "ddp-h200" else "host"
    assert any(note.startswith(f"the critical path then: rank 1 {first} ") for note in answer.notes)


def test_waits_of_streams_that_were_not_recorded(tmp_path: Path) -> None:
    """As in traces of PyTorch's profiler: its collectives wait for what was launched before them."""
    for rank in range(2):
        with zstandard.open(FIXTURES / "ddp-h200" / f"{rank}.jsonl.zst", "rt") as lines:
            kept = [line for line in lines if "EventRecord" not in line and "WaitEvent" not in line]
        (tmp_path / f"{rank}.jsonl").write_text("".join(kept))
    build_here(str(tmp_path), str(tmp_path / "ds"))
    found = Dataset.opened(str(tmp_path / "ds"))
    names = {one["name"]: one["step"] for one in read_rows(found.part("steps", *found.ranks()[0]))}
    lengths_ns = {one["step"]: one["mean_ns"] for one in made("steps", tmp_path / "ds")["steps"]}
    for extra in EXTRAS:
        (row,) = made("whatif", tmp_path / "ds", without=f"extra-{extra}")["changes"]
        assert row["new_ns"] == pytest.approx(lengths_ns[names["step none"]], rel=0.02)
    with opened("duckdb", found) as engine:
        assert Job(engine, found, names["step none"]).path, "also where it is asked for first"
