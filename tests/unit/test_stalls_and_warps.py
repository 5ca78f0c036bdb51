"""Stall samples of one recording beside the warps of another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.recordings import span, write
from tests.support.synthetic_warps import SyntheticKernel, write_recording
from tracepipe.cli import app
from tracepipe.reports import REPORTS
from tracepipe.store.run import load_run

H200 = {"index": 0, "name": "NVIDIA H200", "sm_count": 132, "compute_capability": "9.0"}
FULL = "void ns::gemm<float>(float const*, float*)"
SHORT = "ns::gemm<float>"


def sampled(path: Path, samples: dict[str, int], *records: dict[str, Any], name: str = FULL) -> Path:
    """A recording of the samples of one kernel by reason, and of more records."""
    names = list(samples)
    stall = {
        "type": "gpu_stall", "ts_ns": 1000, "dur_ns": 1000, "pid": 1, "gpu": 0, "functions": [name],
        "reasons": names, "function": [0] * len(names), "reason": [*range(len(names))],
        "samples": [*samples.values()],
    }  # fmt: skip
    return write(path, *records, stall)


def launch(grid: int, block: int, name: str = FULL, **args: Any) -> dict[str, Any]:
    sizes = {"grid": [grid, 1, 1], "block": [block, 1, 1], "gpu": 0, "stream": 7}
    return span(1000, 2000, name, "gpu_kernel", **sizes, args=args)


def beside(stalls: Path, warps: Path, **options: Any) -> dict[str, Any]:
    one = REPORTS["stalls"]
    return one.run(load_run(str(stalls)), one.options(**options), warps=load_run(str(warps))).as_json()


@pytest.mark.parametrize(
    ("kernel", "samples", "finding", "words"),
    [
        (
            SyntheticKernel(warps=8, late_warps=(3, 7), delay=0.2),
            {"barrier": 300, "long_scoreboard": 200, "selected": 500},
            "stride",
            ("30% of the samples are barrier", "some warps of a block are late", "__syncthreads()"),
        ),
        (
            SyntheticKernel(warps=8, in_order=0.3),
            {"barrier": 300, "selected": 700},
            "wave",
            ("some warps of a block are late",),
        ),
        (
            SyntheticKernel(late_lanes=(31,), delay=0.2),
            {"barrier": 300, "selected": 100, "long_scoreboard": 600},
            "divergence",
            ("the lanes of a warp exit apart", "its slowest lane"),
        ),
        (
            SyntheticKernel(late_blocks=(30, 99, 500), delay=1.0),
            {"barrier": 150, "long_scoreboard": 850},
            "straggler",
            ("some blocks take longer", "A barrier holds only the warps of one block"),
        ),
        (
            SyntheticKernel(trend=2.0),
            {"barrier": 150, "long_scoreboard": 850},
            "imbalance",
            ("some blocks take longer",),
        ),
        (
            SyntheticKernel(late_lanes=(31,), delay=0.2),
            {"branch_resolving": 80, "long_scoreboard": 920},
            "divergence",
            ("8% of the samples are branch_resolving", "its two sides run one after the other"),
        ),
        (
            SyntheticKernel(late_lanes=(31,), delay=0.2),
            {"not_selected": 200, "selected": 200, "long_scoreboard": 600},
            "divergence",
            ("40% of the samples are of warps that issue or could issue",),
        ),
        (
            SyntheticKernel(blocks=160),
            {"long_scoreboard": 700, "selected": 300},
            "wave",
            ("70% of the samples wait for memory", "the last wave is small"),
        ),
    ],
)
def test_related_figures_are_one_sentence(
    kernel: SyntheticKernel, samples: dict[str, int], finding: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    warps = write_recording(tmp_path / "warps.jsonl", kernel, 11, SHORT)
    found = beside(sampled(tmp_path / "stalls.jsonl", samples), warps)
    together = [one for one in found["together"] if one["finding"] == finding]
    assert len(together) == 1
    for some in words:
        assert some in together[0]["sentence"]
    assert together[0]["kernel"] == "gemm<float>"
    (row,) = found["beside"]
    assert (row["kernel"], row["samples"]) == ("gemm<float>", 1000)
    assert finding in row["findings"]


def test_few_warps_and_memory_are_joined_with_what_limits_the_occupancy(tmp_path: Path) -> None:
    """The stalls' recording has the registers of the launch, and that of the warps has the GPU."""
    warps = write_recording(tmp_path / "w.jsonl", SyntheticKernel(blocks=128), 1, SHORT, gpus=[H200])
    gpus = {"type": "footer", "gpus": [H200], "counts": {}, "losses": {}}
    same = launch(128, 128, registers=128, shared_bytes=0)
    stalls = sampled(tmp_path / "s.jsonl", {"long_scoreboard": 600, "selected": 400}, same, gpus)
    found = beside(stalls, warps)
    (one,) = found["together"]
    assert (one["finding"], one["share_percent"]) == (None, 60)
    assert "More warps at a time would hide more" in one["sentence"]
    assert "the launch allows 16, limited by registers" in one["sentence"]
    (row,) = found["beside"]
    assert row["theoretical_warps_per_sm"] == 16
    assert 10 < row["active_warps_per_sm"] <= 16
    assert not any("other grids" in note for note in found["notes"])


