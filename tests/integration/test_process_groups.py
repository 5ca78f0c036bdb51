"""The process groups of a job of four ranks: captured by probes, derived from what the probes saw of NCCL."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.support.program import PYTHONPATH
from tests.support.standin import needs

pytestmark = [pytest.mark.ebpf, needs("bcc")]
RANKS = 4
# With the bytecode that is shipped, as compiling takes longer than all else.
_PROBES = ["--method", "prebuilt", "--gpu", "off", "--layers", "userspace", "--hook", "nccl"]
_KERNELS = {
    "ncclAllReduce": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
    "ncclAllGather": "ncclDevKernel_AllGather_RING_LL(x)",
}


def tracepipe(*arguments: object, **environment: str) -> str:
    command = [sys.executable, "-m", "tracepipe", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def captured(standin: Path, folder: Path, rank: int, *options: str, rounds: int = 1) -> list[dict[str, Any]]:
    """The records of one rank. Its GPU's kernels are made up: one for each copy of the stand-in's NCCL.

    The rank ends after so many rounds, or when its recording is complete.
    """
    path = folder / f"{rank}.jsonl"
    program = [standin / "nccl_rank", rank, RANKS, "one job", rounds, path]
    environment = {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    tracepipe("capture", *_PROBES, *options, "-o", path, "--", *program, **environment)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in with_kernels(records)))
    return records


def with_kernels(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The copies of the stand-in are launches instead, each of a kernel that runs after those before it."""
    launch, free_ns, asked = 0, 0, deque[str]()
    for record in records:
        name, phase = record.get("name", ""), record.get("phase")
        if phase == "B" and name in _KERNELS:
            asked.append(_KERNELS[name])
        if name.startswith("cuMemcpyDtoD"):
            launch += phase == "B"
            record = record | {"name": "cuLaunchKernelEx", "launch": launch, "args": {}}
            if phase == "B":
                start_ns = max(record["ts_ns"] + 1000, free_ns)
                free_ns = start_ns + 20_000
                yield {
                    "ts_ns": start_ns, "type": "gpu_kernel", "name": asked.popleft(), "phase": "X",
                    "dur_ns": 20_000, "pid": record["pid"], "gpu": 0, "stream": 7, "launch": launch,
                }  # fmt: skip
        yield record


def built(runs: Path, dataset: Path) -> tuple[pl.DataFrame, list[str]]:
    """The collectives of all ranks, and the remarks on the recordings."""
    summary = json.loads(tracepipe("dataset", "build", runs, "-o", dataset, "--json"))
    rows = pl.read_parquet(dataset / "layer=collectives/**/*.parquet", hive_partitioning=True)
    return rows, [remark for one in summary["written"] for remark in one["remarks"]]


def test_a_job_with_a_group_of_all_ranks_and_one_of_each_pair(standin: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for rank in range(RANKS):
        captured(standin, runs, rank)
    rows, remarks = built(runs, tmp_path / "ds")
    assert remarks == []
    of = {rank: Counter(part["process_group"]) for (rank,), part in rows.sort("rank").group_by("rank")}
    (world,) = {group for groups in of.values() for group in groups if "/" not in group}
    assert of == {rank: {world: 4, f"{world}/2.{rank // 2}": 5} for rank in range(RANKS)}
    sizes = rows.filter(pl.col("process_group") == world)["group_size"]
    assert set(sizes) == {RANKS}
    report = json.loads(tracepipe("ranks", tmp_path / "ds", "--json", "--top", "0"))
    found = {
        (one["operation"], one["process_group"]): (one["which"], one["collectives"])
        for one in report["collectives"]
    }
    assert found == {
        ("all_reduce", world): ("0-3", 3), ("all_gather", world): ("0-3", 1),
        ("all_reduce", f"{world}/2.0"): ("0-1", 5), ("all_reduce", f"{world}/2.1"): ("2-3", 5),
    }  # fmt: skip


@pytest.mark.parametrize("method", ["bcc", pytest.param("bpftrace", marks=needs("bpftrace"))])
def test_every_method_names_the_groups_alike(standin: Path, tmp_path: Path, method: str) -> None:
    groups = []
    for number, options in enumerate([(), ("--method", method)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        records = captured(standin, folder, 3, *options)
        groups.append([one["args"].get("group") for one in records if "comm" in one.get("args", {})])
    assert groups[0] == groups[1]
    assert len(set(groups[0])) == 3  # a split that made none has no group


def test_between_windows_communicators_are_followed(standin: Path, tmp_path: Path) -> None:
    window = ["--start-on", "call:libnccl.so:ncclGroupStart", "--duration", "1s"]
    records = captured(standin, tmp_path, 2, *window, rounds=300)
    begins = [record for record in records if record.get("phase") == "B" and record["type"] == "userspace"]
    assert begins[0]["ts_ns"] >= next(one["ts_ns"] for one in records if one["type"] == "window")
    assert not [one for one in begins if one["name"] in ("ncclCommInitRank", "ncclCommSplit")]
    groups = {one["args"]["group"] for one in begins if one["name"] in _KERNELS}
    (pair,) = {group for group in groups if group.endswith("/2.1")}
    assert groups == {pair, pair.partition("/")[0]}


def test_a_recording_that_begins_later_has_no_known_groups(standin: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    for rank in range(2):
        program = subprocess.Popen([standin / "nccl_rank", str(rank), "2", "one job", "40"], text=True)
        try:
            path = runs / f"{rank}.jsonl"
            limits = ["--duration", "0.5s", "--pid", program.pid]
            environment = {"RANK": str(rank), "WORLD_SIZE": "2"}
            tracepipe("capture", *_PROBES, *limits, "-o", path, **environment)
        finally:
            program.kill()
            program.wait()
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(record) + "\n" for record in with_kernels(records)))
    rows, remarks = built(runs, tmp_path / "ds")
    assert set(rows["process_group"]) == {""}
    assert len(remarks) == 2
    for remark in remarks:
        assert remark.startswith("calls of NCCL whose process groups are not known: ")
    report = tracepipe("ranks", tmp_path / "ds")
    assert "No recording names process groups, so all ranks are treated as one group." in " ".join(
        report.split()
    )
