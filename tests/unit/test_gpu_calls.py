"""API calls with their arguments, from the structs that CUDA's headers draw to the lines of the file."""

from __future__ import annotations

import importlib.util
import json
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.compiled import compiled
from tests.support.gpu_channel import collected
from tests.support.gpu_records import pack_record, warp_renderer
from tracepipe.errors import CaptureUnavailable
from tracepipe.event.checks import first_fault
from tracepipe.hooks.hook import FilePlace, Probe
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import load_set
from tracepipe.hooks.slots import slots
from tracepipe.tracer.gpu.build.toolchain import find_parts
from tracepipe.tracer.gpu.engines import api_calls
from tracepipe.tracer.gpu.engines import warps as layout
from tracepipe.tracer.gpu.engines.api_calls import ARGUMENTS_VARIABLE, ApiCalls, parameters, write_table
from tracepipe.tracer.gpu.engines.channel import NAME, Channel, Kind, read_name, records
from tracepipe.tracer.gpu.engines.streams import GpuEngine
from tracepipe.tracer.gpu.engines.warps import WarpStream
from tracepipe.tracer.records import record as probe_record
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.request import CaptureRequest

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tracepipe/tracer/gpu/native"
PID, TID = 42, 43
ADDRESS = 0x7F0000001000


def _headers() -> list[Path]:
    for part in find_parts().cupti:
        if all((part.include[0] / name).is_file() for name in _generator().HEADERS):
            return list(part.include)
    pytest.skip("CUPTI's headers are not installed")


def _generator() -> ModuleType:
    path = ROOT / "scripts/api_parameters.py"
    specification = importlib.util.spec_from_file_location("api_parameters", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def _compiler() -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is not installed")
    return compiler


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A program that makes records of calls, with CUDA's own structs."""
    folder = tmp_path_factory.mktemp("native")
    (folder / "crt").mkdir()
    (folder / "crt/host_defines.h").write_text(_generator().CRT)
    include = [f"-I{NATIVE}", *(f"-isystem{path}" for path in _headers()), f"-idirafter{folder}"]
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-D__CUDA_API_VERSION_INTERNAL"]
    source = str(ROOT / "tests/gpu/caller.cpp")
    return str(compiled([_compiler(), *flags, *include, source], folder / "caller"))


def _run(caller: str, folder: Path, *arguments: str, table: str | None = None) -> tuple[bytes, str]:
    """What the program put into the channel, and what it printed."""
    channel = Channel(1 << 24)
    path = write_table(ApiCalls().table() if table is None else table, folder)
    done = collected(channel, [caller, *arguments], {ARGUMENTS_VARIABLE: str(path)}, check=table is None)
    channel.close()
    return done


def _lines(chunk: bytes) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in warp_renderer().render(chunk).texts]
    assert [first_fault(line) for line in lines] == [None] * len(lines)
    return lines


