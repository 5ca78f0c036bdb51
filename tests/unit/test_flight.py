"""The flight recorder: what it keeps, what leaves it, and what it writes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import pytest

from tests.unit.test_capture_record import NUMBER, PROBES, VALUES, raw
from tracepipe.errors import OutputError
from tracepipe.tracer import flight
from tracepipe.tracer.engines.engine import Attachment, Chunk
from tracepipe.tracer.flight import FlightRecorder, Outputs, Ring
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import RECORD_BYTES, Loss
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Filters, Last, Plan, Scope

Line = dict[str, Any]
PLAN = Plan((), (), [], Scope("system"), Filters(), 4096)


class Clock:
    """Stands in for the host's clocks."""

    now_ns = 0

    def __call__(self) -> dict[str, int]:
        return dict.fromkeys(("monotonic_ns", "boottime_ns", "realtime_ns"), self.now_ns)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(flight, "instant", made)
    return made


class Probes(Attachment):
    """An attachment whose records the renderer knows."""

    def __init__(self, *, is_unordered: bool) -> None:
        super().__init__()
        self.is_unordered = is_unordered

    def renderer(self) -> RecordRenderer:
        return RecordRenderer(PROBES, SYSCALLS["x86_64"], VALUES)


class Files:
    """Outputs in memory; the first `failing` of them cannot be opened."""

    def __init__(self, failing: int = 0) -> None:
        self.files: dict[str, io.BytesIO] = {}
        self._failing = failing

    @contextmanager
    def another(self) -> Iterator[tuple[str, BinaryIO]]:
        if self._failing:
            self._failing -= 1
            raise OutputError("There is no room.", "Free some.")
        name = f"run-{len(self.files) + 1}"
        self.files[name] = io.BytesIO()
        yield name, self.files[name]

    def lines(self, number: int) -> list[Line]:
        return [json.loads(line) for line in self.files[f"run-{number}"].getvalue().splitlines()]


class Asking:
    """Whoever asks for recordings, and hears of them."""

    def __init__(self) -> None:
        self.asked = 0
        self.heard: list[tuple[int, str, str]] = []

    def wrote(self, asked: int, path: str, error: OutputError | None) -> None:
        self.heard.append((asked, path, str(error or "")))


class Recorder:
    """A flight recorder of ten seconds, whose time goes by as it is set."""

    def __init__(
        self, clock: Clock, size_bytes: int = 1 << 20, *, failing: int = 0, is_unordered: bool = False
    ) -> None:
        self.files, self.messages, self.clock = Files(failing), list[str](), clock
        self.control = Asking()
        last = Last(10 * 10**9, size_bytes)
        assert isinstance(self.files, Outputs)
        probes = Probes(is_unordered=is_unordered)
        self.inner = FlightRecorder(
            self.files,
            last,
            probes,
            None,
            lambda start: {"type": "header", "start": start},
            self.messages.append,
            self.control,
        )
        self.inner.begin(PLAN, 0)

    def at(self, seconds: float, *items: bytes | Loss) -> None:
        """What is collected at a time, where the last look at the ring was 2 ms ago."""
        self.clock.now_ns = max(int(seconds * 10**9) - 2_000_000, self.clock.now_ns)
        self.inner.follow()
        self.clock.now_ns = int(seconds * 10**9)
        for item in items:
            self.inner.put(item if isinstance(item, Loss) else Chunk(item))
        self.inner.follow()

    def written(self, reason: str = "SIGUSR2") -> list[Line]:
        """What is written now."""
        before = len(self.files.files)
        self.inner.ask(reason)
        self.inner.follow()
        while not self.inner.wait(1):
            pass
        return self.files.lines(before + 1)


def futex(seconds: float, kind: int, tid: int = 12) -> bytes:
    return raw(kind, NUMBER["futex"], ts_ns=int(seconds * 10**9), tid=tid)


def whole(seconds: float) -> bytes:
    """A system call that takes no time."""
    return futex(seconds, record.SYSCALL_ENTER) + futex(seconds, record.SYSCALL_EXIT)


