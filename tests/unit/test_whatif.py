"""What steps would save, against a simulated program that is run with and without a part of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import Load, loader, span, write
from tracepipe.api.convert import convert
from tracepipe.api.options import ConvertOptions
from tracepipe.errors import TracepipeError
from tracepipe.reports.whatif import Options, run

LATENCY, GAP, RETURN = 4_000, 1_000, 6_000
STEPS = 30


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


@dataclass
class Program:
    """A process with one thread and one GPU, whose host and stream advance as they do on a machine."""

    records: list[dict[str, Any]] = field(default_factory=list)
    now: int = 1_000
    until: int = 0
    launches: int = 0
    kernels_ns: int = 0

    def compute(self, ns: int) -> None:
        self.now += ns

    def launch(self, name: str, ns: int, call_ns: int = 3_000) -> None:
        self.launches += 1
        start = max(self.now + LATENCY, self.until + GAP)
        self.records.append(span(self.now, self.now + call_ns, "cudaLaunchKernel", launch=self.launches))
        self.records.append(
            span(start, start + ns, name, "gpu_kernel", gpu=0, stream=7, launch=self.launches)
        )
        self.now, self.until = self.now + call_ns, start + ns

    def communicate(self, ns: int, *, holds_up: bool) -> None:
        """Communication on a stream of its own, for which the other stream may wait."""
        until = self.until
        self.order(7, 9)
        self.launch("ncclDevKernel_AllReduce", ns)
        self.records[-1]["stream"] = 9
        if holds_up:
            self.order(9, 7)
        else:
            self.until = until

    def order(self, first: int, then: int) -> None:
        """A stream waits for another one."""
        for name, stream in (("cudaEventRecord", first), ("cudaStreamWaitEvent", then)):
            args = {"stream": stream, "event": first}
            self.records.append(span(self.now, self.now + 500, name, args=args))
            self.now += 500

    def wait(self, name: str = "cudaStreamSynchronize") -> None:
        end = max(self.now + 2_000, self.until + RETURN)
        self.records.append(span(self.now, end, name))
        self.now = end

    def mark(self, name: str, start: int) -> None:
        self.records.append(span(start, self.now, name, "annotation"))


def train(seed: int, *, host_bound: bool, extra: str = "", faster: float = 1, free: bool = False) -> Program:
    """Steps that differ a little, each with an extra part."""
    source, program, loads = random.Random(seed), Program(), random.Random(seed)
    for step in range(STEPS):
        start = program.now
        if extra == "loads":
            program.compute(loads.randrange(100_000, 2_000_000))
            program.mark("extra", start)
        for at in range(40):
            program.compute(source.randrange(4_000, 9_000))
            work = source.randrange(2_000, 5_000) if host_bound else source.randrange(10_000, 30_000)
            program.launch(
                "gemm" if at % 2 else "add", int(work / (faster if at % 2 else 1)), 0 if free else 3_000
            )
            if at == 20 and extra not in ("", "loads"):
                begin = program.now
                if extra == "host":
                    program.compute(300_000)
                elif extra == "stall":
                    program.until += 200_000
                elif extra == "sync":
                    program.wait("cudaDeviceSynchronize")
                elif extra in ("held", "free"):
                    program.communicate(30_000, holds_up=extra == "held")
                elif extra == "fused":
                    program.compute(20_000)
                    program.launch("extra", 20 * 1_500)
                else:
                    for _ in range(20):
                        program.compute(1_000)
                        program.launch("extra", 20_000 if extra == "gpu" else 1_500)
                program.mark("extra", begin)
        program.wait()
        program.mark(f"step {step}", start)
        program.compute(source.randrange(5_000, 10_000))
    return program


def median_ns(program: Program) -> float:
    starts = [r["ts_ns"] for r in program.records if r["type"] == "annotation" and "step" in r["name"]]
    lengths = sorted(b - a for a, b in pairwise(starts))
    return lengths[len(lengths) // 2]


def changes(program: Program, load: Load, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run(
        load(*sorted(program.records, key=lambda r: r["ts_ns"])), Options(**options)
    ).as_json()["changes"]
    return found


@pytest.mark.parametrize("host_bound", [False, True], ids=["GPU-bound", "host-bound"])
@pytest.mark.parametrize("extra", ["host", "sync", "gpu", "small", "loads"])
def test_without_a_range(load: Load, extra: str, host_bound: bool) -> None:
    with_it = train(1, host_bound=host_bound, extra=extra)
    truth = median_ns(train(1, host_bound=host_bound))
    (found,) = changes(with_it, load, without="extra")
    assert found["steps"] >= STEPS - 1
    assert found["new_ns"] == pytest.approx(truth, rel=0.02)
    assert found["low_ns"] <= median_ns(with_it) - truth + 0.01 * truth
    assert found["high_ns"] >= median_ns(with_it) - truth - 0.01 * truth


@pytest.mark.parametrize("host_bound", [False, True], ids=["GPU-bound", "host-bound"])
def test_faster_kernels_and_free_launches(load: Load, host_bound: bool) -> None:
    program = train(2, host_bound=host_bound)
    (found,) = changes(program, load, faster="gemm=2")
    truth = median_ns(train(2, host_bound=host_bound, faster=2))
    assert (found["new_ns"] or median_ns(program)) == pytest.approx(truth, rel=0.02)
    (found,) = changes(program, load, launches="free")
    truth = median_ns(train(2, host_bound=host_bound, free=True))
    assert median_ns(program) - found["saves_ns"] == pytest.approx(truth, rel=0.02)
    (found,) = changes(train(2, host_bound=host_bound, extra="sync"), load, without="cudaDeviceSynchronize")
    assert found["new_ns"] == pytest.approx(median_ns(program), rel=0.02)


@pytest.mark.parametrize("host_bound", [False, True], ids=["GPU-bound", "host-bound"])
def test_a_chain_that_is_one_kernel(load: Load, host_bound: bool) -> None:
    (found,) = changes(train(7, host_bound=host_bound, extra="small"), load, fuse="ext*, extra ×18, extra")
    truth = median_ns(train(7, host_bound=host_bound, extra="fused"))
    assert found["steps"] == STEPS
    assert found["new_ns"] == pytest.approx(truth, rel=0.01)


def test_communication_that_holds_up_nothing(load: Load) -> None:
    program = train(8, host_bound=False, extra="held")
    truth = median_ns(train(8, host_bound=False, extra="free"))
    (found,) = changes(program, load, overlap="nccl*")
    assert found["new_ns"] == pytest.approx(truth, rel=0.005)
    assert found["saves_ns"] == pytest.approx(median_ns(program) - truth, rel=0.15)


def test_warps_of_launches_without_kernels_are_work_too(load: Load) -> None:
    program = train(6, host_bound=False, extra="gpu")
    (wanted,) = changes(program, load, without="extra")
    for record in program.records:
        if record["type"] == "gpu_kernel":
            one = {"grid": [1, 1, 1], "block": [32, 1, 1], "warp": [0], "entry_ns": [0]}
            record |= {"type": "gpu_warp", **one, "exit_ns": [record.pop("dur_ns")]}
            for name in ("phase", "pid", "tid", "stream"):
                del record[name]
    (found,) = changes(program, load, without="extra")
    assert found == wanted


def test_what_would_save_most_comes_first(load: Load) -> None:
    rows = changes(train(3, host_bound=False, extra="host"), load)
    assert {"without extra", "gemm 2 times as fast", "free launches"} <= {row["change"] for row in rows}
    assert [row["saves_ns"] for row in rows] == sorted((row["saves_ns"] for row in rows), reverse=True)
    (both,) = changes(
        train(3, host_bound=False, extra="gpu"), load, without=["extra", "gemm"], launches="free"
    )
    assert both["change"] == "without extra, without gemm, free launches"


def refused(load: Load, records: Sequence[dict[str, Any]], **options: Any) -> str:
    with pytest.raises(TracepipeError) as error:
        run(load(*sorted(records, key=lambda r: r["ts_ns"])), Options(**options))
    return error.value.message


def test_what_cannot_be_replayed_is_refused(load: Load) -> None:
    records = train(4, host_bound=False).records

    def kernels(**fields: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
        return [
            r | {name: of(r) for name, of in fields.items()} if r["type"] == "gpu_kernel" else r
            for r in records
        ]

    assert "needs 3 steps" in refused(load, [r for r in records if r["type"] != "annotation"])
    assert "several GPUs" in refused(load, kernels(gpu=lambda r: r["launch"] % 2))
    assert "collectives wait" in refused(load, kernels(name=lambda r: "ncclDevKernel_AllReduce"))
    assert "launches of its work are not known" in refused(
        load, kernels(launch=lambda r: r["launch"] + 10**6)
    )
    threads = [
        r | {"tid": 2, "dur_ns": 10**6} if r["name"] == "cudaStreamSynchronize" else r for r in records
    ]
    threads += [r | {"tid": 2} for r in records if r["name"] == "cudaLaunchKernel"]
    assert "at the same time" in refused(load, threads)
    # Kernels that wait for something that was not recorded.
    assert "work waits for something" in refused(load, train(4, host_bound=False, extra="stall").records)


@pytest.mark.parametrize(
    "options",
    [
        {"like_peers": 0},
        {"without": "no*"},
        {"faster": "no=2"},
        {"faster": "gemm=0"},
        {"faster": "gemm"},
        {"fuse": "extra ×20"},
        {"overlap": "gemm"},
    ],
    ids=str,
)
def test_what_nothing_has(load: Load, options: dict[str, Any]) -> None:
    assert refused(load, train(5, host_bound=True).records, **options)


@pytest.mark.parametrize(("change", "extra"), [("without=extra", 0), ("faster=gemm=2", 20 * STEPS)])
def test_the_replay_is_drawn_beside_the_recording(tmp_path: Path, change: str, extra: int) -> None:
    """What is left out is not drawn, and what remains takes as long as `whatif` says."""
    program = train(7, host_bound=False, extra="gpu")
    recording = write(tmp_path / "run.jsonl", *sorted(program.records, key=lambda r: r["ts_ns"]))
    both = convert(recording, tmp_path / "both.txt", "text", ConvertOptions(whatif=[change]))
    assert both.output == str(tmp_path / "both.txt")
    recorded, drawn = (tmp_path / "both.txt").read_text().split("GPU 0 on replayed\n")
    work, calls = drawn.partition("process ")[0], drawn.partition(" on replayed ")[2]
    assert (recorded.count(" extra "), work.count(" extra ")) == (20 * STEPS, extra)
    assert work.count(" gemm ") == 20 * STEPS
    assert calls.count(" cudaLaunchKernel ") == 40 * STEPS + extra


@pytest.mark.parametrize("change", ["bogus", "without=", "without=nothing", "launches=fast"])
def test_changes_that_are_none_are_not_drawn(tmp_path: Path, change: str) -> None:
    recording = write(tmp_path / "run.jsonl", *train(8, host_bound=True).records)
    with pytest.raises(TracepipeError):
        convert(recording, tmp_path / "both.txt", "text", ConvertOptions(whatif=[change]))
    assert not (tmp_path / "both.txt").exists()
