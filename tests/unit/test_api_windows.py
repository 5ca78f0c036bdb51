"""The library's windows without a probe: what a block asks the recording process, and its answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

import tracepipe
from tests.support.summaries import SUMMARY

BY_API = tracepipe.CaptureOptions(layers=(), start_on="api")


def test_a_block_is_a_window_of_the_recording(recorder: Callable[..., None]) -> None:
    recorder(
        "send(Began())",
        "assert heard() == WindowOrder(True, 'epoch')",
        "send('a note')",
        "send(Answer())",
        "assert heard() == WindowOrder(False)",
        "send(Answer())",
        "assert heard() == 'stop'",
        "send(SUMMARY)",
    )
    with (
        tracepipe.capture(output="x", options=BY_API) as run,
        run.window("epoch"),
    ):
        assert run.notes == ["a note"]
    assert run.summary == SUMMARY


def test_what_cannot_be_obeyed_is_an_error_and_the_recording_continues(recorder: Callable[..., None]) -> None:
    recorder(
        "send(Began())", "heard(), send(Answer('No.', 'Do.'))", "assert heard() == 'stop'", "send(SUMMARY)"
    )
    with tracepipe.capture(output="x", options=tracepipe.CaptureOptions(layers=(), stop_on="api")) as run:
        with pytest.raises(tracepipe.TracepipeError, match="No") as refused:
            run.end_window()
        assert refused.value.hint == "Do."
    assert run.summary == SUMMARY


@pytest.mark.parametrize("end", ["send(ENDED)", "send(SUMMARY)"])
def test_a_window_ends_with_the_recording(end: str, recorder: Callable[..., None]) -> None:
    recorder(
        "send(Began())", "heard(), send(Answer())", f"heard(), {end}", f"heard(), {end}", "send(SUMMARY)"
    )
    with tracepipe.capture("./app", BY_API, output="x") as run:
        with run.window():
            pass
        with pytest.raises(tracepipe.TracepipeError, match="The recording has ended"):
            run.begin_window()
    assert run.summary == SUMMARY
    with pytest.raises(tracepipe.TracepipeError, match="The recording has ended"):
        run.end_window()


@pytest.mark.parametrize("end", ["heard(), send(Answer())", "heard(), sys.exit(7)"])
def test_an_exception_ends_a_window_and_goes_on(end: str, recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "heard(), send(Answer())", end, "assert heard() == 'stop'", "send(SUMMARY)")
    with (
        pytest.raises(ZeroDivisionError),
        tracepipe.capture(output="x", options=BY_API) as run,
        run.window(),
    ):
        _ = 1 / 0


def test_threads_are_answered_while_another_one_waits_for_the_end(recorder: Callable[..., None]) -> None:
    count = 20
    recorder(
        "send(Began())",
        f"for _ in range({2 * count}): heard(), send('a note'), send(Answer())",
        "send(SUMMARY)",
    )
    done: list[str] = []

    def drive() -> None:
        for _ in range(count // 2):
            run.begin_window()
            run.end_window()
        done.append("all")

    with tracepipe.capture("./app", BY_API, output="x") as run:
        threads = [threading.Thread(target=drive) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert run.wait() == SUMMARY
        for thread in threads:
            thread.join()
    assert done == ["all", "all"]
    assert len(run.notes) == 2 * count


def test_windows_that_no_program_begins_are_refused_at_once(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "assert heard() == 'stop'", "send(SUMMARY)")
    with tracepipe.capture(output="x", options=tracepipe.CaptureOptions(layers=(), start_on="signal")) as run:
        with pytest.raises(tracepipe.TracepipeError, match="do not begin with begin_window") as refused:
            run.begin_window()
        assert refused.value.hint == 'Give start_on="api".'
        with pytest.raises(tracepipe.TracepipeError, match="do not end with end_window"):
            run.end_window()
    later = tracepipe.capture(output="x", options=BY_API)
    with pytest.raises(tracepipe.TracepipeError, match="x is not being recorded"):
        later.begin_window()


@pytest.mark.parametrize(
    ("call", "options"), [("begin_window", {"start_on": "api"}), ("write_now", {"last": "10s"})]
)
def test_a_fork_asks_for_nothing(call: str, options: dict[str, Any], recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "assert heard() == 'stop'", "send(SUMMARY)")
    with tracepipe.capture(output="x", options=tracepipe.CaptureOptions(layers=(), **options)) as run:
        child = os.fork()
        if child == 0:
            try:
                getattr(run, call)()
            except tracepipe.TracepipeError:
                os._exit(5)
            os._exit(6)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
