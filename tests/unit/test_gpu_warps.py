"""What the warps engine makes of the records that its library sends."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled import compiled
from tests.support.gpu_channel import collected
from tests.support.gpu_libraries import SOURCES, include_flags
from tests.support.gpu_records import pack_record, warp_renderer
from tracepipe.event.checks import first_fault
from tracepipe.tracer.gpu.engines import api_calls
from tracepipe.tracer.gpu.engines import warps as layout
from tracepipe.tracer.gpu.engines.channel import GPU, NAME, Channel, Kind
from tracepipe.tracer.gpu.engines.streams import FRAME, STACK, GpuEngine, GpuRenderer
from tracepipe.tracer.gpu.engines.warps import WarpStream, thread_lines
from tracepipe.tracer.request import CaptureRequest

ROOT = Path(__file__).parents[2]
PID, TID = 42, 43


def _pack(kind: int, payload: bytes, time_ns: int = 1000) -> bytes:
    return pack_record(kind, PID, TID, time_ns, payload)


def _name(number: int, text: str) -> bytes:
    return _pack(Kind.NAME, NAME.pack(number) + text.encode())


def _lines(renderer: GpuRenderer, chunk: bytes) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in renderer.render(chunk).texts]
    assert [first_fault(line) for line in lines] == [None] * len(lines)
    return lines


def _gpu(index: int, uuid: int, name: str = "NVIDIA H200") -> bytes:
    return _pack(
        Kind.GPU,
        GPU.pack(index, 132, 9, 0, 1980000, 64, 32, 65536, 233472, 1024, uuid.to_bytes(16, "big"))
        + name.encode(),
    )


@pytest.fixture(scope="module")
def producer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program that puts records into a channel as the library does."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    source, native = ROOT / "tests/gpu/producer.cpp", ROOT / "tracepipe/tracer/gpu/native"
    include = [f"-I{native}", f"-I{ROOT}/tracepipe/marks/include"]
    command = [compiler, "-std=c++17", "-pthread", *include, str(source)]
    return compiled(command, tmp_path_factory.mktemp("producer") / "producer")


def _produced(producer: Path, what: str) -> bytes:
    channel = Channel(1 << 22)
    chunk, _ = collected(channel, [str(producer), what])
    channel.close()
    return chunk


def test_warps_that_leave_whole_come_in_short_columns(producer: Path) -> None:
    kernel, warps = _lines(warp_renderer(), _produced(producer, "plain"))
    assert (kernel["dur_ns"], kernel["args"]["warps"]) == (1198, 100)
    assert warps["warp"] == list(range(40, 140))
    assert warps["sm"] == [at % 3 for at in range(100)]
    assert warps["slot"] == list(range(100))
    assert (warps["ts_ns"], warps["entry_ns"]) == (5000, list(range(100)))
    assert warps["entry_clk"] == [7000 + at for at in range(100)]
    assert warps["exit_ns"] == warps["exit_clk"] == [1000 + at for at in range(100)]
    assert warps["entry_mask"] == warps["exit_mask"] == [0xFF] * 100


def test_marks_become_ranges_of_the_warp_that_sat_in_their_slot(producer: Path) -> None:
    renderer = warp_renderer()
    _, warps, loss = _lines(renderer, _produced(producer, "marks"))
    assert warps["range_count"] == [3, 1, 1022, 0]
    named = [warps["ranges"][at] for at in warps["range_name"]]
    columns = warps["range_clk"], warps["range_dur_clk"], warps["range_open"]
    # The second load began in the product and ended behind it; the store was not ended when its warp left.
    assert list(zip(named, *columns, strict=True))[:4] == [
        ("load", 0, 100, 0), ("mma", 100, 200, 0), ("load", 150, 250, 0), ("Store_0123456", 100, 300, 1),
    ]  # fmt: skip
    # Of 1027 marks in a ring of 1024, the last 1023: in the place of one the next may be under way.
    assert columns[0][4:] == list(range(4, 1026))
    assert columns[2][4:] == [1] * 1021 + [0]
    # And an end without a begin.
    assert (loss["layer"], loss["count"]) == ("gpu_range", 4 + 1)
    assert renderer.losses == {"gpu_range": loss["count"]}


def test_calls_end_when_the_last_of_their_lanes_has_returned_or_left(producer: Path) -> None:
    renderer = warp_renderer()
    _, warps, loss = _lines(renderer, _produced(producer, "calls"))
    named = [warps["ranges"][at] for at in warps["range_name"]]
    columns = warps["range_clk"], warps["range_dur_clk"], warps["range_open"]
    assert list(zip(named, *columns, strict=True)) == [
        ("outer", 100, 300, 0), ("inner", 200, 150, 0), ("load", 250, 10, 0),
        ("tree", 500, 60, 0), ("tree", 510, 40, 0), ("tree", 520, 20, 0),
        ("leaves", 600, 200, 0), ("stays", 900, 200, 1),
    ]  # fmt: skip
    assert (loss["layer"], loss["count"]) == ("gpu_range", 1), "a return without a call"


def test_kernels_that_shared_a_region_are_distinguished(producer: Path) -> None:
    lines = _lines(warp_renderer(), _produced(producer, "shared"))
    kernels = [line for line in lines if line["type"] == "gpu_kernel"]
    warps = {line["launch"]: line for line in lines if line["type"] == "gpu_warp" and line["launch"] != 11}
    assert [(k["launch"], k["ts_ns"], k["grid"][0], k["args"]["launched_by"]) for k in kernels] == [
        (10, 1000, 2, "graph"), (11, 1100, 1, "graph"), (11, 1200, 1, "graph"), (20, 1150, 1, "kernel")
    ]  # fmt: skip
    first = warps[10]
    assert (first["warp"], first["entry_ns"], first["exit_count"]) == ([0, 1], [1, 0], [2, 1])
    assert (first["exit_ns"], first["exit_mask"]) == ([10, 39, 10], [0xFF, 0xFFFFFF00, 0xFFFFFFFF])
    assert (warps[20]["warp"], warps[20]["ts_ns"]) == ([0], 1150)


def test_a_launch_becomes_its_call_its_kernel_and_its_warps(producer: Path) -> None:
    chunk = _produced(producer, "launch")
    renderer = warp_renderer()
    assert renderer.counts(chunk) == {"gpu_kernel": 1, "gpu_warp": 8001}
    kernel, first, second = _lines(renderer, chunk)
    assert kernel["name"] == "f<int>"
    assert kernel["args"] == {"warps": 8001, "function": "void f<int>(int*)"}
    assert (kernel["ts_ns"], kernel["dur_ns"]) == (1_000_000, 8000 * 32 + 500)
    assert (kernel["launch"], kernel["grid"], kernel["block"]) == (7, [8001, 1, 1], [8, 1, 1])

    assert (first["ts_ns"], first["launch"], first["grid"]) == (1_000_000, 7, [8001, 1, 1])
    assert first["warp"] == list(range(8000))
    assert first["entry_ns"] == [at * 32 for at in range(8000)]
    assert first["entry_clk"] == [(1 << 33) + at for at in range(8000)]
    assert first["sm"] == [at % 132 for at in range(8000)]
    assert first["slot"] == [at % 64 for at in range(8000)]
    assert first["exit_count"][:5] == [1, 1, 1, 3, 1]
    assert first["exit_ns"][3:7] == [500, 700, 800, 500]
    assert first["exit_clk"][3:7] == [900, 1200, 1400, 900]
    assert first["exit_mask"][2:7] == [0xFFFFFFFF, 0xFF, 0x00FFFF00, 0xFF000000, 0xFFFFFFFF]
    assert "entry_mask" not in first

    assert (second["warp"], second["entry_ns"], second["ts_ns"]) == ([8000], [0], 1_256_000)
    assert (second["entry_mask"], second["exit_mask"]) == ([0xFF], [0xFF])
    assert "exit_count" not in second
    assert warp_renderer().render(chunk).counts() == {"gpu_kernel": 1, "gpu_warp": 8001}


def test_a_call_has_the_launch_and_the_kernel_that_it_is_about() -> None:
    api, kernel = 1 << 63 | 307, 1
    chunk = (
        _name(api, "cuLaunchKernel")
        + _name(kernel, "vectorAdd(float const*, int)")
        + _pack(layout.WarpKind.CALL_ENTER, api_calls.CALL_ENTER.pack(api, 9, kernel, 0, 5, 0, 0), 1000)
        + _pack(layout.WarpKind.CALL_EXIT, api_calls.CALL_EXIT.pack(api, 1, 6, 0), 3000)
    )
    renderer = warp_renderer()
    begin, end = _lines(renderer, chunk)
    assert begin == {
        "ts_ns": 1000, "type": "userspace", "name": "cuLaunchKernel", "phase": "B", "pid": PID, "tid": TID,
        "cpu": 5, "launch": 9, "args": {"kernel": "vectorAdd"},
    }  # fmt: skip
    assert (end["phase"], end["ts_ns"], end["cpu"]) == ("E", 3000, 6)
    assert end["args"] == {"result": 1, "result_name": "CUDA_ERROR_INVALID_VALUE"}
    assert "launch" not in end
    assert warp_renderer().render(chunk).counts() == {"userspace": 2}


def test_gpus_are_distinguished_by_uuid_whatever_a_process_calls_them() -> None:
    renderer = warp_renderer({"GPU-00000000-0000-0000-0000-000000000005": 1})
    clock = _pack(Kind.CLOCK, layout.CLOCK.pack(0, 500, 10, 20))
    (pair,) = _lines(renderer, _gpu(0, 5) + clock)
    assert pair == {
        "type": "clock", "clock": "globaltimer:1", "source_ns": 500, "host_lo_ns": 10, "host_hi_ns": 20
    }  # fmt: skip
    (pair,) = _lines(renderer, _gpu(0, 6) + clock)
    assert pair["clock"] == "globaltimer:0"
    assert {gpu["index"]: gpu["sm_count"] for gpu in renderer.gpus}[1] == 132


def test_lost_warps_are_counted_and_reported() -> None:
    renderer = warp_renderer()
    (loss,) = _lines(renderer, _pack(layout.WarpKind.LOST_WARPS, layout.LOST_WARPS.pack(3, 0, 1, 500), 77))
    assert (loss["type"], loss["layer"], loss["count"], loss["ts_ns"]) == ("loss", "gpu_warp", 500, 77)
    assert loss["reason"] == "launch 3: no memory on the GPU for its records"
    (loss,) = _lines(renderer, _pack(layout.WarpKind.LOST_WARPS, layout.LOST_WARPS.pack(4, 0, 7, 32), 78))
    assert loss["reason"] == "launch 4: the budget of --gpu-warps was used up"
    assert renderer.losses == {"gpu_warp": 532}


def test_an_error_that_a_kernel_caused_names_the_first_launch_that_could_not_be_read() -> None:
    api, wait = 1 << 63 | 307, 1 << 63 | 17
    kind = layout.WarpKind
    stack = _pack(Kind.FRAME, FRAME.pack(7, 41, 4) + b"steptrain.py")
    chunk = stack + _pack(Kind.STACK, STACK.pack(5, 0, 1) + NAME.pack(7))
    chunk += _name(api, "cuLaunchKernel") + _name(wait, "cuCtxSynchronize") + _name(1, "add(int)")
    for launch in (3, 4):
        chunk += _pack(kind.CALL_ENTER, api_calls.CALL_ENTER.pack(api, launch, 1, 5, 0, 0, 0))
        chunk += _pack(kind.CALL_EXIT, api_calls.CALL_EXIT.pack(api, 0, 0, 0))
    chunk += _pack(kind.CALL_ENTER, api_calls.CALL_ENTER.pack(wait, 0, 0, 0, 0, 0, 0))
    chunk += _pack(kind.CALL_EXIT, api_calls.CALL_EXIT.pack(wait, 719, 0, 0))
    for launch in (3, 4):
        numbers = [launch, 1, *[0] * (len(layout.KERNEL.unpack(bytes(layout.KERNEL.size))) - 2)]
        chunk += _pack(kind.KERNEL, layout.KERNEL.pack(*numbers))
        chunk += _pack(kind.LOST_WARPS, layout.LOST_WARPS.pack(launch, 0, 2, 1))
    renderer = warp_renderer()
    _lines(renderer, chunk)
    assert renderer.cuda_errors == [
        "CUDA error in process 42: a failed launch. cuCtxSynchronize returned it first (719). "
        "The first launch without a recorded end is add (launch 3, train.py:41 step)."
    ]


@pytest.mark.parametrize(
    ("launched_by", "stack", "function"),
    [
        (1, 5, "step"),
        (1, 0, "(capture not recorded)"),
        (1, 1, "autograd (line not known)"),
        (1, 2, "(no Python)"),
        (0, 5, None),
        (2, 5, None),
    ],
)
def test_a_kernel_of_a_graph_has_the_stack_that_captured_it(
    launched_by: int, stack: int, function: str | None
) -> None:
    chunk = _pack(Kind.FRAME, FRAME.pack(7, 41, 4) + b"steptrain.py")
    chunk += _pack(Kind.STACK, STACK.pack(5, 0, 1) + NAME.pack(7)) + _name(1, "add(int)")
    sizes = (1, 1, 1, 32, 1, 1, 0, 0, 0)
    kernel = layout.KERNEL.pack(3, 1, 0, 0, *sizes, 900, 43, launched_by, 1000, 2000, 1, 1, 1, 0, 0, stack)
    lines = _lines(warp_renderer(), chunk + _pack(layout.WarpKind.KERNEL, kernel))
    frames = {line["id"]: line["frames"] for line in lines if line["type"] == "stack"}
    (event,) = [line for line in lines if line["type"] == "gpu_kernel"]
    assert (frames[event["stack"]][0]["function"] if "stack" in event else None) == function


def test_kernels_of_a_graph_are_known_by_the_order_of_their_capture(tmp_path: Path) -> None:
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", *include_flags()]
    program = compiled([*command, str(SOURCES / "captured_graphs.cpp")], tmp_path / "captured_graphs")

    def stacks(*lines: str) -> list[str]:
        text = "\n".join(lines)
        said = subprocess.run([str(program)], input=text, text=True, capture_output=True, check=True).stdout
        return [line.strip() for line in said.splitlines()]

    captured = ("begin", "add f 5", "add g 6", "add f 0", "end 1", "instantiate 1 7")
    assert stacks(*captured, "stacks 7 f g f", "destroy 1", "stacks 7 f g f") == ["5 6 2", "5 6 2"]
    assert stacks(*captured, "stacks 7 f g", "stacks 7 f f g", "stacks 8 f g f") == ["", "", ""]
    assert stacks(*captured, "forget 7", "stacks 7 f g f") == [""]
    assert stacks(*captured, "destroy 1", "instantiate 1 8", "stacks 8 f g f") == [""]
    update = ("begin", "add f 8", "end 2", "instantiate 2 7")
    assert stacks(*captured, *update, "stacks 7 f") == ["8"]
    assert stacks("begin", "add - 5", "end 1", "instantiate 1 7", "stacks 7 -") == [""]
    assert stacks("begin", "add f 5", "end 0", "instantiate 0 7", "stacks 7 f") == [""]
    two = ("begin", "add f 5", "begin", "add f 6", "end 1", "add f 7", "end 2")
    assert stacks(*two, "instantiate 1 7", "instantiate 2 8", "stacks 7 f f", "stacks 8 f") == ["", ""]
    assert stacks(*two, *captured, "stacks 7 f g f") == ["5 6 2"], "the next one is alone again"


def test_warps_whose_launch_was_lost_are_kept() -> None:
    columns = layout.COLUMN.pack(1, 4, 1) + layout.COLUMN.pack(4, 4, 1) + layout.COLUMN.pack(8, 8, 1)
    values = struct.pack("<IIIIQ", 5, 0, 0, 0, 1 << 40)
    (line,) = _lines(
        warp_renderer(), _pack(layout.WarpKind.WARPS, layout.WARPS.pack(3, 900, 1, 1, 3) + columns + values)
    )
    assert line == {
        "ts_ns": 900, "type": "gpu_warp", "name": "unknown", "launch": 3, "warp": [5], "entry_ns": [0],
        "exit_ns": [1 << 40],
    }  # fmt: skip


def test_a_note_of_the_library_is_kept() -> None:
    renderer = warp_renderer()
    assert renderer.render(_pack(Kind.NOTE, b"the patches do not fit")).texts == []
    assert renderer.notes == ["the patches do not fit"]


def test_exits_of_threads_are_lines_behind_their_warps(producer: Path) -> None:
    chunk = _produced(producer, "launch")
    renderer = warp_renderer(gpu_thread_exits=True)
    assert renderer.render(chunk).texts == warp_renderer().render(chunk).texts
    threads = list(renderer.rest())
    assert list(renderer.rest()) == [], "threads of a chunk are written once"
    # 8001 blocks of 8 threads, all of which left.
    assert sum(part.counts()["gpu_thread"] for part in threads) == 8001 * 8
    assert max(len(part.texts) for part in threads) <= 256 * 32, "memory holds some hundred warps' at a time"
    lines = [json.loads(line) for line in threads[0].texts[:40]]
    assert [first_fault(line) for line in lines] == [None] * len(lines)
    assert lines[9] == {
        "ts_ns": 1_000_532, "type": "gpu_thread", "name": "f<int>", "phase": "I", "clock": "globaltimer:0",
        "gpu": 0, "launch": 7, "pid": lines[9]["pid"], "block": [1, 0, 0], "thread": [1, 0, 0],
        "args": {"event": "exit"},
    }  # fmt: skip
    # The fourth warp leaves in three steps, of which one alone has lanes of this block.
    assert [(line["ts_ns"], line["block"][0], line["thread"][0]) for line in lines[24:32]] == [
        (1_000_596, 3, lane) for lane in range(8)
    ]


def test_coordinates_of_threads_are_those_of_their_masks() -> None:
    batch = {
        "ts_ns": 1_000, "type": "gpu_warp", "name": "k", "gpu": 1, "launch": 2, "grid": [2, 3, 1],
        "block": [20, 2, 1], "warp": [5, 1], "entry_ns": [10, 0], "exit_count": [2, 1],
        "exit_ns": [30, 40, 50], "exit_mask": [1, 0x90, 0x100],
    }  # fmt: skip
    lines = [json.loads(line) for some in thread_lines(batch) for line in some]
    # Two warps a block: warp 5 is the second of block 2, whose lane 0 is thread 32, (12, 1, 0).
    assert [(line["ts_ns"], line["block"], line["thread"]) for line in lines] == [
        (1_040, [0, 1, 0], [12, 1, 0]),
        (1_050, [0, 1, 0], [16, 1, 0]),
        (1_050, [0, 1, 0], [19, 1, 0]),
    ], "lane 8 of the second warp is beyond the block"
    for hostile in (
        {"grid": []}, {"grid": [0, 1, 1]}, {"grid": [1 << 31, 1, 1]}, {"block": [1025, 1, 1]},
        {"block": [1 << 31, 1 << 31, 1 << 31]}, {"warp": [12, 1 << 62]}, {"ts_ns": (1 << 62) - 1},
    ):  # fmt: skip
        assert [line for some in thread_lines(batch | hostile) for line in some] == []


def test_an_engine_that_writes_threads_has_their_layer(tmp_path: Path) -> None:
    asked = CaptureRequest(gpu_thread_exits=True), CaptureRequest()
    engines = [GpuEngine([WarpStream(tmp_path / "a", tmp_path / "b", options)]) for options in asked]
    assert [engine.layers & {"gpu_thread", "gpu_warp"} for engine in engines] == [
        {"gpu_thread", "gpu_warp"},
        {"gpu_warp"},
    ]
    for engine in engines:
        engine.close()


def test_the_environment_names_what_the_library_needs(tmp_path: Path) -> None:
    options = CaptureRequest(gpu_kernels="attn.*", gpu_launches="10-20", gpu_blocks="3-")
    gpus = [{"index": 0, "uuid": "GPU-a"}, {"index": 1, "uuid": "GPU-b"}]
    stream = WarpStream(tmp_path / "libwarps.so", tmp_path / "patches.fatbin", options, gpus)
    recording = GpuEngine([stream], gpus=gpus)
    assert recording.clocks == ["globaltimer:0", "globaltimer:1"]
    assert recording.gpus == gpus
    environment = recording.environment()
    assert environment["CUDA_INJECTION64_PATH"] == str(tmp_path / "libwarps.so")
    assert environment["TRACEPIPE_GPU_KERNELS"] == "attn.*"
    assert environment["TRACEPIPE_GPU_LAUNCHES"] == "10-20"
    assert environment["TRACEPIPE_GPU_BLOCKS"] == f"3-{(1 << 63) - 1}"
    table = Path(environment["TRACEPIPE_GPU_ARGUMENTS"])
    assert table.stat().st_mode & 0o777 == 0o644
    assert recording.collect() == b""
    assert recording.lost() == []
    recording.stop()
    assert recording.is_over()
    recording.close()
    assert not table.exists()


def _met(name: str, fits: bool = False) -> bytes:
    return _pack(layout.WarpKind.MET, NAME.pack(fits) + name.encode())


def test_that_no_kernel_was_selected_is_reported_with_those_that_were_launched() -> None:
    renderer = warp_renderer(gpu_kernels="attn.*")
    assert renderer.notes == ["no kernel fits --kernel 'attn.*'; no kernel was launched"]
    renderer.render(b"".join(_met(f"void k{number}<int>(int*)") for number in range(5)))
    first = "no kernel fits --kernel 'attn.*'; the kernels launched were k0<int>, k1<int>, k2<int> and 2 more"
    assert renderer.notes == [first]
    renderer.render(_met("flash_Attn_fwd(float*)\x1b[2J"))
    assert renderer.notes == ["no kernel fits --kernel 'attn.*'; near: flash_Attn_fwd(float*)\\x1b[2J"]
    renderer.render(_met("attn", fits=True))
    assert renderer.notes == []
    assert warp_renderer().notes == []
