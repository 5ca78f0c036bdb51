"""What becomes of CUPTI's records: the lines of the event file, without a GPU."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_records import kernel_renderer, pack_record
from tracepipe.event.checks import first_fault
from tracepipe.hooks.calls import CALL_RULES
from tracepipe.tracer.gpu.build.toolchain import NATIVE
from tracepipe.tracer.gpu.engines import kernels
from tracepipe.tracer.gpu.engines.channel import GPU, Kind
from tracepipe.tracer.gpu.engines.kernels import (
    CALL,
    COPY,
    HELLO,
    KERNEL,
    MEMORY,
    NODE,
    SET,
    KernelKind,
    KernelStream,
)
from tracepipe.tracer.gpu.engines.streams import FRAME, STACK, GpuEngine, GpuRenderer

UUID = bytes.fromhex("4717ba2800112233445566778899aabb")
RUNTIME, LAUNCH, MALLOC = 2, 211, 20
COPYING, ADDING = 41, 42


def record(kind: int, payload: bytes, pid: int = 42) -> bytes:
    return pack_record(kind, pid, 1, 5, payload)


def hello(clock: int = 0) -> bytes:
    return record(KernelKind.HELLO, HELLO.pack(130001, clock, 1, 2, 3))


def gpu(index: int = 0, uuid: bytes = UUID, pid: int = 42) -> bytes:
    head = GPU.pack(index, 132, 9, 0, 1980000, 64, 32, 65536, 233472, 0, uuid)
    return record(Kind.GPU, head + b"NVIDIA H200", pid)


def name(number: int, text: str, pid: int = 42) -> bytes:
    return record(Kind.NAME, number.to_bytes(8, "little") + text.encode(), pid)


def function(number: int, text: str) -> bytes:
    return record(
        KernelKind.CALL_NAME, RUNTIME.to_bytes(4, "little") + number.to_bytes(4, "little") + text.encode()
    )


def kernel(
    start_ns: int, correlation: int, *, named: int = 1, gpu: int = 0, graph: int = 0, cluster: int = 0
) -> bytes:
    place = (gpu, 1, 7, correlation)
    sizes = (64, 2, 1, 192, 1, 1, cluster, cluster, cluster, 16, 2048, 54, graph, 0, 0, 0)
    return KERNEL.pack(start_ns, start_ns + 500, named, 3, *place, *sizes)


def call(start_ns: int, number: int, correlation: int, result: int = 0) -> bytes:
    return CALL.pack(start_ns, start_ns + 100, 0, RUNTIME, number, 43, correlation, result, *[NO_STREAM] * 3)


def lines(*chunks: bytes, renderer: GpuRenderer | None = None) -> list[dict[str, Any]]:
    """What becomes of the chunks; of a renderer of their own, with what waited for more."""
    own = renderer or kernel_renderer()
    texts = own.render(b"".join(chunks)).texts
    return [json.loads(line) for line in texts + ([] if renderer else own.last().texts)]


def test_a_kernel_is_a_span_with_its_launch() -> None:
    events = lines(hello(), gpu(), name(1, "add(int)"), record(KernelKind.KERNEL, kernel(1000, 9)))
    assert events == [
        {
            "ts_ns": 1000,
            "type": "gpu_kernel",
            "name": "add(int)",
            "phase": "X",
            "dur_ns": 500,
            "pid": 42,
            "gpu": 0,
            "stream": 7,
            "launch": 9,
            "grid": [64, 2, 1],
            "block": [192, 1, 1],
            "args": {"registers": 54, "shared_bytes": 2064, "context": 1},
        }
    ]


def test_a_launch_call_has_the_kernels_launch_id_and_other_calls_none() -> None:
    functions = function(LAUNCH, "cudaLaunchKernel_v7000") + function(MALLOC, "cudaMalloc_v3020")
    calls = record(KernelKind.CALL, call(10, MALLOC, 8, result=2) + call(200, LAUNCH, 9))
    malloc, launch = lines(functions, calls)
    assert (malloc["name"], malloc["args"], malloc.get("launch")) == ("cudaMalloc", {"result": 2}, None)
    assert (launch["name"], launch["tid"], launch["dur_ns"], launch["launch"]) == (
        "cudaLaunchKernel",
        43,
        100,
        9,
    )


def test_a_copy_and_the_call_that_asked_for_it_have_one_number() -> None:
    functions = function(COPYING, "cudaMemcpyAsync_v3020")
    functions += function(ADDING, "cudaGraphAddMemcpyNode_v10000")
    calls = record(KernelKind.CALL, call(10, COPYING, 148) + call(200, ADDING, 149))
    copied = record(KernelKind.COPY, COPY.pack(1000, 1700, 4096, 0, 0, 1, 7, 148, 0, 0, 1, 2, 3, 1))
    copying, adding, copy = lines(functions, calls, copied)
    assert (copying["name"], copying["launch"], copy["type"], copy["launch"]) == (
        "cudaMemcpyAsync",
        148,
        "transfer",
        148,
    )
    assert "launch" not in adding


ARGS = {"grid": [64, 2, 1], "block": [192, 1, 1], "shared_bytes": 2048, "stream": 7, "kernel": "add"}


def test_a_launch_call_has_what_its_kernel_says_of_it() -> None:
    """Whichever comes first, and both APIs' calls."""
    renderer = kernel_renderer()
    head = (
        function(LAUNCH, "cudaLaunchKernel_v7000")
        + function(13, "cudaGraphLaunch_v10000")
        + name(1, "add(int)")
    )
    assert lines(head, record(KernelKind.CALL, call(200, LAUNCH, 9)), renderer=renderer) == []
    launch, started = lines(record(KernelKind.KERNEL, kernel(1000, 9)), renderer=renderer)
    assert (launch["name"], launch["args"], started["type"]) == ("cudaLaunchKernel", ARGS, "gpu_kernel")
    (later,) = lines(record(KernelKind.CALL, call(190, LAUNCH, 9)), renderer=renderer)
    assert later["args"] == ARGS
    failed, graph = lines(
        record(KernelKind.CALL, call(300, LAUNCH, 10, result=2) + call(400, 13, 11)), renderer=renderer
    )
    assert [event["args"] for event in (failed, graph)] == [{"result": 2}, {"result": 0}], (
        "these wait for none"
    )


