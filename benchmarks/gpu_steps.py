"""The steps of PyTorch and JAX that gpu.py, gpu_layers.py and gpu_samplers.py measure, in milliseconds.

python benchmarks/gpu_steps.py N NAME...    medians of N steps of each
python benchmarks/gpu_steps.py serve NAME   says `ready` and the processes' ids; a line of N steps is answered
                                            by what each took; `range` is a step in the NVTX range `window`
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

WARM_UP = 5
PROCESSORS = 4
LAUNCHES, DEEP = 1000, 200
Step = Callable[[], object]
"""Makes a step, and returns when the GPU has done it."""


def learn(optimizer: Any, loss: Any) -> None:
    """The backward pass of a step, and the update."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def transformer() -> Step:
    """Four layers of 1024, 4096 tokens: some milliseconds on a GPU of a server."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(8, 512, 1024, device="cuda")

    def step() -> float:
        loss = model(x).square().mean()
        learn(optimizer, loss)
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
        learn(optimizer, loss)
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


def compiled() -> Step:
    """The step of `small`, of kernels that torch.compile makes with Triton."""
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.LayerNorm(256), torch.nn.GELU()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(64, 64, device="cuda")

    @torch.compile
    def loss_of(x):
        return torch.softmax(model(x), -1).square().mean()

    def step() -> float:
        loss = loss_of(x)
        learn(optimizer, loss)
        return loss.item()

    return step


def ddp() -> Step:
    """A step of this process and another one, on two GPUs, whose gradients NCCL adds up."""
    import torch

    rank = int(os.environ.get("RANK", 0))
    torch.cuda.set_device(rank)
    there = f"tcp://127.0.0.1:{os.environ['DDP_PORT']}"
    torch.distributed.init_process_group("nccl", there, world_size=2, rank=rank)
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), [rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(256, 1024, device="cuda")

    def step() -> float:
        loss = model(x).square().mean()
        learn(optimizer, loss)
        return loss.item()

    return step


def gpt() -> Step:
    """A training step of six layers of 256 with autocast, 16 × 64 tokens: bound by its launches."""
    import torch

    layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    body = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = torch.nn.Sequential(torch.nn.Embedding(1024, 256), body, torch.nn.Linear(256, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(0, 1024, (16, 64), device="cuda")

    def step() -> float:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = model(tokens).float()
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())
        learn(optimizer, loss)
        return loss.item()

    return step


def deep() -> Step:
    """200 launches, each from another stack of forty calls."""
    import torch

    x = torch.zeros(1000, device="cuda")

    def one(way: int, depth: int) -> None:
        if not depth:
            x.add_(1)
        elif depth <= 8 and way >> (depth - 1) & 1:
            one(way, depth - 1)
        else:
            one(way, depth - 1)

    def step() -> None:
        for way in range(DEEP):
            one(way, 40)
        torch.cuda.synchronize()

    return step


def launches() -> Step:
    """A thousand launches from one line."""
    import torch

    x = torch.zeros(1000, device="cuda")

    def step() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)
        torch.cuda.synchronize()

    return step


def jax() -> Step:
    """A compiled training step of eight layers of 1024: tens of kernels, and few Python calls."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two of these share the GPU's memory
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


def matmul() -> Step:
    """A matrix product of 8192³ in bfloat16."""
    import torch

    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return waited(lambda: a @ b)


def attention() -> Step:
    """FlashAttention of 8 × 16 heads, 4096 tokens of 128 each."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(8, 16, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))

    def step() -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return waited(step)


def softmax() -> Step:
    """The softmax of 16,384 rows of 8,192, by a kernel that torch.compile makes with Triton."""
    import torch

    x = torch.randn(16384, 8192, device="cuda")
    softmax_of = torch.compile(lambda x: torch.softmax(x, -1))
    return waited(lambda: softmax_of(x))


def addition() -> Step:
    """The sum of two vectors of 1 GiB: as fast as the GPU's memory."""
    import torch

    x, y = (torch.randn(1 << 28, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    return waited(lambda: torch.add(x, y, out=out))


def graph() -> Step:
    """A CUDA graph of 200 kernels of a microsecond."""
    import torch

    x = torch.zeros(4096, device="cuda")

    def kernels() -> None:
        for _ in range(200):
            x.add_(1)

    with torch.cuda.stream(torch.cuda.Stream()):
        kernels()
    torch.cuda.synchronize()
    made = torch.cuda.CUDAGraph()
    with torch.cuda.graph(made):
        kernels()
    return waited(made.replay)


def waited(step: Step) -> Step:
    """The step, which returns when the GPU has done it."""
    import torch

    def and_wait() -> None:
        step()
        torch.cuda.synchronize()

    return and_wait


_OF_LAYERS = (transformer, small, gpt, gpt2, compiled, ddp, launches, deep, jax)
_OF_SAMPLERS = (matmul, attention, softmax, addition, graph)
STEPS = {step.__name__: step for step in (*_OF_LAYERS, *_OF_SAMPLERS)}


def times_ms(step: Step, count: int) -> list[float]:
    """The times of `count` steps."""
    took_ms = []
    for _ in range(count):
        begin_s = time.perf_counter()
        step()
        took_ms.append((time.perf_counter() - begin_s) * 1e3)
    return took_ms


def made(name: str) -> Step:
    """A step after its warm-up."""
    if name != "jax":
        import torch

        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
    step = STEPS[name]()
    times_ms(step, WARM_UP)
    return step


@contextmanager
def other_rank(name: str) -> Iterator[subprocess.Popen[str] | None]:
    """The second process of a step of two, to which this process writes its commands."""
    if name != "ddp" or "RANK" in os.environ:
        yield None
        return
    os.environ["DDP_PORT"] = str(20_000 + os.getpid() % 20_000)
    command, pipe = [sys.executable, __file__, "serve", name], subprocess.PIPE
    environment = {**os.environ, "RANK": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, env=environment) as other:
        yield other


def run_ms(step: Step, asked: str, other: subprocess.Popen[str] | None) -> list[float]:
    """Steps of this process, and of the other one: N, or one in a range."""
    if other is not None:
        assert other.stdin is not None
        other.stdin.write(f"{asked.strip()}\n")
    took_ms = in_range_ms(step) if asked.strip() == "range" else times_ms(step, int(asked))
    if other is not None:
        assert other.stdout is not None
        other.stdout.readline()
    return took_ms


def in_range_ms(step: Step) -> list[float]:
    """A step in the NVTX range `window`, if it is one of PyTorch."""
    if "torch" not in sys.modules:
        return times_ms(step, 1)
    from torch.cuda import nvtx

    with nvtx.range("window"):
        return times_ms(step, 1)


def profiled(step: Step) -> Step:
    """The step, which PyTorch's profiler records from now on."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    profiler.start()
    return step


def main() -> None:
    """Run some steps, or serve one."""
    if sys.argv[1] != "serve":
        for name in sys.argv[2:]:
            with other_rank(name) as other:
                print(name, statistics.median(run_ms(made(name), sys.argv[1], other)), flush=True)
        return
    # All processes that are compared run on the same processors, as others may be further from the GPU.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSORS])
    with other_rank(sys.argv[2]) as other:
        step = made(sys.argv[2])
        if os.environ.get("PROFILED"):
            step = profiled(step)
        print("ready", os.getpid(), *([other.pid] if other else []), flush=True)
        if other and other.stdout:
            other.stdout.readline()
        for line in sys.stdin:
            print(*(f"{took:.5f}" for took in run_ms(step, line, other)), flush=True)


if __name__ == "__main__":
    main()
