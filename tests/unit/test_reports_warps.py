"""The report on warps, from recordings: real ones, bpftime's text, and selections."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.recordings import write as recording
from tests.support.synthetic_warps import SyntheticKernel
from tests.support.synthetic_warps import write_recording as write
from tracepipe.analyses.findings.kernels import kernels_of
from tracepipe.cli import app
from tracepipe.errors import TracepipeError
from tracepipe.present.writing.rendering import report_lines
from tracepipe.reports import warps
from tracepipe.reports.report import sentences
from tracepipe.store.run import load_run
from tracepipe.tracer.gpu.engines.warps import thread_lines

FIXTURES = Path(__file__).parents[2] / "fixtures"


def report(path: Path | str, **options: Any) -> dict[str, Any]:
    return warps.run(load_run(str(path)), warps.Options(**options)).as_json()


def fixture(case: str) -> Path:
    return next(path for path in (FIXTURES / case).iterdir() if path.name.startswith("input."))


def test_a_recorded_divergence_is_reported_and_none_is_in_a_vector_addition() -> None:
    found = report(fixture("gpu-h200"))
    (finding,) = found["findings"]
    assert (finding["kind"], finding["kernel"]) == ("divergence", "threeReturns")
    # The first quarter of the lanes leaves early, as record.cu says.
    assert (finding["late_lanes_mask"], finding["warps_apart"]) == (0xFFFFFF00, 768)
    assert finding["idle_lane_share"] == pytest.approx(0.25, abs=0.01)
    kernels = {row["kernel"]: row for row in found["kernels"]}
    assert (kernels["vectorAdd"]["launches"], kernels["vectorAdd"]["warps"]) == (2, 768)
    times = {row["kernel"]: row for row in found["times"]}
    assert (times["vectorAdd"]["life_p50_ns"], times["vectorAdd"]["skew_p50_ns"]) == (508, 31)
    assert report(fixture("capture-h200"))["findings"] == []


def test_findings_are_looked_for_in_kernels_beyond_those_shown(tmp_path: Path) -> None:
    found = report(fixture("gpu-h200"), kernel="vectorAdd|threeReturns", top=1)
    assert len(found["kernels"]) == len(found["times"]) == 1
    assert {one["kernel"] for one in (*found["kernels"], *found["findings"])} == {"vectorAdd", "threeReturns"}
    assert "more kernel, which the findings include, is not listed: --top 0 lists all" in str(found["notes"])
    drawn = sentences("findings", "Findings", [{"n": n} for n in range(5)], "{0[n]}".format, top=3)
    assert [*drawn.draw(80, True)] == ["Findings", "0", "1", "2", "… and 2 more: --top 0 shows all"]


def test_threads_of_bpftime_are_warps_too() -> None:
    # The samples of kernelretsnoop's README: a divergent warp, every 8th thread, warps one after the other.
    (finding,) = report(fixture("bpftime-late-lane"))["findings"]
    assert (finding["kind"], finding["late_lanes"], finding["delay_p50_ns"]) == ("divergence", [31], 750)
    assert "seen in one warp" in finding["sentence"]
    assert "Usual cause: a boundary that only this lane meets" in finding["sentence"]
    (finding,) = report(fixture("bpftime-strided-lanes"))["findings"]
    assert (finding["late_lanes"], finding["stride"], finding["delay_p50_ns"]) == ([8, 24], 16, 750)
    assert "Usual cause: the array index that these threads use: shared-memory bank" in finding["sentence"]
    order = report(fixture("bpftime-warp-order"))
    assert (order["findings"], len(order["few_warps"])) == ([], 3)
    assert order["orders_seen"][0]["sentence"].startswith(
        "The 3 warps of a launch exit one after the other, 2.00 µs apart, 4.00 µs from the first to the last"
    )
    (warp,) = report(fixture("bpftime-kernelretsnoop"))["few_warps"]
    assert (warp["spread_ns"], warp["last_lane"], warp["first_thread_ns"]) == (19, 4, -9)
    assert report(fixture("bpftime-kernelretsnoop"))["findings"] == []
    entries = report(fixture("bpftime-kernel_trace"))
    assert entries["findings"] == []
    assert any("imbalance: no exits were recorded" in note for note in entries["notes"])


def test_a_recording_comes_back_as_it_was_made(tmp_path: Path) -> None:
    kernel = SyntheticKernel(blocks=64, launches=2, late_lanes=(31,), delay=0.2)
    made = kernel.run(3)
    (read,) = kernels_of(load_run(str(write(tmp_path / "run.jsonl", kernel, 3))), "", None)
    for name in ("launch", "block", "warp", "sm", "exit_warp", "exit_mask"):
        assert getattr(read, name).tolist() == getattr(made, name).tolist(), name
    assert read.life_ns.tolist() == made.life_ns.tolist()
    assert (read.launch_id(0), read.launch_id(1)) == (40, 41)
    assert (read.grid, read.blocks_known) == ((64, 1, 1), True)


def test_one_launch_and_one_kernel_can_be_picked(tmp_path: Path) -> None:
    kernel = SyntheticKernel(late_blocks=(8, 9, 500), delay=1.0, launches=6, late_launch=4)
    path = write(tmp_path / "run.jsonl", kernel, 11)
    (finding,) = report(path)["findings"]
    assert (finding["launch"], finding["blocks"]) == (44, [8, 9, 500])
    assert "in launch 44, not in the others" in finding["sentence"]
    assert report(path, launch=42)["findings"] == []
    assert report(path, launch=44, kernel="^synth")["kernels"][0]["launches"] == 1
    for wrong in ({"kernel": "("}, {"kernel": "gemm"}, {"launch": 7}):
        with pytest.raises(TracepipeError):
            report(path, **wrong)


def test_threads_of_several_blocks_without_names_are_called_mixed(tmp_path: Path) -> None:
    text = [
        f"Thread ({t}, 0, 0) timestamp: {1000 + 100 * block + 7 * t}" for block in range(4) for t in range(32)
    ]
    (tmp_path / "run.txt").write_text("\n".join(text) + "\n")
    found = report(tmp_path / "run.txt")
    assert found["findings"] == []
    assert any("threads of several blocks are mixed" in note for note in found["notes"])
    # One after the other they are launches of one block.
    text = [f"Thread ({t}, 0, 0) timestamp: {1000 + 9000 * k + 7 * t}" for k in range(4) for t in range(32)]
    (tmp_path / "run.txt").write_text("\n".join(text) + "\n")
    again = report(tmp_path / "run.txt")
    assert again["kernels"][0]["launches"] == 4
    assert not any("mixed" in note for note in again["notes"])


def test_a_recording_with_warps_and_their_threads_has_each_exit_once(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", SyntheticKernel(blocks=64, late_lanes=(31,), delay=0.2), 3)
    head, *batches = path.read_text().splitlines()
    threads = [line for batch in batches for some in thread_lines(json.loads(batch)) for line in some]
    both = tmp_path / "both.jsonl"
    both.write_text("\n".join((head, *batches, "")) + "".join(threads))
    assert load_run(str(both)).facts.counts == {"gpu_warp": 256, "gpu_thread": 256 * 32}
    alone, together = report(path), report(both)
    for part in ("kernels", "times", "findings"):
        assert together[part] == alone[part]
    # By themselves they are exits of threads, which say the same of who is late.
    path.write_text("\n".join((head, "")) + "".join(threads))
    (finding,) = [one for one in report(path)["findings"] if one["kind"] == "divergence"]
    assert finding["late_lanes"] == [31]


def test_active_warps_are_averaged_over_parts_of_the_launch(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", SyntheticKernel(blocks=160, sigma=0.001), 1)
    (row,) = report(path)["occupancy"]
    active = row["active_warps"]
    # 128 of 160 blocks of 4 warps fit at once: half of the time the other 32 run alone.
    assert active[5] == pytest.approx(512, rel=0.01)
    assert active[18] == pytest.approx(128, rel=0.01)


def test_ranges_say_where_the_time_of_warps_goes() -> None:
    found = report(fixture("warps-ranges"))
    rows = {row["range"]: row for row in found["ranges"]}
    assert list(rows) == ["mma", "load", "store", "wait", "(none)"]
    lived_ns = 1_024 + 1_056 + 512 + 1_024 + 1_000 + 900
    mma_ns = 600 - 40 - 50 + 300 + 724 + 750 + 450
    assert rows["mma"]["life_percent"] == pytest.approx(100 * mma_ns / lived_ns)
    assert sum(row["life_percent"] for row in rows.values()) == pytest.approx(100)
    assert (rows["load"]["count"], rows["load"]["warps"]) == (6, 5)
    assert (rows["load"]["p50_ns"], rows["load"]["max_ns"]) == (300, 450)
    # Warp 1 of launch 1 loads twice, 595 ns in all; warp 0 of its block 190 ns.
    assert (rows["load"]["warp_p50_ns"], rows["load"]["skew_max_ns"]) == (300, 595 - 190)
    of_launch = report(fixture("warps-ranges"), launch=2)["ranges"]
    assert [(row["range"], row["count"]) for row in of_launch] == [("mma", 2), ("load", 2), ("(none)", None)]
    assert "ranges" not in report(fixture("warps-slots"))
    with pytest.raises(TracepipeError):
        report(fixture("warps-ranges"), kernel="gem$")


def test_findings_are_sentences_on_the_terminal(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", SyntheticKernel(blocks=160), 1, name="gemm")
    run = load_run(str(path))
    result = warps.run(run, warps.Options())
    text = "\n".join(report_lines([run.facts], result, width=100, ascii_only=True))
    assert "wave, gemm: 160 blocks run 4 at a time on each of 32 SMs, in 1.25 waves" in text
    assert "Usual cause: a grid that is" in text
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()[1:] if line.startswith(("wave", "  "))) <= 100


def test_the_command_gives_findings_as_json(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", SyntheticKernel(late_lanes=(7, 15, 23, 31), delay=0.2), 1)
    done = CliRunner().invoke(app, ["warps", str(path), "--json", "--kernel", "synth"])
    assert done.exit_code == 0
    data = json.loads(done.stdout)
    # What could save most comes first: 20% of a warp's life for all threads, idle lanes for three of four.
    assert [finding["kind"] for finding in data["findings"]] == ["stride", "divergence"]
    assert data["findings"][0]["modulus"] == 8
    assert data["findings"][0]["delay_p50_ns"] == pytest.approx(4_000, rel=0.02)


def test_slow_sms_are_a_finding_of_the_report(tmp_path: Path) -> None:
    made = report(write(tmp_path / "run.jsonl", SyntheticKernel(late_sms=(5,), delay=0.5), 11))
    assert [(finding["kind"], finding["sms"]) for finding in made["findings"]] == [("imbalance", [5])]


def test_a_launch_id_that_comes_again_with_the_same_warps_is_of_another_launch(tmp_path: Path) -> None:
    def line(ts_ns: int, warps: list[int], **launch: int) -> str:
        columns = {"warp": warps, "sm": warps, "slot": warps, "entry_ns": warps, "exit_ns": [9] * len(warps)}
        return json.dumps({"type": "gpu_warp", "ts_ns": ts_ns, "name": "k", "gpu": 0, **launch, **columns})

    header = json.dumps({"type": "header", "schema": "tracepipe/1", "clock": "monotonic"})
    lines = [header, line(100, [1, 0], launch=7), line(200, [0]), line(300, [0, 1], launch=7)]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(lines) + "\n")
    (kernel,) = kernels_of(load_run(str(path)), "", None)
    assert [kernel.launch_id(launch) for launch in range(3)] == [-1, 7, 7]
    assert kernel.launch.tolist() == [0, 1, 1, 2, 2]
    assert kernel.warp.tolist() == [0, 0, 1, 0, 1]
    assert kernel.entry_ns.tolist() == [200, 100, 101, 300, 301]


def test_kernels_of_one_name_are_distinguished_by_their_grids(tmp_path: Path) -> None:
    def batch(name: str, grid: list[int], launch: int) -> dict[str, Any]:
        size = {"grid": grid, "block": [32, 1, 1], "launch": launch, "gpu": 0}
        times = {"warp": [0, 1], "entry_ns": [0, 0], "exit_ns": [50, 60]}
        return {"type": "gpu_warp", "name": name, "ts_ns": launch * 1_000, **size, **times}

    path = recording(
        tmp_path / "run.jsonl",
        batch("gemm", [2, 1, 1], 1),
        batch("gemm", [2, 2, 1], 2),
        batch("other", [2, 1, 1], 3),
    )
    found = report(path)
    for table in ("kernels", "times"):
        assert sorted(row["kernel"] for row in found[table]) == ["gemm 2×1×1", "gemm 2×2×1", "other"]


def test_a_kernel_of_two_gpus_is_listed_with_its_gpu(tmp_path: Path) -> None:
    def batch(name: str, gpu: int) -> dict[str, Any]:
        size = {"grid": [2, 1, 1], "block": [32, 1, 1], "launch": 1, "gpu": gpu}
        times = {"warp": [0, 1], "entry_ns": [0, 0], "exit_ns": [50, 60]}
        return {"type": "gpu_warp", "name": name, "ts_ns": 1_000, **size, **times}

    path = recording(tmp_path / "run.jsonl", batch("k", 0), batch("k", 1), batch("other", 1))
    found = report(path)
    for table in ("kernels", "times", "occupancy"):
        names = sorted(row["kernel"] for row in found[table])
        assert names == ["k 2×1×1 on GPU 0", "k 2×1×1 on GPU 1", "other"]
    assert {row["kernel"] for row in found["few_warps"]} == {*names}
