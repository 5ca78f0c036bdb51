"""What is made of the records of annotations, also where some were lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.gpu_records import annotation_renderer, pack_record
from tracepipe.event.model import RANGE_LIMIT
from tracepipe.tracer.gpu.engines.annotations import (
    BEGUN,
    DEPTH_UNKNOWN,
    ENDED,
    LABEL,
    AnnotationKind,
    Label,
)
from tracepipe.tracer.gpu.engines.channel import CROWDED, Kind

PID, TID, DATA = 42, 43, 4096


def begun(
    kind: int,
    name: str,
    number: int = 0,
    domain: int = 0,
    *,
    pid: int = PID,
    tid: int = TID,
    at_ns: int = 1000,
) -> bytes:
    payload = BEGUN.pack(domain, 0, number, bytes(8), 0, 0, 0, 0, 0) + name.encode()
    return pack_record(kind, pid, tid, at_ns, payload)


def ended(
    kind: int, number: int, domain: int = 0, *, pid: int = PID, tid: int = TID, at_ns: int = 1000
) -> bytes:
    return pack_record(kind, pid, tid, at_ns, ENDED.pack(domain, number))


def lines(*packed: bytes) -> list[dict[str, Any]]:
    texts = annotation_renderer().render(b"".join(packed)).texts
    return [json.loads(line) for line in texts]


def shown(*packed: bytes) -> list[str]:
    """The events in short: `B outer`."""
    return [f"{event['phase']} {event['name']}" for event in lines(*packed)]


def test_a_pop_ends_what_was_pushed_last_on_its_thread_and_in_its_domain() -> None:
    events = [
        begun(AnnotationKind.PUSH, "outer", 0),
        begun(AnnotationKind.PUSH, "of data", 0, DATA),
        begun(AnnotationKind.PUSH, "elsewhere", 0, tid=44),
        begun(AnnotationKind.PUSH, "inner", 1),
    ]
    ends = [
        ended(AnnotationKind.POP, 0, DATA),
        ended(AnnotationKind.POP, 1),
        ended(AnnotationKind.POP, 0),
        ended(AnnotationKind.POP, 0, tid=44),
    ]
    assert shown(*events, *ends)[4:] == ["E of data", "E inner", "E outer", "E elsewhere"]


def test_a_lost_push_leaves_those_around_it_as_they_are() -> None:
    events = [begun(AnnotationKind.PUSH, "outer", 0), begun(AnnotationKind.PUSH, "innermost", 2)]
    ends = [ended(AnnotationKind.POP, 2), ended(AnnotationKind.POP, 1), ended(AnnotationKind.POP, 0)]
    assert shown(*events, *ends) == ["B outer", "B innermost", "E innermost", "E outer"]


def test_a_lost_pop_is_made_up_for_by_the_next_record_that_shows_it() -> None:
    pushes = [begun(AnnotationKind.PUSH, "outer", 0), begun(AnnotationKind.PUSH, "inner", 1)]
    assert shown(*pushes, ended(AnnotationKind.POP, 0))[2:] == ["E inner", "E outer"]
    assert shown(*pushes, begun(AnnotationKind.PUSH, "next", 1))[2:] == ["E inner", "B next"]


def test_a_pop_without_a_push_is_nothing() -> None:
    assert (
        shown(
            ended(AnnotationKind.POP, 0),
            ended(AnnotationKind.POP, DEPTH_UNKNOWN),
            ended(AnnotationKind.END, 7),
        )
        == []
    )


def test_depths_that_the_library_does_not_know_are_those_of_what_came() -> None:
    unknown = DEPTH_UNKNOWN
    pushes = [begun(AnnotationKind.PUSH, "outer", unknown), begun(AnnotationKind.PUSH, "inner", unknown)]
    assert shown(*pushes, ended(AnnotationKind.POP, unknown), ended(AnnotationKind.POP, unknown))[2:] == [
        "E inner",
        "E outer",
    ]


def test_ranges_of_a_process_that_are_open_at_a_time_have_different_numbers() -> None:
    events = lines(
        begun(AnnotationKind.START, "first", 1),
        begun(AnnotationKind.START, "second", 2),
        begun(AnnotationKind.START, "elsewhere", 1, pid=50),
        ended(AnnotationKind.END, 1),
        begun(AnnotationKind.START, "third", 3),
        begun(AnnotationKind.START, "fourth", 4),
        ended(AnnotationKind.END, 2),
        ended(AnnotationKind.END, 4, tid=44),
    )
    numbers = [(event["name"], event["phase"], event["range"]) for event in events]
    assert numbers == [
        ("first", "B", 0),
        ("second", "B", 1),
        ("elsewhere", "B", 0),
        ("first", "E", 0),
        ("third", "B", 0),
        ("fourth", "B", 2),
        ("second", "E", 1),
        ("fourth", "E", 2),
    ]


def test_what_is_open_is_bounded_and_what_ends_makes_room() -> None:
    many = [begun(AnnotationKind.START, "range", number) for number in range(RANGE_LIMIT + 2)]
    assert [line["reason"] for line in lines(*many) if line["type"] == "loss"] == [CROWDED]
    deep = [begun(AnnotationKind.PUSH, "range", depth) for depth in range(600)]
    assert [line["count"] for line in lines(*deep) if line["type"] == "loss"] == [600 - 512]
    renderer = annotation_renderer()
    renderer.recording.memory.left_bytes = 8192
    steps = [
        record
        for _ in range(100)
        for record in (begun(AnnotationKind.PUSH, "step"), ended(AnnotationKind.POP, 0))
    ]
    assert len(renderer.render(b"".join(steps)).texts) == 200


def test_labels_name_what_comes_after_them() -> None:
    domain = pack_record(AnnotationKind.LABEL, PID, TID, 1, LABEL.pack(Label.DOMAIN, 0, 0, DATA) + b"data")
    text = pack_record(AnnotationKind.LABEL, PID, TID, 1, LABEL.pack(Label.TEXT, 0, DATA, 8192) + b"epoch")
    mark = pack_record(AnnotationKind.MARK, PID, TID, 1, BEGUN.pack(DATA, 8192, 0, bytes(8), 0, 0, 0, 5, 0))
    (event,) = lines(domain, text, mark)
    assert (event["domain"], event["name"], event["args"]) == ("data", "epoch", {"category": 5})
    thread = pack_record(AnnotationKind.LABEL, PID, TID, 1, LABEL.pack(Label.THREAD, 0, 0, 99) + b"loader")
    (event,) = lines(thread)
    assert (event["tid"], event["comm"]) == (99, "loader")


def test_frames_of_python_are_one_argument_with_the_innermost_first() -> None:
    frames = "/home/me/models/net.py:41 Net.forward\n/lib/modules/module.py:9 größe\nmain.py:3 <module>\n"
    stack = pack_record(
        AnnotationKind.LABEL, PID, TID, 1, LABEL.pack(Label.STACK, 0, 0, 77) + frames.encode()
    )
    mark = pack_record(AnnotationKind.MARK, PID, TID, 1, BEGUN.pack(0, 0, 0, bytes(8), 0, 0, 0, 0, 77) + b"x")
    (event,) = lines(stack, mark)
    assert event["args"] == {
        "python": "models/net.py:41 Net.forward, modules/module.py:9 größe, main.py:3 <module>"
    }


def test_a_fork_has_the_handles_of_its_parent_as_they_were() -> None:
    def domain(pid: int, name: bytes) -> bytes:
        return pack_record(AnnotationKind.LABEL, pid, pid, 1, LABEL.pack(Label.DOMAIN, 0, 0, DATA) + name)

    fork = pack_record(AnnotationKind.LABEL, 50, 50, 1, LABEL.pack(Label.FORK, 0, 0, PID))
    marks = [begun(AnnotationKind.MARK, "mark", 0, DATA, pid=pid) for pid in (50, PID)]
    events = lines(domain(PID, b"data"), fork, domain(PID, b"later"), *marks)
    assert [event["domain"] for event in events] == ["data", "later"]
    unknown = lines(fork, marks[0])
    assert [event["domain"] for event in unknown] == [f"domain {DATA:#x}"]


@pytest.mark.parametrize("first", [True, False])
def test_records_of_both_libraries_of_a_process_are_distinguished(first: bool) -> None:
    own, other = begun(AnnotationKind.MARK, "mark"), pack_record(Kind.NOTE, PID, TID, 1, b"a note")
    renderer = annotation_renderer(kernels=True)
    chunk = own + other + own if first else other + own + other
    assert renderer.counts(chunk) == {"annotation": 2 if first else 1}
    assert len(renderer.render(chunk).texts) == (2 if first else 1)
    assert renderer.notes == ["a note"]


def test_a_record_of_a_library_that_was_not_loaded_is_a_loss() -> None:
    renderer = annotation_renderer()
    renderer.render(pack_record(Kind.NOTE, PID, TID, 1, b"x"))
    assert renderer.losses == {"unknown": 1} and renderer.notes == []