def test_a_launch_call_waits_for_its_kernel_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = kernel_renderer()
    late = pack_record(KernelKind.CALL, 42, 1, 5 + kernels.WAIT_NS, call(200, LAUNCH, 10))
    assert (
        lines(
            function(LAUNCH, "cuLaunchKernel"),
            record(KernelKind.CALL, call(100, LAUNCH, 9)),
            renderer=renderer,
        )
        == []
    )
    (event,) = lines(late, renderer=renderer)
    assert (event["ts_ns"], event["launch"], event["args"]) == (100, 9, {"result": 0})
    assert [json.loads(text)["launch"] for text in renderer.last().texts] == [10]
    assert renderer.last().texts == []
    monkeypatch.setattr(kernels, "WAITING_MAX", 1)
    calls = (
        function(LAUNCH, "cuLaunchKernel"),
        record(KernelKind.CALL, call(300, LAUNCH, 11) + call(400, LAUNCH, 12)),
    )
    (first,) = lines(*calls, renderer=kernel_renderer())
    assert first["launch"] == 11


def test_events_come_in_the_order_of_their_times() -> None:
    chunk = record(KernelKind.KERNEL, kernel(3000, 2) + kernel(1000, 1)) + record(
        KernelKind.CALL, call(2000, LAUNCH, 3)
    )
    assert [event["ts_ns"] for event in lines(chunk)] == [1000, 2000, 3000]


