"""`tracepipe query`: Perfetto's own SQL on recordings, and the queries of docs/query.md."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import tracepipe
from tests.cli.test_output import piped
from tests.support.recordings import span, write
from tracepipe.errors import InputError, QueryError
from tracepipe.sql import processor
from tracepipe.sql.answers import table_lines, write_answer
from tracepipe.sql.processor import Answer, ask, find_shell
from tracepipe.store.views import VIEWS

ROOT = Path(__file__).parents[2]
QUERIES = re.findall(r"```sql\n(.*?)```", (ROOT / "docs/query.md").read_text(encoding="utf-8"), re.DOTALL)
SHELL = ROOT / "tests/support/trace_processor_shell.py"
NAMES = "select name, dur from slice where dur > 0 order by ts"


def asked(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """How `tracepipe query` ends, in this process."""
    argv = ["query", *map(str, arguments)]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return subprocess.CompletedProcess(argv, *piped(argv))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run.jsonl", span(2_000, 2_500, "cuInit"), span(3_000, 3_100, "cuCtxCreate"))


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("query") / "run.pftrace"
    tracepipe.convert(ROOT / "fixtures/capture-h200/input.jsonl", path)
    return path


def test_rows_are_a_table_of_text_and_the_trace_goes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    done = asked(run, NAMES)
    assert done.stdout.splitlines() == ["name         dur", "cuInit       500", "cuCtxCreate  100"]
    assert (done.returncode, list(scratch.iterdir())) == (0, [])


def test_rows_are_json_of_the_last_statement(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.sql"
    file.write_text(
        f"create perfetto view calls as {NAMES};\nselect *, 1 as dur, null as empty from calls limit 1;"
    )
    done = asked(run, "-f", file, "--json")
    assert json.loads(done.stdout) == {
        "schema": "tracepipe-query/1",
        "columns": ["name", "dur", "dur_2", "empty"],
        "rows": [{"name": "cuInit", "dur": 500, "dur_2": 1, "empty": None}],
    }


def test_rows_are_a_parquet_file(run: Path, tmp_path: Path) -> None:
    import polars as pl

    out = tmp_path / "rows.parquet"
    done = asked(run, NAMES, "--format", "parquet", "-o", out)
    assert done.stderr.splitlines()[-1] == f"wrote {out}: 2 rows"
    assert pl.read_parquet(out).rows() == [("cuInit", 500), ("cuCtxCreate", 100)]
    again = asked(run, NAMES, "--format", "parquet", "-o", out)
    assert (again.returncode, "exists" in again.stderr) == (1, True)


def test_a_query_that_is_refused_shows_the_processors_words(run: Path) -> None:
    done = asked(run, "select * from nowhere")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no such table: nowhere" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Give it as an argument, or a file of it with -f."),
        (["select 1", "-f", "x.sql"], 2, "Give it as an argument, or a file of it with -f."),
        (["-f", "/nowhere/x.sql"], 1, "/nowhere/x.sql: cannot be read"),
        (["select 1", "--trace-processor", "/nowhere/shell"], 1, "/nowhere/shell: is not a program"),
    ],
)
def test_questions_that_cannot_be_asked(arguments: list[str], code: int, message: str, run: Path) -> None:
    done = asked(run, *arguments)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_a_missing_trace_processor_is_reported_with_how_to_get_one(run: Path, tmp_path: Path) -> None:
    done = asked(run, "select 1", TRACEPIPE_UI=str(tmp_path), PATH="", HOME=str(tmp_path))
    assert (done.returncode, "pip install 'tracepipe[query]'" in done.stderr) == (3, True), done.stderr


def test_a_perfetto_trace_is_asked_as_it_is(trace: Path) -> None:
    done = asked(trace, "select count(*) as n from slice where name = 'cuLaunchKernel'", "--json")
    assert json.loads(done.stdout)["rows"] == [{"n": 3}]


@pytest.mark.parametrize("sql", QUERIES)
def test_the_queries_of_the_page_have_answers(sql: str, trace: Path) -> None:
    answer = ask(trace, sql)
    assert answer.rows and answer.columns
    assert all(len(row) == len(answer.columns) for row in answer.rows)


def test_the_page_has_five_queries() -> None:
    assert len(QUERIES) == 5


def test_the_wait_for_kernels_is_that_of_the_recording(trace: Path) -> None:
    (sql,) = (one for one in QUERIES if "waited_ns" in one)
    assert [row[0] for row in ask(trace, sql).rows] == ["vectorAdd"] * 3


def test_a_file_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pftrace"
    path.write_bytes(b"no trace at all")
    with pytest.raises(InputError, match="refuses the trace"):
        ask(path, "select 1")


def test_a_trace_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.pftrace", tmp_path):
        with pytest.raises(InputError, match="cannot be read") as refused:
            ask(path, "select 1")
        assert refused.value.path == str(path)


def test_the_recording_is_not_overwritten_by_its_rows(run: Path) -> None:
    before = run.read_bytes()
    done = asked(run, NAMES, "-o", run, "--force")
    assert (done.returncode, run.read_bytes()) == (1, before)
    assert "is the recording itself" in done.stderr


def test_a_program_in_the_path_or_the_cache_comes_before_the_wasm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_shell() == ""
    for name in ("cache/trace_processor_shell-0123", "bin/trace_processor_shell"):
        program = tmp_path / name
        program.parent.mkdir()
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        assert find_shell() == str(program)
    assert find_shell("trace_processor_shell") == str(program)


@pytest.fixture
def shell(tmp_path: Path) -> Path:
    """A program that is asked as trace_processor_shell is."""
    path = tmp_path / "shell"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {SHELL} "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_a_program_is_asked_as_the_wasm_is(shell: Path, run: Path, tmp_path: Path) -> None:
    done = asked(run, NAMES, "--trace-processor", shell)
    assert done.stdout.splitlines() == ["name         dur", "cuInit       500", "cuCtxCreate  100"]
    refused = asked(run, "select * from nowhere", "--trace-processor", shell)
    assert (refused.returncode, "no such table: nowhere" in refused.stderr) == (1, True)
    (tmp_path / "x.pftrace").write_bytes(b"no trace at all")
    with pytest.raises(InputError, match="refuses the trace: Unknown trace type"):
        ask(tmp_path / "x.pftrace", "select 1", str(shell))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/parse", "/query"])
def test_a_program_that_ends_meanwhile_is_reported(path: str, shell: Path, run: Path) -> None:
    done = asked(run, NAMES, "--trace-processor", shell, ENDS_AT=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "shell ended before it had answered" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("#!/bin/sh\necho unknown option >&2\nexit 1\n", "unknown option"),
        ("#!/bin/sh\n", "it does not answer"),
        ("junk", "Exec format error"),
    ],
)
def test_a_program_that_is_not_a_trace_processor_is_reported(
    content: str, why: str, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.write_text(content)
    other.chmod(0o755)
    done = asked(run, NAMES, "--trace-processor", other)
    assert done.returncode == 3
    first, second = done.stderr.splitlines()[-2:]
    assert first == f"tracepipe: {other} does not run as a trace processor: {why}"
    assert "--trace-processor" in second


class Refusing:
    """A client whose engine ends in the middle of a query."""

    error = ""

    @property
    def http(self) -> Any:
        return self

    def parse(self, chunk: bytes) -> Any:
        return self

    def notify_eof(self) -> None:
        pass

    def close(self) -> None:
        pass

    def execute_query(self, sql: str) -> Any:
        from perfetto.common.exceptions import PerfettoException

        raise PerfettoException("out of memory")


def test_an_engine_that_ends_is_an_error_of_the_query(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_started", lambda shell: Refusing())
    with pytest.raises(QueryError, match="out of memory"):
        ask(trace, "select 1")


def test_columns_have_the_names_that_they_are_given_and_each_its_own(trace: Path) -> None:
    answer = ask(trace, "select 1 as a, 2 as a, 3 as a_2, 4 as __class__, 5 as __dict__")
    assert answer.columns == ["a", "a_3", "a_2", "__class__", "__dict__"]
    assert answer.rows == [[1, 2, 3, 4, 5]]


def test_bytes_are_digits_in_csv_too() -> None:
    out = io.BytesIO()
    write_answer(Answer(["blob"], [[b"\x00\xff"], ["x"]]), "csv", out)
    assert out.getvalue() == b"blob\n00ff\nx\n"


def test_a_table_shows_nulls_bytes_and_numbers() -> None:
    answer = Answer(["n", "text", "blob"], [[1, "a\nb", b"\x00\xff"], [None, None, None], [123, "c", b""]])
    assert list(table_lines(answer)) == [
        "  n  text  blob",
        "  1  a\\nb  00ff",
        "  –  –     –",
        "123  c",
    ]
    assert list(table_lines(Answer([], []))) == []
    assert list(table_lines(Answer(["n"], []))) == ["n"]
    assert list(table_lines(Answer(["a\x1b"], []))) == ["a\\x1b"]


def test_a_recording_is_asked_for_its_tables_where_the_query_names_no_others(run: Path) -> None:
    sql = (
        "with longest as (select name, dur_ns from Calls order by dur_ns desc) select * from longest; -- end"
    )
    done = asked(run, sql)
    assert done.stdout.splitlines() == ["name         dur_ns", "cuInit          500", "cuCtxCreate     100"]
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        0,
        "asked: the tables that export writes, in DuckDB's SQL",
    )
    done = asked(run, "show tables", "--json")
    assert [row["name"] for row in json.loads(done.stdout)["rows"]] == sorted(VIEWS)
    done = asked(run, "select count(*) as n from calls where tid in (select tid from thread)")
    assert (done.returncode, "no such table: calls" in done.stderr) == (1, True)


@pytest.mark.parametrize(
    ("sql", "refused"),
    [
        ("select nothing from calls", "nothing"),
        ("select * from calls, read_text('/proc/self/environ')", "disabled by configuration"),
        ("copy (select * from calls) to 'x.csv'", "COPY is not taken"),
    ],
)
def test_the_tables_of_a_recording_are_only_read(sql: str, refused: str, run: Path) -> None:
    done = asked(run, sql)
    assert (done.returncode, done.stdout, refused in done.stderr) == (1, "", True), done.stderr


@pytest.mark.parametrize(
    ("sql", "refused"),
    [
        ("select dur_ns - (select min(dur_ns) from calls) at, name from kernels", "DuckDB: Parser Error"),
        ("with a as (selec name from calls) select * from a -- from x", "DuckDB: Parser Error"),
        ("delete from kernels", "DuckDB only reads tables here"),
        ("select nothing from calls", "DuckDB: Binder Error"),
        ("select * from kernles", "Did you mean kernels?"),
        ("select * from nowhere", "`show tables` lists the tables"),
        ("select * from calls, slice", "calls is a table for DuckDB"),
        ("select nothing from slice", "Perfetto: "),
    ],
)
def test_who_refuses_a_query_says_so(sql: str, refused: str, run: Path) -> None:
    done = asked(run, sql)
    assert (done.returncode, refused in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize("form", ["csv", "parquet", "arrow"])
def test_rows_of_tables_are_a_file(form: str, run: Path, tmp_path: Path) -> None:
    import polars as pl

    out = tmp_path / f"rows.{form}"
    done = asked(run, "select name, dur_ns, depth from calls order by row", "--format", form, "-o", out)
    assert done.stderr.splitlines()[-1] == f"wrote {out}: 2 rows"
    read = {"csv": pl.read_csv, "parquet": pl.read_parquet, "arrow": pl.read_ipc}[form]
    assert read(out).rows() == [("cuInit", 500, 0), ("cuCtxCreate", 100, 0)]
