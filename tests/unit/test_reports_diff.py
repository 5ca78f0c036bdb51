"""Two runs compared: what is reported of them, and that noise alone is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import scipy.stats as stats

from tests.support.recordings import HEADER, span, write
from tracepipe.errors import TracepipeError
from tracepipe.reports.analyses.changes import changes
from tracepipe.reports.analyses.comparison import discoveries
from tracepipe.reports.diff import Options, run
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run, load_run
from tracepipe.reports.frames.samples import CALL, COPY, KERNEL, SYSCALL, Gathering, Kind, Named

WINDOW = (0, 10**9)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """Loads records from a file of that name."""

    def of(name: str, *records: dict[str, Any]) -> Run:
        return load_run(str(write(tmp_path / f"{name}.jsonl", *records)))

    return of


def calls(name: str, lengths_ns: list[int], layer: str = "userspace", every_ns: int = 10_000) -> list[Any]:
    return [
        span(2_000 + at * every_ns, 2_000 + at * every_ns + length, name, layer)
        for at, length in enumerate(lengths_ns)
    ]


def names(result: Any, table: str) -> list[str]:
    return [row["name"] for row in result.as_json().get(table, [])]


LENGTHS = [1_040, 1_000, 1_090, 1_020, 1_070, 1_010, 1_080, 1_030, 1_060, 1_050]


def test_a_faster_call_is_told_with_its_size_and_bounds(load: Any) -> None:
    a = load("a", *calls("cudaMalloc", LENGTHS), *calls("cuInit", LENGTHS))
    b = load("b", *calls("cudaMalloc", [length - 400 for length in LENGTHS]), *calls("cuInit", LENGTHS))
    result = run(a, b, Options())
    (row,) = result.as_json()["lengths"]
    assert (row["name"], row["layer"], row["a_count"], row["b_count"]) == ("cudaMalloc", "call", 10, 10)
    assert (row["a_p50_ns"], row["b_p50_ns"], row["a_p99_ns"], row["b_p99_ns"]) == (1_040, 640, 1_090, 690)
    assert (row["shift_ns"], row["total_change_ns"]) == (-400, -4_000)
    assert row["shift_percent"] == pytest.approx(-100 * 400 / 1_045)
    assert row["low_percent"] < row["shift_percent"] < row["high_percent"] < -30
    assert row["p"] < 0.01
    assert result.title.startswith("Yes: B is faster. The length of cudaMalloc changed by -38.3% (")
    assert "10 times: 4.00 µs less in all. 1 of 2 got faster, 0 slower." in result.title
    slower = run(b, a, Options())
    assert slower.title.startswith("No: B is slower. The length of cudaMalloc changed by +62.0% (")


def test_faster_and_slower_are_weighed(load: Any) -> None:
    longer, shorter = [length * 3 for length in LENGTHS], [length - 400 for length in LENGTHS]
    a = load("a", *calls("f", LENGTHS), *calls("g", LENGTHS))
    b = load("b", *calls("f", longer), *calls("g", shorter))
    assert run(a, b, Options()).title.startswith("In part, and on the whole no: some of B is faster")
    assert run(b, a, Options()).title.startswith("In part, and on the whole yes")
    assert names(run(a, b, Options()), "lengths") == ["f", "g"]  # the largest change of time first
    one = run(a, b, Options(top=1))
    assert names(one, "lengths") == ["f"]
    assert "1 more lengths that changed are not listed: --top 0" in one.notes


def test_what_makes_up_next_to_nothing_is_hardly_faster(load: Any) -> None:
    long = calls("cudaDeviceSynchronize", [10**6 + length for length in LENGTHS], every_ns=2 * 10**6)
    a = load("a", *calls("f", LENGTHS), *long)
    b = load("b", *calls("f", [length - 400 for length in LENGTHS]), *long)
    assert run(a, b, Options()).title.startswith(
        "Hardly: what is faster is under 1% of the time of its kind."
    )


def test_changes_smaller_than_asked_for_are_not_told(load: Any) -> None:
    a, b = load("a", *calls("f", LENGTHS)), load("b", *calls("f", [length + 100 for length in LENGTHS]))
    assert names(run(a, b, Options()), "lengths") == ["f"]
    result = run(a, b, Options(min_change=20))
    assert names(result, "lengths") == []
    assert result.title.startswith("Nothing changed by more than chance makes it")
    assert "1 lengths changed by less than --min-change 20%: not reported" in result.notes


def test_the_same_file_twice_has_nothing_to_tell(load: Any) -> None:
    records = [*calls("f", LENGTHS), *calls("k", LENGTHS, "gpu_kernel"), *calls("ioctl", LENGTHS, "syscall")]
    result = run(load("a", *records), load("b", *records), Options(min_change=0))
    assert not [table for table in ("lengths", "tails", "counts", "only") if table in result.as_json()]
    assert result.title.startswith(
        "Nothing changed by more than chance makes it, at a false discovery rate of 5%."
    )
    assert not any(row["changed"] for row in result.as_json()["compared"])
    assert [row["change_ns"] for row in result.as_json()["totals"]] == [0, 0, 0]


def test_counts_and_what_is_in_one_run_alone(load: Any) -> None:
    a = load("a", *calls("f", LENGTHS * 10), *calls("old", [50]), *calls("rare", [5], "syscall"))
    b = load("b", *calls("f", LENGTHS * 5), *calls("new", [70]), *calls("read", [5], "syscall"))
    result = run(a, b, Options())
    assert [
        (r["name"], r["a_count"], r["b_count"], r["change_percent"]) for r in result.as_json()["counts"]
    ] == [("f", 100, 50, -50.0)]
    # A system call that happened once may be chance; a call of the program is not.
    only = [(r["name"], r["run"], r["total_ns"]) for r in result.as_json()["only"]]
    assert sorted(only) == [("new", "B", 70), ("old", "A", 50)]
    assert result.title.startswith("In part, and on the whole yes")
    assert any("counts differ by no more than chance may make it: " in note for note in result.notes)


def test_names_decide_the_order_of_equal_changes_in_any_part(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracepipe.reports.frames.stored.ROWS_AT_ONCE", 4)
    a = load("a", *(call for name in "hgfedcba" for call in calls(f"old {name}", [50])))
    b = load("b", *(call for name in "vutsx" for call in calls(f"new {name}", [50])), *calls("long", [70]))
    assert names(run(a, b, Options(top=4)), "only") == ["long", "new s", "new t", "new u"]
    result = run(a, b, Options(top=0))
    assert names(result, "only") == [
        "long",
        *(f"new {name}" for name in "stuvx"),
        *(f"old {n}" for n in "abcdefgh"),
    ]
    assert [row["name"] for row in result.as_json()["compared"]] == names(result, "only")


def test_p_are_adjusted_as_scipy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tracepipe.reports.frames.stored.ROWS_AT_ONCE", 64)
    p = np.round(np.random.default_rng(3).random(500) ** 3, 2)
    expected = stats.false_discovery_control(p, method="bh")
    assert discoveries(p).tolist() == expected.tolist()
    assert len(discoveries(p[:0])) == 0


def test_a_slower_tail_is_told_where_the_median_is_the_same(load: Any) -> None:
    rng = np.random.default_rng(1)
    usual = rng.normal(1_000, 20, 400).round().astype(int)
    slow = usual.copy()
    slow[::12] += 5_000
    result = run(load("a", *calls("f", usual.tolist())), load("b", *calls("f", slow.tolist())), Options())
    (row,) = result.as_json()["tails"]
    assert (row["name"], row["b_p99_ns"] > 5_900, row["a_p99_ns"] < 1_100) == ("f", True, True)
    assert row["b_percent"] > 8 > 2 > row["a_percent"]
    assert names(result, "lengths") == []
    assert result.title.startswith("No: B is slower. ")


def test_too_few_to_compare_is_said(load: Any) -> None:
    result = run(load("a", *calls("f", [10, 20, 30])), load("b", *calls("f", [1, 2, 3])), Options())
    assert result.title.startswith("Not enough data: nothing happens often enough in both runs")
    assert result.notes[0].startswith("1 names have too few lengths")


def test_layers_that_one_run_lacks_are_not_compared(load: Any) -> None:
    a = load("a", *calls("f", LENGTHS), *calls("futex", [10**6] * 10, "syscall", 2 * 10**6))
    result = run(a, load("b", *calls("f", LENGTHS)), Options())
    assert names(result, "only") == []
    assert "recorded in A alone, so not compared: system call" in result.notes
    assert result.title.startswith("Nothing changed")


def test_skew_of_warps_is_compared_by_block(load: Any) -> None:
    def launch(at: int, skews_ns: list[int]) -> dict[str, Any]:
        count = len(skews_ns)
        exits = [exit_ns for skew_ns in skews_ns for exit_ns in (1_000, 1_000 + skew_ns)]
        return {
            "ts_ns": 2_000 + at * 10_000, "type": "gpu_warp", "name": "k", "gpu": 0, "launch": at + 1,
            "grid": [count, 1, 1], "block": [64, 1, 1], "warp": list(range(2 * count)),
            "entry_ns": [0] * (2 * count), "exit_ns": exits,
        }  # fmt: skip

    a = load("a", *(launch(at, [100 + at, 110 + at, 120 + at]) for at in range(4)))
    b = load("b", *(launch(at, [300 + at, 310 + at, 320 + at]) for at in range(4)))
    result = run(a, b, Options()).as_json()
    (row,) = result["lengths"]
    assert (row["name"], row["layer"], row["a_count"], row["a_p50_ns"], row["shift_ns"]) == (
        "k: skew of blocks", "warp skew", 12, 111, 200,
    )  # fmt: skip
    exits = {row["name"]: (row["a_count"], row["a_p50_ns"], row["b_p50_ns"]) for row in result["exits"]}
    assert exits == {"k: skew of blocks": (12, 111, 311), "k: spread of warps": (24, 0, 0)}


def threads(path: Path, launches: int, delay_ns: int, warps: int = 8) -> Run:
    """kernelretsnoop's text of launches in which every 8th thread is late."""
    rng = np.random.default_rng(delay_ns)
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
    return load_run(str(path))


