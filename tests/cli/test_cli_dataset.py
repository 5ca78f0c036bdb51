"""`tracepipe dataset build` on the recordings of simulated jobs."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import zipfile
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.cli.test_output import piped
from tests.support import nsys_export
from tests.support.program import PYTHONPATH
from tests.support.simulated_job import SimulatedJob
from tracepipe.dataset.build import build
from tracepipe.dataset.places import Dataset
from tracepipe.errors import InputError, OutputError

HEADER = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic"}
ROOT = Path(__file__).parents[2]
_ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}


def tracepipe(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tracepipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=_ENVIRONMENT)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulatedJob, Path]:
    """Two hosts with two ranks each, and where their recordings are."""
    folder = tmp_path_factory.mktemp("job")
    simulated = SimulatedJob(2, 2, steps=4, faults={2: "gpu"})
    simulated.write(folder / "runs")
    return simulated, folder / "runs"


@pytest.fixture(scope="module")
def dataset(job: tuple[SimulatedJob, Path]) -> Path:
    """Their dataset."""
    folder = job[1].parent / "ds"
    done = tracepipe("dataset", "build", job[1], "-o", folder)
    assert (done.returncode, done.stdout) == (0, "")
    *_, clocks, wrote = done.stderr.splitlines()
    assert clocks.startswith("clocks: 2 of 2 are placed on node000: realtime, within ")
    assert wrote == f"wrote {folder}: 4 ranks (4 written, 0 unchanged, 0 left out)"
    return folder


class Inline:
    """A pool that works in this process, which is quicker. What reads the recording `fatal` is killed."""

    fatal = ""

    def __init__(self, *_: object, **__: object) -> None:
        self._is_broken = False

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Any, source: Any, *more: Any) -> Future[Any]:
        """Does the work at once."""
        future = Future[Any]()
        self._is_broken |= Path(source.path).name == self.fatal
        try:
            if self._is_broken:
                raise BrokenProcessPool
            future.set_result(work(source, *more))
        except Exception as e:
            future.set_exception(e)
        return future


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> type[Inline]:
    """Has recordings read in this process."""
    monkeypatch.setattr("tracepipe.dataset.build.ProcessPoolExecutor", Inline)
    monkeypatch.setattr(Inline, "fatal", "")
    return Inline


def layer(dataset: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(dataset / f"layer={name}" / "**/*.parquet", hive_partitioning=True)


def recordings(job: tuple[SimulatedJob, Path], tmp_path: Path) -> Path:
    """A copy of the job's recordings."""
    for file in job[1].rglob("*.jsonl"):
        copy = tmp_path / "runs" / file.relative_to(job[1])
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    return tmp_path / "runs"


def contents(dataset: Path) -> dict[str, Any]:
    """Every file of a dataset, with when it was made."""
    return {str(file.relative_to(dataset)): file.stat().st_ino for file in dataset.rglob("*.parquet")}


def test_each_rank_has_its_layers(dataset: Path, job: tuple[SimulatedJob, Path]) -> None:
    ranks = layer(dataset, "ranks").sort("rank")
    assert ranks["rank"].to_list() == [0, 1, 2, 3]
    assert ranks["host"].to_list() == ["node000", "node000", "node001", "node001"]
    assert ranks["world_size"].to_list() == [4] * 4
    assert ranks["kernels"].to_list() == [4 * (8 + 9)] * 4
    assert ranks["collectives"].to_list() == [4 * 9] * 4
    assert ranks["lost"].sum() == ranks["skipped_lines"].sum() == 0
    assert [Path(source) for source in ranks["source"]] == sorted(job[1].rglob("*.jsonl"))
    kernels = layer(dataset, "kernels")
    assert len(kernels) == ranks["kernels"].sum()
    for _, own in kernels.group_by("rank"):
        assert own["start_ns"].is_sorted()


