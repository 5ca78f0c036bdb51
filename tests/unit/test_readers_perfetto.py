"""Perfetto's traces: tracks, names, arguments, counters and flows, clocks and sequences, and damage."""

from __future__ import annotations

import io
import zlib
from random import Random
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

from tests.native.inputs import mutated
from tests.support.batches import read_all
from tests.support.perfetto_trace import (
    BEGIN,
    BOOTTIME,
    CLEARED,
    COUNTER,
    END,
    INSTANT,
    MONOTONIC,
    NEEDS,
    REALTIME,
    TraceMade,
)
from tracepipe.converters.packets import delimited, number, tag, text, varint
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Header, Problem, Record
from tracepipe.readers import (
    perfetto,
    perfetto_events,
    perfetto_packets,
    perfetto_tracks,
    recognise,
)

Read = tuple[Header, list[Record], list[Problem]]


def read(data: bytes) -> Read:
    recording = perfetto.read(io.BytesIO(data))
    records, problems = read_all(recording)
    assert [fault for record in records if (fault := first_fault(record))] == []
    return recording.header, records, problems


def events(trace: TraceMade) -> list[Record]:
    """The events of a trace with which nothing is wrong."""
    _, records, problems = read(trace.bytes)
    assert problems == []
    return [record for record in records if record["type"] != "name"]


def messages_of(trace: TraceMade) -> list[str]:
    return [problem.message for problem in read(trace.bytes)[2]]


def names(trace: TraceMade) -> dict[tuple[int, int | None], str]:
    _, records, _ = read(trace.bytes)
    return {
        (record["pid"], record.get("tid")): record["name"] for record in records if record["type"] == "name"
    }


def made() -> TraceMade:
    trace = TraceMade()
    trace.thread()
    return trace


# Slices and instants ------------------------------------------------------------------------------------


def test_a_slice_is_a_begin_and_an_end_of_its_thread() -> None:
    trace = made()
    trace.event(10, BEGIN, "work", categories=["a", "b"]).track_event.debug_annotations.add(
        name="size", int_value=-5
    )
    trace.event(30, END).track_event.debug_annotations.add(name="result", uint_value=1 << 63)
    of = {"type": "hook", "layer": "events", "name": "work", "pid": 7, "tid": 7}
    assert events(trace) == [
        of | {"phase": "B", "ts_ns": 10, "args": {"cat": "a,b", "size": -5}},
        of | {"phase": "E", "ts_ns": 30, "args": {"result": 1 << 63}},
    ]
    assert names(trace) == {(7, 7): "worker"}


def test_an_end_closes_what_began_last_whatever_order_the_packets_have() -> None:
    trace = made()
    trace.event(40, END, "outer")
    trace.event(30, END)
    trace.event(10, BEGIN, "outer")
    trace.event(20, BEGIN, "inner")
    assert [(one["ts_ns"], one["phase"], one["name"]) for one in events(trace)] == [
        (10, "B", "outer"), (20, "B", "inner"), (30, "E", "inner"), (40, "E", "outer"),
    ]  # fmt: skip


def test_an_end_without_a_begin_keeps_its_name() -> None:
    trace = made()
    trace.event(10, END, "lost")
    trace.event(20, END)
    assert [(one["phase"], one["name"]) for one in events(trace)] == [("E", "lost"), ("E", "no name")]


def test_events_without_a_name_or_a_track_are_kept() -> None:
    trace = TraceMade()
    trace.event(10, INSTANT).track_event.ClearField("track_uuid")
    (instant,) = events(trace)
    assert instant["name"] == "no name"
    assert names(trace)[instant["pid"], None] == "events without a track"


def test_an_end_with_a_name_closes_the_slice_of_that_name_and_what_is_inside() -> None:
    trace = made()
    for ts_ns, name in ((1, "outer"), (2, "inner"), (3, "innermost")):
        trace.event(ts_ns, BEGIN, name, categories=[name])
    trace.event(4, END, categories=["inner"])
    trace.event(5, END, "of none")
    trace.event(6, END)
    _, records, problems = read(trace.bytes)
    ends = [(one["ts_ns"], one["name"]) for one in records if one.get("phase") == "E"]
    assert ends == [(4, "inner"), (6, "outer")]
    assert problems[0].message == "1 end without an open slice: it is left out"


def test_begins_beyond_those_that_can_be_open_are_left_out_with_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(perfetto_events, "_OPEN_MAX", 1)
    trace = made()
    for ts_ns, kind in ((1, BEGIN), (2, BEGIN), (3, END), (4, END)):
        trace.event(ts_ns, kind, "f")
    _, records, problems = read(trace.bytes)
    assert [one["ts_ns"] for one in records if one["type"] == "hook"] == [1, 4]
    assert "1 more begins than can be open" in problems[0].message


# Arguments ----------------------------------------------------------------------------------------------


