"""The course of windows over a recording: what begins and ends them, and when probes are attached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tracepipe.tracer import CaptureRequest
from tracepipe.tracer.engines.engine import Attachment, Turn
from tracepipe.tracer.request import Cause, Limits, WindowOrder, Windows
from tracepipe.tracer.windows import WindowCourse


class Attached(Attachment):
    """Probes whose functions turn windows as the test says, and what was asked of them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self.did: list[Any] = []
        self.names: list[str] = []
        self.ends: list[int] = []
        self.is_held = False
        self.is_attached = True
        self.held_ns: int | None = None
        self.calls = 0
        self.is_over = False
        self.to_come: list[Turn] = []

    def _turn(self, cause: Cause, at_ns: int | None, *, begins: bool, name: str = "") -> int:
        self.names += [name] if name else []
        self.did.append((self.now_ns, cause.name, begins))
        return self.now_ns if at_ns is None else at_ns

    def prepare(self) -> None:
        self.is_attached = True

    def rest(self) -> None:
        self.is_attached = False

    def hits(self) -> int:
        return self.calls

    def asked(self) -> int | None:
        return self.held_ns

    def let_go(self) -> bool:
        if self.held_ns is not None:
            self.did.append((self.now_ns, "let go"))
        self.held_ns = None
        return self.is_over

    def is_end_held(self) -> bool:
        return self.is_held

    def let_end(self) -> None:
        self.is_held = False
        self.ends.append(self.now_ns)

    def arm(self, windows: int) -> None:
        self.did.append((self.now_ns, "arm", windows))

    def turns(self) -> list[Turn]:
        turns, self.to_come = self.to_come, []
        return turns


class Device:
    """A library in the command and its channel, as far as windows go: it turns its own as the test says."""

    def __init__(self, did: list[Any]) -> None:
        self.did, self.channel = did, self
        self.sees = {"nvtx": Path("lib.so")}
        self.calls = 0
        self.left: int | None = None
        self.follows = True
        self.to_come: list[Turn] = []
        self.recorded: list[Turn] = []

    def arm(self, windows: int) -> None:
        self.did.append(("device", "arm", windows))

    def let_begin(self, windows: int) -> None:
        self.left = windows

    def hits(self) -> int:
        return self.calls

    def has_followed(self) -> bool:
        return self.follows

    def set_window(self, *, is_open: bool) -> None:
        self.did.append(("device", is_open))

    def turned(self, turn: Turn) -> None:
        self.recorded.append(turn)

    def turns(self) -> list[Turn]:
        turns, self.to_come = self.to_come, []
        return turns


class Course:
    """A course of windows, at times that the test says."""

    def __init__(
        self, duration_ns: int | None = None, probed: bool = True, has_device: bool = False, **windows: Any
    ) -> None:
        self.attached = Attached()
        self.attached.probed = frozenset({True, False}) if probed else frozenset()
        self.device = Device(self.attached.did)
        request = CaptureRequest(windows=Windows(**windows), limits=Limits(duration_ns))
        self.windows = WindowCourse(request)
        self.windows.start(self.attached, 0, self.device if has_device else None)  # type: ignore[arg-type]
        self.signals = 0

    def at(self, now_ns: int, *turns: bool, signals: int = 0) -> str:
        self.attached.now_ns = now_ns
        self.attached.to_come = [Turn(now_ns, begins) for begins in turns]
        self.signals += signals
        return self.windows.step(now_ns, self.signals)

    def say(self, now_ns: int, name: str = "", *, begins: bool) -> str:
        """The program asks for it; the answer, or why the recording ends."""
        self.attached.now_ns = now_ns
        order = WindowOrder(begins, name)
        refusal = self.windows.answer(order).message
        return refusal or self.windows.step(now_ns, self.signals, order)


def test_a_recording_without_windows_is_open_until_its_duration_is_over() -> None:
    course = Course(duration_ns=10)
    assert [course.at(now_ns) for now_ns in (1, 9, 10)] == ["", "", "duration"]
    assert course.attached.did == []
    assert course.windows.recorded is None


