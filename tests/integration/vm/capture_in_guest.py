"""Runs inside the virtual machine: captures the stand-in with each method, sends what was recorded out."""

from __future__ import annotations

import json
import subprocess
import tty
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracepipe.errors import TracepipeError
from tracepipe.tracer import CaptureRequest, CaptureSummary, capture
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.find import functions
from tracepipe.tracer.plan import layers_here

COMMAND = ["./vec_add", "-n", "1000", "-i", "3"]
# What bpftrace is given: an emulated processor takes long to compile all of the driver API.
ONLY = ("cuCtx*", "cuMem*", "cuModuleGetFunction", "cuLaunchKernel", "nv*")
links: Counter[str] = Counter(multi=0, single=0)
messages: list[str] = []


def counting(kind: str, link: Callable[..., int]) -> Callable[..., int]:
    def counted(*arguments: Any) -> int:
        made = link(*arguments)
        links[kind] += 1
        return made

    return counted


def captured(path: str, layers: tuple[str, ...], **options: Any) -> CaptureSummary:
    with open(path, "wb") as sink:
        return capture(
            CaptureRequest(COMMAND, layers, **{"method": "bcc", **options}), sink, notify=messages.append
        )


functions._TIMEOUT_S = 60  # this processor is emulated, and others use the one that does it
bpf.link_kprobes = counting("multi", bpf.link_kprobes)
bpf.link_one_kprobe = counting("single", bpf.link_one_kprobe)
first = captured("run.jsonl", layers_here(of_command=False))
outcome = {"detach_ns": first.detach_ns, "losses": first.losses, "links": dict(links)}
outcome["messages"] = list(messages)
links.clear()
captured("bpftrace.jsonl", layers_here(of_command=False), method="bpftrace", only=ONLY)
outcome["bpftrace"] = Path("bpftrace.jsonl").read_text().splitlines()
# To compile takes as long as all else here.
shipped = {"method": "prebuilt"}
captured("hooked.jsonl", (), hooks=("kprobe:nv_ioctl|nv*sched*",), **shipped)
hooked = [json.loads(line) for line in Path("hooked.jsonl").read_text().splitlines()]
outcome["hooked"] = Counter(record["name"] for record in hooked if "phase" in record)
try:
    captured("mistaken.jsonl", (), hooks=("kprobe:nvidia_unlocked_ioct",), **shipped)
except TracepipeError as error:
    outcome["mistaken"] = error.message
links.clear()

Path("/proc/sys/kernel/kptr_restrict").write_text("2")
# It pauses, as the emulated processors take turns: what it computes is time that the capture lacks.
BUSY = ["./vec_add", "-n", "10", "-i", "100000000", "--pause", "2000"]
with subprocess.Popen(BUSY, stdout=subprocess.DEVNULL) as other:
    outcome["again"] = {
        "counts": captured("again.jsonl", ("kernel",), **shipped).counts,
        "links": dict(links),
    }
    hidden = captured("hidden.jsonl", ("kernel",), method="bpftrace", only=("nv*",))
    outcome["hidden"] = hidden.counts
    assert other.poll() is None
    other.kill()
with open("/dev/ttyS1", "r+b", buffering=0) as port:
    tty.setraw(port)
    for part in (Path("run.jsonl").read_bytes(), json.dumps(outcome).encode() + b"\n"):
        while part:
            part = part[port.write(part) :]
