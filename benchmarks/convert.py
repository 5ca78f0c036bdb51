"""Compares `tracepipe convert` with perfetto.trace_builder fed by json.loads, on one file in one run.

    python benchmarks/convert.py [--unique] [EVENTS ...]        default: 100000 1000000

Both write the same slices, instants, counters, names and arguments for the same recording; the figures are
events per second of processor time, peak memory and bytes, and the ratios between the two. Each runs in a
process of its own, start included, three times in turn, and the best time counts.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

WARPS_A_BATCH = 1024
HERE = Path(__file__).resolve()


def write_recording(path: Path, events: int, unique: bool) -> None:
    """A recording with the mix of a CUDA program: calls with ioctls, scheduling, kernels, warps."""
    rng = random.Random(1)
    calls = ["cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuLaunchKernel", "cuCtxSynchronize", "cuMemcpyDtoH_v2"]
    calls += [f"cuFunction{n}" for n in range(40)]
    ts_ns, made, launch = 5_000_000_000_000, 0, 0
    header = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]}
    header["start"] = {"monotonic_ns": ts_ns, "boottime_ns": ts_ns + 7, "realtime_ns": 1_800_000_000 * 10**9}
    with path.open("w") as out:

        def put(**record: object) -> None:
            out.write(json.dumps(record, separators=(",", ":")) + "\n")

        put(**header)
        while made < events:
            ts_ns += rng.randrange(300, 3000)
            tid = 4242 + rng.randrange(4)
            # Threads stay on their processor for a while, and a program comes back to the same calls with
            # the same few buffers. `unique` is the worst case, where no call is like another.
            who = {"pid": 4242, "tid": tid, "cpu": (tid + made // 50_000) % 8}
            number = rng.randrange(len(calls))
            name, args = calls[number], {}
            if unique:
                args = {"args": {"size": rng.randrange(1 << 24), "ptr": rng.randrange(1 << 47)}}
            elif number < 5:
                args = {"args": {"size": 4096 << rng.randrange(4), "ptr": 0x7F00_0000_0000 + number * 512}}
            put(ts_ns=ts_ns, type="userspace", name=name, phase="B", **who, **args)
            cmd = {"fd": 5, "cmd": 3221767722, "request": "NV_ESC_RM_ALLOC"}
            put(ts_ns=ts_ns + 100, type="syscall", name="ioctl", phase="B", **who, args=cmd)
            put(ts_ns=ts_ns + 150, type="scheduler", name="wakeup", phase="I", **who, args={"by_tid": 77})
            put(ts_ns=ts_ns + 200, type="syscall", name="ioctl", phase="E", **who, args={"result": 0})
            end = {"result": 0, "result_name": "CUDA_SUCCESS"}
            put(ts_ns=ts_ns + 300, type="userspace", name=name, phase="E", **who, args=end)
            made += 5
            if rng.random() < 0.002:
                launch += 1
                kernel = {"ts_ns": ts_ns + 400, "name": "vectorAdd", "launch": launch, "gpu": 0, "stream": 7}
                put(**kernel, type="gpu_kernel", phase="X", dur_ns=WARPS_A_BATCH * 40)
                put(
                    **kernel, type="gpu_warp", grid=[WARPS_A_BATCH // 8, 1, 1], block=[256, 1, 1],
                    warp=list(range(WARPS_A_BATCH)),
                    sm=[n % 132 for n in range(WARPS_A_BATCH)], slot=[n // 132 for n in range(WARPS_A_BATCH)],
                    # A block's eight warps enter together, and %globaltimer steps by 32 ns.
                    entry_ns=[n // 8 * 32 for n in range(WARPS_A_BATCH)],
                    exit_ns=[512 + n % 3 * 32 for n in range(WARPS_A_BATCH)],
                )  # fmt: skip
                made += 1 + WARPS_A_BATCH
                ts_ns += WARPS_A_BATCH * 40


def trace_builder(source: str, target: str) -> None:
    """The same trace with perfetto.trace_builder, as its documentation shows it."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    tracks: dict[object, int] = {}
    with Path(source).open() as lines, Path(target).open("wb") as out:
        builder = StreamingTraceProtoBuilder(out)

        def track(key: object, name: str) -> int:
            uuid = tracks.get(key)
            if uuid is None:
                uuid = tracks[key] = len(tracks) + 1
                packet = builder.create_packet()
                packet.track_descriptor.uuid, packet.track_descriptor.name = uuid, name
                builder.write_packet(packet)
            return uuid

        def event(
            kind: int, ts_ns: int, uuid: int, name: str, args: dict, flow: int = 0, value: int = 0
        ) -> None:
            packet = builder.create_packet()
            packet.timestamp = ts_ns
            packet.trusted_packet_sequence_id = 1
            e = packet.track_event
            e.type, e.track_uuid = kind, uuid
            if name:
                e.name = name
            for key, given in args.items():
                a = e.debug_annotations.add()
                a.name = key
                if isinstance(given, int):
                    a.int_value = given
                elif isinstance(given, str):
                    a.string_value = given
                else:
                    for item in given:
                        a.array_values.add().int_value = item
            if flow:
                e.flow_ids.append(flow)
            if kind == TrackEvent.TYPE_COUNTER:
                e.counter_value = value
            builder.write_packet(packet)

        changes: dict[int, int] = {}
        for line in lines:
            r = json.loads(line)
            kind = r["type"]
            if kind == "header":
                continue
            if kind == "gpu_warp":
                for n, warp in enumerate(r["warp"]):
                    uuid = track((r["sm"][n], r["slot"][n]), f"SM {r['sm'][n]} slot {r['slot'][n]}")
                    begin = r["ts_ns"] + r["entry_ns"][n]
                    end = begin + r["exit_ns"][n]
                    name = f"{r['name']} block {warp // 8} warp {warp % 8}"
                    event(TrackEvent.TYPE_SLICE_BEGIN, begin, uuid, name, {"source_ns": begin})
                    event(TrackEvent.TYPE_SLICE_END, end, uuid, "", {})
                    changes[begin] = changes.get(begin, 0) + 1
                    changes[end] = changes.get(end, 0) - 1
                active, uuid = 0, track("active", "active warps")
                for ts_ns in sorted(changes):
                    active += changes[ts_ns]
                    event(TrackEvent.TYPE_COUNTER, ts_ns, uuid, "", {}, value=active)
                changes.clear()
                continue
            if kind == "gpu_kernel":
                uuid = track("stream", "stream 7")
                event(
                    TrackEvent.TYPE_SLICE_BEGIN,
                    r["ts_ns"],
                    uuid,
                    r["name"],
                    {"launch": r["launch"]},
                    r["launch"],
                )
                event(TrackEvent.TYPE_SLICE_END, r["ts_ns"] + r["dur_ns"], uuid, "", {})
                continue
            uuid = track((kind, r["tid"]), f"{kind} {r['tid']}")
            if r["phase"] == "E":
                event(TrackEvent.TYPE_SLICE_END, r["ts_ns"], uuid, "", r["args"])
                continue
            phase = TrackEvent.TYPE_SLICE_BEGIN if r["phase"] == "B" else TrackEvent.TYPE_INSTANT
            flow = r["tid"] if r["name"] == "ioctl" or kind == "userspace" else 0
            event(phase, r["ts_ns"], uuid, r["name"], {**r.get("args", {}), "cpu": r["cpu"]}, flow)


