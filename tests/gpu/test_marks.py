"""Marks in kernels on a real GPU: every range of every warp, in the order and as long as was planted."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import HERE, Bench, assert_complete

pytestmark = pytest.mark.gpu

INCLUDE = HERE.parents[1] / "tracepipe/marks/include"
Range = tuple[str, int, int]


@pytest.fixture(scope="module", params=[(), ("-rdc=true",)], ids=["whole", "separate"])
def program(bench: Bench, request: pytest.FixtureRequest) -> Path:
    return bench.built("marks", f"-I{INCLUDE}", *request.param, str(HERE / "marks_second.cu"))


def ranges(batch: dict[str, Any]) -> list[list[Range]]:
    """Name, begin and length in cycles of the ranges of each warp."""
    columns = (batch[f"range_{name}"] for name in ("name", "clk", "dur_clk"))
    spans = ((batch["ranges"][name], clk, dur) for name, clk, dur in zip(*columns, strict=True))
    return [[next(spans) for _ in range(count)] for count in batch["range_count"]]


def test_every_range_of_every_warp_is_recorded(bench: Bench, program: Path) -> None:
    native, recorded = bench.native(str(program), "ranges"), bench.record(str(program), "ranges")
    assert recorded.printed == native.printed
    assert recorded.renderer.losses == {}
    assert recorded.counts["gpu_warp"] == native.launched
    assert_complete(recorded)
    found = [(batch["name"], one) for batch in recorded.of("gpu_warp") for one in ranges(batch)]
    assert Counter(name for name, _ in found) == {"marked": 5 * 264 * 8, "apart": 2, "second": 1}
    for name, one in found:
        if name == "marked":
            assert [what for what, _, _ in one] == ["load", *["mma", "wait"] * 3, "Store_0123456"]
            least = {"load": 2000, "mma": 1000, "wait": 500, "Store_0123456": 0}
            assert all(dur >= least[what] for what, _, dur in one)
        else:
            assert {what for what, _, _ in one} == ({"low", "high"} if name == "apart" else {"second"})


def test_a_kernel_that_a_graph_launches_first_is_marked(bench: Bench, program: Path) -> None:
    native, recorded = bench.native(str(program), "graph"), bench.record(str(program), "graph")
    assert recorded.printed == native.printed
    assert recorded.renderer.losses == {}
    assert_complete(recorded)
    found = [len(one) for batch in recorded.of("gpu_warp") for one in ranges(batch)]
    assert found == [8] * native.launched


def test_a_triton_kernel_is_marked(bench: Bench) -> None:
    if subprocess.run([sys.executable, "-c", "import torch, triton"], capture_output=True).returncode:
        pytest.skip("PyTorch and Triton are not installed")
    recorded = bench.record(sys.executable, "-m", "tests.gpu.marked_triton")
    assert recorded.printed == "True\n", recorded.errors
    batches = [batch for batch in recorded.of("gpu_warp") if batch["name"] == "doubled"]
    found = [[what for what, _, _ in one] for batch in batches for one in ranges(batch)]
    assert found == [["load", "Store_0123456"]] * (3 * 64 * 4)
    assert recorded.renderer.losses == {}