def test_the_device_gets_the_times_that_are_recorded_with_and_without_windows() -> None:
    whole, windowed = Course(has_device=True), Course(duration_ns=10, delay_ns=50, has_device=True)
    whole.windows.finish(70)
    assert whole.device.recorded == [(0, True), (70, False)]
    for now_ns in (50, 60):
        windowed.at(now_ns)
    assert windowed.device.recorded == [(50, True), (60, False)]


def test_windows_by_time_follow_each_other_at_the_delay() -> None:
    course = Course(duration_ns=10, delay_ns=50, repeat=2)
    assert [course.at(now_ns) for now_ns in (49, 50, 59, 60, 109, 110)] == [""] * 6
    assert course.at(120) == "duration"
    assert course.attached.did == [
        (50, "START", True), (60, "DURATION", False), (110, "START", True), (120, "DURATION", False)
    ]  # fmt: skip
    assert course.windows.recorded is not None
    assert (course.windows.recorded.count, course.windows.recorded.length_ns) == (2, 20)


def test_a_signal_begins_and_ends_windows_but_not_before_the_delay() -> None:
    course = Course(delay_ns=5, start_on="signal", repeat=2)
    assert course.at(1, signals=1) == ""
    assert [course.at(now_ns, signals=1) for now_ns in (6, 9, 11, 20, 22)] == ["", "", "", "", "signal"]
    assert [(at, begins) for at, _, begins in course.attached.did] == [
        (6, True), (9, False), (20, True), (22, False)
    ]  # fmt: skip


def test_a_program_begins_and_ends_any_number_of_windows_by_name() -> None:
    course = Course(start_on="api")
    for at in range(1, 99, 2):
        assert [course.say(at, f"step {at}", begins=True), course.say(at + 1, begins=False)] == ["", ""]
        assert course.at(at + 1) == ""
    assert course.attached.did == [
        (at, "START" if at % 2 else "STOP", bool(at % 2)) for at in range(1, 99)
    ]  # fmt: skip
    assert course.attached.names == [f"step {at}" for at in range(1, 99, 2)]


def test_a_program_begins_any_number_of_windows_on_request() -> None:
    course = Course(start_on="api", repeat=2)
    assert [course.say(at, begins=bool(at % 2)) for at in (1, 2, 3, 4)] == ["", "", "", "api"]


def test_a_program_gets_an_answer_to_a_request_that_cannot_be_fulfilled() -> None:
    course = Course(start_on="api")
    assert course.say(1, begins=False) == "No window is open."
    course.say(2, begins=True)
    assert course.say(3, begins=True) == "A window is already open."
    course.say(4, begins=False)
    assert course.say(5, begins=False) == "No window is open."
    assert [at for at, *_ in course.attached.did] == [2, 4]


def test_a_program_may_end_a_window_whose_duration_ended_it() -> None:
    course = Course(start_on="api", duration_ns=10)
    course.say(1, begins=True)
    assert [course.at(11), course.say(15, begins=False)] == ["", ""]
    course.say(20, begins=True)
    assert [course.at(30), course.say(31, begins=True)] == ["", ""], "it need not end that"
    assert [(at, begins) for at, _, begins in course.attached.did] == [
        (1, True), (11, False), (20, True), (30, False), (31, True)
    ]  # fmt: skip


def test_a_signal_begins_no_window_of_a_program() -> None:
    course = Course(start_on="api", stop_on="signal")
    assert course.at(1, signals=1) == ""
    assert course.attached.did == []
    course.say(2, begins=True)
    assert course.at(3, signals=1) == ""
    assert not course.windows.is_open


def test_functions_begin_and_end_windows_by_themselves_once_they_are_armed() -> None:
    course = Course(start_on="call:step", stop_on="call:step", repeat=3)
    assert course.at(1) == ""
    assert course.attached.did == [(1, "arm", 3)]
    assert course.at(2, True, False, True) == ""
    assert course.windows.is_open
    assert course.at(5, False) == ""
    assert course.at(7, True, False) == "call:step"
    assert course.attached.did == [(1, "arm", 3)]
    assert course.windows.count == 3