def test_a_stride_that_was_removed_is_compared_by_threads(tmp_path: Path) -> None:
    a, b = threads(tmp_path / "before.txt", 12, 750), threads(tmp_path / "after.txt", 12, 0)
    result = run(a, b, Options())
    assert result.title.startswith(
        "Yes: in B threads leave closer together. kernel: delay of threads with t mod 8 = 7 changed by -"
    )
    rows = {row["name"]: row for row in result.as_json()["lengths"]}
    stride, spread = rows["kernel: delay of threads with t mod 8 = 7"], rows["kernel: spread of warps"]
    assert stride["a_count"] == stride["b_count"] == 96
    assert stride["a_p50_ns"] == pytest.approx(750, abs=5)
    assert stride["b_p50_ns"] == pytest.approx(0, abs=5)
    assert (spread["a_p50_ns"] > 750, spread["b_p50_ns"] < 40) == (True, True)
    back = run(b, a, Options())
    assert back.title.startswith("No: in B threads leave further apart.")
    assert "kernel: delay of threads with t mod 8 = 7" in names(back, "lengths")
    assert run(a, a, Options()).title.startswith("Nothing changed by more than chance makes it")


def test_exits_of_one_launch_are_shown_though_too_few_to_test(tmp_path: Path) -> None:
    result = run(threads(tmp_path / "a.txt", 1, 750, 1), threads(tmp_path / "b.txt", 1, 0, 1), Options())
    assert result.title.startswith("Not enough data")
    rows = {row["name"]: row for row in result.as_json()["exits"]}
    assert (
        rows["kernel: spread of warps"]["a_p50_ns"] > 750 > 40 > rows["kernel: spread of warps"]["b_p50_ns"]
    )
    assert rows["kernel: delay of lanes 7, 15, 23, 31"]["a_p50_ns"] == pytest.approx(750, abs=10)


