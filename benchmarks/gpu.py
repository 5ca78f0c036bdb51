"""Measures what `--gpu kernels` and `--gpu warps` cost a program: kernels, launches, PyTorch steps; and the
clock.

    python benchmarks/gpu.py [--quick] [--only NAME]        NAME: kernel, launch, clock, selected, pytorch

Needs an NVIDIA GPU, and ends with 3 without one. The programs are gpu.cu, built here, and gpu_steps.py.
The variants of a table alternate in each round; figures are medians over the rounds, and ratios are within a
run. Records are collected while the program runs, as in a capture, and counted; they are not written to a
file. `empty patches` are device code that returns at once: the least that a tool on Compute Sanitizer's API
costs. Tables for which time runs out have fewer rounds: the benchmark ends within four minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tracepipe.clocks import Clocks  # noqa: E402
from tracepipe.clocks.maps import ClockMap  # noqa: E402
from tracepipe.errors import TracepipeError  # noqa: E402
from tracepipe.event.model import Header, SourceNs  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain, this_toolchain  # noqa: E402
from tracepipe.tracer.gpu.engines import kernels, warps  # noqa: E402
from tracepipe.tracer.gpu.engines.channel import Kind, records  # noqa: E402
from tracepipe.tracer.gpu.engines.streams import GpuEngine, RecordStream  # noqa: E402
from tracepipe.tracer.request import CaptureRequest  # noqa: E402

BUDGET_S = 225
RUN_S = 60  # the longest that one run may take
NO_GPU = 3
COLLECT_EVERY_S = 0.002
NO_LAUNCH = str(10**9)  # the first launch to be recorded: none
# Launches whose records have room in the buffer on the GPU at once, the first included.
BURST = {"vector_add": 30, "matmul": 7}
TITLES = {
    "vector_add": "vectorAdd, 2^20 threads, 32,768 warps",
    "matmul": "matrix product of 2048^3, 131,072 warps",
}


@dataclass
class Seen:
    """The figures that a run printed, by name, and what was recorded of it."""

    figures: dict[str, str] = field(default_factory=dict)
    warps: int = 0
    kernels: int = 0
    lost: int = 0
    notes: list[str] = field(default_factory=list)
    pairs: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Clock pairs by GPU, in the form of an event file."""

    def take(self, chunk: bytes) -> None:
        """Count the records of a chunk."""
        for record in records(chunk):
            payload = record.payload
            if record.kind == warps.WarpKind.WARPS:
                self.warps += warps.read_warp_count(payload)
            elif record.kind == warps.WarpKind.KERNEL:
                self.kernels += 1
            elif record.kind == kernels.KernelKind.KERNEL:
                self.kernels += len(payload) // kernels.KERNEL.size
            elif record.kind == warps.WarpKind.LOST_WARPS:
                self.lost += warps.LOST_WARPS.unpack_from(payload)[3]
            elif record.kind == Kind.NOTE:
                self.notes.append(bytes(payload).decode(errors="replace"))
            elif record.kind == Kind.CLOCK:
                gpu, source_ns, low_ns, high_ns = warps.CLOCK.unpack_from(payload)
                pair = {"source_ns": source_ns, "host_lo_ns": low_ns, "host_hi_ns": high_ns}
                self.pairs.setdefault(gpu, []).append(pair)


def built(tools: Toolchain, source: Path, program: Path, *options: str) -> Path:
    """The program of a CUDA source, for this GPU. Raises CaptureUnavailable and CalledProcessError."""
    nvcc = [str(tools.nvcc().path), "-O2", "-std=c++17", "-allow-unsupported-compiler"]
    target = f"-arch={tools.architectures()[0]}"
    subprocess.run([*nvcc, target, *options, "-o", str(program), str(source)], check=True)
    return program


def spread_text(some: Sequence[float]) -> str:
    """The median of ratios, with the least and the most."""
    return f"{statistics.median(some):.3f} ({min(some):.3f} to {max(some):.3f})"


