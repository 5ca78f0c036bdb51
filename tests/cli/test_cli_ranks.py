"""`tracepipe ranks` on datasets of simulated jobs: it finds the slow ranks, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.cli.test_output import piped
from tests.golden.cases import FIXTURES
from tests.support.here import build_here
from tests.support.simulated_job import Fault, SimulatedJob
from tracepipe.cli import app
from tracepipe.dataset.places import RANKS, Dataset
from tracepipe.ranks.engine import opened
from tracepipe.ranks.page import farthest

pytestmark = pytest.mark.slow

FAULTS: dict[int, Fault] = {1: "gpu", 6: "loader", 11: "link"}


def made(folder: Path, faults: dict[int, Fault], lost: tuple[int, ...] = (), steps: int = 6) -> Path:
    """The dataset of a job of four hosts with four ranks each."""
    job = SimulatedJob(4, 4, steps=steps, faults=faults)
    job.write(folder / "runs")
    for rank in lost:
        (folder / "runs" / job.host_of(rank) / f"{rank}.jsonl").unlink()
    build_here(str(folder / "runs"), str(folder / "ds"))
    return folder / "ds"


def asked(dataset: Path, *options: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["ranks", str(dataset), "--json", "--top", "0", *options])
    assert done.exit_code == 0, done.output
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three ranks are slow."""
    return made(tmp_path_factory.mktemp("job"), FAULTS)


@pytest.fixture(scope="module")
def tables(dataset: Path) -> dict[str, Any]:
    """The tables of that job."""
    return asked(dataset)


def test_the_slow_ranks_are_found_and_no_other(tables: dict[str, Any]) -> None:
    found = {(one["ranks"], one["slow"]) for one in tables["slow"]}
    assert found == {("1", "GPU"), ("6", "data loading"), ("11", "link")}


def test_a_link_that_is_crowded_at_times_is_slow(tmp_path: Path) -> None:
    """Some of its transfers are as short as those of the others."""
    found = asked(made(tmp_path, {11: "crowded link"}))
    assert [(one["ranks"], one["slow"]) for one in found["slow"]] == [("11", "link")]


def test_a_slow_gpu_has_its_clock_where_counters_were_recorded(tmp_path: Path) -> None:
    job = SimulatedJob(1, 4, faults={1: "gpu"})
    job.write(tmp_path / "runs")
    for rank in range(4):
        file = tmp_path / "runs" / job.host_of(rank) / f"{rank}.jsonl"
        header, *lines = file.read_text().splitlines()
        start_ns = json.loads(header)["start"]["realtime_ns"]
        for at in range(100):
            sample = {
                "ts_ns": start_ns + at * 1_000_000, "type": "hook", "layer": "gpu_counters", "phase": "C",
                "name": "gpu_counters", "dur_ns": 1_000_000, "gpu": 0,
                "args": {"SM clock MHz": 1410.0 if rank == 1 else 1980.0},
            }  # fmt: skip
            lines.insert(at, json.dumps(sample))
        file.write_text("\n".join([header, *lines, ""]))
    build_here(str(tmp_path / "runs"), str(tmp_path / "ds"))
    found = asked(tmp_path / "ds")
    assert [(one["ranks"], one["slow"]) for one in found["slow"]] == [("1", "GPU")]
    (note,) = (note for note in found["notes"] if "MHz" in note)
    assert note == "rank 1: its SMs ran at 1,410 MHz in its steps, those of the other ranks at 1,980 MHz"


def test_only_the_longest_time_of_a_single_step_is_stated(tmp_path: Path) -> None:
    found = asked(made(tmp_path, {1: "gpu"}, steps=1))
    assert found["slow"] == []
    (note,) = (note for note in found["notes"] if note.startswith("with one step of few ranks"))
    assert "no rank is called slow; longest: rank 1, GPU, " in note
    assert {one["kind"] for one in found["on_path"]} == {"not known"}


def test_slow_work_has_the_time_that_was_planted(tables: dict[str, Any]) -> None:
    """9 ms of data loading in a step, 40% of 12 ms of compute, three times the transfer."""
    more = {one["slow"]: (one["own_ns"], one["usual_ns"]) for one in tables["slow"]}
    own_ns, usual_ns = more["data loading"]
    assert own_ns - usual_ns == pytest.approx(9_000_000, rel=0.01)
    own_ns, usual_ns = more["GPU"]
    assert own_ns / usual_ns == pytest.approx(1.4, rel=0.01)
    own_ns, usual_ns = more["link"]
    assert own_ns / usual_ns == pytest.approx(3, rel=0.1)


