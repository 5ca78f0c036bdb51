"""Recordings that no tool would write: all oddities that a line of an event file may have, combined.

What they mean is not stated here. They are for tests of what must be the same whatever is read: two
implementations, plain and compressed, few lines at a time and many.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
from hypothesis import strategies as st

from tracepipe.event.model import FLOW_LIMIT, ID_LIMIT, RANGE_LIMIT, SLOT_LIMIT, SM_LIMIT, TIME_LIMIT_NS
from tracepipe.layout.tree import LAYER_TITLES

START_NS = 1_000_000
HEADER = {
    "type": "header",
    "schema": "tracepipe/1",
    "clock": "monotonic",
    "clocks": ["monotonic", "globaltimer:0", "globaltimer:1", "realtime", "tsc"],
    "start": {"monotonic_ns": START_NS, "realtime_ns": 1_800_000_000_000_000_000},
    "command": ["./a"],
}
U64 = (1 << 64) - 1
integers = st.integers(-3, 300) | st.sampled_from(
    [
        1 << 31,
        -(1 << 31),
        (1 << 53) + 1,
        (1 << 63) - 1,
        1 << 63,
        U64,
        U64 + 1,
        -(1 << 63),
        -(1 << 63) - 1,
        10**30,
    ]
)
texts = st.text(max_size=5) | st.sampled_from(
    [
        "",
        "nul\0",
        'quote"',
        "back\\",
        "\\u0041",
        "é" * 64,
        "é" * 65,
        "x" * 64,
        "x" * 65,
        "日本",
        "\u2028",
        "😀",
        "/",
    ]
)
scalars = st.none() | st.booleans() | integers | st.floats() | texts
# Names of what is shown beside arguments, and of what the layout takes from them.
KEYS = [
    "a", "b", "", "größe", 'k"', "cpu", "launch", "grid", "block", "source_ns", "unclosed", "no_begin",
    "from_duration", "thread", "event", "block_x", "occurrence", "size", "address", "ptr", "total_allocated",
    "exits", "cycles", "lanes", "source_after_ns", "args", "ts_ns", "python", "by_tid",
    "target_cpu", "prev_state",
]  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(st.sampled_from(KEYS), values, max_size=4)
times = (
    st.integers(START_NS, START_NS + 60)
    | st.integers(START_NS, START_NS + 60)
    | st.sampled_from([0, 1, START_NS + 5_000, TIME_LIMIT_NS])
)
lengths = st.integers(0, 40) | st.sampled_from([5_000, TIME_LIMIT_NS])
launches = st.integers(0, 3) | st.sampled_from([(1 << 63) - 1, 1 << 63, U64])
names = st.sampled_from(
    ["ioctl", "ioctl", "cuLaunchKernel", "alloc", "free", "running", "wakeup", "f", "größe", "", "\\"]
)
clocks = st.sampled_from(["globaltimer:0", "globaltimer:1", "realtime", "tsc", "nobody's", "monotonic"])
triples = st.lists(
    st.integers(0, 40) | st.sampled_from([(1 << 31) - 1, 1 << 31, U64]), min_size=3, max_size=3
)


@st.composite
def events(draw: st.DrawFn) -> dict[str, Any]:
    """An event that is good but for what it means."""
    layer = draw(st.sampled_from([*LAYER_TITLES, "userspace", "userspace", "gpu_kernel", "gpu_thread"]))
    phase = draw(st.sampled_from("BBBEEEIXXCstf"))
    event: dict[str, Any] = {"ts_ns": draw(times), "type": layer, "name": draw(names), "phase": phase}
    if phase == "X" or draw(st.integers(0, 3)) == 0:
        event["dur_ns"] = draw(lengths)
    if not layer.startswith("gpu"):
        event |= {"pid": draw(st.integers(5, 6)), "tid": draw(st.integers(5, 6))}
    if layer == "annotation":
        of = {"domain": st.sampled_from(["one", "größe", ""]), "range": st.sampled_from([0, 1, RANGE_LIMIT])}
        for name in draw(st.lists(st.sampled_from(sorted(of)), max_size=2)):
            event[name] = draw(of[name])
    more: dict[str, Any] = {
        "gpu": st.integers(0, 2) | st.just(U64),
        "stream": st.integers(0, 1) | st.just(U64),
        "cpu": st.integers(0, 1) | st.just(U64),
        "comm": st.sampled_from(["one", "two", ""]),
        "clock": clocks,
        "layer": st.sampled_from(["pool", "libc.so.6", "hooks", ""]),
        "launch": launches,
        "flow": st.integers(0, 2) | st.just(FLOW_LIMIT),
        "grid": triples,
        "block": triples,
        "thread": triples,
        "pid": st.just(ID_LIMIT),
        "colour": scalars,
        "stack": st.integers(0, 4),
    }
    for name in draw(st.lists(st.sampled_from([*sorted(more), "launch", "launch", "stack"]), max_size=2)):
        event[name] = draw(more[name])
    if phase == "C":
        event["args"] = {"value": draw(scalars), "x": draw(st.sampled_from([1.5, 1e300, U64, -3]))}
    elif draw(st.booleans()):
        event["args"] = draw(arguments)
    return event


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Warps with any of their columns, which may be several on one slot, and exits or none."""
    counts = draw(st.lists(st.integers(0, 3), max_size=5))
    if not draw(st.booleans()):
        counts = [1] * len(counts)

    def column(most: int, of: int = len(counts), *rare: int) -> list[int]:
        value = st.integers(0, most) | (st.sampled_from(rare) if rare else st.nothing())
        return draw(st.lists(value, min_size=of, max_size=of))

    exits = sum(counts)
    step = draw(st.sampled_from([1, 1, 32]))
    batch: dict[str, Any] = {"ts_ns": draw(times), "type": "gpu_warp", "name": draw(names)}
    batch["warp"] = column(9, len(counts), (1 << 63) - 1)
    batch["entry_ns"] = [step * ns for ns in column(40)]
    batch["exit_ns"] = [step * ns for ns in column(40, exits, 1 << 40)]
    if counts != [1] * len(counts) or draw(st.booleans()):
        batch["exit_count"] = counts
    more: dict[str, Any] = {
        "sm": column(2, len(counts), SM_LIMIT),
        "slot": column(1, len(counts), SLOT_LIMIT),
        "entry_clk": column(500, len(counts), (1 << 63) - 1),
        "exit_clk": column(500, exits, 1 << 40),
        "entry_mask": column(255, len(counts), (1 << 32) - 1),
        "exit_mask": column(255, exits, (1 << 32) - 1),
    }
    for name in draw(st.lists(st.sampled_from(sorted(more)), unique=True)):
        batch[name] = more[name]
    if draw(st.booleans()):
        batch |= draw(ranges(counts, more["exit_clk"])) | {"exit_clk": more["exit_clk"]}
    for name, choice in (
        ("grid", triples), ("block", triples), ("launch", launches), ("gpu", st.integers(0, 2)),
        ("clock", clocks), ("args", arguments), ("stream", st.integers(0, 1)), ("pid", st.just(5)),
    ):  # fmt: skip
        if draw(st.booleans()):
            batch[name] = draw(choice)
    return batch


