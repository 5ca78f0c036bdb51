"""Simple implementations that write and parse traces, with which the benchmarks compare."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

Record = dict[str, Any]
_EXIT = re.compile(r"Thread \((\d+), (\d+), (\d+)\) timestamp: (\d+)")
_HIT = re.compile(r"\[(\d+)\] (\S+)")
_OF_LAYERED = {"ts", "type", "name", "phase", "pid", "tid", "comm", "args"}


class _Timeline:
    """Walks a recording, and calls `put(kind, ts_ns, track, name, args, flow, value)` for what it draws.

    Kinds are those of Perfetto: 1 begin, 2 end, 3 instant, 4 counter. A clock of a GPU is placed by the start
    of the recording alone.
    """

    def __init__(self, put: Callable[[int, int, str, str, dict[str, Any], int, int], None]) -> None:
        self._put = put
        self._offset_ns = 0

    def take(self, r: Record) -> None:
        """Draw one record."""
        if "ph" in r:
            self._element(r)
            return
        kind = r["type"]
        if kind in ("thread", "probe"):
            self._put(3, r["ts_ns"], r["track"], r["name"], r["args"], 0, 0)
        elif "ts" in r:
            args = {key: value for key, value in r.items() if key not in _OF_LAYERED} | r.get("args", {})
            phase = {"B": 1, "E": 2}.get(r.get("phase", "I"), 3)
            self._put(phase, round(r["ts"] * 1e6), f"{kind} {r['tid']}", r["name"], args, 0, 0)
        elif kind == "header":
            start = r["start"]
            self._offset_ns = start["monotonic_ns"] - start["realtime_ns"]
        elif kind == "gpu_warp":
            self._warps(r)
        elif kind == "gpu_kernel":
            ts_ns, track = self._placed(r), "stream 7"
            self._put(1, ts_ns, track, r["name"], {"launch": r["launch"]}, r["launch"], 0)
            self._put(2, ts_ns + r["dur_ns"], track, r["name"], {}, 0, 0)
        elif kind != "clock":
            track = f"{kind} {r['tid']}"
            if r["phase"] == "E":
                self._put(2, r["ts_ns"], track, r["name"], r["args"], 0, 0)
                return
            flow = r["tid"] if r["name"] == "ioctl" or kind == "userspace" else 0
            args = {**r.get("args", {}), "cpu": r["cpu"]}
            self._put(1 if r["phase"] == "B" else 3, r["ts_ns"], track, r["name"], args, flow, 0)

    def _element(self, r: Record) -> None:
        """Draw an element of Chrome's JSON that is a slice."""
        if r["ph"] == "X":
            ts_ns, track = round(float(r["ts"]) * 1000), f"{r['pid']} {r['tid']}"
            self._put(1, ts_ns, track, r["name"], r.get("args", {}), 0, 0)
            self._put(2, ts_ns + round(float(r["dur"]) * 1000), track, r["name"], {}, 0, 0)

    def _placed(self, r: Record) -> int:
        return r["ts_ns"] + (self._offset_ns if "clock" in r else 0)

    def _warps(self, r: Record) -> None:
        base_ns, warps_a_block = self._placed(r), -(-r["block"][0] // 32)
        changes: dict[int, int] = {}
        for n, warp in enumerate(r["warp"]):
            track = f"SM {r['sm'][n]} slot {r['slot'][n]}"
            begin_ns = base_ns + r["entry_ns"][n]
            end_ns = begin_ns + r["exit_ns"][n]
            args = {"source_ns": r["ts_ns"] + r["entry_ns"][n]}
            if "exit_clk" in r:
                args["cycles"] = r["exit_clk"][n]
            name = f"{r['name']} block {warp // warps_a_block} warp {warp % warps_a_block}"
            self._put(1, begin_ns, track, name, args, 0, 0)
            self._put(2, end_ns, track, name, {}, 0, 0)
            changes[begin_ns] = changes.get(begin_ns, 0) + 1
            changes[end_ns] = changes.get(end_ns, 0) - 1
        active = 0
        for ts_ns in sorted(changes):
            active += changes[ts_ns]
            self._put(4, ts_ns, "active warps", "", {}, 0, active)


def _records(source: str) -> Iterator[Record]:
    """The records of a file: one a line, as JSON, text or a record of bpftrace, or elements of a list."""
    lines: IO[str]
    with zstandard.open(source, "rt") if source.endswith(".zst") else Path(source).open() as lines:
        if source.endswith(".json"):
            yield from json.load(lines)["traceEvents"]
            return
        for line in lines:
            if found := _EXIT.match(line):
                *thread, ts_ns = map(int, found.groups())
                track, args = f"warp {thread[0] // 32}", {"thread": thread}
                yield {"type": "thread", "ts_ns": ts_ns, "track": track, "name": "thread exit", "args": args}
            elif found := _HIT.match(line):
                name = found[2].rpartition(":")[2]
                probe = {"probe": found[2]}
                yield {"type": "probe", "ts_ns": int(found[1]), "track": name, "name": name, "args": probe}
            else:
                record = json.loads(line)
                yield json.loads(record["data"]) if record.get("type") == "printf" else record


def trace_builder(source: str, target: str) -> None:
    """With perfetto.trace_builder, as its documentation shows it, fed by json.loads."""
    from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
    from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

    tracks: dict[str, int] = {}
    with Path(target).open("wb") as out:
        builder = StreamingTraceProtoBuilder(out)

        def track_of(name: str) -> int:
            uuid = tracks.get(name)
            if uuid is None:
                uuid = tracks[name] = len(tracks) + 1
                packet = builder.create_packet()
                packet.track_descriptor.uuid, packet.track_descriptor.name = uuid, name
                builder.write_packet(packet)
            return uuid

        def put(
            kind: int, ts_ns: int, track: str, name: str, args: dict[str, Any], flow: int, value: int
        ) -> None:
            uuid = track_of(track)
            packet = builder.create_packet()
            packet.timestamp = ts_ns
            packet.trusted_packet_sequence_id = 1
            e = packet.track_event
            e.type, e.track_uuid = kind, uuid
            if name and kind != TrackEvent.TYPE_SLICE_END:
                e.name = name
            for key, given in args.items():
                a = e.debug_annotations.add()
                a.name = key
                if isinstance(given, int):
                    a.int_value = given
                elif isinstance(given, str):
                    a.string_value = given
                elif isinstance(given, float):
                    a.double_value = given
                elif not isinstance(given, list) or not all(isinstance(item, int) for item in given):
                    a.string_value = json.dumps(given)
                else:
                    for item in given:
                        a.array_values.add().int_value = item
            if flow:
                e.flow_ids.append(flow)
            if kind == TrackEvent.TYPE_COUNTER:
                e.counter_value = value
            builder.write_packet(packet)

        timeline = _Timeline(put)
        for record in _records(source):
            timeline.take(record)


def orjson_events(source: str, target: str) -> None:
    """Chrome's JSON with orjson.dumps of each event, fed by orjson.loads."""
    import orjson

    phases = {1: "B", 2: "E", 3: "i", 4: "C"}
    tracks: dict[str, int] = {}
    with Path(source).open("rb") as lines, Path(target).open("wb") as out:
        out.write(b'{"traceEvents":[\n{}')

        def put(
            kind: int, ts_ns: int, track: str, name: str, args: dict[str, Any], flow: int, value: int
        ) -> None:
            event: dict[str, Any] = {"ph": phases[kind], "name": name or track, "pid": 1}
            event["tid"] = tracks.setdefault(track, len(tracks) + 1)
            event["ts"] = ts_ns / 1000
            if kind == 4:
                event["args"] = {"value": value}
            elif args:
                event["args"] = args
            out.write(b",\n" + orjson.dumps(event))
            if flow:
                arrow = {"ph": "s", "cat": "flow", "name": "flow", "id": flow, "bp": "e"}
                out.write(b",\n" + orjson.dumps(event | arrow))

        timeline = _Timeline(put)
        for line in lines:
            timeline.take(orjson.loads(line))
        out.write(b"\n]}\n")


def orjson_whole(source: str, target: str) -> None:
    """Parse JSON as one value, and write nothing."""
    import orjson

    orjson.loads(Path(source).read_bytes())


def perfetto_classes(source: str, target: str) -> None:
    """Examine each event of a Perfetto trace with Perfetto's classes, and write nothing."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as pb

    trace = pb.Trace()
    trace.ParseFromString(Path(source).read_bytes())
    for packet in trace.packet:
        if packet.HasField("track_event"):
            event = packet.track_event
            _ = (
                packet.timestamp,
                event.name_iid,
                [(one.name_iid, one.int_value) for one in event.debug_annotations],
            )


WAYS: dict[str, Callable[[str, str], None]] = {
    way.__name__: way for way in (trace_builder, orjson_events, orjson_whole, perfetto_classes)
}
"""Name, as `convert.measured` takes it → the implementation from a source to a target."""
