"""The PyTorch steps that benchmarks/gpu.py measures; prints the median of each in milliseconds.

python benchmarks/gpu_steps.py STEPS        of the transformer; five times as many of the small one
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

WARM_UP = 5
Step = Callable[[], "torch.Tensor"]


def transformer() -> Step:
    """Four layers of 1024, 4096 tokens: some milliseconds on a GPU of a server."""
    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(8, 512, 1024, device="cuda")

    def step() -> torch.Tensor:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.softmax(x[0, :, :64], -1).sum() + loss

    return step


def small() -> Step:
    """Two linear layers: the processor cannot launch as fast as the GPU computes."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")

    def step() -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return torch.softmax(model(x), -1).sum() + loss

    return step


def main() -> None:
    """Run both."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    steps = int(sys.argv[1])
    for make, count in ((transformer, steps), (small, 5 * steps)):
        step, times_ms = make(), []
        for number in range(WARM_UP + count):
            begin_s = time.perf_counter()
            step().item()
            if number >= WARM_UP:
                times_ms.append((time.perf_counter() - begin_s) * 1e3)
        print(make.__name__, statistics.median(times_ms))


if __name__ == "__main__":
    main()
