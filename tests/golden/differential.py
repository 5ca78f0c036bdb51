"""What Perfetto's trace processor sees in a trace, as facts that can be compared, and where a timeline that
tracepipe makes of a trace is meant to differ from it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any, Final, NamedTuple

from tests.support.trace_processor import RealTraceProcessor
from tracepipe.event.counters import COUNTERS, SUMMARY
from tracepipe.event.origins import IDS_PER_HOST
from tracepipe.layout.tree import UNNAMED_PROCESS
from tracepipe.units import MADE_UP

DELIBERATE: Final = {
    "slices of a thread that cross": "all are kept, on overlap tracks",
    "a begin without an end, an end without a begin": "drawn and marked with `unclosed` or `no_begin`",
    "slices and instants of one time in JSON": "the longest slice comes first, instants come last: writers "
    "state slices when they end, so that their order in the file means nothing",
    "a slice without a length in one of the same time": "next to it, as a slice does not include its end",
    "values of a begin and its end that are an array and an object": "that of the end",
    "begins in whole slices (X) of LegacyEvent": "on overlap tracks, as ends are not known",
    "instants of a process or of all (`s`)": "on the thread that wrote them, with `s`",
    "events with ids (b, n, e)": "in the process that wrote them; `scope` distinguishes ids",
    "counters with an `id` that is a number": "one for each id",
    "members that are no fields, `bind_id` too": "arguments",
    "ends of flows without a slice": "instants: a slice that has ended is not where a flow starts",
    "a flow from a slice to itself": "not drawn",
    "ids of flows that are no numbers": "join the ends that have them",
    "labels of processes": "part of their names",
    "a process or thread that is not stated": "stated as not recorded, not 0",
    "ids of processes and threads that are not those of a system": "the highest free numbers",
    "processes and threads without events": "not drawn",
    "escapes in names of JSON": "decoded",
    "slices without a name": "`no name`",
    "the idle task, and runs without an end": "not drawn",
    "a thread's time and instructions": "counted, not drawn",
}
"""What is drawn otherwise than by the trace processor, and how or why. docs/inputs.md has the same table."""

_SLICES = """
select s.id, s.ts, s.dur, s.name, s.depth, s.category, s.arg_set_id, t.name as track, t.type, th.tid,
  th.name as thread, coalesce(th.upid, pt.upid, extract_arg(t.dimension_arg_set_id, 'upid')) as upid
