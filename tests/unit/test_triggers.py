"""What begins and ends windows, as it is written: how it is read, and what is refused."""

from __future__ import annotations

import re

import pytest

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer.request import Limits, Trigger, Windows, check_triggers, check_windows, trigger_of


def test_triggers_are_read_as_they_are_written() -> None:
    assert trigger_of("", "--start-on") is None
    assert trigger_of("profiler", "--start-on") == Trigger("profiler")
    assert trigger_of("call:f", "--start-on") == Trigger("call", "f")
    again = trigger_of("call:libx.so:f#12", "--start-on")
    assert again == Trigger("call", "libx.so:f", 12)
    assert again.text == "call:libx.so:f#12"


@pytest.mark.parametrize(
    "text", ["profile", "profiler:x", "profiler#2", "call", "call:", "call:f#0", "signal:USR1"]
)
def test_an_unknown_trigger_is_an_error_with_a_hint(text: str) -> None:
    with pytest.raises(TracepipeError) as raised:
        trigger_of(text, "--stop-on")
    assert raised.value.message.startswith("--stop-on")
    assert raised.value.hint


def test_several_windows_need_an_end() -> None:
    with pytest.raises(TracepipeError, match="nothing ends the first"):
        check_windows(Windows(delay_ns=1, repeat=2), Limits())
    check_windows(Windows(delay_ns=1, repeat=2), Limits(duration_ns=1))
    check_windows(Windows(start_on="profiler", repeat=2), Limits())


def test_a_program_waits_for_no_delay() -> None:
    with pytest.raises(TracepipeError, match="begin_window"):
        check_windows(Windows(start_on="api", delay_ns=1), Limits())
    check_windows(Windows(start_on="signal", stop_on="api", delay_ns=1), Limits())


@pytest.mark.parametrize(
    ("windows", "trigger"),
    [
        (Windows(start_on="call:f"), "call:f"),
        (Windows(stop_on="profiler"), "profiler"),
        (Windows(start_on="nvtx:step"), "nvtx:step"),
        (Windows(start_on="signal", stop_on="kernel:gemm#3"), "kernel:gemm#3"),
    ],
)
def test_what_nothing_sees_is_refused_with_a_hint(windows: Windows, trigger: str) -> None:
    with pytest.raises(CaptureUnavailable, match=re.escape(f"see {trigger}.")) as raised:
        check_triggers(windows, (), has_probes=False)
    assert raised.value.hint
    check_triggers(windows, {"nvtx", "kernel"}, has_probes=True)
