"""A recording as tables: its rows are those of a plain reference, whatever the sizes of the parts it is read
in."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracepipe.event.tables
import tracepipe.readers.tracepipe1
import tracepipe.store.build
import tracepipe.store.numbered
import tracepipe.store.spans
import tracepipe.store.tables
from tests.golden.cases import Case, cases, with_sample
from tests.support.cores import CORES, running
from tests.support.recordings import Load, event, loader, span, write
from tracepipe.errors import OutputError
from tracepipe.event.columns import NONE, SPECIAL, TraceColumns
from tracepipe.event.model import NO_SLICES, TIME_LIMIT_NS
from tracepipe.event.nesting import Nesting, Outcomes, ShapeRow
from tracepipe.event.ops import BEGIN, END, FROM_DURATION, NO_BEGIN, NO_MARK
from tracepipe.event.shape import Shape
from tracepipe.event.tables import Tables
from tracepipe.kernel_names import short_kernel_name
from tracepipe.recording.reading import Reading, open_recording
from tracepipe.store.args import ArgsTable, ArgsWriter
from tracepipe.store.build import ShapeNumbers
from tracepipe.store.numbered import Numbered
from tracepipe.store.python_stacks import LAYER
from tracepipe.store.run import Run, load_run
from tracepipe.store.schema import FRAMES, GROUPS, KINDS, SHAPES, SPANS
from tracepipe.store.shapes import NO_SUCH, ShapeTable
from tracepipe.store.store import Store
from tracepipe.store.tables import Writer, connect

LARGE = (1 << 64) - 1
Row = dict[str, Any]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


@contextmanager
def small_parts(rows: int) -> Iterator[None]:
    """Parts of a few rows: events wait for later parts, slices stay open over them, tables forget shapes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 256)
        patch.setattr(tracepipe.event.tables, "KEPT_MAX", 1)
        patch.setattr(tracepipe.store.build, "_SHAPES_MAX", 3)
        patch.setattr(tracepipe.store.spans, "_AT_ONCE", rows)
        patch.setattr(tracepipe.store.spans, "_IN_MEMORY_BYTES", 64)
        patch.setattr(tracepipe.store.tables, "_ROWS_A_COMMIT", 20 * rows)
        patch.setattr(tracepipe.store.tables, "_RENUMBERED_AT_ONCE", rows)
        yield


@dataclass
class Event:
    """An event on the trace clock with all its values."""

    shape: Shape
    ts_ns: int
    dur_ns: int
    args: dict[str, Any]
    launch: int
    stack: int
    source_ns: int
    bound_ns: int


def events_of(path: str, **options: Any) -> list[Event]:
    """The slices and instants of a recording, in file order."""
    events = []
    with open_recording(path, "", **options) as opened:
        tables = opened.recording.tables
        for batch, _ in Reading(opened, path).placed():
            columns = batch.events
            for at in range(len(columns)):
                number, ts_ns = int(columns.shape[at]), int(columns.ts_ns[at])
                if number == SPECIAL or abs(ts_ns) > TIME_LIMIT_NS:
                    continue
                shape = tables.shapes[number]
                assert shape is not None
                if shape.phase not in NO_SLICES:
                    given = {"stack": NONE, "source_ns": NONE, "bound_ns": NONE}
                    for name in given:
                        column = getattr(columns, name)
                        given[name] = NONE if column is None else int(column[at])
                    args = int(columns.args[at])
                    events.append(
                        Event(
                            shape,
                            ts_ns,
                            int(columns.dur_ns[at]),
                            {} if args == NONE else dict(tables.args(args)),
                            int(columns.launch[at]),
                            **given,
                        )
                    )
    return events


def table_of(shape: Shape) -> str:
    return shape.type if shape.on_stream or shape.row is None else shape.drawn_layer


def group_of(shape: Shape) -> str:
    table = table_of(shape)
    return "transfer" if table == "gpu_kernel" else table


def in_order(events: list[Event]) -> list[Event]:
    """Events by time, then in file order; an X before those that it encloses."""
    ordered = sorted(events, key=lambda one: one.ts_ns)
    places = [at for at, one in enumerate(ordered) if one.shape.phase == "X"]
    longest = sorted((ordered[at] for at in places), key=lambda one: (one.ts_ns, -one.dur_ns))
    for at, one in zip(places, longest, strict=True):
        ordered[at] = one
    return ordered


