"""The description of a recording and of what it lacks, which every report states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from tracepipe.event.model import LAYERS
from tracepipe.recording.account import fit_text
from tracepipe.reports.frames.run import Facts
from tracepipe.units import agree, counted, duration_text

_OUTCOMES = {
    "unclosed": "call|calls had no end: it|they is|are counted, but its|their length is not known",
    "no_begin": "end|ends had no begin: it|they is|are not counted as a_call|calls",
    "overlaps": "slice|slices does|do not nest in the order of its|their events: callers are found by times",
}


def heading(facts: Facts) -> str:
    """The heading of a recording: its path, source, length and number of events."""
    counts = ", ".join(f"{facts.counts[layer]:,} {layer}" for layer in LAYERS if facts.counts[layer])
    length = duration_text(facts.end_ns - facts.start_ns)
    return f"{facts.path}: {facts.source}, {length}, {counts or 'no events'}"


def lacks(facts: Facts) -> Iterator[str]:
    """Lines about what the recording lacks, the most important last: problems, clocks, losses."""
    yield from facts.remarks(_OUTCOMES)
    yield from _clocks(facts)
    for layer, count in facts.losses.items():
        yield f"lost: {count} {layer} {agree(count, 'event|events happened and was|were not recorded')}"


def _clocks(facts: Facts) -> Iterator[str]:
    for known in facts.clocks:
        clock, method = known["clock"], known["method"]
        if method == "assumed":
            yield f"clock {clock}: placed by an assumed offset, error unknown"
        elif method == "same":
            yield f"clock {clock}: not related to any other clock"
        else:
            by = f"{fit_text(known)}, " if method == "fit" else ""
            yield f"clock {clock}: {by}within {known['bound_ns']} ns of {facts.trace_clock}"
    for clock, count in facts.unplaced.items():
        yield (
            f"left out: {counted(count, 'event|events')} on {clock}, which has no clock pairs; "
            f"--assume-offset {clock}=NS places {agree(count, 'it|them')}"
        )


def as_json(facts: Facts) -> dict[str, Any]:
    """The facts as JSON values; times are ns on the trace clock."""
    keys = ("path", "source", "trace_clock", "start_ns", "end_ns", "counts", "losses", "skipped", "ambiguous")
    data = {key: getattr(facts, key) for key in (*keys, "unplaced", "clocks", "notes")}
    outcomes = {name: getattr(facts.outcomes, name) for name in _OUTCOMES}
    return data | {
        "dur_ns": facts.end_ns - facts.start_ns,
        "command": facts.header.get("command"),
        "outcomes": outcomes,
        "problems": [asdict(problem) for problem in facts.problems],
    }
