"""A real pair: three steps of PyTorch, as eBPF probes and as PyTorch's own profiler recorded them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.golden.cases import FIXTURES
from tests.golden.merged import anchors_of, converted
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.recording.account import Account

PAIR = [str(FIXTURES / "merged-pytorch" / name) for name in ("probes.jsonl.zst", "kineto.json.zst")]
# The profiler alone has the calls of a runtime that is linked into cuBLAS, and queries. One of both began
# 2.6 ms later for the profiler.
OF_PROFILER = {
    "cudaLaunchKernel": 18 + 1, "cudaLaunchKernelExC": 9, "cudaMemsetAsync": 6, "cudaStreamIsCapturing": 6,
    "cudaDeviceGetAttribute": 3,
}  # fmt: skip
# How much later a call began for the profiler and how long it lasted for it, and which of them records it.
_JOINED = """
    select slice.ts, slice.dur, slice.name,
        max(iif(args.key like 'debug.after_ns (%', args.int_value, null)) as after_ns,
        max(iif(args.key like 'debug.dur_ns (%', args.int_value, null)) as inner_ns,
        max(args.key = 'debug.result') as of_probes,
        max(args.key = 'debug.correlation') as of_profiler
    from slice join args using (arg_set_id)
    where slice.name like 'cu%' group by slice.id
"""


@pytest.fixture(scope="module")
def account() -> Account:
    return converted(PAIR)[1]


@pytest.fixture(scope="module")
def asked() -> Iterator[RealTraceProcessor]:
    with RealTraceProcessor(converted(PAIR, "perfetto")[0]) as processor:
        yield processor


def test_calls_that_both_recorded_put_their_clocks_together(account: Account) -> None:
    probes, (_, bound_ns, by) = anchors_of(account)
    assert probes == (0, 0, "its clock is the common one")
    match = re.fullmatch(
        r"41 calls that probes\.jsonl\.zst recorded too, (\d+) ns from where "
        r"CLOCK_REALTIME of a host that is not named puts it",
        by,
    )
    # Every call lies in the other tool's where CLOCK_REALTIME is 1067 to 1736 ns off.
    assert match is not None and 1_067 <= int(match[1]) <= 1_736
    assert bound_ns is not None and bound_ns <= 500
    assert "54 calls, kernels or copies are in two recordings and drawn once" in account.notes


def test_each_call_of_the_profiler_lies_in_that_of_the_probes(asked: RealTraceProcessor) -> None:
    joined = [row for row in asked.rows(_JOINED) if row["after_ns"] is not None]
    assert Counter(row["name"] for row in joined) == {
        "cudaLaunchKernel": 32, "cudaMemcpyAsync": 9, "cudaStreamSynchronize": 9, "cuLaunchKernel": 3,
        "cudaDeviceSynchronize": 1,
    }  # fmt: skip
    assert all(row["of_probes"] and row["of_profiler"] for row in joined)
    assert [row for row in joined if row["after_ns"] < 0] == []
    assert [row for row in joined if row["after_ns"] + row["inner_ns"] > row["dur"]] == []


def test_calls_that_the_probes_did_not_see_are_those_of_the_profiler_alone(asked: RealTraceProcessor) -> None:
    rows = asked.rows(_JOINED)
    alone = Counter(row["name"] for row in rows if row["of_profiler"] and row["after_ns"] is None)
    assert alone == OF_PROFILER
    assert asked.problems() == []
