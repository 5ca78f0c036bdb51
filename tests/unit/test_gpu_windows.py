"""Windows in a library of the command: CUPTI records in them alone, and calls begin and end them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.gpu_records import kernel_renderer, warp_renderer
from tests.support.recorded_program import Recorded
from tests.unit.test_gpu_let_go import patched_program, program  # noqa: F401
from tracepipe.tracer.request import CaptureRequest, Windows, window_environment

Start = Callable[..., Recorded]


@pytest.fixture
def start(program: Path) -> Iterator[Start]:  # noqa: F811
    """Starts the program, which is recorded in windows."""
    started: list[Recorded] = []

    def begin(**windows: str) -> Recorded:
        environment = window_environment(CaptureRequest(windows=Windows(**windows)))  # type: ignore[arg-type]
        started.append(Recorded(program, kernel_renderer(), windows=True, **environment))
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


def test_a_window_ends_while_a_thread_is_in_a_call(start: Start) -> None:
    recorded = start()
    recorded.channel.set_window(is_open=True)
    wait_until_asked(recorded, "some")
    recorded.do("stay")
    recorded.do("launch 2")
    recorded.channel.set_window(is_open=False)
    wait_until_asked(recorded, "nothing")
    recorded.do("launch 3")
    assert recorded.do("spoiled") == "whole"
    recorded.do("leave")
    recorded.channel.set_window(is_open=True)
    wait_until_asked(recorded, "some")
    recorded.do("launch 4")
    assert recorded.end() == 0
    calls = Counter(call["name"] for call in recorded.of("userspace"))
    assert (len(recorded.of("gpu_kernel")), calls["cuLaunchKernel"], calls["cuCtxSynchronize"]) == (6, 6, 0)


def test_a_window_turns_between_launches_of_graphs(start: Start) -> None:
    recorded = start()
    recorded.do("replay 4000")
    for _ in range(30):
        recorded.channel.set_window(is_open=True)
        wait_until_asked(recorded, "some")
        recorded.channel.set_window(is_open=False)
        wait_until_asked(recorded, "nothing")
    assert recorded.do("replayed") == "apart"


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


def test_the_launch_that_ends_a_window_is_whole(start: Start) -> None:
    """The runtime's function returns after the driver's, which it calls."""
    recorded = start(start_on="kernel:f#4", stop_on="kernel:f#2")
    recorded.channel.arm(1)
    recorded.do("cuda 20")
    recorded.end()
    assert len(recorded.of("gpu_kernel")) == 2
    assert Counter(call["name"] for call in recorded.of("userspace"))["cudaLaunchKernel"] == 2


def test_a_kernel_that_does_not_fit_turns_no_window(start: Start) -> None:
    recorded = start(start_on="kernel:g")
    recorded.channel.arm(1)
    recorded.do("launch 20")
    assert recorded.do("asked") == "asked for nothing"
    assert recorded.channel.turns() == []


def test_a_subscription_to_launches_stays_without_callbacks_until_another_asks(start: Start) -> None:
    """A thread may be in one when the recording ends."""
    recorded = start(start_on="kernel:f#5")
    recorded.do("launch 1")
    recorded.stop()
    while recorded.do("callbacks") != "no callbacks":
        pass
    assert recorded.do("subscribe") == "subscribe"


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


# warps


@pytest.fixture
def patched(patched_program: Path) -> Iterator[Callable[..., Recorded]]:  # noqa: F811
    """Starts the program whose modules are patched, which is recorded in windows."""
    started: list[Recorded] = []

    def begin(**selection: str) -> Recorded:
        environment = {f"TRACEPIPE_GPU_{name}": value for name, value in selection.items()}
        one = Recorded(patched_program, warp_renderer(), windows=True, **environment)
        started.append(one)
        assert [one.answer(), one.answer()] == ["patched", "begun"]
        one.do("launch")  # waits for the library's memory
        return one

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
            one.end()


def kernels(recorded: Recorded) -> list[str]:
    return [kernel["name"] for kernel in recorded.of("gpu_kernel")]


def test_warps_are_recorded_in_windows_alone(patched: Callable[..., Recorded]) -> None:
    recorded = patched()
    for name in "abcd":
        recorded.channel.set_window(is_open=name in "bd")
        for what in (f"kernel:{name}", "launch"):
            assert recorded.do(what) == what
    assert recorded.end() == 0
    assert sorted(kernels(recorded)) == ["b", "d"]
    assert [batch["name"] for batch in recorded.of("gpu_warp")] == kernels(recorded)
    assert [(call["name"], call["phase"]) for call in recorded.of("userspace")] == [
        ("cuLaunchKernel", phase) for phase in "BEBE"
    ]
    assert recorded.of("loss") == []


def test_launches_outside_of_windows_do_not_count(patched: Callable[..., Recorded]) -> None:
    recorded = patched(PER_KERNEL="2", LAUNCHES="2-")
    for is_open in (False, True, False):
        recorded.channel.set_window(is_open=is_open)
        for _ in range(4):
            assert recorded.do("kernel:f") == "kernel:f"
    assert recorded.end() == 0
    assert kernels(recorded) == ["f", "f"]


def test_the_call_that_loads_the_library_returns_in_a_window(patched: Callable[..., Recorded]) -> None:
    recorded = patched()
    for is_open in (False, True, False):
        recorded.channel.set_window(is_open=is_open)
        recorded.do("return")
    assert recorded.end() == 0
    assert [(call["name"], call["phase"]) for call in recorded.of("userspace")] == [("cuInit", "E")]


def test_a_call_belongs_to_the_window_that_it_begins_in(patched: Callable[..., Recorded]) -> None:
    """The thread that makes the call stays in it while a window begins or ends."""
    recorded = patched()
    recorded.do("stay")
    recorded.channel.set_window(is_open=True)
    recorded.do("leave")
    recorded.do("launch")
    recorded.do("wait")
    recorded.channel.set_window(is_open=False)
    recorded.do("leave")
    recorded.do("launch")
    assert recorded.end() == 0
    calls = [(call["name"], call["phase"]) for call in recorded.of("userspace")]
    assert sorted(calls) == [
        (name, phase) for name in ("cuLaunchKernel", "cuStreamSynchronize") for phase in "BE"
    ]