def test_exits_do_not_decide_where_calls_are_recorded(load: Any) -> None:
    def exits(skew_ns: int) -> list[dict[str, Any]]:
        return [
            {
                "ts_ns": 2_000 + at * 10_000, "type": "gpu_thread", "name": "k", "phase": "I", "gpu": 0,
                "launch": at + 1, "block": [0, 0, 0], "thread": [lane, 0, 0], "args": {"event": "exit"},
            } | {"ts_ns": 2_000 + at * 10_000 + skew_ns * (lane == 3)}
            for at in range(10) for lane in range(4)
        ]  # fmt: skip

    a, b = load("a", *calls("f", LENGTHS), *exits(900)), load("b", *calls("f", LENGTHS), *exits(0))
    result = run(a, b, Options())
    assert "k: spread of warps" in names(result, "lengths")
    assert result.title.startswith("B differs, but nothing shows that it is faster or slower.")


def test_alpha_is_a_probability(load: Any) -> None:
    a = load("a", *calls("f", LENGTHS))
    with pytest.raises(TracepipeError, match="--alpha 5 is no probability"):
        run(a, a, Options(alpha=5))


def simulated(rng: Any, factor: float = 1.0) -> dict[Kind, Named]:
    """A run of 16 names: as often as the program says, and system calls as chance has it."""
    found = {layer: Gathering() for layer in (CALL, KERNEL, SYSCALL, COPY)}
    for at in range(16):
        layer = (CALL, KERNEL, SYSCALL, COPY)[at % 4]
        count = (6, 20, 60, 120)[at // 4]
        if layer == SYSCALL:
            count = max(1, int(rng.poisson(count)))
        lengths = rng.lognormal(7, 0.2, count) * (factor if at == 13 else 1)
        starts = np.sort(rng.integers(*WINDOW, count))
        found[layer].add(f"f{at}", starts, lengths.round().astype(np.int64))
    return {(layer, ""): gathered.named() for layer, gathered in found.items()}


def test_pairs_that_differ_by_noise_alone_are_told_to_at_most_at_the_stated_rate() -> None:
    told = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        found = changes(simulated(rng), simulated(rng), (WINDOW, WINDOW), 0.05, 0.0)
        told += bool(found.is_reported.any())
    # Of 100 at 5 %: more than 12 happen in two of a thousand.
    assert told <= 12


def test_a_kernel_that_is_a_tenth_slower_is_found_and_alone() -> None:
    found_it = others = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        compared = changes(simulated(rng), simulated(rng, 1.1), (WINDOW, WINDOW), 0.05, 1.0)
        found = list(compared.first(np.ones(len(compared), np.bool_)))
        found_it += any(one.length_changed and one.key == (KERNEL, "f13") for one in found)
        others += any(one.is_reported and one.key != (KERNEL, "f13") for one in found)
    assert found_it >= 24
    assert others <= 6


def test_the_header_may_say_that_a_layer_was_recorded_and_empty(tmp_path: Path) -> None:
    import json

    head = {**HEADER, "layers": {"asked": ["userspace"], "got": ["userspace"], "missing": {}}}
    empty = tmp_path / "empty.jsonl"
    empty.write_text(json.dumps(head) + "\n")
    full = write(tmp_path / "full.jsonl", *calls("f", LENGTHS))
    result = run(load_run(str(empty)), load_run(str(full)), Options())
    assert [(row["name"], row["run"]) for row in result.as_json()["only"]] == [("f", "B")]
