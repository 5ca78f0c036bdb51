"""Stacks of Python: how they are read, what is kept of them, and where their lines are shown."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tracepipe
from tests.support.recordings import event, span, write
from tracepipe.event import stacks
from tracepipe.event.columns import NONE, SPECIAL, event_columns
from tracepipe.event.shape import Shape
from tracepipe.event.stacks import Frame, LaunchStacks, Stacks
from tracepipe.event.tables import Tables
from tracepipe.readers import tracepipe1
from tracepipe.recording.convert import Conversion, ConversionOptions, check

pytestmark = pytest.mark.usefixtures("core")
TRAIN = "/home/ann/model/train.py"
TORCH = "/usr/lib/python3/dist-packages/torch/nn/modules/linear.py"


def frame(function: str, file: str = TRAIN, line: int = 41) -> dict[str, Any]:
    return {"function": function, "file": file, "line": line}


def stack(id: int, *frames: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "stack", "id": id, "frames": list(frames), **more}


def messages_of(path: Path) -> list[str]:
    messages: list[str] = []
    check(str(path), "", messages.append)
    return [one.partition("run.jsonl:")[2] for one in messages]


def text_of(path: Path) -> str:
    from tracepipe.converters import CONVERTERS

    out = io.BytesIO()
    Conversion(str(path), CONVERTERS["text"], ConversionOptions()).run(out)
    return out.getvalue().decode()


def own_of(*frames: dict[str, Any]) -> Frame | None:
    some = Stacks()
    assert some.add(stack(1, *frames), 2)
    (own,) = some.own(np.zeros(1, np.int64)).tolist()
    return None if own == NONE else some.frames[own]


# What is the user's ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "library",
    [
        TORCH,
        "/home/ann/.venv/lib/python3.12/site-packages/transformers/trainer.py",
        "/usr/lib/python3.12/threading.py",
        "/usr/lib64/python3.9/contextlib.py",
        "<frozen runpy>",
        "<eval_with_key>.7",
        "/tmp/torchinductor_ann/ab/cab.py",
        "/home/ann/pytorch/torch/nn/functional.py",
        "/home/ann/pytorch/torch/_ops.py",
    ],
)
def test_the_user_s_line_is_the_innermost_that_no_library_has(library: str) -> None:
    own = own_of(frame("forward", library), frame("step"), frame("<module>"))
    assert own == Frame("step", TRAIN, 41)


@pytest.mark.parametrize("own", ["<stdin>", "/home/ann/torch/train.py", "train.py", "/srv/python3/job.py"])
def test_what_only_looks_like_a_library_is_the_user_s(own: str) -> None:
    assert own_of(frame("forward", TORCH), frame("step", own), frame("<module>")) == Frame("step", own, 41)


def test_the_innermost_line_stands_for_a_stack_of_libraries_alone() -> None:
    assert own_of(frame("forward", TORCH), frame("main", "<frozen runpy>")) == Frame("forward", TORCH, 41)
    assert own_of() is None


@pytest.mark.parametrize(
    ("shown", "given"),
    [
        ("model/train.py:41 step", Frame("step", TRAIN, 41)),
        ("train.py:41 step", Frame("step", "train.py", 41)),
        ("train.py:41 step", Frame("step", "/train.py", 41)),
        ("train.py step", Frame("step", "train.py")),
        ("step", Frame("step")),
    ],
)
def test_a_frame_is_shown_with_its_folder(shown: str, given: Frame) -> None:
    assert str(given) == shown


# Reading ---------------------------------------------------------------------------------------------------


def test_events_that_name_an_unknown_stack_are_kept_and_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.jsonl",
        event("I", 2_000, "early", stack=7),
        stack(7, frame("step")),
        event("I", 2_001, "known", stack=7),
        event("I", 2_002, "unknown", stack=8),
    )
    message = "refers to stack {}, which no line before has"
    assert messages_of(path) == [f"2: stack: {message.format(7)}", f"5: stack: {message.format(8)}"]
    with tracepipe.open(path) as events:
        assert [(one.name, one.stack) for one in events] == [
            ("early", None),
            ("known", (Frame("step", TRAIN, 41),)),
            ("unknown", None),
        ]


def test_order_is_that_of_lines_however_few_are_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [event("I", 2_000 + at, "f", stack=at // 2) for at in range(40)]
    records = [
        one for at in range(20) for one in (lines[2 * at], stack(at, frame(f"f{at}")), lines[2 * at + 1])
    ]
    path = write(tmp_path / "run.jsonl", *records)
    whole = messages_of(path)
    assert len(whole) == 20
    monkeypatch.setattr(tracepipe1, "CHUNK_BYTES", 200)
    assert messages_of(path) == whole


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (stack(7, frame("other")), "3: id: is that of an earlier stack, which is kept"),
        ({"type": "stack", "id": 8}, "3: frames: is missing"),
        (stack(8, {"file": TRAIN}), "3: frames[0]: .function is missing"),
        (stack(8, frame("f", line=-1)), "3: frames[0]: .line must be at least 0, not -1"),
        (stack(-1), "3: id: must be at least 0, not -1"),
        (event("I", 2_000, "f", stack="7"), "3: stack: must be an integer, not '7'"),
        (event("I", 2_000, "f", stack=1 << 63), f"3: stack: must be at most {(1 << 63) - 1}"),
    ],
)
def test_a_bad_line_is_named_and_skipped(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    after = event("I", 2_001, "known", stack=7)
    path = write(tmp_path / "run.jsonl", stack(7, frame("step")), record, after)
    assert messages_of(path) == [message]
    with tracepipe.open(path) as events:
        assert [one.stack and one.stack[0].function for one in events] == ["step"]


def test_stacks_are_not_events(tmp_path: Path) -> None:
    footer = {"type": "footer", "counts": {"userspace": 1}, "losses": {}}
    call = event("I", 2_000, "f", stack=1)
    path = write(tmp_path / "run.jsonl", stack(1, frame("step")), call, footer)
    account = check(str(path), "", lambda _: None)
    assert (dict(account.counts), account.notes) == ({"userspace": 1}, [])


# What is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", ["STACKS_MAX", "FRAMES_MAX", "PLACES_MAX", "TEXT_BYTES_MAX"])
def test_stacks_beyond_what_is_kept_are_counted(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, limit, 500 if limit == "TEXT_BYTES_MAX" else 3)
    records = [stack(at, frame(f"f{at}"), frame("step")) for at in range(9)]
    calls = [event("I", 2_000 + at, "f", stack=at) for at in range(9)]
    path = write(tmp_path / "run.jsonl", *records, *calls)
    assert messages_of(path) == []
    with tracepipe.open(path) as events:
        kept = [one.stack for one in events]
        known = [one for one in kept if one is not None]
        assert [one[0].function for one in known] == [f"f{at}" for at in range(len(known))]
        assert 0 < len(known) < 9
        (note,) = events.account.notes[:1]
    assert note == f"{9 - len(known)} stacks are left out: there are more than can be kept"


def test_the_inner_end_of_a_deep_stack_is_kept() -> None:
    some = Stacks()
    some.add(stack(1, *(frame(f"f{at}") for at in range(1_000)), omitted=5), 2)
    assert [some.frames[at].function for at in some.frames_of(0)] == [f"f{at}" for at in range(256)]
    assert some.omitted(0) == 744 + 5


def test_long_texts_are_cut() -> None:
    own = own_of(frame("é" * 5_000, "x" * 5_000))
    assert own is not None and own.file is not None
    assert (len(own.function.encode()), len(own.file)) == (4096, 4096)


# Where they are shown --------------------------------------------------------------------------------------


def launch(at: int, id: int, **more: Any) -> dict[str, Any]:
    return span(at, at + 5, "cuLaunchKernel", launch=id, **more)


def kernel(at: int, id: int, **more: Any) -> dict[str, Any]:
    return {
        "ts_ns": at, "type": "gpu_kernel", "name": f"k{id}", "phase": "X", "dur_ns": 9, "gpu": 0, "stream": 7,
        "launch": id, "pid": 1, **more,
    }  # fmt: skip


def test_a_call_and_its_kernel_show_the_line(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.jsonl",
        stack(1, frame("forward", TORCH), frame("step")),
        launch(2_000, 3, stack=1, args={"flags": 1}),
        kernel(2_010, 3),
        launch(2_020, 4),
        kernel(2_030, 4),
    )
    text = text_of(path)
    assert "cuLaunchKernel flags=1 python=model/train.py:41 step" in text
    assert "k3 python=model/train.py:41 step launch=3" in text
    assert "k4 launch=4" in text
    assert text.count("python=") == 2


def test_a_launch_id_that_comes_again_is_another_launch(tmp_path: Path) -> None:
    path = write(
        tmp_path / "run.jsonl",
        stack(1, frame("first")),
        stack(2, frame("second")),
        launch(2_000, 3, stack=1),
        kernel(2_010, 3),
        launch(2_100, 3, stack=2),
        kernel(2_110, 3),
        launch(2_200, 3),
        kernel(2_210, 3),
    )
    kernels = [line for line in text_of(path).splitlines() if " k3 " in line]
    assert [line.partition("python=")[2].split()[:2] for line in kernels] == [
        ["model/train.py:41", "first"],
        ["model/train.py:41", "second"],
        [],
    ]


def test_the_oldest_launch_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "LAUNCHES_MAX", 2)
    calls = [launch(2_000 + 10 * at, at, stack=1) for at in range(3)]
    works = [kernel(2_100 + 10 * at, at) for at in range(3)]
    with tracepipe.open(write(tmp_path / "run.jsonl", stack(1, frame("step")), *calls, *works)) as events:
        of_work = [one.stack is not None for one in events if one.layer == "gpu_kernel"]
    assert of_work == [False, True, True]


def test_records_that_are_not_events_have_no_stack_where_no_shape_is_known() -> None:
    columns = event_columns([(0, SPECIAL, NONE, 0, 0, None, 3)])
    LaunchStacks(Tables()).give(columns)
    assert columns.stack is not None and columns.stack.tolist() == [3]


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(NONE, 3)), max_size=30),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_work_has_the_stack_of_the_last_call_of_its_launch(
    events: list[tuple[bool, int, int]], cuts: list[int]
) -> None:
    tables = Tables()
    call, work = (
        tables.number_of(Shape(of, "f", "X", gpu=0, has_launch=True)) for of in ("userspace", "gpu_kernel")
    )
    expected, of_launch = [], dict[int, int]()
    for is_call, id, number in events:
        if is_call:
            of_launch[id] = number
        own = number != NONE or is_call
        expected.append(number if own else of_launch.get(id, NONE))
    given, found = LaunchStacks(tables), []
    bounds = [0, *sorted(min(cut, len(events)) for cut in cuts), len(events)]
    for first, end in pairwise(bounds):
        rows = [(0, call if is_call else work, NONE, 0, id, None, number) for is_call, id, number in events]
        columns = event_columns(rows[first:end])
        given.give(columns)
        found += [NONE] * len(columns) if columns.stack is None else columns.stack.tolist()
    assert found == expected


@pytest.mark.parametrize(
    ("args", "shown"),
    [
        ({}, {"python": "model/train.py:41 step"}),
        ({"a": "\\é"}, {"a": "\\é", "python": "model/train.py:41 step"}),
        ({"python": "its own"}, {"python": "its own"}),
        ({"big": 1 << 63}, {"big": str(1 << 63), "python": "model/train.py:41 step"}),
    ],
)
def test_a_line_stands_among_any_arguments(
    args: dict[str, Any], shown: dict[str, Any], tmp_path: Path
) -> None:
    call = span(2_000, 2_005, "f", stack=1, **({"args": args} if args else {}))
    path = write(tmp_path / "run.jsonl", stack(1, frame("step")), call)
    trace = tmp_path / "run.json"
    tracepipe.convert(path, trace, "chrome")
    events = json.loads(trace.read_text())["traceEvents"]
    (drawn,) = [one["args"] for one in events if one["name"] == "f" and one["ph"] == "B"]
    assert drawn == shown


def test_a_stack_without_frames_shows_nothing(tmp_path: Path) -> None:
    text = text_of(write(tmp_path / "run.jsonl", stack(1), span(2_000, 2_005, "f", stack=1)))
    assert "python" not in text


def test_ids_in_any_order_find_their_stacks() -> None:
    some = Stacks()
    for id in (5, 0, (1 << 63) - 1):
        assert some.add(stack(id, frame(f"f{id}")), 2)
    ids = np.array([0, NONE, (1 << 63) - 1, 5, 4], np.int64)
    numbers, unknown = some.numbers(ids, np.full(5, 9))
    assert numbers.tolist() == [1, NONE, 2, 0, NONE]
    assert unknown.tolist() == [False, False, False, False, True]