def test_launch_ids_of_two_processes_differ() -> None:
    same = kernel(1000, 9)
    first, second = lines(record(KernelKind.KERNEL, same, 42), record(KernelKind.KERNEL, same, 43))
    assert first["launch"] != second["launch"]
    assert second["launch"] & 0xFFFFFFFF == 9


def test_a_gpu_has_one_number_for_all_processes() -> None:
    """The second process sees the machine's second GPU alone, as its own first."""
    other = bytes(16)
    renderer = kernel_renderer()
    sent = gpu(0) + gpu(1, other) + gpu(0, other, 43) + record(KernelKind.KERNEL, kernel(1000, 9), 43)
    assert [event["gpu"] for event in lines(sent, renderer=renderer)] == [1]
    assert [entry["index"] for entry in renderer.gpus] == [0, 1]
    expected = {"index": 0, "name": "NVIDIA H200", "uuid": "GPU-4717ba28-0011-2233-4455-66778899aabb"}
    limits = {
        "compute_capability": "9.0",
        "max_warps_per_sm": 64,
        "max_blocks_per_sm": 32,
        "registers_per_sm": 65536,
        "shared_bytes_per_sm": 233472,
    }
    assert renderer.gpus[0] == {**expected, "sm_count": 132, **limits}


def test_a_gpu_met_later_under_a_number_that_is_taken_gets_another() -> None:
    renderer = kernel_renderer()
    lines(gpu(0), gpu(0, bytes(16), 43), renderer=renderer)
    assert [entry["index"] for entry in renderer.gpus] == [0, 1]


def test_a_gpu_of_the_header_keeps_its_number() -> None:
    """The process sees the machine's fourth GPU alone."""
    uuid = "GPU-4717ba28-0011-2233-4455-66778899aabb"
    renderer = kernel_renderer({uuid: 3})
    assert [
        event["gpu"] for event in lines(gpu(0), record(KernelKind.KERNEL, kernel(1, 9)), renderer=renderer)
    ] == [3]
    assert [(entry["index"], entry["uuid"]) for entry in renderer.gpus] == [(3, uuid)]


def test_names_are_their_process_own_and_may_come_in_an_earlier_chunk() -> None:
    renderer = kernel_renderer()
    lines(name(1, "mine"), name(1, "other", 43), renderer=renderer)
    found = lines(record(KernelKind.KERNEL, kernel(1000, 9)), renderer=renderer)
    assert [event["name"] for event in found] == ["mine"]
    lost = lines(record(KernelKind.KERNEL, kernel(1000, 9, named=77)), renderer=renderer)
    assert [event["name"] for event in lost] == ["kernel whose name was lost"]


def test_kernels_have_their_graph_and_cluster() -> None:
    (event,) = lines(record(KernelKind.KERNEL, kernel(1000, 9, graph=5, cluster=2)))
    assert event["args"]["graph"] == 5
    assert event["args"]["graph_node"] == 3
    assert event["args"]["cluster"] == [2, 2, 2]
    assert "max_active_clusters" not in event["args"], "CUPTI does not say how many"


def node(number: int, original: int = 0, stack: int = 0, time_ns: int = 5) -> bytes:
    return pack_record(KernelKind.NODE, 42, 1, time_ns, NODE.pack(number, original, stack))


def stack(number: int, function: str) -> bytes:
    """A stack of one frame."""
    frame = FRAME.pack(number, 7, len(function)) + function.encode() + b"model.py"
    return record(Kind.FRAME, frame) + record(
        Kind.STACK, STACK.pack(number, 0, 1) + number.to_bytes(8, "little")
    )


