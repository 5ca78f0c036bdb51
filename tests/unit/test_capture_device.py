"""A command's GPUs in a capture: what their library records, with the host's events or without them."""

from __future__ import annotations

import io
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.event.checks import first_fault
from tracepipe.tracer import CaptureRequest, capture
from tracepipe.tracer.engines.engine import Turn
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.request import Limits
from tracepipe.tracer.summary import summary_lines

KERNEL = {"type": "gpu_kernel", "name": "add", "phase": "X", "dur_ns": 5, "gpu": 0, "launch": 7}
CALL = {"type": "userspace", "name": "cuLaunchKernel", "phase": "X", "dur_ns": 9, "launch": 7}


class FakeDevice:
    """A device whose records stand ready."""

    name = "fake"
    layers = frozenset({"userspace", "gpu_kernel"})
    clocks = ("globaltimer:0",)
    sees: Mapping[str, Path] = MappingProxyType({})
    counters: tuple[Mapping[str, Any], ...] = ()
    sampling: tuple[Mapping[str, Any], ...] = ()
    stall_samples = 112
    cuda_errors = ("CUDA error in process 7: an illegal memory access.",)

    def __init__(self, chunks: list[bytes]) -> None:
        self.chunks, self.finals, self.is_closed = chunks, [], False
        self.gpus = [{"index": 0, "name": "a GPU", "sm_count": 132}]
        self.news, self.notes = list[str](), ["one thing to know"]
        self.losses = {"gpu_kernel": 2}
        self.stops, self.looks = 0, 0
        self.more: list[str] = []
        self.waiting: list[dict[str, Any]] = []
        self.entered: list[Sequence[int]] = []
        self.turns: list[Turn] = []
        self.sees: dict[str, Path] = {}
        self.channel = SimpleNamespace(processes=lambda: frozenset[int]())

    def enter(self, pids: Sequence[int]) -> None:
        self.entered.append(pids)

    def turned(self, turn: Turn) -> None:
        self.turns.append(turn)

    def environment(self) -> dict[str, str]:
        return {"FAKE": "yes"}

    def collect(self, *, is_final: bool = False) -> bytes:
        self.finals.append(is_final)
        return self.chunks.pop(0) if self.chunks else b""

    def lost(self) -> list[Loss]:
        return [Loss("gpu_kernel", 3, 5, 6, "full")] if self.finals == [False] else []

    def renderer(self) -> FakeDevice:
        return self

    def render(self, chunk: bytes) -> Lines:
        lines = Lines()
        for line in chunk.splitlines():
            lines.record(json.loads(line))
        return lines

    def rest(self) -> Iterator[Lines]:
        for text in self.more:
            lines = Lines()
            lines.threads([text])
            yield lines
        self.more = []

    def last(self) -> Lines:
        lines = Lines()
        for record in self.waiting:
            lines.record(record)
        return lines

    def counts(self, chunk: bytes) -> dict[str, int]:
        return dict(Counter(json.loads(line)["type"] for line in chunk.splitlines()))

    def stop(self) -> None:
        self.stops += 1

    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def close(self) -> None:
        self.is_closed = True


def lines(*records: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(record, separators=(",", ":")).encode() + b"\n" for record in records)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """No probes can be set here, and the device has two events in each of two chunks."""
    chunk = lines({"ts_ns": 1000, **KERNEL}, {"ts_ns": 900, **CALL})
    device = FakeDevice([chunk, chunk])

    def refuse(_: str) -> Any:
        raise CaptureUnavailable("Capture with eBPF needs root.", "sudo")

    monkeypatch.setattr("tracepipe.tracer.choose", refuse)
    monkeypatch.setattr("tracepipe.tracer.gpu.start", lambda request, notify: (request, device))
    return device


def captured(request: CaptureRequest) -> tuple[list[dict[str, Any]], Any, list[str]]:
    sink, messages = io.BytesIO(), list[str]()
    summary = capture(request, sink, notify=messages.append)
    records = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert [first_fault(record) for record in records] == [None] * len(records)
    return records, summary, messages