def of_steps(about: str | None, steps: Collection[str], blocks: int) -> argparse.ArgumentParser:
    """The options of a benchmark of steps, which take turns: `blocks` and `only`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=blocks, help="of turns, one of each row")
    parser.add_argument("--only", choices=steps, action="append", help="this step; again for more")
    return parser


class Bench:
    """The programs and the native code, built once, and the time that is left."""

    def __init__(self, tools: Toolchain, folder: Path, *, quick: bool) -> None:
        self.quick, self.gpus = quick, len(tools.driver.gpus)
        self.ends_s = time.monotonic() + BUDGET_S
        self.program = built(tools, Path(__file__).with_suffix(".cu"), folder / "gpu")
        self.kernels_library = kernels.KernelStream.build(tools)
        self.library = tools.build_host(NATIVE / "warps.cpp", ["sanitizer"])
        self.patches = tools.build_patches(NATIVE / "patches.cu")
        self.empty_patches = tools.build_patches(NATIVE / "patches.cu", (), {"TRACEPIPE_EMPTY": 1})

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()

    def rounds(self, count: int) -> Iterator[int]:
        """As many rounds as the time allows, at least one."""
        longest_s = 0.0
        for number in range(1 if self.quick else count):
            began_s = time.monotonic()
            if number and self.left_s < 1.3 * longest_s:
                print(f"  (no time for round {number + 1})")
                return
            yield number
            longest_s = max(longest_s, time.monotonic() - began_s)

    def recording(self, engine: str, **options: Any) -> GpuEngine | None:
        """A recording by `kernels`, `warps` or `empty`, with options of a request; None for `native`."""
        if engine == "native":
            return None
        request = CaptureRequest(**options)
        stream: RecordStream
        if engine == "kernels":
            stream = kernels.KernelStream(self.kernels_library, calls=request.calls)
        elif engine == "empty":
            # No launch gets a buffer, which would have to be read.
            chosen = CaptureRequest(calls="none", gpu_launches=f"{NO_LAUNCH}-")
            stream = warps.WarpStream(self.library, self.empty_patches, chosen)
        else:
            stream = warps.WarpStream(self.library, self.patches, request)
        return GpuEngine([stream], stacks=request.stacks)

    def run(self, command: Sequence[str], engine: str, **options: Any) -> Seen:
        """Run a program to its end. Raises RuntimeError if it fails or takes too long."""
        limit_s = min(RUN_S, self.left_s)
        if limit_s < 1:
            raise RuntimeError("no time left")
        recording = self.recording(engine, **options)
        try:
            return _run(command, recording, time.monotonic() + limit_s)
        finally:
            if recording:
                recording.close()


def _run(command: Sequence[str], recording: GpuEngine | None, ends_s: float) -> Seen:
    environment = {**os.environ, **(recording.environment() if recording else {})}
    seen = Seen()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(command, env=environment, stdout=out, stderr=errors) as process:
            is_over = False
            while not is_over:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(COLLECT_EVERY_S)
                if time.monotonic() > ends_s:
                    process.kill()
                is_over = process.poll() is not None
                if recording:
                    seen.take(recording.collect(is_final=is_over))
                    seen.lost += sum(loss.count for loss in recording.lost())
        out.seek(0)
        errors.seek(0)
        if process.returncode:
            last = (errors.read().strip() or "it printed nothing").splitlines()[-1]
            late = "it took too long; " if time.monotonic() > ends_s else ""
            raise RuntimeError(f"{late}ended with {process.returncode}: {last}")
        seen.figures = dict(line.split(" ", 1) for line in out.read().splitlines() if " " in line)
    return seen


# ── the tables ──


@dataclass(frozen=True)
class Variant:
    """A row: its name, and how the program is run for it."""

    name: str
    run: Callable[[], Seen]


class Rows:
    """The figures of a table's rounds by variant; a variant that failed once is reported and left out."""

    def __init__(self, bench: Bench, variants: Sequence[Variant], rounds: int) -> None:
        self.seen: dict[str, list[Seen]] = {variant.name: [] for variant in variants}
        self.failed: dict[str, str] = {}
        for _ in bench.rounds(rounds):
            for variant in variants:
                if variant.name in self.failed:
                    continue
                try:
                    self.seen[variant.name].append(variant.run())
                except Exception as error:  # a failed row states that
                    self.failed[variant.name] = f"{type(error).__name__}: {error}"

    def middle(self, name: str, what: str) -> float:
        """The median over the rounds; NaN if there is none."""
        some = [float(seen.figures[what]) for seen in self.seen.get(name, []) if what in seen.figures]
        return statistics.median(some) if some else float("nan")

    def each(self) -> Iterator[tuple[str, list[Seen]]]:
        """The rows that succeeded; for the others, the reason is printed."""
        for name, some in self.seen.items():
            if name in self.failed:
                print(f"  {name:<34}{self.failed[name]}")
            elif some:
                yield name, some

    def times(self, name: str, what: str, *floors: str) -> str:
        """Median, least and most, and the ratios to the medians of other rows."""
        some = [float(seen.figures[what]) for seen in self.seen[name]]
        median = statistics.median(some)
        ratios = "".join(f"{median / self.middle(floor, what):>10.2f}" for floor in floors)
        return f"{median:>10.3f}{min(some):>10.3f}{max(some):>10.3f}{ratios}"


