"""`tracepipe query` on datasets: what the tables have, and what a query cannot do."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.cli.test_output import piped
from tests.support.here import build_here
from tests.support.program import PYTHONPATH
from tests.support.simulated_job import SimulatedJob
from tests.support.waiting import wait_until
from tracepipe.dataset.alignment import Line
from tracepipe.dataset.places import rank_folder
from tracepipe.errors import QueryError
from tracepipe.sql.tables import query_dataset

DOCS = Path(__file__).parents[2] / "docs" / "dataset.md"
HOSTILE = "no'de\n%41\"\x1b[2J"


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset of two hosts with two ranks each."""
    folder = tmp_path_factory.mktemp("job")
    SimulatedJob(2, 2, steps=4, faults={2: "gpu"}).write(folder / "runs")
    build_here(str(folder / "runs"), str(folder / "ds"))
    return folder / "ds"


def query(*arguments: object) -> tuple[int, str, str]:
    code, out, err = piped(["query", *map(str, arguments)])
    return code, out, err


def rows(ds: Path, sql: str) -> list[dict[str, Any]]:
    code, out, err = query(ds, sql, "--json")
    assert (code, err) == (0, "")
    found: list[dict[str, Any]] = json.loads(out)["rows"]
    return found


def layer(ds: Path, name: str) -> pl.DataFrame:
    return pl.read_parquet(str(ds / f"layer={name}/**/*.parquet"), hive_partitioning=True)


def test_each_layer_is_a_table_with_host_and_rank(ds: Path) -> None:
    names = {row["name"] for row in rows(ds, "show tables")}
    assert names == {
        "alignment",
        "annotations",
        "collectives",
        "kernels",
        "program",
        "ranks",
        "steps",
        "work",
    }
    found = rows(
        ds, "select host, rank, count(*) as n, sum(dur_ns) as ns from kernels group by all order by rank"
    )
    expected = (
        layer(ds, "kernels").group_by("host", "rank").agg(n=pl.len(), ns=pl.col("dur_ns").sum()).sort("rank")
    )
    assert found == expected.to_dicts()
    first = rows(ds, "select * from steps limit 1")[0]
    assert list(first)[:2] == ["host", "rank"]
    assert list(first)[-2:] == ["aligned_start_ns", "aligned_end_ns"]
    assert [row["clock"] for row in rows(ds, "select clock from alignment order by 1")] == [
        "node000: realtime", "node001: realtime",
    ]  # fmt: skip


def test_aligned_times_are_those_of_the_formula(ds: Path) -> None:
    lines = {
        row["clock"].partition(":")[0]: Line(row["at_ns"], row["offset_ns"], row["drift_ppb"])
        for row in layer(ds, "alignment").to_dicts()
    }
    assert any(line.drift_ppb for line in lines.values())
    found = rows(ds, "select host, start_ns, end_ns, aligned_start_ns, aligned_end_ns from collectives")
    assert len(found) == 4 * 36
    for row in found:
        placed = lines[row["host"]].place_all(np.array([row["start_ns"], row["end_ns"]]))
        assert [row["aligned_start_ns"], row["aligned_end_ns"]] == placed.tolist()


