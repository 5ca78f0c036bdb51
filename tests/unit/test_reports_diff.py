"""Recordings of two sides compared: what is reported of them, what is claimed, and what is not."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.recordings import HEADER, span, write
from tracepipe.analyses.measures import CALL, figures_of
from tracepipe.analyses.wall_time import PARTS
from tracepipe.errors import TracepipeError
from tracepipe.libraries import np
from tracepipe.present.writing.rendering import report_lines
from tracepipe.reports import diff
from tracepipe.reports.diff import Options
from tracepipe.store.run import Run, load_run

Records = Sequence[dict[str, Any]]
Compare = Callable[..., Any]
CHANGED = "All calls, kernels and copies that changed are"


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """Compares recordings of these records: a list for each of A, then a list for each of B."""

    def of(a: Sequence[Records], b: Sequence[Records], **options: Any) -> Any:
        loads = [
            [reader(write(tmp_path / f"{side}{at}.jsonl", *records)) for at, records in enumerate(some)]
            for side, some in (("a", a), ("b", b))
        ]
        return diff.run(*loads, Options(**options))

    return of


def reader(path: Path) -> Callable[[], Run]:
    return lambda: load_run(str(path))


def calls(name: str, lengths_ns: Sequence[int], layer: str = "userspace", every_ns: int = 10_000) -> Records:
    return [
        span(2_000 + at * every_ns, 2_000 + at * every_ns + length, name, layer)
        for at, length in enumerate(lengths_ns)
    ]


def runs(name: str, medians_ns: Sequence[int], count: int = 10, layer: str = "userspace") -> list[Records]:
    """A recording for each median: `count` calls of one function, which all take that long."""
    return [calls(name, [median_ns] * count, layer, 10**6) for median_ns in medians_ns]


def both(*sides: Sequence[Records]) -> list[Records]:
    """The first recordings of all lists as one, the second ones as one, and so on."""
    return [[record for records in some for record in records] for some in zip(*sides, strict=True)]


def names(result: Any, table: str) -> list[str]:
    return [row["name"] for row in result.as_json().get(table, [])]


LENGTHS = [1_040, 1_000, 1_090, 1_020, 1_070, 1_010, 1_080, 1_030, 1_060, 1_050]
NOISY = [1_000, 1_020, 990, 1_010, 1_005]


def test_one_recording_of_each_side_shows_that_they_differ_and_claims_nothing(compare: Compare) -> None:
    a = [*calls("cudaMalloc", LENGTHS), *calls("cuInit", LENGTHS)]
    b = [*calls("cudaMalloc", [length - 400 for length in LENGTHS]), *calls("cuInit", LENGTHS)]
    result = compare([a], [b])
    (row,) = result.as_json()["lengths"]
    assert (row["name"], row["layer"], row["a_count"], row["b_count"]) == ("cudaMalloc", "call", 10, 10)
    assert (row["a_p50_ns"], row["b_p50_ns"], row["total_change_ns"]) == (1_040, 640, -4_000)
    assert row["change_percent"] == pytest.approx(-100 * 400 / 1_040)
    assert {"p", "spread_percent", "low_percent"}.isdisjoint(row)
    assert result.title == (
        "The run takes 92.0 µs in A and 92.0 µs in B (0 ns). The median length of cudaMalloc is 1.04 µs in A "
        "and 640 ns in B (-38.5%), 10 times: 4.00 µs less in total."
    )
    assert any(
        note.startswith("each side has one recording, but runs of the same program") for note in result.notes
    )
    for one in result.as_json()["compared"]:
        assert one["length_p"] is one["count_p"] is one["tail_p"] is None


@pytest.mark.parametrize("seed", range(3))
def test_the_wall_time_is_the_sum_of_its_parts(compare: Compare, seed: int) -> None:
    """Each ns of each GPU is in one part, found here one by one: the mean of the GPUs, of steps too."""
    draw, sides, expected = Random(seed), list[list[dict[str, Any]]](), list[dict[str, float]]()
    for load_ns in (90, 30):
        end = 2_410 + load_ns
        records = [
            span(1_000, end, "process", "hook"),
            *(span(at, at + 100, f"step {at}", "annotation") for at in (2_020, 2_150)),
            span(2_150, 2_150 + load_ns, "loading", "annotation"),
        ]
        found: Counter[str] = Counter()
        for gpu in (0, 1):
            names = ("gemm", "ncclDevKernel_AllReduce_Sum", "HtoD", "gemm", "gemm")
            begins = [draw.randrange(2_020, 2_390) for _ in names]
            ends = [begin + draw.randrange(1, 40) for begin in begins]
            for stream, (name, begin, stop) in enumerate(zip(names, begins, ends, strict=True)):
                layer = "transfer" if name == "HtoD" else "gpu_kernel"
                records.append(span(begin, stop, name, layer, gpu=gpu, stream=stream))
            for ns in range(1_000, end):
                running = {min(at, 3) % 3 for at in range(5) if begins[at] <= ns < ends[at]}
                outside = 4 if ns < min(begins) else 5 if ns >= max(ends) else 3
                part = min(running, default=outside)
                found[PARTS[part]] += 1
                found[f"step {PARTS[min(part, 3)]}"] += 2_020 <= ns < 2_250
        sides.append(records)
        expected.append({name: ns / (4 if "step" in name else 2) for name, ns in found.items()})
    result = compare([sides[0]], [sides[1]]).as_json()
    for table, prefix in (("wall", ""), ("step", "step ")):
        whole, *parts = result[table]
        for side in ("a_ns", "b_ns", "change_ns"):
            assert whole[side] == sum(part[side] for part in parts)
        for row in parts:
            for side, of in zip("ab", expected, strict=True):
                assert row[f"{side}_ns"] == pytest.approx(of.get(prefix + row["part"], 0), abs=4)
    assert (result["wall"][0]["a_ns"], result["wall"][0]["b_ns"]) == (1_500, 1_440)
    idle = next(row for row in result["wall"] if row["part"] == "idle")
    assert sum(row["a_idle_ns"] for row in result["ranges"]) == pytest.approx(idle["a_ns"], abs=4)
    assert {"loading", "step …"} <= {row["range"] for row in result["ranges"]}


def test_the_headline_names_the_largest_part_of_the_wall_time(compare: Compare) -> None:
    """Not a call that changed by more, but that no GPU waited for."""

    def records(load_ns: int, futex_ns: int) -> Records:
        at = 3_000 + load_ns
        return [
            span(1_000, 10_000, "process", "hook"),
            *(span(start, start + 100, "cuLaunchKernel", launch=start) for start in (2_000, at - 100)),
            span(2_000, 3_000, "gemm", "gpu_kernel", launch=2_000, gpu=0),
            span(3_000, at, "loading", "annotation"),
            span(at, at + 1_500, "gemm", "gpu_kernel", launch=at - 100, gpu=0),
            span(2_000, 2_000 + futex_ns, "futex", "syscall", tid=2),
        ]

    result = compare([records(5_000, 100)], [records(1_000, 4_000)])
    assert result.title == (
        "The run takes 9.00 µs in A and 9.00 µs in B (0 ns): idle -4.00 µs, after the last work +4.00 µs. "
        "The idle time changed most in loading: -4.00 µs."
    )
    texts = [*report_lines([], result, width=100, ascii_only=True)]
    assert any(line.startswith("futex") and "+3900.0%" in line and "+3.90 us" in line for line in texts)


def test_several_recordings_show_that_a_call_is_faster(compare: Compare) -> None:
    result = compare(runs("f", NOISY), runs("f", [900, 910, 905, 915, 890]))
    assert result.title == (
        f"{CHANGED} faster in B. The median length of f is 1.00 µs in A "
        "and 905 ns in B (-10.0%), -12.7% to -7.6% "
        "between single recordings, p 0.0079, 10 times: 1.00 µs less in total. 1 of 1 got faster, 0 slower."
    )
    (row,) = result.as_json()["lengths"]
    assert (row["a_p50_ns"], row["b_p50_ns"]) == (1_005, 905)
    assert (row["change_percent"], row["low_percent"], row["high_percent"]) == pytest.approx(
        (-100 * 100 / 1_005, -100 * 130 / 1_020, -100 * 75 / 990)
    )
    assert row["spread_percent"] == pytest.approx(100 * (8 + 7) / 1_005, rel=0.1)
    assert row["p"] == pytest.approx(1 / 126)
    slower = compare(runs("f", [900, 910, 905, 915, 890]), runs("f", NOISY))
    assert slower.title.startswith(
        f"{CHANGED} slower in B. The median length of f is 905 ns in A and 1.00 µs in B"
    )


def test_what_recordings_of_one_side_differ_by_is_not_reported(compare: Compare) -> None:
    result = compare(runs("f", NOISY), runs("f", [1_003, 1_022, 995, 1_012, 1_008]))
    assert result.title == (
        "Nothing changed by more than recordings of one side differ (the chance of a false alarm is 5%). The "
        "median length of f, which takes the most time, changes by -2.5% to +3.2% between single recordings."
    )
    assert names(result, "lengths") == names(result, "counts") == []
    assert not any(row["changed"] for row in result.as_json()["compared"])


@pytest.mark.parametrize(("count", "least"), [(2, "0.33"), (3, "0.1")])
def test_too_few_recordings_are_reported_and_nothing_is_claimed(
    compare: Compare, count: int, least: str
) -> None:
    result = compare(runs("f", NOISY[:count]), runs("f", [2_010, 2_000, 2_020][:count]))
    assert result.title.startswith(
        f"Too few recordings to claim a change: the smallest p with {count} and {count} of them is {least}. "
        "Record 4 of each side. The median length of f is 1.0"
    )
    (table,) = [part for part in result.parts if part.name == "lengths"]
    assert table.title == "Lengths that differ"
    assert result.as_json()["lengths"][0]["p"] == pytest.approx(float(least), abs=0.01)
    (same,) = compare(runs("f", NOISY[:2]), runs("f", NOISY[:2])).title.splitlines()
    assert same.endswith("No name that both sides have differs by more than recordings of one side do.")


def test_faster_and_slower_are_weighed(compare: Compare) -> None:
    fast, slow = [600, 610, 620, 605], [3_000, 3_010, 3_020, 3_005]
    same = NOISY[:4]
    a = both(runs("f", same), runs("g", same))
    b = both(runs("f", slow), runs("g", fast))
    result = compare(a, b)
    assert result.title.startswith("Some calls, kernels and copies are faster in B, some slower.")
    assert "overall" not in compare(b, a).title
    assert names(result, "lengths") == ["f", "g"]  # the largest change of time first
    one = compare(a, b, top=1)
    assert names(one, "lengths") == ["f"]
    assert "1 more lengths that changed are not listed: --top 0 lists all" in one.notes


def test_a_part_that_takes_next_to_no_time_is_hardly_faster(compare: Compare) -> None:
    long = [calls("cudaDeviceSynchronize", [10**6 + at for at in range(10)], every_ns=2 * 10**6)] * 4
    result = compare(both(long, runs("f", NOISY[:4])), both(long, runs("f", [600, 610, 620, 605])))
    assert result.title.startswith("Hardly: the part that is faster is under 1% of the time of its layer.")


def test_changes_smaller_than_asked_for_are_not_reported(compare: Compare) -> None:
    a, b = runs("f", [1_000, 1_001, 1_002, 1_000]), runs("f", [1_050, 1_051, 1_052, 1_050])
    assert names(compare(a, b), "lengths") == ["f"]
    assert names(compare(a, b, min_change=6), "lengths") == []
    assert names(compare(a[:1], b[:1]), "lengths") == ["f"]
    single = compare(a[:1], b[:1], min_change=6)
    assert single.title.endswith("(+50 ns). No name that both sides have differs by more than 6%.")


def test_the_same_file_twice_has_nothing_to_report(compare: Compare) -> None:
    records = [*calls("f", LENGTHS), *calls("k", LENGTHS, "gpu_kernel"), *calls("ioctl", LENGTHS, "syscall")]
    result = compare([records], [records], min_change=0)
    assert not [table for table in ("lengths", "tails", "counts", "only") if table in result.as_json()]
    assert not any(row["changed"] for row in result.as_json()["compared"])
    assert [row["change_ns"] for row in result.as_json()["totals"]] == [0, 0, 0, 0]


def test_counts_and_what_is_on_one_side_alone(compare: Compare) -> None:
    a = [*calls("f", LENGTHS * 10), *calls("old", [50]), *calls("rare", [5], "syscall")]
    b = [*calls("f", LENGTHS * 5), *calls("new", [70]), *calls("read", [5], "syscall")]
    for times in (1, 4):
        result = compare([a] * times, [b] * times)
        assert [
            (r["name"], r["a_count"], r["b_count"], r["change_percent"]) for r in result.as_json()["counts"]
        ] == [("f", 100, 50, -50.0)]
        # A system call that happened once may be chance; a call of the program is not.
        only = [(r["name"], r["run"], r["total_ns"]) for r in result.as_json()["only"]]
        assert sorted(only) == [("new", "B", 70), ("old", "A", 50)]
    assert result.title.startswith(
        "Some calls, kernels and copies are faster in B, some slower. f occurs 50 times instead of 100, "
        "-50.0% to -50.0% between single recordings, p 0.029: "
    )


def test_a_count_that_lost_events_may_explain_is_not_reported(compare: Compare) -> None:
    a, b = calls("f", LENGTHS * 10), calls("f", LENGTHS * 5)
    for layer, lost, expected in (
        ("userspace", 60, []),
        ("userspace", 30, ["f"]),
        ("scheduler", 60, ["f"]),
        (None, 60, []),
    ):
        loss = {"type": "loss", "count": lost, "ts_ns": 5_000, **({"layer": layer} if layer else {})}
        result = compare([a], [[*b, loss]])
        assert names(result, "counts") == expected
        assert any(note.startswith("events were lost: in their layers, no ") for note in result.notes)
    totals = compare([a] * 4, [[*b, {**loss, "layer": "userspace"}]] * 4).as_json()["totals"]
    of_calls = next(row for row in totals if row["what"] == "CUDA API calls")
    assert (of_calls["change_percent"], of_calls["p"]) == (-50, None)


def test_names_decide_the_order_of_equal_changes(compare: Compare) -> None:
    a = [call for name in "hgfedcba" for call in calls(f"old {name}", [50])]
    b = [*(call for name in "vutsx" for call in calls(f"new {name}", [50])), *calls("long", [70])]
    assert names(compare([a], [b], top=4), "only") == ["long", "new s", "new t", "new u"]
    result = compare([a], [b], top=0)
    assert names(result, "only") == [
        "long",
        *(f"new {name}" for name in "stuvx"),
        *(f"old {n}" for n in "abcdefgh"),
    ]
    assert sorted(row["name"] for row in result.as_json()["compared"]) == sorted(names(result, "only"))


def test_a_slower_tail_is_reported_where_the_median_is_the_same(compare: Compare) -> None:
    rng = np.random.default_rng(1)

    def lengths(slow: bool) -> list[int]:
        some = rng.normal(1_000, 20, 400).round().astype(int)
        some[::12] += 5_000 * slow
        return list(map(int, some))

    result = compare(
        [calls("f", lengths(False)) for _ in range(4)], [calls("f", lengths(True)) for _ in range(4)]
    )
    (row,) = result.as_json()["tails"]
    assert (row["name"], row["b_p95_ns"] > 5_900, row["a_p95_ns"] < 1_100) == ("f", True, True)
    assert names(result, "lengths") == []
    assert result.title.startswith(f"{CHANGED} slower in B. 5% of f take over 1.03 µs in A and ")


def test_totals_are_compared_as_one_value_of_each_recording(compare: Compare) -> None:
    result = compare(runs("f", NOISY), runs("f", [2_000, 2_010, 2_020, 2_030, 2_040]))
    row = next(row for row in result.as_json()["totals"] if row["what"] == "CUDA API calls")
    assert (row["a_ns"], row["b_ns"], row["change_ns"]) == (10_050, 20_200, 10_150)
    assert row["p"] == pytest.approx(1 / 126)


def test_what_is_not_in_every_recording_is_compared_by_count_alone(compare: Compare) -> None:
    a = both(runs("f", NOISY), [*runs("g", NOISY[:4]), []])
    result = compare(a, both(runs("f", NOISY), runs("g", [3_000] * 5)))
    assert names(result, "lengths") == []
    assert result.notes[0].startswith("1 name of both sides has no length in some recording")
    assert compare([[]], [[]]).title == "No name that both sides have differs by more than 1%."
    nothing = compare([[*calls("f", [5])], []] * 2, [[*calls("f", [5])], []] * 2)
    assert nothing.title == "Not enough data: nothing has a length in every recording."


def test_layers_that_a_recording_lacks_are_not_compared(compare: Compare) -> None:
    a = [*calls("f", LENGTHS), *calls("futex", [10**6] * 10, "syscall", 2 * 10**6)]
    result = compare([a], [calls("f", LENGTHS)])
    assert names(result, "only") == []
    assert "not compared, as some recordings lack them: system call" in result.notes


def launch(at: int, skews_ns: Sequence[int]) -> dict[str, Any]:
    count = len(skews_ns)
    exits = [exit_ns for skew_ns in skews_ns for exit_ns in (1_000, 1_000 + skew_ns)]
    return {
        "ts_ns": 2_000 + at * 10_000, "type": "gpu_warp", "name": "k", "gpu": 0, "launch": at + 1,
        "grid": [count, 1, 1], "block": [64, 1, 1], "warp": list(range(2 * count)),
        "entry_ns": [0] * (2 * count), "exit_ns": exits,
    }  # fmt: skip


def test_skew_of_warps_is_compared_by_block(compare: Compare) -> None:
    a = [[launch(at, [100 + at + run, 110 + at, 120 + at]) for at in range(4)] for run in range(4)]
    b = [[launch(at, [300 + at + run, 310 + at, 320 + at]) for at in range(4)] for run in range(4)]
    result = compare(a, b).as_json()
    (row,) = result["lengths"]
    assert (row["name"], row["layer"], row["a_count"], row["a_p50_ns"], row["b_p50_ns"]) == (
        "k: skew of blocks", "warp skew", 12, 111, 311,
    )  # fmt: skip
    exits = {row["name"]: (row["a_count"], row["a_p50_ns"], row["b_p50_ns"]) for row in result["exits"]}
    assert exits == {"k: skew of blocks": (12, 111, 311), "k: spread of warps": (24, 0, 0)}


def threads(path: Path, launches: int, delay_ns: int, warps: int = 8, seed: int = 0) -> Callable[[], Run]:
    """kernelretsnoop's text of launches in which every 8th thread is late."""
    rng = np.random.default_rng(delay_ns + seed)
    times = (
        1_749_147_474_550_000_000
        + np.arange(launches)[:, None] * 100_000
        + rng.integers(0, 40, (launches, 32 * warps))
    )
    times[:, 7::8] += delay_ns
    lines = [
        f"Thread ({thread}, 0, 0) timestamp: {ns}\n" for launch in times for thread, ns in enumerate(launch)
    ]
    path.write_text("".join(lines))
    return reader(path)