def shown(text: str | None) -> str | None:
    """A text as a table has it."""
    return None if text is None else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def of_shape(shape: Shape) -> Row:
    name = short_kernel_name(shape.name) if shape.type == "gpu_kernel" else shape.name
    kernel = None if name == shape.name else shape.name
    return {
        "name": shown(name), "kernel": shown(kernel), "comm": shown(shape.comm),
        "domain": shown(shape.domain),
        "layer": shown(shape.layer or shape.type), "phase": shape.phase, "pid": shape.pid, "tid": shape.tid,
        "cpu": shape.cpu, "gpu": shape.gpu, "stream": shape.stream, "range": shape.range,
    }  # fmt: skip


def nested(nesting: Nesting, events: list[Event], end_ns: int) -> list[Row]:
    """The rows of a group, in the order in which they begin; `parent` is a row."""
    numbers: dict[object, int] = {}
    names: dict[str, int] = {}
    for one in events:
        if one.shape.row not in numbers:
            numbers[one.shape.row] = nesting.add_row()
    rows: list[Row] = []
    slices: dict[int, Row] = {}
    overlapping: dict[int, list[int]] = {}

    def collect(one: Event | None) -> None:
        for kind, on, ts_ns, _, event_at, mark, _, _, slice_id, parent in nesting.take_ops().rows(
            slice(None)
        ):
            if kind == END:
                row = slices[slice_id]
                row["end_ns"] = ts_ns
                if mark == NO_MARK and row["kind"] == "unclosed":
                    row["kind"] = "span"
                if event_at != NONE:
                    assert one is not None
                    row |= {"end_args": one.args, "end_source_ns": one.source_ns}
                continue
            assert one is not None
            base = nesting.base(on) if on >= 0 else NONE
            if base >= 0 and on not in overlapping.setdefault(base, []):
                overlapping[base].append(on)
            of_begin = "from_duration" if mark == FROM_DURATION else "unclosed"
            of_instant = "no_begin" if mark == NO_BEGIN else "instant"
            row = {
                "start_ns": ts_ns, "end_ns": ts_ns, "kind": of_begin if kind == BEGIN else of_instant,
                "parent": slices.get(parent), "lane": overlapping[base].index(on) + 1 if base >= 0 else 0,
                "args": one.args, "end_args": {}, "launch": one.launch, "stack": one.stack,
                "source_ns": one.source_ns, "end_source_ns": NONE,
                "bound_ns": NONE if one.source_ns == NONE else one.bound_ns,
                "table": table_of(one.shape), "row": numbers[one.shape.row], **of_shape(one.shape),
            }  # fmt: skip
            rows.append(row)
            if kind == BEGIN:
                slices[slice_id] = row

    for one in events:
        shape, name = one.shape, of_shape(one.shape)["name"]
        number = names.setdefault(name, len(names))
        nesting.set_shape(0, ShapeRow(numbers[shape.row], number, shape.phase, has_dur=shape.has_dur))
        columns = np.array([[one.ts_ns], [0], [NONE], [one.dur_ns], [0]], np.int64)
        nesting.events(TraceColumns(*columns), 0, 1)
        collect(one)
    for number in numbers.values():
        nesting.close(number, end_ns)
    collect(None)
    nesting.forget_rows()
    # On a row with overlap tracks, the innermost slice by time is around a row.
    for number in overlapping:
        own = [row for row in rows if row["row"] == number]
        own.sort(key=lambda row: (row["start_ns"], -row["end_ns"]))
        for at, row in enumerate(own):
            around = [
                other for other in own[:at]
                if other["kind"] not in ("instant", "no_begin")
                and other["end_ns"] > row["start_ns"] and other["end_ns"] >= row["end_ns"]
            ]  # fmt: skip
            row["parent"] = around[-1] if around else None
    return rows


