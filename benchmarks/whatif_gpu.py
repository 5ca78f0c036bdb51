"""What `whatif` says that steps would take without something, against steps that did not have it.

    python benchmarks/whatif_gpu.py [--ranks N] [--slow EXTRA] [--keep FOLDER] [JOB …]
    python benchmarks/whatif_gpu.py judge PATH …    judges what was recorded: a file, or a folder of all ranks

Needs PyTorch and a GPU for each rank; ends with 3 without. Each job trains a model under `tracepipe capture`,
in steps that have something extra in turns, each extra part in a range. Jobs of several ranks record each
rank, and the last one does what is extra. `tensor` divides the model among pairs of ranks, and the batch
among the pairs. The host decides how long the steps of `small-…` take, and the GPUs
those of the others. With `--slow` all steps have this extra part, without a range; `--slow none` has none.

Each rank prints the medians of its steps, by what they had extra. Then the job is judged; a line has: the
extra part, the median of the steps with it, what `whatif` says of these without it, the median of the steps
that have nothing extra, the error in percent of the step; what the extra part really costs, and within what
`whatif` says that it is. The recordings are FOLDER/JOB/RANK.jsonl.zst, and those of slow ranks
FOLDER/JOB-EXTRA/….
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EXTRAS = ("none", "host", "gpu", "sync", "sleep", "small")
WARM_UP, ROUNDS = 5, 24
MODELS = (
    "mlp",
    "conv",
    "attention",
    "small-mlp",
    "compiled",
    "streams",
    "small-streams",
    "graph",
    "small-graph",
)
"""Jobs of one process."""
JOBS = tuple(size + kind for kind in ("ddp", "fsdp", "pipeline", "tensor") for size in ("", "small-"))
"""Jobs of several."""
MICRO_BATCHES = 4
RECORDED = ("--gpu", "kernels", "--layers", "gpu_kernel,annotation,userspace")
_DEADLINE_S = 240

Step = Callable[[Callable[[], None]], None]
"""Makes a step, and calls what it is given between forward and backward."""


def model_of(name: str) -> tuple[Any, Any]:
    """A model and its input: all but the small ones keep the GPU busy."""
    import torch
    from torch import nn

    if name == "conv":
        layers = [
            nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(12)
        ]
        return nn.Sequential(*layers).cuda(), torch.randn(64, 64, 56, 56, device="cuda")
    if name == "attention":
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0)
        return nn.TransformerEncoder(layer, 6).cuda(), torch.randn(32, 256, 512, device="cuda")
    width, batch = (256, 64) if name.startswith("small-") else (4096, 2048)
    model = nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(width, width), nn.GELU()))).cuda()
    x = torch.randn(batch, width, device="cuda")
    if name.endswith("graph"):
        return torch.cuda.make_graphed_callables(model, (x,)), x
    return torch.compile(model) if name == "compiled" else model, x


def gpt_of(ranks: int = 1, group: Any = None) -> list[Any]:
    """Layers of a GPT, whose heads and inner width are divided among the ranks of a group."""
    import torch
    from torch import distributed, nn

    class Copied(torch.autograd.Function):
        """The same on all ranks, which add up its gradients."""

        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            gradient = gradient.contiguous()
            distributed.all_reduce(gradient, group=group)
            return gradient

    class Added(torch.autograd.Function):
        """Added up over all ranks."""

        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            distributed.all_reduce(x, group=group)
            return x

        @staticmethod
        def backward(_: Any, gradient: Any) -> Any:
            return gradient

    copied, added = (Copied.apply, Added.apply) if ranks > 1 else (lambda x: x, lambda x: x)
    width = 1024

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
            self.heads, self.out = nn.Linear(width, 3 * width // ranks), nn.Linear(width // ranks, width)
            self.up, self.down = nn.Linear(width, 4 * width // ranks), nn.Linear(4 * width // ranks, width)

        def forward(self, x: Any) -> Any:
            heads = self.heads(copied(self.before(x))).unflatten(2, (3, -1, 64)).permute(2, 0, 3, 1, 4)
            seen = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + added(self.out(seen.transpose(1, 2).flatten(2)))
            return x + added(self.down(nn.functional.gelu(self.up(copied(self.between(x))))))

    return [Layer().to("cuda", torch.bfloat16) for _ in range(6)]


def plain_step(model: Any, x: Any) -> Step:
    """Forward, backward and an optimizer."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(extra: Callable[[], None]) -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        extra()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def streams_step(name: str) -> Step:
    """A stream copies the next batch, another one has a branch of the model."""
    import torch

    (one, x), (two, _) = model_of(name), model_of(name)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], 1e-4)
    copies, side, main = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()
    batch, copied = x.cpu().pin_memory(), torch.cuda.Event()
    batches = [x, torch.empty_like(x)]

    def step(extra: Callable[[], None]) -> None:
        now, following = batches
        batches.reverse()
        main.wait_event(copied)
        copies.wait_stream(main)
        with torch.cuda.stream(copies):
            following.copy_(batch, non_blocking=True)
            copied.record()
        optimizer.zero_grad()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            branch = two(now[: len(now) // 4])
        loss = one(now).square().mean()
        main.wait_stream(side)
        branch.record_stream(main)
        loss = loss + branch.square().mean()
        extra()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def pipeline_step(layers: list[Any], x: Any, rank: int, ranks: int) -> Step:
    """A stage of a pipeline: all forward parts, then all backward parts, of parts of a batch."""
    import torch
    from torch import distributed

    count = len(layers)
    stage = torch.nn.Sequential(*layers[rank * count // ranks : (rank + 1) * count // ranks])
    optimizer = torch.optim.SGD(stage.parameters(), 1e-4)
    parts, last = x.chunk(MICRO_BATCHES), ranks - 1

    def step(extra: Callable[[], None]) -> None:
        optimizer.zero_grad()
        passed = []
        for part in parts:
            if rank:
                part = torch.empty_like(part)
                distributed.recv(part, rank - 1)
                part.requires_grad_()
            y = stage(part)
            passed.append((part, y.square().mean() if rank == last else y))
            if rank != last:
                distributed.send(y.detach(), rank + 1)
        extra()
        for part, y in passed:
            gradient = torch.empty_like(y) if rank != last else None
            if gradient is not None:
                distributed.recv(gradient, rank + 1)
            y.backward(gradient)
            if rank:
                distributed.send(part.grad, rank - 1)
        optimizer.step()
        torch.cuda.synchronize()

    return step


def pairs_of(rank: int, ranks: int) -> tuple[Any, Any]:
    """The groups of a rank: its pair, and those of all pairs that have the same part of the model."""
    from torch.distributed import new_group

    pairs = [new_group([first, first + 1]) for first in range(0, ranks, 2)]
    across = [new_group(list(range(part, ranks, 2))) for part in (0, 1)]
    return pairs[rank // 2], across[rank % 2]


def step_of(name: str, rank: int, ranks: int, batch: int = 0) -> Step:
    """The steps of a job, with batches of its own size or of another one."""
    import torch
    from torch.distributed.fsdp import fully_shard

    kind = name.removeprefix("small-")
    if kind == "streams":
        return streams_step(name)
    if name in MODELS:
        return plain_step(*model_of(name))
    batch = batch or (4 if name != kind else 96 if kind == "ddp" else 288)
    x = torch.randn(batch, 256, 1024, device="cuda", dtype=torch.bfloat16)
    pair, across = pairs_of(rank, ranks) if kind == "tensor" else (None, None)
    layers = gpt_of(2, pair) if pair else gpt_of()
    if kind == "pipeline":
        return pipeline_step(layers, x, rank, ranks)
    model: Any = torch.nn.Sequential(*layers)
    if kind == "ddp" or (kind == "tensor" and ranks > 2):
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=across)
    if kind == "fsdp":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    return plain_step(model, x)


def train(name: str, slow: str) -> None:
    """One rank of a job."""
    import torch
    from torch.cuda import nvtx

    rank, ranks = (int(os.environ.get(of, one)) for of, one in (("RANK", 0), ("WORLD_SIZE", 1)))
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    if ranks > 1:
        torch.distributed.init_process_group("nccl")
    step = step_of(name, rank, ranks)
    a, b = (torch.randn(2048, 2048, device="cuda") for _ in range(2))
    tiny = torch.zeros(64, device="cuda")

    def more(extra: str) -> None:
        if extra == "host":
            ends = time.perf_counter() + 0.003
            while time.perf_counter() < ends:
                pass
        elif extra == "gpu":
            for _ in range(10):
                torch.mm(a, b)
        elif extra == "sync":
            torch.cuda.synchronize()
        elif extra == "sleep":
            time.sleep(0.004)
        elif extra == "small":
            for _ in range(200):
                tiny.add_(1)

    def middle(extra: str) -> None:
        if rank < ranks - 1 or extra == "none":
            return
        if slow:
            more(extra)
            return
        with nvtx.range(f"extra-{extra}"):
            more(extra)

    source = random.Random(1)
    variants = (slow,) if slow else EXTRAS
    warm_up = [*variants] * WARM_UP
    turns = [extra for _ in range(ROUNDS) for extra in source.sample(variants, len(variants))]
    took_ms = defaultdict(list)
    for number, extra in enumerate(warm_up + turns):
        named = "warm up" if number < len(warm_up) else "step" if slow else f"step {extra}"
        begins = time.perf_counter()
        with nvtx.range(named):
            step(lambda of=extra: middle(of))  # type: ignore[misc]
        if number >= len(warm_up):
            took_ms[extra].append(1e3 * (time.perf_counter() - begins))
    medians = ", ".join(
        f"{extra} {statistics.median(took_ms[extra]):.2f}" for extra in EXTRAS if took_ms[extra]
    )
    print(f"{name} rank {rank} of {ranks}, medians in ms: {medians}", flush=True)
    if ranks > 1:
        torch.distributed.destroy_process_group()


def record(name: str, folder: Path, ranks: int, slow: str) -> None:
    """Record each rank of a job."""
    from benchmarks.ranks_gpu import free_port

    running = []
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for rank in range(ranks):
        command = [sys.executable, "-m", "tracepipe", "capture", *RECORDED]
        own = {}
        if ranks > 1:
            command += ["--hook", "nccl"]
            own = {"RANK": str(rank), "WORLD_SIZE": str(ranks)}
        command += [
            "-o",
            str(folder / f"{rank}.jsonl.zst"),
            "--",
            sys.executable,
            __file__,
            "train",
            name,
            slow,
        ]
        running.append(subprocess.Popen(command, env=shared | own, cwd=ROOT))
    ends_s = time.monotonic() + _DEADLINE_S
    for rank, one in enumerate(running):
        if one.wait(max(ends_s - time.monotonic(), 1)):
            sys.exit(f"rank {rank} of {name} failed")


def judge(path: str) -> None:
    """Print a line for each extra part of a recording, or of a folder with those of all ranks."""
    import numpy as np

    from tracepipe.api.dataset import dataset_of
    from tracepipe.api.options import ReadOptions
    from tracepipe.dataset.places import Dataset, read_rows
    from tracepipe.errors import TracepipeError
    from tracepipe.ranks.engine import opened
    from tracepipe.ranks.job import Job
    from tracepipe.ranks.whatif import whatif
    from tracepipe.reports.whatif import Options

    with dataset_of(path, ReadOptions(), lambda _: nullcontext()) as (folder, _):
        dataset = Dataset.opened(folder)
        with opened("duckdb", dataset) as engine:
            job = Job(engine, dataset)
            replay = job.costs.replay
            steps = read_rows(dataset.part("steps", *dataset.ranks()[0]), "step, name")
            names = {one["step"]: one["name"] for one in steps}
            numbers = replay.source.numbers[0][replay.common[0]].tolist()
            extras = np.array([names[number].removeprefix("step ") for number in numbers])
            recorded_ns = replay.steps_ns(replay.recorded_ns)
            truth_ns = float(np.median(recorded_ns[extras == "none"]))
            print(
                f"{path}: {len(extras)} steps, unchanged {100 * replay.error:+.2f}%, "
                f"idle {100 * replay.idle:.0f}%"
            )
            for extra in EXTRAS[1:]:
                try:
                    (row,) = whatif(job, Options(without=f"extra-{extra}")).as_json()["changes"]
                except TracepipeError as error:
                    print(f"  {error.message}")
                    return
                with_ns = float(np.median(recorded_ns[extras == extra]))
                new_ns = with_ns if row["new_ns"] is None else row["new_ns"]
                low_ns, high_ns = (row[name] or 0 for name in ("low_ns", "high_ns"))
                saved_ns = with_ns - truth_ns
                print(
                    f"  {extra:6} {with_ns / 1e6:7.2f} → {new_ns / 1e6:7.2f}, true {truth_ns / 1e6:7.2f} ms: "
                    f"{100 * (new_ns / truth_ns - 1):+6.2f}%; saves {saved_ns / 1e6:+.2f}, said "
                    f"{low_ns / 1e6:+.2f} to {high_ns / 1e6:+.2f} ms: "
                    + ("inside" if low_ns <= saved_ns <= high_ns else "outside")
                )


def main() -> None:
    """Record and judge the jobs, or do what the arguments say."""
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
        return
    if sys.argv[1:2] == ["judge"]:
        for path in sys.argv[2:]:
            judge(path)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help=f"{', '.join(MODELS + JOBS)}; default: all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--slow", choices=EXTRAS, default="")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    if unknown := set(given.jobs) - {*MODELS, *JOBS}:
        parser.error(f"no such job: {', '.join(sorted(unknown))}")
    try:
        import torch
    except ImportError:
        raise SystemExit(3) from None
    for name in given.jobs or MODELS + JOBS:
        ranks = given.ranks if name in JOBS else 1
        if torch.cuda.device_count() < ranks:
            print(f"{name} needs {ranks} GPUs; {torch.cuda.device_count()} here", file=sys.stderr)
            raise SystemExit(3)
        with tempfile.TemporaryDirectory() as made:
            folder = (given.keep or Path(made)) / (f"{name}-{given.slow}" if given.slow else name)
            record(name, folder, ranks, given.slow)
            if not given.slow:
                judge(str(folder))


if __name__ == "__main__":
    main()
