"""Measures what a capture costs steps of PyTorch and of JAX, against processes that were never touched.

    python benchmarks/gpu_layers.py [--blocks N] [--processes N] [--rows PART]... [--only STEP]...

STEP: small, gpt, gpt2, transformer, jax, launches, deep; with two GPUs ddp.

Needs an NVIDIA GPU and root; ends with 3 without a GPU. Each row is some processes of gpu_steps.py, which are
recorded from their start, or never; all run on the same four processors. They take turns of some steps, in an
order drawn anew for each block. A ratio is that of the first quartiles of all steps, as other programs of the
machine make steps longer, never shorter; behind it are the least and the most of single processes. By as much
as processes differ that were never touched, others may differ by chance. `--rows` has only rows with a PART
in their name: Linux allows 64 programs at a tracepoint, which is enough for some 20 captures at a time.

`CUPTI alone` is cupti_alone.cpp, where nobody has the records. Of launches also what one takes more with
stacks.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import of_steps, tools_here  # noqa: E402
from benchmarks.gpu_steps import DEEP, LAUNCHES  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import Toolchain  # noqa: E402

TURNS = {"small": 8, "gpt": 4, "gpt2": 4, "transformer": 4, "jax": 10, "launches": 4, "deep": 5, "ddp": 10}
"""Steps in a turn, which take some hundredths of a second together."""
LAUNCHES_OF = {"launches": LAUNCHES, "deep": DEEP}
BLOCKS, PROCESSES = 40, 1
NEVER = "never touched"


@dataclass(frozen=True)
class Row:
    """How a process is started, and whether its steps follow a window."""

    name: str
    options: tuple[str, ...] | None = None
    """Those of the capture; None: there is none."""
    environment: Mapping[str, str] = field(default_factory=dict)
    is_after_window: bool = False


_KERNELS = ("--gpu", "kernels", "--layers", "gpu_kernel")
_NVTX = ("--gpu", "kernels", "--layers", "gpu_kernel,annotation")
_OFF = ("--stacks", "off")
_EBPF = ("--gpu", "kernels", "--layers")
NO_STACKS = Row("kernels, calls, no stacks", (*_KERNELS, *_OFF))
STACKS = Row("kernels, calls, stacks", _KERNELS)
ROWS = (
    Row(NEVER),
    Row("CUPTI alone, kernels", None, {"CUPTI_ALONE": "kernels"}),
    Row("CUPTI alone, kernels and calls", None, {"CUPTI_ALONE": "calls"}),
    Row("kernels, launching calls", (*_KERNELS, *_OFF, "--calls", "launches")),
    NO_STACKS,
    STACKS,
    Row("kernels, calls, stacks, NVTX", _NVTX),
    Row("the same and the scheduler", (*_EBPF, "gpu_kernel,annotation,scheduler")),
    Row("the same and system calls", (*_EBPF, "gpu_kernel,annotation,scheduler,syscall")),
    Row("kernels, --last 10s", (*_KERNELS, "--last", "10s")),
    Row("before the first window", (*_NVTX, "--start-on", "nvtx:never")),
    Row("between windows", (*_NVTX, "--start-on", "nvtx:window", "--repeat", "2"), {}, True),
    Row("after the last window", (*_NVTX, "--start-on", "nvtx:window"), {}, True),
    Row("eBPF: calls", ("--gpu", "off", "--layers", "userspace")),
    Row("PyTorch's profiler", None, {"PROFILED": "1"}),
)


class Steps:
    """A process that makes steps on request."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        pipe = subprocess.PIPE
        given = {**os.environ, **(environment or {})}
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=given)
        self.pids: list[int] = []

    def begin(self) -> None:
        """Wait until the process is ready. Raises RuntimeError."""
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith("ready"):
            if not line:
                raise RuntimeError(f"it ended with {self.process.wait()}")
        self.pids = [int(pid) for pid in line.split()[1:]]

    def times_ms(self, asked: str) -> list[float]:
        """What each step took that a line of gpu_steps.py asks for."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{asked}\n")
        self.process.stdin.flush()
        return [float(word) for word in self.process.stdout.readline().split()]

    def turn_ms(self, count: int) -> float:
        """The median length of `count` steps."""
        return statistics.median(self.times_ms(str(count)))

    def close(self, name: str = "") -> None:
        """Let the process end, with its capture; print the exit code if that is not 0."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:  # a capture after its last window waits for Ctrl-C
            self.process.send_signal(signal.SIGINT)
            self.process.wait(60)
        if name and self.process.returncode:
            print(f"  {name}: exit code {self.process.returncode}")


