"""Small traces that exercise what tracepipe's converters write, made with Perfetto's own protobuf classes."""

from __future__ import annotations

import json
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackDescriptor, TrackEvent
from perfetto.trace_builder.proto_builder import TraceProtoBuilder

START_NS = 1_000_000_000
_SEQUENCE = 1
_PROCESS, _MAIN, _WORKER, _GPU, _SM_2, _SM_10 = range(1, 7)
_LAUNCH_FLOW = 77


class _Writer:
    """Packets of one sequence."""

    def __init__(self) -> None:
        self.builder = TraceProtoBuilder()

    def track(self, uuid: int, **fields: object) -> None:
        self.builder.add_packet().track_descriptor.CopyFrom(TrackDescriptor(uuid=uuid, **fields))

    def slice(
        self, track: int, name: str, start_ns: int, dur_ns: int, *, out: int = 0, into: int = 0
    ) -> None:
        """A slice on `track`; `out` and `into` are the flow that starts at it and the one that ends there."""
        begin = TrackEvent(type=TrackEvent.TYPE_SLICE_BEGIN, track_uuid=track, name=name)
        begin.flow_ids.extend([out] if out else [])
        begin.terminating_flow_ids.extend([into] if into else [])
        end = TrackEvent(type=TrackEvent.TYPE_SLICE_END, track_uuid=track)
        for offset_ns, event in ((start_ns, begin), (start_ns + dur_ns, end)):
            packet = self.builder.add_packet()
            packet.timestamp = START_NS + offset_ns
            packet.trusted_packet_sequence_id = _SEQUENCE
            packet.track_event.CopyFrom(event)


def write_protobuf(path: Path) -> Path:
    """A process with two threads, a GPU with two numbered tracks, and a flow from launch to kernel."""
    trace = _Writer()
    trace.track(_PROCESS, process={"pid": 4242, "process_name": "vec_add"})
    trace.track(_MAIN, thread={"pid": 4242, "tid": 4242, "thread_name": "main"})
    trace.track(_WORKER, thread={"pid": 4242, "tid": 4243, "thread_name": "worker"})
    trace.track(_GPU, name="GPU 0", child_ordering=TrackDescriptor.EXPLICIT)
    # Ranks, since names alone would sort as text: SM 10 before SM 2.
    trace.track(_SM_2, name="SM 2", parent_uuid=_GPU, sibling_order_rank=2)
    trace.track(_SM_10, name="SM 10", parent_uuid=_GPU, sibling_order_rank=10)
    trace.slice(_MAIN, "main", 0, 1_000_000)
    trace.slice(_MAIN, "cudaLaunchKernel", 100_000, 50_000, out=_LAUNCH_FLOW)
    trace.slice(_WORKER, "read", 200_000, 90_000)
    trace.slice(_SM_2, "vec_add", 300_000, 400_000, into=_LAUNCH_FLOW)
    trace.slice(_SM_10, "vec_add", 310_000, 380_000)
    # The sample writes the nested slice's packets after its parent's end: Perfetto sorts by time.
    path.write_bytes(trace.builder.serialize())
    return path


def write_chrome_json(path: Path) -> Path:
    """The same calls as Chrome trace events: times in µs, a flow bound by its id."""
    common = {"pid": 4242, "cat": "userspace"}
    flow = {"name": "launch", "id": _LAUNCH_FLOW, **common}
    events = [
        {"ph": "M", "name": "process_name", "pid": 4242, "args": {"name": "vec_add"}},
        {"ph": "M", "name": "thread_name", "pid": 4242, "tid": 4242, "args": {"name": "main"}},
        {"ph": "M", "name": "thread_name", "pid": 4242, "tid": 4243, "args": {"name": "worker"}},
        {"ph": "X", "name": "main", "tid": 4242, "ts": 0, "dur": 1000, **common},
        {"ph": "X", "name": "cudaLaunchKernel", "tid": 4242, "ts": 100, "dur": 50, **common},
        {"ph": "X", "name": "read", "tid": 4243, "ts": 200, "dur": 90, **common},
        {"ph": "s", "tid": 4242, "ts": 110, **flow},
        {"ph": "f", "tid": 4243, "ts": 210, "bp": "e", **flow},
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
    return path