def test_steps_state_what_each_gpu_did(dataset: Path) -> None:
    steps = layer(dataset, "steps").sort("rank", "step")
    assert steps["step"].to_list() == [0, 1, 2, 3] * 4
    own = steps.filter(pl.col("rank") == 0)
    assert (own["start_ns"][1:] == own["end_ns"][:-1]).all()
    parts_ns = steps["compute_ns"] + steps["exposed_ns"] + steps["idle_ns"]
    assert (parts_ns == steps["end_ns"] - steps["start_ns"]).all()
    compute_ns = steps.group_by("rank").agg(pl.col("compute_ns").mean()).sort("rank")["compute_ns"].to_list()
    assert np.array(compute_ns) == pytest.approx(np.array([12e6, 12e6, 16.8e6, 12e6]), rel=0.02)
    assert steps["data_loading_ns"].to_numpy() == pytest.approx(np.full(16, 300_000), rel=0.2)
    # All wait for rank 2, which waits for no other.
    waits = steps.group_by("rank").agg(pl.col("communication_ns").sum()).sort("communication_ns")
    assert waits["rank"][0] == 2


def test_collectives_are_distinguished_by_operation_group_and_number(dataset: Path) -> None:
    found = layer(dataset, "collectives")
    assert found["operation"].value_counts().sort("operation").rows() == [
        ("all_gather", 64), ("all_reduce", 16), ("reduce_scatter", 64)
    ]  # fmt: skip
    assert sorted(found["process_group"].unique()) == [
        "all [0, …, 3]", "host [0, …, 1]", "host [2, …, 3]", "number [0, …, 2]", "number [1, …, 3]"
    ]  # fmt: skip
    assert found["leaves_together"].all()
    assert (found["exposed_ns"] == found["end_ns"] - found["start_ns"]).all()
    members = found.group_by("operation", "process_group", "seq").agg(pl.len(), pl.col("group_size").first())
    assert (members["len"] == members["group_size"]).all()


def test_clocks_are_placed_within_the_bound_that_is_stated(
    dataset: Path, job: tuple[SimulatedJob, Path]
) -> None:
    rows = {row["clock"]: row for row in layer(dataset, "alignment").to_dicts()}
    assert list(rows) == ["node000: realtime", "node001: realtime"]
    one = rows["node001: realtime"]
    bound_ns = one["bound_ns"] + rows["node000: realtime"]["bound_ns"]
    first, second = job[0].clocks
    for at_ns in (0, 50_000_000, 100_000_000):
        ns = second.of(at_ns)
        placed_ns = ns + one["offset_ns"] + (ns - one["at_ns"]) * one["drift_ppb"] // 10**9
        assert abs(placed_ns - first.of(at_ns)) <= bound_ns < 200_000  # one comes last each time


@pytest.mark.usefixtures("inline")
def test_what_has_not_changed_is_not_read_again(job: tuple[SimulatedJob, Path], tmp_path: Path) -> None:
    runs, folder = recordings(job, tmp_path), tmp_path / "ds"
    assert len(build([str(runs)], str(folder), jobs=1).written) == 4
    before = contents(folder)
    changed = runs / "node001" / "2.jsonl"
    lines = changed.read_text().splitlines(keepends=True)
    changed.write_text("".join(lines[:50]))
    built = build([str(runs)], str(folder), jobs=1)
    assert [one.rank.rank for one in built.written] == [2]
    assert built.unchanged == 3
    after = contents(folder)
    assert {name for name in after if after[name] != before.get(name)} == {
        name for name in after if "rank=2" in name or "alignment" in name
    }
    assert layer(folder, "ranks").sort("rank")["kernels"][2] < 68


@pytest.mark.usefixtures("inline")
def test_a_change_next_to_a_database_is_one_of_it(tmp_path: Path) -> None:
    path = nsys_export.make(tmp_path / "0.sqlite", nsys_export.tables())
    kernels, folder = "CUPTI_ACTIVITY_KIND_KERNEL", str(tmp_path / "ds")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma journal_mode = wal")
        before, found = path.stat(), []
        for _ in range(2):
            connection.execute(f"insert into {kernels} select * from {kernels}")
            found += [one.rank.kernels for one in build([str(path)], folder, jobs=1).written]
            assert build([str(path)], folder, jobs=1).unchanged == 1
        assert path.stat().st_mtime_ns == before.st_mtime_ns
    first, second = found
    assert second > first > 0


