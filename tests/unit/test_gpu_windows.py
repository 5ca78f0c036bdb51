"""Windows in a library of the command: CUPTI records in them alone, and calls begin and end them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.test_gpu_let_go import Recorded, program  # noqa: F401
from tracepipe.capture.gpu.engines.kernel_lines import KernelsRenderer
from tracepipe.capture.request import CaptureRequest, Windows
from tracepipe.capture.triggers import window_environment

Start = Callable[..., Recorded]


@pytest.fixture
def start(program: Path) -> Iterator[Start]:  # noqa: F811
    """Starts the program, which is recorded in windows."""
    started: list[Recorded] = []

    def begin(**windows: str) -> Recorded:
        environment = window_environment(CaptureRequest(windows=Windows(**windows)))  # type: ignore[arg-type]
        started.append(Recorded(program, KernelsRenderer(), windows=True, **environment))
        assert started[-1].answer() == "begun"
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def wait_until_asked(recorded: Recorded, for_what: str) -> None:
    while recorded.do("asked") != f"asked for {for_what}":
        pass


def test_cupti_records_in_windows_alone(start: Start) -> None:
    recorded = start()
    assert recorded.do("asked") == "asked for nothing"
    recorded.do("launch 5")
    for count in (2, 3):
        recorded.channel.set_window(is_open=True)
        wait_until_asked(recorded, "some")
        recorded.do(f"launch {count}")
        recorded.channel.set_window(is_open=False)
        wait_until_asked(recorded, "nothing")
        recorded.do("launch 7")
    assert recorded.channel.turns() == []
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 5
    assert recorded.of("loss") == []


def test_the_profilers_calls_turn_windows_before_they_return(start: Start) -> None:
    recorded = start(start_on="profiler")
    recorded.do("profile")
    assert recorded.do("asked") == "asked for nothing", "not before it is armed"
    recorded.channel.arm(2)
    for count in (1, 2, 3):
        recorded.do("profile")
        recorded.do(f"launch {count}")
        recorded.do("unprofile")
        recorded.do("launch 10")
    assert [turn.begins for turn in recorded.channel.turns()] == [True, False, True, False]
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 3


def test_launches_of_a_kernel_turn_windows(start: Start) -> None:
    recorded = start(start_on="kernel:^f$#4", stop_on="kernel:f#2")
    recorded.channel.arm(1)
    recorded.do("launch 3")
    assert recorded.do("asked") == "asked for nothing"
    recorded.do("launch 1")
    assert recorded.do("asked") == "asked for some"
    recorded.do("launch 20")
    assert recorded.do("asked") == "asked for nothing"
    recorded.end()
    assert len(recorded.of("gpu_kernel")) == 2


def test_what_does_not_fit_turns_no_window(start: Start) -> None:
    recorded = start(start_on="kernel:g")
    recorded.channel.arm(1)
    recorded.do("launch 20")
    assert recorded.do("asked") == "asked for nothing"
    assert recorded.channel.turns() == []


def test_callbacks_are_asked_for_where_a_window_waits_for_calls_alone(start: Start) -> None:
    recorded = start()
    assert recorded.do("subscribe") == "subscribe"
    waiting = start(start_on="profiler")
    assert waiting.do("subscribe") == "refused"
    waiting.stop()
    assert waiting.do("subscribe") == "subscribe", "the recording is over"


def test_a_subscription_to_launches_stays_without_callbacks(start: Start) -> None:
    """A thread may be in one when the recording ends."""
    recorded = start(start_on="kernel:f#5")
    recorded.do("launch 1")
    recorded.stop()
    assert recorded.do("subscribe") == "refused"
    assert recorded.do("callbacks") == "no callbacks"


def test_a_window_is_turned_once_by_whoever_comes_first(start: Start) -> None:
    recorded = start(start_on="profiler")
    recorded.channel.arm(1)
    recorded.channel.set_window(is_open=True)
    recorded.do("profile")
    recorded.channel.set_window(is_open=True)
    assert recorded.channel.turns() == []
    recorded.do("unprofile")
    recorded.channel.set_window(is_open=False)
    assert [turn.begins for turn in recorded.channel.turns()] == [False]
    wait_until_asked(recorded, "nothing")