def tracepipe(source: str, target: str) -> None:
    """The same trace with this program."""
    from tracepipe.cli import app

    app(["convert", source, "-o", target, "--force"], standalone_mode=False)


def measured(side: str, source: Path, target: Path) -> tuple[float, float, int]:
    """Processor seconds, peak MB and bytes of one side in a process of its own."""
    command = [sys.executable, str(HERE), "--side", side, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak_mb = done.stdout.split()[-2:]
    return float(seconds), float(peak_mb), target.stat().st_size


def compare(events: int, unique: bool) -> None:
    """Print both sides at one size, and the ratios."""
    print(f"{events} events" + (", every call with arguments of its own" if unique else ""))
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "run.jsonl")
        write_recording(source, events, unique)
        best: dict[str, tuple[float, float, int]] = {}
        for _ in range(3):
            for side in ("trace_builder", "tracepipe"):
                seen = measured(side, source, Path(folder, f"{side}.pftrace"))
                best[side] = min(best.get(side, seen), seen)
    for side, (seconds, peak_mb, size_bytes) in best.items():
        rate = events / seconds
        print(f"  {side:<14} {rate:>10.0f} events/s  {peak_mb:>6.1f} MB peak  {size_bytes:>11} bytes")
    ours, theirs = best["tracepipe"], best["trace_builder"]
    print(f"  ratio          {theirs[0] / ours[0]:.2f}x as fast, {ours[2] / theirs[2]:.3f}x the bytes")


def main() -> None:
    """Run one side (for `measured`) or the whole comparison."""
    if sys.argv[1:2] == ["--side"]:
        {"trace_builder": trace_builder, "tracepipe": tracepipe}[sys.argv[2]](sys.argv[3], sys.argv[4])
        used = resource.getrusage(resource.RUSAGE_SELF)
        print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)
        return
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} processors")
    unique = "--unique" in sys.argv
    for events in [int(n) for n in sys.argv[1:] if n.isdigit()] or [100_000, 1_000_000]:
        compare(events, unique)


if __name__ == "__main__":
    main()
