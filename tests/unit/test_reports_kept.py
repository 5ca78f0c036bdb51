"""What reports keep of a recording: shapes as columns, and arguments in a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tracepipe.event.tables
import tracepipe.readers.tracepipe1
import tracepipe.reports.frames.collected
import tracepipe.reports.frames.spans
import tracepipe.reports.frames.stored
from tests.golden.cases import Case, cases, with_sample
from tests.support.recordings import Load, event, loader, span
from tracepipe.errors import OutputError
from tracepipe.event.columns import NONE
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.reports.frames.grouping import equal, sort_within
from tracepipe.reports.frames.kept_args import KeptArgs
from tracepipe.reports.frames.numbered import Numbered
from tracepipe.reports.frames.run import Run, load_run
from tracepipe.reports.frames.shapes import FRAMES, NO_SUCH, ShapeTable
from tracepipe.reports.frames.stored import Growing

LARGE = (1 << 64) - 1


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def relieved_at_every_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of a few lines, after each of which the tables forget what they can."""
    monkeypatch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 256)
    monkeypatch.setattr(tracepipe.event.tables, "KEPT_MAX", 1)
    monkeypatch.setattr(tracepipe.reports.frames.collected, "_SHAPES_MAX", 3)


def columns_in_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns of one byte and more are in files, and given back after some rows."""
    for name, value in {"_LARGE_BYTES": 1, "_STEP_BYTES": 40, "_MAPPED_BYTES": 1, "ROWS_AT_ONCE": 64}.items():
        monkeypatch.setattr(tracepipe.reports.frames.stored, name, value)


def frames(run: Run) -> list[Any]:
    """All that a run has, as rows."""
    named = [(name, run.some(name).rows()) for name in FRAMES]
    return [run.facts.outcomes, run.facts.end_ns, *named, run.warps.rows(), run.exits.rows()]


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_frames_keep_what_tables_forget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = frames(load_run(str(case.input)))
    relieved_at_every_turn(monkeypatch)
    assert frames(load_run(str(case.input))) == whole


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_threads_that_are_nested_one_by_one_have_the_same_spans(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spans(run: Run) -> list[Any]:
        # Spans of several threads that start together may change places.
        found: list[Any] = [run.facts.outcomes, run.facts.end_ns]
        for rows in (run.some(name).rows(named=True) for name in FRAMES):
            parents = [{} if (at := row["parent"]) is None else rows[at] | {"parent": 0} for row in rows]
            found.append(sorted(repr(row | {"parent": of}) for row, of in zip(rows, parents, strict=True)))
        return found

    whole = spans(load_run(str(case.input)))
    monkeypatch.setattr(tracepipe.reports.frames.spans, "_ROWS_AT_ONCE", 1)
    assert spans(load_run(str(case.input))) == whole


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_columns_in_files_are_as_in_memory(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = frames(load_run(str(case.input)))
    columns_in_files(monkeypatch)
    assert frames(load_run(str(case.input))) == whole


@pytest.mark.slow
def test_events_in_no_order_are_sorted_in_files(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    columns_in_files(monkeypatch)
    monkeypatch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 1 << 12)
    at = [number * 7919 % 500 for number in range(500)]
    run = load(
        *(span(number * 10, number * 10 + 5, f"f{number}", tid=1 + number % 3) for number in at),
        *(span(number * 10, number * 10 + 5, "k", "gpu_kernel", gpu=0) for number in at),
    )
    assert run.calls["name"].to_list() == [f"f{number}" for number in range(500)]
    assert run.calls["dur_ns"].to_list() == [5] * 500
    assert run.kernels["start_ns"].to_list() == [number * 10 for number in range(500)]


def test_arguments_that_were_put_away_are_as_they_were(
    load: Load, core: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    relieved_at_every_turn(monkeypatch)
    given = [{"size": number, "address": f"0x{number:x}", "text": "ä" * number} for number in range(50)]
    run = load(
        *(span(at * 10, at * 10 + 5, f"f{at % 20}", args=args) for at, args in enumerate(given)),
        '{"ts_ns":900,"type":"userspace","name":"odd","phase":"I","args":{"much":1' + "0" * 30 + "}}",
    )
    assert run.calls["size_bytes"].to_list() == [*range(50), None]
    assert run.calls["address"].to_list() == [*(f"0x{number:x}" for number in range(50)), None]
    assert run.calls["name"].to_list() == [*(f"f{number % 20}" for number in range(50)), "odd"]
    assert [run.args.args(number) for number in run.layer("userspace").args[:50].tolist()] == given


def test_numbers_beyond_64_bits_survive_the_file() -> None:
    tables = Tables()
    kept = KeptArgs(tables)
    numbers = [tables.args_number({"much": 1 << 70, "more": [1.5, None]}), tables.args_number({"a": 1})]
    kept.put_all_away()
    tables.keep(np.empty(0, np.int32), np.empty(0, np.int32))
    after = tables.args_number({"b": 2}) + kept.put_away
    assert [kept.args(number) for number in (*numbers, after)] == [
        {"much": 1 << 70, "more": [1.5, None]}, {"a": 1}, {"b": 2},
    ]  # fmt: skip
    assert [kept.json(number) for number in (*numbers, after)] == [
        b'{"much": 1180591620717411303424, "more": [1.5, null]}', b'{"a":1}', b'{"b":2}',
    ]  # fmt: skip
    assert kept.args(NONE) == {}


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "pwrite", full)
    tables = Tables()
    tables.args_number({"a": 1})
    with pytest.raises(
        OutputError, match=r"cannot keep the arguments of calls in .*: No space left"
    ) as error:
        KeptArgs(tables).put_all_away()
    assert "TMPDIR" in error.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_columns_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*given: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    column = Growing(np.int64)
    column.extend(1, 1000)
    with pytest.raises(
        OutputError, match=r"cannot keep the events of a recording in .*: No space left"
    ) as error:
        column.extend(2, 1_000_000)
    assert "TMPDIR" in error.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_column_keeps_what_it_had_when_it_grows() -> None:
    column, expected = Growing(np.int32, (2,)), []
    for number in range(40):
        column.extend(number, 20_000)
        expected += [number] * 20_000
    assert column.whole().tolist() == [[number] * 2 for number in expected]


def test_each_byte_string_has_one_number() -> None:
    numbered, texts = Numbered(), [b"%d" % (number * 7919) for number in range(5_000)]
    assert [numbered.number(text) for text in texts] == list(range(5_000))
    assert [numbered.number(text) for text in reversed(texts)] == list(range(4_999, -1, -1))
    assert [numbered[number] for number in range(5_000)] == texts
    assert numbered.find(b"another") == NONE and len(numbered) == 5_000
    assert numbered.number(b"") == 5_000 and numbered[5_000] == b""


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 5, 200_000])
def test_byte_strings_are_found_once_they_are_put_away(count: int) -> None:
    numbered, texts = Numbered(), [b"%d" % (number * 7919) for number in range(count)]
    for text in texts:
        numbered.number(text)
    numbered.put_away()
    assert [numbered[number] for number in range(count)] == texts
    assert [numbered.find(text) for text in texts] == list(range(count))
    assert numbered.find(b"another") == NONE and len(numbered) == count


def test_byte_strings_with_one_hash_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.reports.frames.numbered._HASH", 0)
    numbered = Numbered(2)
    texts = [number.to_bytes(2, "little") for number in range(300)]
    assert [numbered.number(text) for text in texts * 2] == [*range(300)] * 2
    assert [numbered.find(text) for text in texts] == [*range(300)]


SHAPES = [
    Shape("userspace", "f", "B", 1, 2, 3, "comm"),
    Shape("userspace", "f", "E", 1, 2, 3, "comm", has_dur=True),
    Shape("userspace", "f", "B", 1, 2, 3, "renamed"),
    Shape("userspace", "\ud800", "X", None, None, LARGE, has_dur=True, has_launch=True),
    Shape("syscall", "ioctl", "B", 7, 7),
    Shape("scheduler", "running", "B", 7, 7, comm="later"),
    Shape("scheduler", "schedule", "B", 7, 7),
    Shape("scheduler", "schedule", "I", 7, 7),
    Shape("transfer", "HtoD", "X", 1, gpu=0, stream=LARGE),
    Shape("transfer", "HtoD", "X", 1),
    Shape("gpu_kernel", "k", "X", 1, gpu=3, stream=1 << 40, grid=(1, 2, 3), block=(4, 5, 6)),
    Shape("gpu_kernel", "k", "X", 1, gpu=3, stream=1 << 40, grid=(1, 2, 4)),
    Shape("gpu_thread", "k", "I", 1, gpu=0),
    Shape("annotation", "step", "B", 1, 2),
    Shape("annotation", "step", "B", 1, 2, domain="data"),
    Shape("annotation", "step", "B", 1, 2, domain="train"),
    Shape("annotation", "step", "B", 1, 2, range=0),
    Shape("annotation", "step", "E", 1, 3, range=0),
    Shape("annotation", "step", "B", 1, 2, domain="data", range=1),
]


def test_shapes_are_columns() -> None:
    table = ShapeTable()
    numbers = np.array([table.number(shape) for shape in SHAPES], np.int32)
    assert numbers.tolist() == list(range(len(SHAPES)))
    assert [table.number(shape) for shape in SHAPES] == numbers.tolist()
    assert table.number(None) == NONE
    for name in ("name", "phase", "pid", "tid", "cpu", "comm", "domain", "range", "gpu", "stream"):
        values = [getattr(shape, name) for shape in SHAPES]
        kept = table.column(name, numbers).tolist()
        assert [table.value(name, number) for number in kept] == values
        assert [table.number_of(name, value) for value in values] == kept
        # What a frame cannot hold is null there, and half of a character is not text.
        shown = {LARGE: None, "\ud800": "\ufffd" * 3}
        assert table.series(name, numbers).to_list() == [shown.get(value, value) for value in values]
    assert [table.value("layer", n) for n in table.column("layer", numbers)] == [one.type for one in SHAPES]
    assert table.series("block", numbers).to_list()[10:12] == [[4, 5, 6], None]
    assert table.series("grid", numbers).to_list()[9:12] == [None, [1, 2, 3], [1, 2, 4]]
    assert table.has_launch(numbers).tolist() == [shape.has_launch for shape in SHAPES]
    assert table.is_whole.tolist() == [shape.phase == "X" for shape in SHAPES]
    assert (table.number_of("name", "none"), table.number_of("comm", "none")) == (NO_SUCH, NO_SUCH)
    assert table.number_of("stream", LARGE - 1) not in table.column("stream", numbers)


def test_shapes_that_nest_together_have_one_row() -> None:
    table = ShapeTable()
    numbers = np.array([table.number(shape) for shape in SHAPES], np.int32)
    frame, row = table.column("frame", numbers), equal(table.groups(numbers), *table.rows(numbers))[0]
    kept, rows = dict[Any, int](), dict[Any, int]()
    for at, shape in enumerate(SHAPES):
        on_thread = shape.type if shape.on_stream or shape.row is None else shape.drawn_layer
        assert FRAMES[frame[at]] == on_thread
        if shape.row is not None:
            assert kept.setdefault(shape.row, row[at]) == row[at]
            assert rows.setdefault(row[at], shape.row) == shape.row


def test_a_thread_has_the_name_that_it_had_last() -> None:
    table = ShapeTable()
    for shape in SHAPES:
        table.number(shape)
    assert table.thread_name(1, 2) == "renamed"
    assert table.thread_name(7, 7) == "later"
    assert table.thread_name(7, 8) is None
    assert table.thread_name(None, None) is None


@pytest.mark.parametrize("most", [9, 1 << 62], ids=["in one integer", "in two columns"])
def test_values_are_sorted_within_numbers(most: int) -> None:
    rng = np.random.default_rng(0)
    numbers, values = rng.integers(0, 40, 3_000), rng.integers(0, most, 3_000)
    expected = [value for _, value in sorted(zip(numbers.tolist(), values.tolist(), strict=True))]
    assert sort_within(numbers, values).tolist() == expected


def test_a_call_that_is_open_at_the_end_is_closed_where_others_overlap_it(load: Load) -> None:
    run = load(
        *(event("B", 1_000 + tid, f"f{tid}", tid=tid) for tid in range(5)),
        *(event("E", 1_100 + tid, f"f{tid}", tid=tid) for tid in (0, 2, 4)),
        # A slice that is still open when a call begins: the call goes on an overlap track.
        span(1_200, 1_300, "long", tid=1),
        event("B", 1_250, "inside", tid=9),
        span(1_240, 1_260, "over", tid=9),
        event("B", 1_255, "beside", tid=9),
    )
    unclosed = run.calls.filter(run.calls["kind"] == "unclosed")
    assert sorted(unclosed.select("name", "end_ns").rows()) == [
        ("beside", 1_300), ("f1", 1_300), ("f3", 1_300), ("inside", 1_300),
    ]  # fmt: skip
    assert run.facts.outcomes.unclosed == 4