@st.composite
def ranges(draw: Any, exit_counts: list[int], exit_clk: list[int]) -> dict[str, Any]:
    """Ranges of such warps: in each other, crossing, of no length."""
    columns: dict[str, list[int]] = {
        "range_count": [],
        "range_name": [],
        "range_clk": [],
        "range_dur_clk": [],
    }
    left, most = iter(exit_clk), draw(st.sampled_from([9, 600, 1 << 40]))
    for exits in exit_counts:
        life_clk = max([next(left) for _ in range(exits)], default=-1)
        spans = draw(st.lists(st.tuples(st.integers(0, most), st.integers(0, most)), max_size=6))
        spans = [(clk, min(dur, life_clk - clk)) for clk, dur in sorted(spans) if clk <= life_clk]
        columns["range_count"].append(len(spans))
        columns["range_clk"] += [clk for clk, _ in spans]
        columns["range_dur_clk"] += [dur for _, dur in spans]
        columns["range_name"] += draw(st.lists(st.integers(0, 2), min_size=len(spans), max_size=len(spans)))
    more = {"range_open": [at % 3 // 2 for at in range(len(columns["range_clk"]))]}
    return {"ranges": ["a", "b", ""], **columns, **(more if draw(st.booleans()) else {})}


clock_pairs = st.builds(
    lambda clock, at, late: {
        "type": "clock", "clock": clock, "source_ns": 7_000_000 + at, "host_lo_ns": START_NS + at + late,
        "host_hi_ns": START_NS + at + late + 4,
    },
    st.sampled_from(["globaltimer:0", "globaltimer:0", "globaltimer:1", "tsc"]),
    st.integers(0, 3_000_000_000),
    st.integers(0, 2),
)  # fmt: skip
PAIR = {
    "type": "clock", "clock": "globaltimer:0", "source_ns": START_NS + 20, "host_lo_ns": START_NS + 9,
    "host_hi_ns": START_NS + 11,
}  # fmt: skip
stacks = st.fixed_dictionaries(
    {
        "type": st.just("stack"),
        "id": st.integers(0, 4) | st.just((1 << 63) - 1),
        "frames": st.lists(
            st.fixed_dictionaries(
                {"function": texts},
                optional={
                    "file": st.sampled_from(["", "a.py", "/lib/python3.12/x.py", "C:\\a.py"]),
                    "line": st.integers(0, 9),
                },
            ),
            max_size=3,
        ),
    },
    optional={"omitted": st.integers(0, 9), "ts_ns": values},
)
losses = st.fixed_dictionaries(
    {"type": st.just("loss"), "count": st.integers(0, 9)},
    optional={
        "layer": st.sampled_from(["syscall", "b"]), "ts_ns": times, "dur_ns": lengths, "clock": clocks,
        "args": arguments, "reason": texts,
    },
)  # fmt: skip
windows = st.fixed_dictionaries(
    {"type": st.just("window"), "phase": st.sampled_from("BE"), "ts_ns": times},
    optional={"window": st.integers(1, 3), "cause": texts, "clock": clocks, "pid": integers},
)  # fmt: skip
footers = st.fixed_dictionaries(
    {"type": st.just("footer"), "counts": st.just({"kernel": 1}), "losses": st.just({})},
    optional={"ended_by": texts, "end": st.just({"monotonic_ns": START_NS + 9, "realtime_ns": 5})},
)


@st.composite
def spoiled(draw: st.DrawFn) -> dict[str, Any]:
    """A record with one field that may be wrong, or gone."""
    record = dict(draw(events() | batches()))
    name = draw(st.sampled_from(sorted(record)))
    if draw(st.integers(0, 3)) == 0:
        del record[name]
    else:
        record[name] = draw(values)
    return record


def _dumped(value: Any) -> bytes:
    """JSON as our own captures write it, also of what their encoder has no word for."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


@st.composite
def written(draw: st.DrawFn, record: dict[str, Any]) -> bytes:
    """A record as text, by one of many writers."""
    style = draw(st.integers(0, 11))
    if style == 0:
        return json.dumps(record).encode()  # blanks, escapes beyond ASCII, NaN
    if style == 1:
        return json.dumps(record, ensure_ascii=False, indent=None).encode("utf-8", "surrogatepass")
    if style == 2:
        return _dumped({name: record[name] for name in draw(st.permutations(sorted(record)))})
    if style == 3:
        # A field twice: the last one counts.
        name = draw(st.sampled_from(sorted(record)))
        value = draw(st.just(record[name]) | values)
        return _dumped(record)[:-1] + b"," + _dumped({name: value})[1:]
    if style == 4:
        # A key by its escapes.
        return _dumped(record).replace(b'"tid"', b'"t\\u0069d"').replace(b'"args"', b'"\\u0061rgs"')
    if style == 5:
        return _dumped(record).replace(b'"a":', b'"a":1,"a":')
    if style == 6:
        return (
            draw(st.sampled_from([b" ", b"\t", b""])) + _dumped(record) + draw(st.sampled_from([b" ", b"\r"]))
        )
    return _dumped(record)


NESTED = [b'{"ts_ns":1000003,"type":"kernel","name":"f","phase":"I","args":{"x":%b}}' % deep for deep in (
    b"[" * 190 + b"]" * 190, b"[" * 300 + b"]" * 300, b'{"y":' * 12 + b"1" + b"}" * 12,
)]  # fmt: skip
NUMBERS = [
    b'{"ts_ns":%b,"type":"kernel","name":"f","phase":"I","pid":5,"tid":5}' % text
    for text in (
        b"1e6",
        b"1000000.0",
        b"01",
        b"-0",
        b"-1",
        b"+1",
        b"1_0",
        b"NaN",
        b"99999999999999999999",
        b"",
    )
]
garbage = st.binary(max_size=12) | st.sampled_from(
    [
        b"", b"  ", b"\r", b"null", b"[]", b"{}", b"nonsense", b'{"ts_ns":5', b'{"ts_ns":5}', b'{"ts_ns":5,}',
        b'{"type":"kernel","name":"\xff","phase":"I","ts_ns":4}', b"\xef\xbb\xbf{}",
        b'{"ts_ns":1000002,"type":"kernel","name":"\xc3\xa9\xff","phase":"I"}',
        b'{"ts_ns":1000002,"type":"kernel","name":"\xed\xa0\x80","phase":"I"}',
        b'{"ts_ns":1000002,"type":"kernel","name":"a\tb","phase":"I"}',
        b'{"ts_ns":1000002,"type":"kernel","name":"a\\ud800","phase":"I"}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I"}}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I"} x',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I","args":{"x":"\\ud83d\\ude00"}}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I","args":{"x":NaN}}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I","args":{"x":1.5e3,"y":-0,"z":-0.0}}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I","args":{}}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I","args":{},"args":{"x":1}}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"I","ts_ns":1000004}',
        b'{"ts_ns":1000002,"type":"kernel","name":"f","phase":"X","dur_ns":3,"dur_ns":5}',
        *NESTED, *NUMBERS,
    ]
)  # fmt: skip


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """One line, good or not."""
    kind = draw(st.integers(0, 15))
    if kind == 0:
        return draw(garbage).replace(b"\n", b" ")
    record = draw(
        spoiled() if kind == 1
        else batches() if kind < 5
        else losses if kind == 5
        else clock_pairs if kind == 6
        else footers if kind == 7
        else windows if kind == 8
        else stacks if kind in (9, 10)
        else events()
    )  # fmt: skip
    return draw(written(record))


@st.composite
def recordings(draw: st.DrawFn) -> bytes:
    """A whole file. Some of its lines stand there many times, as those of captures do."""
    size = draw(st.sampled_from([0, 3, 10, 25]))
    some = draw(st.lists(lines(), min_size=size, max_size=size + 10))
    some += [some[at % len(some)] for at in draw(st.lists(st.integers(0, 30), max_size=15))] if some else []
    if draw(st.booleans()):
        some += [_dumped(PAIR), _dumped(PAIR | {"clock": "globaltimer:1"})]
    newline = draw(st.sampled_from([b"\n"] * 5 + [b"\r\n"]))
    head = draw(st.sampled_from([b""] * 5 + [b"\xef\xbb\xbf"])) + orjson.dumps(HEADER)
    return newline.join([head, *some]) + draw(st.sampled_from([newline] * 3 + [b""]))
