"""The benchmark of the GPU engines, as far as it goes without a GPU: what it counts, prints and refuses."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_after, gpu_layers
from tests.support.gpu_records import pack_record
from tracepipe.tracer.gpu.engines import warps as layout
from tracepipe.tracer.gpu.engines.channel import Kind
from tracepipe.tracer.gpu.engines.kernels import KERNEL, KernelKind

SCRIPT = Path(gpu.__file__)


def packed(kind: int, payload: bytes) -> bytes:
    return pack_record(kind, 42, 43, 1, payload)


@pytest.fixture
def bench() -> gpu.Bench:
    """One whose programs are not built: what is run is a test's."""
    made = object.__new__(gpu.Bench)
    made.quick, made.ends_s = True, time.monotonic() + 60
    made.program = Path("/no/such/program")
    made.kernels_library = made.library = made.patches = made.empty_patches = Path("/no/such/library")
    return made


@pytest.mark.slow
def test_a_missing_gpu_is_stated() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, env=hidden)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("no GPU: ")


def test_records_of_both_engines_are_counted() -> None:
    seen = gpu.Seen()
    seen.take(
        packed(layout.WarpKind.WARPS, layout.WARPS.pack(1, 2, 8000, 8000, 0) + bytes(8000))
        + packed(layout.WarpKind.KERNEL, b"")
        + packed(layout.WarpKind.LOST_WARPS, layout.LOST_WARPS.pack(1, 0, 1, 77))
        + packed(KernelKind.KERNEL, bytes(3 * KERNEL.size))
        + packed(Kind.NOTE, b"a note")
        + packed(Kind.CLOCK, layout.CLOCK.pack(1, 500, 10, 20))
    )
    assert (seen.warps, seen.kernels, seen.lost, seen.notes) == (8000, 4, 77, ["a note"])
    assert seen.pairs == {1: [{"source_ns": 500, "host_lo_ns": 10, "host_hi_ns": 20}]}


def test_a_program_is_run_with_a_recording_and_its_figures_are_read(bench: gpu.Bench) -> None:
    asks = "import os; print('us', 2.5); print('set', 'CUDA_INJECTION64_PATH' in os.environ)"
    for engine, is_set in (("native", "False"), ("empty", "True"), ("warps", "True"), ("kernels", "True")):
        assert bench.run([sys.executable, "-c", asks], engine).figures == {"us": "2.5", "set": is_set}


@pytest.mark.slow
def test_a_program_that_fails_or_hangs_is_reported(bench: gpu.Bench) -> None:
    with pytest.raises(RuntimeError, match=r"^ended with 1: out of memory$"):
        bench.run([sys.executable, "-c", "raise SystemExit('out of memory')"], "native")
    bench.ends_s = time.monotonic() + 2.5
    with pytest.raises(RuntimeError, match="it took too long; ended with -9"):
        bench.run([sys.executable, "-c", "import signal; signal.pause()"], "native")


