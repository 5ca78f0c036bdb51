"""Calls of device functions on a real GPU, as ranges of the warps that made them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.bench import Bench, assert_complete
from tests.gpu.test_marks import ranges
from tracepipe.tracer.request import CaptureRequest

pytestmark = pytest.mark.gpu

FUNCTIONS = "outer|inner|tree|low|high|some|pointed|leaves"
# Where the lanes of a warp that call a function together begin it together, and nowhere else.
TOGETHER = ("nested", "pointing", "leaving")


@pytest.fixture(scope="module", params=[(), ("-rdc=true",)], ids=["whole", "separate"])
def program(bench: Bench, request: pytest.FixtureRequest) -> Path:
    """Functions that each kernel has for itself, and such that have sections of their own."""
    return bench.built("calls", *request.param)


@pytest.mark.parametrize("name", ["nested", "recursive", "apart", "pointing", "leaving"])
def test_every_call_has_its_return(bench: Bench, program: Path, name: str) -> None:
    native = bench.native(str(program), name)
    recorded = bench.record(str(program), name, options=CaptureRequest(gpu_warp_marks=f":{FUNCTIONS}"))
    assert (recorded.printed, recorded.exit_code) == (native.printed, 0)
    assert recorded.renderer.losses == {}
    assert recorded.counts["gpu_warp"] == native.launched
    assert_complete(recorded)
    batches = recorded.of("gpu_warp")
    assert not any(any(batch.get("range_open", ())) for batch in batches)
    found = Counter(what for batch in batches for one in ranges(batch) for what, _, _ in one)
    begun = {function: int(times) for function, times in re.findall(r"(\w+)=(\d+)", recorded.errors)}
    assert found.keys() == begun.keys()
    if name in TOGETHER:
        assert found == begun
    else:
        assert all(found[function] >= times for function, times in begun.items())


def test_only_functions_that_fit_are_marked(bench: Bench, program: Path) -> None:
    recorded = bench.record(str(program), "nested", options=CaptureRequest(gpu_warp_marks="nested:^inner"))
    batches = recorded.of("gpu_warp")
    assert {what for batch in batches for what in batch["ranges"]} == {"inner"}
    assert [count for batch in batches for count in batch["range_count"]] == [4] * 24
