"""The library records: a command, this process, a running one; what exceptions and Ctrl-C leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tracepipe
from tests.support.program import PYTHONPATH
from tests.support.standin import needs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ebpf, needs("bcc")]

# The shipped bytecode is there at once; all that every kernel has.
QUICK = tracepipe.CaptureOptions(method="prebuilt", layers=("syscall", "scheduler"))


def footer_of(path: str) -> dict[str, Any]:
    """The last record of a recording, which a complete one has."""
    footer: dict[str, Any] = json.loads(Path(path).read_text().splitlines()[-1])
    assert footer["type"] == "footer"
    return footer


def test_a_command_is_recorded_while_the_block_runs(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [vec_add, "-n", "1000", "-i", "3"]
    with tracepipe.capture(
        command, tracepipe.CaptureOptions(method="prebuilt"), output=tmp_path / "run.jsonl"
    ) as run:
        assert not Path(run.path).exists()  # it gets its name at the end
        assert Path(f"{run.path}.part").exists()
    assert (run.summary.ended_by, run.summary.exit_code) == ("exit 0", 0)
    with tracepipe.open(run.path) as events:
        launches = [one for one in events if one.name == "cuLaunchKernel" and one.phase == "B"]
    assert [one.args["grid"] for one in launches] == [[4, 1, 1]] * 3
    counts = {layer: count for layer, count in events.counts.items() if count}
    assert counts == run.summary.counts
    assert "calls: 27" in capfd.readouterr().out  # its output is where ours is
    assert run.summary.engine.startswith("prebuilt")


def test_this_process_is_recorded(tmp_path: Path) -> None:
    results: list[int] = []
    with tracepipe.capture(output=tmp_path / "run.jsonl", options=QUICK) as run:
        began_ns = time.monotonic_ns()
        time.sleep(0.05)
        thread = threading.Thread(target=lambda: results.append(threading.get_native_id()))
        thread.start()
        thread.join()
        child = subprocess.run(["sh", "-c", "echo $$"], capture_output=True, text=True, check=True)
        ended_ns = time.monotonic_ns()
    assert run.summary.ended_by == footer_of(run.path)["ended_by"] == "stopped"
    events = list(tracepipe.open(run.path))
    assert {one.pid for one in events} == {os.getpid(), int(child.stdout)}
    assert {one.tid for one in events if one.pid == os.getpid()} >= {os.getpid(), results[0]}
    sleeps = [one.ts_ns for one in events if one.name == "clock_nanosleep" and one.pid == os.getpid()]
    assert len(sleeps) == 2
    assert began_ns < sleeps[0] < sleeps[0] + 50_000_000 <= sleeps[1] < ended_ns


@pytest.mark.parametrize("is_loaded_before", [True, False])
def test_calls_of_a_library_of_this_process_are_recorded(
    is_loaded_before: bool, tmp_path: Path, standin: Path
) -> None:
    load, capture = (
        "cuda = ctypes.CDLL('libcuda.so.1')\n",
        "with tracepipe.capture(options=options, output=sys.argv[1]) as run:\n",
    )
    program = "import ctypes, sys, tracepipe\n"
    program += "options = tracepipe.CaptureOptions(method='prebuilt', layers='userspace')\n"
    program += f"{load}{capture}" if is_loaded_before else f"{capture}    {load}"
    program += "    cuda.cuInit(0)\nprint(run.summary.counts)\n"
    command = [sys.executable, "-c", program, str(tmp_path / "run.jsonl")]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "LD_LIBRARY_PATH": str(standin)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "{'userspace': 2}\n"
    assert [one.name for one in tracepipe.open(tmp_path / "run.jsonl")] == ["cuInit", "cuInit"]


def test_a_running_process_is_recorded_until_the_block_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["sh", "-c", "while :; do sleep 0.01; done"]) as running:
        with tracepipe.capture(pids=running.pid, output=tmp_path / "run.jsonl", options=QUICK) as run:
            time.sleep(0.1)
        assert running.poll() is None
        running.kill()
    assert run.summary.ended_by == "stopped"
    assert run.summary.counts["syscall"] > 0


def test_an_exception_ends_a_command_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 0.01; exec sleep 60"]
    began_s = time.monotonic()
    with (
        pytest.raises(ZeroDivisionError),
        tracepipe.capture(command, QUICK, output=tmp_path / "run.jsonl") as run,
    ):
        time.sleep(0.2)
        _ = 1 / 0
    assert time.monotonic() - began_s < 30
    assert run.summary.ended_by == footer_of(run.path)["ended_by"] == "interrupt"
    assert run.summary.exit_code == 128 + signal.SIGINT
    assert run.summary.counts["syscall"] > 0


def test_a_command_that_ignores_the_end_is_killed(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' INT; while :; do sleep 0.05; done"]
    with tracepipe.capture(command, QUICK, output=tmp_path / "run.jsonl") as run:
        time.sleep(0.1)
        assert run.stop().exit_code == 128 + signal.SIGKILL
    assert run.summary.ended_by == "interrupt"


def test_a_limit_ends_the_recording_before_the_block(tmp_path: Path) -> None:
    with tracepipe.capture(output=tmp_path / "run.jsonl", options=replace(QUICK, max_events=20)) as run:
        for _ in range(100):
            time.sleep(0.001)
        assert run.wait().ended_by == "number of events"
    assert sum(run.summary.counts.values()) == 20


def test_a_flight_recorder_is_written_when_the_program_asks_for_it(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    with tracepipe.capture(output=output, options=replace(QUICK, last="60s")) as run:
        time.sleep(0.01)
        written = run.write_now()
        assert footer_of(written)["ended_by"] == "write_now"
        time.sleep(0.01)
    assert written == str(output)
    with pytest.raises(tracepipe.TracepipeError, match="is complete"):
        run.write_now()
    assert [footer_of(one.path)["ended_by"] for one in run.summary.recordings] == ["write_now", "stopped"]
    sleeps = [
        sum(one.name == "clock_nanosleep" and one.phase == "B" for one in tracepipe.open(one_of.path))
        for one_of in run.summary.recordings
    ]
    assert 0 < sleeps[0] < sleeps[1]
    plain = tracepipe.capture(output=tmp_path / "plain.jsonl", options=QUICK)
    with pytest.raises(tracepipe.TracepipeError, match="keeps no last events"):
        plain.write_now()


def windows_of(path: str) -> list[dict[str, Any]]:
    lines = map(json.loads, Path(path).read_text().splitlines())
    return [line for line in lines if line["type"] == "window"]


def test_a_program_records_windows_of_itself(tmp_path: Path) -> None:
    with tracepipe.capture(output=tmp_path / "run.jsonl", options=replace(QUICK, start_on="api")) as run:
        time.sleep(0.2)  # probes are detached then, unless the machine is busy
        for count in (1, 2):
            with run.window(f"step {count}"):
                for _ in range(count):
                    time.sleep(0.001)
            time.sleep(0.001)
        run.begin_window()
        with pytest.raises(tracepipe.TracepipeError, match="already open"):
            run.begin_window()
    turns = windows_of(run.path)
    assert [(turn.get("name"), turn["phase"], turn["cause"]) for turn in turns] == [
        *((name, phase, "api") for name in ("step 1", "step 2") for phase in "BE"),
        (None, "B", "api"),
        (None, "E", "end of the recording"),
    ]
    sleeps = [
        one.ts_ns for one in tracepipe.open(run.path) if one.name == "clock_nanosleep" and one.phase == "B"
    ]
    within = [
        sum(begin["ts_ns"] <= at <= end["ts_ns"] for at in sleeps)
        for begin, end in zip(turns[::2], turns[1::2], strict=True)
    ]
    assert within == [1, 2, 0]
    assert len(sleeps) == 3
    assert (run.summary.windows and run.summary.windows.count) == 3


def test_windows_of_a_command_that_continues_after_the_recording(tmp_path: Path) -> None:
    go = tmp_path / "go"
    command = ["sh", "-c", f"until [ -e {go} ]; do sleep 0.01; done"]
    with tracepipe.capture(
        command, replace(QUICK, start_on="api", repeat=1), output=tmp_path / "run.jsonl"
    ) as run:
        with run.window():
            pass
        with pytest.raises(tracepipe.TracepipeError, match="The recording has ended"):
            run.begin_window()
        go.touch()
    assert (run.summary.ended_by, run.summary.exit_code) == ("api", 0)
    assert [turn["phase"] for turn in windows_of(run.path)] == ["B", "E"]


@pytest.mark.parametrize(
    ("is_terminal", "block"), [(True, "time.sleep(60)"), (True, "pass"), (False, "pass")]
)
def test_an_interrupt_reaches_the_command_once(is_terminal: bool, block: str, tmp_path: Path) -> None:
    """By Ctrl-C, which all processes of the terminal get, and by a signal to the caller alone; in the block,
    and at its end, where the command is waited for.
    """
    target = "trap 'echo interrupted >> {noted}' INT; echo ready; while :; do sleep 0.01; done"
    program = (
        "import sys, time, tracepipe\n"
        "options = tracepipe.CaptureOptions(method='prebuilt', layers='syscall')\n"
        "with tracepipe.capture(['sh', '-c', sys.argv[1]], options, output=sys.argv[2]) as run:\n"
        f"    {block}\n"
    )
    noted, output = tmp_path / "noted", tmp_path / "run.jsonl"
    command = [sys.executable, "-c", program, target.format(noted=noted), str(output)]
    ours, theirs = os.openpty()
    with subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # makes it the terminal
    ) as process:
        os.close(theirs)
        seen = b""
        while b"ready" not in seen:
            seen += os.read(ours, 1024)
        time.sleep(0.2)  # until the caller is there
        if is_terminal:
            os.write(ours, b"\x03")
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(30) in (130, -signal.SIGINT)
    os.close(ours)
    assert noted.read_text() == "interrupted\n"  # it had its two seconds, and was killed then
    assert footer_of(str(output))["ended_by"] == "interrupt"


def test_a_caller_that_is_killed_leaves_a_complete_recording(tmp_path: Path) -> None:
    program = (
        "import os, signal, sys, time, tracepipe\n"
        "options = tracepipe.CaptureOptions(method='prebuilt', layers='syscall')\n"
        "with tracepipe.capture(options=options, output=sys.argv[1]):\n"
        "    time.sleep(0.1)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    output = tmp_path / "run.jsonl"
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    subprocess.run([sys.executable, "-c", program, str(output)], env=environment, check=False)
    wait_until(output.exists)
    assert footer_of(str(output))["counts"]["syscall"] > 0


def test_what_cannot_be_captured_is_raised_before_the_block(tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("")
    for error, name, command, options in (
        (tracepipe.OutputError, "there.jsonl", "", {}),
        (tracepipe.TracepipeError, "a", "./no-such-program", {}),
        (tracepipe.TracepipeError, "b", "", {"method": "magic"}),
        (tracepipe.TracepipeError, "c", "", {"system": True, "comm": "sh"}),
        (tracepipe.TracepipeError, "d", "", {"gpu": "warps"}),
    ):
        asked = tracepipe.CaptureOptions(layers="syscall", **options)  # type: ignore[arg-type]
        with pytest.raises(error) as refused, tracepipe.capture(command, asked, output=tmp_path / name):
            pytest.fail("the block ran")
        assert refused.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["there.jsonl"]


def test_without_root_the_hint_states_what_to_do(tmp_path: Path) -> None:
    program = (
        "import os, sys, tracepipe\n"
        "tracepipe.capture  # what root's folders have is loaded before\n"
        "from tracepipe.api import capture_block\n"
        "code = capture_block._CODE\n"
        "capture_block._CODE = 'import os; os.geteuid = lambda: 1000; ' + code\n"
        "try:\n"
        "    options = tracepipe.CaptureOptions(layers='syscall')\n"
        "    with tracepipe.capture(options=options, output=sys.argv[1]): print('ran')\n"
        "except tracepipe.CaptureUnavailable as refused: print(refused, refused.hint)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run.jsonl")]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == 'Capture with eBPF needs root. sudo -E env "PATH=$PATH" python …\n'
    assert list(tmp_path.iterdir()) == []
