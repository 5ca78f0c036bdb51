"""Measures what `--gpu kernels` and `--gpu warps` cost when the recording is over and the program continues.

    python benchmarks/gpu_after.py [--quick]

Needs an NVIDIA GPU, and ends with 3 without one. A set is one process of gpu.cu for each row of the table,
all alive at once and on the same two processors. Recorded ones are let go first, in the midst of their
launches. Then the processes take turns, in an order drawn anew for each block, with some milliseconds of work
at a time: a ratio is that of two figures of one block, so that it does not move with the machine. `native,
again` is one more process that nothing was loaded into: by as much as its ratios differ from 1, the others'
may differ by chance.

Ratios are medians over the blocks of a set, and then over the sets, with the least and the most of the sets.
`back` is how long after the end of the recording the first 20 ms began whose launches took no more than 1.1
times what they did in the last quarter of the process's rounds: the median of the sets, and the most.

The rows separate the parts of what is left:

    library alone       it is loaded, with NVIDIA's own, and finds no capture
    nothing patched     Compute Sanitizer's API has called back, and machine code was never changed
    no calls            CUPTI has recorded kernels, and API calls never
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import Bench, bench_here, spread_text  # noqa: E402
from tracepipe.tracer.gpu.engines.api_calls import ARGUMENTS_VARIABLE  # noqa: E402
from tracepipe.tracer.gpu.engines.channel import CHANNEL_VARIABLE  # noqa: E402

NATIVE = "native"
WORKS = {"launch": 6, "small": 60, "vector_add": 200}
"""Rounds in a turn, which take a few milliseconds together."""
SETS, BLOCKS = 5, 40
# Rounds of `launch`, each of about a millisecond: the recording ends during them.
ROUNDS_AT_END = 600
RECORDED_S = 0.2
LET_GO_S = 10  # the longest wait
WINDOW_US = 20_000
NEAR = 1.1
NO_KERNEL = "no kernel has this name"

Round = tuple[float, float]
"""When it began, and what a launch or a step took in it, in microseconds."""


@dataclass(frozen=True)
class Row:
    """What is loaded into a process, and how its recording ends."""

    name: str
    engine: str = "native"
    options: Mapping[str, Any] = field(default_factory=dict)
    end: signal.Signals | None = None
    """The end of the capture process. None: there is none, and the library cannot connect."""


STOP, KILL = signal.SIGUSR1, signal.SIGKILL
ROWS = (
    Row(NATIVE),
    Row("native, again"),
    Row("kernels, library alone", "kernels"),
    Row("kernels, no calls", "kernels", {"calls": "none"}, STOP),
    Row("kernels, stopped", "kernels", {}, STOP),
    Row("kernels, killed", "kernels", {}, KILL),
    Row("warps, library alone", "warps"),
    Row("warps, nothing patched", "warps", {"gpu_kernels": NO_KERNEL}, STOP),
    Row("warps, stopped", "warps", {}, STOP),
    Row("warps, killed", "warps", {}, KILL),
)


class Worker(Protocol):
    """A process that works on request."""

    def rounds(self, work: str, count: int) -> list[Round]: ...


class Program:
    """A process of gpu.cu."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], processors: set[int]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=pipe,
            stdout=pipe,
            text=True,
            preexec_fn=partial(os.sched_setaffinity, 0, processors),
        )
        self._expect("ready")

    def ask(self, work: str, count: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{work} {count}\n")
        self.process.stdin.flush()

    def answer(self) -> list[Round]:
        return [
            (float(begin_us), float(each_us)) for _, begin_us, each_us in map(str.split, self._expect("done"))
        ]

    def rounds(self, work: str, count: int) -> list[Round]:
        self.ask(work, count)
        return self.answer()

    def close(self) -> None:
        """Let the process end; raises RuntimeError if it fails."""
        self.process.communicate(timeout=60)
        if self.process.returncode:
            raise RuntimeError(f"a program ended with {self.process.returncode}")

    def _expect(self, last: str) -> list[str]:
        assert self.process.stdout is not None
        lines = []
        while (line := self.process.stdout.readline()) != f"{last}\n":
            if not line:
                raise RuntimeError(f"a program ended with {self.process.wait()}")
            lines.append(line)
        return lines


class Capture:
    """A capture process: it records until it is asked to stop, or killed."""

    def __init__(self, bench: Bench, row: Row, processors: set[int]) -> None:
        read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.sched_setaffinity(0, processors)
            _record(bench, row, write)
        os.close(write)
        with os.fdopen(read, "rb") as answer:
            self.environment: dict[str, str] = json.loads(answer.readline())
        self._is_reaped = False

    def end(self, by: signal.Signals) -> float:
        """When the end began, in microseconds; back when the process is gone, or has waited for too long."""
        ended_us = time.monotonic_ns() / 1000
        os.kill(self._pid, by)
        by_s = time.monotonic() + LET_GO_S
        while not self._is_reaped and time.monotonic() < by_s:
            self._is_reaped = os.waitpid(self._pid, os.WNOHANG)[0] != 0
            time.sleep(0.002)
        return ended_us

    def close(self) -> None:
        if not self._is_reaped:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        Path(self.environment.get(ARGUMENTS_VARIABLE, "/no/such/file")).unlink(missing_ok=True)


def _record(bench: Bench, row: Row, answers: int) -> NoReturn:
    try:
        recording = bench.recording(row.engine, **row.options)
        assert recording is not None
        asked: list[int] = []
        signal.signal(STOP, lambda number, _: asked.append(number))
        os.write(answers, json.dumps(recording.environment()).encode() + b"\n")
        while not asked:
            recording.collect()
            time.sleep(0.002)
        recording.stop()
        while not recording.is_over():
            recording.collect()
            time.sleep(0.002)
        recording.close()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def back_ms(rounds: Sequence[Round], ended_us: float) -> float:
    """When the first 20 ms after the end began that were as fast as the last quarter of the rounds."""
    usual_us = statistics.median(each_us for _, each_us in rounds[-max(1, len(rounds) // 4) :])
    after = [round for round in rounds if round[0] >= ended_us]
    for begin_us, first_us in after:
        some_us = [each_us for at_us, each_us in after if begin_us <= at_us < begin_us + WINDOW_US]
        if max(first_us, statistics.median(some_us)) <= NEAR * usual_us:
            return (begin_us - ended_us) / 1000
    return math.inf


def take_turns(
    workers: Mapping[str, Worker], blocks: int, draw: random.Random
) -> dict[str, dict[str, list[float]]]:
    """The times by work and name, block by block: each is the median of a turn's rounds."""
    took_us: dict[str, dict[str, list[float]]] = {work: {name: [] for name in workers} for work in WORKS}
    for _ in range(blocks):
        for work, count in WORKS.items():
            for name in draw.sample(list(workers), len(workers)):
                median_us = statistics.median(each_us for _, each_us in workers[name].rounds(work, count))
                took_us[work][name].append(median_us)
    return took_us


def ratio(took_us: Mapping[str, Sequence[float]], name: str) -> float:
    """The median over the blocks of the ratios to the native process."""
    return statistics.median(a / b for a, b in zip(took_us[name], took_us[NATIVE], strict=True))


@dataclass
class Figures:
    """For each set: ratios by row and work, the native times by work, and milliseconds by row."""

    ratios: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    native_us: dict[str, list[float]] = field(default_factory=dict)
    back: dict[str, list[float]] = field(default_factory=dict)

    def add(self, took_us: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
        for work, by_name in took_us.items():
            self.native_us.setdefault(work, []).append(statistics.median(by_name[NATIVE]))
            for name in by_name:
                self.ratios.setdefault((name, work), []).append(ratio(by_name, name))

    def show(self) -> None:
        native = ", ".join(
            f"{work} {statistics.median(some):.2f} us ({min(some):.2f} to {max(some):.2f})"
            for work, some in self.native_us.items()
        )
        print(f"\nnatively, {len(next(iter(self.native_us.values())))} sets: {native}")
        print(f"  {'x native':<26}" + "".join(f"{work:>24}" for work in WORKS) + f"{'back ms':>16}")
        for row in ROWS[1:]:
            cells = [spread_text(self.ratios[row.name, work]) for work in WORKS]
            back = self.back.get(row.name)
            last = f"{statistics.median(back):.0f}, {max(back):.0f}" if back else "-"
            print(f"  {row.name:<26}" + "".join(f"{cell:>24}" for cell in cells) + f"{last:>16}")


@contextmanager
def started(
    bench: Bench, row: Row, processors: set[int], others: set[int]
) -> Iterator[tuple[Program, float | None]]:
    """A row's process after its recording, and the milliseconds until it was as fast as before."""
    with ExitStack() as stack:
        environment: dict[str, str] = {}
        capture = None
        if row.end is not None:
            capture = Capture(bench, row, others)
            stack.callback(capture.close)
            environment = capture.environment
        elif (recording := bench.recording(row.engine)) is not None:
            environment = recording.environment()
            del environment[CHANNEL_VARIABLE]
            recording.close()
        program = Program([str(bench.program), "serve"], environment, processors)
        stack.callback(program.process.kill)
        back = None
        if capture and row.end is not None:
            program.ask("launch", ROUNDS_AT_END)
            time.sleep(RECORDED_S)
            ended_us = capture.end(row.end)
            back = back_ms(program.answer(), ended_us)
        yield program, back
        program.close()


def measure_set(bench: Bench, figures: Figures, blocks: int, seed: int) -> None:
    """Run one process for each row, in turns."""
    there = sorted(os.sched_getaffinity(0))
    processors, others = set(there[:2]), set(there[2:] or there)
    with ExitStack() as stack:
        programs: dict[str, Program] = {}
        for row in ROWS:
            programs[row.name], back = stack.enter_context(started(bench, row, processors, others))
            if back is not None:
                figures.back.setdefault(row.name, []).append(back)
        figures.add(take_turns(programs, blocks, random.Random(seed)))


def main() -> None:
    """Print the table, or why there is none."""
    is_quick = "--quick" in sys.argv
    figures = Figures()
    with bench_here(quick=is_quick) as bench:
        for number in range(1 if is_quick else SETS):
            measure_set(bench, figures, BLOCKS // 4 if is_quick else BLOCKS, number)
    figures.show()


if __name__ == "__main__":
    main()
