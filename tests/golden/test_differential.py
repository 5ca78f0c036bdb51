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
from tests.golden.cases import FIXTURES, Case
from tests.golden.conserved import MORE
from tests.golden.differential import ARROW, DELIBERATE, Facts, differences, facts
from tests.support.perfetto_trace import BEGIN, CLEARED, COUNTER, END, INSTANT, NEEDS, TraceMade, pb

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
def threads(
    draw: st.DrawFn, kinds: str = "BXi", steps: st.SearchStrategy[int] = STEPS, has_b_in_x: bool = True
) -> list[Event]:
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
            elif kind == "B" and not has_b_in_x and opened and opened[-1]["ph"] == "X":
                continue
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


IDS = st.sampled_from([1, "1", "0x1", 10, "a", "0xA", "10"])


@pytest.mark.slow
@examples
@given(threads("BX"), st.data())
def test_flows_of_json(events: list[Event], data: st.DataObject) -> None:
    slices = sorted((event for event in events if event["ph"] in "BX"), key=lambda event: event["ts"])
    started, is_bound = set[Any](), data.draw(st.booleans())
    for event in slices:
        if is_bound and data.draw(st.booleans()):
            ways = data.draw(st.sampled_from([("flow_in",), ("flow_out",), ("flow_in", "flow_out")]))
            event |= {"bind_id": data.draw(IDS), **dict.fromkeys(ways, True)}
        for _ in range(data.draw(st.integers(0, 0 if is_bound else 2))):
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


def annotated(event: Any, args: dict[str, Any]) -> None:
    """Add arguments to a TrackEvent."""

    def fill(one: Any, value: Any) -> None:
        if type(value) is dict:
            for key, item in value.items():
                fill(one.dict_entries.add(name=key), item)
        elif type(value) is list:
            for item in value:
                fill(one.array_values.add(), item)
        else:
            kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
            setattr(one, kinds[type(value)], value)

    for key, value in args.items():
        fill(event.debug_annotations.add(name=key), value)