def test_the_engines_events_are_in_the_file_without_any_privilege(
    device: FakeDevice, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["sh", "-c", "echo $FAKE"]
    records, summary, messages = captured(
        CaptureRequest(command, ("userspace", "syscall"), gpu="warps", gpu_blocks="0-131", gpu_warps=9)
    )
    assert capfd.readouterr().out == "yes\n"
    header, *events, footer = records
    assert [event["name"] for event in events if "phase" in event] == ["add", "cuLaunchKernel"] * 2
    assert summary.counts == footer["counts"] == {"userspace": 2, "gpu_kernel": 2}
    assert summary.losses == footer["losses"] == {"gpu_kernel": 5}
    assert summary.stall_samples == 112, "which are no events"
    assert next(summary_lines("run.jsonl", summary)) == FakeDevice.cuda_errors[0], "it comes first"
    assert header["gpus"] == footer["gpus"] == [{"index": 0, "name": "a GPU", "sm_count": 132}]
    assert [turn.begins for turn in device.turns] == [True, False]
    assert header["engine"] == "none, fake"
    assert header["clocks"] == ["monotonic", "globaltimer:0"]
    assert header["layers"]["got"] == ["gpu_kernel", "userspace"]
    assert set(header["layers"]["missing"]) == {"syscall"}
    assert header["options"] == {
        "gpu": "warps",
        "gpu_blocks": "0-131",
        "gpu_warps": 9,
        "stacks": "python",
    }
    assert "fake: one thing to know" in messages
    assert any("needs root" in message for message in messages)
    assert device.finals[-1] is True
    assert device.is_closed


def test_lines_that_follow_a_chunk_are_written_and_counted(device: FakeDevice) -> None:
    exits = {"ts_ns": 1000, "type": "gpu_thread", "name": "k", "phase": "I", "thread": [0, 0, 0]}
    device.more = [lines(exits).decode(), lines(exits | {"thread": [1, 0, 0]}).decode()]
    records, summary, _ = captured(CaptureRequest(["true"], ("userspace",), gpu="warps"))
    assert [record["thread"][0] for record in records if record["type"] == "gpu_thread"] == [0, 1]
    assert summary.counts == {"userspace": 2, "gpu_kernel": 2, "gpu_thread": 2}


def test_lines_that_wait_are_written_at_the_end(device: FakeDevice) -> None:
    device.waiting = [
        {"ts_ns": 500, "type": "userspace", "name": "cuLaunchKernel", "phase": "X", "dur_ns": 5}
    ]
    records, summary, _ = captured(CaptureRequest(["true"], ("userspace",), gpu="kernels"))
    assert [record["type"] for record in records[-2:]] == ["userspace", "footer"]
    assert records[-2] == device.waiting[0]
    assert summary.counts["userspace"] == 3


def test_what_is_known_before_the_end_is_reported_then(device: FakeDevice) -> None:
    device.news, device.notes = ["one thing"], ["one thing", "another"]
    messages: list[tuple[str, int]] = []
    request = CaptureRequest(["true"], ("userspace",), gpu="kernels")
    capture(request, io.BytesIO(), notify=lambda message: messages.append((message, device.stops)))
    of_device = [(message, bool(stops)) for message, stops in messages if message.startswith("fake: ")]
    assert of_device == [("fake: one thing", False), ("fake: another", True)]


def test_a_program_that_continues_is_released_after_its_last_records(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come after it was asked, and before it says that it is over."""
    device.looks = 2
    last = device.chunks.pop()
    stop = device.stop

    def send_last() -> None:
        if not device.stops:
            device.chunks.append(last)
        stop()

    monkeypatch.setattr(device, "stop", send_last)
    request = CaptureRequest(["cat"], ("userspace",), gpu="kernels", limits=Limits(duration_ns=1))
    read, write = os.pipe()
    saved = os.dup(0)
    os.dup2(read, 0)
    try:
        noted = []

        def notify(message: str) -> None:
            noted.append((message, device.stops))
            if "continues" in message:
                os.close(write)

        sink = io.BytesIO()
        summary = capture(request, sink, notify=notify)
    finally:
        os.dup2(saved, 0)
        for descriptor in (read, saved):
            os.close(descriptor)
    assert summary.ended_by == "duration"
    assert summary.counts == {"userspace": 2, "gpu_kernel": 2}
    ((_, stops),) = [note for note in noted if "continues" in note[0]]
    assert stops, "it is as it was while it continues"


def test_limits_hold_for_its_events_too(device: FakeDevice) -> None:
    records, summary, _ = captured(
        CaptureRequest(["true"], ("userspace",), gpu="kernels", limits=Limits(events=3))
    )
    assert sum("phase" in record for record in records) == sum(summary.counts.values()) == 3


def test_it_is_closed_when_the_command_cannot_be_run(device: FakeDevice, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF, and no more")
    program.chmod(0o755)
    with pytest.raises(TracepipeError, match="cannot be executed"):
        captured(CaptureRequest([str(program)], gpu="kernels"))
    assert device.is_closed


def test_a_process_that_runs_is_entered(device: FakeDevice) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pids = (process.pid,)
        captured(CaptureRequest(pids=pids, gpu="kernels", limits=Limits(duration_ns=1)))
        assert process.poll() is None
        process.communicate()
    assert device.entered == [pids]
    captured(CaptureRequest(["true"], gpu="kernels"))
    assert device.entered == [pids]


def test_warps_of_a_running_process_cannot_be_recorded() -> None:
    with pytest.raises(TracepipeError, match="from a program's start"):
        captured(CaptureRequest(pids=(1,), gpu="warps"))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(TracepipeError, match="no GPU engine magic"):
        captured(CaptureRequest(["true"], gpu="magic"))
