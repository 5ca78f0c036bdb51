"""What is kept of dropped records: a renderer that resumes makes the lines that one makes which had all."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.test_capture_record import NUMBER, PROBES, VALUES, raw, text
from tracepipe.hooks.hook import FilePlace, Probe
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import load_set
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import RECORD, RECORD_BYTES
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.records.unrendered import THREADS_MAX, Carried, RecordCarry

Line = dict[str, Any]
_ZOMBIE = 0x20


def new_renderer(first_ns: int = 0) -> RecordRenderer:
    return RecordRenderer(PROBES, SYSCALLS["x86_64"], VALUES, first_ns)


def read(texts: list[str]) -> list[Line]:
    return [json.loads(line) for line in texts]


def resumed(
    dropped: bytes, kept: bytes, start_ns: int = 500, first_ns: int = 0
) -> tuple[list[Line], list[Line]]:
    """What a renderer says of what was under way, and its lines of what was kept."""
    renderer = new_renderer(first_ns)
    carry = renderer.carry()
    carry.add(dropped)
    begun = renderer.resume(carry.carried(), start_ns)
    return read(begun.texts), read(renderer.render(kept).texts)


def name_of(content: str) -> tuple[int, int]:
    low, high = struct.unpack("<QQ", content.encode().ljust(16, b"\0"))
    return low, high


def test_a_call_in_progress_begins_with_what_is_kept_and_states_when_it_began() -> None:
    enter = raw(record.CALL_ENTER, "cuMemcpyHtoD_v2", 0x7000, 0x8000, 4096, ts_ns=100)
    begun, kept = resumed(enter, raw(record.CALL_RETURN, "cuMemcpyHtoD_v2", 0, ts_ns=900))
    assert begun == [
        {
            "ts_ns": 500,
            "type": "userspace",
            "name": "cuMemcpyHtoD_v2",
            "phase": "B",
            "pid": 11,
            "tid": 12,
            "cpu": 3,
            "args": {
                "to": 0x7000,
                "from": 0x8000,
                "size_bytes": 4096,
                "began": "before the recording",
                "began_ns": 100,
            },
        }
    ]
    assert [(line["name"], line["phase"]) for line in kept] == [("cuMemcpyHtoD_v2", "E")]


def test_what_has_ended_is_not_under_way() -> None:
    begun, _ = resumed(
        raw(record.CALL_ENTER, "cuInit")
        + raw(record.SYSCALL_ENTER, NUMBER["futex"])
        + raw(record.SYSCALL_EXIT, NUMBER["futex"])
        + raw(record.CALL_RETURN, "cuInit")
        + raw(record.SWITCH_IN)
        + raw(record.SWITCH_OUT, 0, 1),
        b"",
    )
    assert begun == []


def test_open_system_calls_and_runs_are_in_the_order_of_their_begins() -> None:
    begun, _ = resumed(
        raw(record.SWITCH_IN, ts_ns=1)
        + raw(record.CALL_ENTER, "cuInit", ts_ns=2)
        + raw(record.SYSCALL_ENTER, NUMBER["futex"], 0x10, 0, 3, ts_ns=3),
        b"",
    )
    assert [(line["type"], line["name"], line["args"]["began_ns"]) for line in begun] == [
        ("scheduler", "running", 1),
        ("userspace", "cuInit", 2),
        ("syscall", "futex", 3),
    ]


def test_names_of_threads_and_kernels_are_known() -> None:
    dropped = raw(record.THREAD_NEW, 0, *name_of("worker")) + b"".join(
        [
            text("cuModuleGetFunction", b"scale_add"),
            raw(record.CALL_ENTER, "cuModuleGetFunction", 0x70, 0x80),
            raw(record.CALL_RETURN, "cuModuleGetFunction", 0, 0xF00),
        ]
    )
    grid = [1 | 1 << 32, 1 | 128 << 32, 1 | 1 << 32]
    begun, (line,) = resumed(dropped, raw(record.CALL_ENTER, "cuLaunchKernel", 0xF00, *grid))
    assert begun == []
    assert (line["comm"], line["args"]["kernel"]) == ("worker", "scale_add")


def test_a_record_and_the_parts_before_it_need_not_be_dropped_together() -> None:
    parts = text("cuModuleGetFunction", b"a_kernel_with_a_name_of_more_than_one_record")
    _, (line,) = resumed(parts, raw(record.CALL_ENTER, "cuModuleGetFunction", 0x70, 0x80))
    assert line["args"]["symbol"] == "a_kernel_with_a_name_of_more_than_one_record"


def test_calls_without_a_recorded_begin_begin_with_what_is_kept() -> None:
    """Of processes that ran before the capture."""
    _, lines = resumed(b"", raw(record.SYSCALL_EXIT, NUMBER["futex"], 0, ts_ns=900), start_ns=500, first_ns=1)
    assert [(line["phase"], line["ts_ns"]) for line in lines] == [("B", 500), ("E", 900)]


def test_nothing_of_a_thread_that_ended_is_carried() -> None:
    carry = RecordCarry(PROBES)
    carry.add(raw(record.THREAD_NEW, 0, *name_of("worker")) + raw(record.CALL_ENTER, "cuInit"))
    assert all(carry.carried())
    carry.add(raw(record.SWITCH_OUT, 0, _ZOMBIE))
    assert carry.carried() == (b"", b"")


def test_nothing_of_an_ended_thread_is_kept() -> None:
    """Without the scheduler layer: a capture may last for days, in which millions of threads end."""
    renderer, carry = new_renderer(), RecordCarry(PROBES)

    def kept_bytes(threads: range) -> int:
        for tid in threads:
            begun = raw(record.THREAD_NEW, 0, *name_of("forked"), tid=tid) + raw(record.CALL_ENTER, tid=tid)
            chunk = begun + raw(record.THREAD_END, tid=tid)
            renderer.render(chunk)
            carry.add(chunk)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        kept_bytes(range(100))
        before = kept_bytes(range(1000))
        assert kept_bytes(range(1000, 2000)) - before < 50_000  # of 600 a thread
    finally:
        tracemalloc.stop()
    assert carry.carried() == Carried()


@pytest.mark.slow
def test_threads_beyond_the_bound_are_forgotten_oldest_first() -> None:
    carry = RecordCarry(PROBES)
    for tid in range(1, THREADS_MAX + 3):
        carry.add(raw(record.THREAD_NEW, 0, *name_of("worker"), tid=tid))
    assert len(carry.carried().known) == THREADS_MAX * RECORD_BYTES
    assert carry.carried().known.startswith(raw(record.THREAD_NEW, 0, *name_of("worker"), tid=3))


def test_a_chunk_is_divided_by_the_times_of_its_records() -> None:
    early, late = raw(record.SWITCH_IN, ts_ns=499), raw(record.SWITCH_IN, ts_ns=500)
    assert RecordCarry(PROBES).divide(late + early + late, 500) == (early, late + late)
    assert RecordCarry(PROBES).divide(late, 500) == (b"", late)
    assert RecordCarry(PROBES).divide(b"", 500) == (b"", b"")


def thread_of_calls(chance: random.Random, tid: int) -> Iterator[tuple[int, bytes]]:
    """What a thread does: times, and the records of each."""
    ts_ns, open_calls = chance.randrange(50), list[str]()
    yield ts_ns, raw(record.THREAD_NEW, 0, *name_of(f"t{tid}"), ts_ns=ts_ns, tid=tid)
    where: dict[str, int] = {"tid": tid}
    for _ in range(chance.randrange(40)):
        ts_ns += chance.randrange(1, 50)
        where["ts_ns"] = ts_ns
        kind = chance.randrange(4)
        if kind == 0 and open_calls:
            yield ts_ns, raw(record.CALL_RETURN, open_calls.pop(), 0, 0x100 + tid, **where)
        elif kind == 1:
            open_calls.append("cuMemAlloc_v2")
            yield ts_ns, raw(record.CALL_ENTER, open_calls[-1], 0x10, 64, **where)
        elif kind == 2 and "cuModuleGetFunction" not in open_calls:
            open_calls.append("cuModuleGetFunction")
            parts = text(open_calls[-1], f"kernel_{ts_ns}".encode(), **where)
            yield ts_ns, parts + raw(record.CALL_ENTER, open_calls[-1], 0x10, ts_ns, **where)
        else:
            grid = (1 | 1 << 32, 1 | 1 << 32, 1)
            more = raw(record.MORE, "cuLaunchKernel", 0, 7, **where)
            launch = raw(record.CALL_ENTER, "cuLaunchKernel", 0x100 + chance.randrange(4), *grid, **where)
            yield ts_ns, more + launch + raw(record.CALL_RETURN, "cuLaunchKernel", 0, **where)


@pytest.mark.parametrize("seed", range(40))
def test_wherever_records_are_dropped_the_lines_of_the_others_are_the_same(seed: int) -> None:
    chance = random.Random(seed)
    records = sorted(
        (item for tid in range(1, 5) for item in thread_of_calls(chance, tid)), key=lambda item: item[0]
    )
    chunk = b"".join(content for _, content in records)
    cut = chance.randrange(len(chunk) // RECORD_BYTES + 1) * RECORD_BYTES
    whole = new_renderer()
    before = whole.render(chunk[:cut]).texts
    expected = read(whole.render(chunk[cut:]).texts)
    begun, lines = resumed(chunk[:cut], chunk[cut:], start_ns=0)
    named = {line["tid"] for line in lines + begun}
    assert all(any("comm" in line for line in begun + lines if line["tid"] == tid) for tid in named)
    assert [without_comm(line) for line in lines] == [without_comm(line) for line in expected]
    assert sorted(map(open_of, begun)) == sorted(still_open(read(before)))


def without_comm(line: Line) -> Line:
    return {name: value for name, value in line.items() if name != "comm"}


def open_of(line: Line) -> tuple[int, int, str]:
    return line["args"]["began_ns"], line["tid"], line["name"]


def still_open(lines: list[Line]) -> Iterator[tuple[int, int, str]]:
    stacks: dict[int, list[tuple[int, int, str]]] = {}
    for line in lines:
        if line["phase"] == "B":
            stacks.setdefault(line["tid"], []).append((line["ts_ns"], line["tid"], line["name"]))
        elif line["phase"] == "E":
            stacks[line["tid"]].pop()
    for stack in stacks.values():
        yield from stack


def test_a_carry_of_carried_records_is_the_same() -> None:
    first, second = RecordCarry(PROBES), RecordCarry(PROBES)
    chance = random.Random(7)
    first.add(b"".join(content for tid in range(1, 5) for _, content in thread_of_calls(chance, tid)))
    second.add(b"".join(first.carried()))
    assert all(first.carried())
    assert second.carried() == first.carried()


def test_communicators_are_known_however_many_had_the_address() -> None:
    probes = [nccl_probe(name) for name in ("ncclCommInitRank", "ncclCommSplit", "ncclAllReduce")]
    make, split, reduce = range(3)

    def call(number: int, out: int, *words: int, result: int = 0) -> bytes:
        entry = RECORD.pack(10, 7, 7, number, record.CALL_ENTER, 0, 0, *(*words, 0, 0, 0, 0)[:4])
        return entry + RECORD.pack(20, 7, 7, number, record.CALL_RETURN, 0, 0, result, out, 0, 0)

    dropped = [
        call(make, 0xA0, 2, 0xABC, 1, result=7),  # it is still being made
        call(split, 0xB0, 0xA0, 3),
        call(split, 0xB0, 0xA0, 3),
        call(split, 0xB0, 0xA0, 3),
        call(make, 0xF0, 2, 0xDEF, result=3),  # failed
    ]
    more = RECORD.pack(30, 7, 7, reduce, record.MORE, 0, 0, 0xB0, 0, 0, 0)
    kept = more + RECORD.pack(30, 7, 7, reduce, record.CALL_ENTER, 0, 0, 0, 0, 0, 0)
    renderer = RecordRenderer(probes, SYSCALLS["x86_64"], {}, 0)
    carry = renderer.carry()
    carry.add(b"".join(dropped))
    again = renderer.carry()
    again.add(b"".join(carry.carried()))
    assert again.carried() == carry.carried()
    renderer.resume(carry.carried(), 25)
    (line,) = read(renderer.render(kept).texts)
    assert line["args"]["group"] == f"{0xABC:016x}/3.3"


def nccl_probe(name: str) -> Probe:
    hooks = load_set("nccl")
    hook = HookIndex(hooks.hooks, hooks.variants).find(name)
    assert hook is not None
    return Probe(name, name, FilePlace("/lib/libnccl.so.2", 16), hook)
