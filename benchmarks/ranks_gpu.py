"""Jobs on GPUs, with a rank that is slow: clocks, groups, what `ranks` finds, and what a capture costs.

    python benchmarks/ranks_gpu.py [--ranks N] [--profiler] [--jobs JOB …]   records, and judges
    python benchmarks/ranks_gpu.py record FOLDER …                           records
    python benchmarks/ranks_gpu.py judge FOLDER …                            judges what was recorded

Needs PyTorch and a GPU for each rank; recording ends with 3 without. JOB: ddp, fsdp, tensor, pipeline, as
whatif_gpu.py has them, with a batch of 96 if `--batch` gives no other one. Each is run once for each kind of
slowness, under `tracepipe capture`; with `--profiler` PyTorch's profiler records it instead. Then it runs
once more, where nobody records, with all kinds in turn. The last rank is slow, at one thing a run: `host` and
`gpu` between forward and backward, `loader` at the begin of a step (of the first rank, in a pipeline), `link`
by a process that copies from its GPU to the others all the time.

All run on one host, each on processors of its own, so their clocks are one. Then the recordings of each rank
state another host, and `dataset build` has to find by collectives that the clocks agree: what it finds
instead is the error.

With `--one-gpu` the ranks share one GPU, and no link is slow. Each is a host of its own to NCCL, which sends
by sockets. Where CUDA's Multi-Process Service runs, their kernels run at the same time. Without it they take
turns of about 2 ms, and a rank leaves a collective when it has its turn. With `--windows N` only N steps are
recorded, as by `--start-on nvtx:step --repeat N`.

What is printed of a run:
  steps    the median, where nobody records and where it is recorded, and how far a replay is off
  found    the ranks that `ranks` calls slow: their time of a step, the usual one, and what that costs. Behind
           them, how much longer steps are than those of the run where nothing is slow
  clocks   collectives compared, the largest error, and what the bounds allow
  groups   the process groups of NCCL, with their ranks
  dataset  its size, that of the recordings, and how long it took to build
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SLOW = ("nothing", "gpu", "loader", "host", "link")
"""What is slow in a run."""
JOBS = ("ddp", "fsdp", "tensor", "pipeline")
WARM_UP, STEPS, BATCH = 20, 60, 96
LATE_S, LATE_CYCLES = 0.004, 7_000_000
HOG_BYTES = 256 << 20
RECORDED = ("--layers", "gpu_kernel,annotation", "--gpu", "kernels", "--calls", "launches", "--hook", "nccl")
_DEADLINE_S = 240


def train(job: str, kinds: str, batch: int, profiled: Path | None) -> None:
    """One rank: steps with each kind of slowness. PyTorch's profiler writes to `profiled`/KIND/….

    The first rank prints a line of the medians in ms.
    """
    import torch

    from benchmarks.whatif_gpu import step_of

    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.manual_seed(0)
    torch.distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    step = step_of(job, rank, ranks, batch)
    medians = {}
    for slow in kinds.split(","):
        late = 0 if (job, slow) == ("pipeline", "loader") else ranks - 1
        torch.distributed.barrier()
        with hogged(rank) if slow == "link" and rank == late else nullcontext():
            torch.distributed.barrier()
            file = profiled / slow / socket.gethostname() / f"{rank}.json.gz" if profiled else None
            medians[slow] = steps_ms(step, slow if rank == late else "nothing", file)
    if rank == 0:
        print(json.dumps(medians), flush=True)
    torch.distributed.destroy_process_group()


def steps_ms(step: Callable[[Callable[[], None]], None], slow: str, profiled: Path | None) -> float:
    """The median of the steps after the warm-up, of a rank that is slow at something."""
    import torch

    def late() -> None:
        if slow == "host":
            time.sleep(LATE_S)
        if slow == "gpu":
            torch.cuda._sleep(LATE_CYCLES)  # occupies one SM: the others may run kernels of other ranks

    profiler, took_ms = profiler_of(profiled) if profiled else None, []
    for number in range(WARM_UP + STEPS):
        begins = time.perf_counter()
        with torch.cuda.nvtx.range("step" if number >= WARM_UP else "warm up"):
            with torch.cuda.nvtx.range("data loading"), torch.profiler.record_function("data loading"):
                if slow == "loader":
                    time.sleep(LATE_S)
            step(late)
        took_ms.append(1e3 * (time.perf_counter() - begins))
        if profiler:
            profiler.step()
    return statistics.median(took_ms[WARM_UP:])


@contextmanager
def hogged(device: int) -> Iterator[None]:
    """A process, which nobody records, copies from a GPU to all others meanwhile, on any processor."""
    unseen = ("CUDA_INJECTION64_PATH", "LD_PRELOAD", "NVTX_INJECTION64_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in unseen}
    command = [sys.executable, __file__, "hog", str(device)]
    anywhere = partial(os.sched_setaffinity, 0, range(os.cpu_count() or 1))
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, preexec_fn=anywhere) as hog:
        assert hog.stdout is not None
        try:
            hog.stdout.readline()
            yield
        finally:
            hog.kill()


def copy_on(device: int) -> None:
    """Copy from a GPU to all others until somebody ends this process."""
    import torch

    others = [other for other in range(torch.cuda.device_count()) if other != device]
    source = torch.zeros(HOG_BYTES, dtype=torch.uint8, device=device)
    targets = [torch.zeros_like(source, device=other) for other in others]
    streams = [torch.cuda.Stream(device) for _ in others]
    is_first = True
    while True:
        for stream, target in zip(streams, targets, strict=True):
            with torch.cuda.stream(stream):
                for _ in range(8):
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        if is_first:
            print("copies", flush=True)
        is_first = False


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


def record(folder: Path, job: str, given: argparse.Namespace) -> None:
    """Run a job: FOLDER/JOB/KIND/HOST/RANK.jsonl.zst, or RANK.json.gz of the profiler, and
    FOLDER/JOB/steps.json with the medians in ms of steps `recorded` and `never recorded`.
    """
    import torch

    if torch.cuda.device_count() < (1 if given.one_gpu else given.ranks):
        print(f"{given.ranks} ranks need as many GPUs; {torch.cuda.device_count()} here", file=sys.stderr)
        sys.exit(3)
    when = ("--start-on", "nvtx:step", "--repeat", str(given.windows)) if given.windows else ()
    place, kinds = folder / job, SLOW[:-1] if given.one_gpu else SLOW
    every = ",".join(kinds)
    steps = {"never recorded": run(job, every, given, [], [])}
    if given.profiler:
        steps["recorded"] = run(job, every, given, [], [str(place)])
    else:
        steps["recorded"] = {}
        for slow in kinds:
            out = str(place / slow / "%h" / "%r.jsonl.zst")
            capture = [sys.executable, "-m", "tracepipe", "capture", *RECORDED, *when, "-o", out, "--"]
            steps["recorded"] |= run(job, slow, given, capture, [])
    place.mkdir(parents=True, exist_ok=True)
    (place / "steps.json").write_text(json.dumps(steps))


def processors_of(ranks: int) -> list[set[int]]:
    """Processors for each rank, which no other one has, if there are enough. Processor 0 has the interrupts
    of devices: programs took 1.2 to 1.5 times as long there.
    """
    there = sorted(os.sched_getaffinity(0) - {0})
    count = len(there) // ranks
    if not count:
        return [os.sched_getaffinity(0)] * ranks
    return [set(there[rank * count : (rank + 1) * count]) for rank in range(ranks)]


def run(job: str, kinds: str, given: argparse.Namespace, capture: list[str], more: list[str]) -> Any:
    """The medians that the ranks of a job print."""
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = []
    for rank, own_processors in enumerate(processors_of(given.ranks)):
        own = {"RANK": str(rank), "WORLD_SIZE": str(given.ranks), "LOCAL_RANK": str(rank)}
        if given.one_gpu:
            own["NCCL_HOSTID"] = f"rank{rank}"
        command = [*capture, sys.executable, __file__, "train", job, kinds, str(given.batch), *more]
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        pinned = partial(os.sched_setaffinity, 0, own_processors)
        running.append(subprocess.Popen(command, env=shared | own, cwd=ROOT, stdout=pipe, preexec_fn=pinned))
    ends_s = time.monotonic() + _DEADLINE_S
    for rank, one in enumerate(running):
        if one.wait(max(ends_s - time.monotonic(), 1)):
            sys.exit(f"rank {rank} of {job} with slow {kinds} failed")
    assert running[0].stdout is not None
    return json.loads(running[0].stdout.read().splitlines()[-1])


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
    """Collectives compared, the largest error of a clock, and what its bound allows."""
    from tracepipe.dataset.places import read_rows

    placed = read_rows(dataset / "layer=alignment" / "part-0.parquet")
    reference = next(row for row in placed if row["clock"] == row["reference"])
    others = [row for row in placed if row is not reference]
    if refused := [row["refused"] for row in others if row["refused"]]:
        return f"{len(refused)} of {len(others)} refused: {refused[0]}"
    errors = [
        (
            max(abs(at_ns - off(row, at_ns)) for at_ns in (row["first_ns"], row["last_ns"])),
            row["bound_ns"] + reference["bound_ns"],
            row["shared"],
        )
        for row in others
    ]
    error_ns, allowed_ns, shared = max(errors, key=lambda one: one[0] / one[1])
    return f"{shared} collectives, error {error_ns / 1e3:.1f} us of {allowed_ns / 1e3:.1f}"


def off(row: dict[str, Any], ns: int) -> int:
    """Where an alignment places a time of a clock that is none other than the reference."""
    placed: int = ns + row["offset_ns"] + (ns - row["at_ns"]) * row["drift_ppb"] // 10**9
    return placed


def slow_text(one: dict[str, Any]) -> str:
    """A rank that is called slow."""
    own, usual, costs = (
        "–" if one[name] is None else f"{one[name] / 1e6:.2f} ms"
        for name in ("own_ns", "usual_ns", "costs_ns")
    )
    return f"{one['ranks']} {one['slow']}: {own}, usually {usual}, costs {costs}"


def replay_text(dataset: Path) -> str:
    """How much longer steps come out that are replayed without a change."""
    from tracepipe.dataset.places import Dataset
    from tracepipe.errors import TracepipeError
    from tracepipe.ranks.engine import opened
    from tracepipe.ranks.job import Job

    of_all = Dataset.opened(str(dataset))
    with opened("duckdb", of_all) as engine:
        try:
            return f"replayed {100 * Job(engine, of_all).costs.replay.error:+.2f}%"
        except TracepipeError as refusal:
            return f"not replayed: {refusal.message}"


def judge(place: Path, slow: str) -> None:
    """Print the lines of a run."""
    steps = json.loads((place / "steps.json").read_text())
    ms, usual_ms = ({how: of[kind] for how, of in steps.items()} for kind in (slow, "nothing"))
    with tempfile.TemporaryDirectory() as made:
        together, apart = Path(made, "together"), Path(made, "apart")
        begins = time.perf_counter()
        ran("dataset", "build", place / slow, "-o", together)
        built_s = time.perf_counter() - begins
        size, rows = (
            sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            for folder in (together, place / slow)
        )
        report = json.loads(ran("ranks", together, "--json", "--top", 0))
        ran("dataset", "build", on_own_hosts(place / slow, Path(made, "runs")), "-o", apart)
        longer = ", ".join(f"{how} {ms[how] - usual_ms[how]:+.2f}" for how in ms)
        found = "; ".join(slow_text(one) for one in report["slow"]) or "none"
        groups = sorted({(one["which"], one["process_group"]) for one in report["collectives"]})
        print(
            f"{place.name}, slow: {slow}\n"
            f"  steps   never recorded {ms['never recorded']:.2f} ms, recorded {ms['recorded']:.2f} "
            f"({ms['recorded'] / ms['never recorded']:.3f}); {replay_text(together)}\n"
            f"  found   {found}; longer by {longer} ms\n"
            f"  clocks  {clocks_text(apart)}\n"
            f"  groups  {'; '.join(f'{which} {group!r}' for which, group in groups)}\n"
            f"  dataset {size / 1e6:.1f} MB of {rows / 1e6:.1f}, built in {built_s:.1f} s",
            flush=True,
        )
        for note in report["notes"]:
            print(f"  note    {note}", flush=True)


def main() -> None:
    """Record, judge, or both."""
    if sys.argv[1:2] == ["train"]:
        job, kinds, batch, *profiled = sys.argv[2:]
        train(job, kinds, int(batch), Path(profiled[0]) if profiled else None)
        return
    if sys.argv[1:2] == ["hog"]:
        copy_on(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=("record", "judge", "both"), default="both")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=JOBS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--profiler", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        for job in given.jobs:
            if given.what != "judge":
                record(folder, job, given)
            if given.what != "record":
                for slow in SLOW:
                    if (folder / job / slow).is_dir():
                        judge(folder / job, slow)


if __name__ == "__main__":
    main()