def test_after_a_delay_functions_are_armed_for_one_window_at_a_time() -> None:
    course = Course(start_on="profiler", delay_ns=10, repeat=2)
    assert [course.at(9), course.at(10), course.at(11, True), course.at(12, False), course.at(21)] == [""] * 5
    assert course.attached.did == [(10, "arm", 1)]
    course.at(22)
    assert course.attached.did[1:] == [(22, "arm", 1)]


def test_a_duration_ends_what_a_function_began() -> None:
    course = Course(start_on="call:step", duration_ns=10)
    course.at(1)
    course.at(2, True)
    assert course.at(12) == "duration"
    assert course.attached.did == [(1, "arm", 1), (12, "DURATION", False)]


def test_a_call_that_asks_for_a_window_is_let_go_when_it_has_begun() -> None:
    course = Course(start_on="call:step", stop_on="call:step", repeat=2)
    course.at(1)
    course.attached.held_ns = 2
    course.at(3)
    assert course.windows.is_open
    course.attached.held_ns = 5  # by the call after the one that ended it, before this was seen
    course.at(6, False)
    assert course.windows.is_open
    assert course.attached.did == [
        (1, "arm", 2), (3, "START", True), (3, "let go"), (6, "START", True), (6, "let go")
    ]  # fmt: skip


@pytest.mark.parametrize("waited_ms", [4, 20], ids=["they follow", "they do not"])
def test_a_call_waits_until_libraries_in_the_command_have_followed(waited_ms: int) -> None:
    """And the recording does not end before the last of these calls; but no call waits for ever."""
    course, now_ms = Course(has_device=True, start_on="call:step", stop_on="call:step"), 10
    course.at(1)
    course.attached.held_ns = 2
    for begins in (True, False):
        course.attached.is_held, course.device.follows = not begins, False
        ended = [course.at(now_ms * 10**6, *([] if begins else [False]))]
        ended.append(course.at((now_ms + waited_ms - 1) * 10**6))
        assert (course.attached.held_ns, course.attached.is_held) == (2 if begins else None, not begins)
        course.device.follows = waited_ms < 20
        now_ms += waited_ms
        ended.append(course.at(now_ms * 10**6))
        assert (course.attached.held_ns, course.attached.is_held) == (None, False)
        assert ended == ["", "", "" if begins else "call:step"]
        now_ms += 10
    assert [did for did in course.attached.did if did[0] == "device"] == [
        ("device", "arm", 1), ("device", True), ("device", False)
    ]  # fmt: skip


def test_a_window_that_was_over_before_it_began_is_empty() -> None:
    course = Course(start_on="call:step", stop_on="call:step")
    course.at(1)
    course.attached.held_ns, course.attached.is_over = 2, True
    course.at(3)
    assert course.at(4) == "call:step"
    assert course.attached.did[1:] == [(3, "START", True), (3, "let go"), (3, "STOP", False)]