def test_annotations_are_arguments_of_every_kind() -> None:
    trace = made()
    add = trace.event(10, INSTANT, "x").track_event.debug_annotations.add
    add(name="bool", bool_value=True)
    add(name="double", double_value=0.5)
    add(name="not a number", double_value=float("nan"))
    add(name="text", string_value="größe")
    add(name="pointer", pointer_value=255)
    add(name="json", legacy_json_value='{"a":[1]}')
    add(name="no json", legacy_json_value="{")
    array = add(name="array")
    array.array_values.add(int_value=1)
    array.array_values.add().array_values.add(string_value="x")
    table = add(name="table")
    table.dict_entries.add(name="k", int_value=2)
    table.dict_entries.add(name="deep").dict_entries.add(name="l", bool_value=False)
    old = add(name="old").nested_value
    old.dict_keys.extend(["i", "s"])
    old.dict_values.add(int_value=-1)
    old.dict_values.add().array_values.add(string_value="y")
    add(name="nothing")
    (instant,) = events(trace)
    assert instant["args"] == {
        "bool": True, "double": 0.5, "not a number": "nan", "text": "größe", "pointer": "0xff",
        "json": {"a": [1]}, "no json": "{", "array": [1, ["x"]], "table": {"k": 2, "deep": {"l": False}},
        "old": {"i": -1, "s": ["y"]},
    }  # fmt: skip


def interned(trace: TraceMade, sequence: int = 1, flags: int = CLEARED) -> Any:
    return trace.packet(sequence, sequence_flags=flags).interned_data


def test_names_by_number_are_those_of_the_sequence() -> None:
    trace = made()
    for sequence in (1, 2):
        data = interned(trace, sequence)
        data.event_names.add(iid=1, name=f"name {sequence}")
        data.event_categories.add(iid=1, name=f"cat {sequence}")
        data.debug_annotation_names.add(iid=1, name=f"key {sequence}")
        data.debug_annotation_string_values.add(iid=1, str=b"value %d" % sequence)
    for sequence in (2, 1):
        event = trace.event(sequence, INSTANT, "", sequence, name_iid=1, category_iids=[1]).track_event
        event.debug_annotations.add(name_iid=1, string_value_iid=1)
    assert [(one["name"], one["args"]) for one in events(trace)] == [
        (f"name {at}", {"cat": f"cat {at}", f"key {at}": f"value {at}"}) for at in (1, 2)
    ]


def test_a_name_that_is_not_there_is_counted_and_the_event_kept() -> None:
    trace = made()
    interned(trace).event_names.add(iid=1, name="known")
    trace.event(5, INSTANT, name_iid=1)
    interned(trace)  # which begins anew
    trace.event(10, INSTANT, name_iid=1).track_event.debug_annotations.add(name_iid=3, string_value_iid=4)
    _, records, problems = read(trace.bytes)
    assert [one["name"] for one in records if one["type"] == "hook"] == ["known", "name 1"]
    assert problems[0].message == "3 names by number are not in the trace"


def test_sources_logs_stacks_and_correlations_are_arguments() -> None:
    trace = made()
    data = interned(trace)
    data.source_locations.add(iid=1, file_name="a.cc", function_name="f", line_number=3)
    data.log_message_body.add(iid=1, body="said")
    data.function_names.add(iid=1, str=b"main")
    data.source_paths.add(iid=1, str=b"m.cc")
    data.frames.add(iid=1, function_name_id=1, source_path_iid=1, line_number=9)
    data.frames.add(iid=2, rel_pc=255)
    data.callstacks.add(iid=1, frame_ids=[1, 2])
    data.correlation_id_str.add(iid=1, str=b"request")
    event = trace.event(10, INSTANT, "x", callstack_iid=1, correlation_id_str_iid=1).track_event
    event.log_message.source_location_iid = event.log_message.body_iid = 1
    inline = trace.event(20, INSTANT, "y", correlation_id=4).track_event
    inline.callstack.frames.add(function_name="outer")
    inline.callstack.frames.add(function_name="inner", source_file="i.cc", line_number=2)
    trace.event(30, END, callstack_iid=1)
    one, two, three = (record["args"] for record in events(trace))
    assert three == {"end_callstack": one["callstack"]}
    assert one == {
        "callstack": ["0xff", "m.cc:9 main"], "correlation_id": "request", "source": "a.cc:3 f", "log": "said"
    }  # fmt: skip
    assert two == {"callstack": ["i.cc:2 inner", "outer"], "correlation_id": 4}


def test_annotations_deeper_or_more_than_can_be_kept_are_counted() -> None:
    trace = made()
    event = trace.event(10, INSTANT, "x").track_event
    deep = event.debug_annotations.add(name="deep")
    for _ in range(60):
        deep = deep.array_values.add()
    deep.int_value = 1
    many = event.debug_annotations.add(name="many")
    for _ in range(5000):
        many.array_values.add(int_value=1)
    _, records, problems = read(trace.bytes)
    assert records[0]["name"] == "x"
    assert "arguments are left out: an event has more than can be kept" in problems[0].message


# Tracks -------------------------------------------------------------------------------------------------


def placed(trace: TraceMade) -> dict[str, tuple[str | None, str | None, str]]:
    """By name of an event the names of its process and thread, and its layer."""
    called = names(trace)
    _, records, _ = read(trace.bytes)
    return {
        one["name"]: (
            called.get((one["pid"], None)), called.get((one["pid"], one.get("tid"))), one["layer"]
        )
        for one in records
        if one["type"] == "hook"
    }  # fmt: skip


