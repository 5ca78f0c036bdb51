"""Which rank of which host a recording is of."""

from __future__ import annotations

from typing import Any

import pytest

from tracepipe.dataset.collectives import operation_of
from tracepipe.dataset.identity import identity_of
from tracepipe.errors import InputError
from tracepipe.event.model import Header


def identity(path: str, clock: str = "realtime", **fields: Any) -> tuple[str, int, int | None, str]:
    found = identity_of(Header(**fields), clock, f"/job/{path}", "/job")
    return found.host, found.rank, found.world_size, found.clock


@pytest.mark.parametrize(
    ("path", "host", "rank"),
    [
        ("node3/17.jsonl.zst", "node3", 17),
        ("rank-3.json.gz", "unknown", 3),
        ("gpt_rank12_1690000000.pt.trace.json", "unknown", 12),
        ("a/b/node7-4.jsonl", "b", 4),
        ("Rank_0.sqlite", "unknown", 0),
    ],
)
def test_the_name_of_the_file(path: str, host: str, rank: int) -> None:
    assert identity(path)[:3] == (host, rank, None)


def test_what_the_recording_states_comes_before_its_name() -> None:
    stated = identity("node3/17.jsonl", host="real", rank=5, world_size=8)
    assert stated == ("real", 5, 8, "real: realtime")


def test_a_recording_of_torchrun_itself_has_no_rank() -> None:
    with pytest.raises(InputError, match="has all ranks that torchrun started") as refused:
        identity("17.jsonl", command=["torchrun", "--nproc-per-node", "8", "train.py"])
    assert "--no-python" in refused.value.hint
    assert identity("17.jsonl", command=["python", "train.py"])[1] == 17


def test_clocks_that_count_from_a_boot_are_those_of_that_boot() -> None:
    assert identity("3.jsonl", "monotonic", host="a", boot="b1")[3] == "a: monotonic since boot b1"
    assert identity("3.jsonl", "realtime", host="a", boot="b1")[3] == "a: realtime"


def test_recordings_of_unknown_hosts_have_clocks_of_their_own() -> None:
    assert identity("3.json")[3] != identity("4.json")[3]


@pytest.mark.parametrize("path", ["run.jsonl", "a/train.json", "99999999999999.jsonl"])
def test_no_rank_is_an_error(path: str) -> None:
    with pytest.raises(InputError, match="does not say which rank it is of"):
        identity(path)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("allreduce", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "all_reduce"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        ("all_to_allv", "all_to_all"),
        ("cross_device_reduce_1stage", "all_reduce"),
        ("ncclDevKernel_Generic_4", ""),
    ],
)
def test_operations_by_the_names_of_kernels_and_frameworks(name: str, operation: str) -> None:
    assert operation_of(name) == operation