def kernel_table(bench: Bench) -> None:
    """A kernel's time on the GPU, and whether all its warps were recorded."""
    many = 50 if bench.quick else 200
    for program, title in TITLES.items():
        once, often = ([str(bench.program), program, str(n)] for n in (BURST[program], many))
        rows = Rows(
            bench,
            [
                Variant("native", partial(bench.run, often, "native")),
                Variant("empty patches", partial(bench.run, often, "empty")),
                Variant(f"warps, {BURST[program] + 1} launches", partial(bench.run, once, "warps")),
                Variant(f"warps, {many + 1} launches", partial(bench.run, often, "warps")),
                Variant("kernels", partial(bench.run, often, "kernels")),
            ],
            rounds=3,
        )
        print(f"\n{title}: microseconds by CUDA events")
        print(
            f"  {'':<34}{'median':>10}{'min':>10}{'max':>10}{'× native':>10}{'× empty':>10}   recorded, lost"
        )
        native = {seen.figures["result"] for seen in rows.seen["native"]}
        for name, some in rows.each():
            recorded = _recorded(name, some)
            wrong = "" if {seen.figures["result"] for seen in some} == native else "; ITS RESULT DIFFERS"
            times = rows.times(name, "us", "native", "empty patches")
            print(f"  {name:<34}{times}   {recorded}{wrong}", flush=True)
            _print_notes(some)


def _recorded(name: str, some: list[Seen]) -> str:
    if name.startswith("warps"):
        got, wanted = sum(s.warps for s in some), sum(int(s.figures["warps"]) for s in some)
        return f"{got:,} of {wanted:,} warps, {sum(s.lost for s in some):,} lost"
    if name.startswith("kernels"):
        got, wanted = sum(s.kernels for s in some), sum(int(s.figures["launches"]) for s in some)
        return f"{got:,} of {wanted:,} kernels, {sum(s.lost for s in some):,} lost"
    return "-"


def _print_notes(some: list[Seen]) -> None:
    for note in dict.fromkeys(note for seen in some for note in seen.notes):
        print(f"      {note}")