def times_s(lines: list[Line]) -> list[float]:
    return [line["ts_ns"] / 1e9 for line in lines if "phase" in line]


def test_the_last_events_are_written_and_kept(clock: Clock) -> None:
    recorder = Recorder(clock)
    for second in range(1, 31):
        recorder.at(second, whole(second))
    header, *events, footer = recorder.written()
    assert header["start"]["monotonic_ns"] == 20 * 10**9
    assert times_s(events) == [second for second in range(20, 31) for _ in "BE"]
    assert footer["counts"] == {"syscall": 22}
    assert (footer["ended_by"], footer["end"]["monotonic_ns"]) == ("SIGUSR2", 30 * 10**9)
    assert "evicted" not in footer
    recorder.at(31, whole(31))
    assert times_s(recorder.written()) == [second for second in range(21, 32) for _ in "BE"]
    first, second = recorder.inner.recordings
    assert (first.path, second.path, second.span_ns) == ("run-1", "run-2", 10 * 10**9)
    assert [text.partition(";")[0] for text in recorder.messages] == [
        "run-1: 22 syscall of the last 10.00 s, by SIGUSR2",
        "run-2: 22 syscall of the last 10.00 s, by SIGUSR2",
    ]


def test_what_is_under_way_begins_with_the_recording(clock: Clock) -> None:
    recorder = Recorder(clock)
    recorder.at(1, futex(1, record.SYSCALL_ENTER))
    recorder.at(50)
    _, begin, footer = recorder.written()
    assert (begin["phase"], begin["ts_ns"], begin["args"]["began_ns"]) == ("B", 40 * 10**9, 10**9)
    assert footer["counts"] == {"syscall": 1}


def test_records_that_were_collected_late_are_not_before_the_start(clock: Clock) -> None:
    recorder = Recorder(clock)
    recorder.at(30.5, whole(20.4), futex(20.4, record.SYSCALL_ENTER), whole(30))
    header, *events, _ = recorder.written()
    assert header["start"]["monotonic_ns"] == 20.5 * 10**9
    assert times_s(events) == [20.5, 30, 30]


def test_an_entry_that_waited_for_its_return_begins_with_the_recording(clock: Clock) -> None:
    """With a filter by duration both are collected at the return."""
    recorder = Recorder(clock, is_unordered=True)
    for second in range(1, 31):
        recorder.at(second, whole(second))
    late = futex(29.5, record.SYSCALL_EXIT, tid=13)
    recorder.at(30, futex(2, record.SYSCALL_ENTER, tid=13) + late)
    _, begin, *rest, footer = recorder.written()
    assert (begin["tid"], begin["ts_ns"], begin["args"]["began_ns"]) == (13, 20 * 10**9, 2 * 10**9)
    assert footer["counts"] == {"syscall": 1 + len(rest)}
    assert times_s(rest) == sorted([*(second for second in range(21, 31) for _ in "BE"), 29.5])


def test_memory_is_bounded_and_what_had_no_room_is_counted(clock: Clock) -> None:
    recorder = Recorder(clock, size_bytes=1000 * RECORD_BYTES)
    for tick in range(1, 41):
        recorder.at(tick / 4, *(whole(tick / 4) for _ in range(50)))
    *_, footer = recorder.written()
    kept = footer["counts"]["syscall"]
    assert 0 < kept < 1000
    assert footer["evicted"] == {"syscall": 4000 - kept}
    assert footer["losses"] == {}
    recorder.at(30)  # what left for want of room is older than what is kept by now
    *_, footer = recorder.written()
    assert footer["counts"] == {} and "evicted" not in footer


def test_the_last_of_many_records_that_come_at_once_are_kept(clock: Clock) -> None:
    recorder = Recorder(clock, size_bytes=100 * RECORD_BYTES)
    recorder.at(1)
    recorder.at(2, b"".join(whole(1 + at / 1000) for at in range(1000)))
    header, *events, footer = recorder.written()
    kept = [event for event in events if "began_ns" not in event.get("args", {})]
    assert 0 < len(kept) < 100
    assert times_s(kept)[-1] == 1.999
    assert header["start"]["monotonic_ns"] == kept[0]["ts_ns"]
    assert footer["evicted"] == {"syscall": 2000 - len(kept)}


