"""What is written for the readers of other tools' output is read again: the same calls, at the same times."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.cases import FIXTURES, Case
from tracepipe.converters import CONVERTERS
from tracepipe.recording.account import Account
from tracepipe.recording.convert import Conversion, ConversionOptions
from tracepipe.store.run import Run, load_run

START_NS = 5_000_000_000
LAYERS = ("userspace", "syscall", "kernel", "scheduler", "memory", "transfer")
MS = 1_000_000


def written(path: Path, to: str, out: Path) -> Account:
    stream = io.BytesIO()
    account = Conversion(str(path), CONVERTERS[to], ConversionOptions()).run(stream)
    out.write_bytes(stream.getvalue())
    return account


def recording(events: list[dict[str, Any]], path: Path) -> Path:
    header = {
        "type": "header",
        "schema": "tracepipe/1",
        "clock": "monotonic",
        "start": {"monotonic_ns": START_NS},
    }
    ordered = sorted(
        events, key=lambda event: event["ts_ns"] + (event.get("dur_ns", 0) if event["phase"] == "X" else 0)
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [header, *ordered]))
    return path


def values_of(run: Run, layer: str, *columns: str) -> list[dict[str, Any]]:
    """Some values of each row of a layer, by their names."""
    found = run.values(layer, slice(None), *columns)
    return [dict(zip(columns, row, strict=True)) for row in zip(*found.values(), strict=True)]


def rows(
    run: Run, start_ns: int, layers: tuple[str, ...] = LAYERS, unit_ns: int = 1
) -> Counter[tuple[Any, ...]]:
    """What reports see of each call and instant, with times in a unit from a start."""
    found: Counter[tuple[Any, ...]] = Counter()
    columns = ("layer", "name", "pid", "tid", "start_ns", "end_ns", "kind", "size_bytes", "result")
    for layer in layers:
        for row in values_of(run, layer, *columns):
            first, last = ((row[key] - start_ns) // unit_ns for key in ("start_ns", "end_ns"))
            kind = row["kind"] if row["kind"] in ("instant", "unclosed", "no begin") else "span"
            found[(*list(row.values())[:4], first, last, kind, row["size_bytes"], row["result"])] += 1
    return found


ARGS = st.fixed_dictionaries(
    {},
    optional={
        "size_bytes": st.integers(0, 1 << 40), "result": st.sampled_from([0, 2, 700]), "flags": st.integers(),
        "name": st.text(max_size=5), "ts": st.integers(0, 9), "phase": st.sampled_from("BX"),
        "duration_us": st.integers(0, 9), "op": st.just("x"), "text": st.text(max_size=20),
        "grid": st.just([2, 3, 1]), "block": st.lists(st.integers(1, 4), min_size=3, max_size=3),
    },
)  # fmt: skip


@st.composite
def calls(draw: st.DrawFn, where: dict[str, Any], layer: str, names: list[str]) -> list[dict[str, Any]]:
    """Calls of one thread, nested, between instants."""
    events: list[dict[str, Any]] = []
    now, stack = START_NS, list[str]()
    for _ in range(draw(st.integers(0, 14))):
        now += draw(st.integers(1, 3_000_000))
        what = draw(st.sampled_from("BBEEI"))
        event = {"type": layer, "ts_ns": now, **where, "args": draw(ARGS)}
        if what != "E":  # a begin does not know it yet
            event["args"].pop("result", None)
        if what == "B" and len(stack) < 3:
            stack.append(draw(st.sampled_from(names)))
            events.append(event | {"phase": "B", "name": stack[-1]})
        elif what == "E" and stack:
            events.append(event | {"phase": "E", "name": stack.pop()})
        elif what == "I":
            events.append(event | {"phase": "I", "name": f"instant {layer}"})
    while stack:
        now += 1
        events.append({"type": layer, "ts_ns": now, **where, "phase": "E", "name": stack.pop()})
    return events


@st.composite
def effects(draw: st.DrawFn, where: dict[str, Any]) -> list[dict[str, Any]]:
    """What calls did to memory."""
    events, now = [], START_NS
    for _ in range(draw(st.integers(0, 8))):
        now += draw(st.integers(1, 200_000))
        args = {"size": draw(st.integers(1, 1 << 40)), "call": "cuX"}
        event = {"ts_ns": now, **where, "args": args}
        if draw(st.booleans()):
            events.append(
                event | {"type": "memory", "phase": "I", "name": draw(st.sampled_from(["alloc", "free"]))}
            )
        else:
            length = draw(st.integers(0, 150_000))
            copy = {"type": "transfer", "name": draw(st.sampled_from(["HtoD", "DtoH", "copy", "AtoH"]))}
            events.append(
                event | copy | draw(st.sampled_from([{"phase": "I"}, {"phase": "X", "dur_ns": length}]))
            )
            now += length
    return events


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_layered_lines_are_read_as_what_they_were_written_of(data: st.DataObject) -> None:
    events: list[dict[str, Any]] = []
    for tid in (7, 8):
        where = {"pid": 7, "tid": tid, "cpu": 1}
        for layer in ("userspace", "syscall", "kernel"):
            events += data.draw(calls(where, layer, ["cuA", "cudaB", "f"]))
        events += data.draw(effects(where))
    with tempfile.TemporaryDirectory() as folder:
        path = recording(events, Path(folder) / "run.jsonl")
        out = Path(folder) / "again.jsonl"
        account = written(path, "layered", out)
        before, after = load_run(str(path)), load_run(str(out), "layered")
    assert account.notes == ["the file has no footer: the capture was cut off"]
    assert after.facts.skipped == 0
    assert rows(after, 0) == rows(before, START_NS)
    assert after.facts.counts == before.facts.counts


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_rows_of_the_table_are_read_as_what_they_were_written_of(data: st.DataObject) -> None:
    # The table has no threads, and so one for each process here; and no calls inside others.
    events: list[dict[str, Any]] = []
    for pid in (7, 8):
        events += data.draw(calls({"pid": pid, "tid": pid}, "userspace", ["cudaMalloc", "cuMemFree_v2"]))
    with tempfile.TemporaryDirectory() as folder:
        path = recording(events, Path(folder) / "run.jsonl")
        out = Path(folder) / "again.txt"
        account = written(path, "cuda-events", out)
        before, after = load_run(str(path)), load_run(str(out), "cuda-table")
    calls_before = values_of(
        before, "userspace", "parent", "name", "pid", "kind", "start_ns", "end_ns", "result"
    )
    outer = [row for row in calls_before if row["parent"] is None and row["kind"] != "instant"]
    expected = Counter(
        (
            row["name"],
            row["pid"],
            (row["start_ns"] - START_NS) // MS,
            (row["end_ns"] - START_NS) // MS,
            row["result"],
        )
        for row in outer
    )
    again = values_of(after, "userspace", "name", "pid", "start_ns", "end_ns", "result")
    assert expected == Counter(
        (row["name"], row["pid"], row["start_ns"] // MS, row["end_ns"] // MS, row["result"]) for row in again
    )
    assert after.facts.skipped == 0
    left_out = len(calls_before) - len(outer)
    messages = [note for note in account.notes if note.startswith("not written")]
    assert sum(int(word) for note in messages for word in note.split() if word.isdigit()) == left_out


@pytest.mark.parametrize("case", ["capture-standin", "capture-h200"])
def test_a_capture_is_read_again_layer_by_layer(case: str, tmp_path: Path) -> None:
    path, out = Case(FIXTURES / case).input, tmp_path / "again.jsonl"
    account = written(path, "layered", out)
    before, after = load_run(str(path)), load_run(str(out))
    hosts = {layer: before.facts.counts[layer] for layer in LAYERS}
    assert {layer: after.facts.counts[layer] for layer in LAYERS} == hosts
    assert rows(after, 0) == rows(before, before.facts.start_ns)
    written_apart = (*LAYERS, "gpu_warp")  # the lanes of warps are written
    of_gpus = {layer: count for layer, count in before.facts.counts.items() if layer not in written_apart}
    messages = [
        note.removeprefix("not written, as the format has no form for it: ") for note in account.notes
    ]
    assert {part for note in messages for part in note.split(", ")} == {
        f"{count} {layer} events" for layer, count in of_gpus.items()
    }


@pytest.mark.parametrize(
    ("to", "source", "fixture"),
    [
        ("layered", "host-layers", "layered-written"),
        ("cuda-events", "capture-standin", "cuda-table-written"),
    ],
)
def test_the_text_is_that_of_the_fixture(to: str, source: str, fixture: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    written(Case(FIXTURES / source).input, to, out)
    assert out.read_text() == Case(FIXTURES / fixture).input.read_text()
