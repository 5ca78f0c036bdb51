"""Every sample that documents of other tools print: its format, what of it is not read, what is counted.

Their timelines as text are compared in `test_golden.py`, as those of all cases.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.golden.cases import FIXTURES, Case
from tracepipe.reports import summary
from tracepipe.store.run import load_run

pytestmark = pytest.mark.usefixtures("core")


@dataclass(frozen=True)
class Sample:
    """A case: `skipped` are its lines that are not read, the others what the summary counts."""

    case: str
    source: str
    events: dict[str, int] = field(default_factory=dict)
    activities: dict[str, int] = field(default_factory=dict)
    moved: dict[str, int | None] = field(default_factory=dict)
    """Bytes in all."""
    lost: int = 0
    skipped: tuple[int, ...] = ()


SAMPLES = (
    Sample("bpftime-kernel_trace", "bpftime", {"gpu_thread": 2}, {"GPU thread events": 2}, lost=254),
    Sample(
        "layered-bpftrace",
        "layered",
        {"userspace": 2, "kernel": 2, "scheduler": 1},
        {"CUDA API calls": 1, "driver functions": 1, "scheduler events": 1},
    ),
    Sample(
        "layered-launch",
        "layered",
        {"userspace": 2, "syscall": 1, "kernel": 2, "scheduler": 1},
        {
            "CUDA API calls": 1,
            "kernel launches": 1,
            "system calls": 1,
            "ioctl": 1,
            "driver functions": 1,
            "scheduler events": 1,
        },
    ),
    # One line of each shape, and the statistics at the end.
    Sample(
        "layered-keys",
        "layered",
        {"userspace": 2, "kernel": 3, "scheduler": 2, "memory": 1, "transfer": 1},
        {"CUDA API calls": 2, "driver functions": 2, "scheduler calls": 1, "scheduler events": 1},
        {"alloc": 4096, "HtoD": 4096},
        lost=12,
        skipped=(15, 16, 17),
    ),
    Sample(
        "layered-entry-exit",
        "layered",
        {"kernel": 1, "scheduler": 4},
        {"driver functions": 2, "scheduler calls": 2},
    ),
    Sample(
        "layered-undated",
        "layered",
        {"userspace": 2, "syscall": 1, "kernel": 2, "memory": 3},
        {
            "CUDA API calls": 1,
            "kernel launches": 1,
            "system calls": 1,
            "ioctl": 1,
            "driver functions": 2,
        },
    ),
    Sample(
        "layered-memory",
        "layered",
        {"memory": 3, "transfer": 2},
        moved={"alloc": 1_572_864, "free": None, "HtoD": 524_288, "DtoH": 524_288},
    ),
    Sample(
        "bpftrace-probes",
        "bpftrace",
        {"userspace": 2, "syscall": 2, "kernel": 1, "scheduler": 3},
        {
            "CUDA API calls": 2,
            "kernel launches": 1,
            "system calls": 2,
            "ioctl": 1,
            "driver functions": 1,
            "scheduler events": 3,
        },
        lost=2,
        skipped=(12,),
    ),
    Sample(
        "bpftrace-bare",
        "bpftrace",
        {"userspace": 3},
        {"CUDA API calls": 3, "kernel launches": 2},
        {"alloc": None},
    ),
    Sample(
        "bpftrace-list",
        "bpftrace",
        {"kernel": 5, "scheduler": 1},
        {"driver functions": 5, "scheduler events": 1},
    ),
    Sample("bpftrace-text", "bpftrace"),
    Sample(
        "cuda-table-sample",
        "cuda-table",
        {"userspace": 6},
        {"CUDA API calls": 3, "kernel launches": 1},
        {"alloc": 1_048_576, "HtoD": 1_048_576},
    ),
)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.case)
def test_a_sample_is_read_and_counted(sample: Sample) -> None:
    case = Case(FIXTURES / sample.case)
    options = case.options()
    run = load_run(str(case.input), assumed=options.assumed, undated=options.undated)
    facts = run.facts
    assert (facts.source, facts.losses.total()) == (sample.source, sample.lost)
    assert tuple(problem.line for problem in facts.problems if problem.skipped) == sample.skipped
    figures = summary.run(run, summary.Options(all=True)).as_json()
    assert {row["layer"]: row["events"] for row in figures["layers"] if row["events"]} == sample.events
    assert {row["activity"].strip(): row["count"] for row in figures["activities"]} == sample.activities
    moved = {row["what"]: row["total_bytes"] for row in figures.get("memory", [])}
    assert moved == sample.moved
