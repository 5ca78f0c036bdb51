"""The collectives of a rank, from kernels and from what NCCL's calls say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from tracepipe.dataset.collectives import UNKNOWN
from tracepipe.dataset.places import Source
from tracepipe.dataset.rank_tables import write_rank

_HEADER = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]}
_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Recording:
    """Lines of one thread and one stream, 100 ns apart."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = [_HEADER]
        self.launch = self.now_ns = 0

    def add(self, name: str, phase: str, **more: Any) -> None:
        self.now_ns += 100
        own = {"ts_ns": self.now_ns, "type": "userspace", "name": name, "phase": phase, "pid": 1, "tid": 1}
        self.records.append(own | more)

    def call(self, name: str, *kernels: str, **args: Any) -> None:
        """A call that launches kernels."""
        self.add(name, "B", args=args)
        for kernel in kernels:
            self.launch += 1
            self.add("cuLaunchKernelEx", "B", launch=self.launch)
            self.add("cuLaunchKernelEx", "E")
            kernel_ns = 50_000 + self.launch * 1000
            own = {"ts_ns": kernel_ns, "dur_ns": 500, "gpu": 0, "stream": 7, "launch": self.launch, "pid": 1}
            self.records.append(own | {"type": "gpu_kernel", "name": kernel, "phase": "X"})
        self.add(name, "E", args={"result": 0})

    def read(self, folder: Path) -> tuple[pl.DataFrame, list[str]]:
        """The layer, and what is remarked on it."""
        path = folder / "0.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in self.records))
        written = write_rank(Source.of(str(path)), str(folder), folder)
        remarks = [remark for remark in written.remarks if "NCCL" in remark]
        return pl.read_parquet(folder / "collectives.parquet"), remarks


def known(group: str, ranks: int = 4, count: int = 256) -> dict[str, Any]:
    return {"comm": 16, "count": count, "group": group, "group_ranks": ranks}


def test_a_kernel_belongs_to_the_call_around_its_launch(tmp_path: Path) -> None:
    run = Recording()
    run.call("ncclAllReduce", _REDUCE, **known("a"))
    run.call("ncclAllGather", _GATHER, **known("b", 2, 8))
    run.call("ncclAllReduce", _REDUCE, **known("a"))
    found, remarks = run.read(tmp_path)
    columns = "operation", "process_group", "group_size", "elements", "nth", "leaves_together"
    assert list(found.select(columns).iter_rows()) == [
        ("all_reduce", "a", 4, 256, 0, True),
        ("all_gather", "b", 2, 8, 0, True),
        ("all_reduce", "a", 4, 256, 1, True),
    ]
    assert remarks == []


def test_a_group_launches_at_its_end(tmp_path: Path) -> None:
    run = Recording()
    run.call("ncclGroupStart")
    run.call("ncclGroupStart")
    run.call("ncclAllReduce", **known("a"))
    run.call("ncclGroupEnd")
    run.call("ncclAllGather", **known("b", 2))
    run.call("ncclGroupEnd", _GATHER, _REDUCE)
    # Two with one communicator may be one kernel.
    run.call("ncclGroupStart")
    run.call("ncclAllReduce", **known("a"))
    run.call("ncclAllReduce", **known("a"))
    run.call("ncclGroupEnd", _REDUCE)
    found, _ = run.read(tmp_path)
    rows = found.select("process_group", "group_size", "elements")
    assert list(rows.iter_rows()) == [("b", 2, 256), ("a", 4, 256), ("a", 4, None)]


def test_what_is_not_known_is_reported_and_not_compared(tmp_path: Path) -> None:
    run = Recording()
    run.call("ncclGroupStart")
    run.call("ncclAllReduce", **known("a"))
    run.call("ncclAllReduce", **known("b"))
    run.call("ncclGroupEnd", _REDUCE, _REDUCE)
    run.call("ncclAllReduce", _REDUCE, comm=32, count=1)
    run.call("ncclAllReduce", _REDUCE, **known("a"))
    found, remarks = run.read(tmp_path)
    rows = found.select("process_group", "leaves_together")
    assert list(rows.iter_rows()) == [(UNKNOWN, False)] * 3 + [("a", True)]
    (remark,) = remarks
    assert remark.startswith("calls of NCCL whose process groups are not known: 1. Record from before")


def test_without_any_known_group_all_ranks_are_one(tmp_path: Path) -> None:
    run = Recording()
    run.call("ncclAllReduce", _REDUCE, comm=32, count=1)
    run.call("cuCtxSynchronize", _GATHER)
    found, remarks = run.read(tmp_path)
    rows = found.select("process_group", "leaves_together")
    assert list(rows.iter_rows()) == [("", True)] * 2
    assert np.all(found["group_size"].is_null().to_numpy())
    assert len(remarks) == 1
