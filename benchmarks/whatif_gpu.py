"""What `whatif` says that steps would take without something, against steps that did not have it.

    python benchmarks/whatif_gpu.py [MODEL …]       records and judges
    python benchmarks/whatif_gpu.py judge FILE …    judges what was recorded

Needs PyTorch and a GPU; ends with 3 without. Each model trains in one process under `tracepipe capture`, in
steps that have something extra in turns, each extra part in a range. A line has: the model, the extra part,
the median of the steps with it, what the replay says of these without it, the median of the steps that have
nothing extra, the error of the replay in percent of the step, and that of subtracting the length of the
range.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

EXTRAS = ("none", "host", "gpu", "sync", "sleep", "small")
WARM_UP, ROUNDS = 12, 20
MODELS = ("mlp", "conv", "attention", "small-mlp", "compiled")


def model_of(name: str) -> tuple[Any, Any]:
    """A model and its input: all but the small one keep the GPU busy."""
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
    width, batch = (256, 64) if name == "small-mlp" else (4096, 2048)
    model = nn.Sequential(*(part for _ in range(10) for part in (nn.Linear(width, width), nn.GELU()))).cuda()
    return torch.compile(model) if name == "compiled" else model, torch.randn(batch, width, device="cuda")


def train(name: str) -> None:
    """The steps of one model."""
    import torch
    from torch.cuda import nvtx

    torch.manual_seed(0)
    model, x = model_of(name)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
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

    def step(extra: str, named: str) -> None:
        with nvtx.range(named):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if extra != "none":
                with nvtx.range(f"extra-{extra}"):
                    more(extra)
            loss.backward()
            optimizer.step()
            loss.item()

    for _ in range(WARM_UP):
        for extra in EXTRAS:
            step(extra, "warm up")
    source = random.Random(1)
    for _ in range(ROUNDS):
        for extra in source.sample(EXTRAS, len(EXTRAS)):
            step(extra, f"step {extra}")


def judge(path: Path) -> None:
    """Print a line for each extra part."""
    import numpy as np

    from tracepipe.analyses.changes import Recorded, without_named
    from tracepipe.analyses.replay import Replay
    from tracepipe.analyses.steps import steps_of
    from tracepipe.errors import TracepipeError
    from tracepipe.store.run import load_run

    run = load_run(str(path))
    subject = Recorded(run)
    replay = Replay([subject.program])
    try:
        replay.refuse_what_is_not_known()
    except TracepipeError as error:
        print(f"{path.stem}: {error.message}")
        return
    recorded_ns = replay.steps_ns(replay.recorded_ns)
    extras = np.array([name.partition(" ")[2] for name in steps_of(run).names])
    truth_ns = float(np.median(recorded_ns[extras == "none"]))
    print(f"{path.stem}: {len(extras)} steps, unchanged {100 * replay.error:+.2f}%")
    for extra in EXTRAS[1:]:
        own = extras == extra
        saved_ns = replay.saved_ns(without_named([subject], f"extra-{extra}")[1])
        lengths_ns = subject.ranges(lambda name, of=f"extra-{extra}": name == of).lengths_ns()
        with_ns = float(np.median(recorded_ns[own]))
        new_ns = float(np.median((recorded_ns - saved_ns)[own]))
        naive_ns = with_ns - float(np.median(lengths_ns))
        print(
            f"  {extra:6} {with_ns / 1e6:7.2f} → {new_ns / 1e6:7.2f}, true {truth_ns / 1e6:7.2f} ms: "
            f"{100 * (new_ns / truth_ns - 1):+6.2f}%, subtracted {100 * (naive_ns / truth_ns - 1):+6.1f}%"
        )


def main() -> None:
    """Record and judge the models, or do what the arguments say."""
    first, *rest = sys.argv[1:] or [""]
    if first == "train":
        train(rest[0])
        return
    if first == "judge":
        for path in rest:
            judge(Path(path))
        return
    try:
        import torch
    except ImportError:
        raise SystemExit(3) from None
    if not torch.cuda.is_available():
        raise SystemExit(3)
    with tempfile.TemporaryDirectory() as folder:
        for name in sys.argv[1:] or MODELS:
            path = Path(folder) / f"{name}.jsonl"
            options = ["--gpu", "kernels", "--layers", "gpu_kernel,annotation,userspace", "-o", str(path)]
            command = [sys.executable, "-m", "tracepipe", "capture", *options, "--"]
            subprocess.run([*command, sys.executable, __file__, "train", name], check=True, cwd=ROOT)
            judge(path)


if __name__ == "__main__":
    main()
