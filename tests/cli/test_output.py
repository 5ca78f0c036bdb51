"""What reaches a terminal: names of recordings, paths and arguments write there as letters alone. And what
becomes of output that nobody takes.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, TextIO

import pytest
import typer

from tests.golden.hostile import _dumped
from tests.support.program import PYTHONPATH
from tests.support.recordings import event, span
from tracepipe import cli
from tracepipe.api.record import OutputNames
from tracepipe.errors import CaptureUnavailable, LibraryMissing

ROOT = Path(__file__).parents[2]
BAD = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eexe\u2066\u2028\x7f\r\x00\n[red]"
"""A title, an erased screen, a colour, letters turned around, ends of lines; what Rich takes for markup."""
NAMED = BAD.replace("\x00", "")
"""As much of it as a file's name may hold."""
SHOWN = "\\x1b]0;owned\\x07"
pytestmark = pytest.mark.usefixtures("quick_doctor")
LAST = b"\0"  # nothing of ours prints it
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
WARP = {
    "ts_ns": 1_000, "type": "gpu_warp", "name": BAD, "gpu": 0, "launch": 1, "grid": [2, 1, 1],
    "block": [32, 1, 1], "warp": [0, 1], "sm": [0, 1], "entry_ns": [0, 0], "exit_ns": [9, 700],
}  # fmt: skip
RECORDS = [
    {
        "type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic", BAD],
        "command": [BAD, BAD], "host": BAD, "engine": BAD, "gpus": [{"index": 0, "name": BAD}],
        "layers": [BAD], "start": {"monotonic_ns": 1_000, BAD: 5},
    },
    span(1_000, 9_000, BAD, comm=BAD, args={BAD: BAD, "result": BAD}),
    span(1_100, 1_600, BAD, "syscall", args={"size": 9}),
    span(1_200, 1_300, BAD, "kernel"),
    span(1_200, 1_600, BAD, "gpu_kernel", gpu=0, stream=1, launch=1),
    span(2_200, 2_600, BAD, "gpu_kernel", gpu=0, stream=1, launch=2),
    span(1_200, 1_600, BAD, "transfer", args={"kind": BAD}),
    event("I", 1_500, "alloc", "memory", args={"size": 1, "address": BAD, "call": BAD}),
    event("B", 1_500, BAD, "scheduler", comm=BAD),
    event("B", 1_500, BAD, "userspace", clock=BAD),
    {"type": BAD}, {BAD: BAD}, {"ts_ns": 5, "type": "kernel", "name": BAD, "phase": BAD},
    WARP,
    {"type": "loss", "layer": BAD, "count": 3, "reason": BAD},
    {"type": "footer", "counts": {BAD: 3}, "losses": {BAD: 3}, "ended_by": BAD},
]  # fmt: skip
RUN, TRACE, NONE = f"{NAMED}.jsonl", f"{NAMED}.pftrace", f"no{NAMED}.jsonl"
# Command → argument lists, one of which at least shows a hostile name.
ASKED: dict[str, list[list[str]]] = {
    "convert": [
        ["convert", RUN, "-f", "text"], ["convert", RUN, "-f", "chrome", "--force"],
        ["convert", RUN, "-o", "out"], ["convert", RUN, "-o", "out"],
        ["convert", RUN, "-o", f"no/{NAMED}"], ["convert", NONE],
        ["convert", RUN, "--strict", "--force"], ["convert", RUN, "--assume-offset", f"{NAMED}=5", "--force"],
        ["convert", RUN, "--assume-offset", NAMED], ["convert", TRACE], ["convert", ".", "-o", NAMED],
        ["convert", ".", "-o", "x.pftrace", "--ranks", NAMED], ["convert", RUN, "--from", NAMED],
    ],
    "validate": [["validate", RUN], ["validate", NONE], ["validate", "--from", NAMED, RUN]],
    "open": [["open", NONE], ["open", TRACE]],
    "capture": [
        ["capture", "--layers", NAMED, "--", "true"], ["capture", "-o", f"no/{NAMED}", "--", "true"],
        ["capture", "-o", RUN, "--", "true"], ["capture", "--hook", NAMED, "--", "true"],
    ],
    "cut": [
        ["cut", RUN, "--from", "0s", "--to", "1us", "-o", "part.jsonl"], ["cut", RUN, "--from", NAMED],
        ["cut", RUN, "--from", "0s", "--to", "1us", "-o", f"no/{NAMED}"], ["cut", NONE, "--from", "0s"],
    ],
    "query": [
        ["query", RUN, "select name from slice"], ["query", RUN, "--json", "select name from slice"],
        ["query", RUN, f"select '{NAMED}' as \"{NAMED}\""], ["query", RUN, NAMED],
        ["query", NONE, "select 1"], ["query", ".", f"select '{NAMED}'"],
    ],
    "dataset": [
        ["dataset", "build", RUN, "-o", "ds"], ["dataset", "build", RUN, "--json", "-o", f"no/{NAMED}"],
        ["dataset", "build", NONE, "-o", "ds"], ["dataset", "build", RUN, "-o", TRACE],
    ],
    "ranks": [
        ["dataset", "build", "3.jsonl", "-o", NAMED], ["ranks", NAMED], ["ranks", NAMED, "--step", "99"],
        ["ranks", RUN],
    ],
    "live": [["live", "--hook", NAMED, "--", "true"], ["live", "--min-duration", NAMED, "--", "true"]],
    "doctor": [["doctor", NAMED]],
    "mcp": [["mcp", NONE]],
    "include": [["include", NAMED]],
    "hooks": [["hooks", "list", NAMED], ["hooks", NAMED], ["hooks", "test", NAMED, "--", "true"]],
    "diff": [["diff", RUN, RUN], ["diff", RUN, RUN, "--json"], ["diff", RUN, NONE]],
    "export": [["export", RUN, "-o", f"{NAMED}.csv", "--format", "csv"], ["export", RUN, "-o", RUN]],
    "flame": [["flame", RUN, "-o", f"{NAMED}.svg"], ["flame", RUN, "--idle", "--json"], ["flame", NONE]],
    "plot": [["plot", RUN], ["plot", RUN, "--json", "--force"], ["plot", RUN, "-o", f"x.{NAMED}"]],
    "report": [
        ["report", RUN], ["report", RUN, "--json", "--force"], ["report", RUN, "--kernel", f"({NAMED}"],
    ],
}  # fmt: skip
for _name in (
    "summary",
    "steps",
    "whatif",
    "timeline",
    "layers",
    "gaps",
    "memory",
    "warps",
    "stalls",
    "lines",
    "annotations",
):
    ASKED[_name] = [[_name, RUN], [_name, RUN, "--json"], [_name, NONE], [_name, RUN, "--strict"]]
