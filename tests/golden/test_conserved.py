"""Whatever stands in the files of other tools, in a row that is good, odd or broken, is drawn or counted."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.test_cli_dataset import Inline
from tests.golden.conserved import (
    LATEST_NS,
    MORE,
    Made,
    Slice,
    assert_built,
    assert_converted,
    assert_cut,
    cores,
    formats,
)
from tests.support import rocpd_database as rocpd
from tracepipe.readers import rocprof_json

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]

# Few times, so that records touch, overlap and nest; and those that no clock shows.
near = st.integers(10**9, 10**9 + 30)
odd_times = st.sampled_from([0, -1, LATEST_NS, LATEST_NS + 1, (1 << 63) - 1, None, "9", 0.5, b"\xff"])
times = st.one_of(*[near] * 9, odd_times)


def is_time(value: object) -> bool:
    return type(value) is int and 0 <= value <= LATEST_NS


def length(start: int, end: object) -> int:
    """How long a record lasts; not at all where it says nothing that can be."""
    return min(end - start, LATEST_NS) if type(end) is int and end > start else 0


# rocpd ---------------------------------------------------------------------------------------------------

MORE_TEXTS = {20: "größe", 21: "n" * 300, 22: "MARKER_ODD", 23: ""}
# What is drawn for a number in a name's column.
TEXTS = rocpd.TEXTS | MORE_TEXTS
KERNELS = {8: "vector_add<float>", 9: "plain"}
numbers = st.sampled_from([*TEXTS, *TEXTS, 99, None])
ids = st.sampled_from([1, 2, 1, 2, None, 7, -3, "x"])


@st.composite
def rocpd_tables(draw: st.DrawFn) -> Made:
    """Tables of one recording, of which some lack a column."""
    made, events = Made("0.db"), []
    content: dict[str, Rows] = {kind: [] for kind in rocpd.spans()}
    for _ in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from([*content, "region", "region"]))
        start, end = draw(times), draw(times)
        on = {name: draw(ids) for name in ("pid", "tid", "agent_id", "queue_id", "stream_id")}
        row = {"start": start, "end": end, "name_id": draw(numbers), "extra": draw(st.integers(0, 9)), **on}
        category, message = (
            draw(st.sampled_from([1, 4, 8, 22, None])),
            draw(st.sampled_from(["step", "", None])),
        )
        is_marker = TEXTS.get(category, "").startswith("MARKER")
        events.append({"category_id": category, "stack_id": draw(st.sampled_from([7, 8, 0, None]))})
        events[-1]["extdata"] = None if message is None else f'{{"message":"{message}"}}'
        row["event_id"] = len(events)
        name = TEXTS.get(row["name_id"], f"text {row['name_id']}")
        if kind == "kernel_dispatch":
            row["kernel_id"] = draw(st.sampled_from([8, 9, 5, None]))
            name = KERNELS.get(row["kernel_id"], f"kernel {row['kernel_id']}")
        elif kind == "memory_copy":
            name = "HtoD" if row["name_id"] == 6 else name.removeprefix("MEMORY_COPY_")
        elif kind == "memory_allocate":
            row |= {"type": draw(st.sampled_from(["ALLOC", "FREE", "ODD", None])), "level": "REAL"}
            name = {"ALLOC": "alloc", "FREE": "free"}.get(row["type"], name)
        elif message and (is_marker or kind == "sample"):
            name = message
        if kind == "sample":
            row["timestamp"] = row.pop("start")
        content[kind].append({"id": len(content[kind]) + 1, **row})
        is_mark = kind == "region" and is_marker and TEXTS.get(row["name_id"], "").startswith("roctxMark")
        if is_time(start):
            made.slices.append(Slice(name, start, 0 if kind == "sample" or is_mark else length(start, end)))
        else:
            made.skipped += 1
    gone = draw(st.sets(st.sampled_from(["info_process", "info_thread", "info_agent", "metadata"])))
    content["event"] = [{"id": at, **event} for at, event in enumerate(events, 1)]
    for row in content["region"] if "metadata" in gone else ():
        if is_time(row["start"]):
            made.slices.append(
                Slice(f"text {row['name_id']}", row["start"], length(row["start"], row["end"]))
            )
        made.skipped += not is_time(row["start"])
    made.skipped += "metadata" in gone
    about = rocpd.about() | {"arg": [], "pmc_event": [], "event": []}
    about["string"] += [{"id": at, "string": text} for at, text in MORE_TEXTS.items()]
    tables = {kind: rows for kind, rows in (about | content).items() if rows and kind not in gone}

    def write(path: Path) -> None:
        rocpd.make(path, tables)
        if "metadata" in gone:
            # Another recording, which has nothing but regions, and a table that nobody knows.
            with closing(sqlite3.connect(path)) as connection:
                of_regions = "start, end, name_id FROM rocpd_region" if content["region"] else "1 WHERE 0"
                connection.execute(f"CREATE TABLE rocpd_region_b AS SELECT {of_regions}")
                connection.execute("CREATE TABLE other AS SELECT 1")

    made.content = write
    return made


# rocprof -------------------------------------------------------------------------------------------------

OPERATIONS = {
    "hip_api": ("HIP_RUNTIME_API", ["hipInit", "größe \ud800 𝄞"]),
    "marker_api": ("MARKER_CORE_API", ["roctxMarkA", "roctxThreadRangeA"]),
    "kernel_dispatch": ("KERNEL_DISPATCH", []),
    "memory_copy": ("MEMORY_COPY", ["MEMORY_COPY_HOST_TO_DEVICE", "odd"]),
    "memory_allocation": ("MEMORY_ALLOCATION", ["MEMORY_ALLOCATION_ALLOCATE", "MEMORY_ALLOCATION_FREE"]),
}
SHOWN = {
    "größe \ud800 𝄞": "größe ? 𝄞",
    "MEMORY_COPY_HOST_TO_DEVICE": "HtoD",
    "MEMORY_ALLOCATION_ALLOCATE": "alloc",
    "MEMORY_ALLOCATION_FREE": "free",
}
json_times = times.map(lambda value: "text" if type(value) is bytes else value)


@st.composite
def rocprof_record(draw: st.DrawFn, kind: str, made: Made) -> object:
    """A record of a kind, or something else in its place."""
    if draw(st.integers(0, 9)) == 0:
        made.skipped += 1
        return draw(st.sampled_from([5, None, "x", [], {}, {"start": 1}, [{"start_timestamp": 1}]]))
    number, operation = (
        draw(st.integers(0, 3)),
        draw(st.sampled_from([0, 0, 0, 1, 1, 1, 2, -1, None, "x", 1 << 70])),
    )
    start, end = draw(json_times), draw(json_times)
    odd_id = st.sampled_from([7, 7, 8, None, -1, "x", 1 << 65])
    record = {
        "kind": [*OPERATIONS].index(kind), "operation": operation, "start_timestamp": start,
        "end_timestamp": end, "thread_id": draw(odd_id), "correlation_id": {"internal": number}, "new": [{}],
        "stream_id": {"handle": draw(odd_id)}, "agent_id": draw(odd_id), "bytes": draw(odd_id),
        "dispatch_info": draw(st.sampled_from([None, {"kernel_id": 8, "grid_size": 5}])),
    }  # fmt: skip
    for name in draw(st.sets(st.sampled_from(sorted(record.keys() - {"start_timestamp"})), max_size=1)):
        del record[name]
    names = OPERATIONS[kind][1] if "kind" in record else []
    operation = record.get("operation")
    whole = operation if type(operation) is int and -1 <= operation < 1 << 63 else None
    name = names[whole] if whole is not None and 0 <= whole < len(names) else f"operation {whole}"
    is_mark = kind == "marker_api" and name == "roctxMarkA"
    name = SHOWN.get(name, name)
    if kind == "marker_api" and "kind" in record and number == 1 and "correlation_id" in record:
        name = "step"
    if kind == "kernel_dispatch":
        name = "k<8>" if record.get("dispatch_info") else "kernel None"
    if is_time(start):
        made.slices.append(Slice(name, start, 0 if is_mark else length(start, record.get("end_timestamp"))))
    else:
        made.skipped += 1
    return record


@st.composite
def rocprof_text(draw: st.DrawFn) -> Made:
    """The file of one process or two."""
    made, processes = Made("1.json"), []
    for pid in range(1, 1 + draw(st.integers(1, 2))):
        records: dict[str, Any] = {}
        for kind in draw(st.lists(st.sampled_from(sorted(OPERATIONS)), max_size=5, unique=True)):
            records[kind] = [draw(rocprof_record(kind, made)) for _ in range(draw(st.integers(0, 8)))]
        if draw(st.booleans()):
            records["odd"] = draw(st.sampled_from([{"start_timestamp": 1}, 5, "x", [5]]))
            made.skipped += 1
        process: dict[str, Any] = {
            "metadata": {"pid": pid, "command": ["a", 5], "node": {"hostname": "mi350"}},
            "agents": [{"id": {"handle": 7}, "type": 2, "logical_node_type_id": 0}, 5, {}],
            "strings": {
                "buffer_records": [
                    {"kind": name, "operations": names} for name, names in OPERATIONS.values()
                ],
                "marker_api": [{"key": 1, "value": "step"}],
            },
            "kernel_symbols": [{"kernel_id": 8, "formatted_kernel_name": "void k<8>(int)"}] * 2,
            draw(st.sampled_from(["buffer_records", "callback_records"])): records,
        }
        if draw(st.booleans()):
            process["pc_samples"] = draw(st.sampled_from([5, [{"start_timestamp": 1}]]))
            made.skipped += 1
        processes.append(process)
    text = json.dumps({rocprof_json.TOP: processes}).encode()
    missing = draw(st.sampled_from([0, 0, 1, 2]))
    made.skipped += missing > 0
    made.content = text[: len(text) - missing]
    return made


# VizTracer and Proton ------------------------------------------------------------------------------------

START_NS, DAY_NS = 10**9, 86_400 * 10**9
near_ns = st.integers(START_NS, START_NS + 30)
lengths_ns = st.integers(0, 20)
# Texts of JSON, each with its nanoseconds: None for what is no time.
TOO_DEEP = '{"a":' * 300 + "1" + "}" * 300
ODD_TIMES = [
    ("null", None), ("true", None), ("[]", None), ('"x"', None), ("NaN", None), ("1e30", None), ('""', None),
    ("0", 0), ("1e3", 10**6), ("4611686018427386.903", LATEST_NS - 1000), ("4611686018427387.904", None),
]  # fmt: skip
NOT_EVENTS = [
    "5",
    '"x{"',
    "[5]",
    "null",
    '{"ph":"X",,}',
    '{"ph":5}',
    '{"ph":"X"}',
    TOO_DEEP,
]


def us(ns: int) -> str:
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03}"


def json_us(
    ns: st.SearchStrategy[int], *odd: tuple[str, int | None]
) -> st.SearchStrategy[tuple[str, int | None]]:
    """Texts of microseconds, and what stands in their place, with the nanoseconds."""
    plain = ns.map(lambda value: (us(value), value))
    return st.one_of(
        *[plain] * 8, ns.map(lambda value: (f'"{us(value)}"', value)), st.sampled_from([*ODD_TIMES, *odd])
    )


json_starts = json_us(near_ns, ("-0.005", -5))
json_lengths = json_us(lengths_ns, ("-0.005", 0))
titles = st.sampled_from(["f", "g", "größe 日本", "a\nb", "", "n" * 300, "\ud800", 5, None])


def title(name: object) -> str:
    """The name that is drawn."""
    return "no name" if name is None else str(name).replace("\ud800", "?")


def event_text(times_of: dict[str, str], **fields: object) -> str:
    """The text of an event, of which times are texts already."""
    members = [f"{json.dumps(key)}:{json.dumps(value)}" for key, value in fields.items()]
    return "{" + ",".join(members + [f'"{key}":{text}' for key, text in times_of.items()]) + "}"


@dataclass(slots=True)
class Threads:
    """Matches begins with ends, as docs/inputs.md has it."""

    opened: dict[object, list[tuple[object, int]]] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)

    def add(self, thread: object, phase: str, name: object, ts_ns: int) -> None:
        begins = self.opened.setdefault(thread, [])
        if phase in "Bb":
            begins.append((name, ts_ns))
        elif not begins or not (name is None or {name, None} & {begin for begin, _ in begins}):
            self.slices.append(Slice(title(name), ts_ns))
        else:
            is_it = False
            while not is_it:
                is_it = name is None or begins[-1][0] in (name, None)
                self._end(*begins.pop(), ts_ns)

    def _end(self, name: object, start_ns: int, end_ns: int) -> None:
        self.slices.append(Slice(title(name), start_ns, max(0, end_ns - start_ns)))

    def finish(self, last_ns: int) -> list[Slice]:
        for begins in self.opened.values():
            for name, start_ns in begins:
                self._end(name, start_ns, last_ns)
        return self.slices


@st.composite
def viztracer_text(draw: st.DrawFn) -> Made:
    made, texts, paired = Made("2.json"), [], []
    ends_ns = [0]
    for _ in range(draw(st.integers(0, 25))):
        if draw(st.integers(0, 11)) == 0:
            texts.append(draw(st.sampled_from(NOT_EVENTS)))
            made.skipped += 1
            continue
        phase, name = draw(st.sampled_from("XXXXXiIRPNODCCBBEEEbneM?")), draw(titles)
        (start, ts_ns), (length_text, dur_ns) = draw(json_starts), draw(json_lengths)
        of = {
            "ph": phase,
            "pid": draw(st.sampled_from([1, 1, -1, "x"])),
            "tid": draw(st.sampled_from([1, 1, 2, None])),
        }
        of |= {"cat": draw(st.sampled_from(["FEE", "INSTANT", "odd", 5])), "name": name, "new": {"a": [1]}}
        of |= {} if name is not None else {"args": 5}
        keys = {"ts": start} | ({"dur": length_text} if draw(st.integers(0, 9)) else {})
        dur_ns = dur_ns if "dur" in keys and dur_ns is not None and dur_ns < 365 * DAY_NS else 0
        values: dict[str, Any] = draw(
            st.sampled_from([{"a": 1, "b": "2.5"}, {"c": -1e300}, {"d": "x"}, {}, {"e": True}])
        )
        if phase in "CM":
            of["args"] = values
        if phase in "bne":
            of["id"] = draw(st.sampled_from([1, "x"]))
        texts.append(event_text(keys, **of))
        if phase == "M":
            made.skipped += type(name) is not str
        elif (
            phase == "?"
            or ts_ns is None
            or (phase == "C" and not values.keys() <= {"a", "b", "c"})
            or (phase == "C" and not values)
        ):
            made.skipped += 1
        else:
            ends_ns.append(ts_ns + (dur_ns if phase == "X" else 0))
            if phase == "C":
                made.counts += [(ts_ns, float(value)) for value in values.values()]
            elif phase in "BEbe":
                thread = (
                    of["cat"] if phase in "be" and of["cat"] != 5 else "",
                    of["pid"],
                    of.get("id", of["tid"]),
                    phase in "be",
                )
                paired.append((ts_ns, thread, phase, None if name is None else str(name)))
            else:
                made.slices.append(Slice(title(name), ts_ns, dur_ns if phase == "X" else 0))
    threads = Threads()
    for ts_ns, thread, phase, name in sorted(paired, key=lambda one: one[0]):
        threads.add(thread, phase, name, ts_ns)
    made.slices += threads.finish(max(ends_ns))
    starts = [*(one.ts_ns for one in made.slices), *(ts_ns for ts_ns, _ in made.counts)]
    first_ns, ahead_ns = min(filter(lambda ns: ns > 0, starts), default=0), max(0, -min(starts, default=0))

    def placed(ts_ns: int) -> int:
        return ahead_ns + (first_ns if ts_ns == 0 and first_ns > DAY_NS else ts_ns)

    made.slices = [one._replace(ts_ns=placed(one.ts_ns)) for one in made.slices]
    made.counts = [(placed(ts_ns), value) for ts_ns, value in made.counts]
    ending = draw(st.sampled_from(["]}", "]}", "]", ""]))
    made.skipped += ending != "]}"
    text = '{"viztracer_metadata":{"version":"1"},"traceEvents":[' + ",".join(texts) + ending
    made.content = text.encode()
    return made


@st.composite
def proton_text(draw: st.DrawFn) -> Made:
    """Scopes of warps, some of which are of no kernel."""
    made, texts = Made("3.json"), []
    for _ in range(draw(st.integers(0, 25))):
        if draw(st.integers(0, 9)) == 0:
            texts.append(draw(st.sampled_from(NOT_EVENTS)))
            made.skipped += 1
            continue
        name, phase = draw(titles), draw(st.sampled_from("XXXXXXMB"))
        (start, ts_ns), (length_text, dur_ns) = draw(json_starts), draw(json_lengths)
        block, warp = draw(st.integers(0, 2)), draw(st.sampled_from([0, 1, 9_999]))
        odd = draw(st.sampled_from([0] * 9 + [1, 2, 3]))
        of = {
            "ph": phase, "name": name, "new": 1, "cat": draw(st.sampled_from(["k", "async", 5])),
            "pid": ["k Core0 CTA{}", "größe Core65535 CTA{}", "k Core65536 CTA{}", "k"][odd].format(block),
            "tid": draw(st.sampled_from([f"warp {warp} (line 1)"] * 12 + ["warp", 5])),
            "args": draw(st.sampled_from([{}, 5, {"Frequency (MHz)": 1e3}, {"Init Time (ns)": 5}])),
        }  # fmt: skip
        of |= {"flow_out": True} if draw(st.booleans()) else {}
        texts.append(event_text({"ts": start, "dur": length_text}, **of))
        is_good = odd < 2 and of["tid"] == f"warp {warp} (line 1)" and type(name) is str
        is_good &= (ts_ns or 0) < LATEST_NS // 4
        if (
            phase == "X"
            and is_good
            and None not in (ts_ns, dur_ns)
            and 0 <= dur_ns <= 365 * DAY_NS
            and length_text[0] != "-"
        ):
            made.slices.append(Slice(title(name), ts_ns, dur_ns))
        else:
            made.skipped += phase != "M"
    ahead_ns = max(0, -min((one.ts_ns for one in made.slices), default=0))
    made.slices = [one._replace(ts_ns=one.ts_ns + ahead_ns) for one in made.slices]
    # The first event shows the format.
    sniffed = {"ph": "M", "pid": "k Core0 CTA0", "tid": "warp 0 (line 0)"}
    ending = draw(st.sampled_from(["]}", "]}", "]", ""]))
    made.skipped += ending != "]}"
    text = json.dumps({"traceEvents": [sniffed]})[:-2] + ",".join(["", *texts]) + ending
    made.content = text.encode()
    return made


# wprof ---------------------------------------------------------------------------------------------------

seconds = st.one_of(
    *[near_ns.map(lambda ns: (f"{ns // 10**9}.{ns % 10**9:09}", ns))] * 9,
    st.sampled_from(
        [("null", None), ('"1"', None), ("-0.1", None), ("1e30", None), ("true", None), ("0", 0)]
    ),
)
tasks = st.sampled_from(
    [{"pid": 5, "tid": 5, "comm": "größe"}] * 3 + [{"pid": 5, "tid": None}, {"pid": 0}, {"pid": -1}, 5, None]
)
WORK = {"cuda_kernel": "f<1>", "cuda_memcpy": "HtoD", "cuda_memset": "memset"}
SPANS = {"hardirq": "f<1>", "softirq": "softirq f<1>", "wq": "f<1>", "odd größe": "f<1>", "cuda_api": "f<1>"}
POINTS = {"timer": "f<1>", "fork": "fork", "odd": "f<1>"}
BROKEN = [
    "5",
    "{",
    "[]",
    '"x"',
    '{"t":5}',
    '{"t":""}',
    '{"t":"fork"}',
    "\xff",
    TOO_DEEP,
]


def is_task(task: object) -> bool:
    return type(task) is dict and task["pid"] >= 0


@st.composite
def wprof_lines(draw: st.DrawFn) -> Made:
    """A session, which is in any order."""
    made, lines = Made("4.jsonl"), []
    pair_of: dict[int, tuple[int, str, str]] = {}
    for _ in range(draw(st.integers(0, 25))):
        kind = draw(
            st.sampled_from([*WORK, *SPANS, *POINTS, "pytrace_entry", "pytrace_exit", "waking", "broken"])
        )
        if kind == "broken":
            lines.append(draw(st.sampled_from(BROKEN)))
            made.skipped += 1
            continue
        (text, ts_ns), (span_text, dur_ns) = draw(seconds), draw(seconds)
        if draw(st.integers(0, 9)):  # the others began before the session
            dur_ns = draw(lengths_ns)
            span_text = f"0.{dur_ns:09}"
        task, place = draw(tasks), draw(st.sampled_from([0, 1, 0, 1, 0, 1, None, -1, "x"]))
        of = {
            "t": kind,
            "task": task,
            "name": "f<1>",
            "action": "f<1>",
            "kind": "HtoD",
            "pmus": [1],
            "stack_id": 7,
        }
        of |= {
            "device_id": place,
            "stream_id": 7,
            "corr_id": 5,
            "args": draw(st.sampled_from([5, {"x": [{}]}])),
        }
        of |= {"wakee": task, "waker": {"pid": 6, "tid": 6}, "cpu": 1}
        has_length = kind in WORK or kind in SPANS
        lines.append(event_text({"ts": text} | ({"dur": span_text} if has_length else {}), **of))
        is_placed = kind not in WORK or place in (0, 1)
        if ts_ns is None or not is_task(task) or not is_placed or (has_length and dur_ns is None):
            made.skipped += 1
        elif has_length:
            name = (WORK | SPANS)[kind]
            made.slices.append(Slice(name, max(0, ts_ns - dur_ns), min(ts_ns, dur_ns)))
        elif kind.startswith("pytrace"):
            pair_of[len(lines) - 1] = (ts_ns, str(task), "B" if kind == "pytrace_entry" else "E")
        else:
            made.slices.append(Slice(POINTS.get(kind, "wakeup"), ts_ns))
    order = draw(st.permutations(range(len(lines))))
    opened: dict[object, list[int]] = {}
    for ts_ns, thread, phase in sorted(
        (pair_of[at] for at in order if at in pair_of), key=lambda one: one[0]
    ):
        begins = opened.setdefault(thread, [])
        if phase == "B":
            begins.append(ts_ns)
        else:
            start_ns = begins.pop() if begins else ts_ns
            made.slices.append(Slice("f<1>", start_ns, ts_ns - start_ns))
    made.slices += [Slice("f<1>", ts_ns, None) for begins in opened.values() for ts_ns in begins]
    lines = ['{"version":"3.1","timer_freq_hz":9,"stack_cnt":0,"pmus":["a"]}', *(lines[at] for at in order)]
    # A processor from idle to idle.
    switches = draw(st.lists(near_ns, unique=True, max_size=6).map(sorted))
    tids = [0, *(draw(st.sampled_from([0, 100, 101])) for _ in switches[1:]), 0]
    for at, ts_ns in enumerate(switches):
        prev, following = ({"pid": tid, "tid": tid} for tid in tids[at : at + 2])
        lines.append(
            event_text({"ts": f"1.{ts_ns - START_NS:09}"}, t="switch", cpu=3, prev=prev, next=following)
        )
        if tids[at]:
            made.slices.append(Slice("running", switches[at - 1], ts_ns - switches[at - 1]))
    for prev in draw(st.lists(st.sampled_from([5, {"pid": -1}]), max_size=2)):
        lines.append(event_text({"ts": "1.5"}, t="switch", cpu=3, prev=prev, next={"pid": 9, "tid": 9}))
        made.skipped += 1
    made.content = "\n".join(lines).encode().replace(b"\xc3\xbf", b"\xff")
    return made


SOURCES = {
    "rocpd": rocpd_tables(),
    "rocprof": rocprof_text(),
    "viztracer": viztracer_text(),
    "proton": proton_text(),
    "wprof": wprof_lines(),
}


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=10 * MORE)
@given(st.data(), cores, formats)
def test_records_are_drawn_or_counted(source: str, data: st.DataObject, core: str, to: str) -> None:
    assert_converted([data.draw(SOURCES[source])], core, to)


@pytest.mark.parametrize("source", SOURCES)
@settings(max_examples=4 * MORE)
@given(st.data(), cores)
def test_records_are_in_one_part_or_in_both(source: str, data: st.DataObject, core: str) -> None:
    assert_cut(data.draw(SOURCES[source]), data.draw(near), core)


@settings(max_examples=20 * MORE)
@given(st.one_of(*SOURCES.values()), st.one_of(*SOURCES.values()), cores, formats)
def test_records_of_two_files_are_drawn_or_counted(one: Made, other: Made, core: str, to: str) -> None:
    other.name = f"other-{other.name}"
    assert_converted([one, other], core, to)


@settings(max_examples=2 * MORE)
@given(st.tuples(*SOURCES.values()), cores)
def test_records_are_in_the_tables_of_a_dataset(makers: tuple[Made, ...], core: str) -> None:
    with mock.patch("tracepipe.dataset.build.ProcessPoolExecutor", Inline):
        assert_built([*makers], core)


def crossing(source: str) -> bytes | Callable[[Path], object]:
    """A file with more records than a batch, most of which overlap 99 others of their thread."""
    if source == "rocpd":
        on = {"pid": 1, "tid": 10, "name_id": 2}
        rows = [
            {"id": 1 + at, "start": START_NS + at, "end": START_NS + at + 100, **on} for at in range(1500)
        ]
        return lambda path: rocpd.make(path, {"string": rocpd.about()["string"], "region": rows})
    if source == "rocprof":
        kinds = [{"kind": "HIP_RUNTIME_API", "operations": ["hipLaunchKernel"]}]
        of = {"kind": 0, "operation": 0, "thread_id": 1}
        records = [
            {"start_timestamp": START_NS + at, "end_timestamp": START_NS + at + 100, **of}
            for at in range(1500)
        ]
        process = {"strings": {"buffer_records": kinds}, "buffer_records": {"hip_api": records}}
        return json.dumps({rocprof_json.TOP: [process]}).encode()
    if source == "wprof":
        of = {"t": "cuda_api", "name": "hipLaunchKernel", "task": {"pid": 5, "tid": 5}}
        lines = [event_text({"ts": f"1.{at + 100:09}", "dur": "1e-7"}, **of) for at in range(1500)]
        return "\n".join(['{"timer_freq_hz":9,"stack_cnt":0}', *lines]).encode()
    of = {"ph": "X", "cat": "FEE", "name": "hipLaunchKernel", "pid": "k Core0 CTA0", "tid": "warp 0 (line 0)"}
    texts = [event_text({"ts": us(START_NS + at), "dur": "0.1"}, **of) for at in range(1500)]
    ending = ',"viztracer_metadata":{}' if source == "viztracer" else ""
    return ('{"traceEvents":[' + ",".join(texts) + "]" + ending + "}").encode()


@pytest.mark.parametrize("source", SOURCES)
def test_records_for_which_there_is_no_track_are_counted(source: str, core: str) -> None:
    slices = [Slice("hipLaunchKernel", START_NS + at, 100) for at in range(1500)]
    assert assert_converted([Made("run", crossing(source), slices)], core).not_drawn > 0