def run_in_graph(renderer: GpuRenderer, *chunks: bytes, start_ns: int = 1000) -> str:
    """The function in the stack of a kernel of node 3; a copy of that node has the same."""
    copy = COPY.pack(start_ns, start_ns + 9, 64, 3, 0, 1, 7, 9, 5, 0, 1, 2, 3, 0)
    made = lines(
        *chunks,
        record(KernelKind.KERNEL, kernel(start_ns, 9, graph=5)),
        record(KernelKind.COPY, copy),
        renderer=renderer,
    )
    stacks = {line["id"]: line["frames"] for line in made if line["type"] == "stack"}
    ids = {line["stack"] for line in made if line["type"] in ("gpu_kernel", "transfer")}
    assert all(first_fault(line) is None for line in made)
    (frames,) = (stacks[id] for id in ids)
    return str(frames[0]["function"])


def test_work_in_a_graph_has_the_stack_that_made_its_node() -> None:
    made = stack(77, "forward")
    assert run_in_graph(kernel_renderer(), made, node(1, stack=77), node(2, 1), node(3, 2)) == "forward"
    renderer = kernel_renderer()
    assert run_in_graph(renderer, made) == "(capture not recorded)"
    assert renderer.notes == [
        "2 kernels or copies of CUDA graphs have no line of Python: their capture was not recorded"
    ]
    assert run_in_graph(kernel_renderer(), made, node(3, 2)) == "(capture not recorded)"
    assert run_in_graph(kernel_renderer(), made, node(3)) == "(no Python)"
    assert run_in_graph(kernel_renderer(), made, node(3, stack=1)) == "autograd (line not known)"


def test_a_call_on_a_thread_of_autograd_says_so() -> None:
    of_autograd = CALL.pack(10, 20, 1, RUNTIME, LAUNCH, 43, 8, 0, *[NO_STREAM] * 3)
    made = lines(
        stack(77, "forward"), function(LAUNCH, "cudaLaunchKernel_v7000"), record(KernelKind.CALL, of_autograd)
    )
    stacks = {line["id"]: line["frames"] for line in made if line["type"] == "stack"}
    (called,) = (line for line in made if line["type"] == "userspace")
    assert stacks[called["stack"]] == [{"function": "autograd (line not known)"}]


def test_work_before_an_update_of_its_graph_has_the_stack_from_before() -> None:
    made = stack(77, "first"), stack(88, "second"), node(1, stack=77), node(2, stack=88), node(3, 1)
    update = node(3, 2, stack=1, time_ns=2000)
    assert run_in_graph(kernel_renderer(), *made, update, start_ns=1000) == "first"
    assert run_in_graph(kernel_renderer(), *made, update, start_ns=3000) == "second"


def test_nodes_from_before_what_is_kept_are_known() -> None:
    """Of a recording of the last seconds: a graph is captured once, and replayed for hours."""
    carry = kernel_renderer().carry()
    carry.add(stack(77, "forward") + node(1, stack=77) + node(3, 1))
    renderer = kernel_renderer()
    renderer.resume(carry.carried(), 500)
    assert run_in_graph(renderer) == "forward"


def test_the_oldest_nodes_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "NODES_MAX", 4)
    many = [node(number, stack=77) for number in range(100, 104)]
    made = stack(77, "forward") + node(3, stack=77)
    assert run_in_graph(kernel_renderer(), made, *many[:-1]) == "forward"
    assert run_in_graph(kernel_renderer(), made, *many) == "(capture not recorded)"


def test_a_process_without_python_has_no_stacks() -> None:
    (event,) = lines(node(3), record(KernelKind.KERNEL, kernel(1000, 9, graph=5)))
    assert "stack" not in event


def test_a_copy_has_direction_size_and_memories() -> None:
    copy = COPY.pack(1000, 1700, 4096, 0, 0, 1, 7, 148, 0, 0, 1, 2, 3, 1)
    (event,) = lines(gpu(), record(KernelKind.COPY, copy))
    assert (event["type"], event["name"], event["dur_ns"], event["gpu"]) == ("transfer", "HtoD", 700, 0)
    assert event["launch"] == 148
    wanted = {"size": 4096, "correlation": 148, "from": "pinned", "to": "device", "async": True, "context": 1}
    assert event["args"] == wanted