for _name, _lists in ASKED.items():
    _lists.append([_name, f"--{NAMED}"])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with files of hostile names."""
    monkeypatch.chdir(tmp_path)
    Path(RUN).write_bytes(b"".join(_dumped(record) + b"\n" for record in RECORDS))
    Path("3.jsonl").write_bytes(Path(RUN).read_bytes())
    Path(TRACE).write_bytes(b"nothing")
    return tmp_path


def ended(argv: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a command line in this process; its exit code."""
    patch.setattr(sys, "argv", ["tracepipe", *argv])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return int(end.value.code or 0)


def piped(argv: list[str], stdin: bytes = b"") -> tuple[int, str, str]:
    """A command line whose streams are not terminals: exit code, standard output, standard error."""
    out, err = io.BytesIO(), io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setattr(sys, "stdout", io.TextIOWrapper(out, "utf-8"))
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, "utf-8"))
        code = ended(argv, patch)
        sys.stdout.flush(), sys.stderr.flush()
        return code, out.getvalue().decode(), err.getvalue().decode()


def on_terminal(argv: list[str], term: str = "xterm") -> str:
    """What a terminal of a kind gets of a command line that has it for both streams."""
    screen, theirs = os.openpty()
    seen: list[bytes] = []

    def look() -> None:
        # Not until the other end is closed: a process that multiprocessing keeps may hold it until we end.
        while not seen or not seen[-1].endswith(LAST):
            seen.append(os.read(screen, 1 << 16))

    looking = threading.Thread(target=look)
    looking.start()
    with open(theirs, "w", encoding="utf-8") as tty, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", term)
        patch.setattr(sys, "stdout", tty)
        patch.setattr(sys, "stderr", tty)
        ended(argv, patch)
        tty.flush()
        os.write(theirs, LAST)
        looking.join()
    os.close(screen)
    return b"".join(seen).removesuffix(LAST).decode().replace("\r\n", "\n")


