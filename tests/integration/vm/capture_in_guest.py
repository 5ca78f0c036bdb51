"""Runs inside the virtual machine: captures the stand-in with all layers, and sends file and outcome out."""

from __future__ import annotations

import json
import tty
from pathlib import Path

from tracepipe.capture import CaptureRequest, capture
from tracepipe.capture.driver import layers_here

messages: list[str] = []
with open("run.jsonl", "wb") as sink:
    request = CaptureRequest(["./vec_add", "-n", "1000", "-i", "3"], layers_here())
    summary = capture(request, sink, notify=messages.append)
outcome = {"messages": messages, "detach_ns": summary.detach_ns, "losses": summary.losses}
with open("/dev/ttyS1", "r+b", buffering=0) as port:
    tty.setraw(port)
    for part in (Path("run.jsonl").read_bytes(), json.dumps(outcome).encode() + b"\n"):
        while part:
            part = part[port.write(part) :]