@pytest.fixture(scope="session")
def lines(caller: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    chunk, _ = _run(caller, tmp_path_factory.mktemp("channel"), "calls")
    return _lines(chunk)


def _args(lines: list[dict[str, Any]], name: str, phase: str = "B") -> list[dict[str, Any]]:
    return [line.get("args", {}) for line in lines if line["name"] == name and line["phase"] == phase]


def test_a_launch_has_its_sizes_its_stream_and_its_kernel(lines: list[dict[str, Any]]) -> None:
    assert _args(lines, "cuLaunchKernel") == [
        {
            "function": 0x7F01,
            "grid": [4, 5, 6],
            "block": [128, 2, 1],
            "shared_bytes": 49152,
            "stream": 0x9000,
            "kernel": "f<int>",
        }
    ]
    assert [line.get("launch") for line in lines if line["name"] == "cuLaunchKernel"] == [7, None]
    assert _args(lines, "cudaLaunchKernel") == [
        {
            "function": 0x7F02,
            "grid": [10, 11, 12],
            "block": [32, 4, 8],
            "shared_bytes": 1 << 33,
            "stream": 0x9002,
            "kernel": "f<int>",
        }
    ]


@pytest.mark.parametrize(
    ("launch", "registers", "needs"),
    [
        (7, 40, {"registers": 40, "shared_bytes": 512 + 49152}),
        (99, 40, {"registers": 40}),  # no call of it was recorded, as of a graph's node
        (7, 0, {}),
    ],
)
def test_a_kernel_has_what_its_launch_needs(
    caller: str, tmp_path: Path, launch: int, registers: int, needs: dict[str, int]
) -> None:
    """Static shared memory by its machine code, and dynamic by its call."""
    chunk, _ = _run(caller, tmp_path, "calls")
    pid = next(iter(records(chunk))).pid
    kernel = layout.KERNEL.pack(
        launch, 1, 0, 0, 4, 1, 1, 64, 1, 1, 0, 0, 0, 900, 43, 0, 1000, 2000, 8, 8, 8, registers, 512, 0
    )
    lines = _lines(chunk + pack_record(layout.WarpKind.KERNEL, pid, TID, 5, kernel))
    (args,) = [line["args"] for line in lines if line["type"] == "gpu_kernel"]
    assert {key: args[key] for key in ("registers", "shared_bytes") if key in args} == needs


def test_a_launch_has_what_is_in_the_struct_that_it_points_to(lines: list[dict[str, Any]]) -> None:
    configured, without = _args(lines, "cuLaunchKernelEx")
    sizes = {"grid": [7, 8, 9], "block": [64, 2, 3], "shared_bytes": 1024, "stream": 0x9001}
    assert configured == {"function": 0x7F01, **sizes}
    assert without["grid"] == [0, 0, 0]
    (runtime,) = _args(lines, "cudaLaunchKernelExC")
    sizes = {"grid": [13, 14, 15], "block": [16, 2, 1], "shared_bytes": 2048, "stream": 0x9003}
    assert runtime == {"function": 0x7F03, **sizes}


def test_results_have_names_and_what_came_out(lines: list[dict[str, Any]]) -> None:
    success = {"result": 0, "result_name": "CUDA_SUCCESS"}
    assert _args(lines, "cuMemAlloc_v2", "E") == [
        {**success, "address": ADDRESS},
        {"result": 2, "result_name": "CUDA_ERROR_OUT_OF_MEMORY"},
        {**success, "address": 0},
    ]
    assert _args(lines, "cudaMalloc", "E") == [
        {"result": 0, "result_name": "cudaSuccess", "address": ADDRESS}
    ]
    assert _args(lines, "cuInit", "E") == [{"result": 100, "result_name": "CUDA_ERROR_NO_DEVICE"}]


def test_effects_of_calls_on_memory_are_recorded_once(lines: list[dict[str, Any]]) -> None:
    sent = [(line["name"], line["phase"], line["args"]) for line in lines if line["type"] == "memory"]
    assert sent == [
        ("alloc", "I", {"size": 4096, "address": ADDRESS, "call": "cuMemAlloc_v2"}),
        ("alloc", "I", {"size": 64, "call": "cuMemAlloc_v2"}),
        (
            "set",
            "I",
            {"size": 60, "address": ADDRESS, "value": 0xABCD, "stream": 0x9000, "call": "cuMemsetD2D16Async"},
        ),
        ("free", "I", {"address": ADDRESS, "call": "cuMemFree_v2"}),
    ]
    host_to_device, device_to_host = [line for line in lines if line["type"] == "transfer"]
    assert (host_to_device["name"], host_to_device["args"]["size"]) == ("HtoD", 4096)
    assert device_to_host["args"] == {
        "size": 600, "direction": "DtoH", "from": ADDRESS, "to": 0x5000, "stream": 0x9004,
        "call": "cudaMemcpy2DAsync",
    }  # fmt: skip


def test_texts_keep_their_ends_and_bad_ones_affect_no_other(lines: list[dict[str, Any]]) -> None:
    named = _args(lines, "cuModuleGetFunction")
    assert [args.get("symbol") for args in named] == ["_Z1fPi", "at_end", "x" * 248, None]
    assert {args["module"] for args in named} == {0x3000}


def test_an_unknown_function_has_no_arguments(lines: list[dict[str, Any]]) -> None:
    assert _args(lines, "cuFunctionOfTheFuture") == [{}]
    assert _args(lines, "cuFunctionOfTheFuture", "E") == [{"result": 0, "result_name": "CUDA_SUCCESS"}]


def test_without_the_table_calls_have_no_arguments(caller: str, tmp_path: Path) -> None:
    chunk, _ = _run(caller, tmp_path, "calls", table="")
    assert chunk == b""  # the program ends where the library would say so
    name = 1 << 63 | 5
    bare = pack_record(Kind.NAME, PID, TID, 1, NAME.pack(name) + b"cuMemAlloc_v2")
    bare += pack_record(
        layout.WarpKind.CALL_ENTER, PID, TID, 2, api_calls.CALL_ENTER.pack(name, 0, 0, 0, 1, 0, 0)
    )
    bare += pack_record(layout.WarpKind.CALL_EXIT, PID, TID, 3, api_calls.CALL_EXIT.pack(name, 0, 1, 0))
    enter, leave = _lines(bare)
    assert "args" not in enter
    assert leave["args"] == {"result": 0, "result_name": "CUDA_SUCCESS"}


@pytest.mark.parametrize(
    "table",
    ["cuInit 0+3\n", "cuInit 0+4,\n", "cuInit x\n", "cuInit out0\n", "cuInit " + "0+4 " * 9 + "\n"],
)
def test_a_table_that_is_wrong_is_not_used(caller: str, tmp_path: Path, table: str) -> None:
    assert _run(caller, tmp_path, "calls", table=table)[0] == b""


# Function → its arguments as machine words by position, and what its out argument points to.
SAME_CALLS: list[tuple[str, dict[int, int], int]] = [
    ("cuLaunchKernel", {0: 0x7F01, 1: 4, 2: 5, 3: 6, 4: 128, 5: 2, 6: 1, 7: 49152, 8: 0x9000}, 0),
    (
        "cudaLaunchKernel",
        {0: 0x7F02, 1: 10 | 11 << 32, 2: 12, 3: 32 | 4 << 32, 4: 8, 6: 1 << 33, 7: 0x9002},
        0,
    ),
    ("cuMemAlloc_v2", {1: 4096}, ADDRESS),
    ("cuMemcpyHtoDAsync_v2", {0: ADDRESS, 1: 0x5000, 2: 4096, 3: 0x9000}, 0),
    (
        "cudaMemcpy2DAsync",
        {0: 0x5000, 1: 512, 2: ADDRESS, 3: 256, 4: 200, 5: 3, 6: 2, 7: 0x9004},
        0,
    ),
    ("cuMemsetD2D16Async", {0: ADDRESS, 1: 512, 2: 0xABCD, 3: 10, 4: 3, 5: 0x9000}, 0),
    ("cuMemFree_v2", {0: ADDRESS}, 0),
]


def _by_probes(name: str, words: dict[int, int], out: int) -> list[dict[str, Any]]:
    """The lines of a call as the records of a probe give it."""
    hooks = load_set("cuda-runtime" if name.startswith("cuda") else "cuda-driver")
    hook = HookIndex(hooks.hooks, hooks.variants).find(name)
    assert hook is not None
    packed = [
        words[slot.low] if slot.high is None else words[slot.low] | words[slot.high] << 32
        for slot in slots(hook.signature)
    ]
    packed += [0] * (8 - len(packed))

    def raw(kind: int, ts_ns: int, values: Sequence[int]) -> bytes:
        return struct.pack("<8xQIIIBBH4Q", ts_ns, TID, PID, 0, kind, 0, 3, *values)

    chunk = raw(probe_record.MORE, 10, packed[4:]) + raw(probe_record.CALL_ENTER, 10, packed[:4])
    chunk += raw(probe_record.CALL_RETURN, 20, [0, out, 0, 0])
    renderer = RecordRenderer([Probe(name, name, FilePlace("/lib/x.so", 16), hook)], {}, ApiCalls().values)
    return [json.loads(line) for line in renderer.render(chunk).texts]


@pytest.mark.parametrize(("name", "words", "out"), SAME_CALLS, ids=[name for name, _, _ in SAME_CALLS])
def test_a_call_has_the_same_lines_as_by_probes(
    caller: str, tmp_path: Path, name: str, words: dict[int, int], out: int
) -> None:
    chunk, _ = _run(caller, tmp_path, "calls")
    sent = list(records(chunk))
    names = [read_name(r.payload) for r in sent if r.kind == Kind.NAME]
    number = next(number for number, sent_name in names if sent_name == name)
    mine = [r for r in sent if r.kind in (layout.WarpKind.CALL_ENTER, layout.WarpKind.CALL_EXIT, Kind.NAME)]
    mine = [r for r in mine if NAME.unpack_from(r.payload)[0] == number]
    call_alone = b"".join(
        pack_record(r.kind, PID, TID, 20 if r.kind == layout.WarpKind.CALL_EXIT else 10, bytes(r.payload))
        for r in mine
    )
    by_library, by_probes = _lines(call_alone), _by_probes(name, words, out)
    if "Launch" in name:  # the kernel's name was sent before
        assert by_library[0].pop("launch", None) in (7, None)
        del by_library[0]["args"]["kernel"]
    for line in (*by_library, *by_probes):
        line.pop("cpu")
    assert by_library == by_probes


@pytest.mark.slow
def test_where_arguments_are_is_what_cudas_headers_say(tmp_path: Path) -> None:
    """Of each function as much as all versions have, and nothing else."""
    _compiler()
    version, found = _generator().of_version(_headers(), tmp_path)
    known = parameters()
    for name, members in found.items():
        written = known.get(name)
        assert written is not None or version not in (NATIVE / "api_parameters.txt").read_text(), name
        for mine, theirs in zip(written or [], members, strict=False):
            assert (mine.offset, mine.size_bytes) == theirs[:2], name
            assert mine.pointed_bytes <= theirs[2], name
        assert len(written or []) <= len(members), name


def test_every_argument_that_is_recorded_can_be_read() -> None:
    """What is left out are the 32-bit functions of CUDA 3, and what differs between versions of CUDA."""
    api = ApiCalls()
    left_out = set()
    for name in parameters():
        hook = api._hook(name)
        if len(api.find(name).probe.signature.arguments) < len(hook.signature.arguments):
            left_out.add(name)
    versions = {"cudaMemAdvise", "cudaMemPrefetchAsync", "cudaMemPrefetchAsync_ptsz"}
    assert versions <= left_out
    assert all(f"{name}_v2" in parameters() for name in left_out - versions)
    assert len(api.table().splitlines()) > 480


def test_no_word_is_outside_of_its_struct() -> None:
    sizes = {
        name: max(p.offset + p.size_bytes for p in found) for name, found in parameters().items() if found
    }
    for line in ApiCalls().table().splitlines():
        name, *words = line.split(" ")
        struct_name = {"cuLaunchKernelEx": "CUlaunchConfig", "cudaLaunchKernelExC": "cudaLaunchConfig"}
        for word in words:
            for part in word.split(","):
                digits = part.lstrip("@outhrgex")
                offset, _, size_bytes = digits.partition("+")
                is_pointer = part.startswith(("out", "text", "through"))
                end = int(offset) + (8 if is_pointer else int(size_bytes))
                where = struct_name[name.removesuffix("_ptsz")] if part.startswith("@") else name
                assert end <= sizes[where], line


def test_the_command_finds_the_table_and_it_goes_with_the_recording(tmp_path: Path) -> None:
    recording = GpuEngine(
        [WarpStream(tmp_path / "libwarps.so", tmp_path / "patches.fatbin", CaptureRequest())]
    )
    table = Path(recording.environment()[ARGUMENTS_VARIABLE])
    assert table.stat().st_mode & 0o777 == 0o644
    assert "cuMemAlloc_v2 8+8 out0+8\n" in table.read_text()
    assert {"memory", "transfer"} <= recording.layers
    recording.close()
    assert not table.exists()


def test_a_table_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CaptureUnavailable, match="cannot be written"):
        write_table("", tmp_path / "missing")
