"""What the trace processor says of a converted trace, in the terms of `seen.py`."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from tests.golden.seen import Path, Seen, SeenSlice, slice_id
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.layout.tree import UNNAMED_PROCESS

# Ids of Chrome "processes" that are groups of ours are beyond any process id of Linux.
_PIDS, _GROUPS = 1 << 22, (1 << 23) + (1 << 18)
_U64 = (1 << 64) - 1

_TRACKS = """
select t.id, t.name, t.parent_id, coalesce(tt.utid, ct.utid) as utid,
       coalesce(pt.upid, pc.upid, extract_arg(t.dimension_arg_set_id, 'upid')) as upid
from track t
left join thread_track tt using (id) left join process_track pt using (id)
left join thread_counter_track ct using (id) left join process_counter_track pc using (id)"""
# Without the counts that the trace processor makes of samples of stacks.
OWN_COUNTERS = "where track_id not in (select id from track where type = 'perf_cpu_counter')"
_THREADS = """
select utid, t.tid, t.name, upid, p.pid, p.name as process from thread t left join process p using (upid)"""
_SLICES = "select id, track_id, ts, dur, name, depth, category, arg_set_id from slice order by ts, id"
_ARGS = """
select arg_set_id, key, value_type, int_value, string_value, real_value from args
where key glob 'debug.*' or key glob 'args.*'"""
# What the GPU's timer showed at a warp's entry: the time in the trace, the offset that the instant `clock
# globaltimer:N` on the track `capture` states for GPU N, and the warp's `source_after_ns`.
_SOURCE_TIMES = """
with recursive tops(id, top) as (
  select id, name from track where parent_id is null
  union all select track.id, top from track join tops on track.parent_id = tops.id
),
clocks as (
  select slice.name, extract_arg(slice.arg_set_id, 'debug.offset_ns') as offset_ns
  from slice join track on track.id = slice.track_id
  where track.name = 'capture' and slice.name glob 'clock globaltimer:*'
)
select slice.id, slice.ts + clocks.offset_ns + extract_arg(arg_set_id, 'debug.source_after_ns') as source_ns
from slice join tops on tops.id = slice.track_id
left join clocks on tops.top || ' ' glob replace(clocks.name, 'clock globaltimer:', 'GPU ') || ' *'
where extract_arg(arg_set_id, 'debug.source_after_ns') is not null"""


class Asked:
    """Answers about one trace; `base_ns` is what its times count from."""

    def __init__(self, trace: bytes) -> None:
        # A JSON trace says in otherData what its times count from, and names its groups by other means.
        self.json = trace.startswith(b"{")
        self.base_ns: int = json.loads(trace)["otherData"]["base_ns"] if self.json else 0
        with RealTraceProcessor(trace) as tp:
            self.problems = tp.problems()
            self.stats = tp.rows("select name, idx, value from stats where value > 0")
            self.tracks = {row["id"]: row for row in tp.rows(_TRACKS)}
            self.threads = {row["utid"]: row for row in tp.rows(_THREADS)}
            self.processes = {row["upid"]: row for row in tp.rows("select upid, pid, name from process")}
            self._slices = tp.rows(_SLICES)
            self._args = tp.rows(_ARGS)
            self._flows = tp.rows("select slice_out, slice_in from flow")
            self._source_ns = {row["id"]: row["source_ns"] for row in tp.rows(_SOURCE_TIMES)}
            self._counts = tp.rows(f"select track_id, ts, value from counter {OWN_COUNTERS} order by ts, id")
            self.ranks = tp.rows(
                "select name, parent_id, extract_arg(source_arg_set_id, 'sibling_order_rank') as rank"
                " from track where rank is not null order by parent_id, rank"
            )

    def path(self, track: int) -> Path:
        """The names from the root to a track."""
        row = self.tracks[track]
        if self.json:
            return self._json_path(row)
        names: list[str] = []
        while row["parent_id"] is not None:
            names.insert(0, row["name"])
            row = self.tracks[row["parent_id"]]
        if row["utid"] is not None:
            thread = self.threads[row["utid"]]
            assert thread["name"] in (row["name"], None), "the group of a thread has another name"
            process = thread["process"] or UNNAMED_PROCESS
            return (f"{process} {thread['pid']}", f"{row['name']} {thread['tid']}", *names)
        if row["upid"] is not None:
            process = self.processes[row["upid"]]
            return (f"{process['name'] or UNNAMED_PROCESS} {process['pid']}", row["name"], *names)
        return (row["name"], *names)

    def _json_path(self, row: dict[str, Any]) -> Path:
        if row["utid"] is None:
            process = self.processes[row["upid"]]
            name = row["name"].removesuffix(" value")
        else:
            thread = self.threads[row["utid"]]
            process, name = self.processes[thread["upid"]], thread["name"]
        is_group = _PIDS < process["pid"] <= _GROUPS
        number = "" if is_group else f" {process['pid']}"
        return (f"{process['name'] or UNNAMED_PROCESS}{number}", *name.split(" / "))

    def seen(self) -> Seen:
        """Everything that Perfetto would draw."""
        args = self._args_by_set()
        by_track: dict[int, list[SeenSlice]] = {}
        words: dict[int, str] = {}
        for row in self._slices:
            own = by_track.setdefault(row["track_id"], [])
            known = dict(args.get(row["arg_set_id"], {}))
            if row["id"] in self._source_ns:
                del known["source_after_ns"]
                known["source_ns"] = self._source_ns[row["id"]]
            one = SeenSlice(
                row["ts"] + self.base_ns,
                row["dur"],
                row["name"],
                row["depth"],
                row["category"] or "",
                known,
            )
            words[row["id"]] = slice_id(self.path(row["track_id"]), len(own), one)
            own.append(one)
        counts: dict[int, list[tuple[int, float]]] = {}
        for row in self._counts:
            counts.setdefault(row["track_id"], []).append((row["ts"] + self.base_ns, row["value"]))
        return Seen(
            [(self.path(track), slices) for track, slices in by_track.items()],
            [(self.path(track), values) for track, values in counts.items()],
            Counter((words[row["slice_out"]], words[row["slice_in"]]) for row in self._flows),
        )

    def _args_by_set(self) -> dict[int, dict[str, Any]]:
        out: dict[int, dict[str, Any]] = {}
        for row in self._args:
            _, _, key = row["key"].partition(".")
            kind = row["value_type"]
            value: Any = row[{"string": "string_value", "real": "real_value"}.get(kind, "int_value")]
            if kind == "bool":
                value = bool(value)
            elif kind == "uint":
                value &= _U64
            args = out.setdefault(row["arg_set_id"], {})
            assert key not in args, f"{key} has two values"
            args[key] = value
        return out
