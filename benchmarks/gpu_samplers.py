"""Measures what `--gpu-counters` and `--gpu-stalls` cost a step of PyTorch, in turns.

    python benchmarks/gpu_samplers.py [--blocks N] [--only STEP]...

STEP: matmul, attention, softmax, addition, transformer, small, graph.

Needs an NVIDIA GPU; ends with 3 without one. A step is a process of gpu_steps.py. Counters are sampled in
some of its turns, by a capture that begins before the turn and ends after it. Stalls are sampled from the
begin of a process, so a second process of the step is the command of a capture that waits for SIGUSR2: in
some of its turns there is a window, and `no window` are the others. A row's ratio is that of its turn to a
native turn of the first process in the same block; the order within a block is drawn anew.

Ratios are medians over the blocks, with the least and the most. `native, again` is one more native turn: by
as much as its ratios differ from 1, the others' may differ by chance. `cores` is the processor time that
sampling takes, by the time of the turn: of the sampler's process, or what the process of the step takes more
than in its turns without a window.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tracepipe  # noqa: E402
from benchmarks.gpu import of_steps, spread_text, tools_here  # noqa: E402
from benchmarks.gpu_layers import Steps  # noqa: E402

TURNS = {
    "matmul": 200,
    "attention": 100,
    "softmax": 800,
    "addition": 400,
    "transformer": 25,
    "small": 400,
    "graph": 1200,
}
"""Steps in a turn, which take some tenths of a second together."""
BLOCKS = 7
WINDOW_S = 0.3  # the longest until a signal has begun or ended a window
AGAIN, PAUSED, SAMPLED = "native, again", "stalls, no window", "stalls"
TICKS = os.sysconf("SC_CLK_TCK")


class Ratios:
    """Of the rows: the ratios to native turns, and the processor's cores."""

    def __init__(self) -> None:
        self._of: dict[str, list[float]] = {}
        self._cores: dict[str, list[float]] = {}

    def add(self, row: str, ratio: float, cores: float | None = None) -> None:
        self._of.setdefault(row, []).append(ratio)
        if cores is not None:
            self._cores.setdefault(row, []).append(cores)

    def show(self) -> None:
        for row, ratios in self._of.items():
            cores = f"  {statistics.median(self._cores[row]):.2f} cores" if row in self._cores else ""
            print(f"  {row:<20}{spread_text(ratios)}{cores}", flush=True)


def cpu_s(pid: int) -> float:
    """The processor time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def sampler() -> int:
    """The process that samples; a capture has one a GPU, and no other can run meanwhile."""
    (pid,) = (int(name.parent.name) for name in Path("/proc").glob("[0-9]*/comm") if _is_sampler(name))
    return pid


def _is_sampler(name: Path) -> bool:
    try:
        return name.read_text().startswith("pm_sampler")
    except OSError:  # it has ended
        return False


def counted(steps: Steps, interval: str, count: int, file: Path) -> tuple[float, float]:
    """A turn while counters are sampled, and the cores that it took."""
    options = tracepipe.CaptureOptions(layers=(), gpu="off", gpu_counters=interval)
    with tracepipe.capture(
        pids=steps.pids, output=str(file), force=True, notify=lambda _: None, options=options
    ):
        pid = sampler()
        begin_s, used_s = time.monotonic(), cpu_s(pid)
        took_ms = steps.turn_ms(count)
        return took_ms, (cpu_s(pid) - used_s) / (time.monotonic() - begin_s)


def own_cores(steps: Steps, count: int) -> tuple[float, float]:
    """A turn, and the cores that the process of the step took."""
    begin_s, used_s = time.monotonic(), cpu_s(steps.pids[0])
    took_ms = steps.turn_ms(count)
    return took_ms, (cpu_s(steps.pids[0]) - used_s) / (time.monotonic() - begin_s)


@contextmanager
def window(steps: Steps) -> Iterator[None]:
    """A window of the capture that the steps are the command of."""
    for turn in range(2):
        steps.process.send_signal(signal.SIGUSR2)
        time.sleep(WINDOW_S)
        if not turn:
            yield


def measure_counters(steps: Steps, count: int, blocks: int, file: Path, ratios: Ratios) -> float:
    """Turns with and without counters; returns the native time of a step in ms."""
    native_ms = []
    rows: dict[str, Callable[[], tuple[float, float | None]]] = {
        AGAIN: lambda: (steps.turn_ms(count), None),
        "counters, 1 ms": lambda: counted(steps, "1ms", count, file),
        "counters, 200 us": lambda: counted(steps, "200us", count, file),
    }
    for _ in range(blocks):
        native_ms.append(steps.turn_ms(count))
        for row in random.sample(list(rows), len(rows)):
            took_ms, cores = rows[row]()
            ratios.add(row, took_ms / native_ms[-1], cores)
    return statistics.median(native_ms)


def measure_stalls(steps: Steps, sampled: Steps, count: int, blocks: int, ratios: Ratios) -> None:
    """Turns of a process whose stalls can be sampled, in and out of windows."""
    for _ in range(blocks):
        native_ms = steps.turn_ms(count)
        paused_ms, paused_cores = own_cores(sampled, count)
        with window(sampled):
            sampled_ms, cores = own_cores(sampled, count)
        ratios.add(PAUSED, paused_ms / native_ms)
        ratios.add(SAMPLED, sampled_ms / native_ms, cores - paused_cores)


def measure(name: str, count: int, blocks: int) -> None:
    """Print the table of a step."""
    serve = [sys.executable, str(Path(__file__).with_name("gpu_steps.py")), "serve", name]
    capture = [
        sys.executable,
        "-m",
        "tracepipe",
        "capture",
        "--gpu-stalls",
        "--gpu",
        "off",
        "--layers",
        "none",
    ]
    ratios = Ratios()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        steps = Steps(serve)
        stack.callback(steps.close)
        steps.begin()
        native_ms = measure_counters(steps, count, blocks, folder / "counters.jsonl", ratios)
        windows = ["--start-on", "signal", "--repeat", str(2 * blocks), "-o", str(folder / "stalls.jsonl")]
        sampled = Steps([*capture, *windows, "--", *serve])
        stack.callback(sampled.close)
        sampled.begin()
        measure_stalls(steps, sampled, count, blocks, ratios)
    print(f"\n{name}: times native, which is {native_ms:.3f} ms; {blocks} blocks of {count} steps")
    ratios.show()


def main() -> None:
    """Print the tables, or why there are none."""
    options = of_steps(__doc__, TURNS, BLOCKS).parse_args()
    tools_here()
    for name in options.only or TURNS:
        try:
            measure(name, TURNS[name], options.blocks)
        except (RuntimeError, OSError, tracepipe.TracepipeError) as error:
            print(f"\n{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
