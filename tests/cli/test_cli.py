"""The commands as a user types them: what they print, where, and with which exit code."""

from __future__ import annotations

import gzip
import io
import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.support.program import PYTHONPATH
from tracepipe import __version__, cli, native
from tracepipe.cli import convert as cli_convert
from tracepipe.converters import CONVERTERS
from tracepipe.errors import CaptureUnavailable
from tracepipe.readers import READERS
from tracepipe.terminal import messages

GPU = "globaltimer:0"
HEADER = {
    "type": "header",
    "schema": "tracepipe/1",
    "clock": "monotonic",
    "clocks": ["monotonic", GPU],
    "start": {"monotonic_ns": 1_000, "realtime_ns": 1_800_000_000_000_000_000},
}
CALL = {
    "type": "userspace",
    "name": "cuInit",
    "phase": "X",
    "ts_ns": 2_000,
    "dur_ns": 500,
    "pid": 4,
    "tid": 4,
}
KERNEL = {"type": "gpu_kernel", "name": "k", "phase": "X", "ts_ns": 900, "dur_ns": 5, "clock": GPU}
PAIR = {"type": "clock", "clock": GPU, "source_ns": 500, "host_lo_ns": 2_990, "host_hi_ns": 3_010}
FOOTER = {"type": "footer", "counts": {"userspace": 1, "gpu_kernel": 1}, "losses": {}}
GOOD = "".join(json.dumps(line) + "\n" for line in (HEADER, PAIR, CALL, KERNEL, FOOTER))
LAYERED = '{"ts":1.0,"type":"userspace","name":"cuInit","phase":"B"}\n'

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with one recording, run.jsonl."""
    monkeypatch.chdir(tmp_path)
    Path("run.jsonl").write_text(GOOD)
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> Run:
    """Runs a command line as the console script does: exit code, standard output, standard error."""

    def of(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tracepipe", *argv])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            cli.main()
            sys.exit(0)
        seen = capsysbinary.readouterr()
        return int(ended.value.code or 0), seen.out.decode("utf-8", "replace"), seen.err.decode()

    return of


def process(command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A shell command in which `tracepipe` is this one."""
    tracepipe = f'tracepipe() {{ "{sys.executable}" -m tracepipe "$@"; }}; '
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    return subprocess.run(
        ["bash", "-c", tracepipe + command],
        text=True,
        env=environment,
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options),
    )


# Help and version ---------------------------------------------------------------------------------------

LOADED = """
import sys
from tracepipe import cli
sys.argv = ["tracepipe", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as e:
    assert not e.code, e.code
print(*{name.partition(".")[0] for name in sys.modules}, *sys.modules, file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["convert", "--help"], ["capture", "--help"]])
def test_help_needs_nothing_native_and_nothing_slow(argv: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", LOADED, *argv], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "tracepipe" in loaded
    slow = {
        "bcc", "numpy", "google", "perfetto", "zstandard", "wasmtime", "rich",
        "tracepipe.converters.perfetto", "tracepipe.tracer.engines",
    }  # fmt: skip
    assert loaded & slow == set()


NUMPY = """
import os
from tracepipe import cli
from tracepipe.tracer.target import Target
try:
    cli.main()
except SystemExit:
    import numpy
print(len(os.listdir("/proc/self/task")), flush=True)
target = Target("/usr/bin/env", ["env"], set())
target.release()
target.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_numpy_starts_no_threads_and_a_captured_command_does_not_see_why() -> None:
    asked = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    command = [sys.executable, "-c", NUMPY, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=asked)
    _, threads, *_ = done.stdout.splitlines()
    assert threads == "1"
    assert "PATH=" in done.stdout and "OPENBLAS_NUM_THREADS" not in done.stdout
    chosen = asked | {"OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=chosen)
    assert "OPENBLAS_NUM_THREADS=2" in done.stdout.splitlines()


def test_the_version_is_printed(run: Run) -> None:
    assert run("--version") == (0, f"tracepipe {__version__} ({native.state()})\n", "")


def test_the_version_states_when_python_runs_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACEPIPE_PURE", "1")
    assert run("--version")[1] == f"tracepipe {__version__} (pure Python: TRACEPIPE_PURE=1)\n"


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "tracepipe", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"tracepipe {__version__} ({native.state()})\n")


