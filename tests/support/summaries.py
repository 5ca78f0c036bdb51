"""What captures that did not happen say at their end. No pytest here: processes that send it start sooner."""

from __future__ import annotations

from tracepipe.tracer.summary import CaptureSummary, Recording

SUMMARY = CaptureSummary(
    counts={"syscall": 4}, losses={}, cpu_losses={}, filtered={}, ended_by="stopped", exit_code=0,
    wall_ns=1, attach_ns=1, detach_ns=1, engine="none",
)  # fmt: skip
LAST = Recording("x-2.jsonl", {}, {}, {}, {}, 10**9, "stopped", 10**6)
