"""Writes recordings of any size for the benchmarks."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

WARPS_A_BATCH = 1024
WARPS_A_LAUNCH = 8192
KERNELS = ("vectorAdd", "triton_poi_fused_clone_transpose_0", "reduce_kernel", "sgemm_128x64")
_KINETO = Path(__file__).parents[1] / "fixtures" / "merged-pytorch" / "kineto.json.zst"
_KINETO_US, _KINETO_NUMBERS = 15_000, 1_000_000
_START_NS = 5_000_000_000_000
_SMS, _SLOTS, _WARPS_A_BLOCK = 132, 64, 4
_GPU_NS = 1_795_310_000_000_000_000


def write_mixed(path: Path, events: int, *, unique: bool = False) -> None:
    """A recording with the mix of a CUDA program: calls with ioctls, scheduling, kernels, warps."""
    with path.open("w") as out:
        start = {
            "monotonic_ns": _START_NS,
            "boottime_ns": _START_NS + 7,
            "realtime_ns": 1_800_000_000 * 10**9,
        }
        out.write(_line(_header(["monotonic"], start)))
        out.writelines(_mixed(events, unique))


def write_warps(path: Path, warps: int, warps_a_launch: int = WARPS_A_LAUNCH) -> None:
    """A recording of launches with every warp, as an H200 runs and as it is recorded: the GPU's own time, in
    steps of 32 ns, with pairs of both clocks and the cycles of each SM.
    """
    with path.open("w") as out:
        start = {"monotonic_ns": _START_NS, "realtime_ns": _GPU_NS}
        out.write(_line(_header(["monotonic", "globaltimer:0"], start)))
        out.writelines(_launches(warps, warps_a_launch))


def write_lone_warps(path: Path, launches: int) -> None:
    """The same with launches of one warp each."""
    write_warps(path, launches, 1)


def write_layered(
    path: Path, lines: int, *, nested: bool = False, compressed: bool = False, printed: bool = False
) -> None:
    """The calls of `write_mixed` as the lines of a layered tracer, which has arguments among the other keys,
    or `nested`, in an object. `printed`: in the records of `bpftrace -f json`.
    """
    mixed = (text for text in _mixed(2 * lines, unique=False) if '"gpu' not in text)
    with zstandard.open(path, "wt") if compressed else path.open("w") as out:
        for number, text in enumerate(itertools.islice(mixed, lines), 1):
            event = json.loads(text)
            args, ms = event.pop("args", {}), (event.pop("ts_ns") - _START_NS) / 1e6
            if event["phase"] == "I":
                del event["phase"]
            more = {"comm": "python3", **({"args": args} if nested else args)}
            line = f'{{"event_id":{number},"ts":{ms:.6f},{_line(event | more)[1:]}'
            out.write(json.dumps({"type": "printf", "data": line}) + "\n" if printed else line)


def write_probes(path: Path, lines: int) -> None:
    """The lines of bpftrace's one-liners: times and probes."""
    library = "/lib/x86_64-linux-gnu/libcuda.so.1"
    probes = (f"uprobe:{library}:cuLaunchKernel", "kprobe:nv_schedule_work", "kretprobe:nv_schedule_work")
    with path.open("w") as out:
        out.writelines(f"[{_START_NS + 500 * at}] {probes[at % len(probes)]}\n" for at in range(lines))


def write_exits(path: Path, lines: int) -> None:
    """The text of bpftime's kernelretsnoop: the exit of every thread."""
    with path.open("w") as out:
        out.writelines(
            f"Thread ({at % 256}, 0, 0) timestamp: {_GPU_NS + at // 64 * 32}\n" for at in range(lines)
        )


def write_threads(path: Path, lines: int) -> None:
    """The text of bpftime's kernel_trace: the entry of every thread of one kernel."""
    with path.open("w") as out:
        for number in range(lines):
            block, thread = divmod(number, 256)
            out.write(
                f"[kernel_trace] ts={_GPU_NS + number // 64 * 32} block=({block},0,0) thread=({thread},0,0)\n"
            )
        out.write(f"[kernel_trace] total events: {lines}\n")


