"""Random recordings: what was recorded is what the trace processor says, in both formats.

Unlike the golden cases these do not look at the layout's operations. A case is made of spans whose nesting is
known, written as `tracepipe/1` lines, converted, and asked for in SQL. Times are few, so that ties abound.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tracepipe.layout.merging
import tracepipe.readers.tracepipe1
from tests.golden.asked import Asked
from tests.golden.both import converted
from tracepipe.layout.tree import LAYER_TITLES

pytestmark = pytest.mark.slow

LAYERS = tuple(LAYER_TITLES)
# One call of the trace processor answers for this many recordings: each is a process and a GPU of its own.
RECORDINGS_AT_ONCE = 4
DEPTH_MAX = 3
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]

# (path, start, length, depth, name): the whole of what is drawn of a span.
Drawn = tuple[tuple[str, ...], int, int, int, str]


@dataclass(slots=True)
class Span:
    """A call with the calls inside it, all between `start_ns` and `end_ns`."""

    start_ns: int
    end_ns: int
    inner: list[Span] = field(default_factory=list)


@st.composite
def spans(draw: st.DrawFn, start_ns: int, end_ns: int, depth: int = 0) -> list[Span]:
    """Spans one after the other within a time; they may touch, have no length, and hold others."""
    cuts = sorted(draw(st.lists(st.integers(start_ns, end_ns), max_size=5)))
    made = []
    for at in range(0, len(cuts) - 1, 2):
        one = Span(cuts[at], cuts[at + 1])
        if depth < DEPTH_MAX:
            one.inner = draw(spans(one.start_ns, one.end_ns, depth + 1))
        made.append(one)
    return made


@dataclass(slots=True)
class Recording:
    """Lines of one recording, and what they must draw."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    counts: list[tuple[tuple[str, ...], int, int]] = field(default_factory=list)


def name_of(serial: int) -> str:
    """Names repeat: an end must find the right one of several that are called the same."""
    return f"cu{serial % 5}"


def write_begins_and_ends(
    tree: list[Span], path: tuple[str, ...], event: dict[str, Any], out: Recording, depth: int = 0
) -> None:
    """Each span as a B and an E; in the file's order, which decides which of those at one time is inside."""
    for one in tree:
        name = name_of(len(out.drawn))
        out.drawn.append((path, one.start_ns, one.end_ns - one.start_ns, depth, name))
        out.lines.append(event | {"phase": "B", "name": name, "ts_ns": one.start_ns})
        write_begins_and_ends(one.inner, path, event, out, depth + 1)
        out.lines.append(event | {"phase": "E", "name": name, "ts_ns": one.end_ns})


def write_complete(tree: list[Span], path: tuple[str, ...], event: dict[str, Any], out: Recording) -> None:
    """Each span as an X. Nothing but time says what is inside: a span is until its end, and not at it."""
    flat: list[Span] = []

    def walk(level: list[Span]) -> None:
        for one in level:
            flat.append(one)
            walk(one.inner)

    walk(tree)
    around: list[Span] = []
    for one in sorted(flat, key=lambda span: (span.start_ns, -span.end_ns)):
        while around and around[-1].end_ns <= one.start_ns:
            around.pop()
        name = name_of(len(out.drawn))
        dur_ns = one.end_ns - one.start_ns
        out.drawn.append((path, one.start_ns, dur_ns, len(around), name))
        out.lines.append(event | {"phase": "X", "name": name, "ts_ns": one.start_ns, "dur_ns": dur_ns})
        around.append(one)


def drawn_on(layer: str) -> str:
    """A call of the GPU's scheduler is a function of the driver."""
    return "kernel" if layer == "scheduler" else layer


@st.composite
def host_rows(draw: st.DrawFn, pid: int, out: Recording) -> None:
    """Layers of some threads. One layer of a thread is written as B and E or as X, as its tracer does."""
    rows = st.tuples(st.integers(0, 2), st.sampled_from(LAYERS))
    for thread, layer in draw(st.lists(rows, max_size=3, unique_by=lambda row: (row[0], drawn_on(row[1])))):
        tid = pid + thread
        tree = draw(spans(0, draw(st.sampled_from([3, 20, 1 << 20]))))
        path = (f"p {pid}", f"p {tid}", LAYER_TITLES[drawn_on(layer)])
        event = {"type": layer, "pid": pid, "tid": tid}
        if draw(st.booleans()):
            write_complete(tree, path, event, out)
        else:
            write_begins_and_ends(tree, path, event, out)