def test_help_lists_the_commands(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(command in out for command in ("capture", "convert", "validate", "open"))


def test_help_lists_the_formats(run: Run) -> None:
    _, out, _ = run("convert", "--help")
    assert all(name in out for name in (*CONVERTERS, *READERS))


@pytest.mark.parametrize(
    "argv",
    [
        ["no-such-command"],
        ["convert"],
        ["convert", "run.jsonl", "--format", "pdf"],
        ["convert", "run.jsonl", "--from", "pdf"],
        ["convert", "run.jsonl", "--warp-tracks", "all"],
        ["convert", "run.jsonl", "--no-such-option"],
        ["convert", "run.jsonl", "--format", "chrome", "--compress"],
        ["convert", "run.jsonl", "--archive", "x.zip", "-o", "y.zip"],
        ["convert", "run.jsonl", "--archive", "x.zip", "--format", "chrome"],
        ["convert", "run.jsonl", "--assume-offset", "globaltimer:0"],
        ["convert", "run.jsonl", "--assume-offset", "=5"],
        ["convert", "run.jsonl", "--assume-offset", "globaltimer:0="],
        ["validate"],
    ],
)
def test_wrong_usage_exits_2_and_writes_nothing(argv: list[str], run: Run, here: Path) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert "Usage: tracepipe" in err
    assert [path.name for path in here.iterdir()] == ["run.jsonl"]


# Convert ------------------------------------------------------------------------------------------------


def test_a_recording_becomes_a_perfetto_trace_next_to_it(run: Run, here: Path) -> None:
    code, out, err = run("convert", "run.jsonl")
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        "run.jsonl: tracepipe, 1 userspace, 1 gpu_kernel",
        "clock globaltimer:0: 1 pair, drift unknown, within 12 ns",
        "wrote run.pftrace: open it in ui.perfetto.dev, or run tracepipe open run.pftrace",
    ]
    assert len(pb.Trace.FromString((here / "run.pftrace").read_bytes()).packet) > 5


def test_a_recording_becomes_chromes_json(run: Run, here: Path) -> None:
    code, _, err = run("convert", "run.jsonl", "--format", "chrome", "-o", "out.json")
    assert code == 0
    assert "speedscope" in err
    names = {
        event["name"] for event in json.loads(Path("out.json").read_bytes())["traceEvents"] if "name" in event
    }
    assert {"cuInit", "k"} <= names


def test_text_goes_to_the_terminal_unless_an_output_is_named(run: Run, here: Path) -> None:
    code, out, err = run("convert", "run.jsonl", "-f", "text")
    assert code == 0
    assert "cuInit" in out
    assert "wrote" not in err
    assert run("convert", "run.jsonl", "-f", "text", "-o", "out.txt")[:2] == (0, "")
    assert Path("out.txt").read_text() == out


def test_every_format_converts_every_input_format(run: Run, here: Path) -> None:
    fixtures = Path(__file__).parents[2] / "fixtures"
    for case in ("layered-bpftrace", "bpftime-divergence", "bpftime-kernelretsnoop"):
        (source,) = (fixtures / case).glob("input.*")
        for name in CONVERTERS:
            code, _, err = run("convert", str(source), "-f", name, "-o", f"{case}.{name}")
            assert (code, "Traceback" in err) == (0, False)
            assert Path(f"{case}.{name}").exists()


@pytest.mark.slow
def test_a_pipeline_reads_and_writes_standard_streams(run: Run, here: Path) -> None:
    code, out, err = run("convert", "-", "-f", "text", stdin=gzip.compress(GOOD.encode()))
    assert code == 0
    assert "cuInit" in out
    assert err.startswith("-: tracepipe, 1 userspace")
    done = process("tracepipe convert - < run.jsonl | wc -c")
    assert int(done.stdout) > 100
    assert [path.name for path in here.iterdir()] == ["run.jsonl"]


