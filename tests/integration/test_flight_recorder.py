"""Flight recorders of real processes: written when asked for, and at the end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.standin import needs
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ebpf, needs("prebuilt")]

_PATIENCE_S = 60.0


class Recorded:
    """A command, `cat` if none is given, which answers each line, recorded to run.jsonl in a folder."""

    def __init__(self, folder: Path, *options: str, command: Sequence[str] = ("cat",)) -> None:
        self.folder = folder
        capture = [
            "capture",
            "-o",
            str(folder / "run.jsonl"),
            "--method",
            "prebuilt",
            "--gpu",
            "off",
            *options,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tracepipe", *capture, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def answers(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        assert self.process.stdout.readline() == f"{line}\n"

    def ends(self) -> str:
        """Let it end; the messages."""
        _, errors = self.process.communicate(timeout=_PATIENCE_S)
        assert self.process.returncode == 0, errors
        return errors

    def lines(self, name: str) -> list[dict[str, Any]]:
        """A recording, as soon as it is there."""
        wait_until((self.folder / name).exists)
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list(tmp_path.glob("*.part"))


def test_it_is_written_on_a_signal_and_at_the_end(folder: Path) -> None:
    cat = Recorded(folder, "--last", "60s", "--layers", "syscall")
    cat.answers("one")
    cat.process.send_signal(signal.SIGUSR2)
    header, *first, footer = cat.lines("run.jsonl")
    cat.answers("two")
    messages = cat.ends()
    _, *second, last = cat.lines("run-2.jsonl")
    assert header["options"]["last_duration_ns"] == 60 * 10**9
    assert [footer["ended_by"], last["ended_by"]] == ["SIGUSR2", "exit 0"]
    assert second[: len(first)] == first  # it stays, and what came later is added
    assert [line["phase"] for line in second if line["name"] == "write"] == ["B", "E", "B", "E"]
    assert [line for line in messages.splitlines() if "run" in line and "jsonl" in line] == [
        line for line in messages.splitlines() if " of the last " in line
    ]
    assert messages.count("run.jsonl: ") == 2  # when it was written, and at the end


def test_what_has_no_room_is_counted(folder: Path) -> None:
    cat = Recorded(folder, "--last", "60s", "--last-size", "16K", "--layers", "syscall")
    for number in range(400):
        cat.answers(str(number))
    messages = cat.ends()
    header, begin, *_, footer = cat.lines("run.jsonl")
    assert footer["counts"]["syscall"] < 16384 // 64 + 2
    assert footer["evicted"]["syscall"] + footer["counts"]["syscall"] >= 1600
    assert footer["losses"] == {}
    assert begin["ts_ns"] >= header["start"]["monotonic_ns"]
    assert "did not fit: raise --last-size" in messages


@pytest.mark.parametrize(
    ("options", "condition"),
    [
        (("--layers", "none", "--hook", "uprobe:libc.so.6:clock_nanosleep"), "clock_nano* > 100ms"),
        (("--layers", "syscall"), "syscall:clock_nano* > 100ms"),
    ],
    ids=["call", "syscall"],
)
def test_it_is_written_when_a_call_takes_long(folder: Path, options: tuple[str, ...], condition: str) -> None:
    """The command waits for its input after it, which ends when the recording is there."""
    command = ["sh", "-c", "sleep 0.3; read end; true"]
    slow = Recorded(folder, "--last", "4s", *options, "--when", condition, command=command)
    _, *events, footer = slow.lines("run.jsonl")
    slow.ends()
    begin, end = (event for event in events if event["name"] == "clock_nanosleep")
    assert end["ts_ns"] - begin["ts_ns"] >= 300_000_000
    assert footer["ended_by"].startswith(f"{condition}: clock_nanosleep took ")
    assert slow.lines("run-2.jsonl")[-1]["ended_by"].startswith("exit")


def test_a_condition_about_what_is_not_recorded_is_refused_before_the_command_starts(folder: Path) -> None:
    condition = ("--hook", "uprobe:libc.so.6:nanosleep", "--when", "nanosleeep > 100ms")
    refused = Recorded(folder, "--last", "2s", "--layers", "none", *condition, command=["touch", "made"])
    _, errors = refused.process.communicate(timeout=_PATIENCE_S)
    assert refused.process.returncode == 1
    assert "no recorded function has such a name" in errors
    assert "Did you mean nanosleep?" in errors
    assert not (folder / "run.jsonl").exists()
