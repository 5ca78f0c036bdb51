"""What is found in kernels that ran on an H200 (fixtures/findings-h200): nothing in uniform ones, and what is
planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tracepipe.analyses.findings import find_all
from tracepipe.analyses.findings.kernels import kernels_of
from tracepipe.store.run import load_run

FIXTURE = Path(__file__).parents[2] / "fixtures" / "findings-h200"
FMA = "kernel<0, {}>"


def found(part: str) -> dict[tuple[str, Any], list[Any]]:
    """The findings by name and grid; each kernel is a recording of its own."""
    run = load_run(str(FIXTURE / f"{part}.jsonl.zst"))
    return {(one.kernel, one.grid): find_all([one]).findings for one in kernels_of(run, "", None)}


@pytest.mark.parametrize("part", ["fma", "shared", "tensor"])
def test_nothing_is_found_in_a_uniform_kernel(part: str) -> None:
    """SMs serve their blocks one after the other, and blocks of the first turn are on other SMs in each
    launch."""
    kernels = found(part)
    assert kernels
    assert [findings for findings in kernels.values() if findings] == []


def test_sms_far_from_memory_are_not_a_finding_and_clusters_that_leave_sms_unused_are_one() -> None:
    kernels = found("global")
    clusters = kernels.pop(("kernel<3, 0>", (264, 1, 1)))
    assert [findings for findings in kernels.values() if findings] == []
    (wave,) = clusters
    assert wave.kind == "wave"
    assert [wave.numbers[of] for of in ("sms", "sms_of_gpu", "blocks_per_cluster")] == [124, 132, 4]


@pytest.mark.slow
def test_what_is_planted_is_found_and_nothing_else() -> None:
    kernels = found("planted")
    assert len(kernels) == 8

    def the(cause: int, *grid: int) -> tuple[str, dict[str, Any]]:
        (finding,) = kernels[FMA.format(cause), grid]
        return finding.kind, finding.numbers

    kind, period = the(3, 4, 4, 33)
    assert (kind, period["side"], period["modulus"], period["residues"]) == (
        "imbalance",
        "blockIdx.z",
        3,
        [2],
    )
    kind, heavy = the(4, 528, 1, 1)
    assert (kind, heavy["across"]) == ("imbalance", "blocks")
    kind, early = the(6, 528, 1, 1)
    assert (kind, early["late_lanes_mask"]) == ("divergence", 0xFFDFFFDF)
    kind, warps = the(8, 1584, 1, 1)
    assert (kind, warps["modulus"], warps["residues"]) == ("stride", 4, [3])
    kind, growing = the(9, 528, 1, 1)
    assert (kind, growing["across"]) == ("imbalance", "block index")
    kind, border = the(10, 16, 33, 1)
    assert (kind, border["of"], border["border_blocks"]) == ("straggler", "border", 94)
    kind, blocks = the(11, 528, 1, 1)
    assert (kind, blocks["blocks"]) == ("straggler", [176, 264, 521])
    kind, wave = the(0, 660, 1, 1)
    assert (kind, wave["waves"]) == ("wave", 1.25)