def test_tracks_stand_by_those_above_them() -> None:
    trace = made()
    process = trace.packet().track_descriptor
    process.uuid, process.process.pid, process.process.process_name = 2, 7, "server"
    trace.track(3, "queue", 1)
    trace.track(4, "inner", 3)
    trace.track(5, "jobs", 2)
    trace.track(6, "job 1", 5)
    trace.track(7, "machine")
    trace.track(8, "fan", 7)
    trace.track(9, "blade", 8)
    for uuid in range(1, 10):
        trace.event(uuid, INSTANT, f"on {uuid}", track_uuid=uuid)
    assert placed(trace) == {
        "on 1": ("server", "worker", "events"),
        "on 2": ("server", "events", "events"),
        "on 3": ("server", "worker", "queue"),
        "on 4": ("server", "worker", "queue / inner"),
        "on 5": ("server", "jobs", "events"),
        "on 6": ("server", "jobs", "job 1"),
        "on 7": ("machine", "machine", "events"),
        "on 8": ("machine", "fan", "events"),
        "on 9": ("machine", "fan", "blade"),
    }


def test_tracks_of_one_name_stay_apart() -> None:
    trace = made()
    for uuid in (3, 4):
        trace.track(uuid, "requests", 1)
        trace.event(uuid, INSTANT, f"on {uuid}", track_uuid=uuid)
    assert [placed(trace)[f"on {uuid}"][2] for uuid in (3, 4)] == ["requests", "requests (2)"]


def test_tracks_under_one_that_orders_them_stand_by_their_ranks() -> None:
    trace = TraceMade()
    trace.track(1, "jobs", child_ordering=pb.TrackDescriptor.EXPLICIT)
    for rank, name in ((2, "first"), (30, "last"), (4, "middle")):
        trace.track(rank + 10, name, 1, sibling_order_rank=rank)
        trace.event(rank, INSTANT, name, track_uuid=rank + 10)
    tids = {one["name"]: one["tid"] for one in events(trace)}
    assert tids["first"] < tids["middle"] < tids["last"]


@pytest.mark.parametrize("parent", [3, 4, 99])
def test_a_track_under_itself_or_under_none_that_is_known_is_a_track(parent: int) -> None:
    trace = TraceMade()
    trace.track(3, "a", parent)
    trace.track(4, "b", 3)
    trace.event(1, INSTANT, "on it", track_uuid=3)
    assert placed(trace)["on it"][1] == "a"


def test_events_on_a_track_that_is_not_described_are_kept_and_counted() -> None:
    trace = TraceMade()
    trace.event(1, INSTANT, "x", track_uuid=255)
    assert placed(trace)["x"][0] == "track ff"
    assert messages_of(trace) == ["1 track with events is not described"]


def test_a_descriptor_may_stand_behind_its_events() -> None:
    trace = TraceMade()
    trace.event(1, INSTANT, "x")
    trace.thread()
    assert placed(trace) == {"x": (None, "worker", "events")}


def test_processes_that_have_the_pid_of_another_are_told_apart() -> None:
    trace = TraceMade()
    for at, (process, thread, name) in enumerate(
        ((10, 1, "one"), (20, 2, "two"), (10, 1, "one"), (30, 3, ""))
    ):
        of = trace.packet().track_descriptor
        of.uuid, of.process.pid, of.process.process_name = process, 5, name
        trace.thread(thread, 5, 6, f"worker {thread}")
        trace.event(100 * at, INSTANT, f"of {thread}", track_uuid=thread)
    _, records, problems = read(trace.bytes)
    titles = {record["pid"]: record["name"] for record in records if "tid" not in record}
    found = [(one["name"], titles[one["pid"]], one["tid"]) for one in records if one["type"] == "hook"]
    assert problems == [] and titles[5] == "one"
    assert found == [
        ("of 1", "one", 6), ("of 2", "two (pid 5, number 2)", 6), ("of 1", "one", 6),
        ("of 3", "pid 5, number 3", 6),
    ]  # fmt: skip


def test_threads_of_a_process_with_one_tid_are_told_apart_by_their_names() -> None:
    trace = TraceMade()
    for uuid, name in ((1, "first"), (2, "second"), (3, "second")):
        trace.thread(uuid, 5, 6, name)
        trace.event(uuid, INSTANT, "x", track_uuid=uuid)
    titles = names(trace)
    found = [(titles[one["pid"], one["tid"]], one["layer"]) for one in events(trace)]
    again = "second (tid 6, number 2)"
    assert found == [("first", "events"), (again, "events"), (again, "events (2)")]


