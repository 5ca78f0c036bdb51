"""The tests' own trace processor sees what is right in a trace, and what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from perfetto.trace_builder.proto_builder import TraceProtoBuilder
from perfetto.trace_processor import TraceProcessorException

from tests.support import sample_traces
from tests.support.trace_processor import RealTraceProcessor
from tracepipe.sql.wasm import EmscriptenModule, WasmAborted
from tracepipe.ui.serve import find_ui


@pytest.mark.parametrize("as_bytes", [True, False])
def test_rows_are_dicts_with_sql_types(as_bytes: bool, tmp_path: Path) -> None:
    trace = sample_traces.write_protobuf(tmp_path / "sample:1.pftrace")
    with RealTraceProcessor(trace.read_bytes() if as_bytes else trace) as tp:
        rows = tp.rows(
            "select name, dur, 0.5 as half, null as missing, x'00ff' as blob from slice where id = 1"
        )
        assert rows == [
            {"name": "cudaLaunchKernel", "dur": 50_000, "half": 0.5, "missing": None, "blob": b"\x00\xff"}
        ]
        assert tp.rows("select count(*) as n from slice") == [{"n": 5}]
        assert tp.rows("select * from slice where id = 99") == []
        assert tp.problems() == []


def test_the_standard_library_is_there(tmp_path: Path) -> None:
    trace = sample_traces.write_chrome_json(tmp_path / "sample.json")
    with RealTraceProcessor(trace) as tp:
        rows = tp.rows(
            "include perfetto module slices.with_context;"
            " select name, thread_name, process_name from thread_slice order by ts"
        )
    assert [tuple(row.values()) for row in rows] == [
        ("main", "main", "vec_add"),
        ("cudaLaunchKernel", "main", "vec_add"),
        ("read", "worker", "vec_add"),
    ]


def test_interned_names_that_were_never_sent_are_a_problem() -> None:
    builder = TraceProtoBuilder()
    packet = builder.add_packet()
    packet.timestamp, packet.trusted_packet_sequence_id = 1, 1
    packet.sequence_flags = 3  # incremental state cleared and needed
    packet.track_event.type, packet.track_event.track_uuid, packet.track_event.name_iid = 3, 1, 42
    with RealTraceProcessor(builder.serialize()) as tp:
        assert "interned_data_tokenizer_errors" in [row["name"] for row in tp.problems()]


def test_packets_skipped_for_want_of_state_are_a_problem() -> None:
    builder = TraceProtoBuilder()
    packet = builder.add_packet()
    packet.timestamp, packet.trusted_packet_sequence_id = 1, 1
    packet.sequence_flags = 2  # incremental state needed, and never cleared
    packet.track_event.type, packet.track_event.track_uuid, packet.track_event.name = 3, 1, "lost"
    with RealTraceProcessor(builder.serialize()) as tp:
        assert tp.rows("select * from slice") == []
        assert "tokenizer_skipped_packets" in [row["name"] for row in tp.problems()]


def test_a_file_of_no_known_kind_is_refused() -> None:
    with pytest.raises(TraceProcessorException, match="Unknown trace type"):
        RealTraceProcessor(b"nothing that Perfetto knows " * 50)


def test_a_wrong_query_is_an_error_and_the_next_one_works() -> None:
    with RealTraceProcessor(b"") as tp:
        with pytest.raises(TraceProcessorException, match="no such table"):
            tp.rows("select * from absent")
        assert tp.rows("select 1 as one") == [{"one": 1}]


@pytest.mark.slow
def test_a_trace_longer_than_one_request_grows_the_heap() -> None:
    builder = TraceProtoBuilder()
    packet = builder.add_packet()
    packet.timestamp, packet.trusted_packet_sequence_id = 1, 1
    packet.track_event.type, packet.track_event.track_uuid = 3, 1
    packet.track_event.name = "n" * 100
    one = builder.serialize()
    count = (40 << 20) // len(one)
    with RealTraceProcessor(one * count) as tp:
        assert tp.rows("select count(*) as n from slice") == [{"n": count}]
        assert tp.problems() == []


def test_a_module_that_aborts_is_reported() -> None:
    module = EmscriptenModule(find_ui().version / "trace_processor.wasm")
    with pytest.raises(WasmAborted):
        module.call("trace_processor_on_rpc_request", 1)  # before trace_processor_rpc_init