@pytest.mark.parametrize("slow", [1, 6, 11])
def test_what_a_rank_costs_is_the_difference_to_the_job_without_it(
    tmp_path: Path, tables: dict[str, Any], slow: int
) -> None:
    rest = {rank: fault for rank, fault in FAULTS.items() if rank != slow}
    without = asked(made(tmp_path, rest))
    truth_ns = median_step_ns(tables) - median_step_ns(without)
    (one,) = (row for row in tables["slow"] if row["ranks"] == str(slow))
    assert one["costs_ns"] == pytest.approx(truth_ns, rel=0.06)
    assert one["low_ns"] <= one["costs_ns"] <= one["high_ns"]


def median_step_ns(tables: dict[str, Any]) -> float:
    return float(np.median([step["mean_ns"] for step in tables["steps"]]))


def test_rows_of_which_each_second_waits_for_nothing_are_a_program(tmp_path: Path) -> None:
    """DuckDB takes the type of a column from every second of 2,040 rows."""
    SimulatedJob(1, 2, steps=60).write(tmp_path / "runs")
    build_here(str(tmp_path / "runs"), str(tmp_path / "ds"))
    assert {one["rank"] for one in asked(tmp_path / "ds")["ranks"]} == {0, 1}


def test_nothing_is_found_where_nothing_is_slow(tmp_path: Path) -> None:
    assert asked(made(tmp_path, {}))["slow"] == []


def test_ranks_that_are_missing_are_named_and_blame_no_other(tmp_path: Path) -> None:
    """Of collectives to which rank 7 came last nothing is known: it was delayed with rank 6."""
    tables = asked(made(tmp_path, FAULTS, lost=(7, 10)))
    assert {(one["ranks"], one["slow"]) for one in tables["slow"]} == {
        ("1", "GPU"),
        ("6", "data loading"),
        ("11", "link"),
    }
    assert "not in the dataset: 2 of 16 ranks: 7, 10" in tables["notes"]


def test_ranks_with_impossible_lengths_are_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for rank, dur in ((0, 5), (1, 900)):
        some = [{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7} for _ in range(3)]
        times = ({"ts": 10 + 10 * at, "dur": 5 if at else dur} for at in range(3))
        events = [one | time for one, time in zip(some, times, strict=True)]
        members = {"schemaVersion": 1, "distributedInfo": {"rank": rank, "world_size": 2}}
        (tmp_path / "runs" / f"{rank}.json").write_text(json.dumps({**members, "traceEvents": events}))
    build_here(str(tmp_path / "runs"), str(tmp_path / "ds"))
    found = [note for note in asked(tmp_path / "ds")["notes"] if note.startswith("impossible")]
    assert [note.startswith("impossible: work of rank 1 lasts while") for note in found] == [True]


def test_times_of_a_rank_add_up(tables: dict[str, Any]) -> None:
    for rank in tables["ranks"]:
        parts_ns = rank["compute_ns"] + rank["exposed_ns"] + rank["copies_ns"] + rank["idle_ns"]
        assert abs(rank["step_ns"] - parts_ns) < 10
        assert rank["waited_ns"] <= rank["communication_ns"]
    assert {rank["rank"] for rank in tables["ranks"][:2]} == {1, 6}
    assert tables["ranks"][2]["path_ns"] * 3 < tables["ranks"][1]["path_ns"]


def test_the_same_ranks_lead_the_path_in_most_steps(tables: dict[str, Any]) -> None:
    assert {one["rank"] for one in tables["on_path"]} <= {1, 6}
    assert tables["on_path"][0]["kind"] == "persists"
    assert sum(one["steps"] for one in tables["on_path"]) == 6


def test_all_ranks_do_the_same_work(tables: dict[str, Any]) -> None:
    assert [(one["count"], one["ranks"]) for one in tables["behaviours"]] == [(16, "0-15")]
    assert tables["behaviours"][0]["kernels"] == 17  # 8 compute, 9 communicate
    assert tables["behaviours"][0]["collectives"] == 9


