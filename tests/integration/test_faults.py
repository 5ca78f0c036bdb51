"""What goes wrong while a capture runs: the program continues, what was recorded is kept and reported."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import PYTHONPATH
from tests.support.standin import needs
from tests.support.waiting import wait_until
from tracepipe.recording.files import open_input
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.summary import INCOMPLETE

TRACEPIPE = [sys.executable, "-m", "tracepipe"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": PYTHONPATH}
PATIENCE_S = 60.0

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]


def records(path: Path, *, writer_was_killed: bool = False) -> list[dict[str, Any]]:
    """The records of a recording, each of whose lines is whole.

    The kernel ends the write of a process that is killed after any page: what follows the last newline is
    left out then.
    """
    with open_input(str(path)) as stream:
        content = b"".join(iter(lambda: stream.read(1 << 20), b""))
    if writer_was_killed:
        content = content[: content.rfind(b"\n") + 1]
    return [json.loads(line) for line in content.splitlines()]


class Capture:
    """`tracepipe capture -o run.jsonl` in a folder, of a program that makes calls for about a second."""

    def __init__(self, vec_add: str, folder: Path, output: str = "run.jsonl") -> None:
        self.folder, self.output = folder, folder / output
        self.options = ["--method", "prebuilt", "--layers", "userspace", "--calls", "all", "--gpu", "off"]
        self.command = [
            vec_add,
            "-n",
            "100",
            "--call",
            "cuCtxGetCurrent",
            "--spin",
            "10000",
            "--rate",
            "10000",
        ]
        self.shell = ""
        self.environment = ENVIRONMENT

    def argv(self) -> list[str]:
        command = [*TRACEPIPE, "capture", *self.options, "-o", str(self.output), "--", *self.command]
        return ["sh", "-c", f'{self.shell} exec "$@"', "sh", *command] if self.shell else command

    def start(self, **options: Any) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(self.argv(), text=True, cwd=self.folder, env=self.environment, **streams)

    def run(self, meanwhile: Callable[[], object] = lambda: None) -> subprocess.CompletedProcess[str]:
        """All of it; `meanwhile` is done when some lines are written."""
        with self.start() as process:
            wait_until(lambda: size_of(Path(f"{self.output}.part")) > 5000 or process.poll() is not None)
            meanwhile()
            output, errors = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in errors
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def calls_made(output: str) -> int:
    """What the program says that it did, which it says at its end."""
    return int(output.split("calls: ")[1])


def assert_whole(path: Path, output: str) -> None:
    found = records(path)
    assert found[-1]["type"] == "footer"
    assert found[-1]["counts"]["userspace"] == 2 * calls_made(output)
    assert sum(record["type"] == "userspace" for record in found) == 2 * calls_made(output)


def assert_counted(path: Path, output: str, *, may_have_ended: bool = False) -> None:
    """A recording that ended early states it, with the number of events that it has and that it lost."""
    found = records(path)
    footer, losses = found[-1], [record for record in found if record["type"] == "loss"]
    counted = sum(record["type"] == "userspace" for record in found)
    assert (footer["type"], found[-2]["type"]) == ("footer", "loss")
    assert 0 < counted == footer["counts"]["userspace"] < 2 * calls_made(output)
    assert footer["losses"] == {loss["layer"]: loss["count"] for loss in losses}
    assert 0 < footer["losses"]["userspace"] <= 2 * calls_made(output) - counted
    # What finds the disk full may be behind the end of the program.
    assert footer["ended_by"].startswith("an error: ") or (may_have_ended and footer["ended_by"] == "exit 0")
    assert all(loss["reason"].startswith("not written: ") for loss in losses)


@pytest.fixture
def capture(vec_add: str, tmp_path: Path) -> Capture:
    return Capture(vec_add, tmp_path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system with little room."""
    place = tmp_path / "small"
    place.mkdir()

    def mount(size: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        return place

    yield mount
    subprocess.run(["umount", str(place)], capture_output=True)


# The name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["", ".zst"])
def test_a_recording_outlives_its_name(suffix: str, vec_add: str, tmp_path: Path) -> None:
    capture = Capture(vec_add, tmp_path, f"run.jsonl{suffix}")
    if suffix:  # a part is written each second
        capture.command[-1] = "4000"
    done = capture.run(Path(f"{capture.output}.part").unlink)
    saved = tmp_path / f"run-2.jsonl{suffix}"
    assert done.returncode == INCOMPLETE
    assert f"its content is in {saved}" in done.stderr
    assert_whole(saved, done.stdout)


def test_a_recording_outlives_its_folder(vec_add: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    capture = Capture(vec_add, tmp_path, "runs/run.jsonl")
    done = capture.run(lambda: shutil.rmtree(folder))
    assert done.returncode == INCOMPLETE
    assert "run-2.jsonl" in done.stderr
    assert_whole(tmp_path / "run-2.jsonl", done.stdout)


def test_a_second_capture_does_not_take_the_name_of_the_first(capture: Capture) -> None:
    capture.options += ["--force", "--library", str(Path(capture.command[0]).with_name("libcuda.so.1"))]
    refused = capture.folder / "refused"
    waiting = f'"$@"; until [ -e {refused} ]; do sleep 0.01; done'
    capture.command = ["sh", "-c", waiting, "sh", *capture.command]
    second: list[subprocess.CompletedProcess[str]] = []

    def try_it_too() -> None:
        second.append(Capture.run(capture))
        refused.touch()

    first = capture.run(try_it_too)
    assert (first.returncode, second[0].returncode) == (0, 1)
    assert "is being recorded by another capture" in second[0].stderr
    assert "calls:" not in second[0].stdout
    assert_whole(capture.output, first.stdout)


def test_a_file_that_appears_meanwhile_is_not_overwritten(capture: Capture) -> None:
    done = capture.run(lambda: capture.output.write_text("precious"))
    assert done.returncode == INCOMPLETE
    assert capture.output.read_text() == "precious"
    assert_whole(capture.folder / "run-2.jsonl", done.stdout)


def test_what_a_killed_capture_leaves(capture: Capture) -> None:
    part = Path(f"{capture.output}.part")
    with capture.start(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: size_of(part) > 5000)
        process.kill()
    left = part.read_bytes()
    again = subprocess.run(capture.argv(), capture_output=True, text=True, env=ENVIRONMENT)
    assert again.returncode == 1
    assert "a killed capture left it" in again.stderr
    assert part.read_bytes() == left
    capture.options.append("--force")
    done = capture.run()
    assert done.returncode == 0
    assert (capture.folder / "run-2.jsonl").read_bytes() == left
    assert_whole(capture.output, done.stdout)


@pytest.mark.parametrize("killed", ["the capture", "the program"])
@pytest.mark.parametrize("windows", [1.5, 2])
def test_what_is_killed_leaves_whole_windows_and_no_probe(
    capture: Capture, killed: str, windows: float
) -> None:
    """In the second window, and after it."""
    capture_was_killed = killed == "the capture"
    part = Path(f"{capture.output}.part")
    capture.options += ["--start-on", "signal", "--repeat", "9"]
    capture.command[-3] = "1000000"
    with capture.start(stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        assert f"kill -USR2 {process.pid} " in process.stderr.readline()
        wait_until(part.exists)
        for turn in range(1, int(2 * windows) + 1):
            process.send_signal(signal.SIGUSR2)
            wait_until(lambda turn=turn: turns_in(part) == turn)  # type: ignore[misc]
        (program,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        if windows == 1.5:
            assert first_byte_of("cuCtxGetCurrent", capture.command[0], program) == b"\xcc"
        os.kill(process.pid if capture_was_killed else program, signal.SIGKILL)
        if capture_was_killed:
            wait_until(lambda: first_byte_of("cuCtxGetCurrent", capture.command[0], program) != b"\xcc")
            os.kill(program, signal.SIGKILL)
    found = records(part if capture_was_killed else capture.output, writer_was_killed=capture_was_killed)
    phases = [record["phase"] for record in found if record["type"] == "window"]
    assert phases[: int(2 * windows)] == ["B", "E", "B", "E"][: int(2 * windows)]
    if killed == "the program":
        assert (found[-1]["ended_by"], phases) == ("signal 9 (SIGKILL)", ["B", "E", "B", "E"])
    within = 0
    for record in found:
        within += {"B": 1, "E": -1}[record["phase"]] if record["type"] == "window" else 0
        assert within or record["type"] in ("header", "window", "footer")
    converted = [*TRACEPIPE, "convert", str(part if part.exists() else capture.output), "--format", "text"]
    shown = subprocess.run(
        [*converted, "-o", "-"], capture_output=True, text=True, env=ENVIRONMENT, check=True
    ).stdout
    assert "window 2" in shown


def turns_in(part: Path) -> int:
    """How many windows began or ended in a recording so far."""
    return part.read_bytes().count(b'"type":"window"')


def first_byte_of(function: str, program: str, pid: int) -> bytes:
    """Of a function of the stand-in for libcuda in a process: a breakpoint where it is probed."""
    library = str(Path(program).with_name("libcuda.so.1"))
    with Elf(library) as elf:
        offset = next(elf.file_offset(at) for name, at in elf.functions() if name == function)
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, rights, at, *_, path = line.split()
        start, end = (int(word, 16) for word in span.split("-"))
        if (
            "x" in rights
            and Path(path).name == Path(library).resolve().name
            and 0 <= offset - int(at, 16) < end - start
        ):
            with Path(f"/proc/{pid}/mem").open("rb") as memory:
                memory.seek(start + offset - int(at, 16))
                return memory.read(1)
    raise AssertionError(f"{library} is not mapped")


# The disk -----------------------------------------------------------------------------------------------


FULL = [("", "1M"), (".gz", "256k"), (".zst", "192k")]


@pytest.mark.parametrize(("suffix", "size"), FULL)
def test_a_full_disk_does_not_end_the_program(
    suffix: str, size: str, vec_add: str, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    capture = Capture(vec_add, tmp_path, f"small/run.jsonl{suffix}")
    capture.command[-3:] = ["200000", "--rate", "40000"]
    small_disk(size)
    done = capture.run()
    assert "vec_add continues" in done.stderr
    assert_full(capture, done)


@pytest.mark.parametrize(("suffix", "size"), FULL)
def test_a_disk_that_is_full_when_the_program_has_ended_is_reported_too(
    suffix: str, size: str, vec_add: str, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    capture = Capture(vec_add, tmp_path, f"small/run.jsonl{suffix}")
    capture.command[-3:] = ["60000", "--rate", "1000000"]  # its lines are made behind
    small_disk(size)
    assert_full(capture, capture.run(), may_have_ended=True)


def assert_full(
    capture: Capture, done: subprocess.CompletedProcess[str], *, may_have_ended: bool = False
) -> None:
    """What a capture says and keeps whose disk is full."""
    assert done.returncode == INCOMPLETE
    assert "the recording is not complete" in done.stderr
    assert re.search("event happened and was not recorded|events happened and were not recorded", done.stderr)
    assert "The events cannot be written: No space left on device." in done.stderr
    assert_counted(capture.output, done.stdout, may_have_ended=may_have_ended)


def test_a_small_folder_of_temporary_files_is_enough_while_lines_are_made(
    capture: Capture, small_disk: Callable[[str], Path]
) -> None:
    capture.environment = {**ENVIRONMENT, "TMPDIR": str(small_disk("64k"))}
    done = capture.run()
    assert done.returncode == 0
    assert_whole(capture.output, done.stdout)


def test_a_full_folder_of_temporary_files_does_not_end_the_program(
    capture: Capture, small_disk: Callable[[str], Path]
) -> None:
    place, filled = small_disk("256k"), capture.folder / "filled"
    capture.environment = {**ENVIRONMENT, "TMPDIR": str(place)}
    capture.options += ["--library", str(Path(capture.command[0]).with_name("libcuda.so.1"))]
    waiting = f'until [ -e {filled} ]; do sleep 0.01; done; exec "$@"'
    capture.command = ["sh", "-c", waiting, "sh", *capture.command]
    with capture.start() as process:
        wait_until(lambda: size_of(Path(f"{capture.output}.part")) > 0)
        with suppress(OSError):
            (place / "all").write_bytes(bytes(1 << 20))
        filled.touch()
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == INCOMPLETE
    assert f"The events cannot be kept in {place}: No space left on device." in errors
    assert "TMPDIR" in errors
    *events, loss, footer = records(capture.output)
    assert loss["reason"] == "not written: No space left on device"
    # The last block of the temporary file had room for some events, where they came a few at a time.
    kept = sum(event["type"] == "userspace" for event in events)
    assert footer["losses"]["userspace"] + kept == 2 * calls_made(output)


@pytest.fixture(scope="module")
def failing_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that, preloaded, lets reads of temporary files fail."""
    library = tmp_path_factory.mktemp("disk") / "failing_disk.so"
    source = Path(__file__).parents[1] / "support/failing_disk.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def test_a_temporary_file_that_cannot_be_read_back_does_not_end_the_program(
    capture: Capture, failing_disk: Path
) -> None:
    capture.environment = {**ENVIRONMENT, "LD_PRELOAD": str(failing_disk), "FAIL_FROM": "3"}
    done = capture.run()
    assert done.returncode == INCOMPLETE
    assert "cannot be read back from a temporary file: Input/output error." in done.stderr.splitlines()[-2]
    assert "TMPDIR" in done.stderr.splitlines()[-1]
    found = records(capture.output)
    footer, losses = found[-1], [record for record in found if record["type"] == "loss"]
    assert footer["ended_by"] == "an error: Input/output error"
    assert losses[0]["reason"] == "at most: not read back from a temporary file: Input/output error"
    assert sum(footer["losses"].values()) == sum(loss["count"] for loss in losses)
    counted = sum(record["type"] == "userspace" for record in found)
    assert 0 < counted == footer["counts"]["userspace"] < 2 * calls_made(done.stdout)


def test_where_no_more_memory_can_be_had_the_recording_has_its_footer(capture: Capture) -> None:
    capture.command[-3:] = ["200000"]  # as fast as it goes
    with capture.start() as process:
        wait_until(lambda: size_of(Path(f"{capture.output}.part")) > 5000)
        resource.prlimit(process.pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
        output, errors = process.communicate(timeout=PATIENCE_S)
    footer = records(capture.output)[-1]
    assert "Traceback" not in errors
    assert (process.returncode, footer["ended_by"]) in [(0, "exit 0"), (INCOMPLETE, "an error: no memory")]
    if process.returncode == 0:
        assert footer["counts"]["userspace"] + sum(footer["losses"].values()) == 2 * calls_made(output)
    else:
        assert footer["losses"]


def test_a_limit_of_a_files_size_does_not_end_the_program(capture: Capture) -> None:
    capture.shell = "ulimit -f 1000;"
    done = capture.run()
    assert done.returncode == INCOMPLETE
    assert "File too large" in done.stderr
    assert_counted(capture.output, done.stdout)


def test_a_reader_that_leaves_does_not_end_the_program(vec_add: str, tmp_path: Path) -> None:
    capture = Capture(vec_add, tmp_path)
    capture.output = Path("-")
    done = tmp_path / "done"
    capture.options += ["--command-output", str(done)]
    with capture.start() as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["type"] == "header"
        process.stdout.close()
        errors = process.stderr.read()
        code = process.wait(PATIENCE_S)
    assert code == INCOMPLETE
    assert "The events cannot be written: Broken pipe." in errors
    assert "Traceback" not in errors
    assert calls_made(done.read_text()) > 10_000


def test_a_process_that_ran_before_is_not_touched(
    vec_add: str, tmp_path: Path, small_disk: Callable[[str], Path]
) -> None:
    small_disk("512k")
    spin = [vec_add, "-n", "100", "--call", "cuCtxGetCurrent", "--spin", "10000000", "--rate", "20000"]
    with subprocess.Popen(spin, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as theirs:
        try:
            capture = [*TRACEPIPE, "capture", *Capture(vec_add, tmp_path).options, "--pid", str(theirs.pid)]
            done = subprocess.run(
                [*capture, "-o", str(tmp_path / "small/run.jsonl")],
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
            )
            assert done.returncode == 1
            assert "the recording is not complete" in done.stderr
            assert "No space left on device" in done.stderr
            assert theirs.poll() is None
            assert state_of(theirs.pid) in "RS"  # running or asleep, not stopped
        finally:
            theirs.kill()


# The library ---------------------------------------------------------------------------------------------


def test_a_library_that_is_replaced_meanwhile_is_reported(capture: Capture, vec_add: str) -> None:
    folder = capture.folder / "copy"
    shutil.copytree(Path(vec_add).parent, folder)
    library, program = folder / "libcuda.so.1", folder / "vec_add"
    # The second loads what an upgrade has put there, on which there are no probes.
    capture.command = ["sh", "-c", '"$@"; "$@"', "sh", str(program)]
    capture.command += ["-n", "100", "--call", "cuCtxGetCurrent", "--spin", "10000", "--rate", "10000"]
    capture.options += ["--library", str(library)]
    capture.environment = {**ENVIRONMENT, "LD_LIBRARY_PATH": str(folder)}

    def upgrade() -> None:
        new = folder / "new"
        shutil.copy(library, new)
        new.replace(library)

    done = capture.run(upgrade)
    assert done.returncode == 0
    assert f"{library} was replaced during the recording" in done.stderr
    first, second = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("calls:"))
    counted = records(capture.output)[-1]["counts"]["userspace"]
    assert 2 * first == counted < 2 * (first + second)


# What this process may have -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limit", ["ulimit -n 12", "ulimit -n 24", "ulimit -n 28", "ulimit -v 50000", "ulimit -v 70000"]
)
def test_too_little_of_something_is_an_error_before_the_program_starts(limit: str, capture: Capture) -> None:
    capture.shell = f"{limit};"
    done = capture.run()
    if done.returncode == 0:  # it was enough
        assert_whole(capture.output, done.stdout)
        return
    assert done.returncode == 3
    assert done.stdout == ""
    assert "was not started" in done.stderr
    assert "ulimit" in done.stderr.splitlines()[-1]
    assert list(capture.folder.iterdir()) == []


@pytest.mark.parametrize(
    ("uid", "gid"), [("abc", "0"), ("65534", "abc"), ("99999999999", "0"), ("4000000", "0")]
)
def test_a_caller_of_sudo_that_there_is_not(uid: str, gid: str, capture: Capture) -> None:
    capture.environment = {**ENVIRONMENT, "SUDO_UID": uid, "SUDO_GID": gid}
    done = capture.run()
    assert done.returncode == 1
    assert done.stdout == ""
    assert "env -u SUDO_UID -u SUDO_GID" in done.stderr
    assert list(capture.folder.iterdir()) == []


@needs("bpftrace")
def test_a_killed_capture_by_bpftrace_leaves_nothing_of_its_own(capture: Capture, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    capture.environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    capture.options[1] = "bpftrace"
    capture.options += ["--only", "cuCtxGetCurrent"]
    with capture.start(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: size_of(Path(f"{capture.output}.part")) > 0)
        process.kill()
    assert list(temporary.iterdir()) == []


# Signals ------------------------------------------------------------------------------------------------


def test_messages_that_nobody_reads_do_not_end_the_program(capture: Capture, vec_add: str) -> None:
    # The program itself writes there too, and would end by that.
    capture.command = ["sh", "-c", '"$@" 2>/dev/null', "sh", *capture.command]
    capture.options += [
        "--library",
        str(Path(vec_add).with_name("libcuda.so.1")),
        "--only",
        "cuCtxGetCurrent",
    ]
    capture.options += [
        "--layers",
        "userspace,kernel",
    ]  # one of which cannot be had: there is a message early
    reading, writing = os.pipe()
    with capture.start(stderr=writing) as process:
        os.close(writing)
        os.close(reading)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert calls_made(output) > 10_000
    assert records(capture.output)[-1]["counts"]["userspace"] == 20_000


def test_a_capture_that_is_stopped_continues_on_request(capture: Capture) -> None:
    with capture.start() as process:
        wait_until(lambda: size_of(Path(f"{capture.output}.part")) > 5000)
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state_of(process.pid) == "T")
        time.sleep(0.05)  # longer than it waits at once
        process.send_signal(signal.SIGCONT)
        output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "interrupt" not in errors
    assert records(capture.output)[-1]["ended_by"] == "exit 0"
    assert_whole(capture.output, output)


def test_an_interrupt_at_any_moment_leaves_a_recording_or_none(capture: Capture) -> None:
    capture.command = ["sleep", "100"]
    for delay_s in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8):
        with capture.start() as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(delay_s)  # there is no event for every moment
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
        assert "Traceback" not in errors
        left = list(capture.folder.iterdir())
        if left:
            assert (left, process.returncode) == ([capture.output], 128 + signal.SIGTERM)
            assert records(capture.output)[-1]["ended_by"] == "interrupt"
            capture.output.unlink()
