"""Chains of small kernels, and what a CUDA graph could save: found here kernel by kernel."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.recordings import span, write
from tracepipe.reports.gaps import Options, run
from tracepipe.store.run import load_run

STEPS, LOADING = ((10_000, 190_000), (200_000, 400_000)), (60_000, 90_000)
PAUSES = (50_000, 98_000), (170_000, 230_000)


def recorded(seed: int) -> tuple[list[dict[str, Any]], dict[int, list[tuple[str, int, int, int]]]]:
    """Records, and the work of each stream: name, start, end, and the end of the call that launched it."""
    draw, streams = Random(seed), dict[int, list[tuple[str, int, int, int]]]()
    records = [span(start, end, f"step {start}", "annotation") for start, end in STEPS]
    records.append(span(*LOADING, "data loading", "annotation", tid=2))
    for stream in range(7, 12):
        at, streams[stream] = 3_000 * stream, []
        while at < 390_000:
            # Twice nothing runs: while data is loaded, and around the end of the first step.
            at = next((until for since, until in PAUSES if since < at < until), at)
            start = at + draw.choice((0, 900, 5_000, 5_001))
            at = start + draw.choice((1_000, 3_000, 4_999, 4_999, 5_000))
            name = draw.choice(("fill<int>", "fill<char>", "fill<int>", "DtoD"))
            called_ns = start - draw.choice((400, 8_000))
            streams[stream].append((name, start, at, called_ns + 100))
            number = 1_000 * stream + len(streams[stream])
            layer = "transfer" if name == "DtoD" else "gpu_kernel"
            records.append(span(start, at, name, layer, launch=number, gpu=0, stream=stream))
            records.append(span(called_ns, called_ns + 100, "cuLaunchKernel", launch=number))
    return records, streams


@pytest.mark.parametrize("seed", range(4))
def test_chains_and_shares_are_those_of_a_search(seed: int, tmp_path: Path) -> None:
    records, streams = recorded(seed)
    result = run(load_run(str(write(tmp_path / "run.jsonl", *records))), Options(top=0)).as_json()
    chains = defaultdict[tuple[str, ...], list[int]](lambda: [0, 0, 0])
    for work in streams.values():
        chain: list[tuple[str, int, int, int]] = []
        for one in [*work, ("end", 1 << 40, 1 << 40, 0)]:
            is_small = one[0] != "DtoD" and one[2] - one[1] < 5_000
            if chain and (not is_small or one[1] - chain[-1][2] > 5_000):
                sums = chains[tuple(name for name, *_ in chain)]
                kernels_ns = sum(end - start for _, start, end, _ in chain)
                for at, ns in enumerate((1, kernels_ns, chain[-1][2] - chain[0][1] - kernels_ns)):
                    sums[at] += ns
                chain = []
            chain += [one] if is_small else []
    expected = sorted((len(names), *of) for names, of in chains.items() if len(names) > 1 and of[0] > 1)
    shown = result["chains"]
    assert any(length > 2 for length, *_ in expected) and len(shown) > 3
    assert (
        sorted((row["length"], row["count"], row["kernels_ns"], row["gaps_ns"]) for row in shown) == expected
    )
    assert len({row["kernels"] for row in shown}) == len(shown)
    assert {row["launched_by"] for row in shown} <= {f"step {start}" for start, _ in STEPS}

    every = sorted(
        (one for work in streams.values() for one in work), key=lambda one: (one[1], one[0] == "DtoD")
    )
    kernels = [one for one in every if one[0] != "DtoD"]
    small = [end - start for _, start, end, _ in kernels if end - start < 5_000]
    saved_ns, until_ns = 0, every[0][2]
    for name, start, end, called_ns in every:
        if start > until_ns and name != "DtoD" and called_ns > until_ns:
            # A step lasts until the next one begins.
            in_steps = range(max(until_ns, STEPS[0][0]), min(start, STEPS[-1][1]))
            saved_ns += sum(not LOADING[0] <= ns < LOADING[1] for ns in in_steps)
        until_ns = max(until_ns, end)
    assert saved_ns > 1_000
    (row,) = result["small_kernels"]
    assert (row["kernels"], row["small"], row["graph_saves_ns"]) == (len(kernels), len(small), saved_ns)
    whole_ns = sum(end - start for _, start, end, _ in kernels)
    assert row["small_time_percent"] == pytest.approx(100 * sum(small) / whole_ns)