def test_compressed_packets_are_smaller(run: Run, here: Path) -> None:
    Path("run.jsonl").write_text(GOOD.replace("cuInit", "cu" + "a" * 5_000))
    for option in ([], ["--compress"]):
        assert run("convert", "run.jsonl", "-o", "".join(["out", *option]), *option)[0] == 0
    assert Path("out--compress").stat().st_size < Path("out").stat().st_size / 4


def test_the_input_format_can_be_named(run: Run, here: Path) -> None:
    Path("run.jsonl").write_text("\n\n")
    assert run("convert", "run.jsonl", "-f", "text", "--from", "layered")[0] == 0
    code, _, err = run("convert", "run.jsonl", "-f", "text", "--from", "tracepipe")
    assert code == 1
    assert err.startswith("tracepipe: run.jsonl:1: ")


def test_an_assumed_offset_is_taken_as_ns_or_as_a_host_clock(run: Run, here: Path) -> None:
    Path("run.jsonl").write_text(GOOD.replace(json.dumps(PAIR) + "\n", ""))
    _, out, err = run("convert", "run.jsonl", "-f", "text")
    assert " k " not in out
    assert "not drawn: 1 event on globaltimer:0" in err
    assert "--assume-offset globaltimer:0=NS" in err
    _, out, err = run("convert", "run.jsonl", "-f", "text", "--assume-offset", f"{GPU}=-100")
    assert " k source_ns=900" in out
    assert "placed by an assumed offset, error unknown" in err
    _, out, _ = run("convert", "run.jsonl", "-f", "text", "--assume-offset", f"{GPU}=realtime")
    assert " k source_ns=900" in out
    code, _, err = run("convert", "run.jsonl", "-f", "text", "--assume-offset", f"{GPU}=tai")
    assert (code, len(err.splitlines())) == (1, 2)
    assert "cannot place globaltimer:0 by 'tai'" in err


def test_warp_tracks_and_thread_exits_are_handed_on(run: Run, here: Path) -> None:
    warp = {"type": "gpu_warp", "name": "k", "ts_ns": 700, "clock": GPU, "warp": [0], "sm": [3], "slot": [5]}
    warp |= {"entry_ns": [0], "exit_ns": [9]}
    Path("run.jsonl").write_text(GOOD + json.dumps(warp) + "\n")
    assert "slot 5" in run("convert", "run.jsonl", "-f", "text")[1]
    assert "slot 5" not in run("convert", "run.jsonl", "-f", "text", "--warp-tracks", "logical")[1]
    assert "SM 3 active warps" in run("convert", "run.jsonl", "-f", "text", "--warp-tracks", "sm")[1]
    assert "mask=0xffffffff" in run("convert", "run.jsonl", "-f", "text", "--thread-exits")[1]