@pytest.mark.slow
def test_a_stride_that_was_removed_is_compared_by_threads(tmp_path: Path) -> None:
    a, b = (
        [threads(tmp_path / f"{name}{at}.txt", 12, delay_ns, seed=at) for at in range(4)]
        for name, delay_ns in (("before", 750), ("after", 0))
    )
    result = diff.run(a, b, Options())
    assert result.title.startswith("All exits that changed are closer together in B. kernel: ")
    rows = {row["name"]: row for row in result.as_json()["lengths"]}
    stride, spread = rows["kernel: delay of threads with t mod 8 = 7"], rows["kernel: spread of warps"]
    assert stride["a_count"] == stride["b_count"] == 96
    assert stride["a_p50_ns"] == pytest.approx(750, abs=5)
    assert stride["b_p50_ns"] == pytest.approx(0, abs=5)
    assert (spread["a_p50_ns"] > 750, spread["b_p50_ns"] < 40) == (True, True)
    back = diff.run(b, a, Options())
    assert back.title.startswith("All exits that changed are further apart in B.")
    assert "kernel: delay of threads with t mod 8 = 7" in names(back, "lengths")
    single = diff.run(a[:1], b[:1], Options())
    assert "(-749 ns). kernel: delay of threads with t mod 8 = 7 is " in single.title
    assert "kernel: delay of threads with t mod 8 = 7" in names(single, "exits")


