"""The text rendering: what a person, and the golden tests, see of a timeline."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from tests.support.drawing import Drawing, item, renamed
from tracepipe.converters.text import TextWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import BEGIN, COUNTER, END, INSTANT, Item, Track

pytestmark = pytest.mark.usefixtures("core")


def rendered(declared: Sequence[Track], *items: Item, start_ns: int = 1_000) -> list[str]:
    out = io.BytesIO()
    writer = TextWriter(out, TraceInfo("monotonic", {"trace_ns": start_ns}))
    writer.write(Drawing().drawn(items, declared))
    writer.finish()
    return out.getvalue().decode().splitlines()


def test_a_timeline_reads_as_a_tree() -> None:
    process = Track(1, None, "process", "vec_add", pid=42)
    thread = Track(2, process, "thread", "vec_add", pid=42, tid=43)
    memory = Track(3, thread, "counter", "device memory", rank=9, unit="bytes")
    calls = Track(4, thread, "slices", "CUDA API", rank=1)
    assert rendered(
        (process, thread, memory, calls),
        item(BEGIN, calls, 1_000, "outer", {"cpu": 1, "none": None}, (-2,)),
        item(BEGIN, calls, 1_250, "inner", {"args": [1, "x"]}, (2, -5)),
        item(INSTANT, calls, 1_300, "here"),
        item(END, calls, 1_400, "", {"result": 0}),
        item(END, calls, 2_000),
        item(COUNTER, memory, 1_100, 4_096),
    ) == [
        "trace clock monotonic, start 1000 ns",
        "process vec_add 42",
        "  thread vec_add 43",
        "    CUDA API",
        "                 0 +     1000  outer cpu=1 →2",
        '               250 +      150    inner args=[1,"x"] result=0 ←2 →5',
        "               300                 here",
        "    device memory [bytes]",
        "               100  4096",
        "2 tracks, 2 slices, 1 instant, 1 count",
    ]


def test_operations_of_a_track_are_put_in_order_of_time() -> None:
    track = Track(1, None, "slices", "t")
    items = [item(INSTANT, track, 1_000 + ns, str(ns)) for ns in (9, 3, 5)]
    assert [line.split()[-1] for line in rendered([track], *items)[2:-1]] == ["3", "5", "9"]


def test_times_before_the_start_are_negative() -> None:
    track = Track(1, None, "slices", "t")
    lines = rendered([track], item(INSTANT, track, 400, "early"))
    assert lines[2].split() == ["-600", "early"]


def test_a_track_has_its_newest_name() -> None:
    track = Track(1, None, "thread", "bash", tid=7)
    calls = Track(2, track, "slices", "CUDA API")
    draw = [item(INSTANT, calls, 1_000, "i")]
    drawing, out = Drawing(), io.BytesIO()
    writer = TextWriter(out, TraceInfo("monotonic"))
    writer.write(drawing.drawn(draw, [track, calls]))
    # What hangs below it keeps the track that it was made with.
    writer.write(drawing.drawn(draw, [renamed(track, "vec_add")]))
    writer.finish()
    text = out.getvalue().decode()
    assert text.count("thread vec_add 7") == 1
    assert text.count("CUDA API") == 1
    assert text.endswith("1 track, 0 slices, 2 instants, 0 counts\n")
    assert "bash" not in text


@pytest.mark.parametrize("value", [-(1 << 63) - 1, 1 << 64, 10**30])
def test_a_number_of_any_size_is_shown(value: int) -> None:
    track = Track(1, None, "slices", "t")
    args = {"size": value, "sizes": [value]}
    assert rendered([track], item(INSTANT, track, 1_000, "f", args))[2].split() == [
        "0", "f", f"size={value}", f"sizes=[{value}]",
    ]  # fmt: skip


def test_a_track_of_nothing_is_not_counted() -> None:
    group = Track(1, None, "group", "GPU 0")
    assert rendered([group])[1:] == ["GPU 0", "0 tracks, 0 slices, 0 instants, 0 counts"]


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("日本語", "日本語"),
        ("lone \ud800 surrogate", "lone \\ud800 surrogate"),
        ("tab\there", "tab\\there"),
        ("two\nlines", "two\\nlines"),
        ("\x1b[31mred", "\\x1b[31mred"),
    ],
)
def test_any_name_is_one_line_that_moves_no_cursor(name: str, shown: str) -> None:
    track = Track(1, None, "slices", "t")
    lines = rendered([track], item(INSTANT, track, 1_000, name, {"k": "v\nw"}))
    assert lines[2].split(maxsplit=1)[1] == f"{shown} k=v\\nw"
    assert len(lines) == 4