@st.composite
def perfetto_traces(draw: st.DrawFn) -> bytes:
    """Tracks of threads, of processes, below both, and of neither; slices with names by number or in place,
    instants, flows and counters.
    """
    made = TraceMade()
    process = made.packet(sequence_flags=CLEARED).track_descriptor
    process.uuid, process.process.pid = 10, 1
    if draw(st.booleans()):
        process.process.process_name = "program"
    for uuid, (pid, tid) in enumerate(THREADS, 1):
        made.thread(uuid, pid, tid, draw(st.sampled_from(["", "main", "io"])))
    made.track(4, "below a thread", 1)
    made.track(5, "of a process", 10)
    made.track(6, "of neither")
    made.track(7, "below", 6)
    made.counter(8, "free", 10)
    now, opened = 1000, dict[int, int]()
    tracks = st.sampled_from(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    for step in range(draw(st.integers(1, 10))):
        now += draw(STEPS)
        track, kind = draw(tracks), draw(st.sampled_from([BEGIN, BEGIN, END, INSTANT, COUNTER]))
        if kind == END and not opened.get(track):
            continue
        if kind == COUNTER:
            made.event(now, COUNTER, track_uuid=8, counter_value=draw(st.integers(-5, 1 << 50)))
            continue
        opened[track] = opened.get(track, 0) + {BEGIN: 1, END: -1}.get(kind, 0)
        packet = made.event(now, kind, track_uuid=track)
        event = packet.track_event
        annotated(event, {f"{'end ' if kind == END else ''}{key}": one for key, one in draw(ARGS).items()})
        if kind != END:
            if draw(st.booleans()):
                event.name, event.categories[:] = draw(NAMES), draw(st.sampled_from([[], ["c"], ["c", "d"]]))
            else:
                packet.sequence_flags = NEEDS
                packet.interned_data.event_names.add(iid=step + 1, name=draw(NAMES))
                event.name_iid = step + 1
            event.flow_ids.extend(draw(st.lists(st.integers(1, 4), max_size=3, unique=True)))
            if draw(st.integers(0, 3)) == 0:
                event.terminating_flow_ids.append(draw(st.integers(5, 6)))
    for track, count in opened.items():
        for _ in range(count):
            now += draw(STEPS)
            made.event(now, END, track_uuid=track)
    return made.bytes


@pytest.mark.slow
@examples
@given(perfetto_traces())
def test_tracks_of_perfetto_traces(trace: bytes) -> None:
    assert_same(trace, "trace.pftrace")


def legacy_trace(events: list[Event]) -> bytes:
    """The events of JSON as LegacyEvents, of their threads or with their ids."""
    made = TraceMade()
    for event in events:
        packet = made.packet(timestamp=round(event["ts"] * 1000))
        track_event, legacy = packet.track_event, packet.track_event.legacy_event
        legacy.phase = ord(event["ph"])
        if "id" in event or "id2" in event:
            legacy.unscoped_id = int(str(event.get("id") or event["id2"].popitem()[1]), 16)
        legacy.pid_override, legacy.tid_override = event["pid"], event["tid"]
        if "name" in event:
            track_event.name = event["name"]
        track_event.categories.extend(event["cat"].split(",") if "cat" in event else ())
        if "dur" in event:
            legacy.duration_us = round(event["dur"])
        annotated(track_event, event.get("args", {}))
    return made.bytes


@pytest.mark.slow
@examples
@given(threads(steps=st.sampled_from([1000, 2000, 12000]), has_b_in_x=False))
def test_legacy_events_of_perfetto_traces(events: list[Event]) -> None:
    if events:
        assert_same(legacy_trace(sorted(events, key=lambda event: event["ts"])), "trace.pftrace")


COMMS = {0: "swapper", 7: "a", 8: "b", 9: "größe"}


@st.composite
def traced_by_the_kernel(draw: st.DrawFn) -> list[tuple[int, int, int, tuple[int, int] | str]]:
    """Time, processor and thread of events of ftrace: a switch to a thread with the state of the one that
    leaves, or a mark.
    """
    events: list[tuple[int, int, int, tuple[int, int] | str]] = []
    cpus, now = dict.fromkeys(range(draw(st.integers(1, 2))), 0), 1000
    opened = dict.fromkeys(COMMS, 0)
    for _ in range(draw(st.integers(1, 10))):
        now += draw(STEPS)
        cpu, tid = draw(st.sampled_from([*cpus])), draw(st.sampled_from([*COMMS]))
        tid = 0 if tid in cpus.values() else tid
        own = cpus[cpu]
        if draw(st.booleans()) or not own:
            events.append((now, cpu, own, (draw(st.sampled_from([0, 1, 2])), tid)))
            cpus[cpu] = tid
            continue
        mark = draw(st.sampled_from(["B|5|step", "E|5", "I|5|now", "C|5|count|5", "B|5|", "C|5|no|x"]))
        if mark == "E|5" and not opened[own]:
            continue
        opened[own] += {"B": 1, "E": -1}.get(mark[0], 0)
        events.append((now, cpu, own, mark))
    for tid, count in opened.items():
        for _ in range(count):
            now += 3
            events.append((now, 0, tid, "E|5"))
    return events


@pytest.mark.slow
@examples
@given(traced_by_the_kernel(), st.booleans(), st.sampled_from(["", "\n"]))
def test_switches_marks_and_names_of_perfetto_traces(events: list[Any], has_tree: bool, end: str) -> None:
    made = TraceMade()
    if has_tree:
        tree = made.packet().process_tree
        tree.processes.add(pid=5, cmdline=["program"])
        tree.threads.add(tid=8, tgid=5, name="b")
    for ts_ns, cpu, own, what in events:
        bundle = made.packet().ftrace_events
        bundle.cpu = cpu
        event = bundle.event.add(timestamp=ts_ns, pid=own)
        if type(what) is str:
            event.print.buf = what + end
            continue
        states = {"prev_comm": COMMS[own], "prev_pid": own, "prev_prio": 120, "prev_state": what[0]}
        event.sched_switch.MergeFrom(
            pb.SchedSwitchFtraceEvent(**states, next_comm=COMMS[what[1]], next_pid=what[1], next_prio=120)
        )
    assert_same(made.bytes, "trace.pftrace")


@pytest.mark.slow
@examples
@given(traced_by_the_kernel(), st.booleans(), st.sampled_from([" (    5)", " (-----)"]))
def test_ftrace_in_json(events: list[Any], is_before: bool, process: str) -> None:
    lines, unknown = ["# tracer: nop", "#"], " (-----)"
    for ts_ns, cpu, own, what in events:
        text = f"tracing_mark_write: {what}"
        if type(what) is not str:
            state, comes = "RSD"[what[0]], what[1]
            text = f"sched_switch: prev_comm={COMMS[own]} prev_pid={own} prev_prio=120 prev_state={state}"
            text += f" ==> next_comm={COMMS[comes]} next_pid={comes} next_prio=120"
        # The trace processor reads seconds as a double: 1/512 s is exact.
        whole, part = divmod(ts_ns * 10**9 // 512, 10**9)
        of = process if own else unknown
        lines.append(f"{COMMS[own]:>16}-{own:<5}{of} [{cpu:03}] d..3 {whole}.{part:09}: {text}")
    member = {"systemTraceEvents": "\n".join([*lines, ""])}
    named = {"ph": "M", "pid": 7, "tid": 7, "name": "process_name", "args": {"name": "program"}}
    slices = {"traceEvents": [named, {"ph": "X", "pid": 5, "tid": 8, "ts": 1, "dur": 0.5, "name": "a"}]}
    whole_file = {**member, **slices} if is_before else {**slices, **member}
    assert_same(json.dumps(whole_file, ensure_ascii=False).encode())


@pytest.mark.slow
@examples
@given(st.data())
def test_machines_and_lives_of_perfetto_traces(data: st.DataObject) -> None:
    made = TraceMade()
    for uuid in range(1, data.draw(st.integers(2, 5))):
        machine, life = data.draw(st.sampled_from([{}, {"machine_id": 1001}])), data.draw(st.integers(1, 2))
        machine_and_life = f"{machine.get('machine_id', '')}.{life}"
        for of, name in ((100, "process"), (0, "thread")):
            descriptor = made.packet(**machine).track_descriptor
            descriptor.uuid = (of or uuid * 10) + life
            if of:
                descriptor.process.pid, descriptor.process.process_name = 5, f"{name} {machine_and_life}"
            else:
                descriptor.thread.pid, descriptor.thread.tid = 5, 5 + uuid
                descriptor.thread.thread_name = f"{name} {machine_and_life}.{uuid}"
        for at, kind in ((uuid * 100, BEGIN), (uuid * 100 + 50, END)):
            packet = made.event(at, kind, "work", track_uuid=uuid * 10 + life)
            packet.MergeFrom(pb.TracePacket(**machine))
    assert_same(made.bytes, "trace.pftrace")


AGAIN = [
    "capture-h200", "capture-standin", "chrome-forms", "gpu-counters", "kineto-mi250", "nsys",
    "perfetto-counters", "perfetto-sched", "perfetto-tracks", "viztracer", "warps-slots", "wprof",
    "xplane-mi300",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "to"),
    # A warp without a length there is written before one of the same time, and read as one in that.
    [
        (name, to)
        for name in AGAIN
        for to in ("perfetto", "chrome")
        if (name, to) != ("warps-slots", "chrome")
    ],
)
def test_a_trace_of_tracepipe_is_itself_again(name: str, to: str, tmp_path: Path) -> None:
    traces = [converted(Case(FIXTURES / name).input, to)[0]]
    for at in range(2):
        path = tmp_path / f"{at}"
        path.write_bytes(traces[-1])
        traces.append(converted(path, to)[0])
    first, *again = map(facts, traces)
    assert [differences(first, one) for one in again] == [[], []]