def launch_table(bench: Bench) -> None:
    """What a launch costs its thread."""
    command = [str(bench.program), "launch", "2000" if bench.quick else "10000"]
    rows = Rows(
        bench,
        [
            Variant("native", partial(bench.run, command, "native")),
            Variant("warps, calls", partial(bench.run, command, "warps", calls="default")),
            Variant("warps, no calls", partial(bench.run, command, "warps", calls="none")),
            Variant("kernels, calls", partial(bench.run, command, "kernels", calls="default")),
            Variant("kernels, no calls", partial(bench.run, command, "kernels", calls="none")),
        ],
        rounds=3,
    )
    print(
        f"\n{command[2]} empty launches: microseconds of the launching thread each, and until they have ended"
    )
    print(f"  {'':<34}{'median':>10}{'min':>10}{'max':>10}{'× native':>10}{'ended':>10}   recorded, lost")
    for name, some in rows.each():
        ended = f"{rows.middle(name, 'ended_us'):>10.3f}"
        print(f"  {name:<34}{rows.times(name, 'us', 'native')}{ended}   {_recorded(name, some)}")
        _print_notes(some)


def pytorch_table(bench: Bench) -> None:
    """A training step of a transformer, and one so small that the processor is the limit."""
    if importlib.util.find_spec("torch") is None:
        print(f"\nPyTorch steps: {sys.executable} has no torch")
        return
    steps = str(Path(__file__).with_name("gpu_steps.py"))
    command = [sys.executable, steps, "5" if bench.quick else "50", "transformer", "small"]
    variants = {
        "native": ("native", {}),
        "kernels, calls": ("kernels", {"calls": "default"}),
        "kernels, no stacks": ("kernels", {"calls": "default", "stacks": "off"}),
        "kernels, launch calls": ("kernels", {"calls": "launches"}),
        "kernels, no calls": ("kernels", {"calls": "none"}),
        "warps": ("warps", {}),
        "warps, --kernel softmax": ("warps", {"gpu_kernels": "softmax"}),
    }
    rows = Rows(
        bench,
        [
            Variant(name, partial(bench.run, command, engine, **options))
            for name, (engine, options) in variants.items()
        ],
        rounds=5,
    )
    for step in ("transformer", "small"):
        print(
            f"\nPyTorch, {step} step: milliseconds, median of a run's steps; {len(rows.seen['native'])} runs"
        )
        print(f"  {'':<34}{'median':>10}{'min':>10}{'max':>10}{'× native':>10}   of both steps")
        for name, some in rows.each():
            times = rows.times(name, step, "native")
            counts = [
                f"{sum(getattr(s, what) for s in some):,} {what}" for what in ("kernels", "warps", "lost")
            ]
            print(f"  {name:<34}{times}   {', '.join(counts) if name != 'native' else '-'}", flush=True)
    for _, some in rows.seen.items():
        _print_notes(some)


def selected_table(bench: Bench) -> None:
    """Steps in which only the first launches of some kernels are recorded."""
    if importlib.util.find_spec("torch") is None:
        print(f"\nselected kernels: {sys.executable} has no torch")
        return
    steps = str(Path(__file__).with_name("gpu_steps.py"))
    print("\nselected kernels, launches 1-20: milliseconds, median of a run's steps")
    print(f"  {'':<34}{'median':>10}{'min':>10}{'max':>10}{'× native':>10}   of all runs")
    for step, name in (("compiled", "triton"), ("ddp", "nccl")):
        if step == "ddp" and bench.gpus < 2:
            print("  ddp: there is one GPU")
            continue
        command = [sys.executable, steps, "100" if bench.quick else "400", step]
        chosen = {"gpu_kernels": name, "gpu_launches": "1-20"}
        rows = Rows(
            bench,
            [
                Variant("native", partial(bench.run, command, "native")),
                Variant(f"--kernel {name}", partial(bench.run, command, "warps", **chosen)),
            ],
            rounds=2,
        )
        for variant, some in rows.each():
            counts = f"{sum(seen.warps for seen in some):,} warps, {sum(seen.lost for seen in some):,} lost"
            print(
                f"  {step + ', ' + variant:<34}{rows.times(variant, step, 'native')}   {counts}", flush=True
            )
            _print_notes(some)