def expected_tables(events: list[Event], end_ns: int) -> tuple[dict[str, list[Row]], Outcomes]:
    """The rows of all tables of spans."""
    tables: dict[str, list[Row]] = {}
    nesting = Nesting(NONE)
    for group in GROUPS:
        of_group = in_order([one for one in events if group_of(one.shape) == group])
        rows = nested(nesting, of_group, end_ns)
        for row in rows:
            row["depth"], around = 0, row["parent"]
            while around is not None:
                row["depth"], around = row["depth"] + 1, around["parent"]
        rows.sort(key=lambda row: (row["start_ns"], row["depth"]))
        for row in rows:
            tables.setdefault(row["table"], []).append(row)
    for table in tables.values():
        for at, row in enumerate(table):
            row["id"] = at
        # Kernels nest with the copies on their stream, but a parent is a row of the same table.
        for row in table:
            if row["parent"] is not None and row["parent"]["table"] != row["table"]:
                row["parent"] = None
        for row in table:
            outermost = row
            while outermost["parent"] is not None:
                outermost = outermost["parent"]
            row["top"] = outermost["id"]
    for row in [row for table in tables.values() for row in table]:
        del row["table"], row["row"]
        row["parent_id"] = NONE if row["parent"] is None else row["parent"]["id"]
    for row in [row for table in tables.values() for row in table]:
        row["parent"] = row.pop("parent_id")
    return tables, nesting.outcomes


def tables_of(run: Run) -> dict[str, list[Row]]:
    """The rows of all tables of spans, as the store has them."""
    tables = {}
    for table in FRAMES:
        if table == "gpu_thread" or not run.store.count(table):
            continue
        columns = {name: column.tolist() for name, column in run.store.by_id(table, list(SPANS)).items()}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        for row in rows:
            shape = row.pop("shape")
            row["kind"] = KINDS[row["kind"]]
            # A time that was recorded on the trace's clock has no error; 0 and NONE say so.
            if row["source_ns"] == NONE:
                row["bound_ns"] = NONE
            row["args"], row["end_args"] = run.args.args(row["args"]), run.args.args(row["end_args"])
            for name in of_shape(Shape("userspace", "f", "B")):
                row[name] = run.shapes.value(name, int(run.shapes.column(name, shape)))  # type: ignore[call-overload]
        tables[table] = rows
    return tables


def assert_as_expected(run: Run, path: Path, **options: Any) -> None:
    expected, outcomes = expected_tables(events_of(str(path), **options), run.facts.end_ns)
    found = tables_of(run)
    if run.shapes.number_of("layer", LAYER) != NO_SUCH:  # whose stacks are made of slices
        for row in (row for rows in found.values() for row in rows):
            row["stack"] = NONE
    assert sorted(found) == sorted(expected)
    for table, rows in expected.items():
        assert found[table] == rows, table
    assert run.facts.outcomes == outcomes


@pytest.mark.parametrize("case", with_sample(cases()), ids=lambda case: case.name)
def test_rows_are_those_of_the_reference(case: Case) -> None:
    options = case.options()
    how = {"assumed": options.assumed, "undated": options.undated}
    others = ("gpu_thread", "warps", "warp_exits", "warp_ranges", "stack_frames", "losses", "gpu_samples")
    whole = load_run(str(case.input), **how)
    assert_as_expected(whole, case.input, **how)
    # What the reading of one part has to remember for the next is in the tables too.
    with small_parts(5):
        parts = load_run(str(case.input), **how)
    assert (parts.facts.outcomes, parts.facts.end_ns) == (whole.facts.outcomes, whole.facts.end_ns)
    assert tables_of(parts) == tables_of(whole)
    for name in others:
        of_parts, of_whole = (one.store.rows(f"select * from store.{name}") for one in (parts, whole))
        assert repr(of_parts) == repr(of_whole)


_NAMES = st.sampled_from(["f", "g", "h"])
_TIMES = st.integers(0, 30)
_LENGTHS = st.one_of(st.none(), st.integers(0, 12))
_PLACES = st.sampled_from(
    [
        {"type": "userspace", "pid": 1, "tid": 1},
        {"type": "userspace", "pid": 1, "tid": 2, "comm": "named"},
        {"type": "scheduler", "pid": 1, "tid": 1},
        {"type": "kernel", "pid": 1, "tid": 1},
        {"type": "annotation", "pid": 1, "tid": 1},
        {"type": "gpu_kernel", "gpu": 0, "stream": 7},
        {"type": "transfer", "gpu": 0, "stream": 7, "pid": 1},
    ]
)