def write_kineto(path: Path, times: int) -> None:
    """A trace of PyTorch's profiler: the real one of the fixtures, of 540 events, one after the other. The
    names of processes and threads come once, as in a real one.
    """
    with zstandard.open(_KINETO, "rb") as file:
        text = file.read()
    start, end = text.index(b"[", text.index(b'"traceEvents"')) + 1, text.rindex(b"]")
    once = text[start:end]
    again = re.sub(rb'\{\s*"name": "\w+", "ph": "M",.*?\}\s*\},?', b"", once, flags=re.S)
    with path.open("wb") as out:
        out.write(text[:start])
        for at in range(times):
            out.write(b"," + _shifted(again.rstrip().removesuffix(b","), at) if at else once)
        out.write(text[end:])


def _shifted(events: bytes, at: int) -> bytes:
    """The events again, moved by a multiple of their length, with new numbers."""
    later = re.sub(
        rb'("ts": )(\d+)', lambda found: b"%b%d" % (found[1], int(found[2]) + at * _KINETO_US), events
    )
    return re.sub(
        rb'("(?:correlation|External id|id)": ?)(\d+)',
        lambda found: b"%b%d" % (found[1], int(found[2]) + at * _KINETO_NUMBERS),
        later,
    )


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


def _header(clocks: list[str], start: dict[str, int]) -> dict[str, Any]:
    return {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": clocks, "start": start}


def _mixed(events: int, unique: bool) -> Iterator[str]:
    rng = random.Random(1)
    calls = ["cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuLaunchKernel", "cuCtxSynchronize", "cuMemcpyDtoH_v2"]
    calls += [f"cuFunction{n}" for n in range(40)]
    ts_ns, made, launch = _START_NS, 0, 0
    while made < events:
        ts_ns += rng.randrange(300, 3000)
        tid = 4242 + rng.randrange(4)
        # Threads stay on their processor for a while, and a program comes back to the same calls with the
        # same few buffers. `unique` is the worst case, where no call is like another.
        who = f'"pid":4242,"tid":{tid},"cpu":{(tid + made // 50_000) % 8}'
        number = rng.randrange(len(calls))
        call, args = f'"type":"userspace","name":"{calls[number]}"', ""
        if unique:
            args = f',"args":{{"size":{rng.randrange(1 << 24)},"ptr":{rng.randrange(1 << 47)}}}'
        elif number < 5:
            args = f',"args":{{"size":{4096 << rng.randrange(4)},"ptr":{0x7F00_0000_0000 + number * 512}}}'
        request = '"args":{"fd":5,"cmd":3221767722,"request":"NV_ESC_RM_ALLOC"}'
        woken = '"type":"scheduler","name":"wakeup"'
        ioctl, result = '"type":"syscall","name":"ioctl"', '"args":{"result":0'
        yield f'{{"ts_ns":{ts_ns},{call},"phase":"B",{who}{args}}}\n'
        yield f'{{"ts_ns":{ts_ns + 100},{ioctl},"phase":"B",{who},{request}}}\n'
        yield f'{{"ts_ns":{ts_ns + 150},{woken},"phase":"I",{who},"args":{{"by_tid":77}}}}\n'
        yield f'{{"ts_ns":{ts_ns + 200},{ioctl},"phase":"E",{who},{result}}}}}\n'
        yield f'{{"ts_ns":{ts_ns + 300},{call},"phase":"E",{who},{result},"result_name":"CUDA_SUCCESS"}}}}\n'
        made += 5
        if rng.random() < 0.002:
            launch += 1
            yield from _small_launch(ts_ns + 400, launch)
            made += 1 + WARPS_A_BATCH
            ts_ns += WARPS_A_BATCH * 40


def _small_launch(ts_ns: int, launch: int) -> Iterator[str]:
    kernel = {"ts_ns": ts_ns, "name": "vectorAdd", "launch": launch, "gpu": 0, "stream": 7}
    yield _line({**kernel, "type": "gpu_kernel", "phase": "X", "dur_ns": WARPS_A_BATCH * 40})
    each = range(WARPS_A_BATCH)
    # A block's eight warps enter together, and %globaltimer steps by 32 ns.
    columns = {
        "warp": list(each), "sm": [n % _SMS for n in each], "slot": [n // _SMS for n in each],
        "entry_ns": [n // 8 * 32 for n in each], "exit_ns": [512 + n % 3 * 32 for n in each],
    }  # fmt: skip
    sizes = {"grid": [WARPS_A_BATCH // 8, 1, 1], "block": [256, 1, 1]}
    yield _line({**kernel, "type": "gpu_warp", **sizes, **columns})


def _launches(warps: int, warps_a_launch: int) -> Iterator[str]:
    rng = random.Random(1)
    since_ns, launch, paired_ns = 1_000_000, 0, -(10**9)
    warps_a_block = min(_WARPS_A_BLOCK, warps_a_launch)
    while launch * warps_a_launch < warps:
        host_ns = _START_NS + since_ns + since_ns * 7 // 1_000_000
        if since_ns - paired_ns > 250_000_000:
            paired_ns = since_ns
            pair = {
                "source_ns": _GPU_NS + since_ns // 32 * 32,
                "host_lo_ns": host_ns - 400,
                "host_hi_ns": host_ns + 400,
            }
            yield _line({"type": "clock", "clock": "globaltimer:0", **pair})
        launch += 1
        call = {"type": "userspace", "name": "cuLaunchKernel", "pid": 42, "tid": 42, "cpu": 3}
        yield _line({"ts_ns": host_ns - 9000, **call, "phase": "B", "launch": launch})
        yield _line({"ts_ns": host_ns - 5000, **call, "phase": "E", "args": {"result": 0}})
        columns, end_ns = _launch(rng, since_ns, warps_a_launch, warps_a_block)
        kernel = {
            "ts_ns": _GPU_NS + since_ns // 32 * 32,
            "name": KERNELS[launch % 4],
            "clock": "globaltimer:0",
            "gpu": 0,
            "stream": 7,
            "launch": launch,
            "pid": 42,
            "grid": [warps_a_launch // warps_a_block, 1, 1],
            "block": [32 * warps_a_block, 1, 1],
        }
        yield _line({**kernel, "type": "gpu_kernel", "phase": "X", "dur_ns": end_ns})
        yield _line({**kernel, "type": "gpu_warp", **columns})
        since_ns += end_ns + 20_000


def _launch(
    rng: random.Random, since_ns: int, warps: int, warps_a_block: int
) -> tuple[dict[str, list[int]], int]:
    """The columns of a launch's warps, and when the last leaves: blocks take turns on the slots of SMs."""
    free_ns = {sm: [0] * _SLOTS for sm in range(min(_SMS, warps // warps_a_block))}
    names = ("warp", "sm", "slot", "entry_ns", "entry_clk", "exit_ns", "exit_clk")
    rows = []
    for number in range(0, warps, warps_a_block):
        block = number // warps_a_block
        sm, first = block % _SMS, block // _SMS % (_SLOTS // warps_a_block) * warps_a_block
        start_ns = max(free_ns[sm][first : first + warps_a_block]) + rng.randrange(60, 900)
        for at in range(warps_a_block):
            entry_ns, stay_ns = start_ns + 7 * at, 2000 + rng.randrange(1500)
            free_ns[sm][first + at] = entry_ns + stay_ns + 70
            read_ns = entry_ns // 32 * 32
            left_ns = (entry_ns + stay_ns) // 32 * 32 - read_ns
            cycles = (since_ns + entry_ns) * 1755 // 1000 + sm * 1_000_003
            rows.append((number + at, sm, first + at, read_ns, cycles, left_ns, stay_ns * 1755 // 1000))
    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    return columns, max(entry + left for _, _, _, entry, _, left, _ in rows)
