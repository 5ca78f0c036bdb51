"""Recordings written line by line, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracepipe.store.run import Run

GPU_CLOCK = "globaltimer:0"
HEADER: dict[str, Any] = {
    "type": "header",
    "schema": "tracepipe/1",
    "clock": "monotonic",
    "clocks": ["monotonic", GPU_CLOCK],
    "start": {"monotonic_ns": 1_000},
    "command": ["./vec_add"],
}
PAIR = {"type": "clock", "clock": GPU_CLOCK, "source_ns": 500_000, "host_lo_ns": 1_990, "host_hi_ns": 2_010}
"""500 000 ns of the GPU's clock are 2 000 ns of the host's, within 10 ns."""

Load = Callable[..., "Run"]


def event(phase: str, ts_ns: int, name: str, layer: str = "userspace", **fields: Any) -> dict[str, Any]:
    """An event of thread 1 of process 1."""
    return {"ts_ns": ts_ns, "type": layer, "name": name, "phase": phase, "pid": 1, "tid": 1, **fields}


def span(start_ns: int, end_ns: int, name: str, layer: str = "userspace", **fields: Any) -> dict[str, Any]:
    """An event with its length."""
    return event("X", start_ns, name, layer, dur_ns=end_ns - start_ns, **fields)


def loader(folder: Path) -> Load:
    """Loads records, or text lines, from a file with a header."""
    from tracepipe.store.run import load_run

    def load(*records: dict[str, Any] | str, **options: Any) -> Run:
        return load_run(str(write(folder / "run.jsonl", *records)), **options)

    return load


def write(path: Path, *records: dict[str, Any] | str) -> Path:
    """Write a recording of these records, or text lines, after a header."""
    lines = (line if isinstance(line, str) else json.dumps(line) for line in (HEADER, *records))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path