def test_a_copy_between_gpus_names_the_other() -> None:
    copy = COPY.pack(1000, 1700, 4096, 0, 0, 1, 7, 148, 0, 1, 10, 3, 3, 0)
    (event,) = lines(record(KernelKind.COPY, copy))
    assert (event["name"], event["args"]["to_gpu"]) == ("PtoP", 1)


def test_kinds_that_are_not_known_are_shown_as_numbers() -> None:
    copy = COPY.pack(1000, 1700, 4096, 0, 0, 1, 7, 148, 0, 0, 99, 98, 3, 0)
    (event,) = lines(record(KernelKind.COPY, copy))
    assert (event["name"], event["args"]["from"]) == ("99", "98")
    (unknown,) = lines(record(KernelKind.CALL, call(10, 999, 1)))
    assert unknown["name"] == "runtime function 999"


def test_a_set_has_value_and_size() -> None:
    (event,) = lines(record(KernelKind.SET, SET.pack(1000, 1700, 4096, 0, 0, 1, 7, 148, 0, 255, 3)))
    assert (event["type"], event["name"], event["args"]["value"]) == ("transfer", "set", 255)


NO_STREAM = 0xFFFFFFFF


def test_memory_is_taken_and_given_back_by_its_call() -> None:
    taken = MEMORY.pack(1050, 4096, 0x7F00, 0, 1, NO_STREAM, 8, 1, 3)
    freed = MEMORY.pack(1090, 0, 0x7F00, 0, 1, 7, 9, 2, 3)
    # The memory of a call comes before the call, which is sent at its return.
    sent = record(KernelKind.MEMORY, taken + freed) + record(KernelKind.CALL, call(1000, MALLOC, 8))
    renderer = kernel_renderer()
    chunk = gpu() + function(MALLOC, "cudaMalloc_v3020") + sent
    malloc, alloc, free = lines(chunk, renderer=renderer)
    assert malloc["name"] == "cudaMalloc"
    assert alloc == {
        "ts_ns": 1050, "type": "memory", "name": "alloc", "phase": "I", "pid": 42, "tid": 43, "gpu": 0,
        "args": {
            "size": 4096, "address": 0x7F00, "kind": "device", "context": 1, "correlation": 8,
            "call": "cudaMalloc",
        },
    }  # fmt: skip
    assert (free["name"], free["stream"], free.get("tid")) == ("free", 7, None)
    assert free["args"] == {"address": 0x7F00, "kind": "device", "context": 1, "correlation": 9}
    assert [first_fault(event) for event in (alloc, free)] == [None, None]
    assert renderer.counts(chunk) == {"userspace": 1, "memory": 2}


@pytest.mark.parametrize(
    ("operation", "kind", "expected"),
    [(1, 2, "alloc_host"), (2, 2, "free_host"), (1, 5, "alloc"), (2, 5, "free")],
)
def test_memory_of_the_host_is_distinguished(operation: int, kind: int, expected: str) -> None:
    (event,) = lines(record(KernelKind.MEMORY, MEMORY.pack(1, 64, 5, 0, 1, NO_STREAM, 8, operation, kind)))
    assert event["name"] == expected


def test_memory_is_attributed_to_the_inner_of_two_calls_in_both_apis() -> None:
    driver = record(
        KernelKind.CALL_NAME, (1).to_bytes(4, "little") + (7).to_bytes(4, "little") + b"cuMemAlloc_v2"
    )
    inner = CALL.pack(20, 60, 0, 1, 7, 43, 8, 0, *[NO_STREAM] * 3)
    calls = record(KernelKind.CALL, inner + call(10, MALLOC, 8))
    memory = record(KernelKind.MEMORY, MEMORY.pack(50, 64, 5, 0, 1, NO_STREAM, 8, 1, 3))
    events = lines(driver, function(MALLOC, "cudaMalloc_v3020"), calls, memory)
    assert [event["args"]["call"] for event in events if event["type"] == "memory"] == ["cuMemAlloc_v2"]