def build_alone(tools: Toolchain, folder: Path) -> Path:
    """The library of cupti_alone.cpp. Raises CaptureUnavailable and CalledProcessError."""
    cupti, library = tools.part("cupti"), folder / "cupti_alone.so"
    includes = [f"-isystem{include}" for include in cupti.include]
    links = [str(cupti.library), f"-Wl,-rpath,{cupti.library.parent}"]
    source = str(Path(__file__).with_name("cupti_alone.cpp"))
    command = [str(tools.gxx().path), "-std=c++17", "-O2", "-shared", "-fPIC", *includes]
    subprocess.run([*command, "-o", str(library), source, *links], check=True)
    return library


def started(row: Row, number: int, command: Sequence[str], folder: Path) -> Steps:
    """A process of a row."""
    environment = dict(row.environment)
    if "CUPTI_ALONE" in environment:
        environment["CUDA_INJECTION64_PATH"] = str(folder / "cupti_alone.so")
    if row.options is not None:
        file = folder / f"{row.name.replace(' ', '-')}-{number}.jsonl"
        capture = [sys.executable, "-m", "tracepipe", "capture", *row.options, "-o", str(file), "--force"]
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        command = [*capture, "--", *command]
    return Steps(command, environment)


def measure(
    command: Sequence[str],
    count: int,
    options: argparse.Namespace,
    rows: Sequence[Row],
    folder: Path,
    launches: int = 0,
    start: Callable[[Row, int, Sequence[str], Path], Steps] = started,
) -> None:
    """Print the table of one step, whose processes `start` makes. `launches`: in a step, if its rows are
    those of stacks.
    """
    with ExitStack() as stack:
        steps = {
            (row.name, number): start(row, number, command, folder)
            for row in rows
            for number in range(options.processes)
        }
        for (name, _), one in steps.items():
            stack.callback(one.close, name)
        for row in rows:
            for number in range(options.processes):
                steps[row.name, number].begin()
                if row.is_after_window:
                    steps[row.name, number].times_ms("range")
        for one in steps.values():
            one.times_ms(str(count))
        found: dict[tuple[str, int], list[float]] = {place: [] for place in steps}
        for _ in range(options.blocks):
            for place in random.sample([*steps], len(steps)):
                found[place] += steps[place].times_ms(str(count))
    of_rows = {row.name: [found[row.name, number] for number in range(options.processes)] for row in rows}
    quartiles_ms = {name: _quartile([ms for some in of for ms in some]) for name, of in of_rows.items()}
    never_ms = quartiles_ms[NEVER]
    print(f"  never touched: {never_ms:.3f} ms, the quartile of {options.blocks} turns of {count} steps")
    for name, of in of_rows.items():
        ratios = sorted(_quartile(some) / never_ms for some in of)
        print(
            f"  {name:<32}{quartiles_ms[name] / never_ms:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})",
            flush=True,
        )
    if launches:
        more_us = 1e3 * (quartiles_ms[STACKS.name] - quartiles_ms[NO_STACKS.name]) / launches
        print(f"  {'stacks':<32}{more_us:.2f} us a launch, which takes {1e3 * never_ms / launches:.2f} us")


def _quartile(some: Sequence[float]) -> float:
    return statistics.quantiles(some, n=4)[0]


def main() -> None:
    """Print the tables, or why there are none."""
    parser = of_steps(__doc__, TURNS, BLOCKS)
    parser.add_argument("--processes", type=int, default=PROCESSES, help="of each row")
    parser.add_argument("--rows", action="append", help="those with this in their name; again for more")
    options = parser.parse_args()
    tools = tools_here()
    with tempfile.TemporaryDirectory() as folder:
        build_alone(tools, Path(folder))
        print_tables(options, len(tools.driver.gpus), Path(folder))


def print_tables(options: argparse.Namespace, gpus: int, folder: Path) -> None:
    """Print the requested tables."""
    for name, count in TURNS.items():
        if name not in (options.only or TURNS) or (name == "ddp" and gpus < 2):
            continue
        print(f"\n{name}: times a process that was never touched", flush=True)
        launches = LAUNCHES_OF.get(name, 0)
        rows = (
            ROWS
            if not launches
            else [row for row in ROWS if row.name in (NEVER, NO_STACKS.name, STACKS.name)]
        )
        if name == "jax":  # neither has NVTX ranges nor PyTorch
            rows = [row for row in rows if not row.is_after_window and "PROFILED" not in row.environment]
        if options.rows and not launches:
            rows = [row for row in rows if any(part in row.name for part in (NEVER, *options.rows))]
        try:
            command = [sys.executable, str(Path(__file__).with_name("gpu_steps.py")), "serve", name]
            measure(command, count, options, rows, folder, launches)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"  {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