@st.composite
def _events(draw: st.DrawFn) -> Row:
    one = {"ts_ns": draw(_TIMES), "name": draw(_NAMES), **draw(_PLACES)}
    one["phase"] = draw(st.sampled_from("BEXI"))
    dur_ns = draw(_LENGTHS)
    if one["phase"] == "X" or (one["phase"] == "E" and dur_ns is not None):
        one["dur_ns"] = dur_ns or 0
    if draw(st.booleans()):
        one["args"] = {"size": one["ts_ns"]}
    if draw(st.booleans()):
        one["launch"] = one["ts_ns"] + 1
    return one


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=40)
@given(events=st.lists(_events(), max_size=40), in_order=st.booleans(), rows=st.integers(1, 9))
def test_any_events_have_the_rows_of_the_reference(
    core: str, events: list[Row], in_order: bool, rows: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if in_order:
        events = sorted(events, key=lambda one: one["ts_ns"])
    path = write(tmp_path_factory.mktemp("made") / "run.jsonl", *events)
    with running(core), small_parts(rows):
        assert_as_expected(load_run(str(path)), path)


def test_slices_for_which_there_are_too_many_overlap_tracks_have_rows(tmp_path: Path, core: str) -> None:
    crossing = [span(at, at + 100, f"f{at}") for at in range(80)]
    opened = [event("B", 80 + at, f"g{at}") for at in range(9)]
    path = write(tmp_path / "run.jsonl", *crossing, *opened, event("E", 200, "g8"), span(300, 301, "f"))
    with small_parts(7):
        assert_as_expected(run := load_run(str(path)), path)
    assert run.facts.outcomes.undrawn > 9


def test_events_in_no_order_are_sorted(load: Load) -> None:
    at = [number * 7919 % 500 for number in range(500)]
    with small_parts(50):
        run = load(
            *(span(number * 10, number * 10 + 5, f"f{number}", tid=1 + number % 3) for number in at),
            *(span(number * 10, number * 10 + 5, "k", "gpu_kernel", gpu=0) for number in at),
        )
    assert run.calls.fetchnumpy()["name"].tolist() == [f"f{number}" for number in range(500)]
    assert run.calls.fetchnumpy()["dur_ns"].tolist() == [5] * 500
    assert run.kernels.fetchnumpy()["start_ns"].tolist() == [number * 10 for number in range(500)]


def test_slices_that_begin_together_are_in_the_order_of_their_depths(load: Load) -> None:
    run = load(
        event("B", 10, "f", tid=1), event("B", 20, "inner", tid=1), event("B", 20, "g", tid=2),
        event("E", 30, "inner", tid=1), event("E", 30, "f", tid=1), event("E", 30, "g", tid=2),
    )  # fmt: skip
    assert run.calls.select("name", "depth", "parent_row").fetchall() == [
        ("f", 0, None), ("g", 0, None), ("inner", 1, 0),
    ]  # fmt: skip


def test_arguments_that_were_put_away_are_as_they_were(load: Load, core: str) -> None:
    given = [{"size": number, "address": f"0x{number:x}", "text": "ä" * number} for number in range(50)]
    odd = '{"ts_ns":900,"type":"userspace","name":"odd","phase":"I","args":{"much":1' + "0" * 30 + "}}"
    with small_parts(7):
        calls = (span(at * 10, at * 10 + 5, f"f{at % 20}", args=args) for at, args in enumerate(given))
        run = load(*calls, odd)
    found = run.calls.select("size_bytes", "address", "name").fetchall()
    assert found == [*((at, f"0x{at:x}", f"f{at % 20}") for at in range(50)), (None, None, "odd")]
    assert [run.args.args(number) for number in run.layer("userspace").args[:50].tolist()] == given


def test_numbers_beyond_64_bits_survive_the_file(tmp_path: Path) -> None:
    tables, nothing = Tables(), np.empty(0, np.int32)
    with ArgsWriter(tmp_path) as writer:
        numbers = [tables.args_number({"much": 1 << 70, "more": [1.5, None]}), tables.args_number({"a": 1})]
        writer.put(tables)
        tables.keep(nothing, nothing)
        after = tables.args_number({"b": 2}) + writer.count
        writer.put(tables)
    table = ArgsTable(tmp_path, writer.count)
    assert table.count == 3
    assert [table.args(number) for number in (*numbers, after)] == [
        {"much": 1 << 70, "more": [1.5, None]}, {"a": 1}, {"b": 2},
    ]  # fmt: skip
    assert [table.json(number) for number in (*numbers, after)] == [
        '{"much": 1180591620717411303424, "more": [1.5, null]}', '{"a":1}', '{"b":2}',
    ]  # fmt: skip
    assert (table.args(NONE), table.json(NONE)) == ({}, None)


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Files cannot become larger, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("size_bytes", "count", "text_bytes", "what"),
    [
        (100, 1, 0, "cannot open the tables of a recording: .*"),
        (100_000, 1_000, 500, "cannot keep the arguments of calls: File too large"),
        (600_000, 90_000, 0, "cannot keep the events of a recording in .*: File too large"),
        (5_000_000, 90_000, 0, "cannot write the tables of a recording: .*"),
    ],
)
def test_a_full_disk_is_named_and_nothing_is_left(
    size_bytes: int,
    count: int,
    text_bytes: int,
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    texts = (f"{at:{text_bytes}}" if text_bytes else "" for at in range(count))
    calls = (span(at, at + 1, f"f{at % 9}", args={"x": text}) for at, text in enumerate(texts))
    path = write(tmp_path / "run.jsonl", *calls)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with files_of_at_most(size_bytes), pytest.raises(OutputError, match=what) as error:
        load_run(str(path))
    assert "TMPDIR" in error.value.hint
    assert list(temporary.iterdir()) == []


def test_each_byte_string_has_one_number() -> None:
    numbered, texts = Numbered(), [b"%d" % (number * 7919) for number in range(5_000)]
    assert [numbered.number(text) for text in texts] == list(range(5_000))
    assert [numbered.number(text) for text in reversed(texts)] == list(range(4_999, -1, -1))
    assert [numbered[number] for number in range(5_000)] == texts
    assert len(numbered) == 5_000 and numbered.data() == b"".join(texts)
    assert numbered.number(b"") == 5_000 and numbered[5_000] == b""


def test_byte_strings_with_one_hash_are_distinguished(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracepipe.store.numbered, "_HASH", 0)
    numbered, texts = Numbered(), [number.to_bytes(2, "little") for number in range(300)]
    assert [numbered.number(text) for text in texts * 2] == [*range(300)] * 2


_SHAPES = [
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
    Shape("hook", "io", "B", 1, 2, layer="disk"),
]


@pytest.fixture
def shape_table(tmp_path: Path) -> ShapeTable:
    """The table of `_SHAPES`."""
    numbers = ShapeNumbers()
    assert [numbers.number(shape) for shape in _SHAPES * 2] == [*range(len(_SHAPES))] * 2
    assert numbers.number(None) == NONE
    columns = numbers.columns()
    with Writer(tmp_path) as writer:
        given = {name: columns[name] for name in SHAPES if name != "shape"}
        writer.put("shapes", {"shape": np.arange(len(columns), dtype=np.int32), **given})
        writer.put_texts("texts", numbers.texts)
        writer.put_rows("facts", [("large", json.dumps(numbers.large))])
    return ShapeTable(Store(tmp_path))


def test_shapes_are_columns(shape_table: ShapeTable) -> None:
    table, numbers = shape_table, np.arange(len(_SHAPES))
    for name in ("name", "phase", "pid", "tid", "cpu", "comm", "domain", "range", "gpu", "stream"):
        values = [getattr(shape, name) for shape in _SHAPES]
        values = [shown(value) if isinstance(value, str) else value for value in values]
        column = table.column(name, numbers).tolist()
        assert [table.value(name, number) for number in column] == values  # type: ignore[call-overload]
        assert [table.number_of(name, value) for value in values] == column
        # A number beyond 63 bits fits no column.
        assert table.values(name, numbers) == [None if value == LARGE else value for value in values]
    layers = [shape.layer or shape.type for shape in _SHAPES]
    assert [table.value("layer", int(number)) for number in table.column("layer", numbers)] == layers
    assert table.values("block", numbers)[10:12] == [[4, 5, 6], None]
    assert table.values("grid", numbers)[9:12] == [None, [1, 2, 3], [1, 2, 4]]
    assert table.has_launch(numbers).tolist() == [shape.has_launch for shape in _SHAPES]
    assert table.column("has_dur", numbers).tolist() == [shape.has_dur for shape in _SHAPES]
    assert (table.number_of("name", "none"), table.number_of("comm", "none")) == (NO_SUCH, NO_SUCH)
    assert table.number_of("stream", LARGE - 1) not in table.column("stream", numbers)


def test_shapes_that_nest_together_have_one_row() -> None:
    numbers = ShapeNumbers()
    for shape in _SHAPES:
        numbers.number(shape)
    found, rows, shapes = numbers.columns(), dict[Any, int](), dict[int, Any]()
    for at, shape in enumerate(_SHAPES):
        assert FRAMES[found["frame"][at]] == table_of(shape)
        row = int(found["row"][at])
        assert rows.setdefault(shape.row, row) == row
        assert shapes.setdefault(row, shape.row) == shape.row


def test_a_thread_has_the_name_that_it_had_last(shape_table: ShapeTable) -> None:
    assert shape_table.thread_name(1, 2) == "renamed"
    assert shape_table.thread_name(7, 7) == "later"
    assert shape_table.thread_name(7, 8) is None
    assert shape_table.thread_name(None, None) is None


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
    unclosed = run.calls.filter("kind = 'unclosed'").select("name", "end_ns").fetchall()
    assert sorted(unclosed) == [("beside", 1_300), ("f1", 1_300), ("f3", 1_300), ("inside", 1_300)]
    assert run.facts.outcomes.unclosed == 4


LONG = "1 kernel or copy lasts while later ones of its stream begin and end (2 of them); it has 99.9%"


@pytest.mark.parametrize(
    ("long", "later", "note"),
    [
        # End, launch and more fields of the first work; begins, ends and launches of the next on its stream.
        ((40_000, 1, {}), [(1_100, 1_120, 2), (1_130, 1_150, 3)], LONG),
        ((40_000, None, {}), [(1_100, 1_120, None), (1_130, 1_150, None)], LONG),
        ((40_000, 1, {"layer": "transfer", "name": "HtoD"}), [(1_100, 1_120, 2), (1_130, 1_150, 3)], LONG),
        # Programmatic dependent launch: kernels begin early, one of them even ends early.
        ((1_110, 1, {}), [(1_100, 1_140, 2), (1_130, 1_200, 3), (1_150, 1_170, 4)], ""),
        # The branches of a graph; another stream, process, or one that is not known.
        ((40_000, 1, {}), [(1_100, 1_120, 1), (1_130, 1_150, 1)], ""),
        ((40_000, 1, {"stream": 8}), [(1_100, 1_120, 2), (1_130, 1_150, 3)], ""),
        ((40_000, 1, {"pid": 2}), [(1_100, 1_120, 2), (1_130, 1_150, 3)], ""),
        ((40_000, 1, {"stream": None}), [(1_100, 1_120, 2), (1_130, 1_150, 3)], ""),
    ],
)
def test_work_that_lasts_longer_than_its_stream_allows_is_reported(
    load: Load, long: tuple[int, int | None, Row], later: list[tuple[int, int, int | None]], note: str
) -> None:
    end_ns, launch, more = long
    of = {"gpu": 0, "stream": None if "stream" in more and more["stream"] is None else 7}
    all_of = [(1_000, end_ns, launch, of | more), *((begin, end, number, of) for begin, end, number in later)]
    records = []
    for begin_ns, end_ns, number, fields in all_of:
        stated = {"name": "k", "layer": "gpu_kernel", "launch": number} | fields
        records.append(span(begin_ns, end_ns, **{key: one for key, one in stated.items() if one is not None}))
    found = [one.removeprefix("impossible: ") for one in load(*records).facts.notes if "impossible" in one]
    assert [one.startswith(note) for one in found] == [True] * bool(note)


def test_a_rare_value_of_many_rows_is_kept(tmp_path: Path) -> None:
    """By default, DuckDB infers the type of a column from a sample of its rows."""
    rows = [("cuda", 1, at, None, None, None) for at in range(5_000)]
    rows[2_501] = ("cuda", 1 << 40, 2_501, 1 << 41, None, "late")
    with Writer(tmp_path) as writer:
        writer.put_rows("losses", rows)
        (found,) = writer.rows("select count, dur_ns, reason from losses where reason is not null")
    assert found == (1 << 40, 1 << 41, "late")


def test_long_queries_draw_no_progress_on_standard_output(tmp_path: Path) -> None:
    """DuckDB 2.0 does so by default, after two seconds, amid the JSON of a report."""
    connection = connect(":memory:", tmp_path, memory_mb=100)
    for one in (connection, connection.cursor()):
        assert one.execute("select current_setting('enable_progress_bar')").fetchall() == [(False,)]