from slice s join track t on t.id = s.track_id
left join thread_track tt on tt.id = t.id left join thread th using (utid)
left join process_track pt on pt.id = t.id order by s.ts, s.id"""
_COUNTERS = """
select c.ts, c.value, t.name, coalesce(ct.upid, th.upid) as upid
from counter c join track t on t.id = c.track_id
left join process_counter_track ct on ct.id = t.id
left join thread_counter_track tt on tt.id = t.id left join thread th using (utid)
where t.type <> 'perf_cpu_counter'"""
_RUNS = "select ts, dur, cpu, tid from sched join thread using (utid) where tid > 0 and dur >= 0"
# Ids of tracepipe's groups, and of further processes with a pid, are beyond those of Linux.
_MADE_UP: Final = 1 << 22
_NUMBERED = re.compile(r"(.*?) ?\(?(?:pid|tid) (\d+)(?:, number \d+)?\)?")
_RANGES = re.compile(r"(?:.* / )?ranges(?:: (.*?))?(?: \(\d+\))?")
_OF_CHROME = re.compile(r"(.*?)(?: (\d+))? / .*")
_NO_NAMES: Final = ("[No name]", "[empty slice name]", "no name", None)
_OF_TRACEPIPE: Final = {"tracepipe", "summary"}
_SUMMARIES: Final = {counter.name for counter in COUNTERS if counter.category == SUMMARY}
_MEMBERS: Final = ("bind_id", "flow_in", "flow_out")
ARROW: Final = "arrow"
"""The name of flows. Instants of this name are ends of flows without a slice."""


class Place(NamedTuple):
    """A process and a thread, by number and name. All are None for a track that belongs to neither."""

    pid: int | None = None
    process: str | None = None
    tid: int | None = None
    thread: str | None = None


class Slice(NamedTuple):
    """A slice or an instant."""

    place: Place
    ts_ns: int
    dur_ns: int
    name: str
    depth: int
    category: str
    args: tuple[tuple[str, Any], ...]


class Facts(NamedTuple):
    """Everything that is in a trace."""

    slices: Counter[Any]
    counters: Counter[Any]
    flows: Counter[Any]
    runs: Counter[Any]
    threads: set[Place]


def facts(trace: bytes) -> Facts:
    """The facts of a trace as the trace processor imports it, without what tracepipe says of itself."""
    is_chrome = trace.startswith(b'{"displayTimeUnit":"ns","otherData":{')
    base_ns = json.loads(trace)["otherData"]["base_ns"] if is_chrome else 0
    with RealTraceProcessor(trace) as tp:
        processes = {row["upid"]: row for row in tp.rows("select upid, pid, name from process")}
        slices, counters, runs = map(tp.rows, (_SLICES, _COUNTERS, _RUNS))
        flows = tp.rows("select slice_out, slice_in from flow")
        args = _args(tp)

    def place(row: dict[str, Any]) -> Place:
        process = processes.get(row["upid"])
        pid, name = _numbered(process["pid"], process["name"]) if process else (None, None)
        if pid is None or pid > _MADE_UP:
            return Place()
        tid, thread = row.get("tid"), row.get("thread")
        if is_chrome and (found := _OF_CHROME.fullmatch(thread or "")):
            tid, thread = found[2] and int(found[2]), found[1]
            thread = None if thread in (UNNAMED_PROCESS, name) else thread
        tid, thread = _numbered(tid, thread)
        return Place(pid, name, *((tid, thread) if tid is not None and tid <= _MADE_UP else ()))

    found: dict[int, Slice] = {}
    for row in slices:
        known = {key: value for key, value in args.get(row["arg_set_id"], {}).items() if key not in _MEMBERS}
        category, where = known.pop("cat", row["category"] or ""), place(row)
        if {row["category"], category} & _OF_TRACEPIPE or row["name"] == ARROW:
            continue
        if is_chrome and category == "scheduler":  # which has no other form for runs
            if row["name"] == "running" and "unclosed" not in known:
                named = _OF_CHROME.fullmatch(row["thread"])
                tid = int(named[2]) if named and named[2] else None
                runs.append({"ts": row["ts"], "dur": row["dur"], "cpu": known["cpu"], "tid": tid})
            continue
        if ranges := _RANGES.fullmatch((row["thread"] if is_chrome else row["track"]) or ""):
            category, where = ranges[1] or "", Place()
        is_asynchronous = row["type"].startswith("legacy_async") or ranges is not None
        where = Place() if is_asynchronous else where
        own = f"{row['thread']}".rpartition(" / ")[2] if is_chrome else row["track"]
        found[row["id"]] = Slice(
            where,
            row["ts"] + base_ns,
            row["dur"],
            "" if row["name"] in _NO_NAMES else row["name"],
            row["depth"],
            "" if category in ("events", own) or (where == Place() and not is_asynchronous) else category,
            tuple(sorted(known.items())),
        )
    counters = [row for row in counters if row["name"].removesuffix(" value") not in _SUMMARIES]
    pairs = [(found.get(row["slice_out"]), found.get(row["slice_in"])) for row in flows]
    return Facts(
        Counter(found.values()),
        Counter(
            (place(row)[:2], row["name"].removesuffix(" value"), row["ts"] + base_ns, row["value"])
            for row in counters
        ),
        Counter((one[:4], two[:4]) for one, two in pairs if one and two and one != two),
        Counter((row["ts"] + base_ns, *list(row.values())[1:]) for row in runs),
        {one.place for one in found.values()},
    )


def _numbered(number: int | None, name: str | None) -> tuple[int | None, str | None]:
    """The number that a process or a thread had, where tracepipe gave it another one."""
    name = (name or "").partition(" on machine ")[0]
    if number is None or number <= _MADE_UP:
        return number, name or None
    if found := _NUMBERED.fullmatch(name):
        return int(found[2]), found[1] or None
    return (number % IDS_PER_HOST if number < MADE_UP else number), name or None  # of a further machine


def _args(tp: RealTraceProcessor) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for row in tp.rows("select arg_set_id, key, value_type, int_value, string_value, real_value from args"):
        origin, _, key = row["key"].partition(".")
        if origin in ("args", "debug") and key:
            kind = row["value_type"]
            value = row[{"string": "string_value", "real": "real_value"}.get(kind, "int_value")]
            found.setdefault(row["arg_set_id"], {})[key] = bool(value) if kind == "bool" else value
    return found


def differences(theirs: Facts, ours: Facts) -> list[str]:
    """The facts that only one of them has, a line each."""
    return [
        f"{kind} only {whose}: {one}"
        for kind, their, our in zip(Facts._fields, theirs, ours, strict=True)
        for whose, only in (("theirs", their - our), ("ours", our - their))
        for one in only
    ]
