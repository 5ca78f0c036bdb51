"""Ranks on GPUs, one of them slow: how far their clocks are off, and what `ranks` finds.

    python benchmarks/ranks_gpu.py [--ranks N] [--one-gpu]    records, and judges
    python benchmarks/ranks_gpu.py record FOLDER …            records, where polars and DuckDB are not
    python benchmarks/ranks_gpu.py judge FOLDER               judges what was recorded

Needs PyTorch and a GPU for each rank; recording ends with 3 without. The ranks train with
DistributedDataParallel, each under `tracepipe capture`, and the last one is slow at one thing a job. All run
on one host, so their clocks are one. Then the recordings of each rank state another host, and `dataset build`
has to find by collectives that the clocks agree: what it finds instead is the error.

With `--one-gpu` the ranks share one GPU. Each is a host of its own to NCCL, which sends by sockets. Where
CUDA's Multi-Process Service runs, their kernels run at the same time. Without it they take turns of about
2 ms, and a rank leaves a collective when it has its turn. With `--windows N` only N steps are recorded, as by
`--start-on nvtx:step --repeat N`. With `--profiler` PyTorch's profiler records the ranks, and no capture.

A line has: what is slow, collectives compared, median transfer, the largest error and what the bounds allow,
and the ranks that `ranks` calls slow: at what, the own time of a step, the usual one, and what it costs a
step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).resolve().parents[1]

SLOW = ("nothing", "gpu", "loader", "host")
"""What is slow in a job."""
WARM_UP, STEPS = 20, 60
LATE_S, LATE_CYCLES = 0.004, 7_000_000
RECORDED = ("--layers", "gpu_kernel,annotation", "--gpu", "kernels", "--calls", "launches", "--hook", "nccl")
_DEADLINE_S = 240


def train(slow: str, profiled: Path | None) -> None:
    """One rank: steps of a model whose gradients NCCL adds up. PyTorch's profiler writes to `profiled`."""
    import torch

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), [device])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(256, 1024, device="cuda")
    is_late = rank == ranks - 1
    profiler = profiler_of(profiled) if profiled else None
    for step in range(WARM_UP + STEPS):
        with torch.cuda.nvtx.range("step" if step >= WARM_UP else "warm up"):
            with torch.cuda.nvtx.range("data loading"), torch.profiler.record_function("data loading"):
                if is_late and slow == "loader":
                    time.sleep(LATE_S)
            if is_late and slow == "host":
                time.sleep(LATE_S)
            if is_late and slow == "gpu":
                torch.cuda._sleep(LATE_CYCLES)  # occupies one SM: the others may run kernels of other ranks
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.distributed.all_reduce(loss)
            loss.item()
        if profiler:
            profiler.step()
    torch.distributed.destroy_process_group()