def test_machines_have_processes_threads_tracks_and_names_of_their_own() -> None:
    trace = TraceMade()
    for machine in (0, 1001):
        interned(trace).event_names.add(iid=1, name=f"on {machine}")
        trace.trace.packet[-1].machine_id = machine
        for fill in (lambda: trace.thread(1, 5, 6, "worker"), lambda: trace.counter(2, "load", 1)):
            fill()
            trace.trace.packet[-1].machine_id = machine
    for at, machine in enumerate((0, 1001, 0)):
        for kind, fields in ((INSTANT, {"name_iid": 1}), (COUNTER, {"track_uuid": 2, "counter_value": at})):
            trace.event(10 * at, kind, **fields).machine_id = machine
    titles = {key: name for key, name in names(trace).items() if key[1] is None}
    found = [
        (one["name"], titles.get((one["pid"], None)), one["tid"]) for one in events(trace) if "tid" in one
    ]
    other = "pid 5 on machine 1001"
    assert found == [("on 0", None, 6), ("on 1001", other, 10_000_006), ("on 0", None, 6)]
    loads = [
        (one["args"]["value"], titles.get((one["pid"], None))) for one in events(trace) if "tid" not in one
    ]
    assert loads == [(0, None), (1, other), (2, None)]


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({0: "node0", 7: "node7"}, ["a on node0", "b on node7"]),
        ({7: "node7"}, ["a", "b on node7"]),
        ({0: "box", 7: "box"}, ["a on box (machine 0)", "b on box (machine 7)"]),
        ({}, ["a", "b on machine 7"]),
    ],
)
def test_machines_are_the_hosts_of_their_processes(stated: dict[int, str], expected: list[str]) -> None:
    trace = TraceMade()
    for machine, name in ((0, "a"), (7, "b")):
        process = trace.packet(machine_id=machine).track_descriptor
        process.uuid, process.process.pid, process.process.process_name = 1, 5, name
        trace.event(9, INSTANT, "x").machine_id = machine
    trace.event(9, INSTANT, "y", track_uuid=0).machine_id = 7
    for machine, host in stated.items():
        system = trace.packet(machine_id=machine).system_info
        system.machine_name, system.utsname.release, system.utsname.machine = host, f"6.{machine}", "x86_64"
    header, records, _ = read(trace.bytes)
    titles = names(trace)
    assert [
        titles[5 + of_host, None] for of_host in (0, 10_000_000) if (5 + of_host, None) in titles
    ] == expected
    assert header.host == stated.get(0, "") and header.kernel == ("6.0" if 0 in stated else "")
    host = expected[1].removeprefix("b")
    (alone,) = [one["pid"] for one in records if one["name"] == "y"]
    assert titles[alone, None] == f"events without a track{host}"
    assert titles[10_000_000, None] == f"processes{host}"


def test_flows_of_two_machines_with_one_number_are_two() -> None:
    trace = made()
    trace.thread()
    trace.on_machine(7)
    for at, kind in enumerate((BEGIN, END, BEGIN, END)):
        for machine in (0, 7):
            trace.event(at, kind, "x", flow_ids=[9] if kind == BEGIN else []).machine_id = machine
    ends = [(number, phase) for _, phase, _, number in flows(trace)]
    (other,) = {number for number, _ in ends} - {9}
    assert [phase for number, phase in ends if number == 9] == ["s", "t"]
    assert [phase for number, phase in ends if number == other] == ["s", "t"]


def test_machines_beyond_those_that_are_told_apart_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_tracks, "_MACHINES_MAX", 2)
    trace = TraceMade()
    for machine in (0, 7, 8):
        trace.packet(machine_id=machine)
    assert messages_of(trace) == ["1 track, process or thread is left out: there are more than can be kept"]


def test_ids_that_no_system_gives_get_numbers() -> None:
    trace = TraceMade()
    trace.thread(1, -5, 1 << 40)
    trace.event(1, INSTANT, "x")
    (one,) = events(trace)
    assert (one["pid"], one["tid"]) == (2147483647, 2147483646)


def test_tracks_beyond_those_that_can_be_kept_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_tracks, "_TRACKS_MAX", 2)
    trace = made()
    for uuid in range(3):
        trace.event(uuid, INSTANT, "x", track_uuid=uuid + 1)
    assert messages_of(trace) == [
        "1 event on more tracks than can be kept: it is left out",
        "1 track with events is not described",
    ]


def test_names_of_the_machine_are_those_of_processes_and_threads() -> None:
    trace = made()
    tree = trace.packet().process_tree
    tree.processes.add(pid=9, cmdline=["/usr/bin/python", "train.py"])
    tree.threads.add(tid=10, tgid=9, name="loader")
    trace.event(1, INSTANT, "x")
    assert names(trace) == {(7, 7): "worker", (9, None): "python", (9, 10): "loader"}


# Counters -----------------------------------------------------------------------------------------------


def values(trace: TraceMade) -> list[tuple[int, str, Any]]:
    return [(one["ts_ns"], one["name"], one["args"]["value"]) for one in events(trace) if one["phase"] == "C"]


def test_counters_have_their_units_and_multipliers() -> None:
    trace = made()
    trace.track(12, "others")
    trace.counter(2, "power", 1, unit_name="W")
    trace.counter(3, "bytes", unit=pb.CounterDescriptor.UNIT_SIZE_BYTES, unit_multiplier=1024)
    trace.counter(4, "bytes", 12, unit_name="MB")  # another unit for this name
    trace.event(1, COUNTER, track_uuid=2, double_counter_value=1.5)
    trace.event(2, COUNTER, track_uuid=3, counter_value=-2)
    trace.event(3, COUNTER, track_uuid=4, counter_value=7)
    assert values(trace) == [(1, "worker 7 power", 1.5), (2, "bytes", -2048), (3, "bytes (MB)", 7)]
    header, _, _ = read(trace.bytes)
    assert header.counters == [{"name": "worker 7 power", "unit": "W"}, {"name": "bytes", "unit": "bytes"}]


