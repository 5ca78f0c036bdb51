"""What both formats hold is the same after it was written as a Perfetto trace and read again."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batches import read_all
from tracepipe.converters import CONVERTERS
from tracepipe.event.model import Record
from tracepipe.readers import perfetto
from tracepipe.recording.convert import Conversion, ConversionOptions

HEADER = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic"}
# Neither a key that the timeline shows of an event itself, nor an end's.
KEYS = st.text(max_size=8).map(lambda text: f"k {text}")
PLAIN = st.one_of(
    st.booleans(),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=80),
)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3), st.dictionaries(KEYS, inner, min_size=1, max_size=3)
    ),
    max_leaves=6,
)
ARGS = st.dictionaries(KEYS, VALUES, max_size=3)
THREADS = st.tuples(
    st.integers(1, 2), st.integers(3, 5), st.sampled_from(["python", "io", "größe", "events"])
)
STEPS = st.tuples(
    THREADS, st.sampled_from("BBEEIC"), st.integers(0, 3), st.sampled_from(["f", "g", "λ"]), ARGS
)


def recorded(steps: list[tuple[Any, ...]]) -> list[Record]:
    """Good records in the order of time: each end is of the innermost slice, and all are ended."""
    records: list[Record] = []
    open_: dict[tuple[Any, ...], list[str]] = {}
    ts_ns = 1_000
    for (pid, tid, layer), phase, after_ns, name, args in steps:
        ts_ns += after_ns
        of = {"ts_ns": ts_ns, "type": "hook", "layer": layer, "pid": pid, "tid": tid}
        names = open_.setdefault((pid, tid, layer), [])
        if phase == "C":
            value = after_ns + 0.5 if tid == 3 else -after_ns
            of |= {"layer": "events", "name": f"counter {name}", "phase": "C", "args": {"value": value}}
            del of["tid"]
            records.append(of)
        elif phase != "E" or names:
            if phase == "B":
                names.append(name)
            name = names.pop() if phase == "E" else name
            args = {f"{key} at the end": value for key, value in args.items()} if phase == "E" else args
            records.append(of | {"name": name, "phase": phase} | ({"args": args} if args else {}))
    for (pid, tid, layer), names in open_.items():
        of = {"ts_ns": ts_ns + 1, "type": "hook", "layer": layer, "pid": pid, "tid": tid}
        records += [of | {"name": name, "phase": "E"} for name in reversed(names)]
    return records


def by_row(records: list[Record]) -> dict[tuple[Any, ...], list[Record]]:
    """Those of each row in their order; between rows there is none."""
    rows: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        what = record["name"] if record["phase"] == "C" else record["layer"]
        rows.setdefault((record["pid"], record.get("tid"), what), []).append(record)
    return rows


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_what_is_written_is_read_as_it_was(steps: list[tuple[Any, ...]]) -> None:
    records = recorded(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.jsonl")
        path.write_bytes(b"\n".join(json.dumps(one).encode() for one in (HEADER, *records)) + b"\n")
        trace = io.BytesIO()
        Conversion(str(path), CONVERTERS["perfetto"], ConversionOptions()).run(trace)
    again, problems = read_all(perfetto.read(io.BytesIO(trace.getvalue())))
    assert problems == []
    # Above stand groups that are not processes: what the trace states about itself.
    assert by_row([one for one in again if one["type"] == "hook" and one["pid"] < 10]) == by_row(records)
