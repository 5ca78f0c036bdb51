"""Random events that mean nothing: every report takes them, and sees the spans that the timeline draws."""

from __future__ import annotations

import io
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, cast

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.seen import ReplayFormat
from tests.golden.test_anything import lines
from tracepipe.recording.convert import Conversion, ConvertOptions
from tracepipe.reports import REPORTS
from tracepipe.reports.frames.run import load_run
from tracepipe.reports.writing.rendering import report_lines as rendered

HEAD = {"type": "header", "schema": "tracepipe/1", "clock": "monotonic", "clocks": ["monotonic"]}
FRAMES = ("calls", "syscalls", "driver", "scheduler", "memory", "transfers", "kernels")
DRAWN = {"userspace", "syscall", "kernel", "scheduler", "memory", "transfer", "gpu"}


@settings(max_examples=60)
@given(st.lists(lines, max_size=40), st.integers(20, 200))
def test_every_report_takes_whatever_was_recorded(recording: list[Any], width: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in [HEAD, *recording]))
        kept = ReplayFormat()
        Conversion(str(path), cast(Any, kept), ConvertOptions()).run(io.BytesIO())
        run = load_run(str(path))
    for report in REPORTS.values():
        result = report.run(*[run] * len(report.inputs), report.options())
        assert rendered([run], result, width=width)
        orjson.dumps(result.as_json())
    found = Counter(
        row
        for frame in FRAMES
        for row in getattr(run, frame).select("name", "start_ns", "dur_ns").iter_rows()
    )
    seen = (one for _, slices in kept.writer.seen().slices for one in slices if one.category in DRAWN)
    assert found == Counter(
        (one.name, one.ts_ns, None if one.instant or "unclosed" in one.args else one.dur_ns) for one in seen
    )
    for frame in FRAMES:
        parents = getattr(run, frame)["parent"].to_list()
        assert all(parent is None or parent < at for at, parent in enumerate(parents))
