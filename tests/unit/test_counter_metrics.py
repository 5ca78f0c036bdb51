"""The metrics of counters as NVIDIA's own CUPTI knows them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tracepipe.tracer.gpu.build.toolchain import find_parts
from tracepipe.tracer.gpu.engines.counters import COUNTERS, Sampled, listed


def planned(chip: str) -> list[list[str]]:
    """Counter, metric and what is amiss, of each counter on a chip."""
    cupti = find_parts().cupti
    if not cupti or cupti[0].version != (13, 0):
        pytest.skip("CUPTI of CUDA 13.0 is not installed")
    command = [sys.executable, "-m", "tests.support.cupti_metrics", str(cupti[0].library), chip]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [line.split("\t") for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chip", ["GH100", "GA102", "AD102"])
def test_all_counters_are_counted_in_one_pass(chip: str) -> None:
    assert [(name, amiss) for name, metric, amiss in planned(chip) if metric != "-"] == [
        (counter.name, "") for counter in COUNTERS
    ]


def test_a_chip_that_lacks_some_has_the_others() -> None:
    missing = {name for name, metric, _ in planned("GB100") if metric == "-"}
    assert missing == {"PCIe read GB/s", "PCIe write GB/s"}


def test_a_header_has_what_is_known_of_each_counter() -> None:
    read, clock = (one for one in COUNTERS if one.name in ("DRAM read GB/s", "SM clock MHz"))
    some = [Sampled(read, "a", 4812.3456), Sampled(clock, "b", None)]
    assert listed(2, 1000, some) == [
        {"gpu": 2, "name": read.name, "unit": "GB/s", "metric": "a", "interval_ns": 1000, "max": 4812.346},
        {"gpu": 2, "name": clock.name, "unit": "MHz", "metric": "b", "interval_ns": 1000},
    ]