def test_a_row_that_fails_leaves_the_others(bench: gpu.Bench, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> gpu.Seen:
        raise RuntimeError("ended with 1: out of memory")

    times = iter("24")
    variants = [
        gpu.Variant("native", lambda: gpu.Seen({"us": next(times)})),
        gpu.Variant("warps", fails),
        gpu.Variant("kernels", lambda: gpu.Seen({"us": "6"})),
    ]
    bench.quick = False
    rows = gpu.Rows(bench, variants, rounds=2)
    assert [name for name, _ in rows.each()] == ["native", "kernels"]
    assert capsys.readouterr().out.replace(" ", "") == "warpsRuntimeError:endedwith1:outofmemory\n"
    assert rows.times("kernels", "us", "native", "warps").split() == [
        "6.000",
        "6.000",
        "6.000",
        "2.00",
        "nan",
    ]


def test_the_clocks_drift_and_bound_are_stated(
    bench: gpu.Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's clock gains 10 µs a second; each pair is known to 700 ns."""
    seen = gpu.Seen({"warps": "600"}, warps=600)
    for second in range(6):
        ns = second * 10**9
        seen.take(
            packed(Kind.CLOCK, layout.CLOCK.pack(0, ns, ns + second * 10_000, ns + second * 10_000 + 1400))
        )
    monkeypatch.setattr(gpu.Bench, "run", lambda *_, **__: seen)
    gpu.clock_table(bench)
    name, pairs, drift_ppm, between_ns, ends_ns = capsys.readouterr().out.splitlines()[-2].split()
    assert (name, pairs, drift_ppm) == ("globaltimer:0", "6", "10.000")
    assert all(700 <= int(bound_ns) < 5000 for bound_ns in (between_ns, ends_ns))


# what is left after a recording


@pytest.mark.slow
def test_the_benchmark_of_what_is_left_reports_that_there_is_no_gpu() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, gpu_after.__file__]
    done = subprocess.run(command, capture_output=True, text=True, env=hidden)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("no GPU: ")


class Machine:
    """One whose speed moves by half, a little with each call."""

    def __init__(self) -> None:
        self.calls = 0

    def speed(self) -> float:
        self.calls += 1
        return 1 + abs(self.calls % 2000 - 1000) / 2000


class Process:
    """One that is slower than a native one by a factor."""

    def __init__(self, machine: Machine, factor: float) -> None:
        self.machine, self.factor = machine, factor

    def rounds(self, work: str, count: int) -> list[gpu_after.Round]:
        took_us = 4 * self.machine.speed() * self.factor
        return [(0.0, 9 * took_us), *[(0.0, took_us)] * (count - 1)]


def test_a_ratio_does_not_move_with_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    factors = {row.name: 1.0 for row in gpu_after.ROWS} | {"warps, stopped": 1.05}
    figures = gpu_after.Figures(back={"warps, stopped": [12.0, 31.0, 14.0]})
    for seed in range(3):
        workers = {name: Process(machine, factor) for name, factor in factors.items()}
        figures.add(gpu_after.take_turns(workers, 40, random.Random(seed)))
    native_us = figures.native_us["launch"]
    assert max(native_us) > 1.1 * min(native_us), "the machine has moved"
    for name, factor in factors.items():
        for work in gpu_after.WORKS:
            assert figures.ratios[name, work] == pytest.approx([factor] * 3, abs=0.004)
    figures.show()
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "warps, stopped" in line]
    assert row.split()[-2:] == ["14,", "31"]


def test_launches_are_back_to_normal_when_they_stay_so_until_the_end() -> None:
    slow = {at for at in range(100) if at < 30 or 33 <= at < 47} | {80, 81}
    rounds = [(1000.0 * at, 9.0 if at in slow else 4.0) for at in range(200)]
    assert gpu_after.back_ms(rounds, 10_500.0) == 36.5
    assert gpu_after.back_ms(rounds, 60_000.0) == 0


# what each layer costs


@pytest.mark.slow
def test_the_benchmark_of_layers_reports_that_there_is_no_gpu() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, gpu_layers.__file__], capture_output=True, text=True, env=hidden)
    assert (done.returncode, done.stdout) == (3, "")


STEPS = """
import sys
print("loaded\\nready 42", flush=True)
for line in sys.stdin:
    count = int(line) if line[0].isdigit() else 1
    print(*[float(sys.argv[1])] * count, flush=True)
"""


def test_a_row_is_the_ratio_to_processes_that_were_never_touched(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [gpu_layers.Row(gpu_layers.NEVER), gpu_layers.Row("slower", (), {}, is_after_window=True)]

    def start(row: gpu_layers.Row, number: int, command: Sequence[str], _: Path) -> gpu_layers.Steps:
        return gpu_layers.Steps([*command, str(2.5 + number if row.name == "slower" else 2.0)])

    options = Namespace(blocks=2, processes=2)
    gpu_layers.measure([sys.executable, "-c", STEPS], 3, options, rows, Path(), start=start)
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "never touched: 2.000 ms, the quartile of 2 turns of 3 steps",
        "never touched 1.000 (1.000 to 1.000)",
        "slower 1.250 (1.250 to 1.750)",
    ]


def test_a_process_is_recorded_from_its_start(tmp_path: Path) -> None:
    row = gpu_layers.Row(
        "recorded", ("--gpu", "off", "--layers", "none", "--hook", "tracepoint:sched:sched_switch")
    )
    steps = gpu_layers.started(row, 0, ["/bin/sh", "-c", "echo ready $$; read -r line; echo 1.5"], tmp_path)
    steps.begin()
    assert steps.times_ms("1") == [1.5]
    steps.close()
    assert steps.process.returncode == 0
    assert (tmp_path / "recorded-0.jsonl").exists()


def test_steps_that_cannot_be_made_are_an_error() -> None:
    def bare(row: gpu_layers.Row, number: int, command: Sequence[str], folder: Path) -> gpu_layers.Steps:
        return gpu_layers.Steps(command)

    with pytest.raises(RuntimeError, match="it ended with 5"):
        gpu_layers.measure(
            [sys.executable, "-c", "raise SystemExit(5)"],
            1,
            Namespace(blocks=1, processes=1),
            [gpu_layers.Row("it")],
            Path(),
            start=bare,
        )
