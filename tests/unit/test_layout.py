"""The layout of host events: nesting, overlaps, flows through the layers, memory, names, losses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import trace_batch
from tests.support.cores import new_tables
from tests.support.timeline_text import shown
from tracepipe.event import nesting
from tracepipe.event.model import Header, Problem
from tracepipe.event.nesting import Outcomes
from tracepipe.layout import counters, merging
from tracepipe.layout import draw as layout_module
from tracepipe.layout.draw import Layout
from tracepipe.layout.timeline import BEGIN, END, Drawn, Item, Track

pytestmark = pytest.mark.usefixtures("core")


def laid_out(*batches: list[dict[str, Any]], header: Any = None) -> tuple[list[Drawn], Layout]:
    tables = new_tables()
    layout = Layout(header or Header(), tables)
    drawn = [layout.place(trace_batch(batch, tables)) for batch in batches]
    return drawn + layout.finish(), layout


def items_of(drawn: Iterable[Drawn]) -> Iterator[Item]:
    return (item for part in drawn for item in part.items())


def drawn(*records: dict[str, Any], header: Any = None) -> list[str]:
    return shown(laid_out(list(records), header=header)[0])


def call(phase: str, ts_ns: int, name: str = "f", layer: str = "userspace", **fields: Any) -> dict[str, Any]:
    return {"type": layer, "name": name, "phase": phase, "ts_ns": ts_ns, "pid": 1, "tid": 1, **fields}


def ioctl(phase: str, ts_ns: int, **fields: Any) -> dict[str, Any]:
    return call(phase, ts_ns, "ioctl", "syscall", **fields)


def driver(phase: str, ts_ns: int, name: str = "nvidia_ioctl", **fields: Any) -> dict[str, Any]:
    return call(phase, ts_ns, name, "kernel", **fields)


CALLS = ["process process 1", "thread process 1", "CUDA API"]


# Records that fit together -------------------------------------------------------------------------------


def test_begin_and_end_make_a_slice_with_the_arguments_of_both() -> None:
    lines = drawn(call("B", 10, args={"size": 4}, cpu=2), call("E", 25, args={"result": 0}))
    assert lines == [*CALLS, "10+15 f cpu=2 size=4 result=0"]


def test_calls_nest() -> None:
    events = [call("B", 1, "a"), call("B", 2, "b"), call("I", 3, "i"), call("E", 4, "b"), call("E", 5, "a")]
    assert drawn(*events) == [*CALLS, "1+4 a", "2+2 >b", "3 >>i"]


def test_complete_events_nest_whatever_their_order_at_one_time() -> None:
    inner, outer = call("X", 10, "inner", dur_ns=5), call("X", 10, "outer", dur_ns=50)
    for events in ((inner, outer), (outer, inner)):
        assert drawn(*events, call("X", 40, "later", dur_ns=20)) == [
            *CALLS,
            "10+50 outer",
            "10+5 >inner",
            "40+20 >later",
        ]


def test_a_call_follows_another_at_the_same_nanosecond() -> None:
    assert drawn(call("B", 1, "a"), call("E", 5, "a"), call("B", 5, "b"), call("E", 9, "b")) == [
        *CALLS,
        "1+4 a",
        "5+4 b",
    ]


def test_a_call_within_one_nanosecond() -> None:
    assert drawn(call("B", 7), call("E", 7)) == [*CALLS, "7+0 f"]


def test_each_layer_of_a_thread_has_a_track_and_layers_are_ordered() -> None:
    layers = ["transfer", "memory", "scheduler", "kernel", "syscall", "userspace"]
    lines = drawn(*(call("I", at, layer, layer) for at, layer in enumerate(layers)))
    assert [line for line in lines if not line[0].isdigit() and "[" not in line] == [
        *CALLS,
        "syscalls",
        "driver",
        "scheduler",
        "memory",
        "transfers",
    ]


def test_hooks_have_a_track_for_each_layer_of_their_own() -> None:
    lines = drawn(
        call("X", 10, "malloc", "hook", dur_ns=9) | {"layer": "libc.so.6"},
        call("X", 12, "pool_take", "hook", dur_ns=9) | {"layer": "my pool"},
        call("B", 30, "malloc", "hook") | {"layer": "libc.so.6"},
        call("E", 35, "pool_take", "hook") | {"layer": "my pool"},
        call("E", 39, "malloc", "hook") | {"layer": "libc.so.6"},
        call("B", 50, "unnamed", "hook"),
        call("E", 52, "unnamed", "hook") | {"layer": "hooks"},
        call("X", 12, "cuInit", dur_ns=2),
    )
    assert [line for line in lines if "[" not in line] == [
        *CALLS, "12+2 cuInit", "libc.so.6", "10+9 malloc", "30+9 malloc", "my pool", "12+9 pool_take",
        "35 pool_take no_begin=true", "hooks", "50+2 unnamed",
    ]  # fmt: skip


def test_threads_are_apart_and_the_main_thread_is_first() -> None:
    lines = drawn(call("B", 1, tid=3), call("B", 2, tid=1), call("E", 5, tid=1), call("E", 6, tid=3))
    assert lines == [*CALLS, "2+3 f", "thread process 3", "CUDA API", "1+5 f"]


def test_events_without_ids_are_drawn_and_marked() -> None:
    event = call("I", 1)
    del event["pid"], event["tid"]
    assert drawn(event, call("I", 2) | {"tid": 8}) == [
        "process (pid not recorded)".join(["process ", ""]),
        "thread thread (tid not recorded)",
        "CUDA API",
        "1 f",
        "process process 1",
        "thread process 8",
        "CUDA API",
        "2 f",
    ]


# Records that do not fit --------------------------------------------------------------------------------


def outcomes(*records: dict[str, Any]) -> tuple[list[str], Outcomes]:
    parts, layout = laid_out(list(records))
    return shown(parts), layout.outcomes


def test_a_call_without_an_end_is_drawn_to_the_end_of_the_trace() -> None:
    lines, found = outcomes(call("B", 10, "a"), call("B", 12, "b"), call("I", 90, tid=2))
    # A flow that something later could have gone on from may stand there.
    assert [line.partition(" →")[0] for line in lines[3:5]] == [
        "10+80 a unclosed=true",
        "12+78 >b unclosed=true",
    ]
    assert found == Outcomes(unclosed=2)


def test_a_return_ends_the_calls_that_were_left_open_inside() -> None:
    lines, found = outcomes(call("B", 1, "a"), call("B", 2, "b"), call("B", 3, "c"), call("E", 9, "a"))
    assert lines[3:] == ["1+8 a", "2+7 >b unclosed=true", "3+6 >>c unclosed=true"]
    assert found == Outcomes(unclosed=2)


def test_an_end_without_a_begin_is_an_instant() -> None:
    lines, found = outcomes(call("E", 5, args={"result": 1}))
    assert lines[3:] == ["5 f result=1 no_begin=true"]
    assert found == Outcomes(no_begin=1)


def test_an_end_of_another_name_ends_nothing() -> None:
    lines, found = outcomes(call("B", 1, "a"), call("E", 5, "b"), call("E", 9, "a"))
    assert lines[3:] == ["1+8 a", "5 >b no_begin=true"]
    assert found == Outcomes(no_begin=1)


def test_an_end_that_knows_its_duration_is_a_slice() -> None:
    lines, found = outcomes(call("E", 50, dur_ns=20), call("E", 60, "g", dur_ns=100))
    assert "30+20 f from_duration=true" in lines
    assert "0+60 g from_duration=true" in lines  # not before zero
    assert found.no_begin == 0


def test_the_duration_of_an_end_with_a_begin_is_not_needed() -> None:
    assert drawn(call("B", 10), call("E", 50, dur_ns=7))[3:] == ["10+40 f"]


def test_slices_that_overlap_get_an_overlap_track() -> None:
    lines, found = outcomes(call("X", 10, "a", dur_ns=20), call("X", 20, "b", dur_ns=20))
    assert lines[2:] == ["CUDA API", "10+20 a", "CUDA API (overlap 1)", "20+20 b"]
    assert found == Outcomes(overlaps=1)


def test_extra_tracks_are_used_again() -> None:
    pairs = [call("X", at * 100 + shift, dur_ns=20) for at in range(5) for shift in (0, 10)]
    lines, found = outcomes(*pairs)
    assert lines.count("CUDA API (overlap 1)") == 1
    assert not any("overlap 2" in line for line in lines)
    assert found == Outcomes(overlaps=5)


def test_a_begin_inside_an_unfinished_slice_goes_on_an_overlap_track_and_its_end_finds_it() -> None:
    lines, found = outcomes(
        call("X", 10, "x", dur_ns=50), call("B", 20, "b"), call("E", 99, "b", args={"r": 1})
    )
    assert lines[2:] == ["CUDA API", "10+50 x", "CUDA API (overlap 1)", "20+79 b r=1"]
    assert found == Outcomes(overlaps=1)


def test_more_overlaps_than_there_are_tracks_for_are_counted() -> None:
    # Each ends later than the one before, so that no two share a track.
    most = nesting.OVERLAP_ROWS_MAX
    lines, found = outcomes(*(call("X", at, dur_ns=1_000) for at in range(most + 4)))
    assert (found.overlaps, found.undrawn) == (most + 3, 3)
    assert sum("+1000 f" in line for line in lines) == most + 1


def test_sixty_four_overlaps_are_drawn() -> None:
    assert nesting.OVERLAP_ROWS_MAX == 64
    _, found = outcomes(*(call("X", at, dur_ns=1_000) for at in range(65)))
    assert (found.overlaps, found.undrawn) == (64, 0)


phases = st.sampled_from(["B", "E", "I", "X", "D"])
layers = st.sampled_from(["userspace", "syscall", "kernel"])
events = st.lists(
    st.tuples(phases, layers, st.integers(0, 60), st.integers(0, 30), st.sampled_from(["ioctl", "g"])),
    max_size=64,  # as many as there can be overlap rows
)


@given(events, st.integers(1, 9), st.integers(1, 12))
def test_any_events_give_tracks_on_which_slices_nest(
    given_events: list[tuple[str, str, int, int, str]], batch_events: int, window_events: int
) -> None:
    records = []
    for phase, layer, ts_ns, dur_ns, name in given_events:
        timing = {"dur_ns": dur_ns} if phase in "XD" else {}  # D: an end that knows its duration
        records.append(call("E" if phase == "D" else phase, ts_ns, name, layer, **timing))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "WINDOW_EVENTS", window_events)
        parts, layout = laid_out(
            *(records[at : at + batch_events] for at in range(0, len(records), batch_events))
        )
    assert layout.outcomes.undrawn == 0
    on_track: dict[Track, list[Item]] = defaultdict(list)
    known: set[Track] = set()
    flows: list[int] = []
    for part in parts:
        for track in part.declared:
            assert track.parent is None or track.parent in known
            known.add(track)
        for item in part.items():
            assert item.track in known
            on_track[item.track].append(item)
            flows += item.flows
    begun = 0
    for items in on_track.values():
        depth = 0
        for item in sorted(items, key=lambda item: item.ts_ns):
            depth += {BEGIN: 1, END: -1}.get(item.kind, 0)
            begun += item.kind == BEGIN
            assert depth >= 0
        assert depth == 0
    assert begun >= sum(phase in "BX" for phase, *_ in given_events)
    assert {flow for flow in flows if flow > 0} <= {-flow for flow in flows if flow < 0}


# Flows through the layers ------------------------------------------------------------------------------


def test_a_flow_runs_from_the_call_through_the_ioctl_into_the_driver() -> None:
    lines = drawn(
        call("B", 10), ioctl("B", 20), driver("B", 30), driver("E", 40), ioctl("E", 50), call("E", 60)
    )
    assert lines[3:] == [
        "10+50 f →1",
        "syscalls",
        "20+30 ioctl ←1",
        "driver",
        "30+10 nvidia_ioctl ←1",
    ]


def test_two_ioctls_of_one_call_share_its_flow() -> None:
    lines = drawn(
        call("B", 10), ioctl("B", 20), ioctl("E", 30), ioctl("B", 40), ioctl("E", 50), call("E", 60)
    )
    assert [line for line in lines if "ioctl" in line] == ["20+10 ioctl ←1", "40+10 ioctl ←1"]


def test_a_flow_starts_at_the_innermost_call() -> None:
    lines = drawn(call("B", 1, "a"), call("B", 2, "b"), ioctl("I", 3), call("E", 4, "b"), call("E", 5, "a"))
    assert lines[3:] == ["1+4 a", "2+2 >b →1", "syscalls", "3 ioctl ←1"]


def test_other_syscalls_and_other_threads_get_no_flow() -> None:
    read = call("I", 20, "read", "syscall")
    lines = drawn(call("B", 10), read, ioctl("I", 30, tid=2), driver("I", 35, tid=3), call("E", 60))
    assert not any("→" in line or "←" in line for line in lines)


def test_a_driver_function_inside_another_needs_no_flow() -> None:
    lines = drawn(ioctl("B", 1), driver("B", 2), driver("B", 3, "nv_lock"), driver("E", 4, "nv_lock"))
    assert "3+1 >nv_lock" in lines


def test_a_driver_function_inside_a_read_is_not_attributed_to_an_ioctl() -> None:
    events = [
        call("B", 1, "read", "syscall"),
        driver("B", 2),
        driver("E", 3),
        call("E", 4, "read", "syscall"),
    ]
    assert not any("←" in line for line in drawn(*events))
    # But it is the call's that the read runs in.
    assert "2+1 nvidia_ioctl ←1" in drawn(call("B", 0), *events, call("E", 5))


def test_a_call_that_spans_batches_still_has_its_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "WINDOW_EVENTS", 1)
    inside = [[ioctl("B", 10 * at), driver("I", 10 * at + 1), ioctl("E", 10 * at + 2)] for at in range(2, 6)]
    parts, _ = laid_out([call("B", 10)], *inside, [call("E", 90)])
    lines = shown(parts)
    # A call that is open where a batch ends may be asked for a flow later: it gets one while it can.
    begin = next(line for line in lines if line.startswith("10+80 f"))
    flow = begin.split("→")[1]
    assert sum(line.endswith(f" ioctl ←{flow}") for line in lines) == 4
    starts = [-flow for item in items_of(parts) for flow in item.flows if flow < 0]
    assert len(starts) == len(set(starts))


# Order and memory ---------------------------------------------------------------------------------------


def test_events_out_of_order_within_the_window_are_put_in_order() -> None:
    assert drawn(call("E", 30), call("B", 10), ioctl("I", 20))[3] == "10+20 f →1"


def test_an_event_beyond_the_window_is_drawn_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "WINDOW_EVENTS", 2)
    parts, layout = laid_out(
        *([call("B", at, "f"), call("E", at + 5, "f")] for at in range(1_000, 2_000, 10)),
        [call("B", 3, "late"), call("E", 4, "late")],
    )
    lines = shown(parts)
    assert "3+1 late" in lines
    assert layout.outcomes.overlaps == 1


def test_a_late_slice_over_an_end_that_was_drawn_goes_on_an_overlap_track(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(merging, "WINDOW_EVENTS", 1)
    calls = [call("B", 1, "a"), call("B", 2, "b"), call("E", 90, "a"), call("I", 200), call("I", 201)]
    parts, layout = laid_out(calls, [call("X", 50, "late", dur_ns=100)])
    lines = shown(parts)
    assert lines[lines.index("CUDA API (overlap 1)") + 1] == "50+100 late"
    assert "1+89 a" in {line.partition(" →")[0] for line in lines}
    assert layout.outcomes.overlaps == 1


@pytest.mark.slow
def test_the_window_holds_no_more_than_twice_its_events() -> None:
    tables = new_tables()
    layout = Layout(Header(), tables)
    drawn_items = 0
    for at in range(40):
        batch = trace_batch([call("I", at * 1_000 + n) for n in range(1_000)], tables)
        drawn_items += len(layout.place(batch).order)
        assert (at + 1) * 1_000 - drawn_items <= 2 * merging.WINDOW_EVENTS
    assert drawn_items + sum(len(part.order) for part in layout.finish()) == 40_000


# Names --------------------------------------------------------------------------------------------------


def test_a_process_is_called_after_its_command_until_its_name_is_known() -> None:
    header = Header(command=["/usr/bin/env", "x"])
    assert drawn(call("I", 1), header=header)[:2] == ["process env 1", "thread env 1"]
    lines = drawn(call("I", 1), call("I", 2, comm="vec_add"), header=header)
    assert lines[:2] == ["process vec_add 1", "thread vec_add 1"]


def test_a_thread_that_is_renamed_leaves_its_process_its_name() -> None:
    lines = drawn(call("I", 1, comm="app"), call("I", 2, tid=7, comm="old"), call("I", 3, tid=7, comm="new"))
    assert [line for line in lines if line.startswith(("process", "thread"))] == [
        "process app 1",
        "thread app 1",
        "thread new 7",
    ]


def test_a_rename_is_declared_once() -> None:
    parts, _ = laid_out([call("I", at, comm="same") for at in range(5)])
    assert sum(len(part.declared) for part in parts) == 3  # process, thread, CUDA API


# Device memory ------------------------------------------------------------------------------------------


def memory(name: str, ts_ns: int, **args: Any) -> dict[str, Any]:
    return call("I", ts_ns, name, "memory", args=args)


def counted(*records: dict[str, Any]) -> list[str]:
    lines = drawn(*records)
    return lines[lines.index("device memory [bytes]") + 1 :]


def test_the_counter_follows_allocations_and_frees_by_address() -> None:
    assert counted(
        memory("alloc", 1, size=100, address=0x7F00),
        memory("alloc", 2, size=50, dptr="0x8000"),
        memory("free", 3, ptr=0x7F00),
        memory("free", 4, devPtr="0x8000"),
    ) == ["1 100", "2 150", "3 50", "4 0"]


def test_a_free_of_an_unknown_address_changes_nothing() -> None:
    assert counted(memory("alloc", 1, size=100, address=1), memory("free", 2, address=9)) == [
        "1 100",
        "2 100",
    ]


def test_a_free_twice_is_subtracted_once() -> None:
    free = {"address": 1}
    events = [memory("alloc", 1, size=100, **free), memory("free", 2, **free), memory("free", 3, **free)]
    assert counted(*events) == ["1 100", "2 0", "3 0"]


def test_a_total_that_the_recording_states_wins() -> None:
    assert counted(
        memory("alloc", 1, size=100, total_allocated=5_100),
        memory("free", 2, size=100, total_allocated=5_000),
    ) == ["1 5100", "2 5000"]


def test_each_process_has_its_own_counter() -> None:
    lines = drawn(memory("alloc", 1, size=10), memory("alloc", 2, size=20) | {"pid": 2, "tid": 2})
    counters = [lines[at + 1] for at, line in enumerate(lines) if line == "device memory [bytes]"]
    assert counters == ["1 10", "2 20"]


def test_each_gpu_of_a_process_has_its_own_counter() -> None:
    lines = drawn(
        memory("alloc", 1, size=10, address=1) | {"gpu": 0},
        memory("alloc", 2, size=20, address=2) | {"gpu": 1},
        memory("free", 3, address=2),  # it does not name its GPU
        memory("free", 4, address=1) | {"gpu": 0},
    )
    of_first = lines.index("device memory, GPU 0 [bytes]")
    assert lines[of_first + 1 : of_first + 3] == ["1 10", "4 0"]
    of_second = lines.index("device memory, GPU 1 [bytes]")
    assert lines[of_second + 1 : of_second + 3] == ["2 20", "3 0"]


def test_remembered_allocations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "ALLOCATIONS_MAX", 2)
    events = [memory("alloc", at, size=10, address=at) for at in range(4)]
    assert counted(*events, memory("free", 8, address=0), memory("free", 9, address=3))[-2:] == [
        "8 30",
        "9 30",
    ]


# What the recording says of itself ----------------------------------------------------------------------


def test_losses_have_a_track_of_their_layer_and_their_length() -> None:
    lines = drawn(
        call("I", 5),
        {
            "type": "loss",
            "count": 3,
            "layer": "syscall",
            "ts_ns": 10,
            "dur_ns": 40,
            "cpu": 1,
            "reason": "full",
        },
        {"type": "loss", "count": 9, "ts_ns": 20},
    )
    assert lines[3:] == [
        "5 f",
        "tracepipe",
        "losses: syscall",
        "10+40 lost 3 events count=3 layer=syscall cpu=1 reason=full",
        "losses: unknown layer",
        "20+0 lost 9 events count=9",
    ]


def problems_at(*times_ns: int) -> list[str]:
    """What is drawn of a problem at each time; the first is an ambiguity."""
    layout, parts = Layout(Header(), new_tables()), []
    for line, ts_ns in enumerate(times_ns):
        layout.end_ns = ts_ns
        parts.append(layout.problem(Problem(line, "", "is odd", line > 0)))
    return shown([part for part in parts if part is not None] + layout.finish())


def test_problems_are_drawn_where_they_stand() -> None:
    assert problems_at(5, 7) == [
        "tracepipe",
        "problems",
        "5 ambiguous line=0 field= message=is odd",
        "7 skipped line line=1 field= message=is odd",
    ]


def test_some_of_many_problems_at_one_time_are_drawn_and_the_rest_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each would stand a row below the other.
    monkeypatch.setattr(layout_module, "PROBLEMS_AT_ONCE", 2)
    marks = [" ".join(line.split()[:3]) for line in problems_at(5, 5, 5, 5, 8, 9, 9, 9)[2:]]
    assert marks == [
        "5 ambiguous line=0", "5 skipped line", "5 2 more",
        "8 skipped line",
        "9 skipped line", "9 skipped line", "9 1 more",
    ]  # fmt: skip


def test_problems_are_drawn_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "PROBLEMS_DRAWN", 2)
    marks = [" ".join(line.split()[:3]) for line in problems_at(5, 6, 7, 8)[2:]]
    assert marks == ["5 ambiguous line=0", "6 skipped line", "6 2 more"]


def test_records_without_a_time_are_not_drawn() -> None:
    footer = {"type": "footer", "counts": {}, "losses": {}}
    pair = {"type": "clock", "clock": "c", "source_ns": 1, "host_lo_ns": 1, "host_hi_ns": 2}
    parts, _ = laid_out([call("I", 1), pair, footer], [call("I", 2)])
    assert shown(parts) == [*CALLS, "1 f", "2 f"]
