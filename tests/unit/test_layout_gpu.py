"""The layout of a GPU: streams, warps by slot or by number, lone threads, and the flows from the launch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import trace_batch
from tests.support.cores import new_tables
from tests.support.timeline_text import shown
from tracepipe.event.model import Header
from tracepipe.layout import LayoutOptions, merging
from tracepipe.layout import warps as warps_module
from tracepipe.layout.draw import Layout
from tracepipe.layout.timeline import BEGIN, COUNTER, INSTANT, Drawn, Item

pytestmark = pytest.mark.usefixtures("core")


def laid_out(
    records: Iterable[dict[str, Any]], header: Any = None, warp_tracks: str = "auto", exits: bool = False
) -> tuple[list[Drawn], Layout]:
    tables = new_tables()
    layout = Layout(header or Header(), tables, LayoutOptions(warp_tracks, exits))
    return [layout.place(trace_batch(records, tables)), *layout.finish()], layout


def items_of(drawn: Iterable[Drawn]) -> Iterator[Item]:
    return (item for part in drawn for item in part.items())


def drawn(*records: dict[str, Any], **options: Any) -> list[str]:
    return shown(laid_out(records, **options)[0])


def kernel(phase: str, ts_ns: int, name: str = "k", **fields: Any) -> dict[str, Any]:
    return {"type": "gpu_kernel", "name": name, "phase": phase, "ts_ns": ts_ns, **fields}


def launch_call(ts_ns: int, launch: int, **fields: Any) -> dict[str, Any]:
    event = {"type": "userspace", "name": "cuLaunchKernel", "phase": "X", "ts_ns": ts_ns, "dur_ns": 5}
    return event | {"pid": 1, "tid": 1, "launch": launch, **fields}


def batch(ts_ns: int, entry_ns: list[int], exit_ns: list[int], **fields: Any) -> dict[str, Any]:
    numbers = list(range(len(entry_ns)))
    record = {"type": "gpu_warp", "name": "k", "ts_ns": ts_ns, "warp": numbers}
    return record | {"entry_ns": entry_ns, "exit_ns": exit_ns, **fields}


# Streams ------------------------------------------------------------------------------------------------


def test_kernels_stand_on_the_stream_they_ran_on() -> None:
    lines = drawn(
        kernel("X", 10, dur_ns=20, stream=7, launch=3, grid=[2, 1, 1], block=[64, 1, 1], args={"regs": 40}),
        kernel("B", 15, "j", stream=9),
        kernel("E", 25, "j", stream=9, args={"result": 0}),
        kernel("I", 30, "mark", stream=7, gpu=1),
        header=Header(gpus=[{"index": 0, "name": "NVIDIA H200"}, {"name": "no index"}]),
    )
    assert lines == [
        "GPU 0 NVIDIA H200",
        "stream 7",
        "10+20 k regs=40 launch=3 grid=[2,1,1] block=[64,1,1] →2",
        "stream 9",
        "15+10 j result=0",
        "GPU 1",
        "stream 7",
        "30 mark",
    ]


def test_gpus_and_streams_stand_in_the_order_of_their_numbers_and_not_of_their_events() -> None:
    at = [(10, 13), (2, 13), (2, 7), (10, 0), (2, 1 << 40), (1, 0)]
    lines = drawn(
        *(kernel("X", 5 * n, dur_ns=5, gpu=gpu, stream=stream) for n, (gpu, stream) in enumerate(at))
    )
    assert [line for line in lines if line.startswith(("GPU", "stream"))] == [
        "GPU 1", "stream 0",
        "GPU 2", "stream 7", "stream 13", f"stream {1 << 40}",
        "GPU 10", "stream 0", "stream 13",
    ]  # fmt: skip


def test_a_copy_stands_on_its_stream_if_the_gpu_is_known_and_on_its_thread_if_not() -> None:
    copy = {"type": "transfer", "name": "HtoD", "phase": "X", "dur_ns": 4, "pid": 1, "tid": 1}
    lines = drawn(copy | {"ts_ns": 5, "gpu": 0, "stream": 2}, copy | {"ts_ns": 6})
    assert lines == [
        "GPU 0",
        "stream 2",
        "5+4 HtoD",
        "process process 1",
        "thread process 1",
        "transfers",
        "6+4 HtoD",
    ]


def test_kernels_that_overlap_on_a_stream_are_drawn_beside() -> None:
    lines = drawn(kernel("X", 10, dur_ns=20), kernel("X", 20, "j", dur_ns=20))
    assert lines == ["GPU 0", "stream 0", "10+20 k", "stream 0 (overlap 1)", "20+20 j"]


def test_a_kernel_without_an_end_is_drawn_to_the_end() -> None:
    lines = drawn(kernel("B", 10), kernel("I", 99, "last", stream=1))
    assert "10+89 k unclosed=true" in lines


# Flows and causality -----------------------------------------------------------------------------------


def flows(lines: list[str]) -> dict[str, str]:
    """First word of each slice → its flow."""
    return {line.split()[1]: line.split()[-1] for line in lines if "→" in line or "←" in line}


def test_a_flow_runs_from_the_launch_to_the_kernel_and_not_to_its_warps_too() -> None:
    lines = drawn(
        launch_call(10, 5),
        kernel("X", 20, dur_ns=50, launch=5),
        batch(25, [0, 1], [9, 9], sm=[0, 0], slot=[0, 1], launch=5),
    )
    assert flows(lines) == {"cuLaunchKernel": "→2", "k": "←2"}


def test_without_a_kernel_the_flow_ends_at_the_first_warp() -> None:
    lines = drawn(launch_call(10, 5), batch(25, [8, 0], [9, 9], sm=[0, 0], slot=[0, 1], launch=5))
    assert [line for line in lines if line[-2:] in ("→2", "←2")] == [
        "25+9 k warp 1 ←2",
        "10+5 cuLaunchKernel →2",
    ]


def test_a_launch_that_was_not_recorded_starts_the_flow_at_the_kernel() -> None:
    assert flows(drawn(kernel("X", 20, dur_ns=50, launch=5))) == {"k": "→2"}


def test_flows_of_launches_and_of_calls_have_different_ids() -> None:
    ioctl = {"type": "syscall", "name": "ioctl", "phase": "I", "pid": 1, "tid": 1}
    records: list[dict[str, Any]] = []
    for launch in range(20):
        ts_ns = launch * 100
        records += [
            launch_call(ts_ns, launch, phase="B"),
            ioctl | {"ts_ns": ts_ns + 1},
            launch_call(ts_ns + 5, launch, phase="E"),
            kernel("X", ts_ns + 10, dur_ns=5, launch=launch),
        ]
    parts, _ = laid_out(records)
    starts = [-flow for item in items_of(parts) for flow in item.flows if flow < 0]
    assert len(starts) == len(set(starts)) == 40


def test_a_kernel_before_its_launch_is_pointed_out() -> None:
    records = [kernel("X", 20, dur_ns=5, launch=5, bound_ns=3), launch_call(40, 5)]
    lines = drawn(*records)
    assert lines[lines.index("problems") + 1] == (
        "20 starts before its launch launch=5 before_launch_ns=20 bound_ns=3"
    )
    assert laid_out(records)[1].outcomes.causality == 1
    # The flow points from the earlier slice to the later one: Perfetto draws no flow back in time.
    assert flows(lines) == {"k": "→2", "cuLaunchKernel": "←2"}


@pytest.mark.parametrize(("bound_ns", "wrong"), [(19, 1), (20, 0), (500, 0)])
def test_what_the_clocks_bound_explains_is_not_a_wrong_cause(bound_ns: int, wrong: int) -> None:
    records = [kernel("X", 20, dur_ns=5, launch=5, bound_ns=bound_ns), launch_call(40, 5)]
    assert laid_out(records)[1].outcomes.causality == wrong
    warp = batch(20, [0], [5], sm=[0], slot=[0], launch=5, bound_ns=bound_ns)
    assert laid_out([warp, launch_call(40, 5)])[1].outcomes.causality == wrong


def test_a_launch_is_judged_by_its_first_kernel_once() -> None:
    records = [kernel("X", 20, dur_ns=5, launch=5), kernel("X", 30, dur_ns=5, launch=5), launch_call(40, 5)]
    assert laid_out([*records, launch_call(90, 5)])[1].outcomes.causality == 1


def test_a_launch_id_that_comes_again_is_another_launch() -> None:
    records = [launch_call(10, 5), kernel("X", 20, dur_ns=5, launch=5)]
    again = [record | {"ts_ns": record["ts_ns"] + 100} for record in records]
    lines = drawn(*records, *again)
    assert [line.split()[-1] for line in lines if "cuLaunch" in line] == ["→2", "→4"]
    assert [line.split()[-1] for line in lines if " k " in line] == ["←2", "←4"]


# Warps --------------------------------------------------------------------------------------------------


def test_a_warp_is_a_slice_on_its_hardware_slot() -> None:
    lines = drawn(
        batch(100, [0, 8, 4], [10, 12, 6], sm=[3, 3, 0], slot=[1, 0, 0], grid=[2, 1, 1], block=[64, 1, 1])
    )
    assert lines == [
        "GPU 0",
        "active warps [warps]",
        *("100 1", "104 2", "108 3", "110 1", "120 0"),
        "SM 0",
        "slot 0",
        "104+6 k block 1 warp 0",
        "SM 3",
        "slot 0",
        "108+12 k block 0 warp 1",
        "slot 1",
        "100+10 k block 0 warp 0",
    ]


@pytest.mark.parametrize(
    ("grid", "block", "number", "name"),
    [
        ([4, 1, 1], [96, 1, 1], 7, "block 2 warp 1"),
        ([4, 3, 2], [32, 1, 1], 23, "block (3,2,1) warp 0"),
        ([4, 3, 1], [16, 4, 1], 2 * 5 + 1, "block (1,1,0) warp 1"),
        ([4, 1, 1], [33, 1, 1], 3, "block 1 warp 1"),
        ([0, 1, 1], [32, 1, 1], 3, "block 3 warp 0"),
        (None, [32, 1, 1], 3, "block 3 warp 0"),
        ([4, 1, 1], None, 3, "warp 3"),
        ([4, 1, 1], [0, 1, 1], 3, "warp 3"),
    ],
)
def test_a_warp_is_named_by_its_place_on_the_grid(grid: Any, block: Any, number: int, name: str) -> None:
    sizes = {key: size for key, size in (("grid", grid), ("block", block)) if size}
    record = batch(100, [0], [10], sm=[0], slot=[0], **sizes) | {"warp": [number]}
    assert drawn(record)[-1] == f"100+10 k {name}"


def test_readings_masks_and_cycles_are_on_the_slice() -> None:
    lines = drawn(
        batch(
            100, [0, 50], [10, 20], sm=[0, 0], slot=[0, 0], source_ns=7_000, bound_ns=4,
            entry_mask=[0xFFFFFFFF, 0xF], exit_clk=[1_500, 2_500],
        )
    )  # fmt: skip
    assert lines[-2:] == [
        "100+10 k warp 0 source_ns=7000 cycles=1500",
        "150+20 k warp 1 source_ns=7050 cycles=2500 lanes=4",
    ]


def test_a_warp_leaves_with_its_last_exit() -> None:
    record = batch(
        100, [0, 5], [10, 30, 20, 7], exit_count=[3, 1], exit_clk=[1, 3, 2, 9], sm=[0, 0], slot=[0, 1]
    )
    lines = drawn(record)
    assert "100+30 k warp 0 exits=3 cycles=3" in lines
    assert "105+7 k warp 1 cycles=9" in lines
    assert lines[2:6] == ["100 1", "105 2", "112 1", "130 0"]


def test_a_warp_without_an_exit_was_still_running() -> None:
    records = [batch(100, [0, 5], [10], exit_count=[0, 1], sm=[0, 0], slot=[0, 1]), kernel("I", 400)]
    assert "100+300 k warp 0 exits=0 unclosed=true" in drawn(*records)
    assert laid_out(records)[1].outcomes.unclosed == 1


def test_exits_are_drawn_when_asked_for() -> None:
    record = batch(
        100, [0, 2], [10, 30, 5], exit_count=[2, 1], exit_mask=[0xFF, 0xFFFFFF00, 0xFFFFFFFF],
        sm=[0, 0], slot=[0, 1],
    )  # fmt: skip
    lines = [line for line in drawn(record, exits=True) if "exit mask" in line]
    assert lines == [
        "110 >exit mask=0x000000ff lanes=8",
        "130 exit mask=0xffffff00 lanes=24",
        "107 exit mask=0xffffffff lanes=32",
    ]
    assert not any("exit mask" in line for line in drawn(record))


def test_two_warps_on_one_slot_at_one_time_are_an_overlap() -> None:
    records = [batch(100, [0, 5], [10, 10], sm=[0, 0], slot=[0, 0])]
    lines = drawn(*records)
    assert lines[-4:] == ["slot 0", "100+10 k warp 0", "slot 0 (overlap 1)", "105+10 k warp 1"]
    assert laid_out(records)[1].outcomes.overlaps == 1


def test_a_slot_is_taken_again_in_the_nanosecond_in_which_it_is_left() -> None:
    _, layout = laid_out([batch(100, [0, 10, 20], [10, 10, 0], sm=[0] * 3, slot=[0] * 3)])
    assert layout.outcomes.overlaps == 0


def test_launches_stand_in_the_order_of_their_warps_however_large_their_ids() -> None:
    ids = [3 << 32, 5, (3 << 32) + 1, (1 << 62) + 7, 900_000_000]
    parts, _ = laid_out([batch(10 * at, [0], [5], launch=launch) for at, launch in enumerate(ids)])
    declared = [track for part in parts for track in part.declared]
    groups = {track for track in declared if track.kind == "group" and "launch" in track.name}
    assert [track.name for track in sorted(groups, key=lambda track: track.order)] == [
        f"k launch {launch}" for launch in ids
    ]
    # Perfetto's ranks have 31 bits.
    assert max(track.order for track in groups) < 1 << 31


def test_without_slots_each_warp_has_a_track_in_its_launch() -> None:
    lines = drawn(
        batch(100, [0, 1], [5, 5], launch=4, grid=[2, 1, 1], block=[32, 1, 1]), batch(200, [0], [5], launch=4)
    )
    assert lines[lines.index("k launch 4") :] == [
        "k launch 4",
        "block 0 warp 0",
        "100+5 k block 0 warp 0 →2",
        "200+5 k warp 0",
        "block 1 warp 0",
        "101+5 k block 1 warp 0",
    ]


def tracks_of(lines: list[str]) -> list[str]:
    return [line for line in lines if not line[0].isdigit()]


SLOTS = {"sm": [1, 0, 1], "slot": [0, 0, 2]}


@pytest.mark.parametrize(
    ("mode", "known", "tracks"),
    [
        ("auto", SLOTS, ["active warps [warps]", "SM 0", "slot 0", "SM 1", "slot 0", "slot 2"]),
        ("auto", {}, ["active warps [warps]", "k", "warp 0", "warp 1", "warp 2"]),
        ("auto", {"sm": [1, 0, 1]}, ["active warps [warps]", "k", "warp 0", "warp 1", "warp 2"]),
        ("slot", {}, ["active warps [warps]", "k", "warp 0", "warp 1", "warp 2"]),
        ("logical", SLOTS, ["active warps [warps]", "k", "warp 0", "warp 1", "warp 2"]),
        ("sm", SLOTS, ["SM 0 active warps [warps]", "SM 1 active warps [warps]"]),
        ("sm", {}, ["active warps [warps]", "k", "warp 0", "warp 1", "warp 2"]),
        ("off", SLOTS, []),
    ],
)
def test_warp_tracks_are_as_asked_for_and_as_known(
    mode: str, known: dict[str, Any], tracks: list[str]
) -> None:
    lines = drawn(batch(100, [0, 1, 2], [5, 5, 5], **known), warp_tracks=mode)
    assert tracks_of(lines) == ["GPU 0", *tracks]


def test_a_count_for_each_sm_adds_up() -> None:
    lines = drawn(batch(100, [0, 0, 2], [5, 5, 5], **SLOTS), warp_tracks="sm")
    assert lines == [
        "GPU 0",
        "SM 0 active warps [warps]",
        *("100 1", "105 0"),
        "SM 1 active warps [warps]",
        *("100 1", "102 2", "105 1", "107 0"),
    ]


def test_a_batch_of_nothing_is_drawn_as_nothing() -> None:
    lines = drawn(batch(100, [], []))
    assert lines == ["GPU 0"]


stays = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=30)


def check_active_warps(batches: list[tuple[int, list[tuple[int, int]]]], *, one_by_one: bool) -> None:
    """Lay out batches of (entry, stay) and hold the counter against the spans at each of their edges."""
    records, spans = [], []
    for ts_ns, some in batches:
        # Batches stand in the order of their first warp's entry, which is their time.
        first_ns = min(entry for entry, _ in some)
        entry_ns = [entry - first_ns for entry, _ in some]
        records.append(batch(ts_ns, entry_ns, [stay for _, stay in some]))
        spans += [(ts_ns + entry - first_ns, ts_ns + entry - first_ns + stay) for entry, stay in some]
    tables = new_tables()
    layout = Layout(Header(), tables, LayoutOptions("logical"))
    given = [[record] for record in records] if one_by_one else [records]
    parts = [layout.place(trace_batch(some, tables)) for some in given] + layout.finish()
    counts = [(item.ts_ns, item.name) for item in items_of(parts) if item.kind == COUNTER]
    changes = dict(counts)
    assert list(changes) == sorted(ts_ns for ts_ns, _ in counts)
    value = 0
    for ts_ns in sorted({edge for span in spans for edge in span}):
        value = changes.get(ts_ns, value)
        assert value == sum(begin <= ts_ns < end for begin, end in spans)


@given(st.lists(st.tuples(st.integers(0, 200), stays), min_size=1, max_size=5), st.integers(1, 40))
def test_the_count_of_active_warps_is_right_at_every_time(
    batches: list[tuple[int, list[tuple[int, int]]]], window_events: int
) -> None:
    check_active_warps(batches, one_by_one=False)
    with pytest.MonkeyPatch.context() as patch:
        # Some are drawn before the next come, which must then stand in their order.
        patch.setattr(merging, "WINDOW_EVENTS", window_events)
        check_active_warps(sorted(batches, key=lambda one: one[0]), one_by_one=True)


def test_many_warps_are_laid_out_in_order_of_their_entry() -> None:
    count = 95
    entry_ns = [(n * 37) % count * 10 for n in range(count)]
    parts, layout = laid_out([batch(0, entry_ns, [3] * count, sm=[0] * count, slot=[0] * count, launch=1)])
    begins = [item for item in items_of(parts) if item.kind == BEGIN]
    assert [item.ts_ns for item in begins] == sorted(entry_ns)
    assert layout.outcomes.overlaps == 0
    assert [item.flows for item in begins if item.flows] == [(-2,)]


# Lone threads -------------------------------------------------------------------------------------------


def thread(phase: str, ts_ns: int, x: int, y: int = 0, **fields: Any) -> dict[str, Any]:
    event = {"type": "gpu_thread", "name": "k", "phase": phase, "ts_ns": ts_ns}
    return event | {"block": [1, 0, 0], "thread": [x, y, 0], **fields}


def test_threads_make_a_slice_for_their_warp_from_the_first_entry_to_the_last_exit() -> None:
    lines = drawn(
        thread("B", 10, 33), thread("B", 12, 34), thread("E", 20, 33), thread("E", 30, 34), thread("I", 40, 5)
    )
    assert lines == [
        "GPU 0",
        "k",
        "block (1,0,0) warp 1",
        "10+20 k block (1,0,0) warp 1",
        "block (1,0,0) warp 0",
        "40 thread event thread=[5,0,0]",
    ]


def test_threads_of_the_last_launches_with_warps_are_not_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warps_module, "LAUNCHES_MAX", 2)
    warps = [batch(10 * launch, [0], [5], launch=launch) for launch in (1, 2, 3)]
    lines = drawn(*warps, *(thread("E", 40, 1, launch=launch) for launch in (1, 2, 3)))
    assert [line for line in lines if line.startswith("40 ")] == ["40 k block (1,0,0) warp 0 no_begin=true"]


def test_threads_own_entries_and_exits_are_drawn_when_asked_for() -> None:
    parts, _ = laid_out([thread("B", 10, 1), thread("E", 20, 1)], exits=True)
    drawn = [(item.ts_ns, item.name) for item in items_of(parts) if item.kind == INSTANT]
    assert drawn == [(10, "thread entry"), (20, "thread exit")]


def test_a_thread_that_is_not_in_the_first_row_is_named_by_its_neighbours() -> None:
    # Without the block's size a row of y does not show where its warps begin.
    assert "block (1,0,0) threads (32–63,2,0)" in drawn(thread("I", 1, 40, 2))


def test_a_thread_is_drawn_by_the_little_that_is_known_of_it() -> None:
    bare = {"type": "gpu_thread", "name": "k", "phase": "I"}
    lines = drawn(
        bare | {"ts_ns": 1, "args": {"block_x": 6, "event": "retprobe"}},
        bare | {"ts_ns": 2, "args": {"occurrence": 3}},
        bare | {"ts_ns": 3},
    )
    assert lines == [
        "GPU 0",
        "k",
        "block 6 warp not recorded",
        "1 thread retprobe block_x=6",
        "occurrence 3 warp not recorded",
        "2 thread event occurrence=3",
        "occurrence 0 warp not recorded",
        "3 thread event",
    ]


def test_an_exit_of_a_thread_that_never_entered_is_marked() -> None:
    lines = drawn(thread("E", 20, 1))
    assert lines[-1] == "20 k block (1,0,0) warp 0 no_begin=true"


def test_a_complete_thread_is_a_slice() -> None:
    assert drawn(thread("X", 20, 1, dur_ns=9))[-1] == "20+9 k thread=[1,0,0]"