def test_exits_of_one_launch_are_shown(tmp_path: Path) -> None:
    a, b = threads(tmp_path / "a.txt", 1, 750, 1), threads(tmp_path / "b.txt", 1, 0, 1)
    rows = {row["name"]: row for row in diff.run([a], [b], Options()).as_json()["exits"]}
    spread = rows["kernel: spread of warps"]
    assert spread["a_p50_ns"] > 750 > 40 > spread["b_p50_ns"]
    assert rows["kernel: delay of lanes 7, 15, 23, 31"]["a_p50_ns"] == pytest.approx(750, abs=10)


def test_exits_do_not_decide_where_calls_are_recorded(compare: Compare) -> None:
    def exits(skew_ns: int) -> Records:
        return [
            {
                "ts_ns": 2_000 + at * 10_000, "type": "gpu_thread", "name": "k", "phase": "I", "gpu": 0,
                "launch": at + 1, "block": [0, 0, 0], "thread": [lane, 0, 0], "args": {"event": "exit"},
            } | {"ts_ns": 2_000 + at * 10_000 + skew_ns * (lane == 3)}
            for at in range(10) for lane in range(4)
        ]  # fmt: skip

    a, b = ([[*calls("f", LENGTHS), *exits(skew_ns + at)] for at in range(4)] for skew_ns in (900, 0))
    result = compare(a, b)
    assert "k: spread of warps" in names(result, "lengths")
    assert result.title.startswith("B differs, but nothing shows that it is faster or slower.")