def test_calls_that_take_memory_are_not_kept_for_ever() -> None:
    renderer = kernel_renderer()
    many = b"".join(call(10, MALLOC, number) for number in range(kernels._ALLOCATING_MAX + 1))
    lines(function(MALLOC, "cudaMalloc_v3020"), record(KernelKind.CALL, many), renderer=renderer)
    memory = [MEMORY.pack(50, 64, 5, 0, 1, NO_STREAM, number, 1, 3) for number in (0, 1)]
    forgotten, known = lines(record(KernelKind.MEMORY, b"".join(memory)), renderer=renderer)
    assert ("call" in forgotten["args"], "call" in known["args"]) == (False, True)


def test_work_without_an_end_has_no_length() -> None:
    interrupted = kernel(1000, 9)
    interrupted = interrupted[:8] + bytes(8) + interrupted[16:]
    (event,) = lines(record(KernelKind.KERNEL, interrupted))
    assert event["dur_ns"] == 0


def test_a_cupti_with_its_own_clock_is_recognized() -> None:
    (event,) = lines(hello(clock=1), record(KernelKind.KERNEL, kernel(1000, 9)))
    assert event["clock"] == "realtime"


def test_notes_are_kept_once() -> None:
    renderer = kernel_renderer()
    assert lines(record(Kind.NOTE, b"no buffers"), record(Kind.NOTE, b"no buffers"), renderer=renderer) == []
    assert renderer.notes == ["no buffers"]


def test_counts_are_those_of_the_lines() -> None:
    chunk = (
        hello()
        + gpu()
        + record(KernelKind.KERNEL, kernel(1, 1) * 3)
        + record(KernelKind.CALL, call(1, LAUNCH, 1) * 2)
    )
    assert kernel_renderer().counts(chunk) == {"gpu_kernel": 3, "userspace": 2}
    assert len(lines(chunk)) == 5


def test_every_line_is_valid() -> None:
    copy = COPY.pack(1000, 1700, 4096, 0, 0, 1, 7, 148, 0, 1, 10, 3, 3, 0)
    rest = record(KernelKind.COPY, copy) + record(KernelKind.CALL, call(10, 999, 1))
    for event in lines(gpu(), record(KernelKind.KERNEL, kernel(1000, 9, graph=5, cluster=2)), rest):
        assert first_fault(event) is None


@pytest.mark.parametrize(
    ("struct", "ours"),
    [("Hello", HELLO), ("Kernel", KERNEL), ("Copy", COPY), ("Set", SET), ("Call", CALL), ("Memory", MEMORY)],
)
def test_both_sides_have_the_same_sizes_and_kinds(struct: str, ours: Any) -> None:
    header = (NATIVE / "kernel_records.h").read_text()
    sizes = dict(re.findall(r"sizeof\((\w+)\) == (\d+)", header))
    assert int(sizes[struct]) == ours.size
    for kind, number in re.findall(r"(KIND_\w+) = (\d+)", header):
        assert KernelKind[kind.removeprefix("KIND_")] == int(number)


def test_a_command_gets_the_place_of_its_recording(tmp_path: Path) -> None:
    recording = GpuEngine([KernelStream(tmp_path / "k.so", calls="launches")], ring_bytes=1 << 16)
    try:
        environment = recording.environment()
        assert environment["CUDA_INJECTION64_PATH"] == str(tmp_path / "k.so")
        assert environment["TRACEPIPE_GPU_CALLS"] == CALL_RULES["launches"].text()
        assert environment["TRACEPIPE_GPU_CHANNEL"].startswith("tracepipe-gpu-")
        assert recording.collect(is_final=True) == b""
        assert recording.lost() == []
        recording.stop()
        assert recording.is_over()
    finally:
        recording.close()


