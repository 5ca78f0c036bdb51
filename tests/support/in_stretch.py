"""What of a timeline lies in a stretch of its time, to compare a part of a recording with the whole."""

from __future__ import annotations

import io
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

from tests.golden.seen import ReplayFormat, Seen, replay
from tracepipe.recording.convert import Conversion, ConversionOptions

# Part and whole may differ in this: an overlap row gets its number when it is first needed, and the
# instants on the tracks of capture and problems describe the file, not the run.
_NAME = re.compile(r"^[^/]*(?= \d+$)")
_OVERLAP = re.compile(r" \(overlap \d+\)$")
_PROBLEMS, _CAPTURE = ("tracepipe", "problems"), ("tracepipe", "capture")


def seen_of(path: Path | str, **options: Any) -> Seen:
    """What is drawn of a recording."""
    kept = ReplayFormat("text")
    Conversion(str(path), cast(Any, kept), ConversionOptions(**options)).run(io.BytesIO())
    return replay(kept.writer.steps)


def in_stretch(seen: Seen, start_ns: int, end_ns: int) -> Counter[str]:
    """Slices, instants and values of counters that are seen between two times.

    A slice that has no end is drawn to the end of its file, wherever that is. Threads are called as in the
    last of their events that a file has, and are the same by their numbers. Rows of GPUs that are made of
    ranges of threads reach from the first to the last work that a file has of a range.
    """
    found: Counter[str] = Counter()
    for path, slices in seen.slices:
        if path == _PROBLEMS or any(": annotations of " in label for label in path):
            continue
        name = " / ".join(_NAME.sub("", _OVERLAP.sub("", label)) for label in path)
        for one in slices:
            if path == _CAPTURE and not one.name.startswith("window "):
                continue
            if one.ts_ns >= end_ns or not (one.ts_ns + one.dur_ns > start_ns or one.ts_ns >= start_ns):
                continue
            ended_ns = None if one.args.get("unclosed") else one.ts_ns + one.dur_ns
            found[f"{name}: {one.ts_ns}–{ended_ns} {one.name!r} {sorted(one.args.items())}"] += 1
    for path, values in seen.counters:
        found += _values(" / ".join(_NAME.sub("", label) for label in path), values, start_ns, end_ns)
    return found


def _values(name: str, values: list[tuple[int, float]], start_ns: int, end_ns: int) -> Counter[str]:
    """The values of a counter, first that which it has at the start, if it is not 0."""
    found: Counter[str] = Counter()
    before = [value for ts_ns, value in values if ts_ns <= start_ns]
    if before and before[-1]:
        found[f"{name}: at the start {before[-1]}"] += 1
    for ts_ns, value in values:
        if start_ns < ts_ns < end_ns:
            found[f"{name}: {ts_ns} = {value}"] += 1
    return found
