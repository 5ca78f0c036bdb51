"""The native core and its reference in Python make the same of any trace in Chrome's JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracepipe.readers.chrome
import tracepipe.readers.json_elements
import tracepipe.readers.sorted_rows
from benchmarks.recordings import write_kineto
from tests.golden.both import converted
from tests.golden.hostile import values
from tests.support.cores import CORES
from tracepipe.event.model import NAME_BYTES_MAX
from tracepipe.recording.convert import ConversionOptions

_CATEGORIES = (
    "cpu_op", "kernel", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "gpu_user_annotation", "ac2g",
    "fwdbwd", "cpu_instant_event", "python_function", "scope", "FEE", "",
)  # fmt: skip
_KEYS = (
    "device", "stream", "grid", "block", "correlation", "bytes", "size", "registers per thread", "registers",
    "operation", "cat", "Bytes", "Device Type", "Addr", "call_stack", "ts", "dur", "a",
)  # fmt: skip
_numbers = st.sampled_from(
    [
        0,
        1,
        7,
        0.5,
        1.0,
        -0.0,
        0.00001,
        2.206896551724138,
        0.1 + 0.2,
        1e22,
        100000000.125,
        (1 << 31) - 1,
        1 << 64,
    ]
)
_times = st.integers(0, 50) | st.sampled_from(
    [0.125, 5.0005, "7.5", -1, 1712195495519689.047, 1712195495519690, 10**17, None]
)
_args = st.dictionaries(
    st.sampled_from(_KEYS), _numbers | st.lists(_numbers, min_size=3, max_size=3) | values, max_size=5
)


@st.composite
def _events(draw: st.DrawFn) -> dict[str, Any]:
    """An event of a trace of PyTorch, or nearly one."""
    event = {
        "ph": draw(st.sampled_from("XXXXXXistfMCBEbne")),
        "cat": draw(st.sampled_from(_CATEGORIES)),
        "name": draw(
            st.sampled_from(
                ["f", "cudaLaunchKernel", "Memcpy HtoD (Pageable -> Device)", "Memset (Device)", "[memory]",
                 "x" * (NAME_BYTES_MAX + 1), 'q"\n', 5]
            )
        ),
        "pid": draw(st.sampled_from([0, 7, 7, "Spans", -1])),
        "tid": draw(st.sampled_from([0, 7, 7, "stream 7"])),
        "ts": draw(_times),
        "dur": draw(_times),
        "args": draw(_args | st.none()),
    }  # fmt: skip
    for key in draw(st.lists(st.sampled_from([*event]), max_size=1)):
        del event[key]
    more = draw(
        st.dictionaries(st.sampled_from(["id", "s", "bp", "stream", "a"]), st.integers(0, 3), max_size=2)
    )
    return {**event, **more} if draw(st.booleans()) else {**more, **event}


@st.composite
def _traces(draw: st.DrawFn) -> bytes:
    """A trace of such events, some of them many times."""
    some = draw(st.lists(_events(), min_size=1, max_size=8))
    events = [some[at % len(some)] for at in draw(st.lists(st.integers(0, 30), max_size=40))]
    members = draw(
        st.sampled_from([{"schemaVersion": 1, "distributedInfo": {"rank": 3}}, {"displayTimeUnit": "ns"}])
    )
    text = json.dumps({**members, "traceEvents": events}, indent=draw(st.sampled_from([None, 2])))
    return text.encode().replace(
        b'"f"', draw(st.sampled_from([b'"f"', b'"\\u0066"', b'"f\xff"', b'"\xc3\xa9"']))
    )


@pytest.mark.slow
@settings(max_examples=50)
@given(_traces(), st.sampled_from([64, 1 << 17]), st.sampled_from([1, 1 << 12]))
def test_whatever_a_trace_holds(data: bytes, chunk_bytes: int, kinds_max: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracepipe.readers.json_elements, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(tracepipe.readers.chrome, "_KINDS_MAX", kinds_max)
        path = Path(folder, "input.json")
        path.write_bytes(data)
        for to in ("text", "chrome"):
            converted(path, to, ConversionOptions("chrome"), CORES)


@pytest.mark.slow
@pytest.mark.parametrize("run_rows", [5, 1 << 11])
def test_a_recording_many_times(run_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUN_ROWS", "NATIVE_RUN_ROWS"):
        monkeypatch.setattr(tracepipe.readers.sorted_rows, name, run_rows)
    path = tmp_path / "input.json"
    write_kineto(path, 8)
    _, account = converted(path, "perfetto", None, CORES)
    assert account.counts["gpu_kernel"] == 8 * 63