def test_values_that_are_differences_are_added_up_until_the_state_is_cleared() -> None:
    trace = made()
    trace.counter(2, "n", is_incremental=True, unit_multiplier=10)
    for ts_ns in (1, 2):
        trace.event(ts_ns, COUNTER, track_uuid=2, counter_value=3)
    interned(trace)
    trace.event(3, COUNTER, track_uuid=2, counter_value=1)
    assert [value for _, _, value in values(trace)] == [30, 60, 10]


def test_values_that_events_bring_along_are_those_of_the_tracks_that_are_named() -> None:
    trace = made()
    trace.counter(2, "a")
    trace.counter(3, "b")
    trace.counter(4, "time", type=pb.CounterDescriptor.COUNTER_THREAD_TIME_NS)
    defaults = trace.packet(sequence_flags=CLEARED).trace_packet_defaults.track_event_defaults
    defaults.extra_counter_track_uuids.extend([2, 4])
    defaults.track_uuid = 1
    trace.event(1, INSTANT, "x", extra_counter_values=[5, 6]).track_event.ClearField("track_uuid")
    more: dict[str, Any] = {"extra_double_counter_track_uuids": [3], "extra_double_counter_values": [0.25]}
    trace.event(2, INSTANT, "y", extra_counter_track_uuids=[3], extra_counter_values=[7, 8], **more)
    _, records, problems = read(trace.bytes)
    found = [(one["name"], one["args"]["value"]) for one in records if one.get("phase") == "C"]
    assert found == [("a", 5), ("b", 7), ("b", 0.25)]
    assert {problem.message for problem in problems} == {
        "1 value of a thread's time: it is left out",
        "1 value without a counter: it is left out",
    }


# Flows -------------------------------------------------------------------------------------------------


def flows(trace: TraceMade) -> list[tuple[int, str, str, int]]:
    return [(one["ts_ns"], one["phase"], one["name"], one["flow"]) for one in events(trace) if "flow" in one]


def test_a_flow_starts_goes_on_and_ends_and_its_number_may_come_again() -> None:
    trace = made()
    for ts_ns, fields in enumerate(({"flow_ids": [9]}, {"flow_ids": [9]}, {"terminating_flow_ids": [9]})):
        trace.event(ts_ns, BEGIN, "f", **fields)
    trace.event(3, BEGIN, "f", flow_ids=[9])
    first, second, third, again = flows(trace)
    assert [first, second, third] == [(0, "s", "f", 9), (1, "t", "f", 9), (2, "f", "f", 9)]
    assert again[1] == "s" and again[3] != 9


def test_a_flow_that_ends_before_it_begins_is_counted() -> None:
    trace = made()
    trace.event(1, INSTANT, "mark", terminating_flow_ids=[9])
    trace.event(2, BEGIN, "f", terminating_flow_ids=[9])
    _, records, problems = read(trace.bytes)
    assert [(one["name"], one["phase"]) for one in records if one["type"] == "hook"] == [
        ("mark", "I"), ("f", "B"),
    ]  # fmt: skip
    assert problems[0].message == "2 flows end without a begin: they are left out"


def test_a_flow_of_an_instant_is_the_instant_unless_a_slice_begins_there() -> None:
    trace = made()
    trace.event(1, INSTANT, "mark", flow_ids=[1 << 63]).track_event.debug_annotations.add(
        name="a", int_value=1
    )
    trace.event(2, BEGIN, "f")
    trace.event(2, INSTANT, "mark", terminating_flow_ids=[1 << 63])
    found = [(one["ts_ns"], one["phase"], one["name"], one.get("args", {})) for one in events(trace)]
    assert found == [
        (1, "s", "mark", {"a": 1}), (2, "B", "f", {}), (2, "I", "mark", {}), (2, "f", "mark", {}),
    ]  # fmt: skip


@pytest.mark.parametrize("direction", [1, 3])
def test_flows_of_the_older_form_lead_from_slice_to_slice(direction: int) -> None:
    trace = made()
    for ts_ns, name, towards in ((1, "a", 2), (2, "b", direction), (3, "c", 1)):
        legacy = trace.event(ts_ns, BEGIN, name).track_event.legacy_event
        legacy.bind_id, legacy.flow_direction = 9, towards
    assert flows(trace) == [(1, "s", "a", 9), (2, "t", "b", 9), (3, "t", "c", 9)]
    trace.event(4, BEGIN, "d").track_event.legacy_event.MergeFrom(
        pb.TrackEvent.LegacyEvent(bind_id=8, flow_direction=1)
    )
    assert messages_of(trace) == ["1 flow ends without a begin: it is left out"]


def test_events_that_are_ends_of_flows_are_those_of_their_number_and_name() -> None:
    trace = made()
    for ts_ns, phase in enumerate("stf"):
        legacy = trace.event(ts_ns, 0, "go").track_event.legacy_event
        legacy.phase, legacy.unscoped_id = ord(phase), 3
    assert [(ts_ns, phase, name) for ts_ns, phase, name, _ in flows(trace)] == [
        (0, "s", "go"), (1, "t", "go"), (2, "f", "go"),
    ]  # fmt: skip
    assert len({number for *_, number in flows(trace)}) == 1


