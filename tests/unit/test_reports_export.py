"""Exported tables: what they hold, read back by Polars; an older export is replaced whole or not at all."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from tests.support.recordings import GPU_CLOCK, PAIR, Load, event, loader, span
from tracepipe.errors import LibraryMissing, OutputError
from tracepipe.present.writing.table_formats import FORMATS, write_table
from tracepipe.recording.outputs import replacing_folder
from tracepipe.reports import export
from tracepipe.store.run import Run
from tracepipe.store.views import VIEWS, count

ROOT = Path(__file__).parents[2]
WARPS = {
    "ts_ns": 500_100, "type": "gpu_warp", "clock": GPU_CLOCK, "name": "k", "gpu": 0, "launch": (1 << 64) - 1,
    "grid": [2, 1, 1], "block": [32, 1, 1], "warp": [0, 1], "sm": [4, 5], "entry_ns": [0, 10],
    "exit_count": [2, 0], "exit_ns": [40, 60], "exit_mask": [1, 4294967294], "exit_clk": [80, 120],
    "ranges": ["load", "wait"], "range_count": [2, 0], "range_name": [0, 1], "range_clk": [20, 40],
    "range_dur_clk": [100, 10], "range_open": [1, 0],
}  # fmt: skip
READ = {"parquet": pl.read_parquet, "arrow": pl.read_ipc, "csv": pl.read_csv}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


@pytest.fixture
def run(load: Load) -> Run:
    return load(
        PAIR,
        span(1_100, 1_300, "cudaMalloc", args={"size_bytes": 64}, launch=7),
        span(1_150, 1_250, "cuMemAlloc_v2", cpu=3),
        event("B", 1_400, "cudaFree"),
        span(1_500, 1_600, "ioctl", "syscall"),
        span(1_610, 1_690, "take", "hook") | {"layer": "my pool"},
        span(1_620, 1_680, "malloc", "hook") | {"layer": "libc.so.6"},
        span(1_700, 1_701, "bare", "hook"),
        span(500_000, 500_100, "k", "gpu_kernel", clock=GPU_CLOCK, gpu=0, stream=2, args={"grid": [2, 1, 1]}),
        WARPS,
        {"type": "loss", "layer": "syscall", "count": 9, "ts_ns": 1_550, "reason": "ring full"},
    )


def exported(run: Run, folder: Path, to: str = "parquet") -> dict[str, pl.DataFrame]:
    """The tables of a run, as other programs read them."""
    result = export.run(run, export.Options(to))
    for name, write in result.files.items():
        with (folder / name).open("wb") as out:
            write(out)
    return {name: READ[to](folder / f"{name}.{to}") for name in VIEWS}


def whole(name: str, run: Run) -> pl.DataFrame:
    """All of a table."""
    found: pl.DataFrame = run.table(name).pl()
    return found


def test_a_layer_is_a_table_of_whole_numbers(run: Run, tmp_path: Path) -> None:
    tables = exported(run, tmp_path)
    calls = tables["calls"].select(
        "row", "start_ns", "dur_ns", "kind", "name", "parent_row", "size_bytes", "cpu"
    )
    assert calls.rows() == [
        (0, 1_100, 200, "span", "cudaMalloc", None, 64, None),
        (1, 1_150, 100, "span", "cuMemAlloc_v2", 0, None, 3),
        (2, 1_400, None, "unclosed", "cudaFree", None, None, None),
    ]
    assert tables["kernels"].select("start_ns", "dur_ns", "stream", "grid_x", "block_x").rows() == [
        (2_000, 100, 2, 2, None)
    ]
    losses = tables["losses"].select("layer", "count", "start_ns", "reason").rows()
    assert losses == [("syscall", 9, 1_550, "ring full")]
    clock = tables["clocks"].row(0, named=True)
    assert (clock["clock"], clock["pairs"], clock["bound_ns"]) == (GPU_CLOCK, 1, 12)
    assert tables["syscalls"]["name"].to_list() == ["ioctl"] and tables["driver"].is_empty()
    assert tables["hooks"].select("layer", "name", "depth").rows() == [
        ("my pool", "take", 0),
        ("libc.so.6", "malloc", 0),
        ("hook", "bare", 0),
    ]


def test_kernels_have_their_whole_names_as_far_as_the_recording_has_them(load: Load) -> None:
    kernel = "void at::f<c10::Half>(int)"
    run = load(
        span(100, 110, kernel, "gpu_kernel", gpu=0, stream=1),
        span(200, 210, "at::f<c10::Half>", "gpu_kernel", gpu=0, stream=1, args={"function": kernel}),
        span(300, 310, "at::f<c10::Half>", "gpu_kernel", gpu=0, stream=1),
        span(400, 410, "g", "gpu_kernel", gpu=0, stream=1, args={"function": "of something else"}),
    )
    short = "at::f<c10::Half>"
    assert whole("kernels", run).select("name", "kernel").rows() == [
        (short, kernel), (short, kernel), (short, short), ("g", "g"),
    ]  # fmt: skip


def test_warps_and_their_exits_have_a_row_each(run: Run, tmp_path: Path) -> None:
    tables = exported(run, tmp_path)
    columns = (
        "launch",
        "warp",
        "sm",
        "slot",
        "entry_ns",
        "first_exit_ns",
        "last_exit_ns",
        "dur_ns",
        "exit_count",
    )
    assert tables["warps"].select(columns).rows() == [
        ((1 << 64) - 1, 0, 4, None, 2_100, 2_140, 2_160, 60, 2),
        ((1 << 64) - 1, 1, 5, None, 2_110, None, None, None, 0),
    ]
    assert tables["exits"].rows() == [(0, 2_140, 1), (0, 2_160, 4294967294)]
    assert tables["ranges"].rows() == [
        (0, "load", 2_110, 50, 45, 100, True), (0, "wait", 2_120, 5, 5, 10, False),
    ]  # fmt: skip


def test_no_cell_holds_a_list(run: Run) -> None:
    for name in VIEWS:
        assert all(not kind.is_nested() for kind in whole(name, run).dtypes), name


@pytest.mark.parametrize("to", FORMATS)
def test_every_format_holds_the_same(run: Run, tmp_path: Path, to: str) -> None:
    tables = exported(run, tmp_path, to)
    for name in VIEWS:
        made = whole(name, run)
        assert tables[name].columns == made.columns
        assert tables[name].cast(made.schema, strict=True).rows() == made.rows()


@pytest.mark.parametrize("to", FORMATS)
def test_rows_are_in_the_order_of_their_numbers(load: Load, tmp_path: Path, to: str) -> None:
    calls = [
        span(1_100 + at, 1_100 + at + at % 3 * 50, f"f{at % 7}", args={"size": at, "ptr": f"{at % 5:#x}"})
        for at in range(100)
    ]
    without_sms = {key: value for key, value in WARPS.items() if key != "sm"}
    stacks = [
        {"type": "stack", "id": 40 + at, "frames": [{"function": f"f{place}"} for place in range(at)]}
        for at in range(1, 7)
    ]
    calls = [one | {"stack": 41 + at % 6} for at, one in enumerate(calls)]
    run = load(PAIR, *stacks, *calls, WARPS, *({**without_sms, "launch": at} for at in range(20)))
    one = exported(run, tmp_path, to)
    for name in VIEWS:
        assert len(one[name]) == count(run, name), name
        if "row" in one[name].columns:
            assert one[name]["row"].to_list() == [*range(len(one[name]))]
    assert len(one["calls"]) == 100 and len(one["warps"]) == 42
    assert one["stacks"]["frame"].to_list() == [place for at in range(1, 7) for place in range(at)]
    assert one["ranges"]["warp_row"].is_sorted() and one["exits"]["warp_row"].is_sorted()


FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(1)", "\t=1", "\r=1", "\n=1", "=cmd|' /C calc'!A0", "\uff1d1+1", "-"]
NO_FORMULAS = ["'=1", "a=1", " =1", "", "f(-1)", "-5", "+5.25", "-0", "größe\n=1"]


@pytest.mark.parametrize("to", FORMATS)
def test_no_name_is_a_formula_in_a_spreadsheet(load: Load, tmp_path: Path, to: str) -> None:
    names = FORMULAS + NO_FORMULAS
    run = load(*(span(1_100 + at, 1_200, name, comm=name) for at, name in enumerate(names)))
    quoted = [f"'{name}" for name in FORMULAS] if to == "csv" else FORMULAS
    write = export.run(run, export.Options(to)).files[f"calls.{to}"]
    out = io.BytesIO()
    write(out)
    out.seek(0)
    table = pl.read_csv(out, infer_schema=False) if to == "csv" else READ[to](out)
    for column in ("name", "comm"):
        assert [value or "" for value in table[column]] == [*quoted, *NO_FORMULAS]
    assert [int(dur_ns) for dur_ns in table["dur_ns"]] == [100 - at for at in range(len(names))]


def test_a_negative_number_is_a_number_in_csv() -> None:
    out, table = io.BytesIO(), "(values (-5, -0.5::double, '-5'), (null, 1.0, '-x')) as t(a, b, c)"
    assert write_table(duckdb.connect(), f"select * from {table}", out, "csv") == 2
    assert out.getvalue() == b"a,b,c\n-5,-0.5,-5\n,1.0,'-x\n"


def test_facts_of_the_whole_recording_are_next_to_the_tables(run: Run, tmp_path: Path) -> None:
    tables = exported(run, tmp_path)
    about = json.loads((tmp_path / "run.json").read_text())
    assert (about["format"], about["tool"]["name"]) == ("tracepipe-tables/1", "tracepipe")
    assert about["header"]["command"] == ["./vec_add"] and about["footer"] is None
    assert about["recording"]["losses"] == {"syscall": 9}
    assert {name: table["rows"] for name, table in about["tables"].items()} == {
        name: len(table) for name, table in tables.items()
    }
    assert about["tables"]["calls"]["columns"] == {
        name: str(kind) for name, kind in tables["calls"].schema.items()
    }


def test_the_documents_name_every_column_with_its_type(run: Run) -> None:
    page = (ROOT / "docs" / "reports.md").read_text()
    page = page[page.index("## `export`") :]
    rows = re.findall(r"^\| (`.+?`) \| (\w+) \|", page, re.MULTILINE)
    documented = {name: kind for names, kind in rows for name in re.findall(r"`(\w+)`", names)}
    made = {name: str(kind) for view in VIEWS for name, kind in whole(view, run).schema.items()}
    assert documented == made
    assert all(f"`{name}`" in page for name in VIEWS)


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "run.parquet"

    def fill(text: str, *names: str, force: bool = False) -> None:
        with replacing_folder(str(target), force=force) as folder:
            assert not target.exists() or force
            for name in names:
                (folder / name).write_text(text)

    fill("one", "a", "b")
    with pytest.raises(OutputError, match="exists"):
        fill("two", "a", "b")
    fill("two", "a", "b", force=True)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"a": "two", "b": "two"}
    (target / "mine.txt").write_text("keep")
    with pytest.raises(OutputError, match=r"holds other files: mine\.txt"):
        fill("three", "a", "b", force=True)
    assert (target / "a").read_text() == "two"
    assert [path.name for path in tmp_path.iterdir()] == ["run.parquet"]


def test_a_failed_export_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "run.parquet"
    with pytest.raises(ZeroDivisionError), replacing_folder(str(target), force=False) as folder:
        (folder / "a").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_folder_does_not_replace_a_file_nor_go_to_standard_output(tmp_path: Path) -> None:
    taken = tmp_path / "notes"
    taken.write_text("mine")
    with pytest.raises(OutputError, match="exists"), replacing_folder(str(taken), force=True):
        pass
    with pytest.raises(OutputError, match="standard output"), replacing_folder("-", force=True):
        pass
    assert taken.read_text() == "mine"


def test_a_full_disk_is_reported_in_words() -> None:
    question = "select range as a from range(500_000)"
    with pytest.raises((OutputError, OSError), match="No space left"), open("/dev/full", "wb") as out:
        write_table(duckdb.connect(), question, out, "parquet")


def test_a_missing_library_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(LibraryMissing, match="Arrow files need pyarrow") as missing:
        write_table(run.connection, "select 1", io.BytesIO(), "arrow")
    assert missing.value.hint == "pip install pyarrow"


def test_large_launch_ids_and_odd_names_survive(load: Load) -> None:
    run = load(span(1_100, 1_200, 'a"b,\n\u0000', launch=(1 << 64) - 1))
    out = io.BytesIO()
    export.run(run, export.Options()).files["calls.parquet"](out)
    out.seek(0)
    read: Any = pl.read_parquet(out).row(0, named=True)
    assert (read["name"], read["launch"]) == ('a"b,\n\u0000', (1 << 64) - 1)
