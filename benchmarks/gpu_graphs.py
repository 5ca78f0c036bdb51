"""Measures what it costs to know the line of each kernel in a CUDA graph: captured, instantiated, replayed.

    python benchmarks/gpu_graphs.py [--rounds N]

Needs an NVIDIA GPU, and ends with 3 without one. Each row is a program of tests/gpu/graph_calls.py: never
touched, or captured with a window that never opens, where nothing but the nodes of graphs is looked at, with
and without stacks; and recorded from its start. Figures are the least of some rounds, in ns.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tracepipe.errors import TracepipeError  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import this_toolchain  # noqa: E402

NO_GPU, NOTHING_RECORDED = 3, 125
_CAPTURE = (sys.executable, "-m", "tracepipe", "capture", "--gpu", "kernels", "--layers", "gpu_kernel")
_NEVER = ("--start-on", "profiler")
ROWS = {
    "never touched": (),
    "no window, no stacks": (*_CAPTURE, *_NEVER, "--stacks", "off"),
    "no window": (*_CAPTURE, *_NEVER),
    "recorded, no stacks": (*_CAPTURE, "--stacks", "off"),
    "recorded": _CAPTURE,
}
FIGURES = ("launch", "captured node", "instantiated node", "replay of 1,000 nodes")


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description="Measures what lines of kernels in CUDA graphs cost.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        try:
            tools = this_toolchain()
            target, nvcc = tools.architectures()[0], str(tools.nvcc().path)
        except TracepipeError as refusal:
            print(refusal.message)
            return NO_GPU
        library = f"{folder}/graph_calls.so"
        options = [
            "-O2",
            "-std=c++17",
            "-allow-unsupported-compiler",
            f"-arch={target}",
            "-Xcompiler",
            "-fPIC",
        ]
        source = str(ROOT / "tests/gpu/graph_calls.cu")
        subprocess.run([nvcc, *options, "-shared", "-o", library, source], check=True)
        program = [sys.executable, str(ROOT / "tests/gpu/graph_calls.py"), library, "measure"]
        least: dict[str, list[int]] = {}
        for _ in range(rounds):
            for name, capture in ROWS.items():
                command = [
                    *capture,
                    *(("--force", "-o", f"{folder}/run.jsonl", "--") if capture else ()),
                    *program,
                ]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
                if done.returncode not in (0, NOTHING_RECORDED):
                    raise SystemExit(done.stderr)
                figures = [int(word) for word in done.stdout.split()[-len(FIGURES) :]]
                least[name] = [min(pair) for pair in zip(figures, least.get(name, figures), strict=True)]
    print(f"{'':24}" + "".join(f"{name:>24}" for name in FIGURES))
    for name, ns in least.items():
        print(f"{name:24}" + "".join(f"{one:>21} ns" for one in ns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
