"""What ends a recording does not end the command, and what ends a capture early does not start it."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_capture_record import raw
from tracepipe.api.record import Files, NumberedOutputs
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer import ENGINES, CaptureRequest, CaptureSummary, capture, spool
from tracepipe.tracer.engines.engine import Attachment, Chunk
from tracepipe.tracer.flight import Ring
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import RECORD_BYTES, Loss, unread_error
from tracepipe.tracer.request import Last, Notify, Plan
from tracepipe.tracer.spool import Backlog


def nothing() -> None:
    """What an engine does here when it is asked."""


class Engine:
    """An engine that does something at some moments; it records what `collect` gives, by default nothing."""

    name = "broken"
    layers = frozenset({"syscall"})

    def __init__(
        self,
        *,
        attach: Callable[[], object] = nothing,
        collect: Callable[[], object] = nothing,
        lost: Callable[[], object] = nothing,
        stop: Callable[[], object] = nothing,
    ) -> None:
        self.does = {"attach": attach, "collect": collect, "lost": lost, "stop": stop}

    def check(self) -> str:
        return ""

    def attach(self, plan: Plan, notify: Notify) -> Attachment:
        self.does["attach"]()
        does = self.does

        class Faulty(Attachment):
            def collect(self) -> bytes:
                return does["collect"]() or b""  # type: ignore[return-value]

            def lost(self) -> list[Loss]:
                self.error = does["lost"]()  # type: ignore[assignment]
                return []

            def stop(self) -> None:
                does["stop"]()

        return Faulty()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], Path, io.BytesIO]]:
    """Captures a command that takes a moment, by an engine that does something; the messages, the file that
    the command makes at its end, and the recording.
    """
    done = tmp_path / "done"

    def record(wanted: Any = None, match: str | None = None, **does: Callable[[], object]) -> Any:
        monkeypatch.setitem(ENGINES, "broken", lambda: Engine(**does))  # type: ignore[arg-type]
        request = CaptureRequest(["sh", "-c", f"sleep 0.2; echo > {done}"], ("syscall",), method="broken")
        messages: list[str] = []
        sink = io.BytesIO()
        if wanted is None:
            capture(request, sink, notify=messages.append)
        else:
            with pytest.raises(wanted, match=match):
                capture(request, sink, notify=messages.append)
        return messages, done, sink

    return record


def fails(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


@pytest.mark.parametrize("moment", ["collect", "stop"])
def test_a_bug_ends_the_recording_and_not_the_command(moment: str, run: Any) -> None:
    at_first = [fails(ValueError("a bug"))]
    messages, done, sink = run(
        ValueError, "a bug", **{moment: lambda: at_first.pop()() if at_first else None}
    )
    assert done.exists()
    goes_on = "the recording is not complete; sh continues (Ctrl-C ends it)"
    assert (messages == [goes_on]) == (moment == "collect")
    header, footer = map(json.loads, sink.getvalue().splitlines())
    ended_by = "an error: a bug" if moment == "collect" else "exit 0"
    assert (header["type"], footer["type"], footer["ended_by"]) == ("header", "footer", ended_by)


@pytest.mark.parametrize("times", [1, 9])
def test_what_is_left_when_memory_runs_out_is_counted(times: int, unread: Any) -> None:
    switch, failures = raw(record.SWITCH_IN, 0), [MemoryError()] * times
    left = [switch, switch]

    def collect() -> bytes:
        if failures:
            raise failures.pop()
        return left.pop() if left else b""

    summary, messages, found = unread(collect=collect)
    assert messages == ["the recording is not complete; sleep continues (Ctrl-C ends it)"]
    assert found[-1]["ended_by"] == "an error: no memory"
    lost = {"scheduler": 2} if times == 1 else {}  # while nothing can be collected, they are not known
    assert (found[-1]["counts"], found[-1]["losses"], summary.losses) == ({}, lost, lost)
    assert "There is not enough memory for a capture" in summary.error
    assert "ulimit -v" in summary.hint


def test_too_many_open_files_end_the_recording_and_not_the_command(unread: Any) -> None:
    summary, _, found = unread(collect=fails(OSError(errno.EMFILE, os.strerror(errno.EMFILE))))
    assert found[-1]["ended_by"] == "an error: Too many open files"
    assert "may not open enough files for a capture" in summary.error


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.ENOMEM, "x"), RuntimeError("can't start new thread")], ids=repr
)
def test_a_command_is_not_started_where_something_is_short(error: BaseException, run: Any) -> None:
    messages, done, sink = run(CaptureUnavailable, attach=fails(error))
    assert messages == ["sh was not started"]
    assert not done.exists()
    assert sink.getvalue() == b""


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_is_not_started_after_an_interrupt(number: signal.Signals, run: Any) -> None:
    messages, done, sink = run(
        TracepipeError, "interrupted before sh was started", attach=lambda: signal.raise_signal(number)
    )
    assert messages == ["sh was not started"]
    assert not done.exists()
    assert sink.getvalue() == b""


def test_a_command_is_recorded_to_its_end_where_nothing_fails(run: Any) -> None:
    messages, done, sink = run()
    assert done.exists()
    assert messages == []
    header, footer = map(json.loads, sink.getvalue().splitlines())
    assert (header["type"], footer["ended_by"]) == ("header", "exit 0")


def test_all_that_is_left_at_the_end_is_recorded_however_many_chunks_it_is(run: Any) -> None:
    left: list[bytes] = []
    switch = raw(record.SWITCH_IN, 0)
    _, _, sink = run(
        stop=lambda: left.extend([switch, switch * 2, switch]), collect=lambda: left.pop() if left else b""
    )
    footer = json.loads(sink.getvalue().splitlines()[-1])
    assert footer["counts"] == {"scheduler": 4}


def test_a_flight_recorder_keeps_no_more_of_what_is_left_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, chunk, sizes = list[bytes](), 100 * raw(record.SWITCH_IN, 0), list[int]()

    def collect() -> bytes:
        sizes.append(sum(len(item.content) for item in kept[-1].items() if isinstance(item, Chunk)))
        return left.pop() if left else b""

    kept = list[Ring]()
    made = Ring.__init__
    monkeypatch.setattr(Ring, "__init__", lambda ring, *a, **k: kept.append(ring) or made(ring, *a, **k))
    stop = lambda: left.extend([chunk] * 64)  # noqa: E731
    monkeypatch.setitem(ENGINES, "broken", lambda: Engine(stop=stop, collect=collect))  # type: ignore[arg-type]
    request = CaptureRequest(["true"], ("syscall",), method="broken", last=Last(10**12, 3 * len(chunk)))
    with NumberedOutputs(str(tmp_path / "run.jsonl"), Files(print), force=False) as outputs:
        summary = capture(request, outputs, notify=print)
    assert 0 < max(sizes) <= 3 * len(chunk)
    assert 0 < summary.counts["scheduler"] <= 300


def test_a_flight_recorder_writes_without_a_folder_of_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    left = [7]

    def collect() -> bytes:
        return left.pop() * raw(record.SWITCH_IN, 0, ts_ns=time.monotonic_ns()) if left else b""

    monkeypatch.setitem(ENGINES, "broken", lambda: Engine(collect=collect))  # type: ignore[arg-type]
    request = CaptureRequest(["true"], ("syscall",), method="broken", last=Last(10**12))
    with NumberedOutputs(str(tmp_path / "run.jsonl"), Files(print), force=False) as outputs:
        summary = capture(request, outputs, notify=print)
    assert (summary.counts, summary.losses, summary.error) == ({"scheduler": 7}, {}, "")


# What was kept and cannot be read back ------------------------------------------------------------------


def unreadable(*_: object) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CaptureSummary, list[str], list[Any]]]:
    """Captures a command by an engine that does something; the summary, the messages, and the records."""

    def record(is_unordered: bool = False, **does: Callable[[], object]) -> Any:
        monkeypatch.setattr(Attachment, "is_unordered", is_unordered)
        monkeypatch.setitem(ENGINES, "broken", lambda: Engine(**does))  # type: ignore[arg-type]
        messages: list[str] = []
        sink = io.BytesIO()
        request = CaptureRequest(["sleep", "0.2"], ("syscall",), method="broken")
        summary = capture(request, sink, notify=messages.append)
        return summary, messages, list(map(json.loads, sink.getvalue().splitlines()))

    return record


@pytest.mark.parametrize("is_unordered", [False, True])
def test_lines_that_cannot_be_made_are_a_loss_and_the_rest_is_kept(
    is_unordered: bool, unread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, switch = Backlog.read, raw(record.SWITCH_IN, 0)
    monkeypatch.setattr(spool, "_PIECE_BYTES", 2 * RECORD_BYTES)
    monkeypatch.setattr(spool, "_RUN_BYTES", 2 * RECORD_BYTES)
    monkeypatch.setattr(Backlog, "read", lambda *at: unreadable() if at[1] == 2 * RECORD_BYTES else read(*at))
    left = [switch * 6]
    summary, _, found = unread(is_unordered, stop=lambda: None, collect=lambda: left.pop() if left else b"")
    assert (
        next(loss for loss in found if loss["type"] == "loss").items()
        >= {
            "count": 2,
            "reason": "at most: not read back from a temporary file: Input/output error",
        }.items()
    )
    assert (found[-1]["counts"], found[-1]["losses"]) == ({"scheduler": 4}, {"unknown": 2})
    assert "cannot be read back from a temporary file: Input/output error." in summary.error
    assert "TMPDIR" in summary.hint


@pytest.mark.parametrize("times", [3, 10**9])
def test_a_full_disk_of_temporary_files_may_have_room_again(
    times: int, unread: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, write, refused = [raw(record.SWITCH_IN, 0)] * 3, os.pwrite, list[None]()

    def full_at_first(*to: Any) -> int:
        if len(refused) < times:
            refused.append(None)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*to)

    monkeypatch.setattr(os, "pwrite", full_at_first)
    monkeypatch.setattr(spool, "_PATIENCE_S", 60.0 if times == 3 else 0.01)
    summary, _, found = unread(collect=lambda: left.pop() if left else b"")
    is_over = times != 3
    assert (found[-1]["counts"], found[-1]["losses"]) == (
        ({}, {"scheduler": 3}) if is_over else ({"scheduler": 3}, {})
    )
    assert ("cannot be kept in" in summary.error) == is_over


def test_records_that_cannot_be_read_back_end_the_recording_alone(unread: Any) -> None:
    error = unread_error(OSError(errno.EIO, os.strerror(errno.EIO)))
    summary, messages, found = unread(lost=lambda: error)
    assert messages == ["the recording is not complete; sleep continues (Ctrl-C ends it)"]
    assert found[-1]["ended_by"] == "an error: Input/output error"
    assert (summary.exit_code, summary.error, summary.hint) == (0, error.message, error.hint)
