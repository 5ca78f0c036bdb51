"""Annotations on streams: from the first work that was launched in a range to the last, and nested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import trace_batch
from tests.support.cores import new_tables
from tests.support.recordings import event
from tests.support.timeline_text import shown
from tracepipe.event.model import Header
from tracepipe.layout import ranges_on_gpu
from tracepipe.layout.draw import Layout
from tracepipe.layout.timeline import BEGIN

pytestmark = pytest.mark.usefixtures("core")


def laid_out(records: Iterable[dict[str, Any]]) -> list[Any]:
    tables = new_tables()
    layout = Layout(Header(), tables)
    return [layout.place(trace_batch(list(records), tables)), *layout.finish()]


def ranges(*records: dict[str, Any]) -> list[str]:
    """The lines of tracks that annotations have on streams."""
    lines, wanted = [], False
    for line in shown(laid_out(records)):
        if not line[0].isdigit():
            wanted = ": annotations of " in line
        if wanted:
            lines.append(line)
    return lines


def begin(at: int, name: str, **more: Any) -> dict[str, Any]:
    return event("B", at, name, "annotation", **more)


def end(at: int, name: str, **more: Any) -> dict[str, Any]:
    return event("E", at, name, "annotation", **more)


def whole(at: int, dur_ns: int, name: str, **more: Any) -> dict[str, Any]:
    return event("X", at, name, "annotation", dur_ns=dur_ns, **more)


def launch(at: int, id: int, **more: Any) -> dict[str, Any]:
    return event("I", at, "cuLaunchKernel", launch=id, **more)


def kernel(at: int, id: int, dur_ns: int = 10, stream: int = 7) -> dict[str, Any]:
    of = {"type": "gpu_kernel", "name": "k", "phase": "X", "gpu": 0, "pid": 1}
    return of | {"ts_ns": at, "dur_ns": dur_ns, "stream": stream, "launch": id}


def test_a_range_reaches_from_its_first_work_to_its_last() -> None:
    assert ranges(
        begin(100, "step"),
        begin(101, "forward"),
        launch(102, 1),
        launch(103, 2),
        end(104, "forward"),
        launch(105, 3),
        end(106, "step"),
        launch(107, 4),
        kernel(200, 1),
        kernel(250, 2),
        kernel(300, 3),
        kernel(400, 4),
    ) == [
        "stream 7: annotations of thread 1",
        "200+110 step",
        "200+60 >forward",
    ]


def test_each_stream_thread_and_domain_has_a_track() -> None:
    assert ranges(
        begin(100, "a"),
        begin(101, "b", domain="data"),
        begin(102, "c", tid=2),
        launch(103, 1),
        launch(104, 2),
        launch(105, 3, tid=2),
        kernel(200, 1),
        kernel(300, 2, stream=8),
        kernel(400, 3),
    ) == [
        "stream 7: annotations of thread 1",
        "200+10 a",
        "stream 7: annotations of thread 1: data",
        "200+10 b",
        "stream 7: annotations of thread 2",
        "400+10 c",
        "stream 8: annotations of thread 1",
        "300+10 a",
        "stream 8: annotations of thread 1: data",
        "300+10 b",
    ]


def test_a_range_that_is_one_event_is_drawn_as_one_with_a_begin_and_an_end() -> None:
    """Of those that begin at one time the longest is around the others, whatever the order of the file."""
    assert ranges(
        whole(100, 3, "forward"),
        whole(100, 9, "step"),
        launch(100, 1),
        launch(102, 2),
        launch(103, 3),
        whole(104, 90, "crosses"),
        launch(108, 4),
        launch(109, 5),
        kernel(200, 1),
        kernel(250, 2),
        kernel(300, 3),
        kernel(400, 4),
        kernel(500, 5),
    ) == [
        "stream 7: annotations of thread 1",
        "200+210 step",
        "200+60 >forward",
        "400+10 >crosses",
    ]


def test_operators_and_ranges_that_the_recording_has_on_the_gpu_are_not_drawn_there() -> None:
    launched = [launch(101, 1), kernel(200, 1)]
    assert ranges(whole(100, 9, "aten::mm", domain="cpu_op"), *launched) == []
    gpu = whole(199, 12, "step", pid=50, tid=7) | {"type": "hook", "layer": "gpu_user_annotation"}
    assert ranges(whole(100, 9, "step"), launched[0], gpu, launched[1]) == []
    assert ranges(begin(99, "step"), launched[0], gpu, launched[1])[1:] == ["200+10 step"]


def test_work_outside_the_ranges_of_its_thread_draws_nothing() -> None:
    of_process = begin(100, "of the process", range=0)
    assert ranges(of_process, launch(101, 1), kernel(200, 1)) == []
    assert ranges(launch(100, 1), begin(101, "late"), kernel(200, 1), launch(201, 2)) == []
    assert ranges(begin(100, "a", tid=2), launch(101, 1), kernel(200, 1), kernel(300, 9)) == []


def test_a_launch_id_that_comes_again_is_another_launch() -> None:
    again = [launch(300, 1), kernel(400, 1)]
    found = ranges(begin(100, "a"), launch(101, 1), end(102, "a"), kernel(200, 1), *again)
    assert found[1:] == ["200+10 a"]


def test_an_end_closes_what_is_open_in_its_range() -> None:
    found = ranges(
        begin(100, "a"), begin(101, "lost"), end(102, "a"), end(103, "never"), launch(104, 1), kernel(200, 1)
    )
    assert found == []


def test_launches_without_work_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_on_gpu, "LAUNCHES_MAX", 4)
    found = ranges(
        begin(100, "a"), *(launch(101 + at, at) for at in range(6)), kernel(200, 0), kernel(300, 5)
    )
    assert found[1:] == ["300+10 a"]


def test_ranges_beyond_the_drawn_depth_belong_to_the_deepest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges_on_gpu, "DEPTH_MAX", 2)
    opened = [begin(100 + at, f"r{at}") for at in range(4)]
    found = ranges(*opened, launch(110, 1), kernel(200, 1))
    assert [line.split()[1] for line in found[1:]] == ["r0", ">r1"]


@given(st.lists(st.tuples(st.sampled_from("([)LLL"), st.integers(0, 2)), max_size=40))
def test_ranges_are_those_of_what_was_launched_in_them(steps: list[tuple[str, int]]) -> None:
    records, open_, kernels, expected = [], [], [], dict[str, list[int]]()
    for at, (what, stream) in enumerate(steps):
        if what == "L":
            start_ns = 10_000 + 20 * at
            records.append(launch(1_000 + at, at))
            kernels.append(kernel(start_ns, at, 10, stream))
            for name in open_:
                expected.setdefault(f"{stream} {name}", [start_ns, 0])[1] = start_ns + 10
        elif what == ")":
            if open_:
                records.append(end(1_000 + at, open_.pop()))
        else:
            open_.append(f"r{at}")
            records.append(begin(1_000 + at, open_[-1]))
    found: dict[str, list[int]] = {}
    begun: dict[int, list[str]] = {}
    for item in (item for part in laid_out(records + kernels) for item in part.items()):
        if ": annotations of " not in item.track.name:
            continue
        stream = item.track.name.split(":")[0].removeprefix("stream ")
        stack = begun.setdefault(item.track.id, [])
        if item.kind == BEGIN:
            stack.append(f"{stream} {item.name}")
            assert stack[-1] not in found
            found[stack[-1]] = [item.ts_ns]
        else:
            assert stack[-1] == f"{stream} {item.name}"
            found[stack.pop()].append(item.ts_ns)
    assert found == expected
