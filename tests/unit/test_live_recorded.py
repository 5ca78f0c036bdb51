"""Totals of a recording are those of the records that it was made of, and are there while it is written."""

from __future__ import annotations

import io
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from tests.golden.cases import FIXTURES
from tests.support.hooks import shipped_probe
from tests.support.live_records import (
    ENTER,
    EVENT,
    IN,
    IRQ,
    LAYERS,
    MORE,
    NV,
    OUT,
    PREEMPTED,
    PROBES,
    RETURN,
    SLEEPING,
    SYSCALL,
    SYSCALL_END,
    THREAD_NAME,
    WAKEUP,
    F,
    G,
    record,
)  # fmt: skip
from tracepipe.event.model import Header, Layers
from tracepipe.hooks.sets import load_set
from tracepipe.readers import tracepipe1
from tracepipe.recording.reading import Reading, open_recording
from tracepipe.tracer.live.recorded import RecordedTotals
from tracepipe.tracer.live.totals import FunctionTotal, MemoryTotal, Snapshot, Totals, function_of
from tracepipe.tracer.records.record import Loss, loss_record
from tracepipe.tracer.records.render import RecordRenderer

SYSCALLS = {0: "read", 16: "ioctl"}
HEADER = Header(layers=Layers(got=list(LAYERS)), start={"monotonic_ns": 0}).to_record()


def read_totals(lines: bytes) -> Snapshot:
    recording = tracepipe1.read(io.BytesIO(orjson.dumps(HEADER) + b"\n" + lines))
    totals = RecordedTotals(recording.header)
    for batch in recording.batches:
        totals.add(batch, recording.tables)
    totals.finish(None)
    return totals.snapshot()


def event(kind: str, name: str, phase: str, ts_ns: int, **more: Any) -> bytes:
    event = {"ts_ns": ts_ns, "type": kind, "name": name, "phase": phase, "pid": 7, "tid": 7, **more}
    return orjson.dumps(event) + b"\n"


def by_name(snapshot: Snapshot) -> dict[tuple[str, str], FunctionTotal]:
    return {(total.layer, total.name): total for total in snapshot.functions}


def facts(total: FunctionTotal) -> tuple[Any, ...]:
    measured = total.latencies
    lengths = measured.count, measured.total_ns, measured.max_ns, measured.buckets
    return total.count, lengths, total.open_count, total.oldest_ns, total.unmeasured


@pytest.mark.parametrize("seed", range(4))
def test_totals_of_lines_are_those_of_their_records(seed: int) -> None:
    dice = random.Random(seed)
    names = lambda pid, tid: ""  # noqa: E731
    totals = Totals(map(function_of, PROBES), SYSCALLS, 0, LAYERS, name_of=names)
    renderer = RecordRenderer(PROBES, SYSCALLS, {})
    lines, ts_ns = b"", 0
    for turn in range(41):
        chunk = b""
        if turn == 40:  # each thread's last name stands on its next event
            chunk = b"".join(record(WAKEUP, ts_ns, tid=tid) for tid in (7, 8, 9))
        for _ in range(dice.randrange(60)):
            kind = dice.choice([ENTER, RETURN, SYSCALL, SYSCALL_END, OUT, IN, WAKEUP, EVENT, THREAD_NAME])
            number = {ENTER: dice.choice([F, G, NV]), RETURN: dice.choice([F, G, NV]), EVENT: IRQ}.get(kind)
            if kind in (SYSCALL, SYSCALL_END):
                number = dice.choice(list(SYSCALLS))
            ts_ns += dice.randrange(1, 5000)
            state = dice.choice([0, SLEEPING, PREEMPTED]) if kind == OUT else 0
            if kind == THREAD_NAME:
                state = int.from_bytes(dice.choice([b"worker", b"main"]), "little")
            chunk += record(kind, ts_ns, number or 0, state, tid=7 + dice.randrange(3))
        totals.add(chunk)
        lines += renderer.render(chunk).encoded()
        if dice.random() < 0.2:
            loss = Loss(dice.choice(["userspace", "syscall", None]), 2, ts_ns, ts_ns, "full")
            totals.lose(loss)
            lines += orjson.dumps(loss_record(loss)) + b"\n"
    expected, found = totals.snapshot(ts_ns), read_totals(lines)
    assert (found.counts, found.losses) == (expected.counts, expected.losses)
    assert {key: facts(one) for key, one in by_name(found).items()} == {
        key: facts(one) for key, one in by_name(expected).items()
    }
    assert {thread.tid: thread for thread in found.threads} == {
        thread.tid: thread for thread in expected.threads
    }


