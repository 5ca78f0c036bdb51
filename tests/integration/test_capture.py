"""Captures of real processes: the stand-in for CUDA, run by hand in a terminal would look the same."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tracepipe.capture import ENGINES, CaptureRequest, CaptureSummary, capture
from tracepipe.errors import CaptureUnavailable, TracepipeError

ROOT = Path(__file__).parents[2]
Event = dict[str, Any]


def why_not() -> str:
    try:
        ENGINES["bcc"]().check()
    except CaptureUnavailable as unavailable:
        return unavailable.message
    return ""


WHY_NOT = why_not()
pytestmark = [pytest.mark.ebpf, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


@pytest.fixture(scope="session")
def vec_add(tmp_path_factory: pytest.TempPathFactory) -> str:
    build = tmp_path_factory.mktemp("standin")
    make = ["make", "-s", "-C", str(ROOT / "fixtures/standin"), f"BUILD={build}"]
    subprocess.run(make, check=True, capture_output=True, text=True)
    return str(build / "vec_add")


class Trace:
    """A captured file: the records of it, by layer."""

    def __init__(self, text: str) -> None:
        self.records: list[Event] = [json.loads(line) for line in text.splitlines()]
        self.header, self.footer = self.records[0], self.records[-1]
        self.events = [record for record in self.records if "phase" in record]

    def layer(self, name: str) -> list[Event]:
        return [event for event in self.events if event["type"] == name]

    def slices(self, layer: str) -> Iterator[tuple[Event, Event]]:
        """Each begin with its end, matched by nesting on its thread; a begin or end left over is an error."""
        open_slices: dict[int, list[Event]] = defaultdict(list)
        for event in self.layer(layer):
            if event["phase"] == "B":
                open_slices[event["tid"]].append(event)
            elif event["phase"] == "E":
                begin = open_slices[event["tid"]].pop()
                assert begin["name"] == event["name"]
                assert begin["ts_ns"] <= event["ts_ns"]
                yield begin, event
        assert not any(open_slices.values())


def run(tmp_path: Path, command: list[str], **options: Any) -> tuple[Trace, CaptureSummary, list[str]]:
    messages: list[str] = []
    path = tmp_path / "run.jsonl"
    with path.open("wb") as sink:
        summary = capture(CaptureRequest(command, **options), sink, notify=messages.append)
    return Trace(path.read_text()), summary, messages


def calls_printed(output: str) -> int:
    return sum(int(line.split()[1]) for line in output.splitlines() if line.startswith("calls: "))


def test_every_call_is_there_with_its_result(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "-n", "1000", "-i", "3"])
    slices = list(trace.slices("userspace"))
    assert len(slices) == calls_printed(capfd.readouterr().out) == 27
    assert Counter(begin["name"] for begin, _ in slices)["cuLaunchKernel"] == 3
    assert {end["args"]["result_name"] for _, end in slices} == {"CUDA_SUCCESS"}
    launch = next(begin for begin, _ in slices if begin["name"] == "cuLaunchKernel")
    assert (launch["args"]["grid"], launch["args"]["block"]) == ([4, 1, 1], [256, 1, 1])
    copy = next(begin for begin, _ in slices if begin["name"] == "cuMemcpyHtoD_v2")
    assert copy["args"]["size_bytes"] == 4000
    assert summary.ended_by == trace.footer["ended_by"] == "exit 0"
    print(f"detached in {summary.detach_ns / 1e6:.1f} ms")


def test_the_file_is_complete_and_in_order(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--threads", "3", "-i", "20"])
    assert trace.header["layers"]["got"] == ["userspace", "syscall", "scheduler"]
    counted = Counter(event["type"] for event in trace.events)
    assert trace.footer["counts"] == dict(counted) == summary.counts
    assert trace.footer["losses"] == {}
    last: dict[tuple[str, int], int] = {}
    for event in trace.events:
        key = event["type"], event["tid"]
        assert event["ts_ns"] >= last.get(key, 0)
        last[key] = event["ts_ns"]
    times = [event["ts_ns"] for event in trace.events]
    assert trace.header["start"]["monotonic_ns"] < min(times)
    assert max(times) < trace.footer["end"]["monotonic_ns"]


def test_each_driver_call_is_inside_the_call_that_made_it(tmp_path: Path, vec_add: str) -> None:
    trace, _, _ = run(tmp_path, [vec_add, "--threads", "2", "-i", "5"])
    calls = list(trace.slices("userspace"))
    commands = [(begin, end) for begin, end in trace.slices("syscall") if begin["name"] == "ioctl"]
    for begin, end in commands:
        around = [
            enter["name"]
            for enter, leave in calls
            if enter["tid"] == begin["tid"]
            and enter["ts_ns"] <= begin["ts_ns"]
            and end["ts_ns"] <= leave["ts_ns"]
        ]
        assert len(around) == 1, begin
    assert Counter(begin["args"]["request"] for begin, _ in commands)["NV_ESC_CHECK_VERSION_STR"] == 1
    assert {end["args"]["error"] for _, end in commands} == {"ENOTTY"}
    # cuMemAlloc makes two, on each of two threads three times.
    assert Counter(begin["args"]["request"] for begin, _ in commands)["NV_ESC_RM_MAP_MEMORY"] == 6


def test_threads_run_sleep_and_are_woken(tmp_path: Path, vec_add: str) -> None:
    trace, _, _ = run(tmp_path, [vec_add, "-i", "200", "-n", "100000"])
    intervals = [(begin, end) for begin, end in trace.slices("scheduler")]
    assert all(begin["name"] == "running" for begin, _ in intervals)
    assert all(begin["cpu"] == end["cpu"] for begin, end in intervals)
    names = {event["tid"]: event["comm"] for event in trace.events if "comm" in event}
    worker = next(event["tid"] for event in trace.events if event.get("comm") == "standin-gpu")
    assert "vec_add" in names.values()
    # The worker executes what the main thread launches; the main thread sleeps in cuCtxSynchronize meanwhile.
    assert any(begin["tid"] == worker for begin, _ in intervals)
    assert any(end["args"]["prev_state"] == "sleeping" for _, end in intervals)
    wakeups = [event for event in trace.layer("scheduler") if event["phase"] == "I"]
    assert any(event["args"]["by_tid"] == worker for event in wakeups)
    last_of_worker = [end for begin, end in intervals if begin["tid"] == worker][-1]
    assert last_of_worker["args"]["prev_state"] == "dead"


def test_children_are_followed(tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]) -> None:
    trace, _, _ = run(
        tmp_path, ["/bin/sh", "-c", f"{vec_add} --fork -i 2; true"], library=library_of(vec_add)
    )
    begins = [event for event in trace.layer("userspace") if event["phase"] == "B"]
    assert len(begins) == calls_printed(capfd.readouterr().out)
    assert len({event["pid"] for event in begins}) == 2
    shell = trace.events[0]
    assert shell["comm"] == "sh"
    assert shell["pid"] not in {event["pid"] for event in begins}
    # The shell's child keeps its name until it execs.
    names = [event["comm"] for event in trace.events if event["tid"] == begins[-1]["tid"] and "comm" in event]
    assert names == ["sh", "vec_add"]


def library_of(vec_add: str) -> str:
    return str(Path(vec_add).with_name("libcuda.so.1"))


def test_only_the_layers_asked_for(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--fork"], layers=("userspace",))
    assert set(summary.counts) == {"userspace"}
    assert trace.header["layers"] == {"asked": ["userspace"], "got": ["userspace"], "missing": {}}


def test_a_program_without_cuda_keeps_its_other_layers(tmp_path: Path) -> None:
    trace, summary, messages = run(tmp_path, ["true"])
    missing = trace.header["layers"]["missing"]["userspace"]
    assert missing in messages[0]
    assert summary.counts["syscall"] > 0
    assert "userspace" not in summary.counts


def test_a_machine_without_the_driver_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vec_add: str
) -> None:
    monkeypatch.setattr("tracepipe.capture.driver._SYSTEM_MODULES", tmp_path)
    trace, summary, messages = run(tmp_path, [vec_add], layers=("userspace", "kernel"))
    reason = trace.header["layers"]["missing"]["kernel"]
    assert messages == [f"no kernel layer: {reason}"]
    assert trace.header["layers"]["got"] == ["userspace"]
    assert set(summary.counts) == {"userspace"}


def test_a_crash_is_told(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--crash"])
    assert trace.footer["ended_by"] == "signal 11 (SIGSEGV)"
    assert summary.exit_code == 139
    assert trace.layer("userspace")[-1]["name"] == "cuLaunchKernel"


def test_an_exit_code_is_told(tmp_path: Path) -> None:
    _, summary, _ = run(tmp_path, ["sh", "-c", "exit 7"])
    assert (summary.ended_by, summary.exit_code) == ("exit 7", 7)


def test_a_full_ring_counts_what_it_lost(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--spin", "100000"], ring_bytes=4096)
    losses = [
        record for record in trace.records if record["type"] == "loss" and record.get("layer") == "userspace"
    ]
    made = 2 * calls_printed(capfd.readouterr().out)
    assert sum(loss["count"] for loss in losses) == summary.losses["userspace"] > 0
    assert summary.counts["userspace"] + summary.losses["userspace"] == made
    assert all(loss["dur_ns"] > 0 for loss in losses)


def test_single_probes_where_the_kernel_has_no_multi_link(
    tmp_path: Path, vec_add: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tracepipe.capture import bpf

    def too_old(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(bpf, "link_uprobes", too_old)
    trace, summary, _ = run(tmp_path, [vec_add], layers=("userspace",))
    assert len(list(trace.slices("userspace"))) == calls_printed(capfd.readouterr().out)
    print(f"detached in {summary.detach_ns / 1e6:.1f} ms")


CAPTURE = """
import sys
from tracepipe.capture import CaptureRequest, capture
with open(sys.argv[1], "wb") as sink:
    print(capture(CaptureRequest(sys.argv[2:]), sink, notify=print).ended_by, flush=True)