@pytest.mark.parametrize("ns", [0, 1, 999_999_999, -1, -(10**15) - 3, 10**13 + 17, 4 * 10**18])
@pytest.mark.parametrize("drift_ppb", [-499_999, 0, 7])
def test_the_formula_rounds_down_at_any_distance(ds: Path, ns: int, drift_ppb: int) -> None:
    at_ns = 1_795_000_000_000_000_000
    sql = f"select tracepipe.aligned({at_ns + ns}::bigint, {at_ns}, -7, {drift_ppb}) as placed"
    assert rows(ds, sql) == [{"placed": at_ns + ns - 7 + ns * drift_ppb // 10**9}]


def test_a_clock_that_is_not_placed_has_no_aligned_times(ds: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ds"
    shutil.copytree(ds, copy)
    file = copy / "layer=alignment/part-0.parquet"
    placed = pl.col("clock") == "node000: realtime"
    table = pl.read_parquet(file)
    table.with_columns(
        pl.when(placed).then(pl.col(name)).alias(name) for name in ("at_ns", "offset_ns", "drift_ppb")
    ).write_parquet(file)
    counts = (
        "select host, count(*) as n, count(aligned_end_ns) as placed from kernels group by all order by host"
    )
    assert [(row["n"], row["placed"]) for row in rows(copy, counts)] == [(136, 136), (136, 0)]
    file.unlink()  # a build that was killed
    file.parent.rmdir()
    assert [(row["n"], row["placed"]) for row in rows(copy, counts)] == [(136, 0), (136, 0)]


def test_the_page_names_the_rank_that_all_wait_for(ds: Path) -> None:
    (sql,) = re.findall(r"^```sql\n(.*?)^```$", DOCS.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert rows(ds, sql)[0]["rank"] == 2


@pytest.mark.parametrize(
    ("sql", "refused"),
    [
        ("copy (select 1) to 'ds/new.csv'", "COPY is not taken"),
        ("copy (select 1) to 'ds/dataset.json'", "COPY is not taken"),
        ("explain analyze copy (select 1) to 'ds/new.csv'", "EXPLAIN is not taken"),
        ("select 1; create table x as select 1", "CREATE is not taken"),
        ("attach 'ds/new.db' as x", "ATTACH is not taken"),
        ("export database 'ds/new'", "EXPORT is not taken"),
        ("set memory_limit = '1TB'", "SET is not taken"),
        ("install httpfs", "LOAD is not taken"),
        ("pragma enable_profiling", "PRAGMA is not taken"),
        ("with x as (insert into ranks values (1) returning *) select * from x", "Error"),
        ("select * from query('copy (select 1) to ''ds/new.csv''')", "Error"),
        ("select * from read_text('/proc/self/environ')", "disabled by configuration"),
        ("select * from read_text('FILE')", "disabled by configuration"),
        ("select * from glob('/*')", "disabled by configuration"),
        ("select * from 'FILE'", "disabled by configuration"),
        ("select * from read_csv('https://example.org/x.csv')", "Error"),
        ("select * from read_parquet('s3://bucket/x.parquet')", "Error"),
        ("select * from lines", "does not exist"),
        ("", "missing"),
        (" -- nothing", "There is no statement"),
        ("selekt", "syntax error"),
    ],
)
def test_a_dataset_is_only_read(
    ds: Path, sql: str, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ds.parent)
    before = {path: path.stat().st_mtime_ns for path in ds.parent.rglob("*")}
    (tmp_path / "secret.csv").write_text("secret\n")
    lines = pl.DataFrame({"secret": [1]})  # which a library may find by the name of the variable
    code, out, err = query("ds", sql.replace("FILE", str(tmp_path / "secret.csv")))
    assert code in (1, 2) and out == ""
    assert refused in err
    assert {path: path.stat().st_mtime_ns for path in ds.parent.rglob("*")} == before
    assert len(lines) == 1


def test_a_dataset_may_have_any_names(ds: Path, tmp_path: Path) -> None:
    copy = tmp_path / "host=9/ds [a]*?'\n%41"
    shutil.copytree(ds, copy)
    for folder in copy.glob("layer=*/host=node001"):
        for rank in folder.iterdir():
            rank.rename(made(folder.parent / rank_folder(HOSTILE, 2 if rank.name == "rank=2" else 3)))
        folder.rmdir()
    (copy / "layer=x' union").mkdir()
    found = rows(copy, "select distinct host, rank from kernels order by rank")
    assert [(row["host"], row["rank"]) for row in found] == [
        ("node000", 0), ("node000", 1), (HOSTILE, 2), (HOSTILE, 3),
    ]  # fmt: skip
    assert rows(copy, "select count(aligned_start_ns) as n from kernels") == [{"n": 272}]
    code, out, _ = query(copy, "select host from ranks where rank = 2")
    assert (code, "\x1b" in out) == (0, False)
    code, _, err = query(copy, f'select * from "{HOSTILE.replace(chr(34), "")}"')
    assert (code, "\x1b" in err) == (1, False)


def made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def test_a_file_that_cannot_be_read_is_named_by_its_place_in_the_dataset(ds: Path, tmp_path: Path) -> None:
    copy = tmp_path / "ds"
    shutil.copytree(ds, copy)
    file = next(copy.glob("layer=kernels/host=node000/rank=0/*.parquet"))
    file.write_bytes(b"PAR1 and nothing else")
    code, out, err = query(copy, "select count(dur_ns) from kernels")
    assert (code, out) == (1, "")
    assert str(file) in err


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_rows_are_written_with_their_types(ds: Path, form: str, tmp_path: Path) -> None:
    sql = """select i, i % 7 = 0 as is_even, i / 2 as half, 0.5 as decimal, 'x' || i as text, [i, 2] as list,
        encode('é') as bytes, null::varchar as nothing, {'a': 1} as pair, i, date '2026-11-23' as day
        from range(20_000) as t(i)"""
    out = tmp_path / f"rows.{form}"
    code, _, err = query(ds, sql, "--format", form, "-o", out)
    assert (code, err) == (0, f"wrote {out}: 20000 rows\n")
    if form == "csv":
        found = list(csv.DictReader(io.StringIO(out.read_text())))
        assert len(found) == 20_000
        assert found[3] == {
            "i": "3", "is_even": "false", "half": "1.5", "decimal": "0.5", "text": "x3", "list": "[3,2]",
            "bytes": "c3a9", "nothing": "", "pair": "{'a': 1}", "i_2": "3", "day": "2026-11-23",
        }  # fmt: skip
        return
    table = pl.read_parquet(out) if form == "parquet" else pl.read_ipc(out)
    assert table.schema == {
        "i": pl.Int64, "is_even": pl.Boolean, "half": pl.Float64, "decimal": pl.Float64, "text": pl.String,
        "list": pl.List(pl.Int64), "bytes": pl.Binary, "nothing": pl.String, "pair": pl.String,
        "i_2": pl.Int64, "day": pl.String,
    }  # fmt: skip
    assert table.row(3) == (3, False, 1.5, 0.5, "x3", [3, 2], "é".encode(), None, "{'a': 1}", 3, "2026-11-23")
    assert len(table) == 20_000


def test_no_rows_have_columns(ds: Path) -> None:
    code, out, _ = query(ds, "select rank, name from kernels where rank = 99", "--format", "csv")
    assert (code, out) == (0, "rank,name\n")
    assert rows(ds, "select rank, name from kernels where rank = 99") == []


@pytest.mark.slow
def test_a_table_is_for_people_and_has_an_end(ds: Path) -> None:
    code, out, err = query(ds, "select * from range(200_000)")
    assert (code, out) == (1, "")
    assert err.startswith("More than 100,000 rows: ")
    code, out, _ = query(ds, "select * from range(200_000)", "--json")
    assert (code, len(json.loads(out)["rows"])) == (0, 200_000)


def test_no_number_is_cut(ds: Path) -> None:
    code, out, err = query(ds, "select 9223372036854775807::hugeint as most, most + 1 as more")
    assert (code, out, err) == (1, "", "9223372036854775808 has more than 64 bits: cast it to DOUBLE.\n")


def test_an_answer_is_made_as_it_is_read(ds: Path) -> None:
    """Two parts of a hundred thousand million rows."""
    with query_dataset(str(ds), "select i from range(100_000_000_000) as t(i)") as answer:
        parts = answer.parts()
        first, second = next(parts), next(parts)
    assert second[0][0] == len(first)
    with query_dataset(str(ds), "select 1"), pytest.raises(QueryError):
        list(query_dataset(str(ds), "select error('x')").__enter__().parts())


def test_a_missing_library_or_dataset_is_reported(
    ds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = query(tmp_path, "select 1")
    assert (code, "is not a dataset" in err, "tracepipe dataset build" in err) == (1, True, True)
    code, _, err = query(ds, "select 1", "--strict")
    assert (code, "A dataset takes no options for recordings." in err) == (2, True)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    code, _, err = query(ds, "select 1")
    assert (code, "pip install duckdb" in err) == (3, True)


def test_ctrl_c_ends_a_query(ds: Path, tmp_path: Path) -> None:
    sql = "select count(*) from range(10_000_000_000) a, range(1_000) b where a.range % 7 = b.range % 3"
    command = [sys.executable, "-m", "tracepipe", "query", str(ds), sql]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as running:
        wait_until(lambda: list(tmp_path.glob("tracepipe-*/dataset")) != [])
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    assert (running.returncode, "Traceback" in err) == (130, False)
    assert list(tmp_path.iterdir()) == []