def test_probes_are_attached_ahead_of_a_window_that_comes_by_time_and_stay_for_a_while() -> None:
    course = Course(duration_ns=10**8, delay_ns=10**9, repeat=2)
    seen = {}
    for ms in (0, 99, 100, 749, 750, 1000, 1100, 1199, 1200, 1849, 1850):
        course.at(ms * 10**6)
        seen[ms] = course.attached.is_attached
    assert [ms for ms, is_attached in seen.items() if not is_attached] == [100, 749, 1200, 1849]
    assert [(did[0] // 10**6, did[-1]) for did in course.attached.did] == [(1000, True), (1100, False)]


def test_probes_stay_for_longer_where_windows_follow_each_other() -> None:
    course = Course(start_on="api")
    stayed_ms = []
    begin = 1000
    for pause in (400, 300, 2000, 50):
        course.say(begin * 10**6, begins=True)
        course.say((begin + 1) * 10**6, begins=False)
        attached = 0
        for ms in range(begin + 1, begin + pause):
            course.at(ms * 10**6)
            attached += course.attached.is_attached
        stayed_ms.append(attached)
        begin += pause
        course.attached.prepare()  # as the window that follows does
    # After each window: as long as the last pause was twice, or all the time to the next one.
    assert stayed_ms == [100, 299, 598, 49]


def attached_at(course: Course, calls_ms: list[int], until_ms: int) -> list[int]:
    """The milliseconds at which probes are attached, of a program that calls the function at those times."""
    found = []
    for ms in range(until_ms):
        course.attached.calls = course.device.calls = sum(at <= ms for at in calls_ms)
        course.at(ms * 10**6)
        found += [ms] if course.attached.is_attached else []
    return found


def test_probes_are_attached_ahead_of_the_call_that_is_expected() -> None:
    course = Course(start_on="call:step#20", stop_on="call:step")
    assert attached_at(course, [*range(190, 2000, 100)], 2000) == [*range(100), *range(1840, 2000)]
    course.at(2090 * 10**6, True, False)
    assert course.windows.count == 1


def test_a_range_is_expected_by_what_its_library_counts() -> None:
    course = Course(start_on="nvtx:step#20", has_device=True)
    assert attached_at(course, [*range(190, 2000, 100)], 2000) == [*range(100), *range(1840, 2000)]


def test_what_is_expected_follows_the_pace_of_the_last_calls() -> None:
    """The first one takes long; when probes are attached, a program that stops leaves them so."""
    calls = [500, 1500, *range(1510, 1600, 10), 3000]
    course = Course(start_on="call:step#50", stop_on="call:step")
    assert attached_at(course, calls, 4000) == [*range(100), *range(1730, 4000)]


def test_nothing_is_expected_of_a_function_that_is_called_once() -> None:
    assert attached_at(Course(start_on="profiler"), [500], 1000) == [*range(100)]
    assert attached_at(Course(start_on="nvtx:step#9", has_device=False), [500, 600, 700], 1000) == [
        *range(100)
    ]


def test_a_window_that_began_at_a_call_has_all_probes() -> None:
    """Though they were detached at that moment."""
    course = Course(start_on="call:step", repeat=2)
    course.at(10**9)
    assert not course.attached.is_attached
    course.at(2 * 10**9, True)
    assert course.attached.is_attached


def test_probes_are_detached_while_a_trigger_is_waited_for() -> None:
    course = Course(start_on="signal", repeat=2)
    assert [course.at(0), course.attached.is_attached] == ["", True]
    assert [course.at(10**9), course.attached.is_attached] == ["", False]
    course.attached.prepare()
    assert [course.at(2 * 10**9, signals=1), course.attached.is_attached] == ["", True]


def test_the_end_of_the_recording_ends_the_window_that_is_open() -> None:
    course = Course(start_on="profiler")
    course.at(1)
    course.at(2, True)
    course.attached.now_ns = 9
    course.windows.finish(9)
    assert course.attached.did[1:] == [(9, "END", False)]
    assert course.windows.length_ns == 7


def test_libraries_in_the_command_follow_what_they_do_not_see() -> None:
    course = Course(has_device=True, start_on="call:f", stop_on="call:f")
    course.at(1)
    course.at(2, True)
    course.at(4, False)
    assert course.attached.did == [
        (1, "arm", 1), ("device", "arm", 1), ("device", True), ("device", False)
    ]  # fmt: skip


def test_libraries_turn_by_themselves_what_they_see_and_are_followed_where_there_are_no_probes() -> None:
    course = Course(has_device=True, probed=False, start_on="nvtx:step")
    course.at(1)
    course.device.to_come = [Turn(2, True), Turn(3, False)]
    assert course.at(9) == "nvtx:step"
    assert course.attached.did == [
        (1, "arm", 1), ("device", "arm", 1), (9, "START", True), (9, "STOP", False)
    ]  # fmt: skip
    assert course.windows.length_ns == 1


def test_a_library_is_told_that_its_window_ended_before_it_was_seen_to_begin() -> None:
    """A step may come later than the window is long: a library that was left alone then recorded everything,
    and began no other window.
    """
    course = Course(40, probed=False, has_device=True, start_on="nvtx:step", stop_on="signal", repeat=2)
    course.at(1)
    course.device.to_come = [Turn(10, begins=True)]
    assert course.at(110) == ""
    assert (course.windows.is_open, course.windows.count) == (False, 1)
    assert course.attached.did[-1] == ("device", False)
    course.device.to_come = [Turn(120, begins=True)]
    course.at(130)
    assert (course.windows.is_open, course.attached.did.count(("device", False))) == (True, 1)


def test_a_window_that_only_a_library_has_open_is_closed() -> None:
    """The probes' record of what began it came with the next step, in which the window was over."""
    course = Course(5_000_000, has_device=True, start_on="nvtx:step", stop_on="signal", repeat=2)
    course.at(1)
    course.device.to_come = [Turn(10, begins=True)]
    course.at(20)
    course.attached.now_ns = 60_000_000
    course.attached.to_come = [Turn(10, begins=True)]
    course.windows.step(60_000_000, 0)
    assert (course.windows.is_open, course.windows.count) == (False, 1)
    assert course.attached.did[-1] == ("device", False)
    # The next one has as long to be seen here as the first one had.
    course.device.to_come = [Turn(61_000_000, begins=True)]
    course.at(62_000_000)
    course.at(66_000_000)
    assert course.attached.did.count(("device", False)) == 1
    course.at(67_000_000)
    assert course.attached.did.count(("device", False)) == 2


def test_windows_that_only_a_library_saw_are_not_missing_in_the_end() -> None:
    """Otherwise it begins no more of them, and the recording waits for the last ones forever."""
    course = Course(5_000_000, has_device=True, start_on="nvtx:step", stop_on="signal", repeat=3)
    course.at(1)
    for ms in (10, 20):
        course.device.to_come = [Turn(ms * 1_000_000, begins=True)]
        course.at(ms * 1_000_000)
        course.at((ms + 6) * 1_000_000)
        assert course.attached.did[-1] == ("device", False)
        assert (course.windows.count, course.device.left) == (0, 3)
    course.at(30_000_000, True)
    course.at(36_000_000)
    assert (course.windows.count, course.device.left) == (1, 2)


def test_after_a_delay_a_library_begins_one_window_at_a_time() -> None:
    course = Course(5, has_device=True, start_on="nvtx:step", delay_ns=50, repeat=3)
    course.at(60)
    course.device.to_come = [Turn(70, begins=True)]
    course.at(70, True)
    course.at(80)
    course.at(10_000_000)
    assert (course.windows.count, course.device.left) == (1, None)


def test_a_library_that_did_not_turn_its_window_by_itself_is_asked_to() -> None:
    course = Course(has_device=True, start_on="nvtx:step")
    course.at(0)
    course.at(2, True)
    course.at(4_000_000)
    assert ("device", True) not in course.attached.did
    course.at(5_000_002)
    assert course.attached.did[-1] == ("device", True)


def test_a_library_that_has_turned_is_left_alone() -> None:
    course = Course(has_device=True, start_on="nvtx:step")
    course.at(0)
    course.device.to_come = [Turn(2, True), Turn(3, False)]
    course.at(2, True)
    course.at(9_000_000)
    assert [did for did in course.attached.did if did[0] == "device"] == [("device", "arm", 1)]


@pytest.mark.parametrize(
    ("windows", "note"),
    [
        ({"delay_ns": 50}, "The recording ended before --delay had passed: nothing was recorded."),
        ({"start_on": "call:f#3"}, "call:f#3 did not happen: nothing was recorded."),
        ({"start_on": "signal", "delay_ns": 5}, "signal did not happen after --delay: nothing was recorded."),
    ],
)
def test_without_a_window_what_was_waited_for_is_reported(windows: dict[str, Any], note: str) -> None:
    course = Course(**windows)
    course.at(10)
    message, hint = course.windows.why_none()
    assert message == note
    assert hint.endswith(".")