"""


def start_capture(tmp_path: Path, command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CAPTURE, str(tmp_path / "run.jsonl"), *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_keeps_what_was_recorded(tmp_path: Path, number: signal.Signals) -> None:
    process = start_capture(tmp_path, ["sh", "-c", "echo started; exec sleep 60"])
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)][-1] == "started\n"
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "interrupt\n")
    trace = Trace((tmp_path / "run.jsonl").read_text())
    assert trace.footer["ended_by"] == "interrupt"
    assert trace.footer["counts"] == dict(Counter(event["type"] for event in trace.events))


def test_a_target_that_ignores_the_interrupt_is_killed(tmp_path: Path) -> None:
    process = start_capture(tmp_path, ["sh", "-c", "trap '' INT; echo started; while :; do sleep 60; done"])
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(2)][-1] == "started\n"
    process.send_signal(signal.SIGINT)
    # The shell's sleep outlives it and holds the pipe: do not wait for the end of the output.
    assert process.stdout.readline() == "interrupt\n"
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("command", ["./no-such-program", "no-such-program", "/etc/passwd", "/tmp"])
def test_a_target_that_cannot_be_run_is_an_error(tmp_path: Path, command: str) -> None:
    with pytest.raises(TracepipeError) as caught:
        run(tmp_path, [command])
    assert command in caught.value.message
    assert caught.value.hint
    assert (tmp_path / "run.jsonl").read_bytes() == b""


def test_an_exec_that_fails_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "not-a-program"
    program.write_bytes(b"\x7fELF, it says")
    program.chmod(0o755)
    with pytest.raises(TracepipeError, match="Exec format error"):
        run(tmp_path, [str(program)])


def test_under_sudo_the_target_is_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUDO_UID", "65534")
    monkeypatch.setenv("SUDO_GID", "65534")
    run(tmp_path, ["id"])
    assert capfd.readouterr().out.startswith("uid=65534(nobody) gid=65534(nogroup)")
