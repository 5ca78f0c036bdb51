"""`tracepipe ranks` and the replay, against programs that are simulated with and without what is slow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.cli.test_cli_ranks import asked
from tests.support.here import build_here
from tests.support.simulated_machine import Do, Machines
from tests.support.simulated_training import SLOW, Extra, Fault, Training
from tracepipe.analyses.replay import Change, Changes, Replay, Timeline, Window
from tracepipe.dataset.clocks_table import read_alignment
from tracepipe.dataset.places import Dataset
from tracepipe.errors import InputError, TracepipeError
from tracepipe.event.columns import Floats
from tracepipe.event.intervals import Stretches
from tracepipe.ranks.costs import Costs
from tracepipe.ranks.programs import Programs
from tracepipe.ranks.queries import COMPARED
from tracepipe.store.tables import connect

pytestmark = pytest.mark.slow
Lines = list[dict[str, Any]]


def built(folder: Path, recordings: Path) -> str:
    build_here(str(recordings), str(folder / "ds"))
    return str(folder / "ds")


@pytest.mark.parametrize(
    ("ranks", "host_bound", "extra"),
    [
        (1, False, "stream"), (1, True, "sync"), (2, False, "GPU"), (2, True, "host"), (3, False, "small"),
        (4, False, "stream"),
    ],
)  # fmt: skip
def test_steps_without_a_part_are_as_long_as_those_that_never_had_it(
    tmp_path: Path, ranks: int, host_bound: bool, extra: Extra
) -> None:
    job = Training(ranks, 8, host_bound=host_bound, extra=extra)
    made = job.run()
    dataset = Dataset.opened(built(tmp_path, made.write(tmp_path / "runs")))
    clocks = {one.rank: one.clock for one in dataset.rank_rows()}
    replay = Replay(Programs(dataset, read_alignment(dataset), clocks).source)
    replay.refuse_what_is_not_known()
    (window,) = replay.windows()
    changes = {}
    for number, rank in enumerate(made.ranks):
        own = [one for one in rank.records if one["name"] == "extra" and one["type"] == "annotation"]
        begins_ns = np.array([one["ts_ns"] for one in own], np.int64)
        removed = Stretches(begins_ns, begins_ns + [one["dur_ns"] for one in own] if own else begins_ns)
        calls_ns = window.programs[number].call_ns
        changes[number] = Change(removed, removed.covered_ns(calls_ns, calls_ns + 1) > 0)
    truth_ns = np.median(replace(job, extra="").run().steps_ns())
    (outcome,) = replay.outcomes([lambda _: (changes, None)])
    found_ns = replay.steps_ns(replay.recorded_ns) - replay.saved_ns(outcome)
    assert float(np.median(found_ns)) == pytest.approx(float(truth_ns), rel=0.02)
    assert float(np.median(made.steps_ns())) > 1.005 * truth_ns


@pytest.mark.parametrize(
    ("ranks", "slower", "host_bound", "fault"),
    [
        (2, 1.8, False, "host"), (2, 1.0, True, "data loading"), (4, 1.4, False, "GPU"),
        (4, 1.8, True, "link"), (3, 1.8, True, "host"), (3, 1.5, True, "processor"),
    ],
)  # fmt: skip
def test_a_fault_costs_what_the_job_without_it_is_faster(
    tmp_path: Path, ranks: int, slower: float, host_bound: bool, fault: Fault
) -> None:
    job = Training(
        ranks, slower=slower, host_bound=host_bound, fault=fault, jitter=0.03, in_pairs=fault == "link"
    )
    made = job.run()
    answer = asked(Path(built(tmp_path, made.write(tmp_path / "runs"))))
    found, is_everywhere = answer["slow"], fault in ("GPU", "processor")
    slow = ["host", "data loading"] if fault == "processor" else [fault]
    assert [(one["ranks"], one["slow"]) for one in found] == [(str(SLOW), one) for one in slow]
    assert found[0]["everywhere"] == (pytest.approx(1.4, rel=0.02) if is_everywhere else None)
    assert any("is slow everywhere" in note for note in answer["notes"]) == is_everywhere
    truth_ns = float(np.median(made.steps_ns()) - np.median(replace(job, fault="").run().steps_ns()))
    assert sum(one["costs_ns"] for one in found) == pytest.approx(truth_ns, rel=0.1, abs=200_000)


@pytest.mark.parametrize(
    "job",
    [
        Training(2, 8, fault="host"), Training(3, 6, host_bound=True, fault="GPU", jitter=0.1),
        Training(4, 7, fault="data loading", in_pairs=True), Training(2, 9, slower=1.8, synchronizes=False),
        Training(2, 6, host_bound=True, extra="stream", synchronizes=False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("window_rows", [1, 200])
def test_windows_of_few_steps_tell_what_one_of_all_steps_tells(
    tmp_path: Path, job: Training, window_rows: int
) -> None:
    dataset = Dataset.opened(built(tmp_path, job.run().write(tmp_path / "runs")))
    whole, parts = (Told(dataset, rows) for rows in (1 << 40, window_rows))
    assert (whole.windows, parts.windows > 1) == (1, True)
    np.testing.assert_array_equal(parts.recorded_ns, whole.recorded_ns)
    np.testing.assert_array_equal(parts.concerned, whole.concerned)
    step_ns = float(np.median(whole.recorded_ns))
    np.testing.assert_allclose(parts.unchanged_ns, whole.unchanged_ns, atol=0.005 * step_ns)
    # A rank does as its peers do in other steps: those of its window.
    count = len(COMPARED)
    medians = (np.median(one.saved_ns[:count], axis=1) for one in (parts, whole))
    np.testing.assert_allclose(*medians, atol=0.025 * step_ns)
    np.testing.assert_allclose(parts.saved_ns[count:], whole.saved_ns[count:], atol=0.005 * step_ns)
    np.testing.assert_allclose(parts.led_ns, whole.led_ns, atol=0.02 * step_ns)
    for name in COMPARED:
        np.testing.assert_allclose(parts.times[name], whole.times[name], rtol=0.005, atol=1_000)


class Told:
    """What a replay in windows tells, with and without changes."""

    def __init__(self, dataset: Dataset, window_rows: int) -> None:
        clocks = {one.rank: one.clock for one in dataset.rank_rows()}
        programs = Programs(dataset, read_alignment(dataset), clocks, window_rows)
        self.led_ns = list[int]()
        costs = Costs(programs, self.follow)
        peers = [rank for rank in programs.ranks if rank != SLOW]

        def as_peers(name: str, window: Window) -> tuple[Changes, None]:
            return {costs.place[SLOW]: costs.as_peers(window, SLOW, [name], peers)}, None

        outcomes = costs.replay.outcomes(
            [*(partial(as_peers, name) for name in COMPARED), without_launches, with_faster_transfers]
        )
        self.windows = sum(1 for _ in costs.replay.windows())
        self.recorded_ns, self.unchanged_ns = (
            costs.replay.steps_ns(some) for some in (costs.replay.recorded_ns, costs.replay.unchanged_ns)
        )
        self.saved_ns = [costs.replay.saved_ns(one) for one in outcomes]
        self.concerned = [one.concerned for one in outcomes]
        ranks = {"rank": np.array(programs.ranks)}
        units = (name.replace("_ns", unit) for name in COMPARED for unit in ("_ns", "_us", "_us2"))
        none = {name: np.zeros(len(programs.ranks)) for name in units}
        self.times = costs.own_times(ranks | none, is_replayed=True)

    def follow(self, window: Window, timeline: Timeline) -> None:
        for path in window.paths(timeline, range(len(window.common[0]))):
            self.led_ns.append(sum(piece.ns for piece in path))


def without_launches(window: Window) -> tuple[Changes, None]:
    return {
        number: Change(Stretches(one.call_ns, one.called_ns)) for number, one in enumerate(window.programs)
    }, None


def with_faster_transfers(window: Window) -> tuple[Changes, Floats]:
    return {}, np.full(len(window.collectives), 0.5)


@pytest.mark.parametrize("seed", range(4))
def test_no_rank_is_slow_where_all_do_the_same(tmp_path: Path, seed: int) -> None:
    job = Training(
        2 + seed % 3, 8, seed % 2 == 1, (1.8, 1.2)[seed // 2], (0.01, 0.1)[seed % 2], seed=seed,
        synchronizes=seed < 2,
    )  # fmt: skip
    assert asked(Path(built(tmp_path, job.run().write(tmp_path / "runs"))))["slow"] == []


def steps_of(rank: int, more_ns: Callable[[int, int], float], jitter: float) -> Iterator[Do]:
    """Thirty steps of two ranks with 16 kernels each: `more_ns` takes the host longer before one of a step.
    The tenth takes the GPU 6 ms, behind which the host hides what it does until the end of the step.
    """
    random = Random(f"1 {rank}")
    for step in range(30):
        yield Do("begin", name=f"step {step}")
        for at in range(16):
            yield Do("host", 250_000 * max(random.gauss(1, jitter), 0.2) + more_ns(step, at))
            yield Do("kernel", 6_000_000 if at == 9 else 20_000, f"k{at}")
            if at in (7, 15):
                yield Do("record", event=5)
                yield Do("wait", stream=20, event=5)
                yield Do("collective", 60_000, "allreduce", 20, group=(0, 1))
        yield Do("record", stream=20, event=6)
        yield Do("wait", event=6)
        yield Do("sync", stream=0)
        yield Do("end")
        yield Do("host", 8_000)


@pytest.mark.parametrize(
    ("more_ns", "at"),
    [
        (lambda _, at: 1_500_000 if at == 5 else 0, "before k5"),
        (lambda step, at: 1_500_000 if at == 5 else 60_000_000 if (step, at) == (9, 3) else 0, "before k5"),
        # The GPU hides the place with most.
        (lambda _, at: 200_000 if at < 8 else 2_200_000 if at == 12 else 0, None),
    ],
    ids=["place", "a pause elsewhere", "hidden place"],
)
def test_a_slow_host_is_named_by_its_place_if_that_is_what_costs(
    tmp_path: Path, more_ns: Callable[[int, int], float], at: str | None
) -> None:
    job, usual = (
        Machines([steps_of(rank, more if rank else lambda *_: 0, 0.1) for rank in range(2)])
        for more in (more_ns, lambda *_: 0)
    )
    (one,) = asked(Path(built(tmp_path, job.write(tmp_path / "runs"))))["slow"]
    truth_ns = np.median(job.steps_ns()) - np.median(usual.steps_ns())
    assert (one["ranks"], one["slow"], one["costs_ns"]) == ("1", "host", pytest.approx(truth_ns, rel=0.1))
    assert one["everywhere"] or one["at"] == at


def test_a_rank_may_have_a_step_without_a_call(tmp_path: Path) -> None:
    def program(rank: int) -> Iterator[Do]:
        for step in range(20):
            yield Do("begin", name=f"step {step}")
            for at in () if (rank, step) == (1, 4) else range(8):
                yield Do("host", 2_250_000 if (rank, at) == (1, 3) else 250_000)
                yield Do("kernel", 20_000, f"k{at}")
            yield Do("sync", stream=0)
            yield Do("end")
            yield Do("host", 8_000)

    made = Machines([program(rank) for rank in range(2)])
    (one,) = asked(Path(built(tmp_path, made.write(tmp_path / "runs"))))["slow"]
    assert (one["ranks"], one["slow"], one["at"]) == ("1", "host", "before k3")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recordings of two ranks, of which one is slow."""
    return Training(steps=6, fault="host").run().write(tmp_path_factory.mktemp("job") / "runs")