def test_recordings_are_read_one_after_the_other(tmp_path: Path) -> None:
    kept: list[weakref.ref[Run]] = []
    read: list[tuple[str, int]] = []

    def watched(name: str, *records: dict[str, Any]) -> Callable[[], Run]:
        path = write(tmp_path / name, *records)

        def load() -> Run:
            read.append((name, sum(run() is not None for run in kept)))
            run = load_run(str(path))
            kept.append(weakref.ref(run))
            return run

        return load

    some = [*calls("f", LENGTHS), launch(0, [100, 110, 120])]
    result = diff.run([watched("a1", *some), watched("a2", *some)], [watched("b1", *some)], Options())
    # The one before is not in memory any more.
    assert read == [("a1", 0), ("a2", 0), ("b1", 0)]
    assert len(result.as_json()["exits"]) == 2


@pytest.mark.parametrize(
    ("starts", "message"),
    [((1, 2, 3, 4), "all of A was"), ((3, 4, 1, 2), "all of B was"), ((1, 3, 2, 4), "")],
)
def test_sides_that_were_not_recorded_by_turns_are_noted(
    starts: Sequence[int], message: str, tmp_path: Path
) -> None:
    loads = []
    for at, start in enumerate(starts):
        head = {**HEADER, "start": {"monotonic_ns": 1_000, "realtime_ns": start * 10**9}}
        path = tmp_path / f"{at}.jsonl"
        path.write_text("".join(f"{json.dumps(record)}\n" for record in (head, *calls("f", LENGTHS))))
        loads.append(reader(path))
    notes = diff.run(loads[:2], loads[2:], Options()).notes
    assert [note[: len(message)] for note in notes if note.startswith("all of ")] == (
        [message] if message else []
    )


