"""Chrome's JSON: always valid, nanoseconds survive, every begin has its end."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from decimal import Decimal
from operator import attrgetter
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.batches import trace_batch
from tests.support.cores import new_tables
from tests.support.drawing import Drawing, item, renamed
from tracepipe.converters.chrome import ChromeWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.event.model import Header
from tracepipe.layout.draw import Layout
from tracepipe.layout.timeline import BEGIN, COUNTER, END, INSTANT, Drawn, Item, Track

pytestmark = pytest.mark.usefixtures("core")

START_NS = 5_000_000_000_000


def written_batches(*batches: Drawn, start_ns: int = START_NS) -> bytes:
    out = io.BytesIO()
    writer = ChromeWriter(out, TraceInfo("monotonic", {"trace_ns": start_ns}))
    for batch in batches:
        writer.write(batch)
    writer.finish()
    return out.getvalue()


def written(
    declared: Sequence[Track] = (), *items: Item, start_ns: int = START_NS, of_events: bool = True
) -> bytes:
    """The file of one batch."""
    return written_batches(Drawing().drawn(items, declared, of_events=of_events), start_ns=start_ns)


def drawn(data: bytes) -> list[dict[str, Any]]:
    """The events but the metadata, with times as the decimals that stand in the file."""
    trace = json.loads(data, parse_float=Decimal)
    return [event for event in trace["traceEvents"] if event["ph"] != "M"]


def track_in_group(name: str = "stream 7", group_name: str = "GPU 0") -> tuple[Track, Track]:
    group = Track(1, None, "group", group_name)
    return group, Track(2, group, "slices", name, rank=3, category="gpu")


def test_a_trace_of_nothing_is_valid() -> None:
    trace = json.loads(written())
    assert trace["traceEvents"] == []
    assert trace["displayTimeUnit"] == "ns"
    assert trace["otherData"]["trace_clock"] == "monotonic"


json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(),
        st.text(st.characters(exclude_categories=["Cs"])),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text('ab"\\\n', max_size=3), inner)
    ),
    max_leaves=6,
)


@given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), json_values, max_size=4),
    st.booleans(),
)
@example('"},{', {'"': "\\", "</script>": "\u2028\x00"}, True)
@example('"},{', {'"': "\\", "</script>": "\u2028\x00"}, False)
@example("process_name", {}, False)
def test_the_file_is_json_whatever_the_names_and_arguments(
    name: str, args: dict[str, Any], of_events: bool
) -> None:
    group, track = track_in_group(name, name)
    data = written(
        (group, track),
        item(BEGIN, track, START_NS, name, args, (-2,)),
        item(INSTANT, track, START_NS, name, args),
        item(END, track, START_NS, name, args),
        of_events=of_events,
    )
    begin, flow, instant, end = drawn(data)
    assert begin["name"] == instant["name"] == end["name"] == name
    assert (begin["ph"], flow["ph"], instant["ph"], end["ph"]) == ("B", "s", "i", "E")
    for event in (begin, instant, end):
        assert set(event.get("args", {})) == set(args)
    names = ("process_name", "thread_name")
    named = [one for one in json.loads(data)["traceEvents"] if one["ph"] == "M" and one["name"] in names]
    assert [one["args"] for one in named] == [{"name": name}] * 2


@given(st.integers(0, 1 << 53), st.integers(0, 1 << 62))
@example(1, 1_800_000_000_123_456_789)
@example(999, 0)
@example(1_000, 0)
@example((1 << 53) - 1, 1_800_000_000_000_000_000)
def test_nanoseconds_survive(after_ns: int, start_ns: int) -> None:
    group, track = track_in_group()
    data = written((group, track), item(INSTANT, track, start_ns + after_ns, "i"), start_ns=start_ns)
    base_ns = json.loads(data)["otherData"]["base_ns"]
    assert 0 <= base_ns <= start_ns
    (event,) = drawn(data)
    assert base_ns + event["ts"] * 1000 == start_ns + after_ns


@given(st.integers(0, (1 << 53) // 1000))
def test_a_reader_with_doubles_has_the_nanoseconds_of_two_days(after_ns: int) -> None:
    # What a browser makes of the decimals: µs in a double, a quarter of 2^53 ns and more.
    group, track = track_in_group()
    data = written((group, track), item(INSTANT, track, START_NS + after_ns, "i"))
    trace = json.loads(data)
    (event,) = (event for event in trace["traceEvents"] if event["ph"] == "i")
    assert trace["otherData"]["base_ns"] + round(event["ts"] * 1000) == START_NS + after_ns


def test_times_up_to_an_hour_before_the_start_are_exact_and_none_is_negative() -> None:
    group, track = track_in_group()
    hour_ns = 3_600 * 10**9
    items = [item(INSTANT, track, START_NS - ns, "i") for ns in (hour_ns - 1, hour_ns + 1)]
    near, far = drawn(written((group, track), *items))
    assert near["ts"] == Decimal("0.001")
    assert far["ts"] == 0  # Perfetto drops negative times


@pytest.mark.parametrize("of_events", [True, False])
def test_no_string_ends_in_a_backslash_and_a_quote(of_events: bool) -> None:
    # Perfetto v52 refuses the file: it takes the closing quote for an escaped one.
    group, track = track_in_group()
    texts = ["C:\\", "\\\\", '\\"', '"\\', "a\\b", "\\"]
    items = [item(INSTANT, track, START_NS, text, {text: text}) for text in texts]
    data = written((group, track), *items, of_events=of_events)
    assert re.search(rb'(?<!\\)(?:\\\\)+"', data) is None
    assert [(event["name"], event["args"]) for event in drawn(data)] == [
        (text, {text: text}) for text in texts
    ]


def test_a_track_is_a_thread_that_bears_the_names_of_its_parents() -> None:
    process = Track(1, None, "process", "vec_add", rank=4, pid=42)
    thread = Track(2, process, "thread", "worker", rank=43, pid=42, tid=43)
    calls = Track(3, thread, "slices", "CUDA API", 1, "userspace", 42, 43)
    group = Track(4, None, "group", "GPU 0", rank=9)
    stream = Track(5, group, "slices", "stream 7", 2, "gpu")
    events = json.loads(written((process, thread, calls, group, stream)))["traceEvents"]
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (_, call_tid), (gpu_pid, _) = named
    assert named == {(42, call_tid): "worker 43 / CUDA API", (gpu_pid, 5): "stream 7"}
    assert gpu_pid > 1 << 22  # no process has such an id
    assert {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        42: "vec_add",
        gpu_pid: "GPU 0",
    }
    assert {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"} == {
        42: 4,
        gpu_pid: 9,
    }


def test_a_thread_that_gets_a_name_later_has_it_on_all_its_tracks() -> None:
    process = Track(1, None, "process", "python", rank=4, pid=42)
    thread = Track(2, process, "thread", "python", rank=43, pid=42, tid=43)
    calls = Track(3, thread, "slices", "CUDA API", 1, "userspace", 42, 43)
    syscalls = Track(4, thread, "slices", "syscalls", 2, "syscall", 42, 43)
    drawing = Drawing()
    data = written_batches(
        drawing.drawn(declared=(process, thread, calls, syscalls)),
        drawing.drawn(declared=[renamed(thread, "worker")]),
    )
    events = json.loads(data)["traceEvents"]
    # Viewers take the last name that they read.
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert named == {3: "worker 43 / CUDA API", 4: "worker 43 / syscalls"}


def test_tracks_are_ordered_by_their_group_and_then_by_themselves() -> None:
    root = Track(1, None, "group", "GPU 0")
    sms = [Track(10 + n, root, "group", f"SM {n}", rank=n) for n in (10, 2)]
    slots = [Track(100 + 10 * sm.rank + n, sm, "slices", f"slot {n}", n) for sm in sms for n in (1, 0)]
    events = json.loads(written((root, *sms, *slots)))["traceEvents"]
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(order, key=lambda tid: order[tid])] == [
        "SM 2 / slot 0",
        "SM 2 / slot 1",
        "SM 10 / slot 0",
        "SM 10 / slot 1",
    ]
    assert all(0 <= index < 1 << 31 for index in order.values())


def test_counters_have_their_value() -> None:
    group = Track(1, None, "group", "GPU 0")
    counter = Track(2, group, "counter", "active warps", unit="warps")
    (event,) = drawn(written((group, counter), item(COUNTER, counter, START_NS + 1, -3)))
    assert (event["ph"], event["name"], event["args"]) == ("C", "active warps", {"value": -3})


def test_a_flow_starts_and_goes_on_at_the_slices_just_begun() -> None:
    group, track = track_in_group()
    items = []
    for at, flow in enumerate((-6, 6)):
        items += [item(BEGIN, track, START_NS + at, "f", flows=(flow,)), item(END, track, START_NS + at, "f")]
    flows = [event for event in drawn(written((group, track), *items)) if "id" in event]
    assert [(e["ph"], e["id"], e["bp"]) for e in flows] == [("s", 6, "e"), ("t", 6, "e")]


phases = st.sampled_from(["B", "E", "I", "X"])
records = st.lists(
    st.tuples(phases, st.integers(0, 40), st.integers(0, 20), st.sampled_from("fg"), st.integers(1, 2)),
    max_size=60,
)


def laid_out(events: list[tuple[str, int, int, str, int]]) -> list[Drawn]:
    """What the layout draws of these, each of which comes in a batch of its own."""
    tables = new_tables()
    layout = Layout(Header(), tables)
    batches = []
    for phase, ts_ns, dur_ns, name, tid in events:
        record = {"type": "kernel", "phase": phase, "ts_ns": ts_ns, "name": name, "pid": 1, "tid": tid}
        record |= {"dur_ns": dur_ns} if phase == "X" else {}
        batches.append(layout.place(trace_batch([record], tables)))
    return batches + layout.finish()


@given(records)
def test_begins_and_ends_are_balanced_on_every_thread(
    events: list[tuple[str, int, int, str, int]],
) -> None:
    open_slices: Counter[tuple[int, int]] = Counter()
    shown = drawn(written_batches(*laid_out(events), start_ns=0))
    for event in sorted(shown, key=lambda event: event["ts"]):  # stable, as the viewers do
        change = {"B": 1, "E": -1}.get(event["ph"], 0)
        where = event["pid"], event["tid"]
        open_slices[where] += change
        assert open_slices[where] >= 0
    assert not +open_slices


def test_what_touches_or_has_no_length_is_distinguished_below_the_nanosecond() -> None:
    group, track = track_in_group()
    items = []
    for begin_ns, end_ns in ((0, 5), (5, 5), (5, 9), (10, 10)):
        items.append(item(BEGIN, track, START_NS + begin_ns, "f"))
        items.append(item(END, track, START_NS + end_ns, "f"))
    times = [event["ts"] for event in drawn(written((group, track), *items))]
    first = times[0]
    after_ns = [(time - first) * 1000 for time in times]
    assert [str(ns.normalize()) for ns in after_ns] == [
        "0", "5", "5.002", "5.004", "5.006", "9", "1E+1", "10.002",
    ]  # fmt: skip


def test_times_stay_within_their_nanosecond_however_many_slices_are_there() -> None:
    group, track = track_in_group()
    items = [item(kind, track, START_NS, "f") for _ in range(1000) for kind in (BEGIN, END)]
    data = written((group, track), *items)
    base_ns = json.loads(data)["otherData"]["base_ns"]
    assert {base_ns + round(event["ts"] * 1000) for event in drawn(data)} == {START_NS}


@given(records)
@example([("X", 5, 5, "f", 1), ("X", 5, 3, "f", 1), ("X", 5, 0, "g", 1), ("X", 8, 0, "f", 1)])
@example([(phase, 5, 0, "f", 1) for phase in "BEBBEE"])
def test_begins_and_ends_in_two_queues_give_the_same_slices(
    events: list[tuple[str, int, int, str, int]],
) -> None:
    # As Speedscope reads them, which then takes the earlier of two heads: they must never be of one time.
    batches = laid_out(events)
    queues: dict[int, dict[str, list[float]]] = {}
    for event in json.loads(written_batches(*batches, start_ns=0))["traceEvents"]:
        if event["ph"] in "BE":
            queues.setdefault(event["tid"], {"B": [], "E": []})[event["ph"]].append(event["ts"])
    seen: list[tuple[int, int, int, int]] = []
    for tid, queue in queues.items():
        assert set(queue["B"]) & set(queue["E"]) == set()
        stack: list[float] = []
        for ts, ends in sorted([(ts, False) for ts in queue["B"]] + [(ts, True) for ts in queue["E"]]):
            if ends:
                begin = stack.pop()
                seen.append((tid, round(begin * 1000), round((ts - begin) * 1000), len(stack)))
            else:
                stack.append(ts)
        assert stack == []
    assert sorted(seen) == sorted(_nested([item for batch in batches for item in batch.items()]))


def _nested(items: list[Item]) -> Iterator[tuple[int, int, int, int]]:
    """Track, begin, length and depth of each slice, by the contract: a stable sort nests operations."""
    open_ns: dict[int, list[int]] = {}
    for kind, track, ts_ns, *_ in sorted(items, key=attrgetter("ts_ns")):
        if kind == BEGIN:
            open_ns.setdefault(track.id, []).append(ts_ns)
        elif kind == END:
            begin_ns = open_ns[track.id].pop()
            yield track.id, begin_ns, ts_ns - begin_ns, len(open_ns[track.id])