def profiler_of(path: Path) -> Any:
    """PyTorch's profiler of the steps after the warm-up, which writes to a path when they are over."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=WARM_UP, active=STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    )
    profiler.start()
    return profiler


def free_port() -> int:
    """A port that nobody listens at, and that no connection is given before the job listens there."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", random.randrange(given // 2, given)))
            except OSError:
                continue
            return int(one.getsockname()[1])


def record(folder: Path, ranks: int, windows: int, *, one_gpu: bool, profiler: bool) -> None:
    """A job for each kind of slowness: FOLDER/KIND/HOST/RANK.jsonl.zst, or RANK.json.gz of the profiler."""
    import torch

    if torch.cuda.device_count() < (1 if one_gpu else ranks):
        print(f"{ranks} ranks need as many GPUs; {torch.cuda.device_count()} here", file=sys.stderr)
        sys.exit(3)
    when = ("--start-on", "nvtx:step", "--repeat", str(windows)) if windows else ()
    for slow in SLOW:
        shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        running = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            if one_gpu:
                own["NCCL_HOSTID"] = f"rank{rank}"
            command = [sys.executable, __file__, "train", slow]
            if profiler:
                command.append(str(folder / slow / socket.gethostname() / f"{rank}.json.gz"))
            else:
                capture = [sys.executable, "-m", "tracepipe", "capture", *RECORDED, *when]
                command = [*capture, "-o", str(folder / slow / "%h" / "%r.jsonl.zst"), "--", *command]
            running.append(subprocess.Popen(command, env=shared | own, cwd=ROOT))
        ends_s = time.monotonic() + _DEADLINE_S
        for one in running:
            if one.wait(max(ends_s - time.monotonic(), 1)):
                sys.exit(f"rank {running.index(one)} of the job with slow {slow} failed")


def on_own_hosts(job: Path, folder: Path) -> Path:
    """Copies of a job's recordings in which each rank is of a host of its own."""
    for file in job.glob("*/*.json.gz"):
        rank = file.name.partition(".")[0]
        own = folder / f"{file.parent.name}-{rank}"  # the profiler's trace states none
        own.mkdir(parents=True)
        shutil.copy(file, own)
    folder.mkdir(exist_ok=True)
    for file in job.glob("*/*.jsonl.zst"):
        with zstandard.open(file, "rt") as lines, (folder / file.with_suffix("").name).open("w") as out:
            header = json.loads(next(lines))
            print(json.dumps(header | {"host": f"{header['host']}-{header['rank']}"}), file=out)
            out.writelines(lines)
    return folder


def ran(*arguments: object) -> str:
    """What a command of tracepipe prints."""
    command = [sys.executable, "-m", "tracepipe", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def clocks_text(dataset: Path) -> str:
    """Collectives compared, the median transfer, the largest error of a clock and what its bound allows."""
    import polars as pl  # where it only records there may be none

    placed = pl.read_parquet(dataset / "layer=alignment" / "part-0.parquet").to_dicts()
    reference = next(row for row in placed if row["clock"] == row["reference"])
    others = [row for row in placed if row is not reference]
    if refused := [row["refused"] for row in others if row["refused"]]:
        return f"refused: {refused[0]}"
    errors = [
        (
            max(abs(at_ns - off(row, at_ns)) for at_ns in (row["first_ns"], row["last_ns"])),
            row["bound_ns"] + reference["bound_ns"],
            row["shared"],
        )
        for row in others
    ]
    error_ns, allowed_ns, shared = max(errors, key=lambda one: one[0] / one[1])
    return (
        f"{shared:>6} {transfer_us(dataset):>8.0f} us {error_ns / 1e3:>9.1f} us of {allowed_ns / 1e3:>8.1f}"
    )


def off(row: dict[str, Any], ns: int) -> int:
    """Where an alignment places a time of a clock that is none other than the reference."""
    placed: int = ns + row["offset_ns"] + (ns - row["at_ns"]) * row["drift_ppb"] // 10**9
    return placed


def transfer_us(dataset: Path) -> float:
    """The median over collectives of what the rank took that took least."""
    import polars as pl

    rows = pl.read_parquet(dataset / "layer=collectives" / "**/*.parquet")
    least = rows.group_by("process_group", "nth").agg((pl.col("end_ns") - pl.col("start_ns")).min())
    return statistics.median(least["end_ns"].to_list()) / 1e3


def found_text(dataset: Path) -> str:
    """The ranks that are called slow."""
    slow = json.loads(ran("ranks", dataset, "--json", "--top", 0))["slow"]
    return "; ".join(slow_text(one) for one in slow) or "none"


def slow_text(one: dict[str, Any]) -> str:
    """One of them."""
    own, usual, costs = (f"{one[name] / 1e6:.2f} ms" for name in ("own_ns", "usual_ns", "costs_ns"))
    return f"{one['ranks']} {one['slow']}: {own}, usually {usual}, costs {costs}"


def judge(folder: Path) -> None:
    """Print a line for each job."""
    print("slow       compared  transfer      error of what is allowed  found")
    for slow in SLOW:
        with tempfile.TemporaryDirectory() as made:
            together, apart = Path(made, "together"), Path(made, "apart")
            ran("dataset", "build", folder / slow, "-o", together)
            ran("dataset", "build", on_own_hosts(folder / slow, Path(made, "runs")), "-o", apart)
            print(f"{slow:<10} {clocks_text(apart)}  {found_text(together)}", flush=True)


def main() -> None:
    """Record, judge, or both."""
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], Path(sys.argv[3]) if sys.argv[3:] else None)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("record", "judge", "both"), default="both")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--profiler", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        if given.what != "judge":
            record(folder, given.ranks, given.windows, one_gpu=given.one_gpu, profiler=given.profiler)
        if given.what != "record":
            judge(folder)


if __name__ == "__main__":
    main()