@pytest.mark.usefixtures("inline")
def test_a_rank_that_cannot_be_read_is_named_and_left_out(
    job: tuple[SimulatedJob, Path], tmp_path: Path
) -> None:
    runs, folder = recordings(job, tmp_path), tmp_path / "ds"
    (runs / "node000" / "1.jsonl").write_bytes(b"\x00\x01 no recording")
    (runs / "node000" / "nobody.jsonl").write_bytes((runs / "node000" / "0.jsonl").read_bytes())
    code, out, _ = piped(["dataset", "build", str(runs), "-o", str(folder), "--json"])
    assert code == 1
    found = json.loads(out)
    assert (found["ranks"], len(found["written"])) == (3, 3)
    left_out = {Path(path).name: reason for path, reason in found["left_out"].items()}
    assert list(left_out) == ["1.jsonl", "nobody.jsonl"]
    assert left_out["1.jsonl"].startswith("the content is not of a known input format. ")
    assert left_out["nobody.jsonl"].startswith("is of rank 0, as ")
    assert layer(folder, "ranks")["rank"].to_list() == [0, 2, 3]


def test_the_death_of_one_process_affects_no_other_rank(
    job: tuple[SimulatedJob, Path], tmp_path: Path, inline: type[Inline]
) -> None:
    inline.fatal = "1.jsonl"
    built = build([str(job[1])], str(tmp_path / "ds"), jobs=2)
    assert sorted(one.rank.rank for one in built.written) == [0, 2, 3]
    assert built.left_out == {
        str(
            job[1] / "node000" / "1.jsonl"
        ): "the process that read it was killed: free some memory, or use fewer --jobs"
    }


_KILLED_BUILD = """
import os, signal, sys
from pathlib import Path
from tracepipe.dataset.build import build

replace, moved = Path.replace, []

def replace_or_die(self, target):
    if Path(target).name == "part-0.parquet" and "layer=ranks" in str(target):
        moved.append(target)
        if len(moved) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)

if __name__ == "__main__":
    Path.replace = replace_or_die
    build([sys.argv[1]], sys.argv[2], jobs=1)
"""


@pytest.mark.slow
def test_a_build_that_is_killed_leaves_whole_ranks(
    job: tuple[SimulatedJob, Path], tmp_path: Path, inline: type[Inline]
) -> None:
    """Before the row of the last rank is in place: that rank is not there, and the next build adds it."""
    folder, program = tmp_path / "ds", tmp_path / "build.py"
    program.write_text(_KILLED_BUILD)
    killed = subprocess.run([sys.executable, program, job[1], folder], env=_ENVIRONMENT)
    assert killed.returncode == -signal.SIGKILL
    assert len(Dataset.opened(str(folder)).ranks()) == 3
    assert [one for one in folder.iterdir() if one.name.startswith(".")]
    built = build([str(job[1])], str(folder), jobs=1)
    assert (len(built.written), built.unchanged, built.ranks) == (1, 3, 4)
    assert not [one for one in folder.iterdir() if one.name.startswith(".")]