def test_alpha_is_a_probability(compare: Compare) -> None:
    with pytest.raises(TracepipeError, match="Not a probability: --alpha 5"):
        compare([[]], [[]], alpha=5)


def test_the_header_may_say_that_a_layer_was_recorded_and_empty(tmp_path: Path) -> None:
    head = {**HEADER, "layers": {"asked": ["userspace"], "got": ["userspace"], "missing": {}}}
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps(head) + "\n")
    full = write(tmp_path / "full.jsonl", *calls("f", LENGTHS))
    result = diff.run([reader(empty)], [reader(full)], Options())
    assert [(row["name"], row["run"]) for row in result.as_json()["only"]] == [("f", "B")]


@pytest.mark.slow
def test_all_that_was_compared_is_no_list_in_memory(compare: Compare) -> None:
    records = [span(at * 10, at * 10 + 5, f"function {at}") for at in range(8_000)]
    result = compare([records], [records])
    (compared,) = [part for part in result.parts if part.name == "compared"]
    tracemalloc.start()
    count = sum(1 for _ in compared.lazily())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 8_000
    assert peak_bytes < 2_000_000


def test_measures_of_names_are_of_all_their_lengths() -> None:
    lengths = {"few": [5, 1, 3], "many": [*range(200, 0, -1)], "one": [7], "two": [4, 2]}
    found = figures_of({(CALL, name): [np.array(some)] for name, some in lengths.items()})[CALL, ""]
    assert found.names == [*lengths]
    assert found.values["count"].tolist() == [3, 200, 1, 2]
    assert found.values["total_ns"].tolist() == [9, 20_100, 7, 6]
    assert found.values["p50_ns"].tolist() == [3, 100, 7, 2]
    assert np.isnan(found.values["p95_ns"]).tolist() == [True, False, True, True]
    assert found.values["p95_ns"][1] == 190