def test_losses_name_their_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = GpuEngine([KernelStream(tmp_path / "k.so")], ring_bytes=1 << 16)
    try:
        before_ns = time.monotonic_ns()
        recording.lost()
        monkeypatch.setattr(
            recording.channel, "_new_dropped", lambda: [(KernelKind.KERNEL, 3), (KernelKind.ANY, 4)]
        )
        kernels_lost, any_lost = recording.lost()
    finally:
        recording.close()
    assert (kernels_lost.layer, kernels_lost.count) == ("gpu_kernel", 3)
    assert before_ns <= kernels_lost.start_ns <= kernels_lost.end_ns <= time.monotonic_ns()
    assert (any_lost.layer, any_lost.count, any_lost.reason) == (None, 4, "CUPTI had no buffer")


def layout(size: int, kind: int, record_bytes: int, *fields: tuple[int, int, int]) -> bytes:
    described = [kernels.FIELD.pack(*one) for one in fields]
    payload = kernels.LAYOUT.pack(10, size, kind, record_bytes) + bytes(record_bytes) + b"".join(described)
    return record(KernelKind.LAYOUT, payload)


@pytest.mark.parametrize(
    "made",
    [
        layout(0, KernelKind.KERNEL, KERNEL.size),
        layout(64, KernelKind.KERNEL, KERNEL.size - 1),
        layout(64, 1, 8),
        layout(64, KernelKind.KERNEL, KERNEL.size, (60, 0, 8)),
        layout(64, KernelKind.KERNEL, KERNEL.size, (0, KERNEL.size - 4, 8)),
        layout(64, KernelKind.KERNEL, KERNEL.size, *[(0, 0, 8)] * 65),
        record(Kind.KEPT, (10).to_bytes(4, "little") + bytes(60)),
        layout(64, 0, 0) + record(Kind.KEPT, (10).to_bytes(64, "little") + b"\1" * 8),
    ],
)
def test_a_layout_or_buffer_that_no_library_writes_is_refused(made: bytes) -> None:
    renderer = kernel_renderer()
    (line,) = renderer.render(hello() + made).texts
    assert (json.loads(line)["type"], renderer.losses) == ("loss", {"unknown": 1})


@pytest.mark.parametrize("is_recorded", [True, False])
def test_an_error_that_a_kernel_caused_names_the_first_launch_without_an_end(is_recorded: bool) -> None:
    frame = FRAME.pack(7, 41, 4) + b"steptrain.py"
    stack = record(Kind.FRAME, frame) + record(Kind.STACK, STACK.pack(5, 0, 1) + (7).to_bytes(8, "little"))
    functions = function(LAUNCH, "cudaLaunchKernel_v7000") + function(MALLOC, "cudaDeviceSynchronize_v3020")
    calls = [CALL.pack(at, at + 1, 5, RUNTIME, LAUNCH, 43, at, 0, *[NO_STREAM] * 3) for at in (10, 20, 30)]
    calls += [call(40, MALLOC, 40, result=700), call(50, MALLOC, 50, result=719)]
    unended = kernel(0, 20)[:8] + bytes(8) + kernel(0, 20)[16:]
    ran = [kernel(1000, 10), *([unended] if is_recorded else [])]
    renderer = kernel_renderer()
    lines(
        hello(), name(1, "add(int)"), stack, functions,
        record(KernelKind.CALL, b"".join(calls)), record(KernelKind.KERNEL, b"".join(ran)), renderer=renderer,
    )  # fmt: skip
    kernel_name = "add" if is_recorded else "of a kernel whose name is not known"
    assert renderer.cuda_errors == [
        "CUDA error in process 42: an illegal memory access. cudaDeviceSynchronize returned it first (700). "
        f"The first launch without a recorded end is {kernel_name} (launch 20, train.py:41 step)."
    ]