@pytest.mark.usefixtures("inline")
@pytest.mark.usefixtures("inline")
@pytest.mark.usefixtures("inline")
def test_ranks_in_an_archive(tmp_path: Path) -> None:
    archive, folder = tmp_path / "runs" / "all.zip", tmp_path / "ds"
    archive.parent.mkdir()
    (archive.parent / "no.zip").write_bytes(b"PK\3\4")
    with zipfile.ZipFile(archive, "w") as made:
        for rank in range(2):
            event = {"type": "memory", "phase": "I", "name": "alloc", "ts_ns": 5}
            lines = [HEADER, event | {"pid": 1 + rank * 10_000_000}, event | {"pid": 2}]
            made.writestr(f"node{rank}/{rank}.jsonl", "\n".join(map(json.dumps, lines)))
    assert len(build([f"{archive}/node1/1.jsonl"], str(folder)).written) == 1
    for _ in range(2):
        built = build([str(archive.parent)], str(folder))
        assert [*built.left_out] == [f"{archive.parent}/no.zip"]
        assert Dataset.opened(str(folder)).ranks() == [("node0", 0), ("node1", 1)]
    assert (built.unchanged, built.written) == (2, [])
    for path, said in (
        (f"{archive}/2.jsonl", "has no 2.jsonl"),
        (f"{folder}/dataset.json/x", "is not an archive"),
    ):
        with pytest.raises(InputError, match=said):
            build([path], str(folder))
    for written in build([str(archive)], str(tmp_path / "other")).written:
        assert ("has events of 2 machines" in written.remarks[-1]) == (written.rank.rank == 1)


def test_a_dataset_of_no_rank(tmp_path: Path) -> None:
    (tmp_path / "0.json").write_text("no recording")
    built = build([str(tmp_path / "0.json")], str(tmp_path / "ds"))
    assert (built.ranks, built.written, list(built.left_out)) == (0, [], [str(tmp_path / "0.json")])
    assert len(layer(tmp_path / "ds", "alignment")) == 0


def test_other_folders_are_not_touched(job: tuple[SimulatedJob, Path], tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="holds other files"):
        build([str(job[1])], str(mine))
    with pytest.raises(OutputError, match=r"Cannot write to .*notes.txt: Not a directory"):
        build([str(job[1])], str(mine / "notes.txt"))
    with pytest.raises(InputError, match="holds no recordings"):
        build([str(mine)], str(tmp_path / "ds"))
    with pytest.raises(InputError, match="cannot be read: No such file"):
        build([str(tmp_path / "nothing.jsonl")], str(tmp_path / "ds"))
    assert [file.name for file in mine.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_recorded_clocks_are_placed_within_what_is_certain(tmp_path: Path) -> None:
    """Four processes with a GPU each: no rank can have left a collective before all had come to it."""
    recorded = sorted((ROOT / "fixtures" / "collectives-a100").glob("*.zst"))
    build(list(map(str, recorded)), str(tmp_path / "ds"), jobs=1)
    clocks = pl.read_parquet(tmp_path / "ds" / "layer=alignment" / "part-0.parquet")
    assert clocks["shared"].to_list() == [60, 60, 60, 60]
    assert clocks["bound_ns"].is_between(11_000, 18_000).to_list() == [False, True, True, True]
    assert clocks["residual_ns"].max() < 7_000
    assert clocks["early_ns"].drop_nulls().is_between(11_000, 14_000).to_list() == [True] * 3
    assert clocks["late_ns"].drop_nulls().is_between(11_000, 14_000).to_list() == [True] * 3
    # All clocks are that of one host, and three collectives are a minute before the others.
    assert (clocks["drift_ppb"].abs().max(), clocks["dropped"].sum()) < (20, 1)


@pytest.mark.slow
def test_the_clocks_of_two_h200s_are_placed_where_they_are(tmp_path: Path) -> None:
    """Both were recorded on one clock, so the two are apart by the error."""
    recorded = sorted((ROOT / "fixtures" / "collectives-h200").glob("*.zst"))
    build(list(map(str, recorded)), str(tmp_path / "ds"), jobs=1)
    reference, placed = pl.read_parquet(tmp_path / "ds" / "layer=alignment" / "part-0.parquet").to_dicts()
    assert (reference["clock"], placed["shared"]) == ("host0: monotonic", 15)
    errors_ns = [
        abs(placed["offset_ns"] + (ns - placed["at_ns"]) * placed["drift_ppb"] // 10**9)
        for ns in (placed["first_ns"], placed["last_ns"])
    ]
    assert max(errors_ns) < 2_000
    assert (reference["bound_ns"], placed["residual_ns"] < 12_000) == (0, True)
    # Half of the shortest transfers both ways, and what crystals keep to in 62 ms.
    assert 76_000 < placed["bound_ns"] < 100_000