def test_the_name_of_the_output_decides_its_format(run: Run, here: Path) -> None:
    Path("run.jsonl").write_text(GOOD)
    assert run("convert", "run.jsonl", "-o", "x.json")[0] == 0
    assert "traceEvents" in json.loads(Path("x.json").read_text())
    code, errors = run("convert", "run.jsonl", "-o", "again.jsonl.gz")[::2]
    assert (code, errors.splitlines()[-1]) == (0, "wrote again.jsonl.gz")
    assert Path("again.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"
    assert run("convert", "run.jsonl", "-o", "no-ending")[0] == 0
    assert Path("no-ending").read_bytes()[:1] == b"\n"


@pytest.mark.slow
@pytest.mark.parametrize("option", ["--archive", "-o"])
def test_an_archive_holds_a_trace_of_each_recording(option: str, run: Run, here: Path) -> None:
    other = (HEADER | {"clocks": ["monotonic"]}, CALL | {"pid": 9})
    Path("other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in other))
    of_one_host = ("--offset", "other.jsonl=0")
    code, _, err = run("convert", "run.jsonl", "other.jsonl", *of_one_host, option, "all.zip")
    assert code == 0
    assert err.splitlines()[-1] == (
        "wrote all.zip: open it in ui.perfetto.dev, or run tracepipe open all.zip"
    )
    with zipfile.ZipFile("all.zip") as archive:
        assert archive.namelist() == ["run.pftrace", "other.pftrace", "perfetto_manifest.json"]
    sql = (
        "select slice.name, pid from slice join thread_track on thread_track.id = track_id "
        "join thread using (utid) join process using (upid) order by pid"
    )
    asked = run("query", "all.zip", sql, "--format", "csv")
    assert asked[:2] == (0, "name,pid\ncuInit,4\ncuInit,9\n")
    before = Path("all.zip").read_bytes()
    code, _, err = run("convert", "run.jsonl", "other.jsonl", *of_one_host, option, "all.zip")
    assert (code, err.splitlines()[0]) == (1, "tracepipe: all.zip exists")
    Path("other.jsonl").write_text(json.dumps(HEADER | {"clock": "tsc", "clocks": ["tsc"]}) + "\n")
    code, _, err = run("convert", "run.jsonl", "other.jsonl", option, "all.zip", "--force")
    assert code == 1 and "other.jsonl cannot be put on the clock of run.jsonl" in err
    assert Path("all.zip").read_bytes() == before
    assert sorted(path.name for path in here.iterdir()) == ["all.zip", "other.jsonl", "run.jsonl"]


# Errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "what", "hint"),
    [
        (["convert", "missing"], "missing: cannot be read: No such file or directory", "Check the path."),
        (["convert", "no/run.jsonl"], "no/run.jsonl: cannot be read: No such file", "Check the path."),
        (["convert", "folder"], "folder: cannot be read: Is a directory", "Check the path."),
        (["convert", "empty"], "empty: is empty", "Record something first"),
        (["convert", "a.nsys-rep"], "a.nsys-rep: is a report of Nsight Systems", "nsys export --type sqlite"),
        (["convert", "noise"], "noise: the content is not of a known input format", "Name it with --from"),
        (
            ["convert", "program"],
            "the file is a program or a library (ELF)",
            "tracepipe capture",
        ),
        (["convert", "config"], "the file is JSON, but not a known", "Name it with --from"),
        (["convert", "blank"], "the content is not of a known input format", "Name it with --from"),
        (["convert", "run.jsonl", "-f", "chrome", "-o", "y.pftrace"], "y.pftrace has the ending", "y.json"),
        (
            ["convert", "run.jsonl", "-o", "y.json.gz"],
            "the format chrome cannot be compressed",
            "Leave out .gz",
        ),
        (
            ["convert", "run.jsonl", "-o", "y.zst"],
            "the format perfetto cannot be compressed",
            "Leave out .zst",
        ),
        (["convert", "old"], "the file is 'tracepipe/0'", "Use the version of tracepipe that wrote it"),
        (["convert", "header"], "header:1: clock: must be a string, not 5", "Check that the file"),
        (["convert", "run.jsonl", "-o", "no/such/out"], "cannot write to no/such", "Name another place"),
        (["convert", "run.jsonl", "-o", "folder"], "folder is a directory", "Name a file in it"),
        (["convert", "run.jsonl", "-o", "old"], "old exists", "Overwrite it with --force"),
        (["convert", "run.jsonl", "-o", "x" * 300], "File name too long", "Name another place"),
        (
            ["convert", "missing", "-o", "old", "--force"],
            "missing: cannot be read: No such",
            "Check the path.",
        ),
        (["convert", "."], ".: cannot be read: Is a directory", "Check the path."),
        (["convert", ""], ": cannot be read", "Check the path."),
        (
            ["convert", "run.jsonl", "-o", "/dev/full"],
            "cannot write /dev/full: No space left",
            "Free some space",
        ),
        (["convert", "bad", "--strict"], "bad:2: phase: must be one of B, E, I, X", "Leave out --strict"),
        (["validate", "missing"], "missing: cannot be read: No such file", "Check the path."),
        (["open", "missing"], "missing", ""),
    ],
)
def test_an_error_is_two_lines_what_happened_and_what_to_do(
    argv: list[str], what: str, hint: str, run: Run, here: Path
) -> None:
    Path("folder").mkdir()
    Path("empty").touch()
    Path("noise").write_bytes(bytes(range(256)))
    Path("a.nsys-rep").write_bytes(bytes(range(256)))
    Path("program").write_bytes(b"\x7fELF\2\1\1" + bytes(60))
    Path("config").write_text('{"learning_rate": 0.1}')
    Path("blank").write_text("\n\n\nsome\n\n\ntext\n")
    Path("old").write_text(json.dumps(HEADER | {"schema": "tracepipe/0"}))
    Path("header").write_text(json.dumps(HEADER | {"clock": 5}))
    Path("bad").write_text(json.dumps(HEADER) + "\n" + json.dumps(CALL | {"phase": "Q"}) + "\n")
    before = sorted(here.iterdir())
    code, out, err = run(*argv)
    assert (code, out) == (1, "")
    first, second = err.splitlines()
    assert first.startswith("tracepipe: ")
    assert what in first
    assert second.startswith("  ")
    assert hint in second
    assert sorted(here.iterdir()) == before


def test_force_overwrites(run: Run, here: Path) -> None:
    Path("run.pftrace").write_text("old")
    assert run("convert", "run.jsonl")[0] == 1
    assert Path("run.pftrace").read_text() == "old"
    assert run("convert", "run.jsonl", "--force")[0] == 0
    assert len(pb.Trace.FromString(Path("run.pftrace").read_bytes()).packet) > 5


def test_a_machine_that_cannot_capture_is_exit_3(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CaptureUnavailable("eBPF needs root", "run it with sudo")

    monkeypatch.setattr("tracepipe.tracer.capture", refuse)
    code, out, err = run("capture", "-o", "new.jsonl", "--", "true")
    assert (code, out) == (3, "")
    assert err.splitlines()[-2:] == ["tracepipe: eBPF needs root", "  run it with sudo"]
    assert not Path("new.jsonl").exists()


def test_what_cannot_be_opened_afterwards_is_reported_before_the_capture(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def captured(*_: Any, **__: Any) -> None:
        raise AssertionError("the command was run")

    monkeypatch.setattr("tracepipe.tracer.capture", captured)
    Path("new.pftrace").write_text("old")
    code, _, err = run("capture", "--open", "-o", "new.jsonl", "--", "true")
    assert (code, err.splitlines()[0]) == (1, "tracepipe: new.pftrace exists")
    assert not Path("new.jsonl").exists()
    assert run("capture", "--open", "-o", "-", "--", "true")[0] == 2


def test_bad_lines_are_named_and_do_not_stop_a_conversion(run: Run, here: Path) -> None:
    Path("run.jsonl").write_text(GOOD.replace('"pid": 4', '"pid": -4') + "{\n")
    code, out, err = run("convert", "run.jsonl", "-f", "text")
    assert code == 0
    assert "skipped: run.jsonl:3: pid: must be at least 0, not -4" in err.splitlines()
    assert "k source_ns=900" in out
    assert "note: the footer counts 1 userspace event, the file has 0" in err


# Validate -----------------------------------------------------------------------------------------------


def test_a_good_recording_is_valid(run: Run, here: Path) -> None:
    assert run("validate", "run.jsonl") == (
        0,
        "",
        "run.jsonl: tracepipe, 2 events, 0 bad lines, 0 unclear\n",
    )


def test_validate_names_file_line_and_field(run: Run, here: Path) -> None:
    lines = GOOD.splitlines()
    lines[2] = json.dumps(CALL | {"ts_ns": "soon"})
    lines.insert(4, "{")
    Path("run.jsonl").write_text("\n".join(lines) + "\n")
    code, out, err = run("validate", "run.jsonl")
    assert code == 1
    first, second = out.splitlines()
    assert first == "run.jsonl:3: ts_ns: must be an integer, not 'soon'"
    assert second.startswith("run.jsonl:5: is not JSON")
    assert "1 event, 2 bad lines, 0 unclear" in err
    assert "note: the footer counts 1 userspace event, the file has 0" in err


def test_validate_reads_other_formats_and_standard_input(run: Run, here: Path) -> None:
    assert run("validate", "-", stdin=LAYERED.encode())[0] == 0
    assert run("validate", "--from", "layered", "-", stdin=LAYERED.encode())[2].startswith(
        "-: layered, 1 event"
    )


# Pipes --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reader_that_has_seen_enough_is_not_an_error(here: Path) -> None:
    events = (json.dumps(CALL | {"ts_ns": 2_000 + 1_000 * n}) for n in range(20_000))
    Path("run.jsonl").write_text("\n".join([json.dumps(HEADER | {"clocks": ["monotonic"]}), *events]) + "\n")
    done = process("set -o pipefail; tracepipe convert run.jsonl -f text | head -1")
    assert done.stdout == "trace clock monotonic, start 1000 ns\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    assert done.returncode == 0
    done = process("tracepipe convert run.jsonl -o - | head -c 10 | wc -c")
    assert (done.stdout.strip(), "Traceback" in done.stderr) == ("10", False)


@pytest.mark.slow
@pytest.mark.parametrize("argv", ["convert -f text", "convert -f chrome -o -", "convert -o -", "validate"])
def test_a_reader_that_is_gone_is_not_an_error(argv: str, here: Path) -> None:
    Path("run.jsonl").write_text(GOOD + "{\n")  # validate has something to print
    reading, writing = os.pipe()
    os.close(reading)
    done = process(f"unset PYTHONUNBUFFERED; tracepipe {argv} run.jsonl", stdout=writing)
    os.close(writing)
    assert (done.returncode, "Traceback" in done.stderr, "Exception" in done.stderr) == (0, False, False)


@pytest.mark.slow
def test_a_full_standard_output_is_an_error(here: Path) -> None:
    done = process("tracepipe convert run.jsonl -o - > /dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[:2] == [
        "tracepipe: cannot write standard output: No space left on device",
        "  Free some space, or use -o.",
    ]
    Path("run.jsonl").write_text(GOOD + "{\n")
    done = process("unset PYTHONUNBUFFERED; tracepipe validate run.jsonl > /dev/full")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "tracepipe: cannot write standard output: No space left on device",
        "  Free some space, or write elsewhere.",
    ]


@pytest.mark.slow
def test_a_recording_from_a_named_pipe_has_its_clocks_placed(here: Path) -> None:
    done = process("tracepipe convert <(gzip -c run.jsonl) -f text")
    assert done.returncode == 0
    assert "k source_ns=900" in done.stdout


@pytest.mark.slow
def test_the_module_runs_without_a_terminal(here: Path) -> None:
    done = process("tracepipe convert run.jsonl </dev/null")
    assert (done.returncode, done.stdout) == (0, "")
    assert "wrote run.pftrace" in done.stderr
    assert "\x1b" not in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_conversion_that_is_ended_leaves_no_half_file(number: signal.Signals, here: Path) -> None:
    def take_it() -> None:  # whoever started the tests may have it ignored
        signal.signal(number, signal.SIG_DFL)

    command = [sys.executable, "-m", "tracepipe", "convert", "-", "-o", "out.pftrace"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, bufsize=0, preexec_fn=take_it
    ) as process:
        assert process.stdin
        # More than a pipe holds: once it is written, the conversion reads, and has its output open.
        process.stdin.write(GOOD.encode() * 2000)
        assert any(path.name.startswith(".out.pftrace") for path in here.iterdir())
        process.send_signal(number)
        process.stdin.close()  # Python may be about to read when the signal comes, and would look after that
        assert process.wait(30) == 128 + number
    assert [path.name for path in here.iterdir()] == ["run.jsonl"]


def test_text_on_a_terminal_is_alone_there(here: Path) -> None:
    # A bar would stand in its first line.
    with mock.patch.object(messages, "_QUIET_S", 0.0):
        screen, theirs = os.openpty()
        with open(theirs, "w") as tty, mock.patch.multiple(sys, stdout=tty, stderr=tty):
            cli_convert.convert_file("run.jsonl", "text")
        seen = os.read(screen, 1 << 16).decode()
        os.close(screen)
    assert seen.startswith("trace clock monotonic, start 1000 ns\r\n")
