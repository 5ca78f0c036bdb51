"""The steps of PyTorch and JAX that benchmarks/gpu.py and gpu_layers.py measure, in milliseconds.

python benchmarks/gpu_steps.py STEPS        medians of transformer, and of five times as many of small
python benchmarks/gpu_steps.py serve NAME   says `ready`; a line of N steps is answered by what each took
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

WARM_UP = 5
Step = Callable[[], object]
"""Returns when the GPU has done it."""


def transformer() -> Step:
    """Four layers of 1024, 4096 tokens: some milliseconds on a GPU of a server."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(8, 512, 1024, device="cuda")

    def step() -> float:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return (torch.softmax(x[0, :, :64], -1).sum() + loss).item()

    return step


def small() -> Step:
    """Two linear layers: the processor cannot launch as fast as the GPU computes."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x, y = torch.randn(64, 64, device="cuda"), torch.randint(0, 10, (64,), device="cuda")

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return (torch.softmax(model(x), -1).sum() + loss).item()

    return step


def gpt2() -> Step:
    """A token of GPT-2 with random weights, 64 tokens in."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config()).cuda().eval()
    tokens = torch.randint(0, 50_000, (1, 64), device="cuda")

    def step() -> int:
        with torch.no_grad():
            return int(model(tokens).logits[0, -1].argmax().item())

    return step


def jax() -> Step:
    """A training step of eight layers of 1024, compiled: some tens of kernels, and few calls of Python's."""
    import jax
    from jax import numpy as jnp

    def loss(layers, x):
        for layer in layers:
            x = jax.nn.gelu(x @ layer) + x
        return jnp.mean(x**2)

    @jax.jit
    def update(layers, x):
        return [layer - 1e-3 * slope for layer, slope in zip(layers, jax.grad(loss)(layers, x), strict=True)]

    keys = jax.random.split(jax.random.PRNGKey(0), 9)
    layers = [[jax.random.normal(key, (1024, 1024)) * 0.02 for key in keys[:8]]]
    x = jax.random.normal(keys[8], (512, 1024))

    def step() -> None:
        layers[0] = update(layers[0], x)
        jax.block_until_ready(layers[0])

    return step


STEPS = {"transformer": transformer, "small": small, "gpt2": gpt2, "jax": jax}


def times_ms(step: Step, count: int) -> list[float]:
    """What each of so many steps took."""
    took_ms = []
    for _ in range(count):
        begin_s = time.perf_counter()
        step()
        took_ms.append((time.perf_counter() - begin_s) * 1e3)
    return took_ms


def made(name: str) -> Step:
    """A step that is warm."""
    if name != "jax":
        import torch

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
    step = STEPS[name]()
    times_ms(step, WARM_UP)
    return step


def main() -> None:
    """Run both, or serve one."""
    if sys.argv[1] != "serve":
        for name, count in (("transformer", int(sys.argv[1])), ("small", 5 * int(sys.argv[1]))):
            print(name, statistics.median(times_ms(made(name), count)))
        return
    step = made(sys.argv[2])
    print("ready", flush=True)
    for line in sys.stdin:
        print(*(f"{took:.5f}" for took in times_ms(step, int(line))), flush=True)


if __name__ == "__main__":
    main()
