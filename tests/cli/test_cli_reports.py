"""The reports as commands: every input, text and JSON, narrow and wide, and what they refuse."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracepipe
from tests.golden.cases import Case, cases, with_sample
from tests.support.program import PYTHONPATH
from tests.support.recordings import GPU_CLOCK, event, span, write
from tracepipe import cli
from tracepipe.reports import REPORTS
from tracepipe.store.views import VIEWS

ROOT = Path(__file__).parents[2]
SAMPLE = str(ROOT / "fixtures" / "layered-launch" / "input.jsonl")
SINGLE = [
    report.name
    for report in REPORTS.values()
    if len(report.inputs) == 1 and report.output is None and report.name != "whatif"  # it needs steps
]
WRITING = {"export": "run", "plot": "run.svg", "report": "run.html", "flame": "run.svg"}
"""Reports that write a file or folder, and a name for it."""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> Run:
    """Runs a command line as the console script does: exit code, standard output, standard error."""

    def of(*argv: str, stdin: bytes = b"", columns: int = 80) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tracepipe", *argv])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as ended:
            cli.main()
            sys.exit(0)
        seen = capsysbinary.readouterr()
        return int(ended.value.code or 0), seen.out.decode(), seen.err.decode()

    return of


@pytest.fixture(scope="module")
def last_read() -> dict[str, Any]:
    """The recording that was read last, by its path."""
    return {}


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch, last_read: dict[str, Any]) -> None:
    """Has commands that follow each other read the same recording once."""
    read = tracepipe.load

    def load(path: str, *arguments: Any, **more: Any) -> Any:
        if path not in last_read:
            last_read.clear()
            last_read[path] = read(path, *arguments, **more)
        return last_read[path]

    monkeypatch.setattr("tracepipe.api.reports.load", load)


@pytest.mark.usefixtures("read_once")
@pytest.mark.parametrize("report", SINGLE)
@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_every_report_reads_every_input(run: Run, report: str, case: Case) -> None:
    code, out, err = run(report, str(case.input))
    assert (code, err) == (0, "")
    assert all(len(line) <= 80 for line in out.splitlines())
    if report == "summary":
        assert out.startswith(f"{case.input.name}   ") and len(out.splitlines()) <= 24
        code, out, err = run(report, str(case.input), "--all")
    assert "".join(out.split()).startswith(f"{case.input}:".replace(" ", ""))
    code, out, _ = run(report, str(case.input), "--json")
    data = json.loads(out)
    assert (code, data["report"], data["recordings"][0]["path"]) == (0, report, str(case.input))


@pytest.mark.parametrize("report", SINGLE)
def test_a_wide_terminal_shows_more(run: Run, report: str) -> None:
    recording = str(ROOT / "fixtures" / "capture-standin" / "input.jsonl")
    more = ["--all"] if report == "summary" else []
    _, narrow, _ = run(report, recording, *more)
    _, wide, _ = run(report, recording, *more, columns=200)
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines())) <= 200


def test_reports_that_write_are_known_here() -> None:
    assert set(WRITING) == {report.name for report in REPORTS.values() if report.output}


@pytest.mark.slow
@pytest.mark.parametrize("report", WRITING)
def test_a_report_writes_to_the_output_that_is_named(run: Run, tmp_path: Path, report: str) -> None:
    target = tmp_path / WRITING[report]
    sample, says = SAMPLE, "CUDA API calls: the only one takes 101 µs"
    if report == "flame":
        sample, says = str(ROOT / "fixtures" / "host-stacks" / "input.jsonl"), "Time of all threads"
    code, out, err = run(report, sample, "-o", str(target))
    assert (code, err) == (0, f"wrote {target}\n")
    assert says in " ".join(out.split()) or report == "export"
    assert target.is_dir() if report == "export" else target.stat().st_size > 10_000
    code, out, err = run(report, sample, "-o", str(target))
    assert (code, out, err.splitlines()[0]) == (1, "", f"tracepipe: {target} exists")
    code, out, _ = run(report, sample, "-o", str(target), "--force", "--json")
    assert (code, json.loads(out)["report"], json.loads(out)["output"]) == (0, report, str(target))
    assert [path.name for path in tmp_path.iterdir()] == [WRITING[report]]


def test_the_output_is_named_after_the_recording(run: Run, tmp_path: Path) -> None:
    recording = tmp_path / "trace.jsonl"
    recording.write_bytes(Path(SAMPLE).read_bytes())
    for report, options in (("export", ("--format", "csv")), ("plot", ("--what", "gaps"))):
        assert run(report, str(recording), *options)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.csv", "trace.html", "trace.jsonl"]
    assert (
        (tmp_path / "trace.csv" / "calls.csv").read_text().startswith("row,start_ns,end_ns,dur_ns,kind,name")
    )


@pytest.mark.slow
def test_a_picture_goes_to_standard_output_and_its_kind_is_that_of_its_name(run: Run, tmp_path: Path) -> None:
    code, out, err = run("plot", SAMPLE, "--what", "latency", "-o", "-")
    assert (code, out.startswith("<!DOCTYPE html>")) == (0, True)
    assert "CUDA API calls: the only one takes 101 µs" in err
    code, _, err = run("plot", SAMPLE, "-o", str(tmp_path / "run.bmp"))
    assert (code, err.splitlines()[1].strip()) == (1, "Name a file ending with .html, .png, .svg.")
    code, _, err = run("export", "-", stdin=Path(SAMPLE).read_bytes())
    assert (code, err.splitlines()[0]) == (1, "tracepipe: a folder cannot go to standard output")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_every_input_can_be_exported(run: Run, tmp_path: Path, case: Case) -> None:
    code, _, _ = run("export", str(case.input), "-o", str(tmp_path / "out"))
    files = {f"{table}.parquet" for table in VIEWS} | {"run.json"}
    assert (code, {path.name for path in (tmp_path / "out").iterdir()}) == (0, files)


def test_standard_input_and_compressed_input_are_read(run: Run, tmp_path: Path) -> None:
    import gzip

    text = Path(SAMPLE).read_bytes()
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(text))
    of_pipe, of_file = run("summary", "-", "--json", stdin=text)[1], run("summary", str(packed), "--json")[1]
    assert json.loads(of_pipe)["calls"] == json.loads(of_file)["calls"] != []


def test_losses_clocks_and_bad_lines_are_stated(run: Run, tmp_path: Path) -> None:
    recording = write(
        tmp_path / "run.jsonl",
        {"type": "clock", "clock": GPU_CLOCK, "source_ns": 5, "host_lo_ns": 1_000, "host_hi_ns": 1_020},
        event("B", 1_100, "cuInit"),
        span(90, 95, "k", "gpu_kernel", clock=GPU_CLOCK),
        {"type": "loss", "layer": "userspace", "count": 7},
        "{",
    )
    _, out, _ = run("summary", str(recording), "--all", columns=200)
    assert f"skipped: {recording}:6: is not JSON" in out
    assert "note: 1 call had no end: it is counted, but its length is not known" in out
    assert f"clock {GPU_CLOCK}: 1 pair, drift unknown, within 12 ns of monotonic" in out
    assert "lost: 7 userspace events happened and were not recorded" in out
    code, _, err = run("summary", str(recording), "--strict")
    assert (code, err.splitlines()[0]) == (
        1,
        f"tracepipe: {recording}:6: is not JSON: unexpected end of data at column 2",
    )


def test_lines_without_a_time_are_placed_where_asked(run: Run) -> None:
    recording = str(ROOT / "fixtures" / "layered-undated" / "input.jsonl")
    _, out, _ = run("memory", recording, "--json")
    (place,) = json.loads(out)["over_time"]
    assert place["steps"] == [{"at_ns": 500_000, "total_bytes": 4096}]
    _, out, _ = run("memory", recording, "--undated", "between", "--json")
    assert [place["steps"] for place in json.loads(out)["over_time"]] == [
        [{"at_ns": 300_000, "total_bytes": 1 << 20}, {"at_ns": 500_000, "total_bytes": 2 << 20}],
        [{"at_ns": 500_000, "total_bytes": 4096}],
    ]
    _, out, _ = run("summary", recording, "--all", "--undated", "between", "--json")
    assert {row["layer"]: row["events"] for row in json.loads(out)["layers"]}["kernel"] == 2


def test_a_clock_without_pairs_is_placed_by_hand(run: Run) -> None:
    recording = str(ROOT / "fixtures" / "clocks-unpaired" / "input.jsonl")
    _, out, _ = run("timeline", recording, columns=200)
    assert "--assume-offset globaltimer:0=NS places them" in out
    _, out, _ = run("timeline", recording, "--assume-offset", "globaltimer:0=5", columns=200)
    assert "clock globaltimer:0: placed by an assumed offset, error unknown" in out


def test_names_of_the_program_cannot_write_to_the_terminal(run: Run, tmp_path: Path) -> None:
    name = "[bold]\x1b[31mred"
    warp = {"ts_ns": 1_000, "type": "gpu_warp", "name": name, "gpu": 0, "launch": 1, "grid": [1, 1, 1]}
    warp |= {"block": [32, 1, 1], "warp": [0], "entry_ns": [0], "exit_ns": [9]}
    stall = {"ts_ns": 1_000, "type": "gpu_stall", "functions": [name], "reasons": [name], "function": [0]}
    stall |= {"reason": [0], "samples": [9]}
    recording = write(
        tmp_path / "run.jsonl",
        span(1_000, 2_000, name, comm="\x1b]0;t\x07"),
        span(1_000, 1_600, name, "gpu_kernel"),
        event("B", 1_100, name, "annotation"),
        event("I", 1_500, "alloc", "memory", args={"size": 1, "address": name, "call": name}),
        warp,
        stall,
    )
    for report in SINGLE:
        _, out, _ = run(report, str(recording), columns=120)
        assert "\x1b" not in out and "\x07" not in out
        if report == "steps":  # it shows no names of this recording
            continue
        assert "[bold]\\x1b[31mred" in out


def of_a_call(folder: Path, name: str, length_ns: int) -> str:
    """The path of a recording in which a call takes so long, and a little more or less."""
    calls = (span(2_000 + at * 1_000, 2_000 + at * 1_000 + length_ns + at % 7, "cuInit") for at in range(20))
    return str(write(folder / name, *calls))


def test_two_runs_are_compared(run: Run, tmp_path: Path) -> None:
    a, b = of_a_call(tmp_path, "a", 500), of_a_call(tmp_path, "b", 300)
    code, out, _ = run("diff", a, b)
    assert code == 0 and "ns). The median length of cuInit is 503 ns in A" in " ".join(out.split())
    assert "faster" not in out and "slower" not in out
    assert all(len(line) <= 80 for line in out.splitlines())
    assert f"{a}: note: the file has no footer: the capture was cut off" in " ".join(out.split())
    code, out, _ = run("diff", a, b, "--json")
    data = json.loads(out)
    assert [(one["path"], one["side"]) for one in data["recordings"]] == [(a, "A"), (b, "B")]
    assert [(row["a_p50_ns"], row["b_p50_ns"]) for row in data["lengths"]] == [(503, 303)]
    code, _, err = run("diff", "-", "-")
    assert (code, "Standard input can be read only once." in err) == (2, True)
    same = " ".join(run("diff", a, a)[1].split())
    assert "No name that both sides have differs by more than 1%." in same


@pytest.mark.parametrize(
    "form",
    [
        "--a {0} {1} {2} {3} --b {4} {5} {6} {7}",
        "--b {4} {5} {6} {7} --top 3 --a {0} {1} {2} {3}",
        "--a {0} --a {1} --a {2} --a {3} --b {4} {5} --b {6} {7}",
        "--a={0} {1} {2} {3} --b={4} {5} --b {6} {7} --top=3",
    ],
)
def test_several_runs_of_each_side_are_compared(run: Run, tmp_path: Path, form: str) -> None:
    of_a = [of_a_call(tmp_path, f"a{at}", 500 + at) for at in range(4)]
    of_b = [of_a_call(tmp_path, f"b{at}", 300 + at) for at in range(4)]
    code, out, _ = run("diff", *form.format(*of_a, *of_b).split(), "--json")
    data = json.loads(out)
    assert (code, [one["side"] for one in data["recordings"]]) == (0, [*"AAAABBBB"])
    assert [one["path"] for one in data["recordings"]] == of_a + of_b
    assert data["compared"][0]["a_p50_ns"] == [503, 504, 505, 506]
    (row,) = data["lengths"]
    assert (row["a_p50_ns"], row["b_p50_ns"]) == (504, 304)
    assert row["p"] == pytest.approx(1 / 35)
    assert "that changed are faster in B. The median length of cuInit is 504 ns in A and" in " ".join(
        run("diff", *form.format(*of_a, *of_b).split())[1].split()
    )


def test_one_of_several_runs_may_be_standard_input(run: Run, tmp_path: Path) -> None:
    """It is read once, though how late its threads are is looked at again."""
    text, late = (
        "".join(
            f"Thread ({thread}, 0, 0) timestamp: {10**18 + at + thread * 7 % 40 + late * (thread % 8 == 7)}\n"
            for at in range(0, 1_200_000, 100_000)
            for thread in range(256)
        )
        for late in (0, 750)
    )
    (tmp_path / "b.txt").write_text(late)
    code, out, err = run("diff", "--a", "-", "--b", str(tmp_path / "b.txt"), "--json", stdin=text.encode())
    assert (code, err) == (0, "")
    rows = {row["name"]: (row["a_count"], row["b_count"]) for row in json.loads(out)["exits"]}
    assert rows["kernel: delay of threads with t mod 8 = 7"] == (96, 96)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "There is no recording B.\n  Name A and B, or several of each with --a and --b."),
        (["--a", "a1", "a2"], "There are no recordings of B.\n  Name one or more by --b."),
        (["--a", "--b", "b1"], "Option --a requires an argument"),
        (["--b", "b1"], "There are no recordings of A.\n  Name one or more by --a."),
        (["--a", "a1", "--b"], "Option '--b' requires an argument"),
        (
            ["a", "b", "--a", "a1", "--b", "b1"],
            "a is of neither side.\n  Name all recordings with --a and --b.",
        ),
        (["--a", "a1", "a1", "--b", "b1"], "a1 is named twice"),
        (["--a", "-", "a1", "--b", "-"], "Standard input can be read only once."),
    ],
)
def test_sides_that_are_not_named_are_errors_of_usage(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("diff", *arguments, columns=200)
    assert code == 2
    assert message in err


def test_options_of_reports_are_options_of_commands(run: Run) -> None:
    code, out, _ = run("summary", SAMPLE, "--top", "1", "--sort", "name", "--json")
    assert (code, [row["name"] for row in json.loads(out)["calls"]]) == (0, ["cuLaunchKernel"])
    code, _, err = run("summary", SAMPLE, "--sort", "colour")
    assert (code, "colour" in err) == (2, True)
    code, out, _ = run("layers", SAMPLE, "--call", "1", "--json")
    assert [row["name"].strip() for row in json.loads(out)["tree"]][:2] == ["cuLaunchKernel", "ioctl"]
    code, _, err = run("layers", SAMPLE, "--call", "9")
    assert (code, err.splitlines()[0]) == (
        1,
        "tracepipe: The recording has 1 outermost call, and no call 9.",
    )
    _, out, _ = run("timeline", SAMPLE, "--width", "60")
    assert max(len(line) for line in out.splitlines() if line.startswith(("CUDA", "driver"))) == 60


def test_without_the_libraries_two_lines_state_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = run("export", SAMPLE, "--format", "arrow", "-o", tmp_path / "tables")
    assert (code, out, len(err.splitlines())) == (3, "", 2)
    assert err.splitlines()[1].strip() == "pip install pyarrow"


def printed_and_loaded(*argv: str) -> tuple[str, set[str]]:
    """What a command prints in a process of its own, and which modules it loads."""
    code = (
        "import sys\n"
        "from tracepipe import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
    )
    return done.stdout, set(done.stderr.splitlines()[-1].split())


@pytest.mark.slow
def test_a_command_loads_what_it_needs_alone() -> None:
    _, loaded = printed_and_loaded("validate", SAMPLE)
    assert {"tracepipe.cli.convert", "tracepipe.readers"} <= loaded
    others = {f"tracepipe.cli.{name}" for name in ("capture", "dataset", "live", "machine", "reports")}
    assert not loaded & {*others, "tracepipe.tracer", "tracepipe.reports", "tracepipe.terminal.live_view"}


@pytest.mark.slow
def test_help_needs_no_library_of_the_reports() -> None:
    printed, loaded = printed_and_loaded("--help")
    assert not {"polars", "numpy", "scipy", "matplotlib", "jinja2"} & loaded
    assert "Reports" in printed and all(name in printed for name in REPORTS)
