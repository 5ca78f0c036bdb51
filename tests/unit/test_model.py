"""The types that all stages share."""

from __future__ import annotations

import pytest

from tracepipe.event.checks import first_fault
from tracepipe.event.model import (
    HOST_LAYERS,
    LAYERS,
    RECORDS,
    SCHEMA_VERSION,
    Batch,
    Problem,
    Shape,
    SharedArgs,
    new_header,
    timed,
)
from tracepipe.layout.timeline import Track


def test_a_new_header_is_a_good_one() -> None:
    header = new_header(clock="monotonic", tool="tracepipe 1")
    assert first_fault(header) is None
    assert header["schema"] == SCHEMA_VERSION


def test_every_layer_has_its_record() -> None:
    assert set(LAYERS) <= set(RECORDS)
    assert set(LAYERS) > HOST_LAYERS
    assert set(RECORDS) - set(LAYERS) == {"header", "clock", "loss", "footer"}


def test_a_record_gives_up_its_time() -> None:
    record = {"type": "kernel", "name": "f", "phase": "B", "ts_ns": 7, "tid": 3}
    ts_ns, shape = timed(record)
    assert ts_ns == 7
    assert (shape.type, shape.name, shape.phase, shape.tid, shape.pid) == ("kernel", "f", "B", 3, None)
    assert "ts_ns" not in shape.record
    assert timed({"type": "loss", "count": 1})[0] == -1


@pytest.mark.parametrize(
    ("fields", "plain"),
    [
        ({"type": "kernel"}, True),
        ({"type": "userspace", "dur_ns": 4, "launch": 2}, True),
        ({"type": "kernel", "clock": "boottime"}, False),
        ({"type": "kernel", "comm": "bash"}, False),
        ({"type": "gpu_kernel"}, False),
        ({"type": "loss", "count": 1}, False),
    ],
)
def test_a_shape_is_plain_if_only_the_time_of_its_events_differs(
    fields: dict[str, object], plain: bool
) -> None:
    assert Shape(fields).plain is plain


def test_a_batch_gives_what_was_parsed_and_what_was_not() -> None:
    parsed = timed({"type": "kernel", "name": "f", "phase": "B", "ts_ns": 1})
    batch = Batch(records=[{"type": "kernel", "name": "g", "phase": "E", "ts_ns": 2}], events=[parsed])
    assert [(ts_ns, shape.name) for ts_ns, shape in batch.take()] == [(1, "f"), (2, "g")]
    assert batch.records == []


def test_shared_arguments_are_arguments() -> None:
    shared = SharedArgs({"size": 4})
    assert shared == {"size": 4}
    assert shared.written is None


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem(17, "ts_ns", "is missing"), "run.jsonl:17: ts_ns: is missing"),
        (Problem(17, "", "is not JSON"), "run.jsonl:17: is not JSON"),
        (Problem(0, "", "is damaged"), "run.jsonl: is damaged"),
    ],
)
def test_a_problem_names_its_place(problem: Problem, text: str) -> None:
    assert problem.at("run.jsonl") == text


def test_a_track_has_a_path_of_labels() -> None:
    process = Track(1, None, "process", "app", pid=7)
    thread = Track(2, process, "thread", "app", pid=7, tid=8)
    assert Track(3, thread, "slices", "CUDA API", pid=7, tid=8).path() == ("app 7", "app 8", "CUDA API")
    assert Track(1, None, "process", "process (pid not recorded)").label() == "process (pid not recorded)"