def with_other_steps(rank: int, lines: Lines) -> Lines:
    for one in lines if rank else []:
        if one.get("name", "").startswith("step"):
            one["name"] = f"step {100 + int(one['name'][5:])}"
    return lines


def in_another_order(rank: int, lines: Lines) -> Lines:
    met = [one for one in lines if one.get("name", "").startswith("nccl")]
    numbers = [one["args"]["Seq"] for one in met]
    for one, number in zip(met, reversed(numbers) if rank else numbers, strict=True):
        one["args"]["Seq"] = number
    return lines


def with_one_number(rank: int, lines: Lines) -> Lines:
    return [{**one, "name": "step 3"} if rank and one.get("name", "")[:4] == "step" else one for one in lines]


def for_hours(rank: int, lines: Lines) -> Lines:
    return [{**one, "ts_ns": one["ts_ns"] + (1 << 61)} if at > 60 else one for at, one in enumerate(lines)]


@pytest.mark.parametrize(
    ("edit", "note"),
    [
        (with_other_steps, "the ranks have none in common"), (in_another_order, "some work waits for itself"),
        (with_one_number, ""), (for_hours, ""),
    ],
)  # fmt: skip
def test_where_steps_cannot_be_replayed_the_rest_is_reported(
    tmp_path: Path, runs: Path, edit: Callable[[int, Lines], Lines], note: str
) -> None:
    (tmp_path / "runs").mkdir()
    for file in runs.iterdir():
        lines = edit(int(file.stem), [json.loads(line) for line in file.read_text().splitlines()])
        (tmp_path / "runs" / file.name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = asked(Path(built(tmp_path, tmp_path / "runs")))
    assert {one["rank"] for one in found["ranks"]} == {0, 1}
    assert any(note in one for one in found["notes"])
    if note:
        assert [(one["ranks"], one["costs_ns"]) for one in found["slow"]] == [("1", None)]
        assert found["critical_path"] == found["on_path"] == []


def test_calls_without_work_have_no_program(tmp_path: Path, runs: Path) -> None:
    (tmp_path / "runs").mkdir()
    for file in runs.iterdir():
        lines = [
            one for one in file.read_text().splitlines() if '"gpu_kernel"' not in one or file.stem == "0"
        ]
        (tmp_path / "runs" / file.name).write_text("\n".join(lines) + "\n")
    assert [one["rank"] for one in asked(Path(built(tmp_path, tmp_path / "runs")))["ranks"]] == [0]


@pytest.fixture(scope="module")
def dataset(runs: Path) -> Path:
    return Path(built(runs.parent, runs))


@pytest.mark.parametrize(
    ("layer", "columns"),
    [
        ("program", "* replace(9000 as step)"), ("program", "* replace([1000] as after)"),
        ("program", "* replace(place + 1 as place)"), ("program", "* replace(null as what)"),
        ("program", "* exclude(key)"), ("program", ""), ("steps", ""), ("ranks", "* replace('{' as unknown)"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, dataset: Path, layer: str, columns: str) -> None:
    from typer.testing import CliRunner

    from tracepipe.cli import app

    copied = Path(shutil.copytree(dataset, tmp_path / "ds"))
    file = Dataset.opened(str(copied)).part(layer, "vm", 1)
    if columns:
        con = connect(":memory:", tmp_path, memory_mb=100)
        part = f"read_parquet('{file}', hive_partitioning = false)"
        con.execute(f"copy (select {columns} from {part}) to '{tmp_path}/made' (format parquet)")
        (tmp_path / "made").replace(file)
    else:
        file.write_bytes(file.read_bytes()[:100])
    error = CliRunner().invoke(app, ["ranks", str(copied)]).exception
    assert isinstance(error, TracepipeError)
    assert str(copied) in error.message
    assert "uild" in error.hint
    assert not columns or "replace" not in columns or isinstance(error, InputError)