def clock_table(bench: Bench) -> None:
    """The drift and the bound of each GPU's clock in a recording."""
    seconds = "3" if bench.quick else "8"
    seen = bench.run([str(bench.program), "clock", seconds], "warps", calls="none")
    print(f"\nthe GPU's clock against CLOCK_MONOTONIC, {seconds} s")
    print(f"  {'':<34}{'pairs':>10}{'drift ppm':>12}{'bound ns: between pairs':>26}{'at the ends':>14}")
    for gpu, pairs in seen.pairs.items():
        clock = f"globaltimer:{gpu}"
        header = Header(clock="monotonic", clocks=["monotonic", clock])
        placed = Clocks(header, [{"type": "clock", "clock": clock, **pair} for pair in pairs]).get(clock)
        assert placed is not None
        between, ends = _bounds_ns(placed, [pair["source_ns"] for pair in pairs])
        drift = "unknown" if placed.drift_ppm is None else f"{placed.drift_ppm:.3f}"
        print(f"  {clock:<34}{len(pairs):>10}{drift:>12}{between:>26}{ends:>14}")
    if not seen.pairs:
        print("  no clock pairs came")
    _print_notes([seen])
    print(f"  {seen.warps:,} of {int(seen.figures['warps']):,} warps recorded, {seen.lost:,} lost")


def _bounds_ns(placed: ClockMap, source_ns: list[int]) -> tuple[int, int]:
    """The largest bound at a hundred times between the pairs, and that of the first and the last."""
    first, last = min(source_ns), max(source_ns)
    inside = [first + (last - first) * part // 100 for part in range(1, 100)]
    bound = [placed.bound_at(SourceNs(at)) for at in inside]
    return max(bound), max(placed.bound_at(first), placed.bound_at(last))


TABLES: dict[str, Callable[[Bench], None]] = {
    "kernel": kernel_table,
    "launch": launch_table,
    "clock": clock_table,
    "selected": selected_table,
    "pytorch": pytorch_table,  # last: it takes the time that is left
}


def _describe(tools: Toolchain) -> None:
    """Print what is measured, and on which machine."""
    driver = "unknown"
    with suppress(OSError):
        driver = Path("/sys/module/nvidia/version").read_text().strip()
    names = ", ".join(gpu.name for gpu in tools.driver.gpus)
    nvcc = ".".join(map(str, tools.nvcc().version))
    print(f"{names}; driver {driver}, CUDA {'.'.join(map(str, tools.driver.cuda))}, nvcc {nvcc}")
    machine = f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} processors"
    print(f"python {platform.python_version()}, {machine}, {time.strftime('%Y-%m-%d')}")


def tools_here() -> Toolchain:
    """Describe this machine, and return its toolchain. Exits if there is no GPU."""
    tools = this_toolchain()
    if not tools.driver.gpus:
        print(f"no GPU: {tools.driver.error or 'the driver reports none'}", file=sys.stderr)
        raise SystemExit(NO_GPU)
    _describe(tools)
    return tools


@contextmanager
def bench_here(*, quick: bool) -> Iterator[Bench]:
    """Describe this machine, and return the programs built on it. Exits if there is no GPU."""
    tools = tools_here()
    with tempfile.TemporaryDirectory() as folder:
        try:
            bench = Bench(tools, Path(folder), quick=quick)
        except TracepipeError as error:
            raise SystemExit(f"{error.message}\n{error.hint}") from None
        yield bench


def main() -> None:
    """Print the tables, or why there are none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round, fewer launches and steps")
    parser.add_argument("--only", choices=TABLES, help="one table")
    options = parser.parse_args()
    with bench_here(quick=options.quick) as bench:
        for name, table in TABLES.items():
            if options.only in (None, name):
                try:
                    table(bench)
                except Exception as error:  # one table that fails leaves the others
                    print(f"\n{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