def test_events_of_the_older_form_may_state_their_process_and_thread() -> None:
    trace = TraceMade()
    trace.packet(sequence_flags=CLEARED)
    trace.thread()
    both = {"pid_override": 5, "tid_override": 6}
    for fields in (
        both, {"pid_override": 7, "tid_override": 7}, {"tid_override": 9}, {"pid_override": 5},
        both | {"instant_event_scope": 2}, both | {"instant_event_scope": 1}, both | {"pid_override": 0},
        {"tid_override": 0}, {"thread_duration_us": 3},
    ):  # fmt: skip
        event = trace.packet(timestamp=1).track_event
        event.thread_time_absolute_us = 3
        event.legacy_event.MergeFrom(pb.TrackEvent.LegacyEvent(phase=ord("I"), **fields))
    _, records, problems = read(trace.bytes)
    found = [(one["pid"], one["tid"]) for one in records if one["type"] == "hook"]
    assert found[:3] == [(5, 6), (7, 7), (7, 9)] and found[6] == (7, 7)
    assert [pid for pid, tid in found[3:5] if tid > 1 << 30] == [5, 5] and found[5][0] > 1 << 30
    assert [one.message for one in problems] == [
        "8 values of a thread's time: they are left out",
        "2 events state a process or thread 0: they are left out",
    ]


def test_the_thread_of_a_sequence_has_its_events_after_its_state_is_cleared() -> None:
    trace = TraceMade()
    trace.packet(sequence_flags=CLEARED)
    trace.thread(3, 5, 6)
    trace.packet(sequence_flags=CLEARED)
    trace.packet(timestamp=10).track_event.type = INSTANT
    assert [(one["pid"], one["tid"]) for one in events(trace)] == [(5, 6)]


# Of old -------------------------------------------------------------------------------------------------


def test_events_of_one_time_are_in_the_order_of_the_file_and_long_slices_first() -> None:
    trace = made()

    def whole(name: str, dur_us: int) -> None:
        event = trace.event(1000, pb.TrackEvent.TYPE_UNSPECIFIED, name).track_event
        event.legacy_event.phase, event.legacy_event.duration_us = ord("X"), dur_us

    trace.event(50, BEGIN, "a")
    trace.event(1000, END)
    whole("short", 5)
    whole("long", 9)
    trace.event(1000, BEGIN, "b")
    trace.event(1000, END)
    found = [(one["name"], one["phase"]) for one in events(trace)]
    assert found == [("a", "B"), ("a", "E"), ("long", "X"), ("short", "X"), ("b", "B"), ("b", "E")]


def test_events_of_the_older_form_have_their_phase_and_their_times() -> None:
    trace = TraceMade()
    thread = trace.packet(sequence_flags=CLEARED).thread_descriptor
    thread.pid, thread.tid, thread.reference_timestamp_us = 5, 6, 1000
    interned(trace, flags=0).event_names.add(iid=1, name="old")
    for delta_us, phase in ((1, "B"), (2, "E"), (3, "X"), (4, "b"), (5, "n"), (6, "e")):
        event = trace.packet().track_event
        event.timestamp_delta_us, event.legacy_event.phase = delta_us, ord(phase)
        event.legacy_event.name_iid = 1
        if phase == "X":
            event.legacy_event.duration_us = 2
        if phase in "bne":
            event.legacy_event.unscoped_id = 3
            event.categories.append("io")
    found = [(one["ts_ns"], one["phase"], one["tid"], one["layer"]) for one in events(trace)]
    assert found == [
        (1_001_000, "B", 6, "events"), (1_003_000, "E", 6, "events"), (1_006_000, "X", 6, "events"),
        (1_010_000, "B", 6, "io"), (1_015_000, "I", 6, "io"), (1_021_000, "E", 6, "io"),
    ]  # fmt: skip


# Clocks and sequences -----------------------------------------------------------------------------------


def test_the_clock_of_a_trace_is_the_primary_one_of_its_first_snapshot() -> None:
    trace = made()
    trace.snapshot(primary=MONOTONIC, clock_1=10**18, clock_3=1000, clock_6=5000)
    trace.event(2000, INSTANT, "x")
    header, _, _ = read(trace.bytes)
    assert header.clock == "monotonic"
    assert header.start == {"realtime_ns": 10**18, "monotonic_ns": 1000, "boottime_ns": 5000}


def test_without_a_snapshot_of_several_host_clocks_the_clock_is_its_own() -> None:
    trace = made()
    trace.snapshot(clock_6=5000)
    trace.snapshot(clock_6=5000, clock_64=0)
    trace.event(2000, INSTANT, "x")
    assert read(trace.bytes)[0].clock == "trace"


def test_times_go_from_clock_to_clock_by_the_last_snapshot_before_them() -> None:
    trace = made()
    trace.snapshot(clock_6=1000, clock_3=100)
    trace.snapshot(clock_6=2000, clock_3=1000)
    trace.snapshot(clock_3=0, clock_1=7_000_000)
    for ts_ns, clock in ((50, MONOTONIC), (999, MONOTONIC), (1000, MONOTONIC), (7_001_500, REALTIME)):
        trace.event(ts_ns, INSTANT, "x").timestamp_clock_id = clock
    trace.event(4000, INSTANT, "x").timestamp_clock_id = BOOTTIME
    assert [one["ts_ns"] for one in events(trace)] == [950, 1899, 2000, 2500, 4000]


