"""Random events that mean nothing: whatever the layout makes of them, Perfetto reads it as it was meant.

Begins, ends, instants and complete slices of few names at few times, on few threads, streams and slots, with
launch ids, losses and text that is no event: every outcome of the layout, in combinations nobody thinks of.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.golden.asked import Asked
from tests.golden.both import converted
from tests.golden.hostile import ranges
from tests.golden.seen import ReplayFormat
from tracepipe.layout import WARP_TRACKS, LayoutOptions
from tracepipe.layout.tree import LAYER_TITLES
from tracepipe.recording.convert import Conversion, ConversionOptions

pytestmark = pytest.mark.slow

START_NS = 1_000_000
# What the timers of both GPUs show more than the host's clock; they drift by some ppm.
GPU_AHEAD_NS = 1_795_000_000_000_000_000
PAIRS = [
    {
        "clock": f"globaltimer:{gpu}", "source_ns": START_NS + GPU_AHEAD_NS + after + gpu,
        "host_lo_ns": START_NS + after, "host_hi_ns": START_NS + after + 2 * (after > 0),
    }
    for gpu in (0, 1) for after in (0, 100_000)
]  # fmt: skip
HEADER = {
    "type": "header", "schema": "tracepipe/1", "clock": "monotonic",
    "clocks": ["monotonic", "globaltimer:0", "globaltimer:1"], "clock_pairs": PAIRS,
}  # fmt: skip
times = st.integers(START_NS, START_NS + 30)
lengths = st.integers(0, 12)
# The trace processor reads a text as far as a NUL.
plain = (
    st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.text(st.characters(exclude_characters="\0"), max_size=4)
    | st.sampled_from([0.5, -1.25, 1e300])
)
# Nothing empty inside: Perfetto does not count it among a list's items when it reads JSON.
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2)
        | st.dictionaries(st.sampled_from("xyz"), inner, min_size=1, max_size=2)
    ),
    max_leaves=4,
)
values = st.none() | st.just([]) | st.just({}) | nested
# "size" and "address" are what the count of device memory is made of.
arguments = st.dictionaries(st.sampled_from(["a", "b", "size", "address"]), values, max_size=2)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    """One event of any layer but warps."""
    layer = draw(st.sampled_from([*LAYER_TITLES, "userspace", "userspace", "gpu_kernel", "gpu_thread"]))
    phase = draw(st.sampled_from("BBEEIXX"))
    name = draw(st.sampled_from(["ioctl", "cuLaunchKernel", "alloc", "free", "größe"]))
    event = {"type": layer, "name": name, "phase": phase, "ts_ns": draw(times)}
    if phase == "X" or (phase == "E" and draw(st.booleans())):
        event["dur_ns"] = draw(lengths)
    if layer.startswith("gpu") or (layer == "transfer" and draw(st.booleans())):
        event |= {"gpu": draw(st.integers(0, 1)), "stream": draw(st.integers(0, 1))}
    else:
        event |= {"pid": draw(st.integers(5, 6)), "tid": draw(st.integers(5, 7))}
    if layer == "hook" and draw(st.booleans()):
        event["layer"] = draw(st.sampled_from(["pool", "hooks", ""]))
    if layer == "annotation":
        more = {"domain": draw(st.sampled_from(["one", "two"])), "range": draw(st.integers(0, 1))}
        event |= {name: more[name] for name in draw(st.sets(st.sampled_from(sorted(more))))}
    if layer == "gpu_thread":
        event["thread"] = [draw(st.sampled_from([0, 1, 32])), draw(st.integers(0, 1)), 0]
    if draw(st.booleans()):
        event["launch"] = draw(st.sampled_from([0, 1, 2, (1 << 64) - 1]))
    if draw(st.booleans()):
        event["args"] = draw(arguments)
    if draw(st.booleans()):
        event["cpu"] = draw(st.integers(0, 1))
    return event


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Warps that may be two on one slot, and may have no exit or several, by either clock."""
    exits = draw(st.lists(st.integers(0, 2), min_size=1, max_size=4))
    count = len(exits)

    def column(largest: int, size: int = count) -> list[int]:
        return draw(st.lists(st.integers(0, largest), min_size=size, max_size=size))

    gpu = draw(st.integers(0, 1))
    batch = {"type": "gpu_warp", "name": draw(st.sampled_from("kl")), "ts_ns": draw(times), "gpu": gpu}
    if draw(st.booleans()):
        batch |= {"ts_ns": batch["ts_ns"] + GPU_AHEAD_NS, "clock": f"globaltimer:{gpu}"}
    batch |= {
        "warp": column(9),
        "entry_ns": column(20),
        "exit_count": exits,
        "exit_ns": column(9, sum(exits)),
    }
    if draw(st.booleans()):
        batch |= {"sm": column(1), "slot": column(1)}
    if draw(st.booleans()):
        batch |= {
            "exit_clk": column(99, sum(exits)),
            "entry_mask": column(7),
            "exit_mask": column(7, sum(exits)),
        }
        if draw(st.booleans()):
            # A name, as the trace processor makes one up for what has none in JSON.
            batch |= draw(ranges(exits, batch["exit_clk"])) | {"ranges": ["a", "b", "c"]}
    if draw(st.booleans()):
        batch |= {"grid": [2, 2, 1], "block": [33, 1, 1], "launch": draw(st.integers(0, 2))}
    return batch


losses = st.fixed_dictionaries(
    {"type": st.just("loss"), "count": st.integers(0, 9)},
    optional={"layer": st.sampled_from("ab"), "ts_ns": times, "dur_ns": lengths},
)
lines = st.one_of(events(), events(), events(), batches(), losses, st.just("nothing"))


@settings(max_examples=25)
@given(st.lists(lines, max_size=40), st.sampled_from(WARP_TRACKS), st.booleans())
def test_whatever_is_drawn_is_read_as_it_was_meant(
    recording: list[Any], warp_tracks: str, thread_exits: bool
) -> None:
    options = ConversionOptions(layout=LayoutOptions(warp_tracks, thread_exits))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        path.write_text("".join(json.dumps(line) + "\n" for line in [HEADER, *recording]))
        for to in ("perfetto", "chrome"):
            kept = ReplayFormat(to)
            Conversion(str(path), cast(Any, kept), options).run(io.BytesIO())
            output, _ = converted(path, to, options)
            asked, want = Asked(output), kept.writer.seen()
            if to == "chrome":
                want = want.as_json_says()
            assert asked.problems == []
            assert asked.seen().lines() == want.lines()