def not_letters(text: str) -> set[str]:
    """What a terminal would obey, the ends of lines aside."""
    return {letter for letter in text if not letter.isprintable()} - {"\n"}


@pytest.fixture(autouse=True)
def nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures get as far as this machine lets them without a program to run, and no bar moves the cursor."""

    def refused(*_: Any, **__: Any) -> Any:
        raise CaptureUnavailable(f"cannot record {BAD}", f"try {BAD}")

    monkeypatch.setattr(OutputNames, "recording", lambda names, given: given or NAMED)
    monkeypatch.setattr("tracepipe.tracer.capture", refused)
    monkeypatch.setattr("tracepipe.terminal.messages._QUIET_S", math.inf)


def test_every_command_is_asked_here() -> None:
    group = typer.main.get_group(cli.app)
    assert set(ASKED) == set(group.list_commands(typer.Context(group)))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("command", ASKED)
def test_no_name_writes_but_as_letters(command: str, here: Path) -> None:
    seen = ""
    for argv in ASKED[command]:
        _, out, err = piped(argv)
        assert not_letters(out) == not_letters(err) == set(), argv
        assert "Traceback" not in err
        assert "\nowned" not in out + err
        seen += out + err
        if out and argv[-1] == "--json":
            assert json.loads(out)["recordings"][0]["path"] == RUN
    assert SHOWN in seen


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("command", ASKED)
def test_a_terminal_gets_colours_of_ours_alone(command: str, here: Path) -> None:
    seen = "".join(on_terminal(argv) for argv in ASKED[command])
    # The live view stands at the bottom, for which it moves the cursor.
    text = (MOVES if command == "live" else COLOUR).sub("", seen)
    assert not_letters(text) == set()
    assert "\x1b[2J" not in seen and "\\x1b[2J" in text and SHOWN in text


def test_names_in_csv_are_as_they_are_and_so_for_no_terminal(here: Path) -> None:
    seen = on_terminal(["query", RUN, f"select '{NAMED}'", "--format", "csv"])
    assert "the output is not for a terminal" in seen and NAMED not in seen


def test_other_libraries_are_guarded_too(here: Path) -> None:
    def warn(*_: Any, **__: Any) -> None:
        sys.stderr.write(warnings.formatwarning(BAD, UserWarning, "file", 1))
        print(BAD)
        print(BAD, file=sys.stderr)
        raise LibraryMissing(BAD, BAD)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracepipe.cli.convert.convert_recording", warn)
        code, out, err = piped(["convert", RUN])
    assert (code, not_letters(out), not_letters(err)) == (3, set(), set())
    assert (out.count(SHOWN), err.count(SHOWN)) == (1, 4)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_name_can_be_printed_in_any_encoding(encoding: str, here: Path) -> None:
    Path("größe.jsonl").write_bytes(Path(RUN).read_bytes())
    os.rename("größe.jsonl", b"gr\xff\xc3\xb6\xe6\x97\xa5.jsonl")
    path = os.fsdecode(b"gr\xff\xc3\xb6\xe6\x97\xa5.jsonl")
    for argv in (["validate", path], ["summary", path], ["summary", path, "--json"], ["convert", path]):
        out, err = io.BytesIO(), io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
            patch.setattr(sys, "stderr", io.TextIOWrapper(err, encoding))
            assert ended(argv, patch) in (0, 1)
            sys.stdout.flush(), sys.stderr.flush()
        assert "udcff" in (out.getvalue() + err.getvalue()).decode(encoding)


def test_bytes_that_are_no_text_are_refused_or_passed_on(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = os.fsdecode(b"gr\xff-3.jsonl")
    Path(odd).write_bytes(Path(RUN).read_bytes())
    code, _, err = piped(["dataset", "build", odd, "-o", "ds"])
    assert (code, "has a path that is not UTF-8" in err, "Traceback" in err) == (1, True, False)
    code, _, err = piped(["query", RUN, os.fsdecode(b"select '\xff' from calls")])
    assert (code, "The SQL is not UTF-8." in err, "Traceback" in err) == (1, True, False)


# Output without a reader ----------------------------------------------------------------------------------

F = str(ROOT / "fixtures" / "layered-launch" / "input.jsonl")
PRINTING = [
    "--help", "--version", "hooks", "hooks list", "convert --help", f"summary {F}", f"summary {F} --json",
    f"timeline {F}", f"layers {F}", f"gaps {F}", f"memory {F}", f"warps {F}", f"diff {F} {F}",
    "validate bad.jsonl", f"convert {F} -f text", f"convert {F} -o -", f"plot {F} -o - --what gaps",
    f"report {F} -o -", f"export {F} -o out --force", "doctor", "doctor --json",
]  # fmt: skip


# One of each way of writing, as processes: the interpreter's own end is tried too.
PROCESSES = ["--help", f"convert {F} -o -", "validate bad.jsonl"]
FURTHER = ["hooks list", f"summary {F} --json", f"convert {F} -f text", f"plot {F} -o - --what gaps"]
every_process = pytest.mark.parametrize(
    "command", [*PROCESSES, *(pytest.param(command, marks=pytest.mark.slow) for command in FURTHER)]
)


def to(stream: TextIO | None, command: str) -> tuple[int, str]:
    """A command line in this process with another standard output, which it also ends; its standard error."""
    err = io.BytesIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", io.TextIOWrapper(err, "utf-8"))
        code = ended(command.split(), patch)
        sys.stderr.flush()
        if stream is not None:
            stream.close()  # as the interpreter would: what is held back is written
        return code, err.getvalue().decode()


def shell(command: str, buffered: bool, **options: Any) -> subprocess.CompletedProcess[str]:
    """A shell command in which `tracepipe` is this one."""
    tracepipe = f'tracepipe() {{ "{sys.executable}" -m tracepipe "$@"; }}; '
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "" if buffered else "1"}
    return subprocess.run(
        ["bash", "-c", tracepipe + command], text=True, env=environment, capture_output=True, **options
    )


@pytest.fixture
def bad(here: Path) -> None:
    """A recording with so many bad lines that their messages do not fit into a pipe."""
    lines = [
        '{"type":"header","schema":"tracepipe/1","clock":"monotonic","clocks":["monotonic"]}',
        *["{"] * 3_000,
    ]
    Path("bad.jsonl").write_text("\n".join(lines))


def check_full(code: int, message: str) -> None:
    """That two lines are about a disk without room."""
    assert code == 1
    *_, what, hint = message.splitlines()
    assert what == "tracepipe: cannot write standard output: No space left on device"
    assert hint.startswith("  Free some space, or ")
    assert message.count("tracepipe: ") == 1


def check_closed(code: int, message: str) -> None:
    """That the last two lines are about a closed stream."""
    assert code == 1
    assert message.splitlines()[-2:] == [
        "tracepipe: standard output is closed", "  Send it to a file, or to /dev/null.",
    ]  # fmt: skip


@pytest.mark.parametrize("command", PRINTING)
def test_what_cannot_be_written_is_an_error(command: str, bad: None) -> None:
    with open("/dev/full", "w") as full:
        check_full(*to(full, command))


@pytest.mark.parametrize("buffered", [True, pytest.param(False, marks=pytest.mark.slow)])
@every_process
def test_a_process_reports_what_it_cannot_write(command: str, buffered: bool, bad: None) -> None:
    done = shell(f"tracepipe {command} > /dev/full", buffered)
    check_full(done.returncode, done.stderr)


@pytest.mark.parametrize("command", PRINTING)
def test_a_closed_standard_output_is_an_error(command: str, bad: None) -> None:
    check_closed(*to(None, command))


@every_process
def test_a_process_reports_that_its_output_is_closed(command: str, bad: None) -> None:
    done = shell(f"tracepipe {command} >&-", True)
    check_closed(done.returncode, done.stderr)


@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_that_left_is_not_an_error(command: str, bad: None) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as left:
        code, errors = to(left, command)
    assert (code, "Traceback" in errors, "Exception" in errors) == (0, False, False)


@every_process
def test_a_process_whose_reader_left_prints_no_error(command: str, bad: None) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = shell(f"tracepipe {command} 2>err >&{writing}", True, pass_fds=[writing])
    os.close(writing)
    errors = Path("err").read_text()
    assert (done.returncode, "Traceback" in errors, "Exception" in errors) == (0, False, False)


# Machines without room -----------------------------------------------------------------------------------

SHORT = [
    ("ulimit -n 7", f"plot {F} -o x.png --what latency", "Too many open files."),
    ("ulimit -v 40000", f"convert {F} -f text", "Not enough memory."),
    ("ulimit -v 40000", f"validate {F}", "Not enough memory."),
    ("ulimit -d 200000", f"export {F} -o x", "Not enough memory: tables need 250 MiB"),
    *(
        pytest.param(*short, marks=pytest.mark.slow)
        for short in (
            ("ulimit -v 300000", "convert large.jsonl -f text", "Not enough memory."),
            ("ulimit -d 300000", f"report {F} -o x.html", "Not enough memory: reports need 400 MiB"),
            ("ulimit -d 100000", "convert large.jsonl -f text", "Not enough memory."),
        )
    ),
]


def write_large(path: Path) -> None:
    """A recording of one line, which takes 30 times its length while it is read."""
    count = 2_000_000
    columns = {
        "warp": ",".join(map(str, range(count))),
        "entry_ns": "0," * (count - 1) + "0",
        "exit_ns": "9," * (count - 1) + "9",
    }
    with path.open("w") as large:
        large.write('{"type":"header","schema":"tracepipe/1","clock":"monotonic","clocks":["monotonic"]}\n')
        large.write('{"ts_ns":1000,"type":"gpu_warp","name":"k","launch":1,"gpu":0')
        large.writelines(f',"{name}":[{values}]' for name, values in columns.items())
        large.write("}\n")


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "command", "message"), SHORT)
def test_a_machine_without_room_is_not_reported_as_a_bug(
    limit: str, command: str, message: str, here: Path
) -> None:
    if "large.jsonl" in command:
        write_large(Path("large.jsonl"))
    done = shell(f"{limit}; tracepipe {command} >/dev/null", True)
    *_, what, hint = done.stderr.splitlines()
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert what.startswith(f"tracepipe: {message}") and hint.startswith("  ")


def test_a_bug_keeps_its_traceback(here: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tracepipe.cli.convert.convert_recording", fails)
        streams = sys.stdout, sys.stderr
        patch.setattr(sys, "argv", ["tracepipe", "convert", RUN])
        patch.setattr(sys, "stdout", streams[0])
        patch.setattr(sys, "stderr", streams[1])
        with pytest.raises(RuntimeError, match="a bug"):
            cli.main()


@pytest.mark.slow
def test_a_command_that_writes_a_file_needs_no_standard_output(bad: None) -> None:
    done = shell(f"tracepipe convert {F} -o x.pftrace >&-", True)
    assert (done.returncode, Path("x.pftrace").stat().st_size > 100) == (0, True)
    assert done.stderr.splitlines()[-1].startswith("wrote x.pftrace")


@pytest.mark.slow
def test_standard_error_that_cannot_be_written_loses_messages_alone(bad: None) -> None:
    for to in ("2>&-", "2>/dev/full"):
        done = shell(f"tracepipe validate bad.jsonl {to}", True)
        assert (done.returncode, len(done.stdout.splitlines())) == (1, 3_000)
        assert all(line.startswith("bad.jsonl:") for line in done.stdout.splitlines())
    assert shell(f"tracepipe convert {F} -o y.pftrace 2>&-", True).returncode == 0
    assert shell("tracepipe convert none.jsonl 2>/dev/full", True).returncode == 1