@st.composite
def gpu_slots(draw: st.DrawFn, gpu: int, out: Recording) -> None:
    """Warps on slots, one at a time on each; a launch's warps are in one batch or in several."""
    warps: list[tuple[int, int, int, int]] = []
    for sm, slot in draw(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3)), max_size=3, unique=True)):
        tree = draw(spans(0, draw(st.sampled_from([6, 40])), DEPTH_MAX))
        warps += [(sm, slot, one.start_ns, one.end_ns) for one in tree]
    for number, (sm, slot, start_ns, end_ns) in enumerate(warps):
        path = (f"GPU {gpu}", f"SM {sm}", f"slot {slot}")
        out.drawn.append((path, start_ns, end_ns - start_ns, 0, f"k{gpu} warp {number}"))
    # In order of entry, so that a slot's next warp is never in an earlier batch.
    order = sorted(range(len(warps)), key=lambda at: warps[at][2])
    while order:
        size = draw(st.integers(1, len(order)))
        some, order = sorted(order[:size]), order[size:]
        base_ns = min(warps[at][2] for at in some)
        out.lines.append(
            {
                "type": "gpu_warp", "name": f"k{gpu}", "ts_ns": base_ns, "gpu": gpu, "launch": gpu,
                "warp": some,
                "sm": [warps[at][0] for at in some],
                "slot": [warps[at][1] for at in some],
                "entry_ns": [warps[at][2] - base_ns for at in some],
                "exit_ns": [warps[at][3] - warps[at][2] for at in some],
            }
        )  # fmt: skip
    out.counts += running((f"GPU {gpu}", "active warps"), [warp[2:] for warp in warps])


def running(path: tuple[str, ...], stays: list[tuple[int, int]]) -> list[tuple[tuple[str, ...], int, int]]:
    """How many run from each time on at which that changes."""
    change: Counter[int] = Counter()
    for start_ns, end_ns in stays:
        change[start_ns] += 1
        change[end_ns] -= 1
    value, out = 0, []
    for ts_ns in sorted(change):
        if change[ts_ns]:
            value += change[ts_ns]
            out.append((path, ts_ns, value))
    return out


def shuffled(lines: list[dict[str, Any]], chance: random.Random) -> list[dict[str, Any]]:
    """The lines in any order, less where only their order says which is inside which: on one row, of one time
    and length.
    """
    places = list(range(len(lines)))
    chance.shuffle(places)
    alike: dict[tuple[Any, ...], list[int]] = {}

    def key(place: int) -> tuple[Any, ...]:
        get = lines[place].get
        return get("type"), get("tid"), get("gpu"), get("ts_ns"), get("dur_ns")

    for place in sorted(places):
        alike.setdefault(key(place), []).append(place)
    return [lines[alike[key(place)].pop(0)] for place in places]


def asked(lines: list[dict[str, Any]], to: str) -> Asked:
    """What the trace processor says of a recording of these lines."""
    clock = {"clock": "monotonic", "clocks": ["monotonic"], "command": ["p"], "start": {"monotonic_ns": 0}}
    header = {"type": "header", "schema": "tracepipe/1", **clock}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in [header, *lines]))
        output, report = converted(path, to)
    assert (report.problems, report.outcomes.overlaps, report.outcomes.no_begin) == ([], 0, 0)
    assert report.outcomes.unclosed == 0
    return Asked(output)


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """Several random recordings in one, apart by process and GPU, in the order that they were made up in."""
    out = Recording()
    for number in range(RECORDINGS_AT_ONCE):
        # Small ids too: Chrome's JSON numbers tracks where threads have ids.
        draw(host_rows(3 + 4 * number, out))
        draw(gpu_slots(number, out))
    return out


def check(recording: Recording, lines: list[dict[str, Any]]) -> None:
    """Both formats must say what was recorded, no more and no less."""
    for to in ("perfetto", "chrome"):
        answer = asked(lines, to)
        assert answer.problems == []
        seen = answer.seen()
        drawn = Counter(
            (path, one.ts_ns, one.dur_ns, one.depth, one.name)
            for path, slices in seen.slices
            for one in slices
            if path[0] != "tracepipe" and one.category != "summary"
        )
        assert drawn == Counter(recording.drawn)
        counts = [(path, ts_ns, value) for path, values in seen.counters for ts_ns, value in values]
        assert sorted(counts) == sorted(recording.counts)


@settings(max_examples=15, suppress_health_check=SLOW)
@given(recordings(), st.randoms(use_true_random=False))
def test_spans_come_out_as_they_went_in(recording: Recording, chance: random.Random) -> None:
    check(recording, shuffled(recording.lines, chance))


@settings(max_examples=15, suppress_health_check=SLOW)
@given(recordings())
def test_spans_that_are_open_over_many_batches_come_out_too(recording: Recording) -> None:
    # A few lines a batch, and hardly a window: calls stay open over batches, and writes go back in time.
    lines = sorted(recording.lines, key=itemgetter("ts_ns"))
    with (
        mock.patch.object(tracepipe.readers.tracepipe1, "CHUNK_BYTES", 256),
        mock.patch.object(tracepipe.layout.merging, "WINDOW_EVENTS", 4),
    ):
        check(recording, lines)
