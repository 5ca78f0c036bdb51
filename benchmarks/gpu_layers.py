"""Measures what each layer of a capture costs a step of PyTorch and of JAX, in turns.

    python benchmarks/gpu_layers.py [--blocks N] [--only STEP]...

STEP: small, transformer, gpt2, jax, launches, new_stacks; with two GPUs ddp.

Needs an NVIDIA GPU and root; ends with 3 without a GPU. A step is a process of gpu_steps.py, which is never
started anew: a capture is attached to it (`--pid`), lets go after its turn, and another one follows, in an
order drawn anew for each block. So a ratio is that of two turns of one process within seconds. Native turns
are those between recordings: CUPTI is in the process then, and asked for nothing. `CUPTI alone` is asked for
the same as in the rows of its calls, and nobody has its records. The row `never recorded` is a second process
of the same step; by as much as its ratios differ, the others' may differ by chance.

Ratios are medians over the blocks, with the least and the most. Of launches also what one takes more than
without stacks of Python.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tracepipe  # noqa: E402
from benchmarks.gpu import of_steps, spread_text, tools_here  # noqa: E402
from benchmarks.gpu_steps import LAUNCHES, NEW_STACKS  # noqa: E402
from tracepipe.errors import TracepipeError  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import NATIVE as SOURCES  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import Toolchain  # noqa: E402
from tracepipe.tracer.gpu.choice import calls_text  # noqa: E402

TURNS = {
    "small": 400,
    "gpt2": 40,
    "transformer": 20,
    "jax": 300,
    "launches": 50,
    "new_stacks": 20,
    "ddp": 150,
}
"""Steps in a turn, which take a few tenths of a second together."""
LAUNCHES_OF = {"launches": LAUNCHES, "new_stacks": NEW_STACKS}
BLOCKS = 7
NATIVE, NEVER = "native", "never recorded"


@dataclass(frozen=True)
class Row:
    """What is recorded in a turn."""

    name: str
    layers: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)
    alone: str = ""
    """The calls that CUPTI records without a reader of its records. Empty: there is a capture."""


_KERNELS = {"gpu": "kernels", "calls": "launches"}
_CALLS = {"gpu": "kernels", "calls": "default"}
_STACKS = Row("kernels, calls", ("gpu_kernel",), _CALLS)
_NO_STACKS = Row("kernels, calls, no stacks", ("gpu_kernel",), _CALLS | {"stacks": "off"})
ROWS = (
    Row("CUPTI alone, launching calls", (), alone="launches"),
    Row("kernels, launching calls", ("gpu_kernel",), _KERNELS),
    Row("CUPTI alone, calls", (), alone="default"),
    _NO_STACKS,
    _STACKS,
    Row("kernels, calls, scheduler", ("gpu_kernel", "scheduler"), _CALLS),
    Row("kernels, calls, syscalls", ("gpu_kernel", "syscall"), _CALLS),
    Row("kernels, calls, both", ("gpu_kernel", "scheduler", "syscall"), _CALLS),
    Row("kernels, calls, --last 10s", ("gpu_kernel",), _CALLS | {"last": "10s"}),
    Row("between windows: kernels", ("gpu_kernel",), _CALLS | {"start_on": "api"}),
    Row("between windows: both", ("gpu_kernel", "scheduler", "syscall"), _CALLS | {"start_on": "api"}),
    Row("eBPF: calls", ("userspace",), {"gpu": "off", "calls": "default"}),
    Row("eBPF: calls, both", ("userspace", "scheduler", "syscall"), {"gpu": "off", "calls": "default"}),
)


class Steps:
    """A process that makes steps on request."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.pids: list[int] = []

    def begin(self) -> None:
        """Wait until the process is ready. Raises RuntimeError."""
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("ready"):
            if not line:
                raise RuntimeError(f"it ended with {self.process.wait()}")
        self.pids = [int(pid) for pid in line.split()[1:]]

    def turn_ms(self, count: int, alone: str = "") -> float:
        """The median length of `count` steps; `alone`: as a row has it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{count} {calls_text(alone)}\n" if alone else f"{count}\n")
        self.process.stdin.flush()
        return statistics.median(map(float, self.process.stdout.readline().split()))

    def close(self) -> None:
        """Let the process end."""
        self.process.communicate(timeout=60)


def recorded_ms(steps: Steps, row: Row, count: int, file: Path) -> float:
    """A turn while it is recorded, or before a window."""
    if row.alone:
        return steps.turn_ms(count, row.alone)
    with tracepipe.capture(
        pids=steps.pids,
        output=str(file),
        force=True,
        notify=lambda _: None,
        options=tracepipe.CaptureOptions(layers=row.layers, **row.options),
    ) as run:
        took_ms = steps.turn_ms(count)
        if "start_on" in row.options:
            with run.window():
                pass
        return took_ms


def build_alone(tools: Toolchain, folder: Path) -> Path:
    """The library of cupti_alone.cpp. Raises CaptureUnavailable and CalledProcessError."""
    cupti, library = tools.part("cupti"), folder / "cupti_alone.so"
    includes = [f"-I{SOURCES}", *(f"-isystem{include}" for include in cupti.include)]
    links = [str(cupti.library), f"-Wl,-rpath,{cupti.library.parent}"]
    source = str(Path(__file__).with_name("cupti_alone.cpp"))
    command = [str(tools.gxx().path), "-std=c++17", "-O2", "-shared", "-fPIC", *includes]
    subprocess.run([*command, "-o", str(library), source, *links], check=True)
    return library


def measure(
    command: Sequence[str], count: int, blocks: int, rows: Sequence[Row] = ROWS, launches: int = 0
) -> None:
    """Print the table of one step. `launches`: in it, where its rows are those of stacks."""
    ratios: dict[str, list[float]] = {row.name: [] for row in (Row(NEVER, ()), *rows)}
    native_ms: list[float] = []
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run.jsonl"
        steps, never = Steps(command), Steps(command)
        for one in (steps, never):
            stack.callback(one.close)
        for one in (steps, never):
            one.begin()
        for _ in range(blocks):
            for row in random.sample(rows, len(rows)):
                if row.name in failed:
                    continue
                native_ms.append(steps.turn_ms(count))
                ratios[NEVER].append(never.turn_ms(count) / native_ms[-1])
                try:
                    ratios[row.name].append(recorded_ms(steps, row, count, file) / native_ms[-1])
                except TracepipeError as error:
                    failed[row.name] = error.message
    print(f"  native {statistics.median(native_ms):.3f} ms, {blocks} blocks of {count} steps")
    for name, some in ratios.items():
        print(f"  {name:<28}{failed.get(name) or (spread_text(some) if some else '')}", flush=True)
    if launches and not failed:
        pairs = zip(ratios[_STACKS.name], ratios[_NO_STACKS.name], strict=True)
        launch_us = statistics.median(native_ms) * 1e3 / launches
        more_us = statistics.median(a - b for a, b in pairs) * launch_us
        print(f"  {'stacks':<28}{more_us:.2f} us a launch, which takes {launch_us:.2f} us natively")


def main() -> None:
    """Print the tables, or why there are none."""
    options = of_steps(__doc__, TURNS, BLOCKS)
    tools = tools_here()
    gpus = len(tools.driver.gpus)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CUPTI_ALONE"] = str(build_alone(tools, Path(folder)))
        print_tables(options, gpus)


def print_tables(options: argparse.Namespace, gpus: int) -> None:
    """Print the requested tables."""
    for name, count in TURNS.items():
        if name not in (options.only or TURNS) or (name == "ddp" and gpus < 2):
            continue
        print(f"\n{name}: times native", flush=True)
        launches = LAUNCHES_OF.get(name, 0)
        try:
            command = [sys.executable, str(Path(__file__).with_name("gpu_steps.py")), "serve", name]
            rows = (_NO_STACKS, _STACKS) if launches else ROWS
            measure(command, count, options.blocks, rows, launches)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"  {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