def test_the_path_leads_through_the_slow_ranks(tables: dict[str, Any]) -> None:
    path = tables["critical_path"]
    assert sum(one["share"] for one in path) == pytest.approx(100)
    loads, *_ = path
    assert (loads["rank"], loads["what"], loads["name"]) == (6, "loads data", "enumerate(DataLoader)#next")
    assert loads["ns"] == pytest.approx(9_300_000, rel=0.05)
    by_gpu_ns = sum(one["ns"] for one in path if one["rank"] == 1 and one["what"] == "computes")
    assert by_gpu_ns > 10_000_000
    # All of the step is on it: nothing else was waited for.
    step = next(one for one in tables["steps"] if one["step"] == path_step(tables))
    assert sum(one["ns"] for one in path) == pytest.approx(step["longest_ns"], rel=0.01)


def path_step(tables: dict[str, Any]) -> int:
    """The step of median length."""
    order = sorted(tables["steps"], key=lambda step: (step["mean_ns"], step["step"]))
    return int(order[(len(order) - 1) // 2]["step"])


def test_the_work_of_all_ranks_on_a_path_is_read(tmp_path: Path) -> None:
    """Forty ranks come last in turn, each after it computed; nothing on the path is idle."""
    runs = tmp_path / "runs"
    runs.mkdir()
    for rank in range(40):
        lines: list[dict[str, Any]] = []
        for turn in range(40):
            last_ns = 1_000 * (turn + 1)
            start_ns = last_ns - (0 if rank == turn else 500)
            met = {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "ts_ns": start_ns}
            lines.append(met | {"dur_ns": last_ns + 10 - start_ns})
            if rank == turn:
                lines.append({"name": "gemm", "ts_ns": last_ns - 990, "dur_ns": 990})
        header = {
            "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"],
            "host": "node", "rank": rank,
        }  # fmt: skip
        same = {"type": "gpu_kernel", "phase": "X", "gpu": 0, "stream": 7}
        records = [header, *(same | line for line in sorted(lines, key=lambda line: line["ts_ns"]))]
        (runs / f"{rank}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    build_here(str(runs), str(tmp_path / "ds"))
    path = asked(tmp_path / "ds")["critical_path"]
    computed = {row["rank"]: row["ns"] for row in path if row["what"] == "computes"}
    assert computed == dict.fromkeys(range(40), 990)
    assert sum(row["ns"] for row in path if row["what"] == "transfers") == 400
    assert not [row for row in path if row["what"] == "GPU idle"]


def test_a_step_is_chosen(dataset: Path) -> None:
    done = CliRunner().invoke(app, ["ranks", str(dataset), "--step", "4"])
    assert done.exit_code == 0
    assert "Critical path of step 4" in done.stdout


def test_collectives_distinguish_transfer_from_waiting(tables: dict[str, Any]) -> None:
    transfers = {
        one["process_group"]: one["transfer_ns"]
        for one in tables["collectives"]
        if one["operation"] == "all_gather"
    }
    slow = transfers.pop("host [8, …, 11]")
    assert slow > 2.5 * max(transfers.values())
    for one in tables["collectives"]:
        assert one["collectives"] == (6 if one["operation"] == "all_reduce" else 24)


def test_a_job_without_collectives_is_compared_too(tmp_path: Path, dataset: Path) -> None:
    """The recordings may have been made without communication, or of ranks that have none."""
    found = Dataset.opened(str(made(tmp_path, {2: "gpu"})))
    for host, rank in found.ranks():
        found.part("collectives", host, rank).unlink()
    found.layer("collectives").rename(tmp_path / "gone")
    tables = asked(found.folder)
    assert [(one["ranks"], one["slow"]) for one in tables["slow"]] == [("2", "GPU")]
    assert tables["collectives"] == []


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--step", "99"], 1, "has no step 99"),
        (["--master", "spark://head:7077"], 2, "--master is the address of a Spark cluster"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused(
    dataset: Path, options: list[str], code: int, message: str
) -> None:
    ended, _, err = piped(["ranks", str(dataset), *options])
    assert ended == code
    assert message in err


@pytest.mark.parametrize("command", ["summary", "ranks"])
def test_ranks_without_peers_are_not_called_as_fast_as_them(command: str) -> None:
    """Each of the two ranks does other work."""
    code, out, _ = piped([command, str(FIXTURES / "ddp-h200")])
    assert (code, "No rank is slower" in out) == (0, False)
    assert "No other rank does the same work, so none is called slow." in out


def test_a_job_without_gpus_is_refused(tmp_path: Path) -> None:
    Dataset.made(str(tmp_path / "ds"))
    code, _, err = piped(["ranks", str(tmp_path / "ds")])
    assert code == 1
    assert "no rank of it used a GPU" in err
    assert RANKS not in Dataset.opened(str(tmp_path / "ds")).layers()


@pytest.mark.parametrize("command", [["ranks", "--top", "3"], ["report"]])
def test_a_page_has_all_tables_and_pictures(dataset: Path, command: list[str], tmp_path: Path) -> None:
    page = tmp_path / "job.html"
    code, out, err = piped([*command, str(dataset), "-o", str(page)])
    assert (code, f"wrote {page}" in out + err) == (0, True)
    text = page.read_text()
    assert text.count("<svg") == 4
    for heading in ("Slow ranks", "Collectives", "Critical path of step", "Ranks over time"):
        assert f"<h2>{heading}" in text
    assert "data loading" in text


@pytest.mark.parametrize("command", ["ranks", "report"])
def test_a_page_on_standard_output_is_alone_there(dataset: Path, command: str) -> None:
    code, out, _ = piped([command, str(dataset), "-o", "-"])
    assert code == 0
    assert out.startswith("<!DOCTYPE html>") and out.rstrip().endswith("</html>")


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_pictures_are_written_alone_too(dataset: Path, ending: str, tmp_path: Path) -> None:
    picture = tmp_path / f"job.{ending}"
    code, _, _ = piped(["ranks", str(dataset), "-o", str(picture)])
    assert code == 0
    assert picture.read_bytes()[:4] in (b"\x89PNG", b"<svg")


def test_an_output_without_a_known_ending_is_refused(dataset: Path, tmp_path: Path) -> None:
    code, _, err = piped(["ranks", str(dataset), "-o", str(tmp_path / "job.pdf")])
    assert code == 1
    assert "job.pdf has no known ending" in err
    assert list(tmp_path.iterdir()) == []


def test_one_slow_rank_of_many_stays_visible_where_ranks_share_a_row() -> None:
    cells = np.full((1_000, 3), 5.0)
    cells[617, 1] = 9
    cells[10:20] = np.nan
    rows = farthest(cells, 4)
    assert rows.shape == (250, 3)
    assert rows[617 // 4].tolist() == [5, 9, 5]
    assert np.nanmax(np.delete(rows, 617 // 4, 0)) == 5
    assert np.isnan(rows[3]).all()


def test_no_bar_is_drawn_amid_the_answer(dataset: Path) -> None:
    """DuckDB's own would show on standard output for what takes seconds."""
    with opened("duckdb", Dataset.opened(str(dataset))) as engine:
        connection: Any = engine.connection  # type: ignore[attr-defined]
        assert connection.execute("select current_setting('enable_progress_bar')").fetchone() == (False,)


def test_a_host_that_sleeps_is_named_with_the_line_after_that(tmp_path: Path) -> None:
    """4 ms in steps of 40 ms, which differ by several ms."""
    build_here(str(FIXTURES / "slow-host-h200"), str(tmp_path / "ds"))
    (one,) = asked(tmp_path / "ds")["slow"]
    line = "benchmarks/whatif_gpu.py:142 plain_step.<locals>.step"
    assert (one["ranks"], one["slow"]) == ("1", "host")
    assert one["at"] == f"before vectorized_elementwise_kernel ({line})"
    assert one["excess_ns"] == pytest.approx(4_100_000, rel=0.05)


def test_pairs_of_ranks_and_the_ranks_across_them_are_process_groups(tmp_path: Path) -> None:
    build_here(str(FIXTURES / "tensor-parallel-h200"), str(tmp_path / "ds"))
    found = asked(tmp_path / "ds")
    assert sorted(one["which"] for one in found["collectives"]) == ["0, 2", "0-1", "1, 3", "2-3"]
    assert (found["slow"], [one["ranks"] for one in found["behaviours"]]) == ([], ["0-3"])
