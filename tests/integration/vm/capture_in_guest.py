"""Runs inside the virtual machine: captures the stand-in twice, sends the first file and the outcome out."""

from __future__ import annotations

import json
import subprocess
import tty
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracepipe.capture import CaptureRequest, CaptureSummary, bpf, capture
from tracepipe.capture.planning import layers_here

COMMAND = ["./vec_add", "-n", "1000", "-i", "3"]
links: Counter[str] = Counter(multi=0, single=0)
messages: list[str] = []


def counting(kind: str, link: Callable[..., int]) -> Callable[..., int]:
    def counted(*arguments: Any) -> int:
        made = link(*arguments)
        links[kind] += 1
        return made

    return counted


def captured(path: str, layers: tuple[str, ...]) -> CaptureSummary:
    with open(path, "wb") as sink:
        return capture(CaptureRequest(COMMAND, layers), sink, notify=messages.append)


bpf.link_kprobes = counting("multi", bpf.link_kprobes)
bpf.link_one_kprobe = counting("single", bpf.link_one_kprobe)
first = captured("run.jsonl", layers_here())
outcome = {"detach_ns": first.detach_ns, "losses": first.losses, "links": dict(links)}
links.clear()

Path("/proc/sys/kernel/kptr_restrict").write_text("2")
with subprocess.Popen(["./vec_add", "-n", "10", "-i", "100000000"], stdout=subprocess.DEVNULL) as other:
    again = captured("again.jsonl", ("kernel",))
    outcome["again"] = {"counts": again.counts, "links": dict(links)}
    assert other.poll() is None
    other.kill()
outcome["messages"] = messages
with open("/dev/ttyS1", "r+b", buffering=0) as port:
    tty.setraw(port)
    for part in (Path("run.jsonl").read_bytes(), json.dumps(outcome).encode() + b"\n"):
        while part:
            part = part[port.write(part) :]
