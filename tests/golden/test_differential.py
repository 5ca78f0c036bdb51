"""What Perfetto's trace processor imports of a file, it imports of the timeline that tracepipe makes of that
file, but for what `DELIBERATE` states. The files are written after the documents of their formats.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.both import converted
from tests.golden.conserved import MORE
from tests.golden.differential import ARROW, DELIBERATE, Facts, differences, facts

Event = dict[str, Any]
THREADS = [(1, 1), (1, 2), (2, 3)]
NAMES = st.sampled_from(["a", "b", "größe", 'quote"', "λ / x"])
TITLES = st.sampled_from(["n", "größe", "worker-1"])
CATEGORIES = st.sampled_from(["c", "d,e"])
VALUES = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(1 << 63), (1 << 63) - 1),
        st.sampled_from([0.5, -1.25, 1e300, "", "x", "größe", "0x1"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=2),
        st.dictionaries(st.sampled_from("kl"), inner, min_size=1, max_size=2),
    ),
    max_leaves=4,
)
ARGS = st.dictionaries(st.sampled_from(["k", "l", "m n"]), VALUES, max_size=2)
STEPS = st.sampled_from([3, 4, 999, 1000, 12345])


def us(ns: int) -> float:
    return ns / 1000


@st.composite
def threads(draw: st.DrawFn, kinds: str = "BXi", steps: st.SearchStrategy[int] = STEPS) -> list[Event]:
    """Slices and instants of some threads, which nest. X come when they begin, or when they end."""
    events: list[Event] = []
    for pid, tid in THREADS[: draw(st.integers(1, 3))]:
        now, opened = draw(st.integers(1, 9)) * 1000, list[Event]()

        def add(ph: str, **members: Any) -> Event:
            event = {"ph": ph, "pid": pid, "tid": tid, "ts": us(now), **members}  # noqa: B023
            if args := draw(st.one_of(st.none(), ARGS)):
                event["args"] = {f"end {key}": args[key] for key in args} if ph == "E" else args
            events.append(event)
            return event

        for kind in [*draw(st.lists(st.sampled_from(kinds + ")))"), max_size=9)), *")))))))))"]:
            # A slice has a length: one without it would not be around others.
            now += max(draw(steps), kind == ")" and bool(events) and events[-1]["ph"] == "B")
            if kind == "i":
                add("i", s="t", name=draw(NAMES), cat=draw(CATEGORIES))
            elif kind != ")":
                opened.append(add(kind, name=draw(NAMES), cat=draw(CATEGORIES)))
            elif opened:
                event = opened.pop()
                if event["ph"] == "B":
                    add("E", **({"name": event["name"]} if draw(st.booleans()) else {}))
                else:
                    event["dur"] = us(now - round(event["ts"] * 1000))
                    if draw(st.booleans()):
                        events.remove(event)
                        events.append(event)
    return events


def as_json(events: list[Event]) -> bytes:
    return json.dumps({"traceEvents": events}, ensure_ascii=False).encode()


def assert_same(content: bytes, name: str = "trace.json") -> Facts:
    """Convert a trace to both formats, and compare the facts of what is written with those of the trace."""
    theirs = facts(content)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        path.write_bytes(content)
        for to in ("perfetto", "chrome"):
            output, account = converted(path, to)
            found = differences(theirs, facts(output))
            assert not found, "\n".join([to, *found, *account.notes, repr(content)])
    return theirs


def test_the_docs_state_every_deliberate_difference() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "inputs.md").read_text()
    table = "".join(f"| {what} | {how} |\n" for what, how in DELIBERATE.items())
    assert f"| in the input | in the timeline |\n|---|---|\n{table}\n" in docs


examples = settings(max_examples=10 * MORE, deadline=None)


@pytest.mark.slow
@examples
@given(threads())
def test_slices_and_instants_of_json(events: list[Event]) -> None:
    assert_same(as_json(events))


@pytest.mark.slow
@examples
@given(st.data())
def test_begins_and_ends_of_one_time_are_in_the_order_of_the_file(data: st.DataObject) -> None:
    assert_same(as_json(data.draw(threads("B", st.sampled_from([0, 0, 1])))))


IDS = st.sampled_from([1, "1", "0x1", 10, "a", "0xA", "10", -1])


@pytest.mark.slow
@examples
@given(threads("BX"), st.data())
def test_flows_of_json(events: list[Event], data: st.DataObject) -> None:
    slices = sorted((event for event in events if event["ph"] in "BX"), key=lambda event: event["ts"])
    started = set[Any]()
    for event in slices:
        if data.draw(st.booleans()):
            event |= data.draw(
                st.sampled_from([{"flow_in": True}, {"flow_out": True}, {"flow_in": True, "flow_out": True}])
            )
            event["bind_id"] = data.draw(IDS)
        for _ in range(data.draw(st.integers(0, 2))):
            phase, key = data.draw(st.sampled_from("stfn")), (data.draw(CATEGORIES), data.draw(IDS))
            at = round(event["ts"] * 1000) + (-1 if phase == "n" else 1)
            flow = {"ph": phase, "name": ARROW, "cat": key[0], "id": key[1], "ts": us(at)}
            flow |= {"pid": event["pid"], "tid": event["tid"]} | ({"bp": "e"} if phase == "f" else {})
            if phase == "n":  # to the next slice
                flow["ph"] = "f"
            # The trace processor takes the first slice of all for a start that is not there.
            if phase != "n" or key in started:
                events.append(flow)
        started |= {(one["cat"], one["id"]) for one in events if one["ph"] == "s"}
    assert_same(as_json(events))


def key_of(event: Event) -> tuple[Any, ...]:
    """What events with ids have in common that nest."""
    return event["cat"], event.get("id"), json.dumps(event.get("id2")), event["pid"]


@pytest.mark.slow
@examples
@given(st.data())
def test_events_with_ids_of_json(data: st.DataObject) -> None:
    events, opened, now = list[Event](), list[Event](), 1000
    ids = st.sampled_from(
        [{"id": 1}, {"id": "0x1"}, {"id": 2}, {"id2": {"local": 1}}, {"id2": {"global": "0x1"}}]
    )
    for phase in [*data.draw(st.lists(st.sampled_from("bbne"), max_size=8)), *"eeeeeeee"]:
        now += data.draw(STEPS)
        if phase == "e":
            if opened:  # the innermost one of an id, as slices that cross stay whole
                begun = data.draw(st.sampled_from(opened))
                alike = [one for one in opened if key_of(one) == key_of(begun)]
                opened.remove(alike[-1])
                events.append({**alike[-1], "ph": "e", "ts": us(now)})
            continue
        event = {"ph": phase, "ts": us(now), "name": data.draw(NAMES), **data.draw(ids)}
        # Here ids are those of the process.
        pid, tid = data.draw(st.sampled_from(THREADS if "local" in event.get("id2", {}) else THREADS[:1]))
        event |= {"pid": pid, "tid": tid, "cat": data.draw(st.sampled_from("cd")), "args": data.draw(ARGS)}
        events.append(event)
        opened += [{key: event[key] for key in event if key != "args"}] if phase == "b" else []
    assert_same(as_json(events))


@pytest.mark.slow
@examples
@given(st.data())
def test_counters_and_names_of_json(data: st.DataObject) -> None:
    numbers = st.one_of(st.integers(-5, 1 << 53), st.sampled_from([0.5, "1.5", "7", "-3e2", ".75", "050"]))
    events = data.draw(threads("X"))
    for _ in range(data.draw(st.integers(1, 6))):
        pid, tid = data.draw(st.sampled_from(THREADS))
        event = {"ph": "C", "pid": pid, "ts": data.draw(st.integers(1, 9)), "name": data.draw(NAMES)}
        event["args"] = data.draw(
            st.dictionaries(st.sampled_from(["x", "y z"]), numbers, min_size=1, max_size=2)
        )
        events.append(event | data.draw(st.sampled_from([{}, {"id": "0x2"}])))
        kind = data.draw(st.sampled_from(["process_name", "thread_name"]))
        events.append(
            {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": kind + data.draw(TITLES)}}
        )
    assert_same(as_json(data.draw(st.permutations(events))))