def test_both_cores_report_what_calls_did_to_memory() -> None:
    symbols = ("cudaMalloc", "cuMemAlloc_v2", "cudaMemcpy", "cuMemcpyHtoD_v2", "cudaMemset2D", "cuMemFree_v2")
    probes, number = (
        [shipped_probe(symbol) for symbol in symbols],
        {name: at for at, name in enumerate(symbols)},
    )
    values = load_set("cuda-runtime").values
    totals = Totals(map(function_of, probes), {}, 0, LAYERS, values=values, name_of=lambda pid, tid: "")
    ts_ns, chunk = 0, b""

    def step(kind: int, symbol: str, *a: int) -> None:
        nonlocal ts_ns, chunk
        ts_ns += 10
        chunk += record(kind, ts_ns, number[symbol], *a)

    for size_bytes in (4096, 1 << 30):
        step(ENTER, "cudaMalloc", size_bytes)
        step(ENTER, "cuMemAlloc_v2", size_bytes)
        step(RETURN, "cuMemAlloc_v2", 0, 77)
        step(RETURN, "cudaMalloc", 0, 77)
    step(ENTER, "cuMemAlloc_v2", 1 << 40)
    step(RETURN, "cuMemAlloc_v2", 2)  # out of memory
    for direction in (1, 2):
        step(ENTER, "cudaMemcpy", 1, 2, 300, direction)
        step(RETURN, "cudaMemcpy", 0)
    step(ENTER, "cuMemcpyHtoD_v2", 1, 2, 5)
    step(RETURN, "cuMemcpyHtoD_v2", 0)
    step(MORE, "cudaMemset2D", 3)
    step(ENTER, "cudaMemset2D", 5, 512, 0, 10)
    step(RETURN, "cudaMemset2D", 0)
    step(ENTER, "cuMemFree_v2", 77)
    step(RETURN, "cuMemFree_v2", 0)
    totals.add(chunk)
    direct = totals.snapshot(ts_ns)
    read = read_totals(RecordRenderer(probes, {}, values).render(chunk).encoded())
    for snapshot in (direct, read):
        assert snapshot.allocated == {"alloc": MemoryTotal(2, 4096 + (1 << 30))}
        assert snapshot.copied == {"HtoD": MemoryTotal(2, 305), "DtoH": MemoryTotal(1, 300)}
        assert not snapshot.is_memory_partial
        assert {total.name: total.size_bytes for total in snapshot.functions if total.size_bytes} == {
            "cuMemAlloc_v2": 4096 + (1 << 30), "cudaMemcpy": 600, "cuMemcpyHtoD_v2": 5, "cudaMemset2D": 30,
        }  # fmt: skip
    totals.count(chunk)
    assert totals.snapshot(ts_ns).is_memory_partial


def test_kernels_and_whole_calls_have_their_durations() -> None:
    lines = event("gpu_kernel", "add", "X", 900, dur_ns=50, clock="globaltimer:0", gpu=0, stream=7)
    lines += event("userspace", "cuInit", "X", 100, dur_ns=10) + event("memory", "alloc", "I", 110)
    snapshot = read_totals(lines)
    found = by_name(snapshot)
    assert found["gpu_kernel", "add"].latencies.total_ns == 50
    assert found["userspace", "cuInit"].latencies.total_ns == 10
    assert snapshot.counts == {"gpu_kernel": 1, "userspace": 1, "memory": 1}
    assert len(found) == 2  # memory events are shown as calls
    assert snapshot.now_ns == 110  # another clock does not say what time it is


def test_a_state_of_thousands_of_digits_is_a_state() -> None:
    ran = event("scheduler", "running", "B", 10) + event(
        "scheduler", "running", "E", 30, args={"prev_state": "9" * 5000}
    )
    (thread,) = read_totals(ran).threads
    assert thread.running_ns == 20


def test_a_recording_without_a_start_begins_with_its_first_event() -> None:
    recording = tracepipe1.read(
        io.BytesIO(orjson.dumps(Header().to_record()) + b"\n" + event("userspace", "cuInit", "B", 5000))
    )
    totals = RecordedTotals(recording.header)
    for batch in recording.batches:
        totals.add(batch, recording.tables)
    totals.finish(6000)
    snapshot = totals.snapshot()
    assert (snapshot.start_ns, snapshot.now_ns) == (5000, 6000)
    assert by_name(snapshot)["userspace", "cuInit"].open_count == 1


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end to write to of what is standard input then."""
    read, write = os.pipe()
    with os.fdopen(read) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        yield write


@pytest.mark.parametrize("source", ["tracepipe", "layered"])
def test_a_recording_is_read_while_it_is_written(source: str, pipe: int) -> None:
    if source == "tracepipe":
        first, second = orjson.dumps(HEADER) + b"\n", event("userspace", "cuInit", "B", 1000)
    else:
        first, second = b"Attaching 3 probes...\n", b'{"ts":0.001,"type":"userspace","name":"cuInit"}\n'
    os.write(pipe, first)
    os.write(pipe, second)
    with open_recording("-", is_growing=True) as opened:
        batches = Reading(opened, "-").source()
        assert opened.source == source
        assert len(next(batches).events) == 1
        os.write(pipe, second)
        assert len(next(batches).events) == 1
        os.close(pipe)
        assert sum(len(batch.events) for batch in batches) == 0


@pytest.mark.parametrize("fixture", ["nsys/input.sqlite", "xplane-cpu/input.pb"])
def test_what_needs_a_file_is_read_from_a_pipe_when_that_has_ended(fixture: str, pipe: int) -> None:
    os.write(pipe, (FIXTURES / fixture).read_bytes())
    os.close(pipe)
    with open_recording("-", is_growing=True) as opened:
        assert sum(len(batch.events) for batch in Reading(opened, "-").source()) > 0