def test_an_incremental_clock_is_its_sequence_s_and_counts_from_its_snapshot() -> None:
    trace = made()
    for sequence, start_ns in ((1, 1000), (2, 5000)):
        packet = trace.packet(sequence, sequence_flags=CLEARED)
        packet.clock_snapshot.clocks.add(clock_id=BOOTTIME, timestamp=start_ns)
        packet.clock_snapshot.clocks.add(clock_id=64, timestamp=0, is_incremental=True, unit_multiplier_ns=10)
        packet.trace_packet_defaults.timestamp_clock_id = 64
    for step in (1, 2):
        for sequence in (1, 2):
            trace.event(step, INSTANT, f"of {sequence}", sequence)
    assert [(one["ts_ns"], one["name"]) for one in events(trace)] == [
        (1010, "of 1"), (1030, "of 1"), (5010, "of 2"), (5030, "of 2"),
    ]  # fmt: skip


def test_events_on_a_clock_that_nothing_relates_are_counted() -> None:
    trace = made()
    trace.event(1, INSTANT, "x").timestamp_clock_id = MONOTONIC
    assert messages_of(trace) == ["1 packet is on a clock that is not related to the trace's"]


def test_packets_that_need_a_state_are_left_out_until_it_is_cleared() -> None:
    trace = made()
    trace.event(1, INSTANT, "too early", sequence=2).sequence_flags = NEEDS
    trace.event(2, INSTANT, "good", sequence=2).sequence_flags = CLEARED | NEEDS
    trace.event(3, INSTANT, "lost", sequence=2).previous_packet_dropped = 1
    trace.trace.packet[-1].sequence_flags = NEEDS
    trace.event(4, INSTANT, "good again", sequence=2).sequence_flags = CLEARED
    _, records, problems = read(trace.bytes)
    assert [one["name"] for one in records if one["type"] == "hook"] == ["good", "good again"]
    assert problems[0].message == "2 packets need names or times from packets that are missing"


# What is not read, and damage ---------------------------------------------------------------------------


def test_packets_that_are_not_read_are_counted_by_their_kind() -> None:
    trace = made()
    for _ in range(2):
        trace.packet().perf_sample.pid = 1
    trace.packet().chrome_metadata.SetInParent()
    trace.packet().trace_config.SetInParent()
    assert messages_of(trace) == ["packets of these kinds are not read: 2 perf_sample, 1 chrome_metadata"]


def test_kinds_of_packets_beyond_those_that_are_counted_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto, "_KINDS_MAX", 2)
    packets = b"".join(delimited(1, delimited(field, b"")) for field in (800, 801, 802, 803, 800))
    (problem,) = read(packets)[2]
    assert problem.message.endswith("2 of field 800, 2 of further kinds, 1 of field 801")


def test_packed_packets_are_read_and_broken_ones_reported() -> None:
    trace = made()
    trace.event(1, INSTANT, "x")
    packed = delimited(1, delimited(50, zlib.compress(trace.bytes)))
    assert [one["name"] for one in read(packed)[1]] == ["x", "worker"]
    broken = packed[:-9] + bytes(9)
    assert any("compressed data cannot be read" in one.message for one in read(broken)[2])
    over_and_over = packed
    for _ in range(3):
        over_and_over = delimited(1, delimited(50, zlib.compress(over_and_over)))
    assert "compressed too many times" in read(over_and_over)[2][0].message


def test_a_trace_that_is_cut_off_has_all_but_its_last_packet() -> None:
    trace = made()
    trace.event(1, INSTANT, "x")
    whole = trace.bytes
    trace.event(2, INSTANT, "y")
    for end in range(len(whole) + 1, len(trace.bytes)):
        _, records, problems = read(trace.bytes[:end])
        assert [one["name"] for one in records if one["type"] == "hook"] == ["x"]
        assert len(problems) == 1 and "what follows is not read" in problems[0].message


def test_a_packet_that_is_too_large_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perfetto_packets, "PACKET_BYTES_MAX", 4000)
    trace = made()
    trace.event(1, INSTANT, "x" * 200_000)
    trace.event(2, INSTANT, "y")
    _, records, problems = read(trace.bytes)
    assert [one["name"] for one in records if one["type"] == "hook"] == ["y"]
    assert "over 64 MiB" in problems[0].message


