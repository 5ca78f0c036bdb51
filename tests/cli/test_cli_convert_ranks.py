"""`tracepipe convert` on datasets: some ranks of a job in one timeline, on the clock of the dataset."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.cli.test_output import piped
from tests.support.here import build_here
from tests.support.simulated_job import SimulatedJob
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.dataset.alignment import Line

WINDOW_NS = 20_000_000, 30_000_000


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings of three hosts with two ranks each, and their dataset `ds`."""
    folder = tmp_path_factory.mktemp("job")
    SimulatedJob(3, 2, steps=4, faults={2: "gpu"}).write(folder / "runs")
    for name in ("0", "3"):  # one that is called after its rank alone, as other tools may call it
        file = next((folder / "runs").glob(f"*/{name}.jsonl"))
        text = file.read_text()
        file.write_text(text.replace(f'"rank":{name},', "", 1))
    build_here(str(folder / "runs"), str(folder / "ds"))
    return folder


def convert(*arguments: object) -> tuple[int, str, str]:
    return piped(["convert", *map(str, arguments)])


def layer(job: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(str(job / f"ds/layer={name}/**/*.parquet"), hive_partitioning=True)


def lines(job: Path) -> dict[str, Line]:
    """By host, where its clock goes on the reference clock."""
    return {
        row["clock"].partition(":")[0]: Line(row["at_ns"], row["offset_ns"], row["drift_ppb"])
        for row in layer(job, "alignment").to_dicts()
    }


def kernels(job: Path, rank: int) -> list[tuple[int, int, str]]:
    """Begin and end on the reference clock, and the name, of the kernels of a rank."""
    rows = layer(job, "kernels").filter(pl.col("rank") == rank)
    line = lines(job)[rows["host"][0]]
    start_ns, end_ns = (line.place_all(rows[name].to_numpy()).tolist() for name in ("start_ns", "end_ns"))
    return sorted(zip(start_ns, end_ns, rows["name"], strict=True))


def drawn(trace: Path) -> dict[str, list[tuple[int, int, str]]]:
    """The same of a trace, as the trace processor has it, by the GPU."""
    sql = """select gpu.name as gpu, s.ts, s.ts + s.dur as end, s.name from slice s
        join track t on t.id = s.track_id join track gpu on gpu.id = t.parent_id
        where gpu.name glob 'GPU *' and t.name glob 'stream *'"""
    found: dict[str, list[tuple[int, int, str]]] = {}
    with RealTraceProcessor(trace) as tp:
        assert tp.problems() == []
        for row in tp.rows(sql):
            found.setdefault(row["gpu"], []).append((row["ts"], row["end"], row["name"]))
    return {gpu: sorted(rows) for gpu, rows in found.items()}


def base_ns(job: Path) -> int:
    """When the first rank began, on the reference clock."""
    rows = layer(job, "ranks").to_dicts()
    return min(int(lines(job)[row["host"]].place(row["start_ns"])) for row in rows)


def test_kernels_are_at_their_nanosecond_of_the_common_clock(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pftrace"
    code, _, err = convert(job / "ds", "--ranks", "1,3-5", "-o", out)
    assert code == 0, err
    found = drawn(out)
    assert any(line.drift_ppb for line in lines(job).values())
    assert found == {
        f"GPU 0 of rank {rank} on node00{rank // 2}": kernels(job, rank) for rank in (1, 3, 4, 5)
    }
    assert "placed: rank 3 (3.jsonl) by node001: realtime, by " in err


def test_a_folder_may_have_letters_of_patterns_in_its_name(job: Path, tmp_path: Path) -> None:
    shutil.copytree(job / "ds", tmp_path / "ds[1]*")
    out = tmp_path / "one.pftrace"
    code, _, err = convert(tmp_path / "ds[1]*", "--ranks", "3", "-o", out)
    assert code == 0, err
    assert list(drawn(out).values()) == [kernels(job, 3)]


@pytest.mark.slow
def test_a_window_is_the_same_stretch_of_time_on_all_ranks(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "slow.pftrace"
    code, _, err = convert(job / "ds", "--ranks", "2,5", "--from", "20ms", "--to", "30ms", "-o", out)
    assert code == 0, err
    first_ns, end_ns = (base_ns(job) + ns for ns in WINDOW_NS)
    for rank in (2, 5):
        inside = [one for one in kernels(job, rank) if one[0] < end_ns and one[1] > first_ns]
        assert 0 < len(inside) < len(kernels(job, rank))
        assert drawn(out)[f"GPU 0 of rank {rank} on node00{rank // 2}"] == inside
    with RealTraceProcessor(out) as tp:
        windows = tp.rows("select ts, dur from slice where name = 'window'")
    assert windows == [{"ts": first_ns, "dur": end_ns - first_ns}] * 2
    again = tmp_path / "again.pftrace"
    times = ("--from", f"@{first_ns}", "--to", f"@{end_ns}")
    assert convert(job / "ds", "--ranks", "2,5", *times, "-o", again)[0] == 0
    assert drawn(again) == drawn(out)


def test_processes_are_named_with_their_ranks(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.pftrace"
    assert convert(job / "ds", "--ranks", "0,1,3", "-o", out)[0] == 0
    with RealTraceProcessor(out) as tp:
        names = tp.rows("select name, pid from process where name glob 'rank*' order by pid")
        threads = tp.rows("select distinct name from thread where name glob '*rank*'")
    assert names == [
        {"name": "rank 0: process on node000", "pid": 4000},
        {"name": "rank 1: process on node000", "pid": 4001},
        {"name": "rank 3: process on node001", "pid": 10_004_003},
    ]
    assert threads == []


def test_one_rank_is_on_the_clock_of_all(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "one.pftrace"
    assert convert(job / "ds", "--ranks", "4", "-o", out)[0] == 0
    (found,) = drawn(out).values()
    assert found == kernels(job, 4)


def test_without_ranks_all_of_them_are_converted(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "all.zip"
    assert convert(job / "ds", "--from", "20ms", "--to", "25ms", "--archive", out)[0] == 0
    with zipfile.ZipFile(out) as archive:
        names = [name for name in archive.namelist() if name.endswith(".pftrace")]
        manifest = json.loads(archive.read("perfetto_manifest.json"))
        one = tmp_path / "one.pftrace"
        one.write_bytes(archive.read("rank4.pftrace"))
    assert names == [f"rank{rank}.pftrace" for rank in range(6)]
    assert json.dumps(manifest).count("collectives") == 4
    first_ns, end_ns = base_ns(job) + 20_000_000, base_ns(job) + 25_000_000
    inside = [kernel for kernel in kernels(job, 4) if kernel[0] < end_ns and kernel[1] > first_ns]
    (found,) = drawn(one).values()
    assert found == inside


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--ranks", "1,6,9"], 1, "has no rank 6, 9"),
        (["--ranks", "0-99999"], 1, "It has 6 ranks, 0 to 5."),
        (["--ranks", "3-1"], 2, "takes ranks as in 0-7,17, not '3-1'"),
        (["--ranks", "x"], 2, "takes ranks as in 0-7,17, not 'x'"),
        (["--ranks", "0-99999999"], 2, "takes ranks as in 0-7,17"),
        (["--from", "nsys"], 1, "'nsys' is not a duration."),
        (["--from", "2s", "--to", "1s"], 1, "The window is empty."),
        (["--offset", "3.jsonl=5"], 2, "--offset is for recordings."),
        (["--format", "tracepipe", "--ranks", "1"], 1, "tracepipe is made from a single recording"),
    ],
)
def test_what_cannot_be_converted_is_reported(
    job: Path, options: list[str], code: int, message: str, tmp_path: Path
) -> None:
    out = ["-o", tmp_path / ("out.jsonl" if "tracepipe" in options else "out.pftrace")]
    found = convert(job / "ds", *options, *out)
    assert (found[0], found[1]) == (code, "")
    assert message in found[2]
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_needs_a_name_for_its_timeline(job: Path) -> None:
    code, _, err = convert(job / "ds")
    assert (code, "The timeline of a dataset has no name." in err) == (2, True)
    code, _, err = convert(job, "--ranks", "1", "-o", "x.pftrace")
    assert (code, "--ranks is for a dataset, and this is a recording." in err) == (2, True)


@pytest.mark.parametrize("option", [["--ranks", "1"], ["--to", "1s"], ["--from", "1s"]])
def test_options_for_datasets_are_not_for_recordings(job: Path, option: list[str]) -> None:
    code, _, err = convert(job / "runs/node000/0.jsonl", *option)
    assert (code, "is for a dataset, and this is a recording." in err, "tracepipe cut" in err) == (
        2,
        True,
        True,
    )


@pytest.fixture
def copy(job: Path, tmp_path: Path) -> Path:
    """The job with its recordings elsewhere, which may change."""
    shutil.copytree(job / "runs", tmp_path / "runs")
    build_here(str(tmp_path / "runs"), str(tmp_path / "ds"))
    return tmp_path


def test_recordings_that_are_not_what_was_read_are_refused(copy: Path) -> None:
    runs, to = copy / "runs", ("-o", copy / "out.pftrace")
    longer, later, gone = (runs / name for name in ("node000/0.jsonl", "node000/1.jsonl", "node001/2.jsonl"))
    with longer.open("a") as out:
        out.write("\n")
    as_it_was = later.stat()
    os.utime(later, ns=(as_it_was.st_atime_ns, as_it_was.st_mtime_ns + 2_500_000_000))
    gone.unlink()
    for rank, file, why in (
        (0, longer, "is not the recording that the dataset was made of: it had "),
        (1, later, "it was changed 2.50 s later than the one read"),
        (2, gone, "cannot be read: No such file or directory"),
    ):
        code, _, err = convert(copy / "ds", "--ranks", f"{rank},3", *to)
        assert (code, str(file) in err, why in err, "tracepipe dataset build" in err) == (1, True, True, True)
    assert convert(copy / "ds", "--ranks", "3", *to)[0] == 0
    link = copy / "link.pftrace"
    link.symlink_to(runs / "node001/3.jsonl")
    code, _, err = convert(copy / "ds", "--ranks", "3", "--from", "1ms", "-o", link, "--force")
    assert (code, "link.pftrace is the recording of rank 3" in err) == (1, True)


def test_a_rank_whose_clock_is_not_placed_is_refused(copy: Path) -> None:
    file = copy / "ds/layer=alignment/part-0.parquet"
    table = pl.read_parquet(file)
    is_lost = pl.col("clock") == "node002: realtime"
    columns = [
        pl.when(~is_lost).then(pl.col(name)).alias(name) for name in ("at_ns", "offset_ns", "drift_ppb")
    ]
    table.with_columns(*columns, refused=pl.when(is_lost).then(pl.lit("it wanders"))).write_parquet(file)
    code, _, err = convert(copy / "ds", "--ranks", "1,4", "-o", copy / "out.pftrace")
    assert (code, "rank 4 is not on the clock of the others: it wanders" in err) == (1, True)
    assert convert(copy / "ds", "--ranks", "1,2", "-o", copy / "out.pftrace")[0] == 0
    file.unlink()
    code, _, err = convert(copy / "ds", "--ranks", "1", "-o", copy / "two.pftrace")
    assert (code, "has no layer alignment" in err) == (1, True)


def test_where_no_collectives_ran_the_bound_is_not_stated(copy: Path) -> None:
    file = copy / "ds/layer=alignment/part-0.parquet"
    table = pl.read_parquet(file)
    table.with_columns(last_ns=pl.col("first_ns") + 1).write_parquet(file)
    _, _, err = convert(copy / "ds", "--ranks", "1,2", "-o", copy / "out.pftrace")
    placed = [line for line in err.splitlines() if line.startswith("placed: ")]
    assert len(placed) == 2
    assert all(" ns while collectives ran, not known up to " in line for line in placed)


def test_what_the_part_leaves_out_is_reported(copy: Path) -> None:
    file = copy / "runs/node000/1.jsonl"
    text = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*text[:5], "{bad\n", *text[5:]]))
    build_here(str(copy / "runs"), str(copy / "ds"))
    _, _, err = convert(copy / "ds", "--ranks", "1", "--from", "30ms", "-o", copy / "out.pftrace")
    assert "skipped: rank 1 (1.jsonl):6: is not JSON" in err
    code, _, err = convert(
        copy / "ds", "--ranks", "1", "--from", "30ms", "--strict", "-o", copy / "x.pftrace"
    )
    assert (code, "1.jsonl:6: is not JSON" in err) == (1, True)


@pytest.mark.parametrize("drift_ppb", [-499_999, -1, 0, 1, 12_345])
def test_the_first_time_at_a_time_of_the_reference(drift_ppb: int) -> None:
    line = Line(1_795_000_000_000_000_000, -5_000_000, drift_ppb)
    for away_ns in (0, 1, 999, 10**9, -(10**12) - 7, 10**16 + 1):
        at: Any = line.at_ns + away_ns
        ns = line.first_at(at)
        assert line.place(ns) >= at > line.place(ns - 1)
        assert line.place_all(np.array([ns]))[0] == line.place(ns)