def test_records_that_wait_for_the_recorder_are_not_before_the_start(clock: Clock) -> None:
    """Records that are made after one look at the ring and before the segment that they are put into."""
    recorder = Recorder(clock, size_bytes=100 * RECORD_BYTES)
    for second in range(1, 100):
        recorder.at(second / 10, *(whole((second - 1) / 10 + 0.01 + at / 1000) for at in range(20)))
    *events, footer = recorder.written()[1:]
    assert footer["evicted"] == {
        "syscall": 99 * 40 - sum("began_ns" not in e.get("args", {}) for e in events)
    }


def test_a_ring_drops_segments_oldest_first(clock: Clock) -> None:
    ring = Ring(Last(100, 1 << 20))
    for clock.now_ns in range(0, 60, 10):
        ring.turn()
        ring.put(Chunk(bytes(clock.now_ns), of_device=True))
    assert ring.drop(60) is None
    dropped = []
    while (found := ring.drop(125)) is not None:
        _, end_ns, has_no_room = found
        dropped.append((end_ns, has_no_room))
    assert dropped == [(0, False), (10, False), (20, False)]
    assert [len(item.content) for item in ring.items() if isinstance(item, Chunk)] == [30, 40, 50]


def test_losses_are_those_of_the_time_that_is_kept_and_of_threads_that_were_never_followed(
    clock: Clock,
) -> None:
    recorder = Recorder(clock)
    recorder.at(1, Loss("syscall", 5, 0, 10**9, "full"), Loss(None, 2, 0, 10**9, "a thread's start was lost"))
    recorder.at(30, whole(30), Loss("syscall", 3, 29 * 10**9, 30 * 10**9, "full", cpu=1))
    *lines, footer = recorder.written()
    losses = [line for line in lines if line["type"] == "loss"]
    assert [(line.get("layer"), line["count"]) for line in losses] == [(None, 2), ("syscall", 3)]
    assert footer["losses"] == {"unknown": 2, "syscall": 3}
    assert recorder.inner.recordings[0].cpu_losses == {"syscall": {1: 3}}


def test_a_recording_that_cannot_be_written_does_not_end_the_recorder(clock: Clock) -> None:
    recorder = Recorder(clock, failing=1)
    recorder.at(1, whole(1))
    recorder.inner.ask("SIGUSR2")
    while not recorder.inner.wait(0.01):
        pass
    assert recorder.messages == ["There is no room. Free some."]
    assert recorder.inner.recordings == []
    recorder.inner.end("exit 0", {})
    recorder.inner.finish()
    while not recorder.inner.wait(0.01):
        pass
    assert recorder.files.lines(1)[-1]["counts"] == {"syscall": 2}
    assert str(recorder.inner.error) == "There is no room."


def test_what_is_asked_for_twice_while_it_is_written_is_written_once_more(clock: Clock) -> None:
    recorder = Recorder(clock)
    recorder.at(1, whole(1))
    for _ in range(3):
        recorder.inner.ask("SIGUSR2")
    recorder.inner.follow()
    recorder.inner.ask("again")
    recorder.inner.ask("and again")
    while not recorder.inner.wait(0.01):
        pass
    assert [one.reason for one in recorder.inner.recordings] == ["SIGUSR2", "again"]


def test_a_request_gets_the_recording_that_was_begun_after_it(clock: Clock) -> None:
    recorder = Recorder(clock, failing=1)
    recorder.at(1, whole(1))
    for _ in range(2):  # the first fails
        while not recorder.inner.wait(0.01):
            pass
        recorder.inner.ask("SIGUSR2")
        recorder.inner.follow()
    recorder.control.asked = 2  # while that is being written
    recorder.inner.ask("write_now")
    while not recorder.inner.wait(0.01):
        pass
    assert recorder.control.heard == [(0, "", "There is no room."), (0, "run-1", ""), (2, "run-2", "")]
