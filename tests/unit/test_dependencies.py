"""What calls wait for: one program, written as each tool that records it states streams and events."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import nsys_export
from tests.support.recordings import Load, loader, span, write
from tracepipe.analyses.dependencies import (
    NOTHING,
    POLLS,
    RECORDS,
    STREAM_WAITS,
    WAITS_DEVICE,
    WAITS_EVENT,
    WAITS_STREAM,
    Dependencies,
    acting_calls,
    dependencies_of,
)
from tracepipe.analyses.gpu_work import gpu_work
from tracepipe.analyses.program import WAIT, program_of
from tracepipe.event.columns import NONE
from tracepipe.store.run import Run, load_run

# A call, its stream, its event, and what is to be found: the kind, the stream, the call that recorded.
PROGRAM: list[tuple[str, int | None, int | None, tuple[int, int, int]]] = [
    ("cudaStreamWaitEvent", 13, 5, (STREAM_WAITS, 13, NONE)),  # an event that was not recorded
    ("cudaLaunchKernel", 7, None, (NOTHING, NONE, NONE)),
    ("cudaEventRecord", 7, 5, (RECORDS, 7, NONE)),
    ("cudaStreamWaitEvent", 13, 5, (STREAM_WAITS, 13, 2)),
    ("cudaLaunchKernel", 13, None, (NOTHING, NONE, NONE)),
    ("cudaEventRecord", 13, 6, (RECORDS, 13, NONE)),
    ("cudaEventRecord", 13, 5, (RECORDS, 13, NONE)),
    ("cudaStreamWaitEvent", 7, 5, (STREAM_WAITS, 7, 6)),
    ("cudaEventSynchronize", None, 6, (WAITS_EVENT, NONE, 5)),
    ("cudaStreamSynchronize", 13, None, (WAITS_STREAM, 13, NONE)),
    ("cudaDeviceSynchronize", None, None, (WAITS_DEVICE, NONE, NONE)),
]


def cupti(folder: Path) -> Run:
    records, launches = [], 0
    for at, (name, stream, event, _) in enumerate(PROGRAM):
        args = {"result": 0, "context": 1}
        if "Launch" in name:
            launches, start = launches + 1, 100 * at + 50
            kernel = {"gpu": 0, "stream": stream, "launch": launches}
            records.append(span(start, start + 20, "gemm", "gpu_kernel", **kernel))
            args["launch"] = launches
        args |= {key: number for key, number in {"stream": stream, "event": event}.items() if number}
        launch = {"launch": args.pop("launch")} if "launch" in args else {}
        records.append(span(100 * at + 1, 100 * at + 40, name, args=args, **launch))
    return load_run(str(write(folder / "run.jsonl", *records)))


def probes(folder: Path) -> Run:
    """With handles, and the driver's call in the runtime's."""
    handles, records, launches = {None: None, 7: 0, 13: 0x55D0_0000_1300}, [], 0
    for at, (name, stream, event, _) in enumerate(PROGRAM):
        args: dict[str, Any] = {} if stream is None else {"stream": handles[stream]}
        args |= {} if event is None else {"event": hex(0x7F00_0000_0000 + event)}
        launch = {}
        if "Launch" in name:
            launches, start = launches + 1, 100 * at + 50
            launch = {"launch": launches}
            kernel = {"gpu": 0, "stream": stream, "launch": launches}
            records.append(span(start, start + 20, "gemm", "gpu_kernel", **kernel))
        driver = name.replace("cudaDevice", "cuCtx").replace("cuda", "cu")
        records.append(span(100 * at + 1, 100 * at + 40, name, args=args))
        records.append(span(100 * at + 2, 100 * at + 30, driver, args=args, **launch))
    return load_run(str(write(folder / "run.jsonl", *records)))


def nsys(folder: Path) -> Run:
    names = sorted({name for name, *_ in PROGRAM})
    columns = "start end deviceId contextId streamId correlationId globalPid syncType eventId"
    calls, kernels, waits, events = [], [], [], []
    none = 0xFFFFFFFF
    for at, (name, stream, event, _) in enumerate(PROGRAM):
        calls.append(
            nsys_export.call(100 * at + 1, 100 * at + 40, nsys_export.TEXTS[0], at)
            | {"nameId": names.index(name)}
        )
        whole = (0, 1, none if stream is None else stream, at, nsys_export.P)
        if "Launch" in name:
            kernels.append(nsys_export.kernel(100 * at + 50, 100 * at + 70, at, streamId=stream))
        elif "Record" in name:
            events.append((0, *whole, event))
        else:
            waits.append((100 * at + 1, 100 * at + 40, *whole, 2, none if event is None else event))
    return load_run(
        str(
            nsys_export.make(
                folder / "run.sqlite",
                {
                    "StringIds": [{"id": at, "value": name} for at, name in enumerate(names)]
                    + nsys_export.tables()["StringIds"],
                    "CUPTI_ACTIVITY_KIND_RUNTIME": calls,
                    "CUPTI_ACTIVITY_KIND_KERNEL": kernels,
                    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": nsys_export.rows(columns, *waits),
                    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": nsys_export.rows(
                        "timestamp deviceId contextId streamId correlationId globalPid eventId", *events
                    ),
                },
            )
        )
    )


def pytorch(folder: Path) -> Run:
    """With waits on rows of the GPU, which have the correlation of their calls and of those that recorded."""
    events: list[dict[str, Any]] = []
    for at, (name, stream, event, (_, _, record)) in enumerate(PROGRAM):
        args = {"External id": at + 1, "correlation": at + 1, "cbid": 1}
        call = {"ph": "X", "cat": "cuda_runtime", "name": name, "pid": 900, "tid": 900, "args": args}
        events.append(call | {"ts": 100 * at + 1, "dur": 40})
        on_gpu = {"device": 0, "context": 1, "stream": -1 if stream is None else stream}
        row = {"ph": "X", "pid": 0, "tid": on_gpu["stream"], "ts": 100 * at + 2, "dur": 30}
        if "Launch" in name:
            row |= {"cat": "kernel", "name": "gemm", "ts": 100 * at + 50, "args": args | on_gpu}
        else:
            waits = {"wait_on_stream": 9, "wait_on_cuda_event_id": event}
            waits |= {"wait_on_cuda_event_record_corr_id": record + 1 if record != NONE else NONE}
            if record != NONE:
                waits["wait_on_stream"] = PROGRAM[record][1]
            args = args | on_gpu | (waits if event else {})
            row |= {"cat": "cuda_sync", "name": "Event Sync" if event else "Context Sync", "args": args}
        events += [] if "Record" in name else [row]
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events[::-1]}))
    return load_run(str(path))


def found(run: Run) -> Dependencies:
    return dependencies_of(run, gpu_work(run), acting_calls(run))


def columns(found: Dependencies) -> list[tuple[int, ...]]:
    return list(zip(found.what.tolist(), found.stream.tolist(), found.record.tolist(), strict=True))


@pytest.mark.parametrize("form", [cupti, probes, nsys, pytorch])
def test_every_form_of_a_recording_says_the_same(tmp_path: Path, form: Callable[[Path], Run]) -> None:
    assert columns(found(form(tmp_path))) == [wanted for *_, wanted in PROGRAM]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def calls_of(*calls: tuple[str, dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [
        span(100 * at + 1, 100 * at + 40, name, args=args, **fields) for at, (name, args) in enumerate(calls)
    ]


NOT_READY, READY = {"result": 600, "event": 5}, {"result": 0, "event": 5}


def test_queries_that_succeed_at_last_are_a_wait(load: Load) -> None:
    query, record = "cudaEventQuery", ("cudaEventRecord", {"stream": 7, "event": 5})
    run = load(
        *calls_of(
            record,
            *[(query, NOT_READY)] * 2,
            *[(query, READY)] * 2,  # the second one did not wait
            (query, NOT_READY),  # something else is done meanwhile
            record,
            (query, NOT_READY | {"event": 6}),
            (query, READY),
            ("hipStreamQuery", {"result": 600}),
            ("hipStreamQuery", {"result": 0}),
        )
    )
    nothing = (NOTHING, NONE)
    wanted = [(RECORDS, NONE), (POLLS, 0), (POLLS, 0), (WAITS_EVENT, 0), nothing, nothing]
    wanted += [(RECORDS, NONE), nothing, nothing, (POLLS, NONE), (WAITS_STREAM, NONE)]
    assert [(what, record) for what, _, record in columns(found(run))] == wanted


def test_threads_poll_apart_and_events_are_those_of_their_process(load: Load) -> None:
    one = calls_of(("cuEventQuery", NOT_READY), ("cuEventQuery", READY))
    other = [call | {"tid": 2, "ts_ns": call["ts_ns"] + 50, "args": NOT_READY} for call in one]
    record = calls_of(("cuEventRecord", {"stream": 7, "event": 5}), pid=2, tid=2)
    dependencies = found(load(*record, *one, *other))
    assert dependencies.what.tolist() == [RECORDS, POLLS, NOTHING, WAITS_EVENT, NOTHING]
    assert dependencies.record.tolist() == [NONE] * 5


@pytest.mark.parametrize(
    ("handle", "name", "wanted"),
    [
        (0, "cudaStreamSynchronize", 0),  # where the default stream is stream 0
        (1, "cudaStreamSynchronize", 7),  # cudaStreamLegacy
        (2, "cudaStreamSynchronize", 14),  # that of the thread
        (0, "cudaStreamSynchronize_ptsz", 14),
        (0, "hipStreamSynchronize_spt", 14),
        ("0x9000", "cuStreamSynchronize_ptsz", 13),
        (0x9000, "cudaStreamSynchronize_v3020", 13),
        (0x9001, "cudaStreamSynchronize", NONE),
        ("nil", "cudaStreamSynchronize", NONE),
    ],
)
def test_handles_are_the_streams_of_what_was_launched_on_them(
    load: Load, handle: object, name: str, wanted: int
) -> None:
    records = calls_of((name, {"stream": handle}))
    launches = [
        (0, "cuLaunchKernel", 1, 7),
        (2, "cuLaunchKernel", 1, 14),
        (0x9000, "cudaLaunchKernel", 2, 13),
    ]
    launches += [(2, "cuLaunchKernel", 2, 15), (0, "cuLaunchKernel_ptsz", 3, 16), (4, "cuLaunchKernel", 1, 0)]
    for at, (stream, called, tid, number) in enumerate(launches, 1):
        start = 1_000 * at
        records.append(span(start, start + 50, called, args={"stream": stream}, launch=at, tid=tid))
        on_gpu = {"gpu": 0, "stream": number, "launch": at}
        records.append(span(start + 60, start + 90, "gemm", "gpu_kernel", **on_gpu))
    assert found(load(*records)).stream.tolist()[0] == wanted


def test_a_handle_that_is_used_again_is_another_stream(load: Load) -> None:
    records = []
    for at, number in enumerate((13, 14)):
        start, launch = 1_000 * at, {"launch": at + 1}
        records.append(span(start + 1, start + 50, "cuLaunchKernel", args={"stream": 0x9000}, **launch))
        records.append(span(start + 60, start + 90, "gemm", "gpu_kernel", gpu=0, stream=number, **launch))
        records.append(span(start + 100, start + 190, "cuStreamSynchronize", args={"stream": 0x9000}))
    assert found(load(*records)).stream.tolist() == [NONE, 13, NONE, 14]


def test_calls_inside_those_of_other_libraries_count(load: Load) -> None:
    record, wait = (
        ("cudaEventRecord", {"stream": 7, "event": 5}),
        ("cudaStreamWaitEvent", {"event": 5, "stream": 8}),
    )
    inside = [call | {"dur_ns": 10} for call in calls_of(record, wait)]
    driver = span(103, 105, "cuStreamWaitEvent")
    run = load(span(1, 900, "ncclAllReduce"), *inside, driver, span(950, 960, "ncclGroupEnd"))
    assert (found(run).what.tolist(), found(run).record.tolist()) == ([1, 2, 0], [NONE, 0, NONE])
    # As one call, it does several things, of which the first counts.
    dependencies = dependencies_of(run, gpu_work(run), np.array([0]))
    assert dependencies.what.tolist() == [RECORDS]


def two_streams(
    seed: int, *, waits: bool, calls: bool = True, stated: bool = False
) -> tuple[list[dict[str, Any]], set[tuple[int, int]]]:
    """Steps in which communication on a second stream waits for the last work before it, or for nothing; and
    the launches whose work is awaited, with those whose work waits.
    """
    source, records, pairs = random.Random(seed), list[dict[str, Any]](), set[tuple[int, int]]()
    now, launches, until = 1_000, 0, {7: 0, 13: 0}

    def call(name: str, ns: int, **fields: Any) -> None:
        nonlocal now
        if calls or "Event" not in name:
            records.append(span(now, now + ns, name, **fields))
        now += ns

    def launch(stream: int, ns: int, after: int = 0) -> int:
        nonlocal launches
        launches += 1
        start = max(now + source.randrange(4_000, 24_000), until[stream] + 1_000, after and after + 3_000)
        call("cudaLaunchKernel", 3_000, launch=launches)
        on_gpu = {"gpu": 0, "stream": stream, "launch": launches}
        records.append(span(start, start + ns, f"on {stream}", "gpu_kernel", **on_gpu))
        until[stream] = start + ns
        return launches

    for step in range(20):
        begin = now
        for at in range(12):
            now += source.randrange(2_000, 9_000)
            before = launch(7, source.randrange(10_000, 30_000))
            if at in (3, 7):
                ended = until[7]
                call("cudaEventRecord", 800, args={"event": 1, "stream": 7} if stated else {})
                call("cudaStreamWaitEvent", 800, args={"event": 1, "stream": 13} if stated else {})
                now += source.randrange(1_000, 3_000)
                after = launch(13, source.randrange(10_000, 40_000), ended if waits else 0)
                pairs |= {(before, after)} if waits else set()
        now = max(*until.values(), now) + 6_000
        records.append(span(begin, now, f"step {step}", "annotation"))
    return sorted(records, key=lambda record: record["ts_ns"]), pairs


def awaited(run: Run) -> set[tuple[int, int]]:
    """The launches whose work is awaited, with those whose work waits."""
    program, launches = program_of(run), run.layer("gpu_kernel").launch
    assert launches is not None
    pairs = program.after[program.what[program.after[:, 0]] != WAIT]
    after, before = launches[gpu_work(run).row[program.work[pairs]]].T.tolist()
    return set(zip(before, after, strict=True))


@pytest.mark.parametrize("calls", [False, True], ids=["launches alone", "calls without arguments"])
@pytest.mark.parametrize("waits", [False, True], ids=["apart", "waiting"])
def test_what_is_not_stated_is_inferred_from_many_steps(load: Load, waits: bool, calls: bool) -> None:
    for seed in range(3):
        records, pairs = two_streams(seed, waits=waits, calls=calls)
        run = load(*records)
        assert awaited(run) == pairs


def test_what_is_stated_needs_no_proof(load: Load) -> None:
    records, pairs = two_streams(4, waits=True, stated=True)
    end = next(record["ts_ns"] for record in records if record["name"] == "step 1")
    run = load(*(record for record in records if record["ts_ns"] < end))
    assert awaited(run) == {pair for pair in pairs if max(pair) <= 14}


def test_two_steps_prove_nothing(load: Load) -> None:
    records, pairs = two_streams(1, waits=True)
    for steps in (2, 3):
        end = next(record["ts_ns"] for record in records if record["name"] == f"step {steps}")
        run = load(*(record for record in records if record["ts_ns"] < end))
        assert awaited(run) == (set() if steps == 2 else {pair for pair in pairs if max(pair) <= 3 * 14})