@pytest.fixture
def small_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packets over 200 bytes are large."""
    monkeypatch.setattr(perfetto_packets, "AT_HAND_BYTES", 200)
    monkeypatch.setattr(perfetto_packets, "AT_HAND_BYTES", 200)
    monkeypatch.setattr(perfetto_packets, "_PART_BYTES", 60)


@pytest.mark.usefixtures("small_room")
def test_names_of_a_large_packet_are_all_there_for_its_event() -> None:
    trace = made()
    packet = trace.packet(timestamp=5, sequence_flags=CLEARED | NEEDS)
    packet.track_event.type, packet.track_event.name_iid, packet.track_event.track_uuid = INSTANT, 60, 1
    for iid in range(1, 100):
        packet.interned_data.event_names.add(iid=iid, name=f"name number {iid}")
    trace.event(7, INSTANT, name_iid=99).sequence_flags = NEEDS
    _, records, problems = read(trace.bytes)
    assert [one["name"] for one in records if one["type"] == "hook"] == ["name number 60", "name number 99"]
    assert not problems


@pytest.mark.usefixtures("small_room")
def test_an_event_with_a_field_that_does_not_fit_is_kept_without_it() -> None:
    trace = made()
    event = trace.event(1, INSTANT, "x").track_event
    event.debug_annotations.add(name="long", string_value="y" * 900)
    event.debug_annotations.add(name="short", string_value="z")
    trace.event(2, INSTANT, "y")
    trace.packet().packages_list.packages.add(name="p" * 300)
    _, records, problems = read(trace.bytes)
    first, second = (one for one in records if one["type"] == "hook")
    assert (first["name"], first["args"], second["name"]) == ("x", {"short": "z"}, "y")
    assert "bytes: 1 of its fields do not fit in 1 MiB, and are not read" in problems[0].message
    assert problems[0].skipped
    assert "of these kinds are not read: 1 of field 47" in problems[1].message


@pytest.mark.usefixtures("small_room")
def test_large_packets_may_be_packed_and_packed_into() -> None:
    inner, outer = made(), made()
    for at in range(200):
        inner.event(at, INSTANT, f"{at * 977:x}")
    tree = inner.packet().process_tree
    for number_of_one in range(1, 30):
        tree.processes.add(pid=number_of_one, cmdline=[f"/bin/program-{number_of_one}"])
    packed = zlib.compress(inner.bytes)
    assert len(packed) > 200
    for _ in range(2):
        outer.trace.packet.add(compressed_packets=packed)
    _, records, problems = read(outer.bytes)
    assert len([one for one in records if one["type"] == "hook"]) == 400
    assert not [one for one in problems if one.skipped]


@pytest.mark.usefixtures("small_room")
@pytest.mark.parametrize("at", [3, 30, 1000])
def test_the_rest_of_a_large_broken_packet_is_lost(at: int) -> None:
    trace, broken = made(), pb.Trace()
    trace.event(1, INSTANT, "x")
    names = broken.packet.add(trusted_packet_sequence_id=1).interned_data
    for iid in range(100):
        names.event_names.add(iid=iid, name="name")
    data = bytearray(broken.SerializeToString())
    data[at] = 0x07
    _, records, problems = read(trace.bytes + bytes(data) + trace.bytes)
    assert [one["name"] for one in records if one["type"] == "hook"] == ["x", "x"]
    assert f"the packet at byte {len(trace.bytes)}" in problems[0].message


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (text(11, "") + b"\x5b", "is not a field"),
        (tag(11, 2) + varint(99), "a field is cut off"),
        (tag(8, 0) + b"\xff" * 11, "a number does not end"),
        (delimited(11, tag(4, 2) + varint(5)), "a field is cut off"),
    ],
)
def test_only_the_broken_packet_is_lost(fields: bytes, what: str) -> None:
    trace = made()
    trace.event(1, INSTANT, "x")
    _, records, problems = read(trace.bytes + delimited(1, fields) + trace.bytes)
    assert [one["name"] for one in records if one["type"] == "hook"] == ["x", "x"]
    (problem,) = problems
    assert problem.message.startswith(f"the packet at byte {len(trace.bytes)} cannot be read")
    assert what in problem.message


def test_fields_of_a_wrong_type_are_none() -> None:
    trace = made()
    wrong = delimited(11, number(4, 5) + delimited(9, b"x") + number(23, 7) + delimited(11, b""))
    _, records, problems = read(trace.bytes + delimited(1, number(8, 1) + wrong))
    assert [one for one in records if one["type"] == "hook"] == []
    assert problems[0].message == "1 event of a type that is not read: it is left out"


@pytest.mark.parametrize("seed", range(20))
def test_damage_of_any_kind_is_reported_or_passed_over(seed: int) -> None:
    rng = Random(seed)
    trace = made()
    interned(trace).event_names.add(iid=1, name="f")
    trace.snapshot(clock_6=1000, clock_3=100)
    trace.counter(2, "n", is_incremental=True)
    trace.track(3, "t", 1)
    for at in range(12):
        event = trace.event(at, rng.choice((BEGIN, END, INSTANT)), name_iid=1, track_uuid=rng.randint(1, 3))
        event.track_event.debug_annotations.add(name="a").array_values.add(int_value=at)
        event.track_event.flow_ids.append(at % 3)
    for _ in range(20):
        read(mutated(rng, trace.bytes))


@pytest.mark.parametrize(
    "head", [b"\n" * 64, b"\n\x0a\x05text of lines\n", b"\n\x02{}\n", b"", b"\x0a\x80", b"\n\x03\xff\xff\xff"]
)
def test_other_content_is_no_trace(head: bytes) -> None:
    assert not perfetto.sniff(head)


def test_a_trace_is_known_by_its_packets() -> None:
    trace = made()
    assert recognise(trace.bytes).name == "perfetto"
    trace.event(1, INSTANT, "x" * 100_000)
    assert recognise(trace.bytes[: 1 << 16]).name == "perfetto"
    assert recognise(trace.bytes[:12]).name == "perfetto"
