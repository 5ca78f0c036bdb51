"""A GPU's clock without pairs: its launches give an interval of its offset, which holds the true one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import tracepipe
from tracepipe.api.convert import account_lines
from tracepipe.clocks import causality
from tracepipe.clocks.maps import ClockMap
from tracepipe.errors import ClockError
from tracepipe.recording.reading import open_recording

FIXTURES = Path(__file__).parents[2] / "fixtures"
GPU = "globaltimer:0"
HEADER = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic", GPU]}
S = 10**9


def written(path: Path, records: list[dict[str, Any]], header: dict[str, Any] = HEADER) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in [header, *records]))
    return path


def map_of(path: Path, clock: str = GPU, **assumed: int) -> ClockMap | None:
    with open_recording(str(path), assumed=assumed) as opened:
        return opened.clocks.get(clock)


def call(
    name: str, start_ns: int, end_ns: int, tid: int = 7, launch: int = 0, **args: Any
) -> list[dict[str, Any]]:
    of = {"type": "userspace", "name": name, "pid": 7, "tid": tid}
    number = {"launch": launch} if launch else {}
    return [
        {"ts_ns": start_ns, "phase": "B", **of, **number},
        {"ts_ns": end_ns, "phase": "E", **of, "args": {"result": 0, **args}},
    ]


def kernel(start_ns: int, dur_ns: int, launch: int, gpu: int = 0) -> dict[str, Any]:
    of = {
        "type": "gpu_kernel",
        "name": "k",
        "phase": "X",
        "pid": 7,
        "gpu": gpu,
        "clock": f"globaltimer:{gpu}",
    }
    return {"ts_ns": start_ns, "dur_ns": dur_ns, "launch": launch, **of}


def without_pairs(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "header":
            record.pop("clock_pairs", None)
        if record["type"] != "clock":
            yield json.dumps(record)


@pytest.mark.parametrize("case", ["capture-h200", "capture-h200-pytorch", "gpu-h200"])
def test_the_bound_of_a_real_recording_holds_the_times_by_its_pairs(case: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(without_pairs(FIXTURES / case / "input.jsonl")))
    by_launches, by_pairs = map_of(path), map_of(FIXTURES / case / "input.jsonl")
    assert by_launches is not None and by_pairs is not None
    times_ns = np.concatenate([by_launches.source_ns, by_pairs.source_ns])
    off_ns = np.abs(by_launches.place_all(times_ns) - by_pairs.place_all(times_ns))
    assert (off_ns <= by_launches.bounds_at(times_ns) + by_pairs.bounds_at(times_ns)).all()
    assert 3_000 < by_launches.bound_at(by_launches.source_ns[0]) < 30_000


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noted", [1 << 15, 64])
def test_the_bound_holds_over_hours_of_drift(
    seed: int, noted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causality, "_NOTED_MAX", noted)
    rng = Random(seed)
    offset_ns, ppm = rng.randrange(-(10**18), 10**18), rng.uniform(-90, 90)

    def on_gpu(host_ns: int) -> int:
        # The rate swings by 0.1 ppm within half an hour, as the machine warms up and cools down.
        swing_ns = 0.1e-6 * 600e9 * np.sin(host_ns / 600e9)
        return 2 * 10**18 + offset_ns + host_ns + round(ppm * 1e-6 * host_ns + swing_ns)

    records, now_ns, truth = [], S, []
    for launch in range(1, 400):
        now_ns += rng.randrange(1_000, 36 * S)
        length_ns = rng.randrange(1_000, 3_000_000)
        start_ns = now_ns + rng.randrange(0, 20_000)
        records += call("cuLaunchKernel", now_ns, now_ns + 10_000, launch=launch)
        gpu = kernel(on_gpu(start_ns), on_gpu(start_ns + length_ns) - on_gpu(start_ns), launch)
        records.append(gpu)
        truth.append((gpu["ts_ns"], start_ns))
        if rng.random() < 0.7:
            end_ns = start_ns + length_ns + rng.randrange(0, 20_000)
            records += call("cuCtxSynchronize", min(end_ns, now_ns + 11_000), max(end_ns, now_ns + 11_000))
            now_ns = max(end_ns, now_ns + 11_000)
        now_ns = max(now_ns, start_ns + length_ns)
    found = map_of(written(tmp_path / "run.jsonl", records))
    assert found is not None and found.method == "launches"
    source_ns, host_ns = (np.array(of, np.int64) for of in zip(*truth, strict=True))
    off_ns = np.abs(found.place_all(source_ns) - host_ns)
    assert (off_ns <= found.bounds_at(source_ns)).all()


def chosen(name: str, result: int = 0, **args: int) -> list[dict[str, Any]]:
    begin, end = call(name, 2_010, 2_020, result=result)
    return [begin | {"args": args}, end]


def whole(name: str, **args: int) -> list[dict[str, Any]]:
    return [call(name, 2_010, 2_020)[0] | {"phase": "X", "dur_ns": 10, "args": args}]


LAUNCHED = [
    *chosen("cudaSetDevice", device=0),
    *call("cuLaunchKernel", 1_000, 2_000, launch=1),
    kernel(500_100, 50, 1),
]
SYNC = call("cuCtxSynchronize", 2_100, 3_000)


@pytest.mark.parametrize(
    ("waits", "bound_ns"),
    [
        pytest.param(call("cudaDeviceSynchronize", 2_000, 3_000), (3_000 - 1_000 - 50) // 2, id="it waited"),
        pytest.param(
            call("cuCtxSynchronize_v2", 2_100, 3_000), (3_000 - 1_000 - 50) // 2, id="of the driver"
        ),
        pytest.param(call("cuCtxSynchronize", 1_900, 3_000), None, id="it began before the launch returned"),
        pytest.param(call("cuCtxSynchronize", 2_100, 3_000, tid=8), None, id="another thread waited"),
        pytest.param(call("cuCtxSynchronize", 2_100, 3_000, result=700), None, id="it failed"),
        pytest.param(call("cuStreamSynchronize", 2_100, 3_000), None, id="for a stream that is not known"),
        pytest.param([*chosen("cudaSetDevice", device=1), *SYNC], None, id="for another device"),
        pytest.param([*chosen("cudaSetDevice"), *SYNC], None, id="for a device that is not known"),
        pytest.param([*chosen("cuCtxPushCurrent_v2", context=5), *SYNC], None, id="for another context"),
        pytest.param(
            [*chosen("cudaSetDevice", device=1), *chosen("cudaSetDevice", device=0), *SYNC],
            (3_000 - 1_000 - 50) // 2,
            id="for the device chosen again",
        ),
        pytest.param(
            [*chosen("cuCtxPushCurrent", context=5), *chosen("cuCtxPopCurrent_v2"), *SYNC],
            (3_000 - 1_000 - 50) // 2,
            id="for the context from before",
        ),
        pytest.param(
            [*chosen("cudaSetDevice", 101, device=0), *SYNC],
            None,
            id="for the device before a failure",
        ),
        *(
            pytest.param([*call(name, 2_010, 2_020), *SYNC], None, id=name)
            for name in ("cuCtxCreate_v2", "cuCtxDestroy_v2", "cudaDeviceReset")
        ),
        pytest.param(
            [*chosen("cuCtxCreate_v4", device=0), *chosen("cuCtxPopCurrent_v2"), *SYNC],
            (3_000 - 1_000 - 50) // 2,
            id="for the context from before a new one",
        ),
        pytest.param(
            [*whole("cudaSetDevice", device=1), *whole("cudaSetDevice", device=0, result=101), *SYNC],
            None,
            id="for a device whose choice failed",
        ),
        pytest.param(
            [*SYNC, *call("cuLaunchKernel", 4_000, 4_100, launch=1), *call("cuCtxSynchronize", 4_200, 5_000)],
            (5_000 - 1_000 - 50) // 2,
            id="a number that is used again",
        ),
        pytest.param(
            [*call("cuCtxSynchronize", 2_100, 3_000), kernel(9, 1, 2, gpu=1)], None, id="one GPU of two"
        ),
        pytest.param(
            [{"type": "footer", "counts": {}, "losses": {}, "end": {"monotonic_ns": 9_050}}],
            (9_050 - 1_000 - 50) // 2,
            id="the recording ended",
        ),
    ],
)
def test_what_bounds_a_launch(waits: list[dict[str, Any]], bound_ns: int | None, tmp_path: Path) -> None:
    header = HEADER | {"clocks": ["monotonic", GPU, "globaltimer:1"]}
    found = map_of(written(tmp_path / "run.jsonl", [*LAUNCHED, *waits], header))
    if bound_ns is None:
        assert found is None
    else:
        assert found is not None
        assert abs(found.bound_at(500_100) - bound_ns) <= 3
        assert abs(found.place(500_100) - (1_000 + bound_ns)) <= 3  # type: ignore[arg-type]


def of_any(start_ns: int, gpu: int = 0) -> dict[str, Any]:
    return {key: of for key, of in kernel(start_ns, 50, 1, gpu).items() if key not in ("pid", "launch")}


def of_no_thread(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: of for key, of in one.items() if key != "tid"} for one in records]


WAIT = call("cuCtxSynchronize", 2_100, 3_000)
BEGUN = call("cuLaunchKernel", 4_000, 0, launch=2)[0]
LATER = call("cuLaunchKernel", 4_000, 4_100, launch=1)
ONE, OTHER = (
    of_no_thread(call("cuLaunchKernel", *times_ns, launch=number))
    for number, times_ns in ((2, (500, 1_500)), (1, (1_000, 2_500)))
)


@pytest.mark.parametrize(
    "records",
    [
        pytest.param([*LAUNCHED[:-1], *WAIT, BEGUN, of_any(500_100)], id="a launch did not return"),
        pytest.param(
            [*LAUNCHED[:-1], *WAIT, BEGUN | {"tid": 8}, of_any(500_100)], id="nor did one of a thread alone"
        ),
        pytest.param(
            [LATER[0], *call("cuLaunchKernel", 1_000, 2_000)[1:], *WAIT, kernel(500_100, 50, 1)],
            id="an end before its begin",
        ),
        pytest.param(
            [
                ONE[0],
                OTHER[0],
                ONE[1],
                *of_no_thread(WAIT),
                OTHER[1],
                kernel(500_100, 50, 1),
            ],
            id="a launch of one of two threads that are not known",
        ),
        pytest.param([*LAUNCHED[:-1], *WAIT, of_any(500_100), of_any(9, gpu=1)], id="any work of two GPUs"),
        pytest.param([*LAUNCHED, *WAIT, of_any(9, gpu=1)], id="any work of another GPU"),
        pytest.param(
            [
                *call("cuLaunchKernel", 1_000, 2_000, launch=5),
                *WAIT,
                kernel(9, 1, 2, gpu=1),
                *(kernel(500_100, 50, launch) for launch in range(5, 99)),
            ],
            id="work of another GPU that is noted no more",
        ),
        pytest.param(
            [*({**one, "clock": "boottime"} for one in LAUNCHED[:-1] + WAIT), LAUNCHED[-1]],
            id="calls on another clock",
        ),
    ],
)
def test_a_call_proves_nothing_about_work_that_it_may_not_have_waited_for(
    records: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(causality, "_NOTED_MAX", 8)
    header = HEADER | {"clocks": ["monotonic", "boottime", GPU, "globaltimer:1"]}
    assert map_of(written(tmp_path / "run.jsonl", records, header)) is None


def test_a_kernel_that_began_long_before_it_was_waited_for_bounds_others_with_the_drift(
    tmp_path: Path,
) -> None:
    hour_ns, slower = 3_600 * S, 90e-6
    records = call("cuLaunchKernel", S, S + 1, launch=1) + call("cuLaunchKernel", S, S + 1, launch=2, tid=8)
    # Both begin at once; the host's clock advances further than the GPU's until the first has ended.
    records += [kernel(0, hour_ns, 1), kernel(0, 5, 2)]
    records += call("cuCtxSynchronize", S + 2, S + round(hour_ns * (1 - slower)))
    found = map_of(written(tmp_path / "run.jsonl", records))
    assert found is not None
    assert abs(found.place(0) - S) <= found.bound_at(0)  # type: ignore[arg-type]


def test_only_clocks_of_gpus_are_placed_by_launches(tmp_path: Path) -> None:
    of_machine = {"type": "hook", "name": "f", "phase": "X", "dur_ns": 5, "clock": "machine 2", "ts_ns": 9}
    header = HEADER | {"clocks": ["monotonic", GPU, "machine 2"]}
    waits = call("cuCtxSynchronize", 2_100, 3_000)
    path = written(tmp_path / "run.jsonl", [*LAUNCHED, *waits, of_machine], header)
    assert map_of(path) is not None
    assert map_of(path, "machine 2") is None


def test_a_launch_that_contradicts_the_others_is_an_error_and_is_named(tmp_path: Path) -> None:
    records = [*LAUNCHED, *call("cuCtxSynchronize", 2_100, 3_000)]
    records += [*call("cuLaunchKernel", 11_000, 12_000, launch=2), kernel(517_100, 50, 2)]
    path = written(tmp_path / "run.jsonl", records + call("cuCtxSynchronize", 12_100, 13_000))
    with pytest.raises(ClockError, match=r"the work of launch \d \(k\) would end [\d]+ ns after the call"):
        map_of(path)
    assert map_of(path, **{GPU: 5}) is not None


EXITS = [
    {"type": "gpu_thread_exit", "block": [0, 0, 0], "thread": [lane, 0, 0], "ts_ns": 10**18 + ns}
    for lane, ns in ((0, 0), (1, 4), (31, 900))
]
HOST = [
    {"ts": at, "type": "userspace", "tid": 7, "name": name, "phase": phase}
    for at, name, phase in (
        (1.0, "cuLaunchKernel", "B"), (1.1, "cuLaunchKernel", "E"),
        (1.2, "cuCtxSynchronize", "B"), (1.3, "cuCtxSynchronize", "E"),
    )
]  # fmt: skip


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in records))
    return path


def shown(inputs: list[Path], **options: Any) -> tuple[str, list[str]]:
    out = inputs[0].with_suffix(".txt.out")
    account = tracepipe.convert(inputs, out, "text", tracepipe.ConvertOptions(**options), force=True)
    return out.read_text(), [*account_lines(account)]


@pytest.mark.parametrize(
    ("key", "is_nested"), [("ts_ns", False), ("globaltimer_ns", False), ("globaltimer_ns", True)]
)
def test_threads_of_a_layered_file_are_placed_by_its_launches(
    key: str, is_nested: bool, tmp_path: Path
) -> None:
    times: list[dict[str, Any]] = [{key: one["ts_ns"]} for one in EXITS]
    exits = [
        ({"args": time} if is_nested else time) | {name: one[name] for name in ("type", "block", "thread")}
        for time, one in zip(times, EXITS, strict=True)
    ]
    path = lines(tmp_path / "run.jsonl", [*HOST[:2], *exits, *HOST[2:]])
    text, said = shown([path])
    assert "clock globaltimer:0: placed by its 1 launch, within 149553 ns" in said
    assert f"{149_550:16}             thread exit thread=[0,0,0] source_ns=1000000000000000000" in text
    assert f"{150_450:16}             thread exit thread=[31,0,0] source_ns=1000000000000000900" in text
    text, said = shown([path], assume_offset={GPU: -(10**18) + 1_150_000})
    assert f"{150_000:16}             thread exit thread=[0,0,0] source_ns=1000000000000000000" in text


def test_threads_of_a_layered_file_alone_keep_their_clock(tmp_path: Path) -> None:
    text, _ = shown([lines(tmp_path / "run.jsonl", EXITS)])
    assert text.startswith("trace clock globaltimer:0, start 1000000000000000000 ns")
    assert f"{900:16}             thread exit thread=[31,0,0]" in text


def test_work_without_a_number_is_not_placed_where_calls_were_lost(tmp_path: Path) -> None:
    lost = {"type": "lost_events", "data": {"events": 3}}
    _, said = shown([lines(tmp_path / "run.jsonl", [*HOST, *EXITS, lost])])
    assert any("3 events on globaltimer:0, which has no clock pairs" in line for line in said)


def test_a_bad_reading_of_a_gpu_s_clock_names_its_line_and_field(tmp_path: Path) -> None:
    _, said = shown([lines(tmp_path / "run.jsonl", [*HOST, EXITS[0], EXITS[1] | {"ts_ns": -1}])])
    assert any("run.jsonl:6: ts_ns: must be an integer from 0 to" in line for line in said)


@pytest.mark.parametrize("is_first", [False, True])
def test_the_text_of_kernelretsnoop_is_placed_by_the_launches_of_another_file(
    is_first: bool, tmp_path: Path
) -> None:
    host, gpu = lines(tmp_path / "host.jsonl", HOST), tmp_path / "snoop.txt"
    gpu.write_text("".join(f"Thread ({one['thread'][0]}, 0, 0) timestamp: {one['ts_ns']}\n" for one in EXITS))
    inputs = [gpu, host] if is_first else [host, gpu]
    text, said = shown(inputs)
    assert f"{149_550:16}             thread exit occurrence=0 thread=[0,0,0]" in text
    assert any(line.endswith("within 149551 ns") and "the launches of host.jsonl" in line for line in said)
    text, said = shown(inputs, assume_offset={GPU: -(10**18) + 1_150_000})
    assert f"{150_000:16}             thread exit" in text
    also = tmp_path / "also.txt"
    also.write_text("Thread (2, 0, 0) timestamp: 1000000000000001000\n")
    text, _ = shown([*inputs, also])
    assert f"{149_500:16}             thread exit occurrence=0 thread=[0,0,0]" in text
    assert f"{150_500:16}             thread exit occurrence=0 thread=[2,0,0]" in text
    also.write_text("Thread (2, 0, 0) timestamp: 5\n")
    with pytest.raises(ClockError, match=r"snoop\.txt and also\.txt|also\.txt and snoop\.txt"):
        shown([*inputs, also])
    gpu.write_text(f"Thread (0, 0, 0) timestamp: 5\nThread (1, 0, 0) timestamp: {S}\n")
    with pytest.raises(ClockError, match=r"cannot be placed by the launches of host\.jsonl"):
        shown(inputs)


def test_a_report_on_warps_needs_no_other_clock(tmp_path: Path) -> None:
    """Nothing launches them here: reports that compare clocks say what they leave out."""
    path = tmp_path / "run.jsonl"
    lines_of = without_pairs(FIXTURES / "capture-h200" / "input.jsonl")
    kept = [line for line in lines_of if json.loads(line)["type"] != "userspace"]
    path.write_text(
        "\n".join([*kept, json.dumps({"ts_ns": 5, "type": "syscall", "name": "read", "phase": "I"})])
    )

    def report(name: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "tracepipe", name, path], capture_output=True, text=True, check=True
        )
        return " ".join(done.stdout.split())

    assert "vectorAdd 3 16 384 2.08 µs" in report("warps")
    gaps = report("gaps")
    assert "no work of a GPU (kernel, copy, warp) could be placed in time" in gaps
    assert "was recorded" not in gaps
    assert "left out: 387 events on globaltimer:0" in gaps