def test_skew_without_a_finding_is_stated(tmp_path: Path) -> None:
    kernel = SyntheticKernel(warps=8, sigma=0.1)
    warps = write_recording(tmp_path / "w.jsonl", kernel, 11, SHORT)
    found = beside(sampled(tmp_path / "s.jsonl", {"barrier": 300, "selected": 700}), warps)
    (one,) = [one for one in found["together"] if one["finding"] is None]
    assert "the warps of a block exit" in one["sentence"]


def test_nothing_is_joined_where_nothing_was_found_or_samples_are_few(tmp_path: Path) -> None:
    uniform = write_recording(tmp_path / "u.jsonl", SyntheticKernel(), 11, SHORT)
    found = beside(sampled(tmp_path / "s.jsonl", {"math_pipe_throttle": 900, "selected": 100}), uniform)
    assert found["together"] == []
    late = SyntheticKernel(warps=8, late_warps=(3, 7), delay=0.2)
    warps = write_recording(tmp_path / "w.jsonl", late, 11, SHORT)
    found = beside(sampled(tmp_path / "few.jsonl", {"barrier": 100, "selected": 100}), warps)
    assert found["together"] == []
    assert found["beside"][0]["findings"] == "stride"


def test_kernels_are_matched_by_name_and_by_their_launch_where_it_is_known(tmp_path: Path) -> None:
    warps = write_recording(tmp_path / "w.jsonl", SyntheticKernel(blocks=128), 1, SHORT)
    lines = warps.read_text().splitlines()
    other = json.loads(lines[1]) | {"launch": 77, "ts_ns": 10**9, "grid": [64, 2, 1]}
    warps.write_text("\n".join([*lines, json.dumps(other)]) + "\n")
    unknown = beside(sampled(tmp_path / "1.jsonl", {"barrier": 900}), warps)
    assert sorted(row["grid"] for row in unknown["beside"]) == ["128×1×1", "64×2×1"]
    known = beside(sampled(tmp_path / "2.jsonl", {"barrier": 900}, launch(128, 128)), warps)
    assert [row["grid"] for row in known["beside"]] == ["128×1×1"]
    differs = beside(sampled(tmp_path / "3.jsonl", {"barrier": 900}, launch(7, 128)), warps)
    assert len(differs["beside"]) == 2
    assert any("of launches with other grids or blocks" in note for note in differs["notes"])
    none = beside(sampled(tmp_path / "4.jsonl", {"barrier": 900}, name="other"), warps)
    assert "beside" not in none
    assert any("none of these kernels in common" in note for note in none["notes"])


def test_recordings_that_lack_one_of_the_two_have_a_note(tmp_path: Path) -> None:
    stalls = sampled(tmp_path / "s.jsonl", {"barrier": 900})
    assert any("capture --gpu warps" in note for note in beside(stalls, stalls)["notes"])
    warps = write_recording(tmp_path / "w.jsonl", SyntheticKernel(blocks=64), 1, SHORT)
    one = REPORTS["warps"]
    result = one.run(load_run(str(warps)), one.options(), stalls=load_run(str(warps)))
    assert any("--gpu-stalls" in note for note in result.notes)


@pytest.mark.slow
def test_both_commands_take_the_other_recording(tmp_path: Path) -> None:
    late = SyntheticKernel(warps=8, late_warps=(3, 7), delay=0.2)
    warps = write_recording(tmp_path / "w.jsonl", late, 11, SHORT)
    stalls = sampled(tmp_path / "s.jsonl", {"barrier": 300, "selected": 700})
    given = {
        "stalls": [str(stalls), "--warps", str(warps)],
        "warps": [str(warps), "--stalls", str(stalls)],
    }
    answers = {}
    for command, words in given.items():
        done = CliRunner().invoke(app, [command, *words, "--json"])
        assert done.exit_code == 0, done.output
        data = json.loads(done.stdout)
        assert len(data["recordings"]) == 2
        answers[command] = data["together"]
    assert answers["stalls"] == answers["warps"]
    text = CliRunner().invoke(app, ["stalls", *given["stalls"]]).stdout
    assert "How they are related" in text
    assert "gemm<float>: 30% of the samples are barrier" in text
    assert CliRunner().invoke(app, ["stalls", str(stalls), "--warps", str(tmp_path / "no")]).exit_code == 1
    assert CliRunner().invoke(app, ["stalls", "-", "--warps", "-"]).exit_code == 2
